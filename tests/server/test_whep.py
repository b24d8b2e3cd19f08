"""Calls by plain HTTP: an offer posted, a call held, over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from page import Hall, serving, until
from python_listener import PythonListener
from websockets.asyncio.client import connect

from breeze_rtc.agent.session import AgentSession, Callbacks
from breeze_rtc.transport.ice import IceServers
from breeze_rtc.transport.signaling import IceServer

SDP = {"Content-Type": "application/sdp"}
FRAGMENT = {"Content-Type": "application/trickle-ice-sdpfrag"}


async def enter(session: AgentSession) -> AsyncGenerator[str, None]:
    yield "one two three four"


TALKS = Callbacks(on_enter=enter)


@pytest.fixture
async def hall() -> AsyncIterator[Hall]:
    async with serving(TALKS) as hall:
        yield hall
        await hall.is_free()
        assert not hall.server._whep._sessions


@pytest.fixture
async def client(hall: Hall) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=hall.http, timeout=20) as client:
        yield client


@pytest.fixture
async def listener() -> AsyncIterator[PythonListener]:
    listener = PythonListener()
    yield listener
    await listener.close()


def loud(listener: PythonListener) -> int:
    return sum(np.abs(frame.pcm.astype(int)).max() > 3_000 for frame in listener.heard)


async def test_a_posted_offer_is_a_call_and_its_address_ends_it(
    hall: Hall, client: httpx.AsyncClient, listener: PythonListener
) -> None:
    """201 with the answer; every word is heard; the position is an estimate, and says so; DELETE ends it, once."""
    answer = await client.post("/whep", content=(await listener.offer()).sdp, headers=SDP)
    assert answer.status_code == 201
    assert answer.headers["content-type"] == "application/sdp"
    assert re.fullmatch(r"/whep/[\w-]{20,}", answer.headers["location"])
    assert answer.headers["accept-patch"] == FRAGMENT["Content-Type"]
    await listener.accept(answer.text)
    (call,) = hall.server._calls
    await until(lambda: bool(hall.engine.speeches) and not hall.engine.open)
    await until(lambda: loud(listener) >= 4 * 20 - 2)
    stats = call._webrtc.stats()
    assert stats.source in {"rtcp", "estimate"}
    assert not call.position(1).is_measured
    assert hall.engine.reports > 2
    ended = await client.delete(answer.headers["location"])
    assert ended.status_code == 200
    await hall.is_free()
    assert (await client.delete(answer.headers["location"])).status_code == 404
    assert b'breeze_calls_ended_total{reason="the peer hung up"} 1.0' in hall.server.metrics.text()


async def test_addresses_may_come_later(hall: Hall, client: httpx.AsyncClient, listener: PythonListener) -> None:
    """An offer without candidates; they follow by PATCH, and media flows."""
    offer = (await listener.offer()).sdp
    answer = await client.post("/whip", content=re.sub(r"a=(candidate|end-of).*\r\n", "", offer), headers=SDP)
    assert answer.status_code == 201
    assert answer.headers["location"].startswith("/whip/")
    fragment = "\r\n".join(re.findall(r"a=(?:ice-ufrag|ice-pwd|mid|candidate).*", offer))
    told = await client.patch(answer.headers["location"], content=fragment, headers=FRAGMENT)
    assert told.status_code == 204
    (call,) = hall.server._calls
    assert call._webrtc._transceiver.receiver.transport.transport.getRemoteCandidates()
    await listener.accept(answer.text)
    await until(lambda: loud(listener) > 3)
    await client.delete(answer.headers["location"])


async def test_what_is_wrong_is_said(hall: Hall, client: httpx.AsyncClient, listener: PythonListener) -> None:
    """Each fault has its status and a sentence; a call that is there goes on."""
    sdp = (await listener.offer()).sdp
    answer = await client.post("/whep", content=sdp, headers=SDP)
    await listener.accept(answer.text)
    address = answer.headers["location"]
    wrong: list[tuple[str, str, Any, dict[str, str], int, str]] = [
        ("POST", "/whep", "", SDP, 400, "offer_malformed"),
        ("POST", "/whep", "v=0", SDP, 400, "offer_malformed"),
        ("POST", "/whep", b"\xff\xfe", SDP, 400, "offer_malformed"),
        ("POST", "/whep", "x" * 40_000, SDP, 413, "body_too_large"),
        ("POST", "/whep", sdp, {}, 415, "wrong_content_type"),
        ("POST", "/whep", json.dumps({"sdp": sdp}), {"Content-Type": "application/json"}, 415, "wrong_content_type"),
        ("POST", "/whep", sdp.replace("a=recvonly", "a=sendonly"), SDP, 400, "offer_not_receiving"),
        ("POST", "/whep", sdp.replace("a=setup:actpass", "a=setup:nonsense"), SDP, 400, "offer_malformed"),
        ("POST", "/whep", sdp, SDP | {"Origin": "https://evil.example"}, 403, "foreign_origin"),
        ("PATCH", address, "a=candidate:1 1 udp", FRAGMENT, 400, "candidate_malformed"),
        ("PATCH", address, "a=candidate:x", SDP, 415, "wrong_content_type"),
        ("PATCH", address, "a=ice-ufrag:new\r\na=ice-pwd:0123456789012345678901", FRAGMENT, 422, "no_ice_restart"),
        ("PATCH", address, b"\xff", FRAGMENT, 400, "offer_malformed"),
        ("PATCH", "/whep/nobody", "", FRAGMENT, 404, "call_gone"),
        ("DELETE", "/whep/nobody", None, {}, 404, "call_gone"),
        ("GET", "/whep", None, {}, 405, "method_not_allowed"),
        ("PUT", address, "", SDP, 405, "method_not_allowed"),
    ]
    for method, path, content, headers, status, code in wrong:
        refused = await client.request(method, path, content=content, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), (method, path, content)
        assert refused.json()["error"]["message"]
    assert (await client.patch(address, content="nothing of use", headers=FRAGMENT)).status_code == 204
    await until(lambda: len(hall.server._calls) == 1)
    await until(lambda: loud(listener) > 3)
    # What ends a call is not what a page comes back with.
    async with connect(f"{hall.ws}?resume={address.rsplit('/', 1)[1]}&received=0") as stranger:
        assert json.loads(await stranger.recv())["code"] == "call_gone"
    await client.delete(address)


async def test_a_peer_that_left_or_vanished_frees_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a goodbye at once, without one a while after the last sign of it; nobody waits for it to come back."""
    monkeypatch.setattr("breeze_rtc.transport.webrtc.LOST_S", 0.3)
    async with serving(TALKS) as hall, httpx.AsyncClient(base_url=hall.http, timeout=20) as client:
        for vanishes in (False, True):
            listener = PythonListener()
            await listener.accept((await client.post("/whep", content=(await listener.offer()).sdp, headers=SDP)).text)
            await until(lambda listener=listener: loud(listener) > 3)  # type: ignore[misc]
            await (listener.vanish() if vanishes else listener.close())
            await hall.is_free()
        text = hall.server.metrics.text().decode()
    assert 'breeze_calls_ended_total{reason="peer left"} 1.0' in text
    assert 'breeze_calls_ended_total{reason="connection lost"} 1.0' in text


async def test_lines_are_counted_in_all_and_from_each_address(listener: PythonListener) -> None:
    """503 and when to come back; pages and HTTP peers share the lines."""
    sdp = (await listener.offer()).sdp
    async with (
        serving(TALKS, max_calls=2, max_calls_per_address=1) as hall,
        httpx.AsyncClient(base_url=hall.http) as client,
        httpx.AsyncClient(base_url=hall.http, transport=httpx.AsyncHTTPTransport(local_address="127.0.0.2")) as other,
    ):
        assert (await client.post("/whep", content=sdp, headers=SDP)).status_code == 201
        refused = await client.post("/whep", content=sdp, headers=SDP)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_calls_from_here")
        assert int(refused.headers["retry-after"]) == 10
        async with connect(hall.ws) as page:
            assert json.loads(await page.recv())["code"] == "too_many_calls_from_here"
        second = await other.post("/whep", content=sdp, headers=SDP)
        assert second.status_code == 201
        refused = await other.post("/whep", content=sdp, headers=SDP)
        assert refused.json()["error"]["code"] == "too_many_calls"
        assert "Retry-After" in refused.headers
        await other.delete(second.headers["location"])
        await until(lambda: len(hall.server._calls) == 1)
        # A proxy on this machine says whom it speaks for.
        behind = await client.post("/whep", content=sdp, headers=SDP | {"X-Forwarded-For": "203.0.113.7"})
        assert behind.status_code == 201
        assert hall.server._by_address == {"127.0.0.1": 1, "203.0.113.7": 1}


async def test_servers_and_other_sites_are_told() -> None:
    """ICE servers as Link headers with credentials; allowed sites may read the answer, others are told nothing."""
    ice = IceServers((IceServer(("stun:127.0.0.1:9",)), IceServer(("turn:127.0.0.1:9?transport=udp",))), "secret")
    async with (
        serving(TALKS, ice=ice, allowed_origins=["https://friend.example"]) as hall,
        httpx.AsyncClient(base_url=hall.http, timeout=20) as client,
    ):
        listener = PythonListener()
        friend = {"Origin": "https://friend.example"}
        answer = await client.post("/whep", content=(await listener.offer()).sdp, headers=SDP | friend)
        assert answer.status_code == 201
        assert answer.headers["access-control-allow-origin"] == "https://friend.example"
        stun, turn = answer.headers.get_list("link")
        assert stun == '<stun:127.0.0.1:9>; rel="ice-server"'
        assert re.fullmatch(
            r'<turn:127\.0\.0\.1:9\?transport=udp>; rel="ice-server"; username="\d+:[0-9a-f]+"; '
            r'credential="[\w+/=]+"; credential-type="password"',
            turn,
        )
        for path in ("/whep", answer.headers["location"]):
            asked = await client.options(path, headers=friend)
            assert asked.status_code == 204
            assert asked.headers["accept-post"] == "application/sdp"
            assert asked.headers["access-control-allow-origin"] == "https://friend.example"
            assert (
                "access-control-allow-origin"
                not in (await client.options(path, headers={"Origin": "https://evil.example"})).headers
            )
        await client.delete(answer.headers["location"])
        await listener.close()


async def test_a_server_that_stops_ends_them() -> None:
    """Nothing hangs, and the peer's connection is closed."""
    listener = PythonListener()
    async with serving(TALKS) as hall, httpx.AsyncClient(base_url=hall.http, timeout=20) as client:
        await listener.accept((await client.post("/whep", content=(await listener.offer()).sdp, headers=SDP)).text)
        await until(lambda: loud(listener) > 3)
    assert not hall.server._calls
    async with asyncio.timeout(10):
        while listener.peer.connectionState not in {"closed", "failed"}:  # noqa: ASYNC110 - it watches from outside
            await asyncio.sleep(0.01)
    await listener.close()
