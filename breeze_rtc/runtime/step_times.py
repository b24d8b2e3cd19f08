"""How long this machine's steps take: measured when an engine first starts here, kept for the next start.

The first streams of an engine that knows nothing are scheduled blindly, and all are let in.  So at its first start an
engine speaks to nobody for a few seconds, in every batch size, and what that took becomes the scheduler's cost table.
The table goes into the user's cache folder under the name of what it was measured for, and again, with what serving
has taught, when the engine ends.  What graphs take is not in it: each start captures and times them anew, and steps run
without them until then.  No file, a broken one and a full disk all leave an engine that works.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median_low
from tempfile import NamedTemporaryFile, gettempdir

import numpy as np
import torch

from breeze_rtc import __version__
from breeze_rtc.clock import SECOND, Clock
from breeze_rtc.media.opus import SpeechEncoder
from breeze_rtc.models.speech_model import SpeechModel, TextSegment
from breeze_rtc.runtime.executor import Executor
from breeze_rtc.scheduling.admission import STEADY_CHUNK, bucket_of
from breeze_rtc.scheduling.chunking import LADDER
from breeze_rtc.scheduling.costs import CostKey, CostTable, size_of
from breeze_rtc.scheduling.slots import pages_for
from breeze_rtc.scheduling.step import Row, Stage, Step

log = logging.getLogger(__name__)

FORMAT = 3
BUDGET_NS = 5 * SECOND
"""A measurement ends after this, the small batches being done first; what is left is guessed from those, and learnt."""
TELL_EVERY = 0.02
"""Share of a measurement that is worth telling."""
CODEC_RUNS = 4
"""Times that a codec is tried on the CPU: the first pay for what is made and loaded once."""
LONGEST_NS = 60 * SECOND
"""No step takes longer; a file that says so is broken."""
MAX_PROMPT = 256
"""Text tokens of one stream in a measurement."""
TEXT = "Nobody hears this. It is said to find out how long it takes. "


def known_or_measured(
    model: SpeechModel,
    executor: Executor,
    clock: Clock,
    *,
    threads: int,
    streams: int,
    told: Callable[[float], None],
) -> tuple[CostTable, Callable[[], None]]:
    """The cost table for this model on this machine, and what keeps it, to be called when the engine ends.

    told(share): called as a measurement goes on, with how much of it is done, 0 to 1; not called when a file is read.
    """
    made_for = conditions(model, executor.device, threads) | {"streams": str(streams)}
    path = _folder() / f"{hashlib.sha256(json.dumps(made_for).encode()).hexdigest()[:16]}.json"
    costs = load(path, made_for)
    if costs is None:
        began_at = clock.now()
        costs = measure(model, executor, clock, streams=streams, told=told)
        log.info("measured this machine's steps in %.1f s", (clock.now() - began_at) / SECOND)
        save(path, made_for, costs)
    return costs, lambda: save(path, made_for, costs)


def codec_percent(model: SpeechModel, clock: Clock) -> int:
    """Time that the codec takes on the CPU to make one listener's sound, in percent of the time it takes to hear it.

    In chunks as of a stream in full flow, alone on the machine: it will not be faster than that.  Leaves the codec on
    the CPU.
    """
    codec = model.codec.to("cpu").eval()
    times = []
    with torch.inference_mode():
        state = codec.new_state(1)
        codes = torch.zeros(1, model.config.depth.codebooks, STEADY_CHUNK, dtype=torch.int64)
        slots = torch.zeros(1, dtype=torch.int64)
        for _ in range(CODEC_RUNS):
            began_ns = clock.now()
            codec(codes, state, slots)
            times.append(clock.now() - began_ns)
    return 100 * min(times) * model.sample_rate // (STEADY_CHUNK * model.frame_samples * SECOND)


# ---- the file --------------------------------------------------------------------------------------------------------


def conditions(model: SpeechModel, device: torch.device, threads: int) -> dict[str, str]:
    """All that step times depend on.  Of a model, that is the shapes and not the values."""
    shapes = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        shapes.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return {
        "breeze_rtc": __version__,
        "model": shapes.hexdigest(),
        "has_graphs": str(bool(model.graphs)),
        "codec": next(iter(model.codec.parameters())).device.type,
        "device": f"{device.type} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type,
        "processor": _processor(),
        "threads": str(threads),
        "torch": torch.__version__,
    }


def load(path: Path, made_for: dict[str, str]) -> CostTable | None:
    """The table in a file; None, and said why, when there is none that can be used."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("the step times in %s cannot be read and are measured again: %s", path, error)
        return None
    try:
        document = json.loads(text)
        if document["format"] != FORMAT or document["made_for"] != made_for:
            log.warning("the step times in %s are of another machine, model or version; they are measured again", path)
            return None
        costs = CostTable.from_state(document["table"])
        if any(duration_ns > LONGEST_NS for *_, durations in document["table"]["kinds"] for duration_ns in durations):
            raise ValueError("a step of more than a minute")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        log.warning("the step times in %s are broken and are measured again: %r", path, error)
        return None
    return costs


def save(path: Path, made_for: dict[str, str], costs: CostTable) -> None:
    """Put the table into the file, whole or not at all.  A disk that is full or read-only is worth one line."""
    document = {"format": FORMAT, "made_for": made_for, "table": costs.state_at_start()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.stem, suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            temporary = Path(file.name)
            try:
                json.dump(document, file)
                file.flush()
                temporary.replace(path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        log.warning("the step times cannot be kept in %s; the next start measures them again: %s", path, error)


def _folder() -> Path:
    """Where a user's caches are (XDG Base Directory Specification): a relative path there is to be ignored."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not named.is_absolute():
        try:
            named = Path.home() / ".cache"
        except RuntimeError:
            # A user without a home, as in some containers.
            named = Path(gettempdir()) / f"cache-{os.getuid()}"
    return named / "breeze_rtc" / "step_times"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# ---- the measurement -------------------------------------------------------------------------------------------------


def measure(
    model: SpeechModel,
    executor: Executor,
    clock: Clock,
    *,
    streams: int,
    told: Callable[[float], None] = lambda share: None,
    budget_ns: int = BUDGET_NS,
) -> CostTable:
    """Run every kind of step that the executor's specs allow for `streams` slots, as far as there is time, and learn
    what each takes.  No stream may be open.
    """
    ends_at = clock.now() + budget_ns
    seen: dict[CostKey, list[int]] = {}
    batches = sorted({bucket for spec in executor.specs.values() for bucket in spec.buckets if bucket <= streams})
    doubles = [rows for rows in batches if rows & (rows - 1) == 0]
    between = [rows for rows in batches if rows & (rows - 1)]
    # What is guessed worst comes first: one of each, in powers of two; then more and larger; then what lies between.
    passes = [(rows, LADDER[:-1]) for rows in doubles] + [(rows, LADDER * 2) for rows in doubles + between]
    told_of = 0.0
    told(told_of)
    for rows, chunks in passes:
        for key, duration_ns in _Rehearsal(model, executor, clock, rows).run(chunks):
            seen.setdefault(key, []).append(duration_ns)
            now = clock.now()
            share = min(1.0, 1 - (ends_at - now) / budget_ns)
            if share - told_of >= TELL_EVERY:
                told_of = share
                told(share)
            if now > ends_at:
                break
        for stream in range(rows):
            executor.close(stream)
        if clock.now() > ends_at:
            break
    log.info("measured %d kinds of step", len(seen))
    told(1.0)
    # The first of several paid for what is made and loaded once.
    settled = {key: times[1:] or times for key, times in seen.items()}
    costs = CostTable({key: median_low(times) for key, times in settled.items()})
    for (stage, bucket, size), times in settled.items():
        for duration_ns in times:
            costs.observe(stage, bucket, size, duration_ns)
    # How well it predicted itself is no figure of the server's.
    return CostTable.from_state(costs.state())


class _Rehearsal:
    """As many streams as a batch has rows, led through the stages side by side."""

    def __init__(self, model: SpeechModel, executor: Executor, clock: Clock, rows: int) -> None:
        self._executor = executor
        self._clock = clock
        self._streams = list(range(rows))
        frontend = model.frontend()
        segments = frontend.push(TEXT) + frontend.end()
        self._words = [token for segment in segments if not segment.row for token in segment.tokens]
        self._encoders = [SpeechEncoder(executor.sample_rate) for _ in self._streams]
        # Positions and pages of each stream; pages given out.
        self._positions = [0] * rows
        self._pages = [0] * rows
        self._pages_given = 0
        self._steps = 0
        # A row has ended or failed: no more can be made of this batch.
        self._is_over = False

    def run(self, chunks: tuple[int, ...]) -> Iterator[tuple[CostKey, int]]:
        """(kind, duration) of one step after the other, with sound in chunks of so many frames."""
        executor, rows = self._executor, len(self._streams)
        for stream in self._streams:
            # Of one row each: with guidance a stream would be two.
            executor.open(stream, stream, seed=stream, sampling={"cfg_scale": 1.0})
        tokens = 0
        for size in _sizes(executor.specs[Stage.TEXT].max_tokens):
            each = size // rows
            if each and tokens + each <= MAX_PROMPT:
                for stream in self._streams:
                    words = tuple(self._words[k % len(self._words)] for k in range(each))
                    executor.add_text(stream, TextSegment(words, tuple(range(tokens + 1, tokens + each + 1))))
                yield from self._step(Stage.TEXT, tokens, each)
                tokens += each
        for stream in self._streams:
            executor.end_text(stream)
        if executor.feed == "per_frame":
            yield from self._step(Stage.PREFILL, 0, 1)
        else:
            start = 0
            for size in [*_sizes(executor.specs[Stage.PREFILL].max_tokens), tokens * rows]:
                each = min(max(1, size // rows), tokens - start)
                if each:
                    yield from self._step(Stage.PREFILL, start, each)
                    start += each
        yield from self._step(Stage.DEPTH, 0, 1)
        made, decoded = 1, 0
        for frames in chunks:
            while made < decoded + frames and not self._is_over:
                yield from self._step(Stage.BACKBONE, made, 1)
                yield from self._step(Stage.DEPTH, made, 1)
                made += 1
            yield from self._step(Stage.CODEC, decoded, frames)
            decoded += frames

    def _step(self, stage: Stage, start: int, count: int) -> Iterator[tuple[CostKey, int]]:
        """Take all rows through a stage, in as few steps as it allows."""
        spec = self._executor.specs[stage]
        most = spec.max_rows
        if spec.max_tokens:
            most = max(1, min(most, spec.max_tokens // count))
        for first in range(0, len(self._streams), most):
            if self._is_over:
                return
            streams = self._streams[first : first + most]
            rows = tuple(Row(stream, stream, start, count, self._new_pages(stage, stream, count)) for stream in streams)
            step = Step(self._steps, stage, rows, bucket_of(spec, len(rows)))
            self._steps += 1
            began_at = self._clock.now()
            result = self._executor.run(step)
            self._is_over = any(row.ended or row.error for row in result.rows)
            if self._is_over:
                return
            if stage is Stage.CODEC:
                # The driver counts the encoding as part of the step.
                for stream in streams:
                    sound, _ = self._executor.take(stream)
                    self._encoders[stream].encode(np.rint(sound * 32_767).astype(np.int16))
            units = count if stage is Stage.CODEC else count * len(rows)
            yield (stage, step.bucket, size_of(stage, units)), self._clock.now() - began_at

    def _new_pages(self, stage: Stage, stream: int, count: int) -> tuple[int, ...]:
        if stage is not Stage.PREFILL and stage is not Stage.BACKBONE:
            return ()
        self._positions[stream] += count
        positions = min(self._positions[stream], self._executor.kv_positions or self._positions[stream])
        needed = pages_for(positions, self._executor.page_tokens, 1) - self._pages[stream]
        self._pages[stream] += needed
        pages = tuple(range(self._pages_given, self._pages_given + needed))
        self._pages_given += needed
        return pages


def _sizes(limit: int) -> Iterator[int]:
    """Totals of tokens that are told apart: 16 and its doubles."""
    size = size_of(Stage.TEXT, 1)
    while size <= limit:
        yield size
        size *= 2
