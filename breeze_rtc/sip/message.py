"""SIP messages, as they are on the wire (RFC 3261 sections 7, 20 and 25): bytes -> small frozen values, and back.

Header names are kept in lower case and whole, whatever form they came in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn, TypeVar

from breeze_rtc.errors import PeerError

MAX_MESSAGE_BYTES = 64 * 1024
VERSION = "SIP/2.0"

_COMPACT = {  # RFC 3261 section 7.3.3, RFC 3515, RFC 3892, RFC 4028, RFC 6665
    **{"b": "referred-by", "c": "content-type", "e": "content-encoding", "f": "from", "i": "call-id", "k": "supported"},
    **{"l": "content-length", "m": "contact", "o": "event", "r": "refer-to", "s": "subject", "t": "to", "v": "via"},
    **{"x": "session-expires"},
}
_SPELLED = {"call-id": "Call-ID", "cseq": "CSeq", "www-authenticate": "WWW-Authenticate"}
_LISTS = {"via", "route", "record-route", "contact", "allow", "supported", "require", "unsupported", "accept"}
"""Headers whose line may hold several values, with commas between."""

Headers = tuple[tuple[str, str], ...]


class Uri(NamedTuple):
    """`sip:user@host:port;name=value`; port None where it is not said."""

    user: str
    host: str
    port: int | None
    parameters: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Message:
    headers: Headers
    body: bytes

    def get(self, name: str) -> str:
        """The first value of a header; "" where there is none."""
        return next(self._values(name), "")

    def all(self, name: str) -> tuple[str, ...]:
        """Every value of a header, in order."""
        return tuple(self._values(name))

    @property
    def cseq(self) -> tuple[int, str]:
        """Number and method; (0, "") where it is missing."""
        number, _, method = self.get("cseq").partition(" ")
        return (int(number), method.strip()) if number.isdecimal() and len(number) < 11 else (0, "")

    def _values(self, name: str) -> Iterator[str]:
        for known, value in self.headers:
            if known == name:
                yield from split(value) if name in _LISTS else (value,)

    def _written(self, start: str) -> bytes:
        lines = [start]
        lines += [f"{_SPELLED.get(name, name.title())}: {value}" for name, value in self.headers]
        lines += [f"Content-Length: {len(self.body)}", "", ""]
        return "\r\n".join(lines).encode() + self.body


@dataclass(frozen=True, slots=True)
class Request(_Message):
    method: str
    uri: str

    def __bytes__(self) -> bytes:
        return self._written(f"{self.method} {self.uri} {VERSION}")

    def with_headers(self, **changed: str) -> Request:
        """The same with other values for some headers; `_` in a name stands for `-`."""
        values = {name.replace("_", "-"): value for name, value in changed.items()}
        kept = tuple((name, values.pop(name) if name in values else value) for name, value in self.headers)
        return replace(self, headers=(*kept, *values.items()))


@dataclass(frozen=True, slots=True)
class Response(_Message):
    status: int
    reason: str

    def __bytes__(self) -> bytes:
        return self._written(f"{VERSION} {self.status} {self.reason}")


def parse(data: bytes) -> Request | Response:
    """One whole message.  Raises `PeerError` for what is none."""
    head, gap, body = data.partition(b"\r\n\r\n")
    if not gap or len(data) > MAX_MESSAGE_BYTES:
        _refused("no SIP message")
    try:
        start, *lines = head.decode().replace("\r\n ", " ").replace("\r\n\t", " ").split("\r\n")
    except UnicodeDecodeError:
        _refused("a SIP message that is not UTF-8")
    headers = []
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.strip().lower()
        if not colon or not name:
            _refused(f"{line[:80]!r} is no header")
        headers.append((_COMPACT.get(name, name), value.strip()))
    length = next((value for name, value in headers if name == "content-length"), None)
    if length is not None:
        if not length.isdecimal() or len(length) > 6 or int(length) > len(body):
            _refused("a SIP message that is cut off")
        body = body[: int(length)]
    kept = tuple(header for header in headers if header[0] != "content-length")
    first, _, rest = start.partition(" ")
    if first == VERSION:
        status, _, reason = rest.partition(" ")
        if len(status) != 3 or not status.isdecimal():
            _refused(f"{start[:80]!r} is no status line")
        return _checked(Response(kept, body, int(status), reason))
    uri, _, version = rest.rpartition(" ")
    if version != VERSION or not first or not uri:
        _refused(f"{start[:80]!r} is no request line")
    return _checked(Request(kept, body, first, uri))


_Said = TypeVar("_Said", Request, Response)


class Inbox:
    """Bytes of a connection, in any pieces -> whole messages (section 18.3)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Raises `PeerError` where no message can follow."""
        self._rest += data
        messages: list[bytes] = []
        while True:
            self._rest = self._rest.lstrip(b"\r\n")  # Keep-alives (RFC 5626 section 3.5.1).
            head, gap, _ = self._rest.partition(b"\r\n\r\n")
            if len(head) > MAX_MESSAGE_BYTES:
                _refused("a message without an end")
            if not gap:
                return messages
            size = len(head) + 4 + self._length(head)
            if size > MAX_MESSAGE_BYTES:
                _refused(f"a message of {size} bytes; {MAX_MESSAGE_BYTES} are allowed")
            if len(self._rest) < size:
                return messages
            messages.append(self._rest[:size])
            self._rest = self._rest[size:]

    @staticmethod
    def _length(head: bytes) -> int:
        for line in head.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.strip().lower() in (b"content-length", b"l") and value.strip().isdigit():
                return int(value)
        return 0


def split(value: str) -> list[str]:
    """`a, "b, c" <d,e>` -> its parts, by the commas that stand in neither quotes nor brackets."""
    parts, begins, is_quoted, is_bracketed = [], 0, False, False
    for at, letter in enumerate(value):
        if letter == '"' and (at == 0 or value[at - 1] != "\\"):
            is_quoted = not is_quoted
        elif not is_quoted and letter in "<>":
            is_bracketed = letter == "<"
        elif letter == "," and not is_quoted and not is_bracketed:
            parts.append(value[begins:at].strip())
            begins = at + 1
    return [part for part in (*parts, value[begins:].strip()) if part]


def address(value: str) -> tuple[str, dict[str, str]]:
    """`"Name" <sip:a@b>;tag=c` -> its URI, and the parameters after it (section 20.10)."""
    quoted = value.rfind('"')
    before, bracket, rest = value[quoted + 1 :].partition("<")
    if bracket:
        uri, _, after = rest.partition(">")
    else:
        # Without brackets what follows a semicolon belongs to the header, not to the URI.
        uri, _, after = before.strip().partition(";")
        after = ";" + after
    return uri.strip(), parameters(after)


def parameters(text: str) -> dict[str, str]:
    """`;a=b;c` -> {"a": "b", "c": ""}."""
    found = {}
    for item in text.split(";"):
        name, _, value = item.strip().partition("=")
        if name:
            found[name.strip().lower()] = value.strip().strip('"')
    return found


def uri_of(text: str) -> Uri:
    """Raises `PeerError` for what is no SIP URI."""
    scheme, _, rest = text.partition(":")
    if scheme.lower() not in ("sip", "sips"):
        _refused(f"{text[:80]!r} is no SIP address")
    rest, _, options = rest.partition("?")[0].partition(";")
    user, _, place = rest.rpartition("@")
    host, port = host_of(place)
    if not host:
        _refused(f"{text[:80]!r} names no host")
    return Uri(user, host, port, parameters(options))


def host_of(text: str) -> tuple[str, int | None]:
    """`host:port`, `[2001:db8::1]:5060`, or without a port."""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    else:
        host, _, port = text.partition(":")
    return host.strip(), int(port) if port.isdecimal() and len(port) < 6 and 0 < int(port) < 65_536 else None


def written_host(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _checked(message: _Said) -> _Said:
    """With all that every message has (section 8.1.1); Max-Forwards is missing from many."""
    for name in ("via", "from", "to", "call-id", "cseq"):
        if not message.get(name):
            _refused(f"a SIP message without {name!r}")
    if message.cseq[1] == "":
        _refused("a CSeq that cannot be read")
    return message


def _refused(detail: str) -> NoReturn:
    raise PeerError("sip_malformed", detail)
