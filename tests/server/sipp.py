"""SIPp, a stranger's SIP: callers and telephones by its scenarios, their sound from sockets of ours or its own."""

from __future__ import annotations

import asyncio
import shutil
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

MISSING = "" if shutil.which("sipp") else "SIPp is not installed. On Debian: sudo apt-get install sip-tester"

SPEAKS = """\
<nop><action><exec rtp_stream="{sound},-1,0,PCMU/8000"/></action></nop>
"""
DESCRIPTION = """\
v=0
o=sipp 1 1 IN IP[media_ip_type] [media_ip]
s=-
c=IN IP[media_ip_type] [media_ip]
t=0 0
m=audio {port} RTP/AVP 0 101
a=rtpmap:0 PCMU/8000
a=rtpmap:101 telephone-event/8000
"""
CALLS = """\
<?xml version="1.0" encoding="UTF-8"?>
<scenario name="calls">
  <send retrans="500" start_txn="invite"><![CDATA[
INVITE sip:agent@[remote_ip]:[remote_port] SIP/2.0
Via: SIP/2.0/[transport] [local_ip]:[local_port];branch=[branch]
From: <sip:caller@[local_ip]:[local_port]>;tag=[call_number]
To: <sip:agent@[remote_ip]:[remote_port]>
Call-ID: [call_id]
CSeq: 1 INVITE
Contact: <sip:caller@[local_ip]:[local_port];transport=[transport]>
Max-Forwards: 70
Content-Type: application/sdp
Content-Length: [len]

{description}]]></send>
  <recv response="100" response_txn="invite" optional="true"/>
  <recv response="180" response_txn="invite" optional="true"/>
  <recv response="200" response_txn="invite" rrs="true"/>
  <send ack_txn="invite"><![CDATA[
ACK [next_url] SIP/2.0
Via: SIP/2.0/[transport] [local_ip]:[local_port];branch=[branch]
From: <sip:caller@[local_ip]:[local_port]>;tag=[call_number]
To: <sip:agent@[remote_ip]:[remote_port]>[peer_tag_param]
Call-ID: [call_id]
CSeq: 1 ACK
Max-Forwards: 70
Content-Length: 0

]]></send>
  {speaks}
  <pause milliseconds="{lasts_ms}"/>
  <send retrans="500" start_txn="bye"><![CDATA[
BYE [next_url] SIP/2.0
Via: SIP/2.0/[transport] [local_ip]:[local_port];branch=[branch]
From: <sip:caller@[local_ip]:[local_port]>;tag=[call_number]
To: <sip:agent@[remote_ip]:[remote_port]>[peer_tag_param]
Call-ID: [call_id]
CSeq: 2 BYE
Max-Forwards: 70
Content-Length: 0

]]></send>
  <recv response="200" response_txn="bye"/>
</scenario>
"""


async def calls(
    folder: Path,
    port: int,
    count: int,
    *,
    lasts_ms: int,
    per_s: int = 50,
    transport: str = "u1",
    rtp_ports: list[int] | None = None,
) -> tuple[int, str]:
    """So many calls to a local port, together -> SIPp's exit code (0: all of them went as they should), and its words.

    rtp_ports: where the sound of each goes; without them SIPp sends sound of its own, and hears none.
    """
    sound = folder / "sound.ulaw"
    sound.write_bytes(b"\xff\x7f" * 4_000)
    media = "[field0]" if rtp_ports else "[rtpstream_audio_port]"
    speaks = "" if rtp_ports else SPEAKS.format(sound=sound)
    text = CALLS.format(description=DESCRIPTION.format(port=media), speaks=speaks, lasts_ms=lasts_ms)
    (folder / "calls.xml").write_text(text)
    options = ["-sf", "calls.xml", "-m", count, "-l", count, "-r", per_s, "-t", transport, "-i", "127.0.0.1"]
    if rtp_ports:
        (folder / "ports.csv").write_text("SEQUENTIAL\n" + "".join(f"{port}\n" for port in rtp_ports))
        options += ["-inf", "ports.csv"]
    options += ["-nostdin", f"127.0.0.1:{port}"]
    running = await asyncio.create_subprocess_exec(
        "sipp", *map(str, options), cwd=folder, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
    )
    try:
        _, said = await running.communicate()
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
    return running.returncode or 0, said.decode()
