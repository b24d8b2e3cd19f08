"""What this machine makes of the full-size model: one command, nothing to download.

    python bench/gpu.py                                  on a CUDA machine: the 2.9 B model with random weights
    python bench/gpu.py --model /path/to/Breeze-TTS-2    the published weights, their text encoded as published
    python bench/gpu.py --device cpu --size tiny         the same code on a CPU, graphs emulated: a check of the code

In this order, each part printed as soon as it is known:

1. builds the model and captures every graph, and says what that takes;
2. speaks with the graphs and without, and compares codes and sound;
3. measures every kind of step the scheduler may choose, next to the time in which the device can read the weights and
   the keys and values that the step reads (`limit`, at the bandwidth of a plain copy, measured here); and the depth
   decoder's graph with its passes eager, compiled by torch, and fused in kernels of our own;
4. writes these times as the cost table that the simulator reads (`--costs FILE`, here and of `capacity.py`), and
   simulates what part 5 then measures;
5. starts the engine as it serves, in its own process, and loads it: closed loops of 1 to 64 requests, and requests that
   arrive at random; each request is Seed-TTS test-en in length, is cut at a length drawn beforehand, is made as fast as
   the engine will, and its client plays what comes as it comes;
6. where transformers is installed: the same sizes from its classes (Qwen3, CSM), eagerly, one request at a time as the
   published code runs them, in the same run on the same device.

First packet: from sending the request to the first sound at the client, the encoding of Opus included.  A potential gap
is a chunk that a client without a buffer would have missed.

    python bench/gpu.py [--quick] [--seed N] [--json FILE] [--costs FILE] [--weights int8|fp8] [--streams N]
                        [--requests N]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import platform
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gpu_reference import reference_times
from simulated import COMMIT, at, lengths, poisson, speech
from simulated import run as simulate

from breeze_rtc.clock import MS, SECOND, MonotonicClock
from breeze_rtc.errors import BreezeError, Overloaded, StepFailed
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.runtime import frame_graphs
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.runtime.executor import Executor
from breeze_rtc.runtime.graphs import CudaRecorder, EmulatedRecorder
from breeze_rtc.runtime.process import MAX_SPEECH_FULL_ATTENTION_S, PAGE_TOKENS, no_cuda, summary
from breeze_rtc.runtime.step_times import measure
from breeze_rtc.scheduling.admission import bucket_of
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.machines import fitted, write_costs
from breeze_rtc.scheduling.metrics import (
    Delivery,
    Ending,
    audio_rate,
    first_packet_ns,
    has_potential_gap,
    real_time_factor,
    received_ns,
    required_prebuffer_ns,
)
from breeze_rtc.scheduling.scheduler import PROMPT_TOKENS
from breeze_rtc.scheduling.slots import pages_for
from breeze_rtc.scheduling.step import Row, Stage, Step
from breeze_rtc.scheduling.stream import Priority

SIZES = {"full": "breeze-tts-2-random", "mid": "mid", "tiny": "tiny"}
SENTENCE = "The listener's real position tells the scheduler how much time there is before the sound runs out. "
LOOPS = (1, 4, 8, 16, 32, 64)
POISSON_SHARES = (0.5, 0.8)
"""Of the requests per second that the largest closed loop got through."""
COMPARED_FRAMES = 24
PUBLISHED_MS = {1: "40", 16: "38 / 52"}
"""First packet that others publish of this model on one H100, by closed loop: p50 or p50 / p95."""


# ---- part 1 and 2: the model, with graphs and without ----------------------------------------------------------------


def kv_pages(streams: int, sample_rate: int, frame_samples: int) -> int:
    """As the engine reserves them for a model that looks back at all of its speech."""
    frames = MAX_SPEECH_FULL_ATTENTION_S * sample_rate // frame_samples
    return streams * pages_for(frames + PROMPT_TOKENS, PAGE_TOKENS, 1)


class Speaker:
    """Leads streams of one text through the stages side by side, as a scheduler would that has no one else to serve."""

    def __init__(self, model: SpeechModel, executor: Executor, streams: int) -> None:
        self._executor = executor
        self._streams = list(range(streams))
        self._steps = 0
        self._positions = self._pages_given = self._pages = 0
        frontend = model.frontend()
        self._segments = [s for s in frontend.push(SENTENCE) + frontend.end() if not s.row]

    def speak(self, frames: int, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (frames, streams, K) and sound (streams, samples)."""
        executor, slots = self._executor, torch.tensor(self._streams)
        codes, sound = [], []
        tokens = 0
        for stream in self._streams:
            executor.open(stream, stream, seed=stream, sampling={"cfg_scale": 1.0})
            tokens = sum(executor.add_text(stream, segment) for segment in self._segments)
            executor.end_text(stream)
        self._step(Stage.TEXT, 0, tokens)
        self._step(Stage.PREFILL, 0, tokens)
        for frame in range(frames):
            if frame:
                self._step(Stage.BACKBONE, frame, 1)
            self._step(Stage.DEPTH, frame, 1)
            codes.append(executor.state.codes[slots].cpu())
        for start in range(0, frames, chunk):
            self._step(Stage.CODEC, start, min(chunk, frames - start))
        for stream in self._streams:
            sound.append(torch.from_numpy(executor.take(stream)[0]))
            executor.close(stream)
        return torch.stack(codes), torch.stack(sound)

    def _step(self, stage: Stage, start: int, count: int) -> None:
        new_pages = 0
        if stage in {Stage.PREFILL, Stage.BACKBONE}:
            self._positions += count
            new_pages = pages_for(self._positions, PAGE_TOKENS, 1) - self._pages
            self._pages += new_pages
        rows = []
        for stream in self._streams:
            pages = tuple(range(self._pages_given, self._pages_given + new_pages))
            self._pages_given += new_pages
            rows.append(Row(stream, stream, start, count, pages))
        result = self._executor.run(
            Step(self._steps, stage, tuple(rows), bucket_of(self._executor.specs[stage], len(rows)))
        )
        self._steps += 1
        faults = [row.error or "it has ended" for row in result.rows if row.error or row.ended]
        if faults:
            raise StepFailed(stage.name.lower(), faults[0])


def compare(model: SpeechModel, executor: Executor, streams: int, frames: int) -> dict[str, float]:
    """The same streams from graphs and eagerly: how many of the codes agree, until the first that does not, and how far
    apart the sound of the frames before it is."""
    chunk = 2
    replayed, its_sound = Speaker(model, executor, streams).speak(frames, chunk)
    graphs, executor.graphs = executor.graphs, None
    try:
        eager, eager_sound = Speaker(model, executor, streams).speak(frames, chunk)
    finally:
        executor.graphs = graphs
    same = (replayed == eager).all(2).all(1)
    agreeing = frames if bool(same.all()) else int(same.int().argmin())
    samples = agreeing * model.frame_samples
    apart = (its_sound[:, :samples] - eager_sound[:, :samples]).abs()
    return {
        "streams": streams,
        "frames": frames,
        "equal_codes": float((replayed == eager).float().mean()),
        "equal_frames": agreeing,
        "sound_difference": float(apart.max()) if apart.numel() else math.nan,
        "sound_peak": float(eager_sound.abs().max()),
    }


def codec_in_tf32(model: SpeechModel, executor: Executor, frames: int) -> float:
    """How many dB below the sound the error is that the codec would make if its products were computed in TF32."""
    graphs, executor.graphs = executor.graphs, None
    sounds = []
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            sounds.append(Speaker(model, executor, 1).speak(frames, 1))
    finally:
        torch.set_float32_matmul_precision("highest")
        executor.graphs = graphs
    (codes, exact), (other_codes, rounded) = sounds
    if not torch.equal(codes, other_codes):
        return math.nan
    error = (exact.double() - rounded.double()).square().mean()
    return float(10 * torch.log10(exact.double().square().mean() / error))


# ---- part 3: what a step takes, and the least it could ---------------------------------------------------------------


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a plain copy reads and writes."""
    size = (1 << 30) if device.type == "cuda" else (64 << 20)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    clock = MonotonicClock()
    times = []
    for _ in range(5):
        _wait(device)
        began_ns = clock.now()
        target.copy_(source)
        _wait(device)
        times.append(clock.now() - began_ns)
    return 2 * size * SECOND / min(times)


def weight_bytes(model: SpeechModel) -> dict[Stage, int]:
    """Bytes of weights that one step of each stage has to read, however many rows it has."""

    def of(*prefixes: str) -> int:
        return sum(t.nbytes for name, t in model.state_dict().items() if name.startswith(prefixes))

    passes = model.config.depth.codebooks - 1
    layers = of("depth.layers.", "depth.norm", "depth.projection")
    backbone = of("backbone.layers.", "backbone.norm")
    return {
        Stage.TEXT: of("text.layers.", "text.norm", "text.projection"),
        Stage.PREFILL: backbone + of("backbone.output"),
        Stage.BACKBONE: backbone + of("backbone.output"),
        # Each pass reads all layers anew, for they do not stay in any cache, and one head.
        Stage.DEPTH: passes * layers + of("depth.heads"),
        Stage.CODEC: of("codec.") - of("codec.codebooks"),
    }


def limit_ns(weights: dict[Stage, int], model: SpeechModel, stage: Stage, rows: int, bytes_per_s: float) -> int:
    """The time in which a step can read its weights and, for BACKBONE, the keys and values of 400 positions a row."""
    block, layers = model.config.backbone.block, model.config.backbone.layers
    size = weights[stage]
    if stage is Stage.BACKBONE:
        of_a_number = model.depth.table.weight.element_size()
        size += rows * 400 * 2 * layers * block.kv_heads * block.head_dim * of_a_number
    return round(size * SECOND / bytes_per_s)


def depth_ways(executor: Executor, limits: dict[int, int]) -> dict[str, dict[str, float]]:
    """ms of a depth step's graph by rows and by the way its passes run; limits: ns, of each number of rows."""
    graphs = executor.graphs
    found: dict[str, dict[str, float]] = {}
    if graphs is None or not graphs.depth_ways:
        print("   Depth decoder: only a graph on a card has more than one way to run it", flush=True)
        return found
    for rows, limit in limits.items():
        times = {name: ns / MS for name, ns in graphs.depth_times(("depth", rows, 0)).items()}
        found[str(rows)] = times
        said = ", ".join(f"{name} {ms:.3f} ({ms * MS / limit:.1f} times the limit)" for name, ms in times.items())
        print(f"   Depth decoder, {rows:2} rows, ms: {said}", flush=True)
    return found


def step_rows(costs: CostTable) -> list[tuple[Stage, int, int, int]]:
    """(stage, bucket, size, median ns) of all kinds that were measured."""
    kinds = costs.state()["kinds"]
    found = [(Stage(stage), bucket, size, int(statistics.median(times))) for stage, bucket, size, times in kinds]
    return sorted(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- part 5: the engine under load -----------------------------------------------------------------------------------


def requests(count: int, source: random.Random, chars: Sequence[int]) -> list[tuple[int, float]]:
    """(characters, seconds of speech) of each request."""
    spoken = speech(count, source, chars)
    return [(4 * one.pieces[0][1], one.frames * 0.08) for one in spoken]


async def ask(engine: Engine, chars: int, seconds: float, seed: int, sent_ns: int | None = None) -> Delivery:
    """One request, read as fast as it comes and cut when it is long enough."""
    clock = MonotonicClock()
    samples, wanted = 0, seconds * engine.sample_rate
    chunks: list[tuple[int, int]] = []
    ending = Ending.FAILED
    sent_ns = sent_ns or clock.now()
    text = (SENTENCE * (chars // len(SENTENCE) + 1))[:chars]
    said = engine.speak(seed=seed, priority=Priority.LIVE, interactive=False)
    said.push(text)
    said.end()
    try:
        async for chunk in said:
            if chunk.samples:
                chunks.append((clock.now(), chunk.samples * SECOND // engine.sample_rate))
            samples += chunk.samples
            if samples >= wanted:
                break
        ending = Ending.COMPLETE
    except Overloaded:
        ending = Ending.REFUSED
    except StepFailed as error:
        print(f"a request failed: {error}", file=sys.stderr)
    said.cancel()
    return Delivery(sent_ns, tuple(chunks), ending)


async def closed_loop(
    engine: Engine, width: int, todo: list[tuple[int, float]], seed: int
) -> tuple[list[Delivery], int]:
    """`width` requests at any time until all have been made; what was made after the first round, and in how long."""
    waiting = list(enumerate(todo))
    waiting.reverse()
    done: dict[int, Delivery] = {}

    async def one_after_the_other() -> None:
        while waiting:
            number, (chars, seconds) = waiting.pop()
            done[number] = await ask(engine, chars, seconds, seed + number)

    await asyncio.gather(*(one_after_the_other() for _ in range(width)))
    kept = [done[number] for number in range(width, len(todo))]
    ends = [one.chunks[-1][0] for one in kept if one.chunks]
    return kept, max(ends) - min(one.sent_ns for one in kept)


async def open_loop(engine: Engine, todo: list[tuple[int, float]], times_s: list[float], seed: int) -> list[Delivery]:
    """Each request at its time, whatever becomes of the others."""
    clock = MonotonicClock()
    began_ns = clock.now()

    async def at_its_time(number: int) -> Delivery:
        await asyncio.sleep(max(0.0, times_s[number] - (clock.now() - began_ns) / SECOND))
        chars, seconds = todo[number]
        return await ask(engine, chars, seconds, seed + number, began_ns + round(times_s[number] * SECOND))

    return await asyncio.gather(*(at_its_time(number) for number in range(len(todo))))


def figures(made: Sequence[Delivery], over_ns: int) -> dict[str, float]:
    firsts = [ns / MS for one in made if (ns := first_packet_ns(one)) is not None]
    whole = [factor for one in made if (factor := real_time_factor(one)) is not None]
    needed = [ns / MS for one in made if (ns := required_prebuffer_ns(one)) is not None]
    return {
        "requests": len(made),
        "first_p50_ms": at(firsts, 0.5),
        "first_p95_ms": at(firsts, 0.95),
        "first_p99_ms": at(firsts, 0.99),
        "rtf_p50": at(whole, 0.5),
        "audio_rate": audio_rate(made, over_ns=over_ns),
        "gaps": sum(bool(has_potential_gap(one)) for one in made),
        "prebuffer_ms": max(needed, default=0.0),
        "not_served": sum(one.ending is not Ending.COMPLETE for one in made),
        "speech_s": sum(received_ns(one) for one in made) / SECOND,
    }


def loop_line(name: str, got: dict[str, float], beside: str = "") -> str:
    return (
        f"  {name:12} first packet p50 {got['first_p50_ms']:7.1f}  p95 {got['first_p95_ms']:7.1f}  p99 "
        f"{got['first_p99_ms']:7.1f} ms;  rtf {got['rtf_p50']:.3f};  {got['audio_rate']:6.1f} s of speech/s;  "
        f"{got['gaps']:.0f} of {got['requests']:.0f} with a potential gap (prebuffer {got['prebuffer_ms']:.0f} ms), "
        f"{got['not_served']:.0f} not served{beside}"
    )


async def graphs_of(engine: Engine) -> None:
    """Speak until the engine has all its graphs, which it captures while it serves: what is measured is what comes
    after.  It says so only while it speaks."""
    clock = MonotonicClock()
    began_ns = clock.now()
    while engine.stats.get("graphs", {}).get("recorded", 0) < 1:
        await ask(engine, 64, 1.0, seed=0)
        await asyncio.sleep(0.5)
        if clock.now() - began_ns > 600 * SECOND:
            print("  the graphs are not there after ten minutes; what follows is partly eager", flush=True)
            return
    print(f"  all graphs captured {(clock.now() - began_ns) / SECOND:.0f} s after the first answer", flush=True)


def step_ratios(before: dict[str, Any], after: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of the steps between two states of an engine, by stage: how many there were, and what they took over what was
    predicted, on average."""
    found = {}
    for stage, now in after.items():
        then = before.get(stage, {"counts": [], "sum": 0.0})
        steps = sum(now["counts"]) - sum(then["counts"])
        if steps:
            found[stage] = {"steps": steps, "ratio": (now["sum"] - then["sum"]) / steps}
    return found


async def first_steps(engine: Engine, width: int) -> dict[str, dict[str, float]]:
    """How well the steps of a second of speech are predicted, of `width` requests at once: the first so wide."""
    before = engine.stats.get("step_ratios", {})
    await asyncio.gather(*(ask(engine, 64, 1.0, seed=number) for number in range(width)))
    # The engine says what has happened ten times a second.
    await asyncio.sleep(0.3)
    found = step_ratios(before, engine.stats.get("step_ratios", {}))
    said = ", ".join(f"{stage.lower()} {one['ratio']:.2f} ({one['steps']})" for stage, one in found.items())
    print(f"  first {width} at once: duration of steps over prediction (steps): {said}", flush=True)
    return found


async def load_engine(
    options: argparse.Namespace, name: str, chars: Sequence[int], loops: Sequence[int]
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    is_full = options.model is not None or options.size == "full"

    def progress(what: str, share: float) -> None:
        print(f"\r  {what} {100 * share:3.0f} %", end="\n" if share >= 1 else "", file=sys.stderr, flush=True)

    engine = Engine(
        name,
        device=options.device,
        threads=options.threads,
        weights=options.weights,
        max_streams=options.streams,
        on_loading=progress,
        on_measuring=lambda share: progress("Measuring steps", share),
    )
    async with engine:
        print(f"  {engine.summary}")
        if options.device.startswith("cuda"):
            await graphs_of(engine)
        out["first_steps"] = await first_steps(engine, max(loops))
        for width in loops:
            source = random.Random(options.seed)
            todo = requests(options.requests + width, source, chars)
            made, over_ns = await closed_loop(engine, width, todo, options.seed)
            got = out[f"c{width}"] = figures(made, over_ns)
            published = f";  published {PUBLISHED_MS[width]} ms" if is_full and width in PUBLISHED_MS else ""
            print(loop_line(f"C{width}", got, published), flush=True)
        mean_s = got["speech_s"] / got["requests"]
        for share in POISSON_SHARES[: 1 if options.quick else None]:
            per_s = share * got["audio_rate"] / mean_s
            source = random.Random(options.seed)
            arriving = poisson(speech(options.requests, source, chars), per_s, source)
            todo = [(4 * one.pieces[0][1], one.frames * 0.08) for one in arriving]
            times_s = [one.arrival_ns / SECOND for one in arriving]
            made = await open_loop(engine, todo, times_s, options.seed)
            over_ns = max(one.chunks[-1][0] for one in made if one.chunks) - made[0].sent_ns
            out[f"poisson_{share:g}"] = figures(made, over_ns) | {"per_s": per_s}
            print(loop_line(f"{per_s:.1f} req/s", out[f"poisson_{share:g}"]), flush=True)
        out["graphs"] = engine.stats.get("graphs", {})
    return out


# ---- all of it -------------------------------------------------------------------------------------------------------


def steps_part(
    options: argparse.Namespace, name: str, device: torch.device
) -> tuple[dict[str, Any], CostTable, Executor]:
    clock = MonotonicClock()
    began_ns = clock.now()
    model = SpeechModel.load(name, device=device, weights=options.weights)
    streams = options.streams
    executor = Executor(
        model,
        max_streams=streams,
        kv_pages=kv_pages(streams, model.sample_rate, model.frame_samples),
        page_tokens=PAGE_TOKENS,
        device=device,
    )
    built_s = (clock.now() - began_ns) / SECOND
    print(f"1. {summary(name, model, executor)} ({built_s:.1f} s)", flush=True)
    began_ns = clock.now()
    if device.type == "cpu":
        # To trace a shape takes a second, and some of each kind show that it can be done.
        frame_graphs.GRAPH_COLUMNS = frame_graphs.GRAPH_COLUMNS[:1]
        frame_graphs.GRAPH_FRAMES = frame_graphs.GRAPH_FRAMES[:2]
        frame_graphs.GRAPH_TOKENS = frame_graphs.GRAPH_TOKENS[2::2]
    executor.record_graphs(CudaRecorder() if device.type == "cuda" else EmulatedRecorder())
    graphs_s = (clock.now() - began_ns) / SECOND
    count = len(executor.graphs.table.graphs) if executor.graphs is not None else 0
    print(f"   {count} graphs {'captured' if device.type == 'cuda' else 'emulated'} in {graphs_s:.1f} s", flush=True)

    print("2. With graphs and without, the same streams:", flush=True)
    compared = []
    for rows in sorted({1, min(16, streams)}):
        found = compare(model, executor, rows, 6 if options.quick else COMPARED_FRAMES)
        compared.append(found)
        print(
            f"   {rows:2} streams: codes of the first {found['equal_frames']} of {found['frames']} frames equal "
            f"({100 * found['equal_codes']:.2f} % of all codes); sound of those apart by "
            f"{found['sound_difference']:.1e} at most, of a peak of {found['sound_peak']:.2f}",
            flush=True,
        )

    tf32_db = codec_in_tf32(model, executor, 6 if options.quick else COMPARED_FRAMES) if device.type == "cuda" else None
    if tf32_db is not None:
        print(
            f"   codec in TF32, which is not used: error {tf32_db:.1f} dB below the sound (inaudible: 60)", flush=True
        )

    rate = bandwidth(device)
    print(f"3. Steps, ms; limit at {rate / 1e12:.3f} TB/s, measured by a copy:", flush=True)
    weights = weight_bytes(model)
    frame_rows = sorted(
        {executor.specs[Stage.DEPTH].buckets[0], min(16, streams), executor.specs[Stage.DEPTH].buckets[-1]}
    )
    limits = {rows: limit_ns(weights, model, Stage.DEPTH, rows, rate) for rows in frame_rows}
    ways = depth_ways(executor, limits)
    if device.type == "cpu":
        # An emulated graph runs a step as a list of operations: nothing to be timed.
        executor.graphs = None
    costs = measure(model, executor, clock, streams=streams, budget_ns=options.budget * SECOND)
    rows = []
    for stage, bucket, size, ns in step_rows(costs):
        least_ns = limit_ns(weights, model, stage, bucket, rate)
        rows.append([stage.name, bucket, size, ns, least_ns])
        print(
            f"   {stage.name.lower():8} {bucket:2} rows, {size:4} {'tokens' if stage <= Stage.PREFILL else 'frames':6} "
            f"{ns / MS:9.3f}   limit {least_ns / MS:7.3f}   {ns / least_ns:6.1f} times",
            flush=True,
        )
    first_ns = sum(limit_ns(weights, model, stage, 1, rate) for stage in Stage if stage is not Stage.BACKBONE)
    frame_ns = sum(limit_ns(weights, model, stage, 16, rate) for stage in (Stage.BACKBONE, Stage.DEPTH, Stage.CODEC))
    print(f"   limit of a first sound {first_ns / MS:.2f} ms, of a frame of 16 rows {frame_ns / MS:.2f} ms", flush=True)
    part = {
        "bandwidth": rate,
        "built_s": built_s,
        "graphs": count,
        "graphs_s": graphs_s,
        "compared": compared,
        "codec_tf32_db": tf32_db,
        "depth_ways_ms": ways,
        "steps": rows,
        "limit_first_ms": first_ns / MS,
        "limit_frame16_ms": frame_ns / MS,
    }
    return part, costs, executor


def simulated_loops(
    costs: CostTable, executor: Executor, options: argparse.Namespace, chars: Sequence[int], loops: Sequence[int]
) -> dict[str, Any]:
    """The loops of part 5 in the simulator, on the times of part 3."""
    linear = fitted(costs)
    out = {}
    for width in loops:
        source = random.Random(options.seed)
        todo = [replace(one, interactive=False) for one in speech(options.requests + width, source, chars)]
        result = simulate(todo, source, costs=linear, streams=width, specs=executor.specs)
        made = [outcome.delivery(24_000, 1_920) for outcome in result.outcomes][-options.requests :]
        got = out[f"c{width}"] = figures(made, max(1, result.end_ns))
        print(f"   SIMULATED{loop_line(f'C{width}', got)}", flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few requests, loops of 1 and 16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="write the cost table here, for the simulator")
    parser.add_argument("--model", default=None, help="a checkpoint or its Hugging Face id, in place of random weights")
    parser.add_argument("--size", choices=SIZES, default="full", help="of the random weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--weights", default="", help="int8 or fp8")
    parser.add_argument("--streams", type=int, default=None, help="slots; 64, or 4 on a CPU")
    parser.add_argument("--requests", type=int, default=None, help="of each loop, besides its first round; 300")
    parser.add_argument("--budget", type=int, default=None, metavar="S", help="for measuring steps; 60 s")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--texts", type=Path, metavar="FILE", help="Seed-TTS test-en; else lengths fitted to it")
    parser.add_argument("--no-reference", action="store_true", help="leave part 6 out")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"no CUDA device: {no_cuda()}.\nThe same code on this CPU: bench/gpu.py --device cpu --size tiny --quick"
        )
    on_cpu = device.type == "cpu"
    options.streams = options.streams or (4 if on_cpu else 64)
    options.requests = options.requests or (8 if options.quick and on_cpu else 48 if options.quick else 300)
    options.budget = options.budget or (3 if options.quick else 60)
    torch.set_num_threads(options.threads)
    name = options.model or SIZES[options.size]
    chars = lengths(options.texts)
    loops = [width for width in ((1, 16) if options.quick and not on_cpu else LOOPS) if width <= options.streams]

    card = torch.cuda.get_device_name(device) if not on_cpu else f"{platform.machine()}, {options.threads} thread(s)"
    print(f"{name} on {card}; torch {torch.__version__}; commit {COMMIT}", flush=True)
    with torch.inference_mode():
        part, costs, executor = steps_part(options, name, device)
    if options.costs is not None:
        options.costs.parent.mkdir(parents=True, exist_ok=True)
        write_costs(options.costs, costs, executor.specs, f"{name} on {card}, torch {torch.__version__}")
    print("4. The same loops, simulated on these times:", flush=True)
    expected = simulated_loops(costs, executor, options, chars, loops)
    config = executor.model.config
    del executor
    gc.collect()
    if not on_cpu:
        torch.cuda.empty_cache()
    print("5. The engine under load:", flush=True)
    served = asyncio.run(load_engine(options, name, chars, loops))
    reference = None
    if not options.no_reference:
        print("6. The classes of transformers, eager, one request at a time:", flush=True)
        try:
            reference = reference_times(config, device, frames=3 if options.quick else 20)
        except Exception as error:  # another project's classes: what they raise must not cost the figures above
            reference = {"said": f"not measured: {type(error).__name__}: {error}"}
        print(f"   {reference.pop('said')}", flush=True)
    if options.json:
        document = {
            "machine": f"{platform.machine()} {platform.processor()}".strip(),
            "card": card,
            "python": sys.version,
            "versions": {one: version(one) for one in ("torch", "av", "numpy")},
            "commit": COMMIT,
            "arguments": {
                key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()
            },
            "model": name,
            "steps": part,
            "simulated": expected,
            "served": served,
            "reference": reference,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    said = [f"model={name}", f"device={device.type}", f"graphs={part['graphs']}"]
    said.append(f"limit_first_ms={part['limit_first_ms']:.2f}")
    for key, got in served.items():
        if "first_p50_ms" in got:
            said += [f"first_{q}_ms_{key}={got[f'first_{q}_ms']:.1f}" for q in ("p50", "p95")]
            said.append(f"gaps_{key}={got['gaps']}")
    if reference and "frame_ms" in reference:
        said += [f"reference_first_ms={reference['first_ms']:.1f}", f"reference_frame_ms={reference['frame_ms']:.1f}"]
    print("RESULT", *said)


if __name__ == "__main__":
    try:
        main()
    except BreezeError as error:
        sys.exit(f"error: {error}")
    except torch.OutOfMemoryError as error:
        sys.exit(f"error: {error}\nFewer streams take less: --streams 16")
