"""How soon is the agent silent when a caller speaks over it, at the caller's ear?

A real server with its voice activity model, real peers over UDP, ICE, DTLS and SRTP.  The agent's voice is the test
kit's: every word has tones of its own, so what the listener recorded says which words were heard and until when.  The
caller speaks a sentence of espeak-ng's over each answer, at a random moment.

onset to silence      from the first sample of the caller's voice to the last of the old speech at the ear
decision to silence   from the server's decision to hold the agent
waste                 speech that was made and never heard, in seconds
words off             between the history and the recording

    python bench/barge_in.py [--quick] [--cuts N] [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path += [str(Path(__file__).parent.parent / "tests" / n) for n in ("agent", "server", "testing", "transport")]
from barge_ins import STORY, STORYTELLER, words_off
from origin import origin
from page import Page, serving, until
from python_listener import Microphone, clock
from speech import spoken

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.server.call import PageCall
from breeze_rtc.testing import Recording, ToneVoice
from breeze_rtc.testing.voice import RATE

SAYS = "Please stop for a moment, I have another question."


@dataclass(frozen=True)
class Cut:
    onset_to_silence_ms: float
    onset_to_decision_ms: float
    decision_to_silence_ms: float
    waste_s: float
    words_off: int


class LiveMicrophone(Microphone):
    """Silence, and what is said into it."""

    def __init__(self) -> None:
        super().__init__(np.zeros(0, np.int16))
        self._said: list[np.ndarray] = []
        self._frames = self._said_or_silence()

    def _said_or_silence(self) -> Iterator[np.ndarray]:
        while True:
            yield self._said.pop(0) if self._said else np.zeros(960, np.int16)

    async def say(self, pcm: np.ndarray) -> int:
        """Speak; returns when the first sample left, in ns."""
        self._said += np.split(pcm[: len(pcm) // 960 * 960], len(pcm) // 960)
        # The next frame leaves at its time, which is up to 20 ms from now.
        return self._start_ns + self._sent * 20 * MS


def recording(page: Page, voice: ToneVoice) -> Recording:
    """What left the loudspeaker, on the machine's clock: muted where the page was."""
    heard = page.listener.heard
    device_ns = round(page.listener.device_ms * MS)
    origin_ns = heard[0].pulled_ns + device_ns
    pcm = np.zeros((heard[-1].pulled_ns + device_ns - origin_ns) * 48 // MS + 960, np.int16)
    for frame in heard:
        at = (frame.pulled_ns + device_ns - origin_ns) * 48 // MS
        sound = frame.pcm.copy()
        for start, end in page.silences:
            first, last = ((edge - frame.rtp + (1 << 31)) % (1 << 32) - (1 << 31) for edge in (start, end))
            sound[max(0, first) : max(0, last)] = 0
        part = pcm[at : at + len(sound)]
        part[:] = sound[: len(part)]
    return Recording(pcm, 48_000, voice.words, origin_ns / SECOND)


async def measure(cuts: int, seed: int) -> list[Cut]:
    """The cuts of one call."""
    source = random.Random(seed)
    voice = ToneVoice()
    decisions: list[int] = []
    pause = PageCall.pause

    def noted(call: PageCall) -> None:
        decisions.append(clock.now())
        pause(call)

    PageCall.pause = noted  # type: ignore[method-assign]
    microphone = LiveMicrophone()
    says = np.trim_zeros((spoken(SAYS, rate=48_000) * 32_767).astype(np.int16))
    says = says[np.flatnonzero(np.abs(says) > 300)[0] :]
    onsets: list[tuple[int, int]] = []
    async with serving(STORYTELLER, engine=voice) as hall, hall.page(microphone=microphone) as page:
        await page.call()
        await page.type("go")
        for _ in range(cuts):
            streams = {message["stream"] for message in page.all("speech")}
            await until(lambda streams=streams: {m["stream"] for m in page.all("speech")} - streams)
            (stream,) = {message["stream"] for message in page.all("speech")} - streams
            await until(lambda stream=stream: any(m["stream"] == stream for m in page.all("heard")))
            await asyncio.sleep(source.uniform(0.5, 4.0))
            onsets.append((stream, await microphone.say(says)))
            await page.one("speech_end", lambda message, stream=stream: message["stream"] == stream)
        await asyncio.sleep(0.5)
        await page.send(type="interrupt")
        await asyncio.sleep(0.3)
        ear = recording(page, voice)
    found = []
    for stream, onset_ns in onsets:
        words = [heard for heard in ear.words if heard.word.stream == stream]
        decided_ns = min(at for at in decisions if at > onset_ns)
        silent_s = words[-1].end_s
        end = next(message for message in page.all("speech_end") if message["stream"] == stream)
        heard_s = words[-1].word.start_samples / RATE + words[-1].sounded_s
        made_s = voice.made_samples[stream] / RATE
        found.append(
            Cut(
                onset_to_silence_ms=1_000 * silent_s - onset_ns / MS,
                onset_to_decision_ms=(decided_ns - onset_ns) / MS,
                decision_to_silence_ms=1_000 * silent_s - decided_ns / MS,
                waste_s=made_s - heard_s,
                words_off=words_off(STORY[: end["chars"]], words),
            )
        )
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="six cuts")
    parser.add_argument("--cuts", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cuts = asyncio.run(measure(6 if arguments.quick else arguments.cuts, arguments.seed))
    figures: dict[str, float] = {}
    for name in ("onset_to_silence_ms", "decision_to_silence_ms", "onset_to_decision_ms", "waste_s"):
        values = sorted(getattr(cut, name) for cut in cuts)
        stem, unit = name.rsplit("_", 1)
        figures[f"{stem}_p50_{unit}"] = round(statistics.median(values), 0 if unit == "ms" else 2)
        figures[f"{stem}_p95_{unit}"] = round(values[int(0.95 * (len(values) - 1) + 0.5)], 0 if unit == "ms" else 2)
    figures["words_off_worst"] = max(cut.words_off for cut in cuts)
    figures["cuts"] = len(cuts)
    if arguments.json:
        arguments.json.write_text(
            json.dumps(
                origin("aiortc", "av", "onnxruntime") | {"values": [asdict(cut) for cut in cuts], **figures}, indent=1
            )
        )
    print("RESULT " + " ".join(f"{name}={value:g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
