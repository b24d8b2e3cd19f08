"""STUN and TURN servers: real ones, dead ones, and credentials that expire."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import aioice
import pytest
from aiortc.sdp import candidate_from_sdp
from python_listener import PythonListener, clock
from turn_server import SECRET, coturn, own_address

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.errors import PeerError
from breeze_rtc.server import doctor
from breeze_rtc.transport.ice import IceServers
from breeze_rtc.transport.signaling import Candidate, IceServer
from breeze_rtc.transport.webrtc import WebRtcCall


@pytest.fixture(scope="module")
def turn() -> Iterator[str]:
    with coturn() as url:
        yield url


def candidates(sdp: str) -> list[str]:
    return re.findall(r"a=(candidate:.*)\r\n", sdp)


async def until_heard(listener: PythonListener, frames: int = 3) -> None:
    async with asyncio.timeout(20):
        while len(listener.heard) < frames:  # noqa: ASYNC110 - what it waits for is on the wire
            await asyncio.sleep(0.01)


def test_credentials_are_those_of_the_rest_convention() -> None:
    """`expiry:name` and its HMAC-SHA1, checked with openssl; a name of its own each; STUN and fixed users stay."""
    servers = IceServers(
        (IceServer(("stun:a",)), IceServer(("turn:b",)), IceServer(("turn:c",), "me", "mine")),
        "north",
        wall_s=lambda: 1_800_000_000.5,
    )
    stun, ours, fixed = servers.servers()
    assert (stun, fixed) == (servers.known[0], servers.known[2])
    assert ours.username is not None
    assert re.fullmatch(r"1800003600:[0-9a-f]{8}", ours.username)
    assert servers.servers()[1].username != ours.username
    # printf 1800003600:00c0ffee | openssl dgst -sha1 -hmac north -binary | base64
    assert IceServers.credential("north", "1800003600:00c0ffee") == "DKPiVJ/ooWSHpcKsrPa7Y5ZfYMg="
    assert servers.renewal_s == 1_800
    assert IceServers((IceServer(("turn:b",)),)).renewal_s is None


@pytest.mark.parametrize("relay_only", [False, True])
async def test_a_listener_is_reached_through_coturn(turn: str, relay_only: bool) -> None:
    """The answer has an address of the TURN server; with `relay_only` it has no other, and sound goes through it."""
    ice = IceServers((IceServer((turn,)),), SECRET)
    listener, call = PythonListener(), WebRtcCall(ice_servers=ice.servers, relay_only=relay_only)
    answer = await call.answer(await listener.offer())
    kinds = {line.split(" typ ")[1].split()[0] for line in candidates(answer)}
    assert kinds == ({"relay"} if relay_only else {"relay", "host"})
    await listener.accept(answer)
    await until_heard(listener)
    pair: Any = call._peer._ice._nominated[1]
    assert pair.local_candidate.type == ("relay" if relay_only else "host")
    await call.close()
    await listener.close()


@pytest.mark.parametrize(
    ("secret", "life_s"),
    [("south", 3600.0), (SECRET, -60.0)],
    ids=["another secret", "expired"],
)
async def test_coturn_refuses_other_credentials(turn: str, secret: str, life_s: float) -> None:
    """Where there is no other path, the call says so at once; otherwise it does without."""
    ice = IceServers((IceServer((turn,)),), secret, life_s=life_s)
    listener = PythonListener()
    offer = await listener.offer()
    call = WebRtcCall(ice_servers=ice.servers, relay_only=True)
    with pytest.raises(PeerError) as caught:
        await call.answer(offer)
    assert caught.value.code == "no_relay"
    assert call.closed.is_set()
    call = WebRtcCall(ice_servers=ice.servers)
    answer = await call.answer(offer)
    assert "typ host" in answer
    assert "typ relay" not in answer
    await listener.accept(answer)
    await until_heard(listener)
    await call.close()
    await listener.close()


class StunServer(asyncio.DatagramProtocol):
    """Answers after `delay_s`; never where that is None."""

    def __init__(self, delay_s: float | None) -> None:
        self._delay_s = delay_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if self._delay_s is not None:
            request = aioice.stun.parse_message(data)
            answer = aioice.stun.Message(
                message_method=aioice.stun.Method.BINDING,
                message_class=aioice.stun.Class.RESPONSE,
                transaction_id=request.transaction_id,
            )
            answer.attributes["XOR-MAPPED-ADDRESS"] = ("203.0.113.5", 4321)
            asyncio.get_running_loop().call_later(self._delay_s, self.transport.sendto, bytes(answer), addr)


@pytest.mark.parametrize("kind", ["stun", "turn"])
async def test_a_dead_server_costs_a_third_of_a_second(kind: str) -> None:
    """Not five: the answer leaves without what it would have said, and the call is up at once.

    Reproduction 38 (aioice#4, aiortc#1183).
    """
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as dead:
        dead.bind((own_address(), 0))
        url = f"{kind}:{own_address()}:{dead.getsockname()[1]}"
        listener, call = PythonListener(), WebRtcCall(ice_servers=lambda: [IceServer((url,), "user", "secret")])
        offer = await listener.offer()
        began_at = clock.now()
        answer = await call.answer(offer)
        answered_at = clock.now()
        await listener.accept(answer)
        await asyncio.wait_for(call.connected.wait(), 10)
        assert 250 * MS < answered_at - began_at < 700 * MS
        assert clock.now() - began_at < SECOND
        await call.close()
        await listener.close()


async def test_a_slow_server_is_heard_after_the_answer() -> None:
    """The answer does not wait for it; its address is told as a candidate, which an agent can read."""
    told: list[tuple[str, int]] = []
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: StunServer(0.5), local_addr=(own_address(), 0))
    url = f"stun:{own_address()}:{transport.get_extra_info('sockname')[1]}"
    listener = PythonListener()
    call = WebRtcCall(
        ice_servers=lambda: [IceServer((url,))], on_candidate=lambda line, offer: told.append((line, offer))
    )
    answer = await call.answer(replace(await listener.offer(), id=5))
    assert "end-of-candidates" not in answer
    assert not told
    async with asyncio.timeout(10):
        while not told:  # noqa: ASYNC110 - what it waits for is on the wire
            await asyncio.sleep(0.01)
    ((line, offer),) = told
    assert offer == 5
    assert aioice.Candidate.from_sdp(line.removeprefix("candidate:")).host == "203.0.113.5"
    await call.close()
    await listener.close()
    transport.close()


async def test_a_relay_that_comes_late_still_makes_the_path(turn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener reaches nothing but the TURN server, whose address comes after the answer."""
    monkeypatch.setattr("breeze_rtc.transport.peer.GATHER_S", 0.0)
    ice = IceServers((IceServer((turn,)),), SECRET)
    told: list[str] = []
    listener = PythonListener()
    call = WebRtcCall(ice_servers=ice.servers, on_candidate=lambda line, offer: told.append(line))
    offer = await listener.offer()
    bare = re.sub(r"a=(candidate:|end-of-candidates).*\r\n", "", offer.sdp)
    answer = await call.answer(replace(offer, sdp=bare))
    assert "typ relay" not in answer
    # Nor does the server get through to the listener from its own addresses.
    for protocol in call._peer._ice._protocols:
        protocol.transport.sendto = lambda *_: None
    await listener.accept(re.sub(r"a=(candidate:|end-of-candidates).*\r\n", "", answer))
    async with asyncio.timeout(10):
        while not told:  # noqa: ASYNC110 - what it waits for is on the wire
            await asyncio.sleep(0.01)
    transport = listener._transceiver.receiver.transport.transport
    await transport.addRemoteCandidate(candidate_from_sdp(told[0].removeprefix("candidate:")))
    for line in candidates(offer.sdp):
        await call.add_candidate(Candidate(line))
    await until_heard(listener)
    await call.close()
    await listener.close()


@pytest.mark.parametrize("secret", [SECRET, "south"])
def test_the_doctor_asks_the_servers(turn: str, secret: str) -> None:
    """Before the first caller does: who answers, and with which address; and who refuses the credentials."""
    known = (IceServer((turn,)), IceServer((turn.replace("turn:", "stun:").split("?")[0],)))
    relay, seen = (doctor._ice_server(server) for server in IceServers(known, secret).servers())
    assert seen.works
    assert f"sees us at {own_address()}:" in seen.found
    assert relay.works is (secret == SECRET)
    assert "credentials" in relay.fix if secret != SECRET else f"relays from {own_address()}:" in relay.found


async def test_closing_does_not_wait_for_a_dead_server() -> None:
    """A TURN server that went away cannot hold a call's end up."""
    began = time.monotonic()
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as dead:
        dead.bind((own_address(), 0))
        url = f"turn:{own_address()}:{dead.getsockname()[1]}"
        call = WebRtcCall(ice_servers=lambda: [IceServer((url,), "user", "secret")])
        listener = PythonListener()
        await call.answer(await listener.offer())
        await call.add_candidate(Candidate(""))
        await call.close()
        await listener.close()
    assert time.monotonic() - began < 3


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare, to have a system of its own to set")
def test_the_systems_port_range_holds_calls() -> None:
    """The way to publish a container's ports: every candidate's port lies in `ip_local_port_range`."""
    script = (
        "import asyncio\n"
        "from python_listener import PythonListener\n"
        "from breeze_rtc.transport.webrtc import WebRtcCall\n"
        "async def main():\n"
        "    listener, calls = PythonListener(), [WebRtcCall() for _ in range(3)]\n"
        "    for call in calls: print(await call.answer(await listener.offer()))\n"
        "    for call in calls: await call.close()\n"
        "    await listener.close()\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [
            *("unshare", "--net", "--map-root-user", "sh", "-c"),
            "echo 40000 40019 > /proc/sys/net/ipv4/ip_local_port_range && ip link set lo up && "
            'ip addr add 10.9.9.9/32 dev lo && ip addr add fd00::9/128 dev lo nodad && exec "$0" -c "$1"',
            *(sys.executable, script),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parent,
        check=False,
    )
    if "unshare:" in done.stderr or "ip:" in done.stderr or "/proc/sys" in done.stderr:
        pytest.skip("this machine gives no network namespaces")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"a=candidate:\S+ 1 udp \d+ (\S+) (\d+) typ host", done.stdout)
    assert {address for address, _ in found} == {"10.9.9.9", "fd00::9"}
    assert len(found) == 6
    assert all(40_000 <= int(port) <= 40_019 for _, port in found)
