"""What a telephone says about its sound (SDP, RFC 8866), and the answer (RFC 3264): G.711, and keys by RFC 4733."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

from breeze_rtc.errors import PeerError

CODECS = {0: "PCMU", 8: "PCMA"}
"""The static payload types of RFC 3551 section 6."""
KEYS = 101
"""What telephones and PBXs use for telephone-event, though any dynamic one would do."""

_MIRRORED = {"sendrecv": "sendrecv", "sendonly": "recvonly", "recvonly": "sendonly", "inactive": "inactive"}


@dataclass(frozen=True, slots=True)
class Description:
    """The audio of one side."""

    host: str
    port: int
    """Where it wants RTP; RTCP goes to `rtcp_port`."""
    codecs: tuple[int, ...]
    """Payload types of G.711, the one it likes best first."""
    keys: int | None
    """The payload type of its telephone-event; None: it has none."""
    direction: str = "sendrecv"
    """`sendrecv`, `sendonly`, `recvonly`, `inactive`, from its own side."""
    rtcp_port: int = 0
    sections: tuple[str, ...] = ()
    """Its m= lines, for an answer has as many."""
    place: int = 0
    """Which of them this is."""

    @property
    def hears(self) -> bool:
        """Whether it plays what is sent to it; not while it is on hold."""
        return self.direction in ("sendrecv", "recvonly") and self.host not in ("0.0.0.0", "::")


def read(body: bytes) -> Description:
    """An offer or an answer.  Raises `PeerError` where there is no audio that can be spoken here."""
    try:
        lines = [line.strip() for line in body.decode().splitlines()]
    except UnicodeDecodeError:
        raise PeerError("sdp_malformed", "a session description that is not UTF-8") from None
    sections: list[list[str]] = [[]]
    for line in lines:
        if line.startswith("m="):
            sections.append([])
        sections[-1].append(line)
    session, *media = sections
    for place, section in enumerate(media):
        words = section[0][2:].split()
        if len(words) < 4 or words[0] != "audio" or words[2] not in ("RTP/AVP", "RTP/AVPF") or words[1] == "0":
            continue
        found = _audio(session, section, words)
        if found.codecs:
            return Description(
                found.host,
                found.port,
                found.codecs,
                found.keys,
                found.direction,
                found.rtcp_port,
                tuple(part[0] for part in media),
                place,
            )
    raise PeerError("codec_unknown", "no G.711 audio over RTP is offered", "Allow PCMU or PCMA, without SRTP.")


def _audio(session: list[str], section: list[str], words: list[str]) -> Description:
    try:
        host = str(ip_address(_connection(section) or _connection(session)))
        port = int(words[1].partition("/")[0])
    except ValueError:
        raise PeerError("sdp_malformed", "a session description without an address") from None
    maps = {}
    for line in section:
        if line.startswith("a=rtpmap:"):
            number, _, codec = line.removeprefix("a=rtpmap:").partition(" ")
            maps[number] = codec.strip().upper()
    codecs, keys = [], None
    for word in words[3:]:
        if not word.isdecimal() or int(word) > 127:
            continue
        name = maps.get(word, f"{CODECS.get(int(word), '')}/8000")
        if int(word) in CODECS and name.startswith(f"{CODECS[int(word)]}/8000"):
            codecs.append(int(word))
        elif name.startswith("TELEPHONE-EVENT/8000") and keys is None:
            keys = int(word)
    rtcp_port = port + 1
    for line in section:
        if line.startswith("a=rtcp:") and (said := line.removeprefix("a=rtcp:").split()[0]).isdecimal():
            rtcp_port = int(said)  # RFC 3605
    direction = next((line[2:] for line in (*section, *session) if line[2:] in _MIRRORED), "sendrecv")
    return Description(host, port, tuple(codecs), keys, direction, rtcp_port)


def _connection(lines: list[str]) -> str:
    for line in lines:
        words = line.split()
        if line.startswith("c=") and len(words) == 3:
            return words[2].partition("/")[0]
    return ""


def offer(host: str, port: int, *, session: int, version: int = 1) -> bytes:
    """What we want: mu-law or A-law, keys, both ways.  session: a number of this call; version: as in `answer`."""
    return _written(host, session, version, [_audio_lines(port, tuple(CODECS), KEYS, "sendrecv")])


def answer(said: Description, host: str, port: int, *, session: int, version: int = 1) -> bytes:
    """Our side of `said`: the first codec of its that we have, and none of its other media.

    version: counts what we say in this call, from 1.
    """
    sections = []
    for number, line in enumerate(said.sections):
        if number == said.place:
            sections.append(_audio_lines(port, said.codecs[:1], said.keys, _MIRRORED[said.direction]))
        else:  # Not taken: the same line with port 0 (RFC 3264 section 6).
            media, _, *rest = line[2:].split()
            sections.append([" ".join((f"m={media} 0", *rest))])
    return _written(host, session, version, sections)


def _audio_lines(port: int, codecs: tuple[int, ...], keys: int | None, direction: str) -> list[str]:
    types = codecs if keys is None else (*codecs, keys)
    lines = [f"m=audio {port} RTP/AVP {' '.join(map(str, types))}"]
    lines += [f"a=rtpmap:{number} {CODECS[number]}/8000" for number in codecs]
    if keys is not None:
        lines += [f"a=rtpmap:{keys} telephone-event/8000", f"a=fmtp:{keys} 0-16"]
    return [*lines, "a=ptime:20", f"a={direction}"]


def _written(host: str, session: int, version: int, sections: list[list[str]]) -> bytes:
    family = "IP6" if ":" in host else "IP4"
    lines = ["v=0", f"o=- {session} {version} IN {family} {host}", "s=-", f"c=IN {family} {host}", "t=0 0"]
    return "\r\n".join((*lines, *(line for section in sections for line in section), "")).encode()
