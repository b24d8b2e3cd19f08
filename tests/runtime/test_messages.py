"""Messages survive the wire, however it cuts them."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breeze_rtc.errors import PeerError
from breeze_rtc.playback import PlaybackReport, SpeechPacket, TextMark
from breeze_rtc.runtime.messages import (
    MAX_MESSAGE_BYTES,
    VERSION,
    AddVoice,
    Cancel,
    Chunk,
    EndText,
    Failed,
    Finished,
    Measuring,
    Message,
    MessageReader,
    Open,
    Ready,
    Report,
    Start,
    StartFailed,
    Stats,
    Taken,
    Text,
    VoiceAdded,
    encode,
)

EXAMPLES: tuple[Message, ...] = (
    Start("nano", "cpu", 1, 16, "trace.jsonl"),
    Start("nano", "cpu", 1, 16, policy={"predicts": False, "ladder": [16]}),
    Measuring(0.25),
    Ready("nano", 24_000, 960, ("clara", "b"), "free"),
    StartFailed("CheckpointError", "no such file"),
    Open(7, "clara", 2**63 - 1, {"temperature": 0.5}, 0, True),
    Open(7, "clara", 0, {}, 0, True, "Whisper: “slowly”", 15, "english"),
    AddVoice(3, "anna", "What was said.", b"RIFF\0{}"),
    VoiceAdded(3),
    VoiceAdded(3, "BadRecording", "the recording is silent"),
    Text(7, "Zoë 🌬️\0 \ud800 end"),
    EndText(7),
    Cancel(7),
    Taken(7, 480),
    Report(PlaybackReport(7, 480, 10**18, 60_000_000, None, is_playing=False)),
    Report(PlaybackReport(7, 480, 10**18, 60_000_000, 2 * 10**18, is_measured=False)),
    Chunk(7, 960, b"\1\2" * 960, (SpeechPacket(960, b"abc"), SpeechPacket(1440, b"")), (TextMark(1000, 12),)),
    Chunk(7, 960, b""),
    Finished(7, 48_000),
    Failed(7, "StepFailed", "boom", "DEPTH"),
    Stats({"streams": {"7": {"lead_ns": 5, "slack_ns": None}}}),
)


@settings(deadline=None)
@given(st.lists(st.sampled_from(EXAMPLES), max_size=8), st.data())
def test_what_was_said_is_heard_however_it_is_cut(said: list[Message], data: st.DataObject) -> None:
    """Every message comes out equal and in order, for any cut of the bytes."""
    wire = b"".join(map(encode, said))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    reader = MessageReader()
    heard: list[Message] = []
    for start, stop in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        heard += reader.feed(wire[start:stop])
    assert heard == said


def test_another_version_is_said_clearly() -> None:
    """A process of another release is named as that, not as garbage."""
    wire = bytearray(encode(Cancel(1)))
    wire[4] = VERSION + 1
    with pytest.raises(PeerError, match=f"speaks version {VERSION + 1}.*this one version {VERSION}"):
        MessageReader().feed(bytes(wire))


@pytest.mark.parametrize(
    "wire",
    [
        struct.pack("<I", MAX_MESSAGE_BYTES + 1),
        struct.pack("<I", 2),
        struct.pack("<IBI", 7, VERSION, 2) + b"{}",
        struct.pack("<IBI", 7, VERSION, 2) + b"[]",
        struct.pack("<IBI", 7, VERSION, 2) + b"{[",
        encode(Cancel(1)).replace(b"Cancel", b"Cancer"),
        encode(Cancel(1)).replace(b"stream", b"strEam"),
        encode(Chunk(1, 0, b"abcd")).replace(b'"pcm":4', b'"pcm":3'),
    ],
)
def test_what_is_no_message_is_refused(wire: bytes) -> None:
    """Absurd sizes, broken JSON, unknown types, wrong fields and wrong payloads are the peer's error."""
    with pytest.raises(PeerError):
        MessageReader().feed(wire)


def test_numbers_are_finite() -> None:
    """NaN has no place on the wire: JSON does not know it."""
    with pytest.raises(ValueError):
        encode(Stats({"lead": math.nan}))
