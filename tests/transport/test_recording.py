"""Both sides of a call in one file, each in its place."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.media.opus import SILENCE_PACKET, SpeechEncoder
from breeze_rtc.transport.playout import Slot
from breeze_rtc.transport.recording import CallRecording
from breeze_rtc.transport.uplink import BLOCK, RATE, Block

T0 = 50 * SECOND


def speech(seconds: float) -> list[bytes]:
    encoder = SpeechEncoder(24_000)
    tone = (9_000 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * 24_000)) / 24_000)).astype(np.int16)
    return [packet.payload for packet in encoder.encode(tone)]


def block(number: int, level: float = 0.0) -> Block:
    return Block(number * BLOCK, np.full(BLOCK, level, np.float32))


def sides(path: Path) -> NDArray[np.int16]:
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getframerate()) == (2, RATE)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, 2)


def test_a_stall_and_a_burst_leave_the_file_as_long_as_the_call(tmp_path: Path) -> None:
    """Ten seconds: the caller's packets stand still for 700 ms and come at once; some of the agent's slots are missed.
    What each said is where it was said, to the sample.  Reproduction 48 (pipecat PR 5071, #2851)."""
    recording = CallRecording(tmp_path / "call.wav")
    packets = iter(speech(4.0))
    late: list[Block] = []
    for number in range(500):
        if number % 3 or not 100 <= number < 200:
            is_speech = 50 <= number < 100
            payload = next(packets) if is_speech else SILENCE_PACKET
            recording.agent(Slot(number, payload, 1 if is_speech else None), T0)
        late.append(block(number, 0.5 if number == 300 else 0.0))
        if not 290 <= number < 325:
            for piece in late:
                recording.caller(piece, T0)
            late.clear()
    recording.close()
    recording.close()
    sound = sides(tmp_path / "call.wav")
    assert len(sound) == 10 * RATE
    loud = np.flatnonzero(sound[:, 0])
    assert (loud[0], loud[-1] + 1) == (300 * BLOCK, 301 * BLOCK)
    loud = np.flatnonzero(np.abs(sound[:, 1]) > 1_000)
    assert abs(loud[0] - (50 * BLOCK + 104)) < 40  # a decoder's look-ahead later
    assert abs(loud[-1] - 100 * BLOCK) < BLOCK


def test_a_caller_without_a_microphone_is_silence(tmp_path: Path) -> None:
    """The agent's side is written all the same; a microphone that comes later is in its place."""
    recording = CallRecording(tmp_path / "call.wav")
    for number in range(250):
        recording.agent(Slot(number, SILENCE_PACKET, None), T0)
        if number >= 200:
            recording.caller(block(number - 200, 0.5), T0 + 200 * 20 * MS)
    recording.close()
    sound = sides(tmp_path / "call.wav")
    assert len(sound) == 5 * RATE
    assert np.flatnonzero(sound[:, 0])[0] == 4 * RATE


def test_a_recording_that_cannot_be_written_is_given_up(tmp_path: Path) -> None:
    recording = CallRecording(tmp_path / "missing" / "call.wav")
    for number in range(200):
        recording.caller(block(number), T0)
        recording.agent(Slot(number, SILENCE_PACKET, None), T0)
    recording.close()
