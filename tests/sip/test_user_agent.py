"""Calls between two user agents over a network that loses, in virtual time; and what strangers send, word for word."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breeze_rtc.clock import MS, SECOND
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
from breeze_rtc.sip.message import Request, Response, address, parse
from breeze_rtc.sip.transactions import Hop
from breeze_rtc.sip.user_agent import UserAgent

ALICE, BOB = Hop("udp", "192.0.2.1", 5060), Hop("udp", "192.0.2.2", 5060)
TO_BOB = "sip:bob@192.0.2.2"


class Network:
    """Two user agents, and 10 ms between them.  `loses` is asked of each message, by its number."""

    def __init__(self, loses: Callable[[int], bool] = lambda number: False) -> None:
        self.now = 0
        self.agents = {hop: UserAgent(self._local(hop), token=self._tokens()) for hop in (ALICE, BOB)}
        self.events: dict[Hop, list[Event]] = {ALICE: [], BOB: []}
        self.on_event: Callable[[Hop, Event], None] = lambda hop, event: None
        self.said: list[str] = []
        self._loses = loses
        self._numbers = count()
        self._flying: list[tuple[int, bytes, Hop, Hop]] = []

    alice = property(lambda self: self.agents[ALICE])
    bob = property(lambda self: self.agents[BOB])

    @staticmethod
    def _local(hop: Hop) -> Callable[[Hop], tuple[str, int]]:
        return lambda _: (hop.host, hop.port)

    @staticmethod
    def _tokens() -> Callable[[], str]:
        numbers = count(1)
        return lambda: f"t{next(numbers)}"

    def run(self, seconds: float) -> None:
        until = self.now + round(seconds * SECOND)
        while True:
            for hop, agent in self.agents.items():
                for data, to in agent.sends():
                    self.said.append(f"{'AB'[hop is BOB]} {_first(data)}")
                    if not self._loses(next(self._numbers)):
                        self._flying.append((self.now + 10 * MS, data, hop, to))
                for event in agent.events():
                    self.events[hop].append(event)
                    self.on_event(hop, event)
            if any(agent._transactions._sends for agent in self.agents.values()):
                continue
            times = [agent.wake_at() for agent in self.agents.values()] + [flying[0] for flying in self._flying]
            at = min((time for time in times if time is not None), default=until)
            if at > until:
                self.now = until
                return
            if at == until and not any(time == until for time in times):
                self.now = until
                return
            self.now = at
            arrived = [flying for flying in self._flying if flying[0] <= at]
            self._flying = [flying for flying in self._flying if flying[0] > at]
            for _, data, source, to in arrived:
                self.agents[to].receive(data, source, at)
            for agent in self.agents.values():
                agent.tick(at)

    def kinds(self, hop: Hop) -> list[str]:
        return [type(event).__name__ for event in self.events[hop]]

    def answers(self, body: bytes = b"answer") -> None:
        """Bob takes what comes in."""

        def on_event(hop: Hop, event: Event) -> None:
            if isinstance(event, Invited | Reoffered):
                self.agents[hop].ring(event.call, self.now)
                self.agents[hop].accept(event.call, body, self.now)

        self.on_event = on_event


def _first(data: bytes) -> str:
    message = parse(data)
    return message.method if isinstance(message, Request) else f"{message.status} {message.cseq[1]}"


def test_a_call_is_placed_answered_and_ended_in_as_few_words_as_there_are() -> None:
    network = Network()
    network.answers()
    call = network.alice.call(TO_BOB, b"offer", network.now)
    network.run(1)
    assert network.kinds(ALICE) == ["Ringing", "Answered"]
    assert network.kinds(BOB) == ["Invited", "Answered"]
    assert isinstance(network.events[BOB][0], Invited)
    assert (network.events[BOB][0].body, network.events[ALICE][1]) == (b"offer", Answered(call, b"answer"))
    network.alice.hang_up(call, network.now)
    network.run(100)
    assert network.kinds(BOB)[2:] == ["Ended"]
    assert network.said == ["A INVITE", "B 100 INVITE", "B 180 INVITE", "B 200 INVITE", "A ACK", "A BYE", "B 200 BYE"]
    for agent in network.agents.values():
        assert (agent._calls, agent._transactions.served, agent._transactions.asked, agent.wake_at()) == (
            {},
            {},
            {},
            None,
        )


def test_the_round_trip_is_told_by_the_acknowledgement_of_an_answer_that_was_said_once() -> None:
    """10 ms there and 10 back; where the answer had to be said again nobody knows which one is acknowledged."""
    network, lossy = Network(), Network(lambda number: number == 3)
    for there in (network, lossy):
        there.answers()
        there.alice.call(TO_BOB, b"offer", there.now)
        there.run(3)
    trips = [event.call.round_trip_ns for event in network.events[BOB] if isinstance(event, Answered)]
    assert trips == [20 * MS]
    assert lossy.said.count("B 200 INVITE") == 2
    assert [event.call.round_trip_ns for event in lossy.events[BOB] if isinstance(event, Answered)] == [None]


@pytest.mark.parametrize("lost", range(7))
def test_a_call_holds_whichever_message_is_lost(lost: int) -> None:
    network = Network(lambda number: number == lost)
    network.answers()
    call = network.alice.call(TO_BOB, b"offer", network.now)
    network.run(3)
    assert call.state is State.UP
    assert network.kinds(BOB) == ["Invited", "Answered"]
    network.alice.hang_up(call, network.now)
    network.run(100)
    assert network.kinds(BOB) == ["Invited", "Answered", "Ended"]
    assert network.kinds(ALICE)[-1] == "Answered"


@given(st.integers(0, 1_000_000))
@settings(max_examples=30, deadline=None)
def test_a_call_over_a_network_that_loses_a_third_is_one_call_and_ends_on_both_sides(seed: int) -> None:
    random = Random(seed)
    network = Network(lambda number: random.random() < 0.3)
    network.answers()
    call = network.alice.call(TO_BOB, b"offer", network.now)
    network.run(40)
    assert network.kinds(BOB).count("Invited") <= 1
    network.alice.hang_up(call, network.now)
    network.run(200)
    for hop, agent in network.agents.items():
        assert network.kinds(hop).count("Answered") <= 1
        assert (agent._calls, agent._transactions.served, agent._transactions.asked, agent.wake_at()) == (
            {},
            {},
            {},
            None,
        )


def test_a_caller_that_gives_up_while_it_rings_is_told_so() -> None:
    network = Network()
    network.on_event = lambda hop, event: network.bob.ring(event.call, network.now) if hop is BOB else None
    call = network.alice.call(TO_BOB, b"offer", network.now)
    network.run(100)  # It may ring for long.
    assert network.kinds(ALICE) == ["Ringing"]
    network.alice.hang_up(call, network.now)
    network.on_event = lambda hop, event: None
    network.run(100)
    assert network.kinds(BOB) == ["Invited", "Ended"]
    assert network.said[3:] == ["A CANCEL", "B 200 CANCEL", "B 487 INVITE", "A ACK"]


def test_a_call_that_is_taken_just_when_the_caller_gives_up_ends() -> None:
    network = Network()
    network.answers()
    call = network.alice.call(TO_BOB, b"offer", network.now)
    network.run(0.015)  # Bob has taken it, and Alice does not know.
    network.alice.hang_up(call, network.now)
    network.run(100)
    assert network.kinds(BOB) == ["Invited", "Answered", "Ended"]
    assert network.kinds(ALICE) == []


@pytest.mark.parametrize("lost", [None, 1, 2, 3])
def test_a_busy_line_says_so_and_is_believed(lost: int | None) -> None:
    network = Network(lambda number: number == lost)
    network.on_event = lambda hop, event: network.bob.refuse(event.call, 486, network.now) if hop is BOB else None
    call = network.alice.call(TO_BOB, b"offer", network.now)
    network.run(100)
    assert network.events[ALICE] == [Ended(call, 486, "Busy Here")]
    assert network.kinds(BOB) == ["Invited"]


def test_nobody_there_is_an_end_too() -> None:
    network = Network(lambda number: True)
    call = network.alice.call(TO_BOB, b"offer", network.now)
    network.run(31.9)
    assert network.events[ALICE] == []
    network.run(1)
    assert network.events[ALICE] == [Ended(call, 408, "nobody answers")]
    assert network.said.count("A INVITE") == 7  # At 0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5 s (RFC 3261 section 17.1.1.2).


def test_an_answer_that_is_never_acknowledged_ends_the_call() -> None:
    network = Network(lambda number: network.said[-1] == "A ACK")
    network.answers()
    network.alice.call(TO_BOB, b"offer", network.now)
    network.run(100)
    assert network.kinds(BOB) == ["Invited", "Ended"]
    assert "B BYE" in network.said


def test_who_hangs_up_before_the_acknowledgement_waits_for_it() -> None:
    """RFC 3261 section 15: a BYE must not come before the call is there."""
    network = Network()
    network.answers()
    network.alice.call(TO_BOB, b"offer", network.now)
    network.run(0.015)
    (invited,) = network.events[BOB]
    assert isinstance(invited, Invited)
    network.bob.hang_up(invited.call, network.now)
    network.run(10)
    assert network.said[-3:] == ["A ACK", "B BYE", "A 200 BYE"]
    assert network.kinds(ALICE)[-1] == "Ended"


def test_the_other_side_that_is_gone_is_found_out() -> None:
    network = Network()
    network.answers()
    network.alice.call(TO_BOB, b"offer", network.now)
    network.run(1)
    (invited, _) = network.events[BOB]
    assert isinstance(invited, Invited)
    network.bob.probe(invited.call, network.now)
    network.run(1)
    assert invited.call.state is State.UP
    network.alice._calls.clear()
    network.bob.probe(invited.call, network.now)
    network.run(1)
    assert network.events[BOB][-1] == Ended(invited.call, 0, "the other side is gone")


# --- strangers, word for word


class Desk:
    """A user agent, and somebody who writes to it by hand."""

    def __init__(self, account: Account | None = None) -> None:
        self.now = 0
        self.agent = UserAgent(lambda hop: ("192.0.2.2", 5060), account=account, token=Network._tokens())
        self.heard: list[Request | Response] = []
        self._branches = count(1)

    def say(self, text: str, body: str = "", *, hop: Hop = ALICE, **headers: str) -> list[Request | Response]:
        """A request line with its headers -> what comes back.  `:` in a header's name is a `-`."""
        method = text.split(maxsplit=1)[0]
        given = {
            "via": f"SIP/2.0/UDP {hop.host}:{hop.port};branch=z9hG4bK{next(self._branches)}",
            "from": "<sip:alice@192.0.2.1>;tag=a",
            "to": "<sip:bob@192.0.2.2>",
            "call_id": "c1",
            "cseq": f"1 {method}",
            "contact": "<sip:alice@192.0.2.1:5060>",
        } | headers
        lines = [f"{text} SIP/2.0", *(f"{name.replace('_', '-')}: {value}" for name, value in given.items() if value)]
        if body and "content_type" not in headers:
            lines.append("Content-Type: application/sdp")
        self.agent.receive("\r\n".join((*lines, "", body)).encode(), hop, self.now)
        return self.take()

    def take(self) -> list[Request | Response]:
        came = [parse(data) for data, _ in self.agent.sends()]
        self.heard += came
        return came

    def wait(self, seconds: float) -> list[Request | Response]:
        until, came = self.now + round(seconds * SECOND), []
        while (at := self.agent.wake_at()) is not None and at <= until:
            self.now = at
            self.agent.tick(at)
            came += self.take()
        self.now = until
        return came

    def answer(self, request: Request | Response, status: int, **headers: str) -> list[Request | Response]:
        assert isinstance(request, Request)
        kept = [f"{name}: {value}" for name in ("via", "from", "call-id", "cseq") for value in request.all(name)]
        to = request.get("to")
        kept.append(f"to: {to}" if "tag" in address(to)[1] else f"to: {to};tag=them")
        kept += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.agent.receive("\r\n".join((f"SIP/2.0 {status} x", *kept, "", "")).encode(), ALICE, self.now)
        return self.take()

    def call(self) -> tuple[Call, str]:
        """A call that is up, and our tag in it."""
        self.say("INVITE sip:bob@192.0.2.2", "offer")
        (invited,) = self.agent.events()
        assert isinstance(invited, Invited)
        self.agent.accept(invited.call, b"answer", self.now)
        to = self.take()[0].get("to")
        self.say("ACK sip:bob@192.0.2.2", to=to)
        self.agent.events()
        return invited.call, to


def statuses(came: list[Request | Response]) -> list[int | str]:
    return [message.status if isinstance(message, Response) else message.method for message in came]


def test_the_same_request_twice_gets_the_same_answer_and_is_one_call() -> None:
    desk = Desk()
    via = "SIP/2.0/UDP 192.0.2.1:5060;branch=z9hG4bKsame"
    desk.say("INVITE sip:bob@192.0.2.2", "offer", via=via)
    assert statuses(desk.say("INVITE sip:bob@192.0.2.2", "offer", via=via)) == [100]
    (invited,) = desk.agent.events()
    assert isinstance(invited, Invited)
    desk.agent.accept(invited.call, b"answer", desk.now)
    first = desk.take()
    assert desk.say("INVITE sip:bob@192.0.2.2", "offer", via=via) == first


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        ("INVITE sip:bob@192.0.2.2", {"require": "100rel"}, 420),
        ("INVITE tel:+4930", {}, 416),
        ("INVITE sip:bob@192.0.2.2", {"contact": ""}, 400),
        ("INVITE sip:bob@192.0.2.2", {"to": "<sip:bob@192.0.2.2>;tag=nobody"}, 481),
        ("INVITE sip:bob@192.0.2.2", {"cseq": "1 BYE"}, 400),
        ("OPTIONS sip:bob@192.0.2.2", {}, 200),
        ("BYE sip:bob@192.0.2.2", {}, 481),
        ("CANCEL sip:bob@192.0.2.2", {}, 481),
        ("REGISTER sip:192.0.2.2", {}, 405),
        ("MESSAGE sip:bob@192.0.2.2", {}, 405),
        ("NOTIFY sip:bob@192.0.2.2", {"event": "message-summary"}, 481),
    ],
)
def test_what_is_asked_outside_a_call(request_line: str, headers: dict[str, str], status: int) -> None:
    desk = Desk()
    assert statuses(desk.say(request_line, **headers)) == [status]
    assert desk.agent.events() == []


def test_a_picture_is_no_offer() -> None:
    assert statuses(Desk().say("INVITE sip:bob@192.0.2.2", "x", content_type="image/png")) == [415]


def test_what_is_asked_inside_a_call() -> None:
    desk = Desk()
    call, to = desk.call()
    assert statuses(desk.say("OPTIONS sip:bob@192.0.2.2", to=to, cseq="2 OPTIONS")) == [200]
    assert statuses(desk.say("OPTIONS sip:bob@192.0.2.2", to=to, cseq="2 OPTIONS")) == [500]
    assert statuses(desk.say("REFER sip:bob@192.0.2.2", to=to, cseq="3 REFER", refer_to="<sip:c@d>")) == [603]
    assert statuses(desk.say("PRACK sip:bob@192.0.2.2", to=to, cseq="4 PRACK")) == [405]
    assert statuses(desk.say("UPDATE sip:bob@192.0.2.2", to=to, cseq="5 UPDATE")) == [200]
    stranger = "<sip:mallory@192.0.2.9>;tag=m"
    assert statuses(desk.say("BYE sip:bob@192.0.2.2", to=to, cseq="6 BYE", **{"from": stranger})) == [481]
    assert desk.agent.events() == []
    assert statuses(desk.say("BYE sip:bob@192.0.2.2", to=to, cseq="7 BYE")) == [200]
    assert desk.agent.events() == [Ended(call, 0, "the other side hung up")]


def test_a_goodbye_while_it_rings_ends_the_call_and_its_invitation() -> None:
    """RFC 3261 section 15.1.2: the request that waits is answered with 487, in the dialog of its ringing."""
    desk = Desk()
    desk.say("INVITE sip:bob@192.0.2.2", "offer", content_type="application/sdp")
    (event,) = desk.agent.events()
    assert isinstance(event, Invited)
    desk.agent.ring(event.call, desk.now)
    (rings,) = desk.take()
    bye, invite = desk.say("BYE sip:bob@192.0.2.2", to=rings.get("to"), cseq="2 BYE")
    assert statuses([bye, invite]) == [200, 487]
    assert invite.get("to") == rings.get("to")
    assert desk.agent.events() == [Ended(event.call, 0, "the other side hung up")]


@pytest.mark.parametrize(
    ("kind", "body", "key"),
    [
        ("application/dtmf-relay", "Signal= 5\r\nDuration=160", "5"),
        ("application/dtmf-relay", "Signal=11", "#"),
        ("application/dtmf", "*", "*"),
        ("application/dtmf", "d", "D"),
        ("application/dtmf", "flash", None),
    ],
)
def test_keys_by_info(kind: str, body: str, key: str | None) -> None:
    desk = Desk()
    call, to = desk.call()
    assert statuses(desk.say("INFO sip:bob@192.0.2.2", body, to=to, cseq="2 INFO", content_type=kind)) == [200]
    assert desk.agent.events() == ([Pressed(call, key)] if key else [])


def test_a_hold_is_answered_and_a_second_one_has_to_wait() -> None:
    desk = Desk()
    call, to = desk.call()
    assert desk.say("INVITE sip:bob@192.0.2.2", "hold", to=to, cseq="2 INVITE") == []
    assert desk.agent.events() == [Reoffered(call, b"hold")]
    assert statuses(desk.say("INVITE sip:bob@192.0.2.2", "again", to=to, cseq="3 INVITE")) == [491]
    desk.agent.accept(call, b"held", desk.now)
    (taken,) = desk.take()
    assert (statuses([taken]), taken.body) == ([200], b"held")
    desk.say("ACK sip:bob@192.0.2.2", to=to, cseq="2 ACK")
    assert statuses(desk.say("UPDATE sip:bob@192.0.2.2", "back", to=to, cseq="4 UPDATE")) == []
    assert desk.agent.events() == [Answered(call, b""), Reoffered(call, b"back")]
    desk.agent.refuse(call, 488, desk.now)
    assert statuses(desk.take()) == [488]
    assert call.state is State.UP


def test_a_call_without_an_offer_is_offered_something() -> None:
    """As some PBXs do; the answer comes with the acknowledgement."""
    desk = Desk()
    desk.say("INVITE sip:bob@192.0.2.2")
    (invited,) = desk.agent.events()
    assert isinstance(invited, Invited)
    assert invited.body == b""
    desk.agent.accept(invited.call, b"our offer", desk.now)
    (taken,) = desk.take()
    desk.say("ACK sip:bob@192.0.2.2", "their answer", to=taken.get("to"))
    assert desk.agent.events() == [Answered(invited.call, b"their answer")]


def test_a_call_through_proxies_goes_back_by_them() -> None:
    desk = Desk()
    desk.say("INVITE sip:bob@192.0.2.2", "offer", record_route="<sip:p2.example.org;lr>, <sip:192.0.2.50:5070;lr>")
    (invited,) = desk.agent.events()
    assert isinstance(invited, Invited)
    desk.agent.accept(invited.call, b"answer", desk.now)
    (taken,) = desk.take()
    assert taken.all("record-route") == ("<sip:p2.example.org;lr>", "<sip:192.0.2.50:5070;lr>")
    desk.say("ACK sip:bob@192.0.2.2", to=taken.get("to"))
    desk.agent.hang_up(invited.call, desk.now)
    ((data, hop),) = desk.agent.sends()
    bye = parse(data)
    assert isinstance(bye, Request)
    assert (bye.uri, hop) == ("sip:alice@192.0.2.1:5060", Hop("udp", "p2.example.org", 5060))
    assert bye.all("route") == ("<sip:p2.example.org;lr>", "<sip:192.0.2.50:5070;lr>")


def test_a_telephone_behind_a_router_is_answered_where_it_came_from() -> None:
    desk = Desk()
    hop = Hop("udp", "198.51.100.7", 40_000)
    via = "SIP/2.0/UDP 10.0.0.5:5060;rport;branch=z9hG4bKnat"
    desk.agent.receive(
        f"INVITE sip:bob@192.0.2.2 SIP/2.0\r\nv: {via}\r\nf: <sip:a@b>;tag=a\r\nt: <sip:bob@192.0.2.2>\r\ni: x\r\n"
        f"cseq: 1 INVITE\r\nm: <sip:a@10.0.0.5>\r\n\r\n".encode(),
        hop,
        0,
    )
    ((data, back),) = desk.agent.sends()
    assert back == hop
    assert "rport=40000" in parse(data).get("via")
    assert "received=198.51.100.7" in parse(data).get("via")


def test_a_transfer_is_asked_for_and_its_end_is_told() -> None:
    desk = Desk()
    call, to = desk.call()
    desk.agent.transfer(call, "sip:carol@192.0.2.3", desk.now)
    (refer,) = desk.take()
    assert isinstance(refer, Request)
    assert (refer.method, refer.get("refer-to"), refer.uri) == ("REFER", "<sip:carol@192.0.2.3>", call.target)
    desk.answer(refer, 202)
    said = {"to": to, "event": "refer", "content_type": "message/sipfrag"}
    assert statuses(desk.say("NOTIFY sip:bob@192.0.2.2", "SIP/2.0 180 Ringing", cseq="2 NOTIFY", **said)) == [200]
    assert desk.agent.events() == []
    desk.say("NOTIFY sip:bob@192.0.2.2", "SIP/2.0 200 OK\r\n", cseq="3 NOTIFY", **said)
    assert desk.agent.events() == [Transferred(call, 200, "OK")]


def test_a_transfer_that_is_refused_is_told_too() -> None:
    desk = Desk()
    call, _ = desk.call()
    desk.agent.transfer(call, "sip:carol@192.0.2.3", desk.now)
    desk.answer(desk.take()[0], 603)
    assert desk.agent.events() == [Transferred(call, 603, "x")]


# --- the account

ACCOUNT = Account("sip:agent@192.0.2.1", "secret")


def test_an_account_is_registered_and_stays_registered() -> None:
    desk = Desk(ACCOUNT)
    desk.agent.register(desk.now)
    (asked,) = desk.take()
    assert isinstance(asked, Request)
    assert (asked.uri, asked.get("contact"), asked.get("expires")) == (
        "sip:192.0.2.1",
        "<sip:agent@192.0.2.2:5060>",
        "300",
    )
    (again,) = desk.answer(asked, 401, www_authenticate='Digest realm="r", nonce="n", qop="auth"')
    fields = dict(re.findall(r'(\w+)="?([^",]+)', again.get("authorization")))
    expected = digest.answer(
        ('Digest realm="r", nonce="n", qop="auth"',),
        **{"method": "REGISTER", "uri": "sip:192.0.2.1", "user": "agent", "password": "secret"},
        cnonce=fields["cnonce"],
    )
    assert again.get("authorization") == expected
    assert (again.cseq, again.get("call-id")) == ((2, "REGISTER"), asked.get("call-id"))
    assert desk.answer(again, 200, contact="<sip:agent@192.0.2.2:5060>;expires=100") == []
    assert desk.agent.events() == [Registered(200, "x")]
    assert desk.wait(79) == []
    assert statuses(desk.wait(1)) == ["REGISTER"]
    desk.answer(desk.heard[-1], 200, contact="<sip:agent@192.0.2.2:5060>;expires=100")
    desk.agent.unregister(desk.now)
    (last,) = desk.take()
    assert last.get("expires") == "0"
    desk.answer(last, 200)
    desk.agent.events()
    assert desk.wait(1_000) == []


@pytest.mark.parametrize("stale", ["", ", stale=true"])
def test_a_wrong_password_is_tried_once_and_an_old_challenge_twice(stale: str) -> None:
    desk = Desk(ACCOUNT)
    desk.agent.register(desk.now)
    challenge = f'Digest realm="r", nonce="n"{stale}'
    (again,) = desk.answer(desk.take()[0], 401, www_authenticate=challenge)
    more = desk.answer(again, 401, www_authenticate=challenge)
    if stale:
        assert desk.answer(more[0], 401, www_authenticate=challenge) == []
    else:
        assert more == []
    assert desk.agent.events() == [Registered(401, "x")]
    assert desk.wait(29) == []
    assert statuses(desk.wait(1)) == ["REGISTER"]


def test_a_registrar_that_wants_longer_gets_it() -> None:
    desk = Desk(ACCOUNT)
    desk.agent.register(desk.now)
    (again,) = desk.answer(desk.take()[0], 423, min_expires="1800")
    assert again.get("expires") == "1800"


def test_a_call_by_an_account_gives_its_password_and_acknowledges_the_refusal() -> None:
    desk = Desk(ACCOUNT)
    call = desk.agent.call("sip:+4930@192.0.2.1", b"offer", desk.now)
    (invite,) = desk.take()
    came = desk.answer(invite, 407, proxy_authenticate='Digest realm="r", nonce="n"')
    assert statuses(came) == ["ACK", "INVITE"]
    assert (came[0].cseq, came[1].cseq, came[1].body) == ((1, "ACK"), (2, "INVITE"), b"offer")
    assert came[1].get("proxy-authorization").startswith("Digest ")
    assert came[0].get("via") == invite.get("via") != came[1].get("via")
    (ack,) = desk.answer(came[1], 200, contact="<sip:gateway@192.0.2.77>")
    assert isinstance(ack, Request)
    assert (ack.method, ack.cseq, ack.uri) == ("ACK", (2, "ACK"), "sip:gateway@192.0.2.77")
    assert desk.agent.events() == [Answered(call, b"")]
    assert desk.answer(came[1], 200, contact="<sip:gateway@192.0.2.77>") == [ack]
    assert desk.agent.events() == []


def test_ringing_is_told() -> None:
    desk = Desk()
    call = desk.agent.call(TO_BOB, b"offer", desk.now)
    (invite,) = desk.take()
    desk.answer(invite, 100)
    desk.answer(invite, 183)
    assert desk.agent.events() == [Ringing(call)]


_LINES = st.sampled_from(
    ["INVITE sip:b@c SIP/2.0", "SIP/2.0 200 OK", "ACK sip:b@c SIP/2.0", "BYE x SIP/2.0", "NOTIFY sip:b@c SIP/2.0"]
)
_HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            ["Via", "From", "To", "Call-ID", "CSeq", "Contact", "Record-Route", "Event", "Require", "Route", "Expires"]
        ),
        st.sampled_from(
            [
                "SIP/2.0/UDP h;branch=z9hG4bK1",
                "<sip:a@b>;tag=t1",
                "1 INVITE",
                "2 BYE",
                ";",
                '"',
                "<",
                "refer",
                "",
                "x=,<>",
            ]
        )
        | st.text(max_size=20),
    ),
    max_size=14,
)


@given(st.lists(st.tuples(_LINES, _HEADERS, st.binary(max_size=20)), max_size=5))
@settings(max_examples=200, deadline=None)
def test_nothing_a_stranger_sends_makes_an_agent_stumble(
    messages: list[tuple[str, list[tuple[str, str]], bytes]],
) -> None:
    desk = Desk()
    desk.call()
    for line, headers, body in messages:
        text = "\r\n".join((line, *(f"{name}: {value}" for name, value in headers), "", "")).encode("utf-8", "replace")
        desk.agent.receive(text + body, ALICE, desk.now)
        for data, _ in desk.agent.sends():
            parse(data)
