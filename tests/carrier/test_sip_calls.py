"""Our own SIP and a real telephone: over a bad network, called by us, handed on.

The truth is what came out of the telephone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import softphone
from barge_in import LONG, PHONE
from bent_path import Bend, BentPath
from exchange import exchange
from greeter import Greeter
from page import Hall, serving, until
from softphone import Softphone
from speech import spoken
from tone_engine import ToneEngine
from tone_words import words

from breeze_rtc.clock import MS
from breeze_rtc.server import sip_call
from breeze_rtc.sip import transactions

pytestmark = pytest.mark.skipif(bool(softphone.missing()), reason=softphone.missing() or "no telephone")


def port(hall: Hall) -> int:
    assert hall.server.sip is not None
    return hall.server.sip.port


async def test_a_barge_in_over_a_network_that_loses_and_delays(tmp_path: Path) -> None:
    """5 % of the packets are lost and each comes 0 to 40 ms late, in any order: a word more or less, not more."""
    agent = Greeter(LONG)
    async with serving(agent.callbacks, phone=PHONE, engine=ToneEngine(tells_words_apart=True)) as hall:
        with BentPath(port(hall), Bend(loss=0.05, jitter_s=0.04)) as path:
            with Softphone(tmp_path / "phone", path.uri) as phone:
                await until(lambda: phone.loud_s > 1.5)
                phone.say(spoken("stop it please, I want to ask you something", rate=8_000))
                await until(lambda: bool(agent.cut))
                await asyncio.sleep(0.7)
                heard = phone.heard()
            assert path.lost > 0.02 * path.carried > 0
        await hall.is_free()
    (speech,) = agent.cut
    number, share = words(heard)
    print(f"heard {number - 1 + share:.2f} words, history {len(speech.heard_text.split())}")
    assert speech.heard_text + speech.unheard_text == LONG
    assert abs(len(speech.heard_text.split()) - int(number - 1 + share)) <= 1


async def test_a_telephone_that_stops_dead_is_asked_and_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reproduction 36 (pipecat#4806), without a carrier.  SIGSTOP: no sound and no report comes, and a question gets no
    answer; then all is free."""
    monkeypatch.setattr(sip_call, "SILENT_S", 1.0)
    monkeypatch.setattr(transactions, "GIVE_UP_NS", 1500 * MS)
    agent = Greeter(LONG)
    async with serving(agent.callbacks, phone=PHONE) as hall:
        with Softphone(tmp_path / "phone", f"sip:agent@127.0.0.1:{port(hall)}") as phone:
            await until(lambda: phone.loud_s > 0.3)
            os.kill(phone.pid, signal.SIGSTOP)
            try:
                await hall.is_free()
            finally:
                os.kill(phone.pid, signal.SIGCONT)
    assert "twelve one two three four five six seven eight" not in " ".join(
        message.text for message in agent.sessions[0].history
    )


async def test_a_telephone_that_is_called_hears_the_agent_and_its_keys(tmp_path: Path) -> None:
    agent = Greeter("one two three")
    async with serving(agent.callbacks, phone=PHONE, engine=ToneEngine(tells_words_apart=True)) as hall:
        with Softphone(tmp_path / "phone", "") as phone:
            await until(lambda: "ready" in phone.log())
            calling = asyncio.create_task(hall.server.dial("sip", phone.uri, caller=""))
            await until(lambda: bool(agent.sessions))
            phone.press("9")
            await until(lambda: agent.keys == ["9"])
            await until(lambda: [message.text for message in agent.sessions[0].history] == ["one two three"])
            await agent.sessions[0].close()
            await calling
            number, share = words(phone.heard())
            assert (number, share > 0.9) == (3, True)
            await until(lambda: "terminated" in phone.log() or "session closed" in phone.log())
        await hall.is_free()


async def test_pjsip_is_called_and_brings_the_call_to_another_server(tmp_path: Path) -> None:
    """Somebody else's SIP and RTP, the test carrier's: both agents are heard, and keys go through."""
    here, there = Greeter("one two three"), Greeter("four five six seven")
    async with (
        serving(here.callbacks, phone=PHONE) as ours,
        serving(there.callbacks, phone=PHONE) as theirs,
        exchange(theirs, "twilio") as carrier,
    ):
        calling = asyncio.create_task(ours.server.dial("sip", carrier.uri, caller=""))
        await until(lambda: bool(here.sessions) and bool(there.sessions))
        await here.sessions[0].send_dtmf("7*")
        await until(lambda: there.keys == ["7", "*"])
        for agent in (here, there):
            await until(lambda agent=agent: [m.text for m in agent.sessions[0].history] == [agent.greeting])  # type: ignore[misc]
        await there.sessions[0].close()
        assert await calling == "the caller hung up"
        await ours.is_free()
        await theirs.is_free()


async def test_a_telephone_is_handed_on_to_another_agent(tmp_path: Path) -> None:
    first, second = Greeter("one two three"), Greeter("one two")
    async with (
        serving(first.callbacks, phone=PHONE) as here,
        serving(second.callbacks, phone=PHONE) as there,
    ):
        with Softphone(tmp_path / "phone", f"sip:agent@127.0.0.1:{port(here)}") as phone:
            await until(lambda: phone.loud_s > 0.3)
            await first.sessions[0].transfer(f"sip:second@127.0.0.1:{port(there)}")
            await here.is_free()
            await until(lambda: bool(second.sessions))
            assert second.sessions[0].metadata["to"].startswith("sip:second@127.0.0.1")
        await there.is_free()


async def test_breeze_rtc_call_calls_a_telephone_and_ends_with_it(tmp_path: Path) -> None:
    """As a user starts it: the nano voice at the telephone, which hangs up."""
    with Softphone(tmp_path / "phone", "") as phone:
        command = ("-m", "breeze_rtc", "call", "--carrier", "sip", "--to", phone.uri, "--port", "0", "--no-listen")
        caller = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
        try:
            async with asyncio.timeout(120):
                while phone.loud_s < 0.5:  # noqa: ASYNC110 - it watches from outside
                    await asyncio.sleep(0.05)
                phone.hang_up()
                said, _ = await caller.communicate()
        finally:
            if caller.returncode is None:
                caller.kill()
                await caller.wait()
    assert caller.returncode == 0
    assert "The call is over: the caller hung up" in said.decode()
