"""Telephone calls over a real socket, from a carrier that plays in real time."""

from __future__ import annotations

import asyncio
import json
import socket
import wave
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import numpy as np
import pytest
from carrier_line import START, CarrierLine
from greeter import Greeter
from numpy.typing import NDArray
from page import Hall, serving, until
from speech import spoken
from tone_engine import TONES_HZ, ToneEngine
from twilio.request_validator import RequestValidator
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from breeze_rtc.agent.session import AgentSession, Callbacks
from breeze_rtc.errors import LineCannot
from breeze_rtc.media.line_codec import LineCodec
from breeze_rtc.server.phone import Phone
from breeze_rtc.transport.audio_socket import Inbox, message
from breeze_rtc.transport.uplink import RATE

PHONE = Phone("https://agent.example.org", key="secret")
LONG = "one two three four five six seven eight nine ten eleven twelve"


def sides(folder: Path) -> NDArray[np.int16]:
    """Caller and agent of the one recording that is there."""
    (path,) = folder.iterdir()
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getframerate()) == (2, RATE)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, 2).astype(int).T


@asynccontextmanager
async def ringing(agent: Greeter, phone: Phone = PHONE, **options: Any) -> AsyncIterator[Hall]:
    async with serving(agent.callbacks, phone=phone, **options) as hall:
        yield hall


@asynccontextmanager
async def calling(hall: Hall, path: str = "/phone/secret/twilio", **options: Any) -> AsyncIterator[CarrierLine]:
    address = hall.http.replace("http", "ws") + path
    async with connect(address, **options) as connection:
        line = CarrierLine(connection)
        try:
            yield line
        finally:
            await line.close()


async def test_a_caller_hears_the_greeting_to_its_end() -> None:
    """Three words of 0.4 s, a tone each: all of it comes out of the telephone, and the history has all of it."""
    agent = Greeter()
    async with ringing(agent) as hall:
        async with calling(hall) as line:
            await line.start()
            await until(lambda: agent.heard == ["one two three"])
            assert 1.15 <= line.speech_s <= 1.25
            spectrum = np.abs(np.fft.rfft(line.samples()))
            assert abs(np.argmax(spectrum) * 8_000 / len(line.samples()) - 440) < 3
            assert line.most_held <= 21
        await hall.is_free()


async def test_a_barge_in_silences_the_telephone_and_keeps_what_was_heard() -> None:
    """Reproductions 12 and 15 (cloudflare/agents#2261, fastrtc#341): no clear, and a bot that keeps talking.  A real
    voice over a long greeting: one clear, nothing old after it, and the text as far as it came."""
    agent = Greeter(LONG)
    async with ringing(agent) as hall:
        async with calling(hall) as line:
            await line.start()
            await until(lambda: line.speech_s > 1.2)
            line.say(spoken("stop it please, I want to ask you something", rate=8_000))
            await until(lambda: bool(line.clears))
            await until(lambda: bool(agent.cut))
            (speech,) = agent.cut
            # The line's own delay to the ear are not in this carrier: it hears that much more than the text has.
            heard_s = line.speech_s
            assert len(line.heard_is_speech) >= line.clears[0]
            assert not any(line.heard_is_speech[line.clears[0] :])
            words = len(speech.heard_text.split())
            assert abs(words - int(heard_s / 0.4)) <= 1
            assert LONG.startswith(speech.heard_text)
            assert speech.heard_text + speech.unheard_text == LONG
            await until(lambda: bool(agent.turns))
            assert agent.turns[0].audio is not None
        await hall.is_free()


async def test_a_call_is_written_down_as_the_telephone_played_it(tmp_path: Path) -> None:
    """The line stalls for 700 ms and brings it at once, and the caller cuts the agent: the file is as long as the
    call, has the agent up to where the carrier was cleared, and the caller's words."""
    agent = Greeter(LONG)
    async with ringing(agent, recordings=tmp_path) as hall:
        async with calling(hall) as line:
            began = asyncio.get_running_loop().time()
            await line.start()
            await until(lambda: line.speech_s > 0.5)
            line.stall(0.7)
            await until(lambda: line.speech_s > 1.6)
            line.say(spoken("stop it please, I want to ask you something", rate=8_000))
            await until(lambda: bool(line.clears))
            await until(lambda: bool(agent.turns))
            spoke_s, took_s = line.speech_s, asyncio.get_running_loop().time() - began
        await hall.is_free()
        over_s = asyncio.get_running_loop().time() - began
    caller, told = sides(tmp_path)
    assert took_s - 0.3 < len(told) / RATE < over_s + 0.3
    assert np.mean(np.abs(told) > 500) * len(told) / RATE == pytest.approx(spoke_s, abs=0.25)
    loud = np.flatnonzero(np.abs(told) > 3_000)
    # What was at the carrier when it was cleared is not there.
    begins = np.flatnonzero(np.abs(caller) > 3_000)[0]
    assert 0 < (loud[-1] - begins) / RATE < 0.9
    assert np.abs(caller[begins:]).max() > 3_000


async def test_a_caller_who_hangs_up_in_mid_speech_leaves_nothing() -> None:
    agent = Greeter(LONG)
    async with ringing(agent) as hall:
        async with calling(hall) as line:
            await line.start()
            await until(lambda: line.speech_s > 0.3)
        await hall.is_free()
        assert "one two three four" not in " ".join(agent.heard)


async def test_a_caller_who_comes_back_hears_nothing_of_the_speech_that_was_cut_off() -> None:
    """Reproduction 14 (pipecat#3872): the connection dies in mid-speech, and after it the tail of the old answer plays.
    Each word has a tone of its own: the first half second of the next call is its first word and nothing else."""
    agent = Greeter(LONG)
    engine = ToneEngine(tells_words_apart=True)
    async with ringing(agent, engine=engine) as hall:
        async with calling(hall) as line:
            await line.start()
            await until(lambda: line.speech_s > 1.4)
            line.socket.transport.abort()
        async with calling(hall) as line:
            await line.start()
            await until(lambda: line.speech_s > 0.5)
        await hall.is_free()
    heard = line.samples()
    loud = np.flatnonzero(np.abs(heard) > 0.05)
    first = heard[loud[0] : loud[0] + 3_000]
    strength = np.abs(np.fft.rfft(first * np.hanning(len(first)), 8_000))
    tones = [float(strength[hz - 5 : hz + 6].max()) for hz in TONES_HZ]
    assert tones[0] == max(tones)
    assert max(tones[1:]) < tones[0] / 20


@pytest.mark.parametrize("after_s", [0, 0.03, 0.09])
@pytest.mark.parametrize("stop", [None, {"event": "stop", "streamSid": "MZ1"}])
async def test_a_caller_who_hangs_up_at_once_leaves_nothing(stop: dict[str, str] | None, after_s: float) -> None:
    """Trap: a caller who hangs up in the first 100 ms: by the socket, or by a stop."""
    agent = Greeter(LONG)
    async with ringing(agent) as hall:
        async with calling(hall) as line:
            await line.start()
            await asyncio.sleep(after_s)
            if stop is not None:
                await line.socket.send(json.dumps(stop))
                await line.socket.wait_closed()
        await hall.is_free()


async def test_a_stop_before_the_start_and_a_second_start_are_survived() -> None:
    """Traps: a stop before the start, and two starts."""
    agent = Greeter()
    async with ringing(agent) as hall:
        async with calling(hall) as line:
            await line.socket.send(json.dumps({"event": "stop"}))
            await line.start()
            await line.socket.send(json.dumps(START))
            await until(lambda: agent.heard == ["one two three"])
        await hall.is_free()
        assert len(agent.sessions) == 1


async def test_messages_against_the_rules_do_not_end_a_call_until_they_are_many() -> None:
    agent = Greeter(LONG)
    async with ringing(agent) as hall:
        async with calling(hall) as line:
            await line.start()
            for _ in range(20):
                await line.socket.send("no json")
            await until(lambda: line.speech_s > 0.3)
            for _ in range(60):
                await line.socket.send("no json")
            await line.socket.wait_closed()
            assert "not JSON" in str(line.socket.close_reason)
        await hall.is_free()


async def test_a_codec_nobody_reads_ends_the_call_and_says_what_to_set() -> None:
    start = json.loads(json.dumps(START))
    start["start"]["mediaFormat"]["encoding"] = "audio/amr"
    async with ringing(Greeter()) as hall:
        async with calling(hall) as line:
            await line.start(start)
            await line.socket.wait_closed()
            assert "audio/amr" in str(line.socket.close_reason)
        await hall.is_free()


async def test_an_agent_that_ends_the_call_hangs_up_after_its_last_word() -> None:
    agent = Greeter()

    async def farewell(session: AgentSession) -> None:
        await session.say("good bye")
        await session.close()

    callbacks = Callbacks(on_enter=farewell)
    async with serving(callbacks, phone=PHONE) as hall:
        async with calling(hall) as line:
            await line.start()
            await line.socket.wait_closed()
            assert 0.75 <= line.speech_s <= 0.85
        await hall.is_free()
    assert not agent.sessions


async def test_keys_reach_the_agent_while_it_speaks_and_it_knows_who_calls() -> None:
    """Trap: a key during speech; what the callback yields is spoken after it."""
    start = json.loads(json.dumps(START))
    start["start"]["customParameters"] = {"caller": "+15550100"}
    keys: list[tuple[str, str]] = []
    agent = Greeter("one two")

    async def key(session: AgentSession, digit: str) -> AsyncIterator[str]:
        keys.append((digit, session.metadata["caller"]))
        yield f"key {digit}"

    callbacks = agent.callbacks
    callbacks.on_dtmf = key
    async with serving(callbacks, phone=PHONE) as hall:
        async with calling(hall) as line:
            await line.start(start)
            await until(lambda: line.speech_s > 0.2)
            dtmf = {"event": "dtmf", "streamSid": "MZ1", "dtmf": {"track": "inbound_track", "digit": "5"}}
            await line.socket.send(json.dumps(dtmf))
            await until(lambda: agent.heard == ["one two", "key 5"])
            assert keys == [("5", "+15550100")]
        await hall.is_free()


async def test_a_line_that_sends_nothing_in_silence_still_gets_its_greeting() -> None:
    """Trap: no inbound media at all, for the trunk suppresses silence: marks are all that comes."""
    agent = Greeter()
    async with ringing(agent) as hall:
        async with calling(hall) as line:
            await line.start()
            line._tasks[0].cancel()
            await asyncio.sleep(0.1)
            for number in range(1, 100):
                if agent.heard == ["one two three"]:
                    break
                await asyncio.sleep(0.1)
                await line._echo(f"0:{number}")
            assert agent.heard == ["one two three"]
        await hall.is_free()


async def test_the_key_is_in_the_path_and_another_gets_nothing() -> None:
    async with ringing(Greeter()) as hall:
        with pytest.raises(InvalidStatus):
            async with calling(hall, "/phone/guess/twilio"):
                pass
        async with httpx.AsyncClient(base_url=hall.http) as client:
            assert (await client.get("/phone/guess/twilio")).status_code == 404


async def test_a_full_server_refuses_the_call_before_it_is_taken() -> None:
    agent = Greeter(LONG)
    async with ringing(agent, max_calls=1) as hall:
        async with calling(hall) as line:
            await line.start()
            await until(lambda: len(hall.server._calls) == 1)
            with pytest.raises(InvalidStatus):
                async with calling(hall):
                    pass
        await hall.is_free()


async def test_calls_of_one_moment_share_the_lines_there_are() -> None:
    """Three sockets before one of them is open: one is taken."""
    async with ringing(Greeter(), max_calls=1) as hall, AsyncExitStack() as sockets:
        asked = [sockets.enter_async_context(calling(hall)) for _ in range(3)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(answer, InvalidStatus) for answer in answers) == 2
        assert len(hall.server._calls) == 1


async def test_asterisk_gets_the_protocol_it_asks_for_and_what_its_dialplan_adds_is_known() -> None:
    """`protocols = media`, and `v(from=100)`."""
    agent = Greeter()
    async with ringing(agent) as hall:
        address = hall.http.replace("http", "ws") + "/phone/secret/asterisk?from=100"
        async with connect(address, subprotocols=[Subprotocol("media")]) as socket:
            assert socket.subprotocol == "media"
            await socket.send(json.dumps({"event": "MEDIA_START", "format": "ulaw", "channel_id": "1.1"}))
            await until(lambda: bool(agent.sessions))
            metadata = agent.sessions[0].metadata
            assert (metadata["from"], metadata["carrier"], metadata["channel_id"]) == ("100", "asterisk", "1.1")
            with pytest.raises(LineCannot, match="dialplan"):
                await agent.sessions[0].transfer("+4930123456")
        await hall.is_free()


async def test_who_calls_by_twilio_is_known_from_its_webhook() -> None:
    """Its stream does not tell; what the webhook says comes back with it."""
    async with ringing(Greeter()) as hall, httpx.AsyncClient(base_url=hall.http) as client:
        answer = await client.post("/phone/secret/twilio", data={"From": "+15550100", "To": '+49"30', "Digits": "1"})
        assert '<Parameter name="from" value="+15550100"/>' in answer.text
        stream = ElementTree.fromstring(answer.text).find("./Connect/Stream")
        assert stream is not None
        assert [item.attrib["value"] for item in stream] == ["+15550100", '+49"30']


async def test_without_an_account_nobody_is_put_through_and_the_call_goes_on() -> None:
    agent = Greeter()
    port = free_port()
    async with ringing(agent, Phone("http://localhost", key="secret", audio_socket=("127.0.0.1", port))) as hall:
        async with calling(hall) as line:
            await line.start()
            await until(lambda: bool(agent.sessions))
            with pytest.raises(LineCannot, match=r"docs/phone\.md"):
                await agent.sessions[0].transfer("+4930123456")
            await until(lambda: agent.heard == ["one two three"])
        async with AudioSocket(port):
            await until(lambda: len(agent.sessions) == 2)
            with pytest.raises(LineCannot, match="AudioSocket"):
                await agent.sessions[1].transfer("+4930123456")
        await hall.is_free()


async def test_the_answer_to_a_carriers_webhook_says_where_to_stream() -> None:
    async with ringing(Greeter()) as hall, httpx.AsyncClient(base_url=hall.http) as client:
        twilio = await client.post("/phone/secret/twilio")
        assert '<Connect><Stream url="wss://agent.example.org/phone/secret/twilio"/></Connect>' in twilio.text
        assert twilio.headers["content-type"].startswith("application/xml")
        telnyx = await client.get("/phone/secret/telnyx")
        assert 'bidirectionalMode="rtp"' in telnyx.text
        plivo = await client.get("/phone/secret/plivo")
        assert 'bidirectional="true"' in plivo.text
        vonage = (await client.get("/phone/secret/vonage")).json()
        assert vonage[0]["endpoint"][0]["uri"] == "wss://agent.example.org/phone/secret/vonage"
        assert "wss://agent.example.org/phone/secret/asterisk" in (await client.get("/phone/secret/asterisk")).text


def test_what_is_printed_says_what_to_paste_where() -> None:
    phone = Phone("https://agent.example.org/voice/", key="secret", audio_socket=("127.0.0.1", 9092))
    text = phone.instructions(8000)
    assert "webhook https://agent.example.org/voice/phone/secret/twilio" in text
    assert '<Stream url="wss://agent.example.org/voice/phone/secret/twilio"/>' in text
    assert "AudioSocket(UUID,127.0.0.1:9092)" in text
    assert "uri = wss://agent.example.org/voice/phone/secret/asterisk" in text
    assert "https only" not in text
    assert "https only" in Phone("http://127.0.0.1:8000/").instructions(8000)


async def test_with_twilios_token_only_twilio_gets_in() -> None:
    """The webhook and the socket, each signed as Twilio's own library signs."""
    phone = Phone("https://agent.example.org", key="secret", twilio_token="12345")
    validator = RequestValidator("12345")
    form = {"CallSid": "CA1", "From": "+14158675310"}
    signature = validator.compute_signature("https://agent.example.org/phone/secret/twilio", form)
    socket_signature = validator.compute_signature("wss://agent.example.org/phone/secret/twilio", {})
    agent = Greeter()
    async with ringing(agent, phone) as hall:
        async with httpx.AsyncClient(base_url=hall.http) as client:
            for given, status in ((signature, 200), ("wrong", 403), ("", 403)):
                answer = await client.post("/phone/secret/twilio", data=form, headers={"X-Twilio-Signature": given})
                assert answer.status_code == status
        with pytest.raises(InvalidStatus):
            async with calling(hall):
                pass
        async with calling(hall, additional_headers={"X-Twilio-Signature": socket_signature}) as line:
            await line.start()
            await until(lambda: agent.heard == ["one two three"])
        await hall.is_free()


class AudioSocket:
    """Asterisk's side: it gets 20 ms at a time and hands them on."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.frames: list[bytes] = []
        self.has_ended = False

    async def __aenter__(self) -> AudioSocket:
        self._reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(message(0x01, bytes(16)))
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        self.writer.close()

    @property
    def speech_s(self) -> float:
        return sum(any(frame) for frame in self.frames) * 0.02

    async def _read(self) -> None:
        inbox = Inbox()
        while data := await self._reader.read(1_000):
            for item in inbox.feed(data):
                self.has_ended = self.has_ended or item.kind == 0x00
                if item.kind == 0x10:
                    self.frames.append(item.payload)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_asterisk_hears_the_greeting_over_audiosocket_and_silence_around_it() -> None:
    """Reproduction 51 (asterisk#2089): a peer that sends nothing at all gets its 20 ms from the first moment on."""
    agent = Greeter()
    port = free_port()
    async with ringing(agent, Phone("http://localhost", audio_socket=("127.0.0.1", port))) as hall:
        async with AudioSocket(port) as asterisk:
            began = asyncio.get_running_loop().time()
            await until(lambda: agent.heard == ["one two three"])
            took_s = asyncio.get_running_loop().time() - began
            assert 1.15 <= asterisk.speech_s <= 1.3
            # On a machine that is busy some are still on their way; never are there more than time has passed.
            await until(lambda: len(asterisk.frames) * 0.02 > took_s - 0.1)
            assert len(asterisk.frames) * 0.02 < asyncio.get_running_loop().time() - began + 0.1
        await hall.is_free()


async def test_an_audiosocket_call_is_written_down(tmp_path: Path) -> None:
    """Both sides, as long as the call: the agent from its first sample to where a voice cut it, and that voice."""
    agent = Greeter(LONG)
    port = free_port()
    phone = Phone("http://localhost", audio_socket=("127.0.0.1", port))
    async with ringing(agent, phone, recordings=tmp_path) as hall:
        async with AudioSocket(port) as asterisk:
            began = asyncio.get_running_loop().time()
            await until(lambda: asterisk.speech_s > 1.0)
            said = LineCodec("L16").encode(spoken("stop it please, I want to ask something", rate=8_000))
            for at in range(0, len(said), 320):
                asterisk.writer.write(message(0x10, said[at : at + 320]))
                await asyncio.sleep(0.02)
            await until(lambda: bool(agent.cut))
            took_s = asyncio.get_running_loop().time() - began
            spoke_s = asterisk.speech_s
        await hall.is_free()
        over_s = asyncio.get_running_loop().time() - began
    caller, told = sides(tmp_path)
    assert took_s - 0.3 < len(told) / RATE < over_s + 0.3
    assert np.mean(np.abs(told) > 500) * len(told) / RATE == pytest.approx(spoke_s, abs=0.15)
    begins = np.flatnonzero(np.abs(caller) > 3_000)[0] / RATE
    assert 1.0 < begins < 2.5


def test_asterisk_is_answered_on_the_loop_that_serves() -> None:
    """uvloop, whose transports are not asyncio's by name."""
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test_an_agent_that_ends_an_audiosocket_call_hangs_up())


async def test_an_agent_that_ends_an_audiosocket_call_hangs_up() -> None:
    async def farewell(session: AgentSession) -> None:
        await session.say("good bye")
        await session.close()

    port = free_port()
    phone = Phone("http://localhost", audio_socket=("127.0.0.1", port))
    async with serving(Callbacks(on_enter=farewell), phone=phone) as hall:
        async with AudioSocket(port) as asterisk:
            await until(lambda: asterisk.has_ended)
            assert 0.75 <= asterisk.speech_s <= 0.9
        await hall.is_free()


async def test_a_server_that_stops_hangs_up_on_asterisk_before_its_engine_stops() -> None:
    port = free_port()
    async with AsyncExitStack() as stack:
        async with ringing(Greeter(LONG), Phone("http://localhost", audio_socket=("127.0.0.1", port))) as hall:
            asterisk = await stack.enter_async_context(AudioSocket(port))
            await until(lambda: asterisk.speech_s > 0.3)
        assert not hall.server._calls
        assert not hall.engine.open
        await until(lambda: asterisk.has_ended)


async def test_an_asterisk_that_stops_dead_is_let_go() -> None:
    """Its connection stays open, and takes nothing any more once its system's buffer is full, a small one here."""
    port = free_port()
    async with ringing(Greeter(LONG), Phone("http://localhost", audio_socket=("127.0.0.1", port))) as hall:
        with socket.socket() as dead:
            dead.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            dead.connect(("127.0.0.1", port))
            dead.sendall(message(0x01, bytes(16)))
            await until(lambda: len(hall.server._calls) == 1)
            await hall.is_free()


async def test_a_voice_over_audiosocket_interrupts() -> None:
    agent = Greeter(LONG)
    port = free_port()
    async with ringing(agent, Phone("http://localhost", audio_socket=("127.0.0.1", port))) as hall:
        async with AudioSocket(port) as asterisk:
            await until(lambda: asterisk.speech_s > 1.0)
            said = LineCodec("L16").encode(spoken("stop it please, I want to ask something", rate=8_000))
            for at in range(0, len(said), 320):
                asterisk.writer.write(message(0x10, said[at : at + 320]))
                await asyncio.sleep(0.018)
                if agent.cut:
                    break
            await until(lambda: bool(agent.cut))
            assert abs(len(agent.cut[0].heard_text.split()) - asterisk.speech_s / 0.4) <= 1
        await hall.is_free()
