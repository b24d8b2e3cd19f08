"""What a user agent says of calls: the calls themselves, and what happens to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from breeze_rtc.sip.message import Headers, uri_of
from breeze_rtc.sip.transactions import Asked, Hop, Served


@dataclass(frozen=True, slots=True)
class Account:
    """A name at a SIP server.  uri: `sip:NAME@HOST`, with a port where it is not 5060."""

    uri: str
    password: str = field(default="", repr=False)

    @property
    def user(self) -> str:
        return uri_of(self.uri).user

    @property
    def registrar(self) -> str:
        return "sip:" + self.uri.rpartition("@")[2]


class State(Enum):
    """How far a call is."""

    RINGING = "not answered yet"
    UP = "answered"
    OVER = "over"


@dataclass(slots=True, eq=False)
class Call:
    """One call.  What it says here is for reading; `UserAgent` changes it."""

    name: str
    """Its Call-ID."""
    is_ours: bool
    """We called."""
    local: str
    remote: str
    """The addresses of both sides, `<sip:...>`."""
    local_tag: str
    target: str
    """Where requests in this call go."""
    source: Hop
    """Where it came from, or went to first."""
    here: tuple[str, int]
    """Our address, as the other side sees it."""
    remote_tag: str = ""
    routes: tuple[str, ...] = ()
    headers: Headers = ()
    """Those of its INVITE, for a call that came in."""
    state: State = State.RINGING
    round_trip_ns: int | None = None
    """To the other side and back, by how soon it acknowledged our answer; None where that had to be said twice, and for
    a call of ours."""
    cseq: int = 0
    remote_cseq: int = 0
    # What was asked and waits for `accept` or `refuse`; what was accepted and waits for its ACK.
    pending: Served | None = None
    taken: Served | None = None
    # Our INVITE, until it is answered.
    asked: Asked | None = None
    # The offer was ours, in the answer: theirs comes with the ACK.
    awaits_answer: bool = False
    must_end: bool = False


@dataclass(frozen=True, slots=True)
class Invited:
    """A call comes in: `ring`, `accept` or `refuse` it.  body: an offer; where it is empty, the answer offers."""

    call: Call
    body: bytes


@dataclass(frozen=True, slots=True)
class Ringing:
    """Our call rings."""

    call: Call


@dataclass(frozen=True, slots=True)
class Answered:
    """Our call was taken, or our answer has come through.  body: the answer to our offer, where there was one."""

    call: Call
    body: bytes


@dataclass(frozen=True, slots=True)
class Reoffered:
    """The other side wants another sound (hold, another address): `accept` or `refuse`, and the call goes on."""

    call: Call
    body: bytes


@dataclass(frozen=True, slots=True)
class Pressed:
    """A key, by INFO; most come as RTP."""

    call: Call
    digit: str


@dataclass(frozen=True, slots=True)
class Transferred:
    """What became of `transfer`: a status of SIP, 2xx when the other took it."""

    call: Call
    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The call is over.  status: why it did not come about; 0 for one that did."""

    call: Call
    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class Registered:
    """The account's registrar has answered: 200, or why it did not let us in (408: it said nothing)."""

    status: int
    reason: str


Event = Invited | Ringing | Answered | Reoffered | Pressed | Transferred | Ended | Registered
