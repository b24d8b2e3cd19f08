"""The SIP door over real sockets: a server that calls another, a registrar, and SIPp, which is somebody else's SIP."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sipp
from greeter import Greeter
from page import Hall, serving, until

from breeze_rtc.errors import BadRequest, NoAnswer
from breeze_rtc.server.phone import Phone
from breeze_rtc.server.sip import Sip
from breeze_rtc.sip import digest


@asynccontextmanager
async def office(
    agent: Greeter, *, account: str | None = None, password: str = "", **options: Any
) -> AsyncIterator[Hall]:
    """A server whose door is at any port."""
    phone = Phone("https://agent.example.org", key="secret", sip=Sip("127.0.0.1:0", account, password))
    async with serving(agent.callbacks, phone=phone, **options) as hall:
        yield hall


def uri(hall: Hall, transport: str = "udp") -> str:
    assert hall.server.sip is not None
    return f"sip:agent@127.0.0.1:{hall.server.sip.port};transport={transport}"


@pytest.mark.parametrize("transport", ["udp", "tcp"])
async def test_one_server_calls_another_and_both_are_heard(transport: str) -> None:
    """Keys go over, the caller knows whom it called, and who hangs up ends it on both sides."""
    here, there = Greeter("one two three"), Greeter("four five six seven")
    async with office(here) as ours, office(there) as theirs:
        calling = asyncio.create_task(ours.server.dial("sip", uri(theirs, transport), caller=""))
        await until(lambda: bool(here.sessions) and bool(there.sessions))
        await here.sessions[0].send_dtmf("1#")
        await until(lambda: there.keys == ["1", "#"])
        await until(lambda: here.heard == ["one two three"] and there.heard == ["four five six seven"])
        assert here.sessions[0].metadata["to"] == uri(theirs, transport)
        assert there.sessions[0].metadata["to"].startswith("sip:agent@127.0.0.1")
        assert there.sessions[0].metadata["from"].startswith("sip:breeze_rtc@127.0.0.1")
        await there.sessions[0].close()
        assert await calling == "the caller hung up"
        await ours.is_free()
        await theirs.is_free()


async def test_a_call_that_nobody_takes_says_why() -> None:
    async with office(Greeter()) as ours, office(Greeter(), max_calls=0) as theirs:
        assert ours.server.sip is not None
        with pytest.raises(NoAnswer, match="486 Busy Here"):
            await ours.server.sip.call(uri(theirs))
        with pytest.raises(BadRequest, match="no SIP address"):
            await ours.server.sip.call("+49 30 123456")
        with pytest.raises(BadRequest, match="has no address"):
            await ours.server.sip.call("sip:agent@nowhere.invalid")
        await ours.is_free()
        assert not ours.server.sip._calls


async def test_calls_of_one_moment_share_the_lines_there_are() -> None:
    """Three invitations before one of them has its ports: one is taken, and the others hear that it is busy."""
    there = Greeter("one two three")
    async with office(Greeter()) as ours, office(there, max_calls=1) as theirs:
        calls = [asyncio.create_task(ours.server.dial("sip", uri(theirs), caller="")) for _ in range(3)]
        await until(lambda: sum(call.done() for call in calls) == 2)
        assert ["486" in str(call.exception()) for call in calls if call.done()] == [True, True]
        await until(lambda: bool(there.sessions))
        assert len(theirs.server._calls) == 1
        await there.sessions[0].close()
        await asyncio.wait(calls)
        await ours.is_free()
        await theirs.is_free()


async def test_a_server_that_stops_hangs_up() -> None:
    here, there = Greeter("one " * 50), Greeter("two " * 50)
    async with office(there) as theirs:
        async with office(here) as ours:
            assert ours.server.sip is not None
            calling = asyncio.create_task(ours.server.sip.call(uri(theirs)))
            await until(lambda: bool(here.sessions) and bool(there.sessions))
        await theirs.is_free()
        await asyncio.gather(calling, return_exceptions=True)


def answer_to(asked: str, status: str, more: str = "", body: str = "") -> bytes:
    kept = "".join(f"{line}\r\n" for line in asked.split("\r\n") if re.match("Via|From|To|Call-ID|CSeq", line))
    return f"SIP/2.0 {status}\r\n{kept}{more}Content-Length: {len(body)}\r\n\r\n{body}".encode()


class VideoTelephone(asyncio.DatagramProtocol):
    """Takes each call, with pictures and no sound."""

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self.transport = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        text = data.decode()
        host, port = self.transport.get_extra_info("sockname")
        if text.startswith("INVITE "):
            contact = f"Contact: <sip:video@{host}:{port}>\r\nContent-Type: application/sdp\r\n"
            body = f"v=0\r\no=- 1 1 IN IP4 {host}\r\ns=-\r\nc=IN IP4 {host}\r\nt=0 0\r\nm=video 9 RTP/AVP 96\r\n"
            self.transport.sendto(answer_to(text, "200 OK", contact, body), address)
        elif text.startswith("BYE "):
            self.transport.sendto(answer_to(text, "200 OK"), address)


async def test_a_telephone_that_takes_the_call_without_sound_is_given_up_at_once() -> None:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(VideoTelephone, local_addr=("127.0.0.1", 0))
    port = transport.get_extra_info("sockname")[1]
    async with office(Greeter(), max_calls=1) as hall:
        async with asyncio.timeout(10):
            with pytest.raises(NoAnswer, match=r"no G\.711 audio"):
                await hall.server.dial("sip", f"sip:video@127.0.0.1:{port}", caller="")
        await hall.is_free()
    transport.close()


class Registrar(asyncio.DatagramProtocol):
    """Asks for the password, and says 200 to whoever knows it."""

    def __init__(self) -> None:
        self.expires: list[str] = []
        self.refused = 0

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self.transport = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        text = data.decode()
        if not text.startswith("REGISTER "):
            return
        challenge = 'Digest realm="telephones", nonce="f84f1cec41e6cbe5aea9c8e88d359", qop="auth"'
        status, more = "401 Unauthorized", f"WWW-Authenticate: {challenge}\r\n"
        said = text.partition("Authorization: ")[2].partition("\r\n")[0]
        if said:
            fields = dict(re.findall(r'(\w+)="?([^",\r]+)"?', said))
            wanted = {"method": "REGISTER", "uri": fields["uri"], "user": "agent", "password": "secret"}
            if said == digest.answer((challenge,), **wanted, cnonce=fields["cnonce"]):
                contact = re.search(r"Contact: (.*)\r\n", text)
                expires = re.search(r"Expires: (.*)\r\n", text)
                assert contact is not None
                assert expires is not None
                assert "agent@" in contact[1]
                self.expires.append(expires[1])
                status, more = "200 OK", f"Contact: {contact[1]}\r\nExpires: 300\r\n"
            else:
                self.refused += 1
                status, more = "403 Forbidden", ""
        self.transport.sendto(answer_to(text, status, more), address)


@pytest.mark.parametrize(("password", "status"), [("secret", 200), ("wrong", 403)])
async def test_an_account_is_registered_with_its_password_and_leaves(password: str, status: int) -> None:
    loop = asyncio.get_running_loop()
    transport, registrar = await loop.create_datagram_endpoint(Registrar, local_addr=("127.0.0.1", 0))
    port = transport.get_extra_info("sockname")[1]
    async with office(Greeter(), account=f"sip:agent@127.0.0.1:{port}", password=password) as hall:
        door = hall.server.sip
        assert door is not None
        await until(lambda: door.registered == status)
    assert registrar.expires == (["300", "0"] if status == 200 else [])
    transport.close()


async def test_an_address_that_is_taken_is_said_in_words() -> None:
    async with office(Greeter()) as hall:
        assert hall.server.sip is not None
        phone = Phone("https://a.example", sip=Sip(f"127.0.0.1:{hall.server.sip.port}"))
        with pytest.raises(BadRequest, match=r"cannot answer SIP at 127\.0\.0\.1"):
            async with serving(Greeter().callbacks, phone=phone):
                pass


async def test_a_door_that_cannot_register_leaves_its_address() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    lost = Phone("https://a.example", sip=Sip(address, "sip:agent@nowhere.invalid", "secret"))
    with pytest.raises(BadRequest, match=r"--sip-account: nowhere\.invalid has no address"):
        async with serving(Greeter().callbacks, phone=lost):
            pass
    await asyncio.sleep(0)  # asyncio closes a datagram socket in the loop's next round.
    async with serving(Greeter().callbacks, phone=Phone("https://a.example", sip=Sip(address))) as hall:
        assert hall.server.sip is not None


@pytest.mark.skipif(bool(sipp.MISSING), reason=sipp.MISSING or "SIPp is there")
@pytest.mark.parametrize(("count", "transport"), [(1, "u1"), (10, "t1"), (50, "u1")])
async def test_so_many_calls_of_sipp_at_once_are_answered_and_end_well(
    count: int, transport: str, tmp_path: Path
) -> None:
    """Each with sound both ways, and all of them open at one time."""
    agent = Greeter("one two three four")
    async with office(agent, max_calls=count) as hall:
        assert hall.server.sip is not None
        code, said = await sipp.calls(
            tmp_path, hall.server.sip.port, count, lasts_ms=100 * count, per_s=12, transport=transport
        )
        assert code == 0, said
        await hall.is_free()
        assert len(agent.sessions) == count
        assert not hall.server.sip._calls
