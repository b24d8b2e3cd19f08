"""What holds an agent that speaks, what cuts it off, and how soon a caller is heard, by how much voice is asked for.

A call of the test kit, in virtual time: the session, the voice activity model and the recogniser (Moonshine) are those
that serve; the agent tells a story without end, and this is what its caller's microphone brings:

noise, knock, cough   150 ms of white noise; a knock; a cough (a burst of breath and a hoarse vowel, made up)
voice                 150 ms cut out of somebody's reading: the hardest of short noises
babble                six people who read at once, 10 dB below the caller's own voice
hm                    "Mm-hmm." and the like, of espeak-ng
words                 somebody begins a sentence: a person who reads, and espeak-ng

held     the agent fell silent at the ear; per event, of babble per minute
cut      and did not go on by itself: its answer was given up
silent   how long it was silent when it went on
heard    from the first sample of a caller's sentence until the agent was told to hold

    python bench/noise.py [--quick] [--onsets S ...] [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "agent"))
from origin import origin
from speech import human, spoken

from breeze_rtc.agent.listen import Moonshine, model_folder
from breeze_rtc.agent.session import AgentSession, Callbacks, UserTurn
from breeze_rtc.agent.turns import TurnTaking
from breeze_rtc.agent.vad import SAMPLE_RATE, Samples, VoiceActivity
from breeze_rtc.errors import MissingExtra
from breeze_rtc.testing import Caller, run

LEVEL = 0.06
"""RMS of a caller's voice: -24 dB."""
BABBLE_DB = -10.0
PAUSE_S = 3.0
HUMS = ("Mm-hmm.", "Hmm.", "Uh-huh.", "Aha.")
SENTENCES = (
    "Please stop for a moment, I have another question.",
    "Wait, that is not what I meant.",
    "Excuse me, can you say that again?",
    "How much does it cost?",
    "I would like to talk to somebody else.",
)


class Ears:
    """Moonshine on the spot: in virtual time nobody waits for a process."""

    def __init__(self) -> None:
        self._model = Moonshine(model_folder())

    async def transcribe(self, samples: Samples) -> str:
        return self._model.transcribe(np.pad(samples, (0, max(0, 6_400 - len(samples)))))


@dataclass
class Found:
    """One kind of sound, at one onset."""

    events: int = 0
    seconds: float = 0.0
    held: int = 0
    cut: int = 0
    silent_s: list[float] = field(default_factory=list)
    heard_s: list[float] = field(default_factory=list)


def at_level(sound: Samples, db: float = 0.0) -> Samples:
    """As loud as a caller, or so much more."""
    voiced = sound[np.abs(sound) > 0.05 * np.abs(sound).max()]
    return (sound * LEVEL * 10 ** (db / 20) / np.sqrt(np.square(voiced).mean())).astype(np.float32)


def cough(random: np.random.Generator) -> Samples:
    """A burst of breath, shaped by a mouth, and a hoarse vowel behind it: 250 to 400 ms."""
    count = round(random.uniform(0.25, 0.4) * SAMPLE_RATE)
    t = np.arange(count) / SAMPLE_RATE
    breath = random.standard_normal(count) * (np.exp(-t / 0.05) + 0.4 * np.exp(-(((t - 0.2) / 0.08) ** 2)))
    hoarse = np.sign(np.sin(2 * np.pi * np.cumsum(random.normal(140, 25, count)) / SAMPLE_RATE)) * np.exp(
        -(((t - 0.15) / 0.07) ** 2)
    )
    spectrum = np.fft.rfft(breath + 0.5 * hoarse)
    hertz = np.fft.rfftfreq(count, 1 / SAMPLE_RATE)
    mouth = sum(np.exp(-(((hertz - at) / width) ** 2)) for at, width in ((650, 250), (1_400, 400), (2_800, 900)))
    return np.fft.irfft(spectrum * mouth, count).astype(np.float32)


def knock(random: np.random.Generator) -> Samples:
    t = np.arange(SAMPLE_RATE // 5) / SAMPLE_RATE
    tone = sum(np.sin(2 * np.pi * random.uniform(80, 900) * t + random.uniform(0, 6)) for _ in range(5))
    return (tone * np.exp(-t / 0.02)).astype(np.float32)


def readers(seed: int) -> list[Samples]:
    """A person's sentences, one after another; espeak-ng's where none is installed."""
    clips = [clip for clip, _ in human()]
    order = np.random.default_rng(seed).permutation(len(clips))
    return [clips[at] for at in order]


def babble(seconds: float, seed: int) -> Samples:
    """Six at once: a person, and five of espeak-ng's voices."""
    count = round(seconds * SAMPLE_RATE)
    random = np.random.default_rng(seed)
    mixed = np.zeros(count, np.float32)
    text = " ".join(SENTENCES)
    voices = [
        np.concatenate(readers(seed)),
        *(spoken(text, f"en-us+{kind}") for kind in ("m1", "m3", "f1", "f2", "f4")),
    ]
    for voice in voices:
        own = np.resize(np.roll(at_level(voice), int(random.integers(len(voice)))), count)
        mixed += own
    return at_level(mixed, BABBLE_DB)


def sounds(seed: int, count: int) -> dict[str, list[Samples]]:
    """What a microphone brings, event by event."""
    random = np.random.default_rng(seed)
    reading = np.concatenate(readers(seed))
    short = SAMPLE_RATE * 150 // 1_000
    loud = np.flatnonzero(np.convolve(np.abs(reading), np.ones(short) / short, "valid") > 0.5 * np.abs(reading).mean())
    pieces = [reading[at : at + short] for at in random.choice(loud, count)]
    fade = np.minimum(1, np.minimum(np.arange(short), np.arange(short)[::-1]) / 80).astype(np.float32)
    return {
        "noise": [at_level(random.standard_normal(short).astype(np.float32)) for _ in range(count)],
        "knock": [at_level(knock(random)) for _ in range(count)],
        "cough": [at_level(cough(random)) for _ in range(count)],
        "voice": [at_level(piece * fade) for piece in pieces],
        "hm": [at_level(spoken(HUMS[at % len(HUMS)], f"en-us+{'mf'[at % 2]}{1 + at % 4}")) for at in range(count)],
        "words": [at_level(_trimmed(clip)) for clip in readers(seed)]
        + [at_level(_trimmed(spoken(text))) for text in SENTENCES],
    }


def _trimmed(sound: Samples) -> Samples:
    """From its first audible sample on, three seconds at most."""
    first = np.flatnonzero(np.abs(sound) > 0.03 * np.abs(sound).max())[0]
    return sound[first : first + 3 * SAMPLE_RATE]


async def tell(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
    while True:
        yield "And then the small boat told the old sailor another story of the sea. "


def listen(events: list[Samples], onset_s: float, seed: int, *, ears: Ears) -> Found:
    """A call in which these sounds are made over the agent's voice."""
    found = Found(events=len(events), seconds=sum(map(len, events)) / SAMPLE_RATE)
    random = np.random.default_rng(seed)
    # It goes by the loop's clock, and each of these calls has its own.
    activity = VoiceActivity()

    async def call() -> None:
        callbacks = Callbacks(on_user_turn=tell, turn_taking=TurnTaking(onset_s=onset_s))
        async with Caller(callbacks, ears=ears, activity=activity) as caller:
            paused: list[float] = []
            pause, resume = caller.call.pause, caller.call.resume

            def noted() -> None:
                paused.append(caller.now)
                pause()

            def gone_on() -> None:
                if len(paused) > len(found.silent_s) + found.cut:
                    found.silent_s.append(caller.now - paused[-1])
                resume()

            caller.call.pause, caller.call.resume = noted, gone_on  # type: ignore[method-assign]
            await caller.type("go", waits=False)
            await caller.first_sound()
            await caller.wait(1.0)
            for event in events:
                await caller.wait(random.uniform(0, 0.05))
                before, began = len(paused), caller.now
                noise = random.standard_normal(len(event)).astype(np.float32) * 3e-4
                await caller.sound(event + noise, waits=False)
                await caller.wait(PAUSE_S)
                if len(paused) > before:
                    found.heard_s.append(paused[before] - began)
                found.cut = sum(
                    said["type"] == "speech_end" and said["interrupted"] for _, said in caller.call.messages
                )
            found.held = len(paused)

    run(call(), within_s=3_600)
    activity.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="one onset, few events")
    parser.add_argument("--onsets", type=float, nargs="+", default=[0.12, 0.16, 0.19, 0.2])
    parser.add_argument("--events", type=int, default=40, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.onsets, options.events = [TurnTaking().onset_s], 10
    try:
        ears = Ears()
    except MissingExtra as error:
        sys.exit(str(error))
    made = sounds(options.seed, options.events)
    # A minute at a time: what cuts the agent ends with it.
    made["babble"] = [
        babble(15.0 if options.quick else 60.0, options.seed + k) for k in range(1 if options.quick else 2)
    ]
    results: dict[str, dict[str, Found]] = {}
    for onset_s in options.onsets:
        results[f"{onset_s:g}"] = {}
        for kind, events in made.items():
            found = listen(events, onset_s, options.seed, ears=ears)
            results[f"{onset_s:g}"][kind] = found
            per = found.seconds / 60 if kind == "babble" else found.events
            heard = f", heard after p50 {1_000 * statistics.median(found.heard_s):.0f} ms" if found.heard_s else ""
            silent = f", silent for {statistics.median(found.silent_s):.2f} s" if found.silent_s else ""
            print(
                f"onset {onset_s:g} s  {kind:7} held {found.held / per:5.2f}  cut {found.cut / per:5.2f}"
                f" {'a minute' if kind == 'babble' else 'an event'}{heard}{silent}",
                flush=True,
            )
    if options.json:
        values = {onset: {kind: asdict(found) for kind, found in kinds.items()} for onset, kinds in results.items()}
        options.json.write_text(
            json.dumps(origin("onnxruntime", "moonshine-voice") | {"values": values}, indent=1) + "\n"
        )
    last = results[f"{TurnTaking().onset_s:g}"] if f"{TurnTaking().onset_s:g}" in results else results[min(results)]
    figures = [
        f"{kind}_{what}_per_event={getattr(last[kind], what) / last[kind].events:.2f}"
        for kind in ("noise", "knock", "cough", "voice", "hm")
        for what in ("held", "cut")
    ]
    figures += [
        f"babble_{what}_per_minute={getattr(last['babble'], what) / last['babble'].seconds * 60:.1f}"
        for what in ("held", "cut")
    ]
    figures.append(f"words_heard_p50_ms={1_000 * statistics.median(last['words'].heard_s):.0f}")
    print("RESULT", *figures)


if __name__ == "__main__":
    main()
