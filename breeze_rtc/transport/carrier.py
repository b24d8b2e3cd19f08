"""What telephone carriers say over a WebSocket, without I/O: raw messages in, small frozen values out, and back.

Five dialects of one conversation: Twilio Media Streams, Telnyx media streaming, Plivo audio streams, the WebSockets of
Vonage's Voice API, and Asterisk's chan_websocket.  Each begins with a start that names call and codec, carries sound in
pieces, tells of keys, gives a *mark* back once what was sent before it has been played, and takes a *clear*.

What breaks the rules is a `PeerError` whose `code` never changes.  Events that this version does not know are counted
and skipped, because carriers add some now and then.  One object reads one connection.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from breeze_rtc.errors import PeerError
from breeze_rtc.media.line_codec import LineCodec

MAX_MESSAGE_BYTES = 64 * 1024
MAX_WAITING_CHUNKS = 5
"""A piece that has not come when five later ones have is lost (100 ms of sound)."""

_RATES = (8_000, 16_000, 24_000)
_ENCODINGS = {
    **dict.fromkeys(("audio/x-mulaw", "audio/pcmu", "mulaw", "ulaw", "pcmu"), "PCMU"),
    **dict.fromkeys(("audio/x-alaw", "audio/pcma", "alaw", "pcma"), "PCMA"),
    **dict.fromkeys(("audio/x-l16", "audio/l16", "l16", "linear16", "slin"), "L16"),
}


# --- what a carrier says


@dataclass(frozen=True, slots=True)
class Started:
    """The call is there."""

    call: str
    """The carrier's name of the call, as its other interfaces use it; "" where it gives none."""
    hears: LineCodec
    """How the caller's sound is written."""
    speaks: LineCodec
    """How ours must be."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """What the carrier, or whoever set up the call, says about it: numbers, headers."""


@dataclass(frozen=True, slots=True)
class Audio:
    """The caller's sound, in order; None for a piece that is lost."""

    payload: bytes | None


@dataclass(frozen=True, slots=True)
class Digit:
    """A key was pressed: 0 to 9, *, #, A to D."""

    digit: str


@dataclass(frozen=True, slots=True)
class Played:
    """All that was sent before this mark has been played, or has been cleared."""

    mark: str


@dataclass(frozen=True, slots=True)
class Flow:
    """Whether the carrier's buffer has room."""

    has_room: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    """The call is over."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """The carrier did not like what we sent."""

    code: str
    detail: str


CarrierEvent = Started | Audio | Digit | Played | Flow | Stopped | Complaint
Out = str | bytes
"""A WebSocket message to be sent: text, or binary."""


class Carrier(Protocol):
    """One connection in one dialect."""

    unknown: int
    """Events this version does not know, and such as came out of place."""

    def read(self, raw: str | bytes) -> tuple[CarrierEvent, ...]:
        """One message -> what it says.  Raises `PeerError` for one that breaks the rules."""

    def audio(self, payload: bytes) -> Out:
        """Sound, as `Started.speaks` writes it; a whole number of 20 ms."""

    def mark(self, name: str) -> Out:
        """Ask to be told when what was sent so far has been played."""

    def clear(self) -> tuple[Out, ...]:
        """Throw away what has been sent and not been played."""

    def hang_up(self) -> Out | None:
        """End the call; None where closing the socket does it."""

    def keys(self, keys: str) -> Out | None:
        """Press keys of the telephone; None where the stream has no word for it."""


class Twilio:
    """Twilio Media Streams, bidirectional (`<Connect><Stream>`).

    Marks come back after a clear too, for what will never be played; whoever made them has to tell.
    https://www.twilio.com/docs/voice/media-streams/websocket-messages
    """

    def __init__(self) -> None:
        self.unknown = 0
        self._stream: str | None = None

    def read(self, raw: str | bytes) -> tuple[CarrierEvent, ...]:
        message = _message(raw)
        event = message.get("event")
        if event == "start" and self._stream is None:
            start = _object(message, "start")
            self._stream = _text(start, "streamSid")
            codec = _codec_of(_object(start, "mediaFormat"), "sampleRate")
            given = {name: start.get(name) for name in ("callSid", "accountSid")}
            parameters = _texts(start.get("customParameters")) | _texts(given)
            return (Started(parameters.get("callSid", ""), codec, codec, parameters),)
        if event == "connected":
            return ()
        if self._stream is None or message.get("streamSid", self._stream) != self._stream:
            return _skip(self)
        match event:
            case "media":
                media = _object(message, "media")
                return _skip(self) if media.get("track", "inbound") != "inbound" else (Audio(_payload(media)),)
            case "mark":
                return (Played(_text(_object(message, "mark"), "name")),)
            case "dtmf":
                return (_digit(_object(message, "dtmf")),)
            case "stop":
                return (Stopped(),)
        return _skip(self)

    def audio(self, payload: bytes) -> Out:
        return _json(event="media", streamSid=self._stream, media={"payload": _base64(payload)})

    def mark(self, name: str) -> Out:
        return _json(event="mark", streamSid=self._stream, mark={"name": name})

    def clear(self) -> tuple[Out, ...]:
        return (_json(event="clear", streamSid=self._stream),)

    def hang_up(self) -> Out | None:
        return None

    def keys(self, keys: str) -> Out | None:
        return None


class Telnyx:
    """Telnyx media streaming with `stream_bidirectional_mode: rtp`.

    The caller's codec is what its line has (A-law in Europe), ours what `stream_bidirectional_codec` asked for.  Pieces
    may come out of order.  L16 is in network order here.
    https://developers.telnyx.com/docs/voice/programmable-voice/media-streaming
    """

    def __init__(self, speaks: LineCodec | None = None) -> None:
        """speaks: `stream_bidirectional_codec` of the call; None: Telnyx's own default, PCMU."""
        self.unknown = 0
        self._speaks = speaks or LineCodec("PCMU")
        self._has_started = False
        self._order = Chunks()

    def read(self, raw: str | bytes) -> tuple[CarrierEvent, ...]:
        message = _message(raw)
        event = message.get("event")
        if event == "start" and not self._has_started:
            self._has_started = True
            start = _object(message, "start")
            hears = _codec_of(_object(start, "media_format"), "sample_rate", is_big_endian=True)
            names = ("call_control_id", "call_session_id", "from", "to", "client_state")
            parameters = _texts(start.get("custom_parameters")) | _texts({name: start.get(name) for name in names})
            return (Started(parameters.get("call_control_id", ""), hears, self._speaks, parameters),)
        match event:
            case "connected":
                return ()
            case "error":
                complaint = _object(message, "payload")
                return (Complaint(str(complaint.get("code", "")), str(complaint.get("detail", "")) or "no detail"),)
        if not self._has_started:
            return _skip(self)
        match event:
            case "media":
                media = _object(message, "media")
                if media.get("track", "inbound") not in ("inbound", "inbound_track"):
                    return _skip(self)
                return _in_order(self._order, _number(media, "chunk"), _payload(media))
            case "mark":
                return (Played(_text(_object(message, "mark"), "name")),)
            case "dtmf":
                return (_digit(_object(message, "dtmf")),)
            case "stop":
                return (Stopped(),)
        return _skip(self)

    def audio(self, payload: bytes) -> Out:
        return _json(event="media", media={"payload": _base64(payload)})

    def mark(self, name: str) -> Out:
        return _json(event="mark", mark={"name": name})

    def clear(self) -> tuple[Out, ...]:
        return (_json(event="clear"),)

    def hang_up(self) -> Out | None:
        return None

    def keys(self, keys: str) -> Out | None:
        return None


class Plivo:
    """Plivo audio streams (`<Stream bidirectional="true">`).  L16 is little-endian here.

    https://www.plivo.com/docs/voice/concepts/audio-streaming
    """

    def __init__(self) -> None:
        self.unknown = 0
        self._stream: str | None = None
        self._codec = LineCodec("PCMU")
        self._order = Chunks()

    def read(self, raw: str | bytes) -> tuple[CarrierEvent, ...]:
        message = _message(raw)
        event = message.get("event")
        if event == "start" and self._stream is None:
            start = _object(message, "start")
            self._stream = _text(start, "streamId")
            self._codec = _codec_of(_object(start, "mediaFormat"), "sampleRate")
            parameters = _texts({name: start.get(name) for name in ("callId", "accountId")})
            headers = message.get("extra_headers")
            parameters |= _texts({"extra_headers": headers})
            return (Started(parameters.get("callId", ""), self._codec, self._codec, parameters),)
        if self._stream is None or message.get("streamId", self._stream) != self._stream:
            return _skip(self)
        match event:
            case "media":
                media = _object(message, "media")
                if media.get("track", "inbound") != "inbound":
                    return _skip(self)
                return _in_order(self._order, _number(media, "chunk"), _payload(media))
            case "playedStream":
                return (Played(_text(message, "name")),)
            case "clearedAudio":
                return ()
            case "dtmf":
                return (_digit(_object(message, "dtmf")),)
            case "stop":
                return (Stopped(),)
        return _skip(self)

    def audio(self, payload: bytes) -> Out:
        kind = {"PCMU": "audio/x-mulaw", "PCMA": "audio/x-alaw", "L16": "audio/x-l16"}[self._codec.name]
        media = {"contentType": kind, "sampleRate": self._codec.sample_rate, "payload": _base64(payload)}
        return _json(event="playAudio", media=media)

    def mark(self, name: str) -> Out:
        return _json(event="checkpoint", streamId=self._stream, name=name)

    def clear(self) -> tuple[Out, ...]:
        return (_json(event="clearAudio", streamId=self._stream),)

    def hang_up(self) -> Out | None:
        return None

    def keys(self, keys: str) -> Out | None:
        return _json(event="sendDTMF", dtmf=keys)


class Vonage:
    """The WebSocket endpoint of Vonage's Voice API: binary frames are sound (L16, little-endian), text is the rest.

    https://developer.vonage.com/en/voice/voice-api/guides/websockets
    """

    def __init__(self) -> None:
        self.unknown = 0
        self._has_started = False

    def read(self, raw: str | bytes) -> tuple[CarrierEvent, ...]:
        if isinstance(raw, bytes):
            return (Audio(_within(raw)),) if self._has_started else _skip(self)
        message = _message(raw)
        match message.get("event"):
            case "websocket:connected" if not self._has_started:
                self._has_started = True
                codec = _codec_of({"encoding": message.get("content-type")}, "sample_rate")
                parameters = _texts({name: value for name, value in message.items() if name not in ("event",)})
                return (Started(parameters.get("uuid", ""), codec, codec, parameters),)
            case "websocket:notify" if self._has_started:
                return (Played(_text(_object(message, "payload"), "mark")),)
            case "websocket:dtmf" if self._has_started:
                return (_digit(message),)
            case "websocket:cleared":
                return ()
            case "websocket:disconnected":
                return (Stopped(),)
        return _skip(self)

    def audio(self, payload: bytes) -> Out:
        return payload

    def mark(self, name: str) -> Out:
        return _json(action="notify", payload={"mark": name})

    def clear(self) -> tuple[Out, ...]:
        return (_json(action="clear"),)

    def hang_up(self) -> Out | None:
        return None

    def keys(self, keys: str) -> Out | None:
        return None


class Asterisk:
    """Asterisk's chan_websocket: binary frames are sound, text is control (JSON since 20.18, 22.8, 23.2; words before).

    Sound may come before the start is told, so it is kept until then.  A mark comes back when it reaches the front of
    Asterisk's queue.
    https://docs.asterisk.org/Configuration/Channel-Drivers/WebSocket/
    """

    def __init__(self) -> None:
        self.unknown = 0
        self._started: Started | None = None
        self._speaks_json = False
        self._early: list[CarrierEvent] = []

    def read(self, raw: str | bytes) -> tuple[CarrierEvent, ...]:
        if isinstance(raw, bytes):
            audio = Audio(_within(raw))
            if self._started is None:
                if len(self._early) < MAX_WAITING_CHUNKS:
                    self._early.append(audio)
                return ()
            return (audio,)
        is_json = raw.lstrip().startswith("{")
        message = _message(raw) if is_json else _words(raw)
        match message.get("event"):
            case "MEDIA_START" if self._started is None:
                self._speaks_json = is_json
                codec = _codec_of({"encoding": message.get("format")}, "sample_rate")
                parameters = _texts({name: value for name, value in message.items() if name != "event"})
                parameters |= _texts(message.get("channel_variables"))
                self._started = Started(parameters.get("channel_id", ""), codec, codec, parameters)
                early, self._early = self._early, []
                return (self._started, *early)
            case "MEDIA_MARK_PROCESSED":
                return (Played(_text(message, "correlation_id")),)
            case "DTMF_END":
                return (_digit(message),)
            case "MEDIA_XOFF":
                return (Flow(has_room=False),)
            case "MEDIA_XON":
                return (Flow(has_room=True),)
            case "STATUS" | "QUEUE_DRAINED" | "MEDIA_BUFFERING_COMPLETED":
                return ()
        return _skip(self)

    def audio(self, payload: bytes) -> Out:
        return payload

    def mark(self, name: str) -> Out:
        return self._command("MARK_MEDIA", name)

    def clear(self) -> tuple[Out, ...]:
        return (self._command("FLUSH_MEDIA"),)

    def hang_up(self) -> Out | None:
        return self._command("HANGUP")

    def keys(self, keys: str) -> Out | None:
        return None

    def _command(self, command: str, correlation_id: str = "") -> str:
        if not self._speaks_json:
            return f"{command} {correlation_id}".strip()
        return _json(command=command, **({"correlation_id": correlation_id} if correlation_id else {}))


CARRIERS: Mapping[str, Callable[[], Carrier]] = {
    "twilio": Twilio,
    "telnyx": Telnyx,
    "plivo": Plivo,
    "vonage": Vonage,
    "asterisk": Asterisk,
}
"""The dialects by name."""


class Chunks:
    """Pieces with numbers, some of them late, back into their order."""

    def __init__(self) -> None:
        self._next: int | None = None
        self._waiting: dict[int, bytes] = {}

    def push(self, number: int, payload: bytes) -> list[bytes | None]:
        """The next piece that came -> the pieces whose turn it is; None for one that is given up."""
        if self._next is None:
            self._next = number
        if number < self._next:
            return []  # Too late, or a second time.
        self._waiting[number] = payload
        if number - self._next > 10 * MAX_WAITING_CHUNKS:
            # Not late but somewhere else: the count was begun again.
            self._next, self._waiting = number, {number: payload}
        ready: list[bytes | None] = []
        while self._next in self._waiting or len(self._waiting) >= MAX_WAITING_CHUNKS:
            ready.append(self._waiting.pop(self._next, None))
            self._next += 1
        return ready


# --- reading


def _refused(code: str, detail: str, fix: str = "") -> NoReturn:
    raise PeerError(code, detail, fix)


def _within(raw: bytes) -> bytes:
    if len(raw) > MAX_MESSAGE_BYTES:
        _refused("message_too_large", f"a message of {len(raw)} bytes; {MAX_MESSAGE_BYTES} are allowed")
    return raw


def _message(raw: str | bytes) -> Mapping[str, Any]:
    _within(raw if isinstance(raw, bytes) else raw.encode())
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError):
        _refused("not_json", "a message that is not JSON")
    if not isinstance(message, dict):
        _refused("not_an_object", "a message that is not a JSON object")
    return message


def _words(raw: str) -> dict[str, Any]:
    """`MEDIA_START channel:x format:ulaw`, as Asterisk wrote before it wrote JSON."""
    _within(raw.encode())
    event, *pairs = raw.split() or [""]
    fields: dict[str, Any] = {"event": event}
    for pair in pairs:
        name, colon, value = pair.partition(":")
        if colon and name.isidentifier():
            fields[name] = value
        else:
            fields.setdefault("correlation_id", pair)
    return fields


def _object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    if not isinstance(value, dict):
        _refused("field_missing", f"{name!r} is missing, or no object")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        _refused("field_missing", f"{name!r} is missing, or no text")
    return value


def _number(fields: Mapping[str, Any], name: str) -> int:
    """A count; most carriers write theirs as text."""
    value = fields.get(name)
    try:
        number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else -1
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 53:
        _refused("field_missing", f"{name!r} is missing, or no count")
    return number


def _texts(fields: object) -> dict[str, str]:
    """What is text of a set of parameters; the rest is none of ours."""
    if not isinstance(fields, Mapping):
        return {}
    return {str(name): value for name, value in fields.items() if isinstance(value, str)}


def _payload(media: Mapping[str, Any]) -> bytes:
    try:
        return base64.b64decode(_text(media, "payload"), validate=True)
    except (binascii.Error, ValueError):
        _refused("payload_malformed", "sound that is not base64")


def _digit(fields: Mapping[str, Any]) -> Digit:
    digit = _text(fields, "digit")
    if digit not in "0123456789*#ABCD" or len(digit) != 1:
        _refused("digit_unknown", f"{digit!r} is no key of a telephone")
    return Digit(digit)


def _codec_of(fields: Mapping[str, Any], rate_name: str, *, is_big_endian: bool = False) -> LineCodec:
    """The codec that a start names, such as `audio/x-mulaw` with a rate, `audio/l16;rate=16000` or `slin16`."""
    encoding = fields.get("encoding")
    words = encoding.lower().replace(" ", "").split(";") if isinstance(encoding, str) else [""]
    rate = fields.get(rate_name)
    for word in words[1:]:
        if word.startswith("rate="):
            rate = word.removeprefix("rate=")
    if words[0].startswith("slin") and words[0] != "slin":
        words[0], rate = "slin", words[0].removeprefix("slin") + "000"
    name = _ENCODINGS.get(words[0])
    try:
        sample_rate = int(rate) if rate else 8_000
    except (TypeError, ValueError):
        sample_rate = 0
    if name is None or sample_rate not in _RATES or (name != "L16" and sample_rate != 8_000):
        _refused(
            "codec_unknown",
            f"the call is in {encoding!r} at {rate!r}, which cannot be read here",
            "Set the stream to PCMU or PCMA at 8 kHz, or L16 at 8, 16 or 24 kHz.",
        )
    return LineCodec(name, sample_rate, is_big_endian and name == "L16")


def _in_order(order: Chunks, number: int, payload: bytes) -> tuple[CarrierEvent, ...]:
    return tuple(Audio(piece) for piece in order.push(number, payload))


def _skip(carrier: Carrier) -> tuple[CarrierEvent, ...]:
    carrier.unknown += 1
    return ()


def _json(**fields: Any) -> str:
    return json.dumps(fields, separators=(",", ":"))


def _base64(payload: bytes) -> str:
    return base64.b64encode(payload).decode("ascii")
