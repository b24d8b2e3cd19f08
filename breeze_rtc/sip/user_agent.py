"""A SIP user agent (RFC 3261): answers calls and places them, hears keys, hands calls on, registers an account.

No I/O and no clock:

    agent.receive(data, hop, now)               # a message has come
    agent.call(...), agent.accept(...), ...     # what is to be done
    agent.tick(now)                             # once `wake_at()` has come
    for data, hop in agent.sends(): ...         # after each of these
    for event in agent.events(): ...

What a message says of sound is handed through as it is (`breeze_rtc.sip.sdp`); what is lost on the way is said again
(`breeze_rtc.sip.transactions`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from breeze_rtc.clock import SECOND
from breeze_rtc.errors import PeerError
from breeze_rtc.sip import digest
from breeze_rtc.sip.call import (
    Account,
    Answered,
    Call,
    Ended,
    Event,
    Invited,
    Pressed,
    Registered,
    Reoffered,
    Ringing,
    State,
    Transferred,
)
from breeze_rtc.sip.message import Headers, Request, Response, address, parse, uri_of, written_host
from breeze_rtc.sip.transactions import PORT, Asked, Hop, Served, Transactions, ignore

EXPIRES_S = 300
"""An account is registered for so long, and again before that is over."""
AGAIN_NS = 30 * SECOND
"""After a registrar refused, or did not answer."""

ALLOW = "INVITE, ACK, CANCEL, BYE, OPTIONS, INFO, UPDATE, NOTIFY"
NAME = "breeze_rtc"

_REASONS = {
    **{100: "Trying", 180: "Ringing", 200: "OK", 400: "Bad Request", 405: "Method Not Allowed"},
    **{415: "Unsupported Media Type", 416: "Unsupported URI Scheme", 420: "Bad Extension"},
    **{481: "Call/Transaction Does Not Exist", 486: "Busy Here", 487: "Request Terminated"},
    **{488: "Not Acceptable Here", 489: "Bad Event", 491: "Request Pending", 500: "Server Internal Error"},
    **{503: "Service Unavailable", 603: "Decline"},
}


@dataclass(slots=True, eq=False)
class _Registration:
    account: Account
    name: str
    tag: str
    cseq: int = 0
    expires_s: int = EXPIRES_S
    wake_at: int | None = None


class UserAgent:
    """One address, any number of calls."""

    def __init__(
        self,
        local: Callable[[Hop], tuple[str, int]],
        *,
        account: Account | None = None,
        token: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        """local: our host and port, as a hop sees them.  token: names that nobody guesses."""
        self.account = account
        self._local = local
        self._token = token
        self._calls: dict[tuple[str, str], Call] = {}
        self._transactions = Transactions()
        self._registration: _Registration | None = None
        self._events: list[Event] = []

    # --- inputs

    def receive(self, data: bytes, hop: Hop, now: int) -> None:
        """One message has come from `hop`."""
        if not data.strip(b"\r\n\0"):
            return  # A keep-alive.
        try:
            message = parse(data)
            if isinstance(message, Request):
                self._take(message, hop, now)
            else:
                self._transactions.hear(message, now)
        except PeerError:
            pass  # what is no message gets no answer

    def tick(self, now: int) -> None:
        """Do what is due."""
        self._transactions.tick(now)
        registration = self._registration
        if registration is not None and registration.wake_at is not None and registration.wake_at <= now:
            registration.wake_at = None
            self._register(registration, now)

    # --- calls that come in

    def ring(self, call: Call, now: int) -> None:
        """The other side hears it ring."""
        if call.pending is not None:
            self._respond(call.pending, 180, now, call, contact=True)

    def accept(self, call: Call, body: bytes, now: int) -> None:
        """Take a call that came in, or the sound that it wants now.  body: the answer to what was offered, or an offer
        where nothing was."""
        served, call.pending = call.pending, None
        if served is None:
            return
        call.state = State.UP
        call.awaits_answer = not served.request.body
        if served.request.method == "INVITE":
            call.taken = served
            served.on_silence = lambda at: self._never_acknowledged(call, at)
        self._respond(served, 200, now, call, contact=True, body=body)

    def refuse(self, call: Call, status: int, now: int) -> None:
        """Refuse a call that came in, which is over then, or the sound that it wants, and it stays as it was."""
        served, call.pending = call.pending, None
        if served is not None:
            self._respond(served, status, now, call)
        if call.state is State.RINGING and not call.is_ours:
            self._forget(call)

    def hang_up(self, call: Call, now: int, status: int = 603) -> None:
        """End a call, in whatever state.  status: what one is refused with that was not answered."""
        if call.state is State.OVER:
            return
        if call.state is State.RINGING:
            if not call.is_ours:
                self.refuse(call, status, now)
            else:
                self._forget(call)
                if call.asked is not None and call.asked.has_word:
                    self._transactions.cancel(call.asked, now)
            return
        if call.pending is not None:
            self.refuse(call, 487, now)
        if call.taken is not None:
            call.must_end = True  # Not before the ACK (section 15).
            return
        self._bye(call, now)

    def probe(self, call: Call, now: int) -> None:
        """Find out whether the other side still knows of the call (section 12.2.1.2); it has `Ended` if not."""

        def on_response(response: Response, at: int) -> None:
            if response.status in (408, 481):
                self._end(call, 0, "the other side is gone")

        if call.state is State.UP:
            self._ask(self._request_in(call, "OPTIONS"), self._hop_in(call), call, on_response, now)

    # --- calls that go out

    def hop_to(self, uri: str) -> Hop:
        """Where a request to `uri` goes: an account's server takes them all.  Raises `PeerError` for no SIP address."""
        place = uri_of(self.account.registrar if self.account is not None else uri)
        transport = "tcp" if place.parameters.get("transport", "").lower() == "tcp" else "udp"
        return Hop(transport, place.host, place.port or PORT)

    def call(self, to: str, body: bytes, now: int) -> Call:
        """Call a SIP URI, offering `body`; says `Ringing`, then `Answered` or `Ended`."""
        hop = self.hop_to(to)
        here = self._local(hop)
        local = self.account.uri if self.account is not None else f"sip:{NAME}@{written_host(*here)}"
        name = f"{self._token()}@{here[0]}"
        call = Call(name, True, f"<{local}>", f"<{to}>", self._token(), to, hop, here)
        self._calls[name, call.local_tag] = call
        call.asked = self._ask(
            self._request_in(call, "INVITE", (("contact", self._contact(call)), *_TYPE), body),
            hop,
            call,
            lambda response, at: self._on_invite(call, response, at),
            now,
        )
        return call

    def transfer(self, call: Call, to: str, now: int) -> None:
        """Ask the other side to call `to` instead (REFER, RFC 3515); says `Transferred`.  The call itself goes on."""

        def on_response(response: Response, at: int) -> None:
            if response.status >= 300:
                self._events.append(Transferred(call, response.status, response.reason))

        headers = (("refer-to", f"<{to}>"), ("referred-by", call.local), ("contact", self._contact(call)))
        self._ask(self._request_in(call, "REFER", headers), self._hop_in(call), call, on_response, now)

    # --- the account

    def register(self, now: int) -> None:
        """Register the account, and keep it registered; says `Registered` each time."""
        assert self.account is not None, "there is no account"
        if self._registration is None:
            here = self._local(self.hop_to(self.account.registrar))
            self._registration = _Registration(self.account, f"{self._token()}@{here[0]}", self._token())
        self._register(self._registration, now)

    def unregister(self, now: int) -> None:
        """No more calls to the account come here."""
        registration, self._registration = self._registration, None
        if registration is not None:
            registration.expires_s = 0
            self._register(registration, now)

    # --- outputs

    def sends(self) -> list[tuple[bytes, Hop]]:
        """Messages to send, in this order."""
        return self._transactions.sends()

    def events(self) -> list[Event]:
        """What happened."""
        events, self._events = self._events, []
        return events

    def wake_at(self) -> int | None:
        """When `tick` has something to do, if nothing else happens."""
        registration_at = self._registration.wake_at if self._registration is not None else None
        return min((at for at in (self._transactions.wake_at(), registration_at) if at is not None), default=None)

    @property
    def is_asking(self) -> bool:
        """Whether something that we asked has no answer yet."""
        return any(not asked.is_over for asked in self._transactions.asked.values())

    # --- what is asked of us

    def _take(self, request: Request, hop: Hop, now: int) -> None:
        request, served, is_new = self._transactions.take(request, hop)
        if request.method == "ACK" and is_new:
            self._acknowledged(request, now)
        if served is None or not is_new:
            return
        if request.cseq[1] != request.method:
            self._respond(served, 400, now)
        elif request.method == "CANCEL":
            self._cancelled(served, now)
        elif tag := address(request.get("to"))[1].get("tag"):
            self._take_in(self._calls.get((request.get("call-id"), tag)), served, now)
        elif request.method == "INVITE":
            self._invited(served, hop, now)
        elif request.method == "OPTIONS":
            self._respond(served, 200, now, headers=(("allow", ALLOW), ("accept", "application/sdp")))
        elif request.method in ("BYE", "UPDATE", "INFO", "NOTIFY", "REFER", "PRACK"):
            self._respond(served, 481, now)
        else:
            self._respond(served, 405, now, headers=(("allow", ALLOW),))

    def _invited(self, served: Served, hop: Hop, now: int) -> None:
        request = served.request
        remote, options = address(request.get("from"))
        needed = request.all("require")
        if needed:
            self._respond(served, 420, now, headers=(("unsupported", ", ".join(needed)),))
            return
        if not _is_sound(request):
            self._respond(served, 415, now, headers=(("accept", "application/sdp"),))
            return
        target = address(request.get("contact"))[0]
        try:
            uri_of(target), uri_of(request.uri)
        except PeerError:
            self._respond(served, 416 if target else 400, now)
            return
        call = Call(
            request.get("call-id"),
            False,
            f"<{address(request.get('to'))[0]}>",
            f"<{remote}>",
            self._token(),
            target,
            hop,
            self._local(hop),
            remote_tag=options.get("tag", ""),
            routes=request.all("record-route"),
            headers=request.headers,
            remote_cseq=request.cseq[0],
            pending=served,
        )
        self._calls[call.name, call.local_tag] = call
        self._respond(served, 100, now, call)
        self._events.append(Invited(call, request.body))

    def _take_in(self, call: Call | None, served: Served, now: int) -> None:
        """A request inside a call (section 12.2.2)."""
        request = served.request
        if call is None or address(request.get("from"))[1].get("tag", "") != call.remote_tag:
            self._respond(served, 481, now)
            return
        if request.cseq[0] <= call.remote_cseq:
            self._respond(served, 500, now)
            return
        call.remote_cseq = request.cseq[0]
        match request.method:
            case "BYE":
                self._respond(served, 200, now)
                pending, call.pending = call.pending, None
                if pending is not None:
                    self._respond(pending, 487, now, call)
                self._end(call, 0, "the other side hung up")
            case "INVITE" | "UPDATE":
                self._reoffered(call, served, now)
            case "INFO":
                self._respond(served, 200, now)
                if digit := _key_of(request):
                    self._events.append(Pressed(call, digit))
            case "NOTIFY":
                is_ours = request.get("event").partition(";")[0].strip() == "refer"
                self._respond(served, 200 if is_ours else 489, now)
                status, reason = _status_in(request.body)
                if is_ours and status >= 200:
                    self._events.append(Transferred(call, status, reason))
            case "OPTIONS":
                self._respond(served, 200, now, headers=(("allow", ALLOW),))
            case "REFER":
                self._respond(served, 603, now)
            case _:
                self._respond(served, 405, now, headers=(("allow", ALLOW),))

    def _reoffered(self, call: Call, served: Served, now: int) -> None:
        request = served.request
        if call.pending is not None or call.taken is not None or call.state is not State.UP:
            self._respond(served, 491, now)
            return
        if not _is_sound(request):
            self._respond(served, 415, now)
            return
        if target := address(request.get("contact"))[0]:
            call.target = target
        if request.method == "UPDATE" and not request.body:
            self._respond(served, 200, now, call, contact=True)
            return
        call.pending = served
        self._events.append(Reoffered(call, request.body))

    def _cancelled(self, served: Served, now: int) -> None:
        branch, sent_by, _ = served.key
        invite = self._transactions.served.get((branch, sent_by, "INVITE"))
        self._respond(served, 200 if invite is not None else 481, now)
        call = next((call for call in self._calls.values() if call.pending is invite), None)
        if invite is not None and call is not None:
            self._respond(invite, 487, now, call)
            call.pending = None
            self._end(call, 487, "the caller gave up")

    def _acknowledged(self, request: Request, now: int) -> None:
        tag = address(request.get("to"))[1].get("tag", "")
        call = self._calls.get((request.get("call-id"), tag))
        if call is None or call.taken is None or call.taken.request.cseq[0] != request.cseq[0]:
            return
        if call.taken.was_said_once:
            call.round_trip_ns = now - call.taken.answered_at
        call.taken.is_acknowledged, call.taken = True, None
        if call.must_end:
            self._bye(call, now)
        else:
            body, call.awaits_answer = request.body if call.awaits_answer else b"", False
            self._events.append(Answered(call, body))

    def _never_acknowledged(self, call: Call, now: int) -> None:
        call.taken = None
        self._bye(call, now)
        if not call.must_end:
            self._events.append(Ended(call, 0, "the other side never acknowledged the answer"))

    def _respond(
        self,
        served: Served,
        status: int,
        now: int,
        call: Call | None = None,
        *,
        headers: Headers = (),
        contact: bool = False,
        body: bytes = b"",
    ) -> None:
        """call: the one that it takes, refuses or changes."""
        request = served.request
        to = request.get("to")
        if status > 100 and "tag" not in address(to)[1]:
            to += f";tag={call.local_tag if call is not None else self._token()}"
        kept = [("via", via) for via in request.all("via")]
        kept += [(name, request.get(name)) for name in ("from", "call-id", "cseq")]
        kept += [("to", to), ("server", NAME)]
        if contact and call is not None:
            kept += [("record-route", route) for route in request.all("record-route")]
            kept += [("contact", self._contact(call)), ("allow", ALLOW)]
        if body:
            kept += _TYPE
        response = bytes(Response((*kept, *headers), body, status, _REASONS.get(status, "Refused")))
        self._transactions.respond(served, status, response, now)

    # --- what we ask

    def _request_in(self, call: Call, method: str, headers: Headers = (), body: bytes = b"") -> Request:
        """The next request of a call."""
        if method != "ACK":
            call.cseq += 1
        remote = f"{call.remote};tag={call.remote_tag}" if call.remote_tag else call.remote
        kept = [
            ("via", self._via(self._hop_in(call), call.here)),
            *(("route", route) for route in call.routes),
            ("max-forwards", "70"),
            ("from", f"{call.local};tag={call.local_tag}"),
            ("to", remote),
            ("call-id", call.name),
            ("cseq", f"{call.cseq} {method}"),
            ("user-agent", NAME),
            ("allow", ALLOW),
        ]
        return Request((*kept, *headers), body, method, call.target)

    def _hop_in(self, call: Call) -> Hop:
        """Where the requests of a call go: to the first proxy that wants to see them, or to the telephone itself."""
        if not call.remote_tag and call.is_ours:
            return call.source
        try:
            place = uri_of(address(call.routes[0])[0] if call.routes else call.target)
        except PeerError:
            return call.source
        transport = place.parameters.get("transport", call.source.transport).lower()
        is_same = place.host == call.source.host and transport == call.source.transport
        if transport not in ("udp", "tcp") or (transport == "tcp" and is_same):
            return call.source  # The connection that is open.
        if not call.routes and _is_inside(place.host) and not _is_inside(call.source.host):
            return call.source  # A telephone behind a router does not know its address.
        return Hop(transport, place.host, place.port or PORT)

    def _ask(
        self,
        request: Request,
        hop: Hop,
        owner: Call | _Registration,
        on_response: Callable[[Response, int], None],
        now: int,
        *,
        tries: int = 1,
    ) -> Asked:
        def heard(response: Response, at: int) -> None:
            if response.status in (401, 407):
                again = self._authorised(request, hop, owner, response, tries)
                if again is not None:
                    next_try = self._ask(again, hop, owner, on_response, at, tries=tries + 1)
                    if isinstance(owner, Call) and owner.asked is asked:
                        owner.asked = next_try
                    return
            on_response(response, at)

        asked = self._transactions.ask(request, hop, heard, now)
        return asked

    def _authorised(
        self, request: Request, hop: Hop, owner: Call | _Registration, response: Response, tries: int
    ) -> Request | None:
        """The request with the account's password, where that was wanted (section 22.2)."""
        kind, name = ("www", "authorization") if response.status == 401 else ("proxy", "proxy-authorization")
        challenges = response.all(f"{kind}-authenticate")
        if self.account is None or tries > (2 if digest.is_stale(challenges) else 1):
            return None
        if request.method == "INVITE" and isinstance(owner, Call) and owner.state is State.OVER:
            return None  # We gave up in the meantime.
        said = digest.answer(
            challenges,
            method=request.method,
            uri=request.uri,
            user=self.account.user,
            password=self.account.password,
            cnonce=self._token(),
        )
        if said is None:
            return None
        owner.cseq += 1
        here = owner.here if isinstance(owner, Call) else self._local(hop)
        return request.with_headers(
            via=self._via(hop, here),
            cseq=f"{owner.cseq} {request.method}",
            **{name.replace("-", "_"): said},
        )

    def _on_invite(self, call: Call, response: Response, now: int) -> None:
        asked = call.asked
        assert asked is not None
        if response.status < 200:
            if call.state is State.OVER:
                self._transactions.cancel(asked, now)
            elif response.status > 100:
                self._events.append(Ringing(call))
            return
        if response.status >= 300:
            self._end(call, response.status, response.reason)
            return
        call.remote_tag = address(response.get("to"))[1].get("tag", "")
        call.target = address(response.get("contact"))[0] or call.target
        call.routes = tuple(reversed(response.all("record-route")))
        ack = self._request_in(call, "ACK")
        ack = ack.with_headers(cseq=f"{response.cseq[0]} ACK")
        self._transactions.acknowledge(asked, ack, self._hop_in(call), call.remote_tag)
        if call.state is State.OVER:  # It was taken just when we gave up.
            self._ask(self._request_in(call, "BYE"), self._hop_in(call), call, ignore, now)
            return
        call.state = State.UP
        self._events.append(Answered(call, response.body))

    def _bye(self, call: Call, now: int) -> None:
        if call.state is not State.OVER:
            self._ask(self._request_in(call, "BYE"), self._hop_in(call), call, ignore, now)
            self._forget(call)

    def _register(self, registration: _Registration, now: int) -> None:
        account = registration.account
        hop = self.hop_to(account.registrar)
        here = self._local(hop)
        registration.cseq += 1
        contact = f"<sip:{account.user}@{written_host(*here)}{';transport=tcp' if hop.transport == 'tcp' else ''}>"
        headers = (
            ("via", self._via(hop, here)),
            ("max-forwards", "70"),
            ("from", f"<{account.uri}>;tag={registration.tag}"),
            ("to", f"<{account.uri}>"),
            ("call-id", registration.name),
            ("cseq", f"{registration.cseq} REGISTER"),
            ("contact", contact),
            ("expires", str(registration.expires_s)),
            ("user-agent", NAME),
        )

        def on_response(response: Response, at: int) -> None:
            if response.status < 200 or self._registration is not registration:
                return
            self._events.append(Registered(response.status, response.reason))
            least = response.get("min-expires")
            if response.status == 423 and least.isdecimal() and registration.expires_s < int(least) < 86_400:
                registration.expires_s = int(least)
                self._register(registration, at)
            elif response.status < 300:
                ours = next((value for value in response.all("contact") if contact[1:-1] in value), "")
                granted = address(ours)[1].get("expires") or response.get("expires")
                granted_s = int(granted) if granted.isdecimal() else registration.expires_s
                registration.wake_at = at + max(5, granted_s * 4 // 5) * SECOND
            else:
                registration.wake_at = at + AGAIN_NS

        self._ask(Request(headers, b"", "REGISTER", account.registrar), hop, registration, on_response, now)

    # ---

    def _end(self, call: Call, status: int, reason: str) -> None:
        if call.state is not State.OVER:
            self._forget(call)
            self._events.append(Ended(call, status, reason))

    def _forget(self, call: Call) -> None:
        call.state = State.OVER
        self._calls.pop((call.name, call.local_tag), None)

    def _via(self, hop: Hop, here: tuple[str, int]) -> str:
        return f"SIP/2.0/{hop.transport.upper()} {written_host(*here)};rport;branch=z9hG4bK{self._token()}"

    def _contact(self, call: Call) -> str:
        user = self.account.user if self.account is not None else NAME
        if not call.is_ours:
            user = uri_of(call.local[1:-1]).user or user
        transport = ";transport=tcp" if call.source.transport == "tcp" else ""
        return f"<sip:{user}@{written_host(*call.here)}{transport}>"


_TYPE: Headers = (("content-type", "application/sdp"),)


def _is_sound(request: Request) -> bool:
    kind = request.get("content-type").partition(";")[0].strip().lower()
    return not request.body or kind == "application/sdp"


def _is_inside(host: str) -> bool:
    try:
        return ip_address(host).is_private
    except ValueError:
        return False


def _key_of(request: Request) -> str:
    """The key in an INFO: `application/dtmf-relay` or `application/dtmf`; "" where there is none."""
    kind = request.get("content-type").partition(";")[0].strip().lower()
    text = request.body.decode("ascii", "replace").strip()
    if kind == "application/dtmf-relay":
        fields = dict(line.partition("=")[::2] for line in text.splitlines())
        text = next((value.strip() for name, value in fields.items() if name.strip().lower() == "signal"), "")
    elif kind != "application/dtmf":
        return ""
    text = {"10": "*", "11": "#"}.get(text, text.upper())
    return text if len(text) == 1 and text in "0123456789*#ABCD" else ""


def _status_in(body: bytes) -> tuple[int, str]:
    """The first line of a `message/sipfrag` (RFC 3420): how far a transfer is."""
    version, _, rest = body.decode("utf-8", "replace").partition("\n")[0].strip().partition(" ")
    status, _, reason = rest.partition(" ")
    return (int(status), reason) if version == "SIP/2.0" and len(status) == 3 and status.isdecimal() else (0, "")
