"""The SIP program registers an account, at a registrar that asks for the password (RFC 3261 section 22, RFC 2617)."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from hashlib import md5

import pytest
import softphone

pytestmark = pytest.mark.skipif(bool(softphone.missing()), reason=softphone.missing() or "no telephone")

REALM, NONCE = "telephones", "f84f1cec41e6cbe5aea9c8e88d359"


def hashed(*parts: str) -> str:
    return md5(":".join(parts).encode()).hexdigest()  # The digest that SIP asks for.


class Registrar(asyncio.DatagramProtocol):
    """Says 401 once, then 200 to whoever knows the password."""

    def __init__(self) -> None:
        self.contacts: list[str] = []
        self.refused = 0

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self.transport = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        text = data.decode()
        if not text.startswith("REGISTER "):
            return
        given = dict(re.findall(r'(\w+)="?([^",\r]+)"?', text.partition("Authorization: ")[2].partition("\n")[0]))
        status, more = "401 Unauthorized", f'WWW-Authenticate: Digest realm="{REALM}", nonce="{NONCE}"\r\n'
        if given:
            wanted = hashed(hashed("agent", REALM, "secret"), NONCE, hashed("REGISTER", given["uri"]))
            if given["response"] == wanted:
                contact = re.search(r"Contact: (.*)\r\n", text)
                assert contact is not None
                self.contacts.append(contact[1])
                status, more = "200 OK", f"Contact: {contact[1]}\r\nExpires: 300\r\n"
            else:
                self.refused += 1
                status, more = "403 Forbidden", ""
        kept = "".join(f"{line}\r\n" for line in text.split("\r\n") if re.match("Via|From|Call-ID|CSeq", line))
        to = re.search(r"To: (.*)\r\n", text)
        assert to is not None
        answer = f"SIP/2.0 {status}\r\n{kept}To: {to[1]};tag=r\r\n{more}Content-Length: 0\r\n\r\n"
        self.transport.sendto(answer.encode(), address)


@pytest.mark.parametrize(("password", "is_let_in"), [("secret", True), ("wrong", False)])
async def test_an_account_is_registered_with_its_password(password: str, is_let_in: bool) -> None:
    loop = asyncio.get_running_loop()
    transport, registrar = await loop.create_datagram_endpoint(Registrar, local_addr=("127.0.0.1", 0))
    port = transport.get_extra_info("sockname")[1]
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "breeze_rtc.sip", "--listen", "127.0.0.1:0", "--door", "ws://127.0.0.1:1/"),
        *("--account", f"sip:agent@127.0.0.1:{port}"),
        env={**os.environ, "SIP_PASSWORD": password},
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(15):
            while not registrar.contacts and not registrar.refused:  # noqa: ASYNC110 - it watches from outside
                await asyncio.sleep(0.05)
    finally:
        program.terminate()
        assert await program.wait() == 0
        transport.close()
    assert bool(registrar.contacts) == is_let_in
    assert all("agent@" in contact for contact in registrar.contacts)
