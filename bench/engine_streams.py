"""How fast the engine speaks: first sound and real-time factor of 1 to 16 streams at once on this machine's CPU, and
what each stage takes of it.

The engine runs as it does in production, in a process of its own that also encodes Opus.  Each round opens its streams
at the same moment and reads them as fast as they come; the first round is warm-up and left out.  `rtf` is processor
time of the engine per second of sound, which other load on the machine hardly moves; `wall_rtf` is what a clock says
(time from the first push to the last chunk, over the longest stream: below 1 every listener can be served without a
gap).

    python bench/engine_streams.py [--quick] [--seed N] [--json FILE] [--model NAME] [--threads N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from origin import origin

from breeze_rtc.runtime.engine import Engine
from breeze_rtc.scheduling.stream import Priority

TEXT = "The listener's real position tells the scheduler how much time there is. "
MAX_SPEECH_S = 10
"""A stream is cut here: a model of random weights may go on for minutes."""


@dataclass(frozen=True)
class Spoken:
    """One stream of one round."""

    first_ms: float
    total_s: float
    speech_s: float


async def speak(engine: Engine, seed: int) -> Spoken:
    began = time.perf_counter()
    speech = engine.speak(seed=seed, interactive=False, priority=Priority.BATCH)
    speech.push(TEXT)
    speech.end()
    first_ms, samples = 0.0, 0
    async for chunk in speech:
        first_ms = first_ms or (time.perf_counter() - began) * 1e3
        samples += chunk.samples
        if samples >= MAX_SPEECH_S * engine.sample_rate:
            speech.cancel()
    return Spoken(first_ms, time.perf_counter() - began, samples / engine.sample_rate)


def processor_s(pid: int) -> float:
    """User and system time of a process so far (proc(5), stat fields 14 and 15)."""
    values = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


async def measure(engine: Engine, streams: int, rounds: int, seed: int) -> tuple[list[Spoken], float]:
    """The streams of all rounds but the first, and the processor time they took."""
    spoken: list[Spoken] = []
    used_s = 0.0
    assert engine.pid is not None
    for number in range(rounds + 1):
        before_s = processor_s(engine.pid)
        together = await asyncio.gather(*(speak(engine, seed + 100 * number + k) for k in range(streams)))
        if number:
            spoken += together
            used_s += processor_s(engine.pid) - before_s
    return spoken, used_s


async def stage_ms(engine: Engine) -> dict[str, float]:
    """What the engine's steps have taken so far, by stage; steps and the encoding of packets, as a clock says."""
    await asyncio.sleep(0.3)  # two snapshots
    return {name: 1e3 * stage["seconds"] for name, stage in engine.stats.get("stages", {}).items()}


async def run(options: argparse.Namespace) -> None:
    figures: dict[str, str] = {}
    raw: dict[str, object] = {}
    began = time.perf_counter()
    async with Engine(options.model, threads=options.threads) as engine:
        start_s = time.perf_counter() - began
        for streams in (1, 2, 4, 8, 16):
            rounds = max(1, 4 // streams) if options.quick else max(3, 24 // streams)
            stages_before = await stage_ms(engine)
            spoken, used_s = await measure(engine, streams, rounds, options.seed)
            stages = {name: ms - stages_before.get(name, 0) for name, ms in (await stage_ms(engine)).items()}
            speech_s = sum(one.speech_s for one in spoken)
            firsts = sorted(one.first_ms for one in spoken)
            wall = statistics.median(one.total_s / one.speech_s for one in spoken)
            # The warm-up round is in the stages' time, and spoke as much as each of the others.
            stages = {name: ms / speech_s * rounds / (rounds + 1) for name, ms in stages.items()}
            raw[str(streams)] = {
                "spoken": [asdict(one) for one in spoken],
                "processor_s": used_s,
                "stage_ms_per_speech_s": stages,
            }
            print(
                f"{streams} streams: first sound p50 {statistics.median(firsts):6.1f} ms, worst {firsts[-1]:6.1f} ms;  "
                f"rtf {used_s / speech_s:.3f} (processor), wall rtf {wall:.3f};  "
                f"{len(spoken)} streams, {speech_s:.0f} s"
            )
            print("   ms for a second of speech:", ", ".join(f"{name.lower()} {ms:.1f}" for name, ms in stages.items()))
            figures[f"first_chunk_p50_ms_c{streams}"] = f"{statistics.median(firsts):.1f}"
            figures[f"rtf_c{streams}"] = f"{used_s / speech_s:.3f}"
            figures[f"wall_rtf_c{streams}"] = f"{wall:.3f}"
    if options.json:
        document = origin("torch", "av", "numpy") | {
            "start_s": start_s,
            "raw": raw,
        }
        options.json.write_text(json.dumps(document))
    print("RESULT", f"model={options.model}", *(f"{key}={value}" for key, value in figures.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few streams per row")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--threads", type=int, default=1)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
