"""Whole calls: real sockets, a real peer, an engine that hums."""

from __future__ import annotations

import asyncio
import json
import re
import wave
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page import Hall, Page, serving, until
from python_listener import Microphone
from speech import spoken
from tone_engine import ToneEngine, ToneSpeech
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from breeze_rtc.agent.session import AgentSession, Callbacks, UserTurn
from breeze_rtc.server.app import create_app
from breeze_rtc.server.call import TAKEN_OVER
from breeze_rtc.server.phone import Phone


async def enter(session: AgentSession) -> AsyncGenerator[str, None]:
    yield "hello there"


async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
    if turn.text == "bye":
        yield "good bye"
        await session.close()
    else:
        yield f"you said {turn.text}"


TALKS = Callbacks(on_enter=enter, on_user_turn=reply)
STORY = " ".join(["word"] * 60)


@pytest.fixture
async def hall() -> AsyncIterator[Hall]:
    async with serving(TALKS) as hall:
        yield hall
        await hall.is_free()


async def said(page: Page, text: str) -> dict[str, Any]:
    """The end of the stream whose text is `text`."""
    speech = await page.one("speech", lambda message: message["text"] == text)
    return await page.one("speech_end", lambda message: message["stream"] == speech["stream"])


async def test_a_call_greets_answers_and_says_goodbye(hall: Hall) -> None:
    """Hello first; each speech is heard to its last word; the goodbye is heard before the agent hangs up.

    Reproduction 19 (pipecat#4647), over a real connection.
    """
    async with hall.page() as page:
        await page.call()
        assert page.messages[0]["type"] == "hello"
        assert page.messages[0]["model"] == "tones"
        assert page.messages[0]["listens"] is False
        assert page.messages[0]["listen_fix"]
        end = await said(page, "hello there")
        assert (end["interrupted"], end["chars"]) == (False, len("hello there"))
        await page.type("ping")
        await said(page, "you said ping")
        stats = await page.one("stats", lambda message: message["first_sound_ms"] is not None)
        assert 0 < stats["first_sound_ms"] < 5_000
        await page.one("heard", lambda message: message["chars"] == len("you said"))
        await page.type("bye")
        end = await said(page, "good bye")
        assert end["chars"] == len("good bye")
        await page.ended()
        assert (page.close_code, page.close_reason) == (1000, "the agent ended the call")
        loud = [heard for heard in page.listener.heard if np.abs(heard.pcm.astype(int)).max() > 3_000]
        # Seven words of 0.4 s, in frames of 20 ms.
        assert len(loud) == pytest.approx(7 * 20, abs=10)
        assert hall.engine.reports > 5
    for stage in ("transcript", "first_text", "first_sound", "first_heard"):
        assert f'breeze_turn_delay_seconds_count{{to="{stage}"}} 2.0' in hall.server.metrics.text().decode()


async def test_the_button_stops_the_speech(hall: Hall) -> None:
    """The page is told to flush, confirms, and the words heard are a part of the text; the waste is counted."""
    async with hall.page() as page:
        await page.call()
        await page.type(STORY)
        speech = await page.one("speech", lambda message: "word word" in message["text"])
        await page.one("heard", lambda message: message["stream"] == speech["stream"] and message["chars"] > 20)
        await page.send(type="interrupt")
        end = await page.one("speech_end", lambda message: message["stream"] == speech["stream"])
        assert end["interrupted"]
        assert 20 <= end["chars"] < len(speech["text"]) - 100
        assert page.all("flush")
        stats = await page.one("stats", lambda message: message["stop_ms"] is not None)
        assert 0 <= stats["stop_ms"] < 2_000
        await page.one("state", lambda message: message["state"] == "listening")
        assert hall.server.metrics.wasted._value.get() > 0.3
        assert hall.server.metrics.position.labels("playout")._value.get() > 0


async def test_a_turn_while_the_agent_speaks_cuts_it(hall: Hall) -> None:
    """Typing interrupts; the next answer is spoken to its end."""
    async with hall.page() as page:
        await page.call()
        await page.type(STORY)
        await page.one("heard", lambda message: message["chars"] > 10)
        await page.type("next")
        assert not (await said(page, "you said next"))["interrupted"]
        assert (await said(page, f"you said {STORY}"))["interrupted"]


async def test_speech_from_the_microphone_interrupts_and_is_answered(tmp_path: Path) -> None:
    """Real packets, the real voice activity model, and a recogniser that was told what it hears; and a recording."""
    speech = spoken("stop now, and listen to me please", rate=48_000)
    sound = np.concatenate([np.zeros(2 * 48_000), speech, np.zeros(48_000)])

    class Ears:
        heard_s = 0.0

        async def transcribe(self, samples: np.ndarray) -> str:
            self.heard_s = len(samples) / 16_000
            return "stop now"

    async def enter_long(session: AgentSession) -> AsyncGenerator[str, None]:
        yield STORY

    async with serving(Callbacks(on_enter=enter_long, on_user_turn=reply), recordings=tmp_path) as hall:
        hall.server._listener = ears = Ears()  # type: ignore[assignment]
        async with hall.page(microphone=Microphone((sound * 32_767 * 0.8).astype(np.int16))) as page:
            await page.call()
            assert (await said(page, STORY))["interrupted"]
            assert (await page.one("user"))["text"] == "stop now"
            assert not (await said(page, "you said stop now"))["interrupted"]
            assert len(speech) / 48_000 < ears.heard_s < len(speech) / 48_000 + 1.2
        hall.server._listener = None
        await hall.is_free()
        assert b'breeze_microphone_dropped_total{why="late"} 0.0' in hall.server.metrics.text()
    (recording,) = tmp_path.iterdir()  # noqa: ASYNC240 - the calls are over
    with wave.open(str(recording)) as file:
        assert file.getnframes() / file.getframerate() > 2 + len(speech) / 48_000
        caller, agent = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, 2).astype(int).T
    # The agent hums first and is cut by the caller; then it answers, and the caller is silent.
    begins = np.flatnonzero(np.abs(caller) > 3_000)[0]
    assert np.abs(agent[:begins]).max() > 3_000
    assert np.abs(agent[begins + 16_000 :][:4_000]).max() < 500
    assert np.abs(agent[begins + 24_000 :]).max() > 3_000


async def test_a_caller_is_heard_from_the_first_packet_while_the_model_is_cold(tmp_path: Path) -> None:
    """The voice takes two seconds to its first sound; who speaks meanwhile loses no word of it, and is as long in the
    recording as they spoke.  Reproductions 47 and 48 (pipecat#5868, PR 5071)."""
    speech = spoken("stop now, and listen to me please", rate=48_000)
    began: list[float] = []

    class Ears:
        heard_s = 0.0

        async def transcribe(self, samples: np.ndarray) -> str:
            self.heard_s = max(self.heard_s, len(samples) / 16_000)
            return "stop now"

    class ColdEngine(ToneEngine):
        def speak(self, **options: Any) -> ToneSpeech:
            reply = super().speak(**options)
            push = reply.push
            loop = asyncio.get_running_loop()
            reply.push = lambda text: loop.call_later(2.0, push, text) and None  # type: ignore[assignment]
            end = reply.end
            reply.end = lambda: loop.call_later(2.0, end) and None  # type: ignore[method-assign]
            return reply

    class FirstWord(Microphone):
        async def recv(self) -> Any:
            began.append(asyncio.get_running_loop().time())
            return await super().recv()

    sound = np.concatenate([speech, np.zeros(48_000)])
    async with serving(TALKS, engine=ColdEngine(), recordings=tmp_path) as hall:
        hall.server._listener = ears = Ears()  # type: ignore[assignment]
        async with hall.page(microphone=FirstWord((sound * 32_767 * 0.8).astype(np.int16))) as page:
            await page.call()
            await page.one("user", lambda message: message["final"])
            assert not page.all("heard")
            spoken_s = asyncio.get_running_loop().time() - began[0]
        hall.server._listener = None
        await hall.is_free()
    # The speech begins with its first sound; 300 ms before it cannot be there.
    assert ears.heard_s > len(speech) / 48_000 - 0.35
    (recording,) = tmp_path.iterdir()  # noqa: ASYNC240 - the calls are over
    with wave.open(str(recording)) as file:
        assert file.getnframes() / file.getframerate() > spoken_s - 0.5


async def test_a_sound_without_words_holds_the_speech_and_loses_nothing_of_it() -> None:
    """A hum over the agent, through the real voice activity model: the page is silenced and nothing is cancelled; the
    speech goes on at the packet that was not heard, so every sample is heard, and at most one packet twice."""
    hum = spoken("aaaaaah", rate=48_000)
    sound = np.concatenate([np.zeros(3 * 48_000), hum, np.zeros(8 * 48_000)])
    words = 15

    class Ears:
        async def transcribe(self, samples: np.ndarray) -> str:
            return ""

        async def close(self) -> None:
            """Nothing to close."""

    async def enter_long(session: AgentSession) -> AsyncGenerator[str, None]:
        yield " ".join(["word"] * words)

    async with serving(Callbacks(on_enter=enter_long)) as hall:
        hall.server._listener = Ears()  # type: ignore[assignment]
        async with hall.page(microphone=Microphone((sound * 32_767 * 0.8).astype(np.int16))) as page:
            await page.call()
            end = await page.one("speech_end")
            assert (end["interrupted"], end["chars"]) == (False, 5 * words - 1)
            assert len(page.all("flush")) == 1
            assert len(hall.engine.speeches) == 1
            loud = [np.abs(heard.pcm.astype(int)).max() > 3_000 for heard in page.listener.heard]
            # Frames of 20 ms that sounded; those that had left when the page fell silent are here too, and come again.
            assert words * 20 - 4 <= sum(loud) <= words * 20 + 30
            first, last = loud.index(True), len(loud) - loud[::-1].index(True)
            assert last - first - sum(loud) > 10
        await hall.is_free()
        assert 'breeze_interruptions_total{kind="false"} 1.0' in hall.server.metrics.text().decode()


async def test_bad_messages_are_answered_and_the_call_goes_on(hall: Hall) -> None:
    """Each has an error code; none ends the call, and the next turn is spoken."""
    bad: list[tuple[str | bytes, str]] = [
        ("{", "not_json"),
        ("[]", "not_an_object"),
        ("{}", "no_type"),
        (b"\xff\xfe", "not_json"),
        ('{"type": "text"}', "missing_field"),
        ('{"type": "text", "text": ""}', "empty_text"),
        ('{"type": "text", "text": 7}', "bad_field"),
        (json.dumps({"type": "text", "text": "x" * 20_000}), "text_too_long"),
        ('{"type": "text", "text": "\\ud800"}', "bad_field"),
        ('{"type": "ping", "id": 1, "t_ms": NaN}', "not_finite"),
        ('{"type": "offer", "sdp": "v=0", "microphone": false}', "offer_malformed"),
    ]
    async with hall.page() as page:
        await page.call()
        for raw, code in bad:
            await page.socket.send(raw)
            before = len(page.all("error"))
            await until(lambda before=before: len(page.all("error")) > before)  # type: ignore[misc]
            assert page.all("error")[-1]["code"] == code
            assert page.all("error")[-1]["message"]
        await page.send(type="a message of tomorrow")
        for text in ("emoji 👩‍🚀🎉", "שלום עולם", "nul \0 inside", "\u202eright to left"):
            await page.type(text)
            await said(page, f"you said {text}")


async def test_a_second_offer_takes_the_call_to_another_connection(hall: Hall) -> None:
    """The page's connection vanishes in mid-speech; it is told to make another, does, and hears the rest."""
    async with hall.page() as page:
        await page.call()
        await page.type("one two three four five six seven eight")
        speech = await page.one("speech", lambda message: "three" in message["text"])
        await page.one("heard", lambda message: message["stream"] == speech["stream"] and message["chars"] > 15)
        heard_rtp = await page.lose_connection()
        await page.one("reconnect")
        await page.call(id=1, heard_rtp=heard_rtp)
        end = await page.one("speech_end", lambda message: message["stream"] == speech["stream"])
        assert (end["interrupted"], end["chars"]) == (False, len(speech["text"]))
        heard = [message["chars"] for message in page.all("heard") if message["stream"] == speech["stream"]]
        assert heard == sorted(heard)
        # The new listener heard what the old one had not: ten words of 0.4 s in all, a third of them before.
        loud = sum(np.abs(frame.pcm.astype(int)).max() > 3_000 for frame in page.listener.heard)
        assert 3 * 20 < loud < 9 * 20, loud
        await page.type("still there")
        assert not (await said(page, "you said still there"))["interrupted"]


async def test_offers_that_cannot_be_taken_leave_the_call_as_it_is(hall: Hall) -> None:
    """A damaged second offer, and a heap of them, are refused one by one; candidates of other offers are nothing."""
    async with hall.page() as page:
        await page.call()
        await said(page, "hello there")
        sdp = page.listener.peer.localDescription.sdp
        for _ in range(5):
            await page.send(
                type="offer", sdp=sdp.replace("a=setup:actpass", "a=setup:nonsense"), microphone=False, id=1
            )
        await until(lambda: len(page.all("error")) == 5)
        assert [error["code"] for error in page.all("error")].count("offer_malformed") == 1
        assert [error["code"] for error in page.all("error")].count("offer_too_soon") == 4
        await page.send(type="candidate", candidate="candidate:1 1 udp 1 192.0.2.9 9 typ host", id=9)
        await page.send(type="candidate", candidate="nonsense", id=0)
        await page.one("error", lambda message: message["code"] == "candidate_malformed")
        await page.type("still there")
        assert not (await said(page, "you said still there"))["interrupted"]
        assert not page.all("reconnect")


async def test_a_page_whose_network_died_finds_its_call_again(hall: Hall) -> None:
    """Socket and connection are gone; with the token it has the same call, no message is missing or comes twice, and
    the speech goes on where the ear was."""
    async with hall.page() as page:
        await page.call()
        await page.type("one two three four five six seven eight")
        speech = await page.one("speech", lambda message: "three" in message["text"])
        await page.one("heard", lambda message: message["stream"] == speech["stream"] and message["chars"] > 15)
        sent = 2  # the offer, the turn
        heard_rtp = await page.lose_connection()
        await page.lose_socket()
        await asyncio.sleep(0.5)
        assert len(hall.server._calls) == 1
        hello = await page.come_back(hall.ws)
        assert hello["received"] > sent
        assert hello["resume"] == page.all("hello")[0]["resume"]
        await page.call(id=1, heard_rtp=heard_rtp)
        end = await page.one("speech_end", lambda message: message["stream"] == speech["stream"])
        assert (end["interrupted"], end["chars"]) == (False, len(speech["text"]))
        told = [message for message in page.messages if message["type"] not in {"stats", "pong", "hello"}]
        assert len({json.dumps(message) for message in told}) == len(told) - told.count({"type": "reconnect"}) + bool(
            told.count({"type": "reconnect"})
        ) - sum(message["type"] == "state" for message in told) + len(
            {message["state"] for message in told if message["type"] == "state"}
        )
        assert len(hall.engine.speeches) == 2


async def test_a_socket_that_is_lost_while_the_path_holds_costs_no_sound(hall: Hall) -> None:
    """Only the socket dies; speech goes on meanwhile, and the words come with the next socket."""
    async with hall.page() as page:
        await page.call()
        await page.type("one two three four")
        speech = await page.one("speech", lambda message: "three" in message["text"])
        await page.one("heard", lambda message: message["stream"] == speech["stream"])
        await page.lose_socket()
        await page.come_back(hall.ws)
        end = await page.one("speech_end", lambda message: message["stream"] == speech["stream"])
        assert (end["interrupted"], end["chars"]) == (False, len(speech["text"]))
        assert page.all("stats")[-1]["gaps"] == 0


async def test_only_the_token_opens_a_call_and_the_newest_socket_has_it(hall: Hall) -> None:
    """Other tokens, and nonsense, are told that there is no such call; a second socket takes the first one's place."""
    async with hall.page() as page:
        await page.call()
        await said(page, "hello there")
        token = page.all("hello")[0]["resume"]
        bad = ("", "nonsense", token, f"{token}&received=-1", f"{token}&received=x", f"{token}&received={10**20}")
        for query in bad:
            async with connect(f"{hall.ws}?resume={query}") as stranger:
                refused = json.loads(await stranger.recv())
                assert (refused["type"], refused["code"]) == ("error", "call_gone")
        first, reader = page.socket, page._reader
        await page.come_back(hall.ws)
        await asyncio.wait_for(first.wait_closed(), 10)
        await reader
        assert first.close_code == TAKEN_OVER
        await page.type("still there")
        assert not (await said(page, "you said still there"))["interrupted"]
        # More than there ever were counts as all.
        socket = await connect(f"{hall.ws}?resume={token}&received=999999")
        assert json.loads(await socket.recv())["type"] == "hello"
        await socket.close()
        await hall.is_free()
        async with connect(f"{hall.ws}?resume={token}&received=0") as late:
            assert json.loads(await late.recv())["code"] == "call_gone"


async def test_a_page_that_does_not_come_back_is_let_go() -> None:
    """Its line is held for a while, and then it is free."""
    async with serving(TALKS, return_s=0.5, max_calls=1) as hall, hall.page() as page:
        await page.call()
        await page.lose_socket()
        async with connect(hall.ws) as other:
            assert json.loads(await other.recv())["code"] == "too_many_calls"
        await hall.is_free()
        assert b'breeze_calls_ended_total{reason="the page did not come back"} 1.0' in hall.server.metrics.text()


async def test_a_bad_offer_ends_the_call_with_its_reason(hall: Hall) -> None:
    """An offer that looks like one and cannot be read: the page is told, and nothing is left."""
    async with hall.page() as page:
        await page.one("hello")
        sdp = (await page.listener.offer()).sdp.replace("a=setup:actpass", "a=setup:nonsense")
        await page.send(type="offer", sdp=sdp, microphone=False)
        assert (await page.one("error"))["code"] == "offer_malformed"
        await page.ended()
        assert page.close_reason == "offer refused"


async def test_a_caller_whom_no_packet_reaches_is_named_in_the_log(
    hall: Hall, caplog: pytest.LogCaptureFixture
) -> None:
    """With the addresses that were tried and what to do; and it is counted."""
    async with hall.page() as page:
        await page.one("hello")
        offer = await page.listener.offer()
        # A listener that nobody can reach, and that tries nothing.
        sdp = re.sub(r"a=(candidate:|end-of-candidates).*\r\n", "", offer.sdp)
        await page.send(type="offer", sdp=sdp, microphone=False)
        answer = await page.one("answer")
        await page.send(type="bye")
        await page.ended()
    (told,) = (record.getMessage() for record in caplog.records if "no packet got through" in record.getMessage())
    assert "127.0.0.1" in told
    assert re.search(r"a=candidate:\S+ 1 udp \d+ (\S+)", answer["sdp"])[1] in told  # type: ignore[index]
    assert "--ice-server" in told
    assert b'{code="no_path"} 1.0' in hall.server.metrics.text()


async def test_a_turn_before_the_offer_is_an_error(hall: Hall) -> None:
    """There is nobody to speak to yet."""
    async with hall.page() as page:
        await page.type("too early")
        assert (await page.one("error"))["code"] == "no_offer"


@pytest.mark.parametrize("size", [70_000, 1_000_000])
async def test_an_oversized_message_ends_the_call(hall: Hall, size: int) -> None:
    """It is refused before it is read; nothing is left behind."""
    async with hall.page() as page:
        await page.one("hello")
        await page.socket.send("x" * size)
        await page.ended()
        assert page.close_code == 1009


async def test_a_flood_of_messages_ends_the_call(hall: Hall) -> None:
    """A page that talks without end is hung up on."""
    async with hall.page() as page:
        await page.one("hello")
        with suppress(ConnectionClosed):
            for at in range(20_000):
                await page.send(type="ping", id=at, t_ms=0.0)
                await asyncio.sleep(0)
        await page.ended()
        assert page.close_code == 1008


async def test_a_page_that_vanishes_frees_everything_and_disturbs_nobody() -> None:
    """Mid-speech, without a goodbye: its stream is cancelled; the call beside it is spoken to its end, every packet."""
    async with serving(TALKS, return_s=0.3) as hall, hall.page() as other:
        await other.call()
        await said(other, "hello there")
        async with hall.page() as page:
            await page.call()
            await page.type(STORY)
            await page.one("heard", lambda message: message["chars"] > len("hello there"))
            await other.type("one two three four five six seven")
            await page.listener.vanish()
            page.socket.transport.abort()
            await until(lambda: len(hall.server._calls) == 1)
            cut = next(speech for speech in hall.engine.speeches if "word word" in speech.text)
            assert cut.is_cancelled
            (left,) = hall.server._calls
        text = "you said one two three four five six seven"
        end = await said(other, text)
        assert (end["interrupted"], end["chars"]) == (False, len(text))
        # Gaps are no matter of the page that left: a machine with much else to do makes them by itself.
        sink = left._webrtc.sink  # type: ignore[union-attr]
        assert (sink.dropped_packets, sink.late_packets) == (0, 0)
        speech = next(speech for speech in hall.engine.speeches if speech.stream == end["stream"])
        assert sink.heard_samples(speech.stream, 1 << 40) == speech.made


async def test_a_stage_that_raises_is_an_error_message(hall: Hall) -> None:
    """The page learns which stage failed; the next turn is spoken."""
    async with hall.page() as page:
        await page.call()
        await page.type("BOOM goes the stage")
        error = await page.one("error")
        assert error["code"] == "StepFailed"
        assert "depth" in error["message"]
        await page.type("and now")
        assert not (await said(page, "you said and now"))["interrupted"]


async def test_an_engine_that_died_is_said(hall: Hall) -> None:
    """While it starts again turns are refused in words; afterwards they are spoken."""
    async with hall.page() as page:
        await page.call()
        await said(page, "hello there")
        hall.engine.is_running = False
        await page.type("anybody")
        assert (await page.one("error"))["code"] == "EngineClosed"
        hall.engine.is_running = True
        await page.type("again")
        assert not (await said(page, "you said again"))["interrupted"]


async def test_a_half_dead_page_is_let_go() -> None:
    """A socket that is open and says nothing does not hold its line."""
    async with serving(TALKS, silent_page_s=0.5) as hall, hall.page() as page:
        await page.one("hello")
        offer = await page.listener.offer()
        await page.send(type="offer", sdp=offer.sdp, microphone=False)
        await page.ended()
        assert page.close_reason == "no word from the page for too long"
        await hall.is_free()


async def test_another_site_may_not_call() -> None:
    """A browser's origin must be the server's own, or one that was allowed."""
    async with serving(TALKS, allowed_origins=["https://friend.example"]) as hall:
        with pytest.raises(InvalidStatus) as refused:
            await connect(hall.ws, origin="https://evil.example")  # type: ignore[arg-type]
        assert refused.value.response.status_code == 403
        for origin in (hall.http, "https://friend.example", None):
            async with connect(hall.ws, origin=origin) as socket:  # type: ignore[arg-type]
                assert json.loads(await socket.recv())["type"] == "hello"
        await hall.is_free()


async def test_the_last_line_is_the_last() -> None:
    """One call too many is told so, and the next is taken when a line is free."""
    async with serving(TALKS, max_calls=1) as hall:
        async with connect(hall.ws) as first:
            await first.recv()
            async with connect(hall.ws) as second:
                refused = json.loads(await second.recv())
                assert (refused["type"], refused["code"]) == ("error", "too_many_calls")
                with pytest.raises(ConnectionClosed) as closed:
                    await second.recv()
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1013
        await hall.is_free()
        async with connect(hall.ws) as third:
            assert json.loads(await third.recv())["type"] == "hello"
        await hall.is_free()


async def test_a_server_that_stops_ends_its_calls() -> None:
    """Nothing hangs, and the page's socket is closed."""
    async with serving(TALKS) as hall:
        socket = await connect(hall.ws)
        await socket.recv()
    await asyncio.wait_for(socket.wait_closed(), 10)
    assert socket.close_code is not None


@pytest.mark.parametrize("path", ["/call", "/phone/secret/twilio"])
async def test_a_socket_that_dies_while_it_is_accepted_leaves_its_line(path: str) -> None:
    """By the server's own protocol, for no client dies at that moment for sure: what it is given cannot be sent."""

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        raise OSError("the connection is gone")

    scope = {"type": "websocket", "path": path, "query_string": b"", "headers": [], "client": ("192.0.2.1", 5_000)}
    phone = Phone("https://agent.example.org", key="secret")
    async with serving(Callbacks(), phone=phone, max_calls=1) as hall:
        app = create_app(hall.server, has_lifespan=False)
        async with asyncio.timeout(5):
            await app(scope, receive, send)
        await hall.is_free()
        assert not hall.server._pages
        assert not hall.server._by_address
        async with hall.page() as page:
            await page.one("hello")


async def test_a_call_goes_on_where_it_cannot_be_written_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder cannot be made: the log says so, and the caller hears nothing of it."""
    (tmp_path / "taken").write_text("a file")
    async with serving(TALKS, recordings=tmp_path / "taken" / "calls") as hall:
        async with hall.page() as page:
            await page.call()
            await page.one("speech_end")
            await until(lambda: "ends here" in caplog.text)
            assert not page.close_reason
        await hall.is_free()
