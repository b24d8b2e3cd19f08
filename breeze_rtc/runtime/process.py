"""The engine's own process, or thread: load what `Start` asks for, say `Ready`, drive until the other side hangs up.

    python -P -m breeze_rtc.runtime.process FD

FD is one end of a connected socket.  The process lives as long as the other end is open: when the media process ends,
however it ends, the kernel closes its end and this one goes too.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from breeze_rtc.clock import MS, MonotonicClock
from breeze_rtc.errors import BadRequest, BreezeError, PeerError
from breeze_rtc.runtime.driver import Driver, Hangup, Line, Speaker
from breeze_rtc.runtime.messages import (
    Loading,
    Measuring,
    Message,
    MessageReader,
    Open,
    Ready,
    Start,
    StartFailed,
    encode,
)
from breeze_rtc.scheduling.slots import pages_for

if TYPE_CHECKING:
    from breeze_rtc.models.speech_model import SpeechModel
    from breeze_rtc.runtime.executor import Executor

log = logging.getLogger(__name__)

RECEIVE_BYTES = 1 << 18
PAGE_TOKENS = 16
MAX_SPEECH_S = 1800
"""No stream goes on longer, whatever the model says."""
MAX_SPEECH_FULL_ATTENTION_S = 60
"""The same for a model that looks back at all of its speech, so that every second of it costs memory, which is promised
to a stream when it opens."""


VOICES_BYTES = 1 << 30
"""Memory for the keys and values of cloned voices: about 60 of ten seconds, of Breeze TTS 2.  Those used last stay."""
VOICES, VOICE_POSITIONS = 64, 512
"""No more than so many voices of such a length, where a position takes less."""


class SocketLine:
    """A `Line` over a stream socket.  What the other side does not read waits here, not in the driver."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._reader = MessageReader()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        # Encoded messages the kernel had no room for.  Bounded by what the driver lets a consumer leave unread.
        self._unsent: deque[memoryview] = deque()

    def receive(self, timeout_ns: int | None) -> list[Message]:
        """See `Line`.  Returns early, with nothing, when room to send came first.  Raises PeerError for no message."""
        self._flush()
        if timeout_ns != 0:
            self._poll.modify(self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            self._poll.poll(None if timeout_ns is None else math.ceil(timeout_ns / MS))
        try:
            data = self._connection.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Hangup from error
        if not data:
            raise Hangup
        return self._reader.feed(data)

    def send(self, message: Message) -> None:
        self._unsent.append(memoryview(encode(message)))
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._connection.send(self._unsent[0])
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            raise Hangup from error


class TraceFile:
    """The scheduler's inputs as lines of a file, each written at once: what an engine did before it died is what is
    wanted.

    A disk that fills up ends the trace, not the speech.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError when the file cannot be written."""
        self._path = path
        self._file: TextIO | None = path.open("w", encoding="utf-8", buffering=1)

    def write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line)
        except OSError as error:
            log.error("the trace %s ends here: %s", self._path, error)
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            log.error("the end of the trace %s is lost: %s", self._path, error)


def serve(connection: socket.socket, *, loaded: Callable[[], None] = lambda: None) -> None:
    """Be an engine for whoever holds the other end of `connection`; returns when they hang up.

    loaded: called once everything is there that stays.
    """
    with connection, ExitStack() as resources:
        line = SocketLine(connection)
        try:
            start = _first(line)
            try:
                driver, ready = build(start, line, resources)
            except BreezeError as error:
                line.send(StartFailed(type(error).__name__, str(error)))
            except Exception as error:
                log.exception("the engine cannot start")
                line.send(StartFailed("EngineClosed", f"the engine cannot start: {type(error).__name__}: {error}"))
            else:
                loaded()
                line.send(ready)
                driver.run()
        except Hangup:
            pass


def _first(line: SocketLine) -> Start:
    while True:
        for message in line.receive(None):
            if isinstance(message, Start):
                return message
            raise PeerError("engine_message", f"the first message is {type(message).__name__}, not Start")


def build(start: Start, line: Line, resources: ExitStack) -> tuple[Driver, Ready]:
    """Load the model and join the parts.  Raises CheckpointError, or BadRequest for a device that is not there and a
    trace that cannot be written.

    What must be closed in the end goes into `resources`.
    """
    # Torch takes seconds to import; a peer that sends no Start never needs it.
    import torch

    from breeze_rtc.models.quantised import check_kind
    from breeze_rtc.models.speech_model import SpeechModel
    from breeze_rtc.runtime.executor import Executor, kept_positions
    from breeze_rtc.runtime.sentence_executor import Ensemble, sentence_voices
    from breeze_rtc.runtime.voice_store import VoiceStore, refused
    from breeze_rtc.scheduling.costs import CostTable
    from breeze_rtc.scheduling.policy import Policy
    from breeze_rtc.scheduling.scheduler import PROMPT_TOKENS, Scheduler
    from breeze_rtc.scheduling.trace import TraceWriter

    trace = None
    if start.trace:
        try:
            trace = TraceWriter(resources.enter_context(closing(TraceFile(Path(start.trace)))).write)
        except OSError as error:
            raise BadRequest(f"the trace {start.trace} cannot be written: {error.strerror}") from error
    torch.set_num_threads(start.threads)
    check_kind(start.weights)
    if start.codec_device not in {"", "cpu"}:
        raise BadRequest(f"--codec-device {start.codec_device}: only cpu is known, and nothing for where the rest runs")
    if start.device.startswith("cuda") and not torch.cuda.is_available():
        raise BadRequest(f"--device {start.device}: {no_cuda()}")
    model = SpeechModel.load(
        start.model,
        device=start.device,
        weights=start.weights,
        told=lambda share: line.send(Loading("Reading the weights", share)),
    )
    max_speech_s = MAX_SPEECH_FULL_ATTENTION_S if model.config.backbone.window is None else MAX_SPEECH_S
    max_frames = max_speech_s * model.sample_rate // model.frame_samples
    # A stream with guidance takes the pages of two; those that must wait for pages are told so by admission.
    positions = kept_positions(model.config, PAGE_TOKENS) or max_frames + PROMPT_TOKENS
    kv_pages = start.max_streams * pages_for(positions, PAGE_TOKENS, 1)
    clock = MonotonicClock()
    codec_apart = bool(start.codec_device)
    if codec_apart and start.measures:
        from breeze_rtc.runtime.step_times import codec_percent
        from breeze_rtc.scheduling.admission import MAX_LOAD_PERCENT

        percent = codec_percent(model, clock)
        if percent > MAX_LOAD_PERCENT:
            log.warning(
                "the codec on the CPU would take %d %% of the time of one listener with --threads %d, of %d %% that "
                "it may: it runs on %s instead",
                percent,
                start.threads,
                MAX_LOAD_PERCENT,
                start.device,
            )
            codec_apart = False
    executor = Executor(
        model,
        max_streams=start.max_streams,
        kv_pages=kv_pages,
        page_tokens=PAGE_TOKENS,
        prefix_pages=_pages_of_own(model) + (_prefix_pages(model) if start.voices and model.clones else 0),
        device=start.device,
        codec_apart=codec_apart,
    )
    beside = sentence_voices(model)
    voices = VoiceStore(model, executor, Path(start.voices) if start.voices else None)
    resources.callback(voices.close)
    voices.warm()
    costs = CostTable()
    if start.measures:
        from breeze_rtc.runtime.step_times import known_or_measured

        costs, keep = known_or_measured(
            model,
            executor,
            clock,
            threads=start.threads,
            streams=start.max_streams,
            told=lambda share: line.send(Measuring(share)),
        )
        resources.callback(keep)
    if executor.device.type == "cuda" and executor.feed == "prefix":
        # It takes a minute in which there is a voice already, if one that fewer can share.
        threading.Thread(target=_record_graphs, args=(executor,), name="breeze-graphs", daemon=True).start()
    scheduler = Scheduler(
        specs=executor.specs,
        sample_rate=executor.sample_rate,
        frame_samples=executor.frame_samples,
        slots=start.max_streams,
        kv_pages=kv_pages,
        page_tokens=PAGE_TOKENS,
        kv_positions=executor.kv_positions,
        costs=costs,
        policy=Policy.from_state(start.policy) if start.policy else Policy(),
        trace=trace,
    )

    def speaker(message: Open) -> Speaker:
        if message.voice not in beside:
            return voices.speaker(message)
        if message.instruction or message.language:
            raise refused(f"the voice {message.voice}", message)
        return Speaker(beside[message.voice][1](), voice=message.voice)

    driver = Driver(
        line=line,
        clock=clock,
        scheduler=scheduler,
        executor=Ensemble(executor, {name: other for name, (other, _) in beside.items()}) if beside else executor,
        speaker=speaker,
        max_frames=max_frames,
        rows=voices.rows,
        voices=voices,
        taken_over=executor.taken_over,
    )
    ready = Ready(
        start.model,
        executor.sample_rate,
        executor.frame_samples,
        (*model.voices, *beside),
        model.licence_note,
        executor.feed,
        summary(start.model, model, executor),
        model.clones,
        scheduler.stats(clock.now()).frame_alone_ns,
    )
    return driver, ready


def no_cuda() -> str:
    """Why there is no CUDA device, and what to do."""
    import torch

    if torch.version.cuda is None:
        return (
            f"this is torch {torch.__version__}, which is built without CUDA; install one that is, for example "
            "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        )
    needs = f"torch {torch.__version__} finds no CUDA device, and needs a driver for CUDA {torch.version.cuda}"
    return f"{needs}; what does nvidia-smi say?"


def summary(name: str, model: SpeechModel, executor: Executor) -> str:
    """What was loaded, where, and the memory that it holds there."""
    import torch

    parameters = sum(tensor.numel() for tensor in model.state_dict().values() if tensor.dim() > 1)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    state = executor.state_bytes
    said = (
        f"{name}: {parameters / 1e6:,.1f} M parameters, {_size(weights)} of weights and {_size(state)} of state on "
        f"{executor.device}"
    )
    if executor.codec_apart:
        said += ", the codec on the CPU"
    if executor.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(executor.device)
        card = torch.cuda.get_device_name(executor.device)
        said += f", {card}: {(total - free) / 1e9:.1f} of {total / 1e9:.1f} GB in use"
    return said


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _record_graphs(executor: Executor) -> None:
    from breeze_rtc.runtime.graphs import CudaRecorder

    try:
        executor.record_graphs(CudaRecorder())
    except Exception:
        log.exception("not all CUDA graphs could be captured; the other steps run eagerly, several times slower")


def freeze_heap() -> None:
    """What is there now is never garbage: spare the collector looking at it again, which takes longer than a slot.

    Only for whose process it is, once all is loaded.  A full collection with torch loaded stops every thread for 35 to
    70 ms, and the next ones are due whenever a quarter as many objects have come as there are.
    """
    gc.collect()
    gc.freeze()


def _pages_of_own(model: SpeechModel) -> int:
    """Pages for what the model's own voices begin with."""
    from breeze_rtc.runtime.voice_store import begins

    lengths = [sum(len(segment.tokens) for segment in begins(model, voice)) for voice in model.voices]
    return sum(pages_for(length, PAGE_TOKENS, 1) for length in lengths)


def _prefix_pages(model: SpeechModel) -> int:
    """Pages for what cloned voices have said before their streams begin."""
    block = model.config.backbone.block
    position = model.config.backbone.layers * 2 * block.kv_heads * block.head_dim
    page_bytes = PAGE_TOKENS * position * model.depth.table.weight.element_size()
    return min(VOICES_BYTES // page_bytes, VOICES * pages_for(VOICE_POSITIONS, PAGE_TOKENS, 1))


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="breeze_rtc engine: %(message)s")
    serve(socket.socket(fileno=int(sys.argv[1])), loaded=freeze_heap)
    # Everything is closed and said; torch would take a second to be taken apart, and whoever closed the engine waits.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
