"""What the media process and the engine process say to each other, over a local stream socket.

A message on the wire, integers little-endian:

    u32 size of what follows     u8 VERSION     u32 size of the header     header (JSON)     payload (the rest)

The header holds `type` and the message's plain fields; bulk bytes (PCM, packets) are the payload.  Nothing is pickled:
a peer can say only what stands here.  Both ends come from one package, so there is one version and no negotiation; a
process left over from another release is told apart at its first message.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from breeze_rtc.errors import PeerError
from breeze_rtc.playback import PlaybackReport, SpeechPacket, TextMark

VERSION = 1
MAX_MESSAGE_BYTES = 64 << 20
_SIZE = struct.Struct("<I")
_HEAD = struct.Struct("<BI")


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to an engine: what to load and how to run it."""

    model: str
    device: str
    threads: int
    max_streams: int
    trace: str = ""
    """Where the scheduler's inputs are recorded; empty for nowhere."""
    policy: dict[str, Any] = field(default_factory=dict)
    """The scheduler's rules, as `Policy.state()` has them; empty for the default."""
    measures: bool = True
    """Know how long this machine's steps take, or find out now: see `step_times`.  False: learn it while serving."""
    weights: str = ""
    """`int8` or `fp8`: the large layers in half the memory, see `models.quantised`; empty: as they are stored."""
    voices: str = ""
    """The folder of the cloned voices; empty for none."""
    codec_device: str = ""
    """`cpu`: the codec runs there, beside the rest; empty: where the rest does."""


@dataclass(frozen=True, slots=True)
class Loading:
    """The engine reads large weights."""

    what: str
    share: float
    """How much of that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """The engine has loaded its model and measures this machine."""

    share: float
    """How much of that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine has loaded its model and takes streams."""

    model: str
    sample_rate: int
    frame_samples: int
    voices: tuple[str, ...]
    licence_note: str = ""
    feed: str = "per_frame"
    """How the model takes text: see `scheduling.stream.Feed`."""
    summary: str = ""
    """What was loaded, where, and what it holds there, as a sentence."""
    clones: bool = False
    """It can make a voice of a recording."""
    frame_ns: int = 0
    """What a frame of a stream that is alone takes, as far as that was measured; 0: nobody knows."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The engine cannot start, and another try would fail the same way."""

    error: str
    """Name of the error's class."""
    detail: str


@dataclass(frozen=True, slots=True)
class Open:
    """A new stream.  `voice` and `sampling` have been checked by the sender."""

    stream: int
    voice: str
    seed: int
    sampling: dict[str, float]
    priority: int
    interactive: bool
    instruction: str = ""
    """How to speak, in words; empty: as the voice does."""
    max_frames: int = 0
    """The speech ends after so many codec frames, if it has not before; 0: as late as the engine lets any."""
    language: str = ""
    """Of the text, in lower case; empty: the model finds out."""


@dataclass(frozen=True, slots=True)
class AddVoice:
    """Make a voice of a recording and keep it in the folder of voices."""

    request: int
    name: str
    transcript: str
    recording: bytes
    """A sound file."""


@dataclass(frozen=True, slots=True)
class VoiceAdded:
    """What became of an `AddVoice`."""

    request: int
    error: str = ""
    """Name of the error's class; empty when the voice can be spoken with."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """More text of a stream."""

    stream: int
    text: str


@dataclass(frozen=True, slots=True)
class EndText:
    """No more text of a stream will come."""

    stream: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a stream at once and for good; nothing more of it is wanted."""

    stream: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The consumer has taken the stream's chunks up to `samples`: what the engine may still owe it grows again."""

    stream: int
    samples: int


@dataclass(frozen=True, slots=True)
class Report:
    """Where a listener is."""

    report: PlaybackReport


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next samples of a stream: PCM, the packets they complete, and the text they complete."""

    stream: int
    start_samples: int
    pcm: bytes
    """s16le, mono."""
    packets: tuple[SpeechPacket, ...] = ()
    marks: tuple[TextMark, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """All of a stream has been sent; what it held is free."""

    stream: int
    samples: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A stream is over because of an error; what it held is free."""

    stream: int
    error: str
    """Name of the error's class."""
    detail: str
    stage: str = ""
    """StepFailed: which stage."""
    retry_after_s: float = 0.0
    """Overloaded: when to try again."""


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of the engine, plain JSON values."""

    values: dict[str, Any] = field(default_factory=dict)


Message = (
    Start
    | Loading
    | Measuring
    | Ready
    | StartFailed
    | Open
    | AddVoice
    | VoiceAdded
    | Text
    | EndText
    | Cancel
    | Taken
    | Report
    | Chunk
    | Finished
    | Failed
    | Stats
)


def encode(message: Message) -> bytes:
    """The message as it goes over the wire.  Raises ValueError for a number that is not finite."""
    header, payload = _to_plain(message)
    head = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    body = _HEAD.size + len(head) + len(payload)
    assert body <= MAX_MESSAGE_BYTES, f"a message of {body} bytes"
    return b"".join((_SIZE.pack(body), _HEAD.pack(VERSION, len(head)), head, payload))


class MessageReader:
    """Bytes in, as they arrive; whole messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Take what arrived; return the messages it completes.

        Raises PeerError where the bytes are no message of this version; the connection is of no use after that.
        """
        self._buffer += data
        messages: list[Message] = []
        at = 0
        while len(self._buffer) - at >= _SIZE.size:
            (size,) = _SIZE.unpack_from(self._buffer, at)
            if not _HEAD.size <= size <= MAX_MESSAGE_BYTES:
                raise PeerError("engine_message", f"a message of {size} bytes is no message")
            if len(self._buffer) - at - _SIZE.size < size:
                break
            at += _SIZE.size
            messages.append(_decode(bytes(self._buffer[at : at + size])))
            at += size
        del self._buffer[:at]
        return messages


def _decode(body: bytes) -> Message:
    version, head_size = _HEAD.unpack_from(body)
    if version != VERSION:
        raise PeerError(
            "engine_version",
            f"the other process speaks version {version} of the engine's messages, this one version {VERSION}",
            "Restart both from the same installation of breeze_rtc",
        )
    try:
        header = json.loads(body[_HEAD.size : _HEAD.size + head_size])
        return _FROM_PLAIN[header.pop("type")](header, body[_HEAD.size + head_size :])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PeerError("engine_message", f"a message that cannot be read: {error!r}") from error


def _to_plain(message: Message) -> tuple[dict[str, Any], bytes]:
    match message:
        case Chunk(stream, start_samples, pcm, packets, marks):
            header = {
                "stream": stream,
                "start": start_samples,
                "pcm": len(pcm),
                "packets": [(packet.start_samples, len(packet.payload)) for packet in packets],
                "marks": [(mark.samples, mark.chars) for mark in marks],
            }
            payload = b"".join((pcm, *(packet.payload for packet in packets)))
        case AddVoice(request, name, transcript, recording):
            header = {"request": request, "name": name, "transcript": transcript}
            payload = recording
        case Report(report):
            header = {name: getattr(report, name) for name in PlaybackReport.__slots__}
            payload = b""
        case _:
            header = {name: getattr(message, name) for name in type(message).__slots__}
            payload = b""
    return {"type": type(message).__name__, **header}, payload


def _chunk(header: dict[str, Any], payload: bytes) -> Chunk:
    at = header["pcm"]
    packets = []
    for start_samples, size in header["packets"]:
        packets.append(SpeechPacket(start_samples, payload[at : at + size]))
        at += size
    if at != len(payload):
        raise ValueError(f"{len(payload)} bytes of payload where the header names {at}")
    marks = tuple(TextMark(samples, chars) for samples, chars in header["marks"])
    return Chunk(header["stream"], header["start"], payload[: header["pcm"]], tuple(packets), marks)


def _ready(header: dict[str, Any], _payload: bytes) -> Ready:
    return Ready(**{**header, "voices": tuple(header["voices"])})


def _add_voice(header: dict[str, Any], payload: bytes) -> AddVoice:
    return AddVoice(**header, recording=payload)


def _report(header: dict[str, Any], _payload: bytes) -> Report:
    return Report(PlaybackReport(**header))


def _plain(kind: type[Message]) -> Callable[[dict[str, Any], bytes], Message]:
    return lambda header, _payload: kind(**header)


_FROM_PLAIN: dict[str, Callable[[dict[str, Any], bytes], Message]] = {
    kind.__name__: _plain(kind)
    for kind in (
        *(Start, Loading, Measuring, StartFailed, Open, VoiceAdded, Text),
        *(EndText, Cancel, Taken, Finished, Failed, Stats),
    )
} | {"Chunk": _chunk, "Ready": _ready, "Report": _report, "AddVoice": _add_voice}
