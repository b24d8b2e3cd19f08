"""When the user speaks."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from speech import spoken

from breeze_rtc.agent.vad import FRAME_MS, FRAME_SAMPLES, Cue, Recording, Samples, SpeechGate, VoiceActivity

V, S = 0.9, 0.05


def cues(gate: SpeechGate, probabilities: list[float]) -> list[tuple[int, Cue]]:
    return [
        ((at + 1) * FRAME_MS, cue) for at, value in enumerate(probabilities) if (cue := gate.feed(value)) is not None
    ]


def test_speech_has_an_onset_a_lull_and_a_pause() -> None:
    """In this order, at their times."""
    assert cues(SpeechGate(), [V] * 30 + [S] * 30) == [
        (160, Cue.ONSET),  # the first frame end at or after 160 ms
        (960 + 224, Cue.LULL),
        (960 + 608, Cue.PAUSE),
    ]


@pytest.mark.parametrize("frames", range(1, 5))
def test_a_short_noise_is_no_onset(frames: int) -> None:
    """Less than 160 ms of voice, alone, passes unnoticed, however often it comes."""
    assert cues(SpeechGate(), ([V] * frames + [S] * 20) * 5) == []


def test_speech_with_holes_has_an_onset_all_the_same() -> None:
    """Single unvoiced frames delay the onset, they do not prevent it; its age counts from the first voiced frame."""
    gate = SpeechGate()
    ((at, cue),) = cues(gate, [S, V, V, S, V, V, S, V, V, V])
    assert (at, cue) == (10 * FRAME_MS, Cue.ONSET)
    assert gate.onset_age_ms == 9 * FRAME_MS


def test_voice_between_the_thresholds_keeps_speech_going() -> None:
    """Hysteresis: 0.4 does not begin speech, and does not end it."""
    assert cues(SpeechGate(), [0.4] * 50) == []
    assert cues(SpeechGate(), [V] * 10 + [0.4] * 50) == [(160, Cue.ONSET)]


def test_a_lull_comes_again_after_more_speech() -> None:
    """Each silence inside a turn that is long enough is a lull; only the last is followed by the pause."""
    seen = [cue for _, cue in cues(SpeechGate(), [V] * 10 + [S] * 8 + [V] * 10 + [S] * 25)]
    assert seen == [Cue.ONSET, Cue.LULL, Cue.LULL, Cue.PAUSE]


@given(st.lists(st.floats(0, 1), max_size=400))
def test_cues_alternate(probabilities: list[float]) -> None:
    """Whatever the probabilities, each pause has its onset, and there is no second onset before it."""
    seen = [cue for _, cue in cues(SpeechGate(), probabilities) if cue is not Cue.LULL]
    assert seen[::2] == [Cue.ONSET] * len(seen[::2])
    assert seen[1::2] == [Cue.PAUSE] * len(seen[1::2])


def test_a_recording_begins_before_the_onset() -> None:
    """The turn holds the voiced frames, and 300 ms before the first of them."""
    recording = Recording()
    for frame in range(50):
        recording.add(np.full(FRAME_SAMPLES, frame, np.float32))
    recording.begin(onset_age_ms=7 * FRAME_MS)
    recording.add(np.full(FRAME_SAMPLES, 50, np.float32))
    turn = recording.copy()
    assert turn[0] == 50 - 7 - 10
    assert turn[-1] == 50
    assert len(turn) == 18 * FRAME_SAMPLES


def test_a_recording_is_bounded_between_turns() -> None:
    """An open microphone nobody speaks into does not grow."""
    recording = Recording(keep_ms=320)
    for frame in range(10_000):
        recording.add(np.full(FRAME_SAMPLES, frame, np.float32))
    recording.begin(onset_age_ms=10_000)
    assert len(recording.copy()) == 10 * FRAME_SAMPLES


async def test_a_voice_is_told_from_noise_and_silence() -> None:
    """The model: most frames of a spoken sentence are voice; noise and silence give no onset."""
    activity = VoiceActivity()
    try:
        rng = np.random.default_rng(1)
        speech = spoken("Hello there, can you hear me speaking to you now?")
        for sound, has_onset in (
            (speech, True),
            (rng.normal(0, 0.05, 32_000).astype(np.float32), False),
            (np.zeros(32_000, np.float32), False),
        ):
            track, gate = activity.open(), SpeechGate()
            seen = []
            for at in range(0, len(sound), 320):
                seen += [gate.feed(value) for _, value in await track.feed(sound[at : at + 320])]
            assert (Cue.ONSET in seen) is has_onset
    finally:
        activity.close()


async def test_blocks_of_any_size_give_the_same_frames() -> None:
    """Cutting the sound elsewhere changes nothing."""
    activity = VoiceActivity()
    try:
        sound = spoken("one two three")[:16_000]
        whole = [value for _, value in await activity.open().feed(sound)]
        track = activity.open()
        pieces = []
        for at in range(0, len(sound), 333):
            pieces += [value for _, value in await track.feed(sound[at : at + 333])]
        assert pieces == pytest.approx(whole)
        assert len(whole) == len(sound) // FRAME_SAMPLES
    finally:
        activity.close()


async def test_many_microphones_share_a_trip_to_the_model_and_hear_what_each_hears_alone() -> None:
    """Their frames go through it together; none waits for a trip that is not full; the loop runs on meanwhile."""
    activity = VoiceActivity()
    infer, batches, threads = activity._infer, [], set()

    def counted(batch: list[Any]) -> list[list[float]]:
        batches.append(len(batch))
        threads.add(threading.current_thread())
        return infer(batch)

    try:
        sounds = [np.roll(spoken("one two three four"), 1_000 * k)[:16_000] for k in range(20)]
        alone = [[value for _, value in await activity.open().feed(sound)] for sound in sounds]
        activity._infer = counted  # type: ignore[method-assign]

        async def hear(sound: Samples) -> list[float]:
            track, heard = activity.open(), []
            for at in range(0, len(sound), 320):
                heard += [value for _, value in await track.feed(sound[at : at + 320])]
            return heard

        together = await asyncio.gather(*(hear(sound) for sound in sounds))
        assert sum(batches) == sum(map(len, alone)) == 20 * 31
        assert len(batches) < sum(batches) / 5
        for one, other in zip(alone, together, strict=True):
            assert other == pytest.approx(one, abs=1e-4)
        assert threading.main_thread() not in threads
    finally:
        activity.close()


async def test_who_stops_listening_or_comes_too_late_leaves_nobody_waiting() -> None:
    """A cancelled call's frames disturb no other's; a closed model says so."""
    activity = VoiceActivity()
    frame = np.zeros(FRAME_SAMPLES, np.float32)
    leaving = asyncio.create_task(activity.open().feed(frame))
    staying = asyncio.create_task(activity.open().feed(frame))
    await asyncio.sleep(0)
    leaving.cancel()
    assert len(await asyncio.wait_for(staying, 10)) == 1
    activity.close()
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(activity.open().feed(frame), 10)
