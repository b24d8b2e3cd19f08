"""Which Opus settings suit the voice, on a clean line and on one that loses packets?

Speech of the nano voice is encoded with each setting, packets are lost at random, and libopus plays the rest as a
browser does: it conceals what is lost, or takes the copy in the next packet where there is one (in-band FEC).  Judged
by PESQ (wide band) and STOI against the speech before encoding where those are installed (`pip install pesq pystoi`),
and with `--words` two settings also by what Whisper tiny.en understands.  Encoding time is CPU time of one thread.

    python bench/opus_speech.py [--quick] [--words] [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from origin import origin
from scipy.signal import resample_poly

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "nano_voice"))
from evaluate import speak
from judge import Judge, plain_words, word_edits

from breeze_rtc.media.libopus import Decoder
from breeze_rtc.media.opus import SpeechEncoder, has_fec

ROOT = Path(__file__).parent.parent
RATE = 24_000
PACKET = 480
LOOK_AHEAD = 156
LOSSES = (0, 1, 5, 10, 20)


@dataclass(frozen=True)
class Setting:
    kbps: int
    complexity: int
    expected_loss: int = 0
    has_red: bool = False
    """Each packet also carries a whole copy of the one before (RFC 2198), at twice the bit rate."""

    def __str__(self) -> str:
        fec = f" fec {self.expected_loss:2}" if self.expected_loss else "   red " if self.has_red else "       "
        return f"{self.kbps} kb/s c{self.complexity:<2}{fec}"


SETTINGS = [
    *(Setting(kbps, 5) for kbps in (24, 32)),
    *(Setting(kbps, 5, 10) for kbps in (32, 48)),
    *(Setting(kbps, 0, 10) for kbps in (32, 48, 64)),
    *(Setting(kbps, 0) for kbps in (48, 64)),
    *(Setting(kbps, 0, has_red=True) for kbps in (32, 64)),
]
CHOICE = {"before": Setting(32, 5), "now": Setting(64, 0, 10)}
"""What this project began with, and what it does."""
QUICK = [*CHOICE.values(), Setting(48, 0, 10), Setting(48, 0), Setting(64, 0)]


@dataclass
class Outcome:
    setting: Setting
    encode_ms_per_s: float
    kbps: float
    fec_packets: float
    """Share of packets that carry a copy of the one before."""
    pesq: dict[int, float]
    stoi: dict[int, float]
    word_error: dict[int, float]


def play(payloads: list[bytes], lost: NDArray[np.bool_], *, has_red: bool) -> NDArray[np.float32]:
    """What a listener hears who waits one packet for a lost one."""
    decoder, pieces = Decoder(RATE), []
    for k, payload in enumerate(payloads):
        if not lost[k] or (has_red and k + 1 < len(payloads) and not lost[k + 1]):
            piece = decoder.decode(payload)
        elif k + 1 < len(payloads) and not lost[k + 1]:
            piece = decoder.recover(payloads[k + 1], PACKET)
        else:
            piece = decoder.conceal(PACKET)
        assert piece is not None
        pieces.append(piece)
    return np.concatenate(pieces)[LOOK_AHEAD:]


def similarity(reference: NDArray[np.float32], heard: NDArray[np.float32]) -> tuple[float | None, float | None]:
    a, b = (resample_poly(pcm, 2, 3).astype(np.float32) for pcm in (reference, heard[: reference.size]))
    size = min(a.size, b.size)
    pesq_value = stoi_value = None
    if find_spec("pesq"):
        from pesq import pesq

        pesq_value = float(pesq(16_000, a[:size], b[:size], "wb"))
    if find_spec("pystoi"):
        from pystoi import stoi

        stoi_value = float(stoi(a[:size], b[:size], 16_000))
    return pesq_value, stoi_value


def measure(
    setting: Setting, texts: list[str], sounds: list[NDArray[np.float32]], seed: int, judge: Judge | None
) -> Outcome:
    encoded: list[list[bytes]] = []
    seconds = sum(sound.size for sound in sounds) / RATE
    began = time.process_time()
    for sound in sounds:
        encoder = SpeechEncoder(
            RATE, bit_rate=1000 * setting.kbps, complexity=setting.complexity, expected_loss=setting.expected_loss
        )
        packets = encoder.encode((sound * 32_767).astype(np.int16)) + encoder.end()
        encoded.append([packet.payload for packet in packets])
    encode_s = time.process_time() - began
    copies = 2 if setting.has_red else 1
    sizes = [copies * len(payload) for payloads in encoded for payload in payloads]
    outcome = Outcome(setting, 1000 * encode_s / seconds, sum(sizes) * 8 / len(sizes) / 20, 0.0, {}, {}, {})
    outcome.fec_packets = float(np.mean([has_fec(payload) for payloads in encoded for payload in payloads]))
    for loss in LOSSES:
        chance = np.random.default_rng(seed)  # The same packets are lost with every setting.
        values, edits, words = [], 0, 0
        for text, sound, payloads in zip(texts, sounds, encoded, strict=True):
            heard = play(payloads, chance.random(len(payloads)) < loss / 100, has_red=setting.has_red)
            values.append(similarity(sound, heard))
            if judge is not None:
                said = plain_words(text)
                edits += word_edits(said, plain_words(judge.hear(heard)))
                words += len(said)
        for index, into in enumerate((outcome.pesq, outcome.stoi)):
            if values[0][index] is not None:
                into[loss] = float(np.mean([value[index] for value in values]))
        if judge is not None:
            outcome.word_error[loss] = edits / words
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five settings, four sentences")
    parser.add_argument(
        "--words", action="store_true", help="ask Whisper about two settings: a second for each sentence and loss"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lines = (ROOT / "examples" / "nano_voice" / "heldout.txt").read_text().splitlines()
    texts = lines[: 4 if args.quick else 16]
    sounds = [spoken.pcm for spoken in asyncio.run(speak("nano", texts, {}, 4))]
    judge = Judge() if args.words else None
    outcomes = []
    print(f"{'':24} ms/s  kb/s   fec" + "".join(f"  |  {loss:2} %: pesq stoi  wer" for loss in LOSSES))
    for setting in QUICK if args.quick else SETTINGS:
        outcome = measure(setting, texts, sounds, args.seed, judge if setting in CHOICE.values() else None)
        outcomes.append(outcome)
        print(
            f"{setting!s:24} {outcome.encode_ms_per_s:4.1f}  {outcome.kbps:4.1f} {outcome.fec_packets:4.0%} "
            + "".join(
                f"  |        {outcome.pesq.get(loss, np.nan):4.2f} {outcome.stoi.get(loss, np.nan):5.3f}"
                f" {outcome.word_error.get(loss, np.nan):5.3f}"
                for loss in LOSSES
            ),
            flush=True,
        )
    if args.json:
        args.json.write_text(
            json.dumps(
                origin("av", "breeze_rtc")
                | {
                    "outcomes": [asdict(outcome) for outcome in outcomes],
                }
            )
        )
    by_setting = {outcome.setting: outcome for outcome in outcomes}
    print(
        "RESULT "
        + " ".join(f"{name}_encode_ms_per_s={by_setting[s].encode_ms_per_s:.1f}" for name, s in CHOICE.items())
        + "".join(
            f" {name}_{judged}_at_{loss}_percent_loss={getattr(by_setting[setting], judged)[loss]:.3f}"
            for judged in ("pesq", "word_error")
            for loss in (0, 10)
            for name, setting in CHOICE.items()
            if getattr(by_setting[setting], judged)
        )
    )


if __name__ == "__main__":
    main()
