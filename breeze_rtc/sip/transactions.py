"""Requests and their answers over a network that loses (RFC 3261 section 17): who asks twice gets the same answer
twice, and what is asked here is asked until it is answered.

No I/O and no clock, as all of `breeze_rtc.sip`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.sip.message import Headers, Request, Response, address, host_of, parameters

PORT = 5060
T1_NS = 500 * MS
T2_NS = 4 * SECOND
GIVE_UP_NS = 64 * T1_NS
"""Section 17.1.1.1: the first repetition, the longest pause between two, the end."""
MAX_ASKED = 20_000
"""Requests that are remembered; more at once are an attack, and dropped."""


class Hop(NamedTuple):
    """The next one on a message's way: `udp` or `tcp`, host, port."""

    transport: str
    host: str
    port: int


@dataclass(slots=True, eq=False)
class Served:
    """Something that was asked of us, and what we said (section 17.2)."""

    key: tuple[str, str, str]
    request: Request
    back: Hop
    response: bytes = b""
    status: int = 0
    answered_at: int = 0
    is_acknowledged: bool = False
    step_ns: int = T1_NS
    over_at: int = 0
    wake_at: int | None = None
    on_silence: Callable[[int], None] = lambda now: None
    """Called when an answer that needs to be acknowledged never was."""

    @property
    def was_said_once(self) -> bool:
        return self.step_ns == T1_NS


@dataclass(slots=True, eq=False)
class Asked:
    """Something that we asked, until it is answered and a while after (section 17.1)."""

    request: Request
    hop: Hop
    on_response: Callable[[Response, int], None]
    over_at: int
    key: tuple[str, str]
    has_word: bool = False
    is_over: bool = False
    # What acknowledges the final answer, each time that it comes.
    ack: tuple[bytes, Hop] | None = None
    ack_tag: str = ""
    step_ns: int = T1_NS
    wake_at: int | None = None


class Transactions:
    """All of one address: what it was asked and what it asks."""

    def __init__(self) -> None:
        self.served: dict[tuple[str, str, str], Served] = {}
        self.asked: dict[tuple[str, str], Asked] = {}
        self._timers: list[tuple[int, int, Served | Asked]] = []
        self._count = count()
        self._sends: list[tuple[bytes, Hop]] = []

    # --- what is asked of us

    def take(self, request: Request, hop: Hop) -> tuple[Request, Served | None, bool]:
        """A request has come from `hop`.

        Returns it with the address that it came from in it; what was said to it, or will be, and whether it is new.
        None for one that acknowledges an answer that took a call, which is known by the call; and where there is no
        room.
        """
        request, back, key = _received(request, hop)
        served = self.served.get(key)
        if request.method == "ACK":
            if served is not None and served.status >= 300:
                served.is_acknowledged = True
                return request, served, False
            return request, None, True
        if served is not None:
            if served.response:
                self._sends.append((served.response, served.back))
            return request, served, False
        if len(self.served) >= MAX_ASKED:
            return request, None, False
        served = self.served[key] = Served(key, request, back)
        return request, served, True

    def respond(self, served: Served, status: int, response: bytes, now: int) -> None:
        """Answer, finally from 200 on."""
        served.status, served.response = status, response
        self._sends.append((response, served.back))
        if status >= 200:
            served.answered_at, served.over_at = now, now + GIVE_UP_NS
            self._wake(served, now + T1_NS if served.request.method == "INVITE" else served.over_at)

    # --- what we ask

    def ask(self, request: Request, hop: Hop, on_response: Callable[[Response, int], None], now: int) -> Asked:
        """Ask until it is answered; on_response: called with each answer, 408 where there is none."""
        key = (parameters(request.get("via").partition(";")[2])["branch"], request.method)
        asked = self.asked[key] = Asked(request, hop, on_response, now + GIVE_UP_NS, key)
        self._sends.append((bytes(request), hop))
        self._wake(asked, now + T1_NS)
        return asked

    def acknowledge(self, asked: Asked, ack: Request, hop: Hop, tag: str) -> None:
        """Our call was taken, by the side with this tag: tell it so, again each time that it says it again."""
        asked.ack, asked.ack_tag = (bytes(ack), hop), tag
        self._sends.append(asked.ack)

    def cancel(self, asked: Asked, now: int) -> None:
        """Take a request back (section 9.1): the same as what it cancels, but for the method."""
        request = asked.request
        names = ("via", "route", "max-forwards", "from", "to", "call-id")
        kept = tuple(header for header in request.headers if header[0] in names)
        cseq = (("cseq", f"{request.cseq[0]} CANCEL"),)
        if (asked.key[0], "CANCEL") not in self.asked and not asked.is_over:
            asked.over_at = now + GIVE_UP_NS
            self._wake(asked, asked.over_at)
            self.ask(Request((*kept, *cseq), b"", "CANCEL", request.uri), asked.hop, ignore, now)

    def hear(self, response: Response, now: int) -> None:
        """An answer has come."""
        branch = parameters(response.get("via").partition(";")[2]).get("branch", "")
        asked = self.asked.get((branch, response.cseq[1]))
        if asked is None:
            return
        is_invite = asked.request.method == "INVITE"
        if response.status < 200:
            if asked.is_over:
                return
            asked.has_word, asked.step_ns = True, T2_NS
            if is_invite:
                asked.wake_at = None  # It may ring for as long as it likes.
            asked.on_response(response, now)
            return
        is_first, asked.is_over = not asked.is_over, True
        asked.over_at = now + GIVE_UP_NS
        self._wake(asked, asked.over_at)
        if is_invite and is_first and response.status >= 300:
            asked.ack = (bytes(_refusal_ack(asked.request, response)), asked.hop)
        if not is_first or (is_invite and response.status >= 300):
            tag = address(response.get("to"))[1].get("tag", "")
            if asked.ack is not None and (response.status >= 300 or tag == asked.ack_tag):
                self._sends.append(asked.ack)
        if is_first:
            asked.on_response(response, now)

    # --- time, and what comes of it

    def tick(self, now: int) -> None:
        """Do what is due."""
        while self._timers and self._timers[0][0] <= now:
            at, _, thing = heapq.heappop(self._timers)
            if thing.wake_at != at:
                continue  # It was put off.
            thing.wake_at = None
            if isinstance(thing, Served):
                self._serve_again(thing, now)
            else:
                self._ask_again(thing, now)

    def wake_at(self) -> int | None:
        """When `tick` has something to do, if nothing else happens."""
        while self._timers and self._timers[0][2].wake_at != self._timers[0][0]:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def sends(self) -> list[tuple[bytes, Hop]]:
        """Messages to send, in this order."""
        sends, self._sends = self._sends, []
        return sends

    # ---

    def _serve_again(self, served: Served, now: int) -> None:
        if now >= served.over_at:
            del self.served[served.key]
            if not served.is_acknowledged:
                served.on_silence(now)
        elif served.is_acknowledged:
            self._wake(served, served.over_at)
        else:
            # An answer that takes a call is repeated on any transport, for it is the caller who has to know it.
            if served.status < 300 or served.back.transport == "udp":
                self._sends.append((served.response, served.back))
            served.step_ns = min(2 * served.step_ns, T2_NS)
            self._wake(served, min(now + served.step_ns, served.over_at))

    def _ask_again(self, asked: Asked, now: int) -> None:
        if now >= asked.over_at:
            del self.asked[asked.key]
            if not asked.is_over:
                asked.on_response(Response((), b"", 408, "nobody answers"), now)
            return
        if asked.hop.transport == "udp":
            self._sends.append((bytes(asked.request), asked.hop))
        is_invite = asked.request.method == "INVITE"
        asked.step_ns = 2 * asked.step_ns if is_invite else min(2 * asked.step_ns, T2_NS)
        self._wake(asked, min(now + asked.step_ns, asked.over_at))

    def _wake(self, thing: Served | Asked, at: int) -> None:
        thing.wake_at = at
        heapq.heappush(self._timers, (at, next(self._count), thing))


def ignore(response: Response, now: int) -> None:
    """It is over, whatever is said to that."""


def _received(request: Request, hop: Hop) -> tuple[Request, Hop, tuple[str, str, str]]:
    """The request with the address that it came from (section 18.2.1, RFC 3581), where answers go, and its name."""
    via = request.all("via")[0]
    protocol, _, rest = via.partition(" ")
    sent_by, _, options = rest.strip().partition(";")
    said = parameters(options)
    host, port = host_of(sent_by.strip())
    if "rport" in said:
        port = hop.port
        options = ";".join(f"rport={port}" if part.strip() == "rport" else part for part in options.split(";"))
    if host != hop.host or "rport" in said:
        options += f";received={hop.host}"
    stamped = f"{protocol} {sent_by.strip()}{';' if options else ''}{options.removeprefix(';')}"
    others = tuple(("via", other) for other in request.all("via")[1:])
    kept = tuple(header for header in request.headers if header[0] != "via")
    headers: Headers = (("via", stamped), *others, *kept)
    request = Request(headers, request.body, request.method, request.uri)
    back = hop if hop.transport == "tcp" else Hop("udp", hop.host, port or PORT)
    branch = said.get("branch", "")
    if not branch.startswith("z9hG4bK"):  # RFC 2543: the rest of it has to tell them apart.
        branch += f"{request.get('call-id')} {request.cseq[0]} {request.get('from')}"
    return request, back, (branch, sent_by.strip().lower(), "INVITE" if request.method == "ACK" else request.method)


def _refusal_ack(request: Request, response: Response) -> Request:
    """Section 17.1.1.3: part of the request that was refused."""
    names = ("via", "route", "max-forwards", "from", "call-id")
    kept = tuple(header for header in request.headers if header[0] in names)
    more = (("to", response.get("to")), ("cseq", f"{request.cseq[0]} ACK"))
    return Request((*kept, *more), b"", "ACK", request.uri)
