"""The messages between page and server, without I/O: JSON text in, small frozen values out, and back.

What the other side sent is either one of the values below or a `PeerError` whose `code` never changes.  Unknown message
types are counted and skipped, so that a newer page can talk to an older server.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from breeze_rtc.errors import PeerError
from breeze_rtc.media import rtp

MAX_MESSAGE_BYTES = 64 * 1024
MAX_SDP_BYTES = 32 * 1024
MAX_TEXT_CHARS = 8_000
MAX_CANDIDATE_CHARS = 500
MAX_CANDIDATES = 32
"""An offer makes the server send connectivity checks to each address in it; a browser has a handful."""

_MAX_INT = 1 << 53  # What a JavaScript number counts exactly.
_MAX_MS = 1e15  # 30 000 years: any clock fits, and float arithmetic on it stays finite.


# --- what a page says


@dataclass(frozen=True, slots=True)
class Offer:
    """Let us talk, or go on on a new connection.  Sent right after `setLocalDescription`, without waiting for
    candidates."""

    sdp: str
    microphone: bool
    id: int = 0
    """The answer, and the candidates that follow on either side, carry the same."""
    heard_rtp: int | None = None
    """On the connection before this one, the timestamp that was being pulled out of the jitter buffer when the page
    gave that up; None where there was none."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An address of the page that was found after its offer."""

    line: str
    """`candidate:...` as the browser says it; empty where there is nothing to use."""
    id: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """A turn of the user, typed."""

    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a listener's player says about itself.

    Times named `_ms` are on the listener's clock; adding `offset_ms` puts them on the server's monotonic clock.
    """

    seq: int
    t_ms: float
    """When this was said."""
    rtp: int | None
    """Timestamp of the packet last pulled out of the jitter buffer; None before the first."""
    rtp_t_ms: float | None
    """When it was pulled."""
    device_delay_ms: float
    """From the jitter buffer's exit to the loudspeaker."""
    device_delay_source: str
    """`playout` (measured by the player), `context` (an AudioContext's word), or `none`."""
    age_ms: float
    """How old `rtp` was at `t_ms`."""
    jitter_buffer_ms: float = 0.0
    jitter_target_ms: float = 0.0
    concealed: int = 0
    """Samples made up, put in, taken out, and packets lost, since the start: all counters of the player."""
    inserted: int = 0
    removed: int = 0
    lost: int = 0
    muted: bool = False
    paused: bool = False
    volume: float = 1.0
    visible: bool = True
    offset_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Ping:
    """A question for the server's clock."""

    id: int
    t_ms: float


@dataclass(frozen=True, slots=True)
class Flushed:
    """The page fell silent: `rtp` was being pulled out of the jitter buffer at `t_ms`, when it muted."""

    rtp: int
    t_ms: float


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The button: stop talking."""


@dataclass(frozen=True, slots=True)
class Bye:
    """The page leaves."""


Message = Offer | Candidate | Text | Report | Ping | Flushed | Interrupt | Bye


class Inbox:
    """Reads one page's messages."""

    def __init__(self) -> None:
        # Messages of types this version does not know.
        self.unknown = 0
        # Messages that broke the rules.
        self.refused = 0

    def read(self, raw: str | bytes) -> Message | None:
        """One WebSocket message -> its value; None for an unknown type.

        Raises `PeerError`; the next message can be read all the same.
        """
        try:
            fields = _parse(raw)
            kind = fields.get("type")
            if not isinstance(kind, str):
                _refuse("no_type", "a message has no type", 'Send an object with a string field "type".')
            read = _READERS.get(kind)
            if read is None:
                self.unknown += 1
                return None
            return read(_Fields(kind, fields))
        except PeerError:
            self.refused += 1
            raise


def _refuse(code: str, detail: str, fix: str) -> NoReturn:
    raise PeerError(code, detail, fix)


def _parse(raw: str | bytes) -> dict[str, Any]:
    data = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
    if len(data) > MAX_MESSAGE_BYTES:
        _refuse(
            "message_too_large",
            f"a message of {len(data)} bytes is longer than {MAX_MESSAGE_BYTES}",
            "Send less in one message.",
        )

    def no_number(name: str) -> NoReturn:
        _refuse("not_finite", f"{name} is no JSON", "Send finite numbers.")

    try:
        # NaN and Infinity are no JSON, though Python's reader takes them.
        value = json.loads(raw, parse_constant=no_number)
    except (ValueError, RecursionError) as error:  # Bad UTF-8 and endless digits are ValueErrors too.
        raise PeerError("not_json", "a message is not JSON", "Send one JSON object as text.") from error
    if not isinstance(value, dict):
        _refuse("not_an_object", "a message is JSON but no object", "Send one JSON object as text.")
    return value


class _Fields:
    """Typed access to one message's fields."""

    def __init__(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._kind = kind
        self._fields = fields

    def _get(self, name: str) -> Any:
        if name not in self._fields:
            _refuse("missing_field", f"{self._kind!r} has no field {name!r}", "See the protocol for what it carries.")
        return self._fields[name]

    def _wrong(self, name: str, wanted: str) -> NoReturn:
        _refuse("bad_field", f"{name!r} of {self._kind!r} is not {wanted}", "See the protocol for what it carries.")

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            self._wrong(name, "text")
        try:
            value.encode()
        except UnicodeEncodeError:  # A lone surrogate, which no later stage can write down.
            self._wrong(name, "valid Unicode")
        return value

    def flag(self, name: str) -> bool:
        value = self._get(name)
        if not isinstance(value, bool):
            self._wrong(name, "true or false")
        return value

    def number(self, name: str, *, least: float = -_MAX_MS, most: float = _MAX_MS) -> float:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(name, "a number")
        # Compared before it becomes a float: a JSON integer may be too large for one.
        if not least <= value <= most or not math.isfinite(value):
            self._wrong(name, f"between {least:g} and {most:g}")
        return float(value)

    def integer(self, name: str, *, least: int = 0, most: int = _MAX_INT) -> int:
        value = self._get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self._wrong(name, f"a whole number from {least} to {most}")
        return value

    def is_null(self, name: str) -> bool:
        return self._get(name) is None

    def has(self, name: str) -> bool:
        """Whether an optional field is there."""
        return self._fields.get(name) is not None


def _read_offer(fields: _Fields) -> Offer:
    return Offer(
        check_offer(fields.text("sdp")),
        fields.flag("microphone"),
        fields.integer("id") if fields.has("id") else 0,
        fields.integer("heard_rtp", most=rtp.WRAP - 1) if fields.has("heard_rtp") else None,
    )


def read_candidate(line: str, offer: int = 0) -> Candidate:
    """One `candidate:...` line as a browser says it.  Raises `PeerError`."""
    line = line.strip()
    if len(line) > MAX_CANDIDATE_CHARS:
        _refuse("candidate_malformed", "a candidate is longer than any is", "Send it as the browser says it.")
    # As in an offer: names of the page's own network are of no use here.  An empty line ends the list.
    return Candidate("" if ".local " in line.lower() else line, offer)


def _read_candidate(fields: _Fields) -> Candidate:
    return read_candidate(fields.text("candidate"), fields.integer("id") if fields.has("id") else 0)


def _read_text(fields: _Fields) -> Text:
    text = fields.text("text").strip()
    if not text:
        _refuse("empty_text", "a turn has no text", "Type something.")
    if len(text) > MAX_TEXT_CHARS:
        _refuse("text_too_long", f"a turn of {len(text)} characters is too long", f"Send at most {MAX_TEXT_CHARS}.")
    return Text(text)


def _read_report(fields: _Fields) -> Report:
    has_rtp = not fields.is_null("rtp")
    source = fields.text("device_delay_source")
    return Report(
        seq=fields.integer("seq"),
        t_ms=fields.number("t_ms"),
        rtp=fields.integer("rtp", most=rtp.WRAP - 1) if has_rtp else None,
        rtp_t_ms=fields.number("rtp_t_ms") if has_rtp else None,
        device_delay_ms=fields.number("device_delay_ms"),
        device_delay_source=source if source in {"playout", "context"} else "none",
        age_ms=fields.number("age_ms"),
        jitter_buffer_ms=fields.number("jitter_buffer_ms"),
        jitter_target_ms=fields.number("jitter_target_ms"),
        concealed=fields.integer("concealed"),
        inserted=fields.integer("inserted"),
        removed=fields.integer("removed"),
        lost=fields.integer("lost", least=-_MAX_INT),  # RFC 3550: negative where packets came twice.
        muted=fields.flag("muted"),
        paused=fields.flag("paused"),
        volume=fields.number("volume"),
        visible=fields.flag("visible"),
        offset_ms=fields.number("offset_ms"),
    )


_READERS: dict[str, Callable[[_Fields], Message]] = {
    "offer": _read_offer,
    "candidate": _read_candidate,
    "text": _read_text,
    "report": _read_report,
    "ping": lambda fields: Ping(fields.integer("id"), fields.number("t_ms")),
    "flushed": lambda fields: Flushed(fields.integer("rtp", most=rtp.WRAP - 1), fields.number("t_ms")),
    "interrupt": lambda fields: Interrupt(),
    "bye": lambda fields: Bye(),
}


# --- the offer

_RTPMAP = re.compile(r"a=rtpmap:(\d+) opus/48000(?:/\d+)?", re.IGNORECASE)


def check_offer(sdp: str) -> str:
    """Check that `sdp` offers to receive Opus, and nothing that costs more; return it without useless candidates.

    `.local` candidates go: they are names in the page's own network, and waiting for an answer to them takes the ICE
    agent a second (aioice resolves them inside `setRemoteDescription`).  The browser's checks reach us without them.

    Raises `PeerError`.
    """
    if len(sdp.encode()) > MAX_SDP_BYTES:
        _refuse("offer_too_large", f"an offer longer than {MAX_SDP_BYTES} bytes", "Offer one audio transceiver.")
    lines = sdp.replace("\r\n", "\n").split("\n")
    first_media = next((i for i, line in enumerate(lines) if line.startswith("m=")), None)
    if not sdp.startswith("v=0") or first_media is None:
        _refuse("offer_malformed", "the offer is no session description", "Send localDescription.sdp as it is.")
    session, sections = lines[:first_media], lines[first_media:]
    kinds = [line[2:].split(" ", 1)[0] for line in sections if line.startswith("m=")]
    if kinds.count("audio") == 0:
        _refuse("offer_no_audio", "the offer has no audio section", 'Call addTransceiver("audio") before createOffer.')
    if len(kinds) > 1:
        _refuse(
            "offer_not_audio_only",
            f"the offer has {len(kinds)} media sections ({', '.join(kinds)[:80]})",
            "Offer one audio transceiver, without video and data channels.",
        )
    if not any(_RTPMAP.fullmatch(line.strip()) for line in sections):
        _refuse("offer_no_opus", "the offer has no Opus at 48 kHz", "Do not remove audio/opus from the codecs.")
    if {"a=sendonly", "a=inactive"} & {line.strip() for line in sections}:
        _refuse("offer_not_receiving", "the offer does not receive audio", 'Use direction "sendrecv" or "recvonly".')
    for attribute in ("a=ice-ufrag:", "a=ice-pwd:", "a=fingerprint:", "a=setup:", "a=rtcp-mux", "a=mid:"):
        if not any(line.startswith(attribute) for line in session + sections):
            _refuse(
                "offer_malformed",
                f"the offer has no {attribute[2:].rstrip(':')!r} line",
                "Send localDescription.sdp as it is.",
            )
    candidates = [line for line in sections if line.startswith("a=candidate:")]
    kept = [line for line in candidates if ".local " not in line.lower()][:MAX_CANDIDATES]
    sections = [line for line in sections if not line.startswith("a=candidate:") or line in kept]
    return "\r\n".join(session + sections)


def with_opus_format(sdp: str) -> str:
    """The answer, with a format line for Opus that says what we want to hear (RFC 7587 section 6.1).

    Mono and wide band, since recognisers work at 16 kHz: a browser then codes in SILK, which carries redundancy for
    lost packets (in-band FEC, sent when our receiver reports tell of loss), and spends all its bits below 8 kHz.
    32 kb/s leaves room for both; the browser's own choice for wide band is 20.
    """
    return re.sub(
        r"(a=rtpmap:(\d+) opus/48000/2\r\n)",
        r"\1a=fmtp:\2 minptime=20;stereo=0;useinbandfec=1;maxplaybackrate=16000;maxaveragebitrate=32000\r\n",
        sdp,
        count=1,
        flags=re.IGNORECASE,
    )


# --- what the server says


@dataclass(frozen=True, slots=True)
class IceServer:
    """A STUN or TURN server, for both ends."""

    urls: tuple[str, ...]
    username: str | None = None
    credential: str | None = None


def _message(kind: str, **fields: Any) -> str:
    # No NaN: the page's JSON.parse would not take it.
    return json.dumps({"type": kind, **fields}, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _ice_servers(servers: Sequence[IceServer]) -> list[dict[str, Any]]:
    return [
        {
            "urls": list(server.urls),
            **({"username": server.username} if server.username is not None else {}),
            **({"credential": server.credential} if server.credential is not None else {}),
        }
        for server in servers
    ]


def hello(
    *,
    listens: bool,
    listen_fix: str,
    model: str,
    voice: str,
    ice_servers: Sequence[IceServer],
    sample_rate: int,
    resume: str,
    received: int,
) -> str:
    """The first message on a socket.  `listen_fix` says what to do where the server cannot understand speech.

    A page that loses its socket opens another within ten seconds, with `resume` and the number of messages it has had
    so far in the query: `?resume=...&received=...`.  It is then sent those it has not had, and hello again, which
    says how many of its own messages the server `received`.
    """
    return _message(
        "hello",
        listens=listens,
        listen_fix=listen_fix,
        model=model,
        voice=voice,
        ice_servers=_ice_servers(ice_servers),
        sample_rate=sample_rate,
        resume=resume,
        received=received,
    )


def ice(servers: Sequence[IceServer]) -> str:
    """The servers for the next connection, with credentials that are valid for longer."""
    return _message("ice", ice_servers=_ice_servers(servers))


def answer(sdp: str, offer: int = 0) -> str:
    return _message("answer", sdp=sdp, id=offer)


def candidate(line: str, offer: int) -> str:
    """An address of the server that was found after the answer."""
    return _message("candidate", candidate=line, id=offer)


def reconnect(offer: int) -> str:
    """Nobody seems to be at your end of the connection that began with this offer: make another."""
    return _message("reconnect", id=offer)


def pong(ping: Ping, now: int) -> str:
    """`now` in monotonic nanoseconds, read as late as possible."""
    return _message("pong", id=ping.id, t_ms=ping.t_ms, server_ms=now / 1e6)


def speech(stream: int, text: str) -> str:
    """`text` was added to what `stream` says."""
    return _message("speech", stream=stream, text=text)


def heard(stream: int, chars: int) -> str:
    """The first `chars` of the stream's text have been heard."""
    return _message("heard", stream=stream, chars=chars)


def speech_end(stream: int, *, interrupted: bool, chars: int) -> str:
    return _message("speech_end", stream=stream, interrupted=interrupted, chars=chars)


def user(text: str, *, final: bool) -> str:
    """What the user said, as far as it was understood."""
    return _message("user", text=text, final=final)


def state(name: str) -> str:
    """`listening`, `thinking` or `speaking`."""
    return _message("state", state=name)


def flush(resume_rtp: int) -> str:
    """Fall silent now; sound again from the packet with this timestamp."""
    return _message("flush", resume_rtp=resume_rtp)


def stats(
    *,
    t_ms: float,
    lead_ms: float | None,
    slack_ms: float | None,
    jitter_ms: float | None,
    gaps: int,
    first_sound_ms: float | None,
    stop_ms: float | None,
    path_ms: float | None,
    source: str,
    error_ms: float | None,
) -> str:
    """Figures for the page's plots, about five times a second."""
    return _message(
        "stats",
        t_ms=t_ms,
        lead_ms=lead_ms,
        slack_ms=slack_ms,
        jitter_ms=jitter_ms,
        gaps=gaps,
        first_sound_ms=first_sound_ms,
        stop_ms=stop_ms,
        path_ms=path_ms,
        source=source,
        error_ms=error_ms,
    )


def error(code: str, message: str, fix: str = "") -> str:
    return _message("error", code=code, message=message, fix=fix)
