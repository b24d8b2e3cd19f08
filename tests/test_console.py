"""A call in a terminal."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_readme import blocks

from breeze_rtc import Agent, AgentSession, UserTurn
from breeze_rtc.console import ConsoleCall, Screen, SoundCard, talk
from breeze_rtc.errors import BadRequest, MissingExtra
from breeze_rtc.testing import ToneVoice, run
from breeze_rtc.testing.virtual_time import LoopClock
from breeze_rtc.transport.playout import SLOT_NS, Slot


def agent() -> Agent:
    agent = Agent()

    @agent.on_enter
    async def greet(session: AgentSession) -> AsyncGenerator[str, None]:
        yield "Hello there."

    @agent.on_user_turn
    async def reply(session: AgentSession, turn: UserTurn) -> AsyncGenerator[str, None]:
        yield f"You said {turn.text} and I go on, one two three four five six seven eight"

    return agent


class Terminal(io.StringIO):
    """Remembers when what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[float, str]] = []

    def write(self, text: str) -> int:
        self.written.append((asyncio.get_running_loop().time(), text))
        return super().write(text)


def conversation(*lines: tuple[float, str], is_piped: bool) -> Terminal:
    """What stands in the terminal after `lines`, each typed so long after the one before."""

    async def typed() -> AsyncIterator[str]:
        for pause_s, line in lines:
            await asyncio.sleep(pause_s)
            yield line

    async def hold() -> Terminal:
        out = Terminal()
        async with ToneVoice() as voice:
            await talk(agent().callbacks, engine=voice, lines=typed(), out=out, is_piped=is_piped, clock=LoopClock())
        return out

    return run(hold())


def test_piped_lines_are_answered_one_after_another() -> None:
    """Nothing interrupts, and the call ends when the last answer was heard."""
    out = conversation((0, "one"), (0, "two"), is_piped=True)
    rest = "and I go on, one two three four five six seven eight"
    assert out.getvalue() == (
        f"agent: Hello there.\nyou: one\nagent: You said one {rest}\nyou: two\nagent: You said two {rest}\n"
    )


def test_words_appear_as_they_are_heard() -> None:
    """Word after word at the pace of speech, not when the text is made."""
    out = conversation((0, "one"), is_piped=True)
    times = [at for at, text in out.written if text.strip() in {"one", "two", "three", "four", "five", "six"}]
    assert len(times) >= 5
    assert 0.1 < (times[-1] - times[1]) / (len(times) - 2) < 0.6


def test_a_typed_line_interrupts() -> None:
    """The cut answer ends with a dash, where it was heard to."""
    out = conversation((3, "one"), (2.5, "two"), (20, ""), is_piped=False)
    cut = out.getvalue().split("\n")[2]
    assert cut.startswith("agent: You said one and I")
    assert cut.endswith(" --")
    assert "eight" not in cut


def test_the_position_is_the_sound_cards_word() -> None:
    """A card that plays 120 ms after it took a block: what is heard lags by that, and a flush waits for it."""
    delay_ns = 120_000_000

    class Card:
        def __init__(self, clock: LoopClock) -> None:
            self.clock = clock

        async def play(self, take: Callable[[], Slot], played: Callable[[int, int], None]) -> None:
            at = self.clock.now()
            while True:
                played(take().ticks, at + delay_ns)
                at += SLOT_NS
                await asyncio.sleep((at - self.clock.now()) / 1e9)

    async def hold() -> None:
        async with ToneVoice() as voice:
            clock = LoopClock()
            call = ConsoleCall(voice, Card(clock), None, Screen(Terminal()), clock)
            playing = asyncio.create_task(call.run())
            speech = voice.speak()
            speech.push("one two three four five six seven eight nine ten ")
            speech.end()
            began = clock.now()
            chunk = await anext(speech)
            call.sink.write(speech.stream, chunk.packets)
            async for chunk in speech:
                call.sink.write(speech.stream, chunk.packets)
                if chunk.start_samples > 8_000:
                    break
            await asyncio.sleep(0.5 - (clock.now() - began) / 1e9)
            heard_s = call.position(speech.stream).heard_samples / 24_000
            assert 0.5 - 0.12 - 0.06 < heard_s < 0.5 - 0.12 + 0.03
            assert call.position(speech.stream).path_delay_ns == pytest.approx(delay_ns, abs=2_000_000)
            before = clock.now()
            call.sink.clear(speech.stream)
            await call.flush()
            assert clock.now() - before >= delay_ns
            playing.cancel()
            speech.cancel()
            await asyncio.gather(playing, return_exceptions=True)

    run(hold())


def test_a_machine_without_sound_is_told_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the command to install it, without a sound card the option to use."""
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(MissingExtra, match=r"breeze_rtc\[console\]"):
        SoundCard(LoopClock.__new__(LoopClock))

    def none(**_: Any) -> None:
        raise ValueError("No output device matching 48000 Hz")

    fake = SimpleNamespace(PortAudioError=OSError, check_output_settings=none, check_input_settings=none)
    monkeypatch.setitem(sys.modules, "sounddevice", fake)
    with pytest.raises(BadRequest, match="--text"):
        SoundCard(LoopClock.__new__(LoopClock))


def test_the_card_is_fed_with_what_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """PortAudio's thread gets sound in order, silence when there is none, and tells when each block leaves."""
    streams: list[Any] = []

    class Stream:
        def __init__(self, *, callback: Any, **options: Any) -> None:
            self.callback = callback
            streams.append(self)

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: object) -> None: ...

    fake = SimpleNamespace(
        PortAudioError=OSError,
        check_output_settings=lambda **_: None,
        check_input_settings=lambda **_: None,
        OutputStream=Stream,
    )
    monkeypatch.setitem(sys.modules, "sounddevice", fake)

    async def hold() -> None:
        clock = LoopClock()
        card, taken, played = SoundCard(clock), [], []

        def take() -> Slot:
            taken.append(Slot(len(taken), bytes.fromhex("f8fffe"), None))
            return taken[-1]

        playing = asyncio.create_task(card.play(take, lambda ticks, at: played.append((ticks, at))))
        await asyncio.sleep(0.001)
        out = np.ones((960, 1), np.float32)
        time = SimpleNamespace(outputBufferDacTime=5.035, currentTime=5.0)
        for _ in range(4):
            streams[0].callback(out, 960, time, None)
        assert not out.any()
        left_at = clock.now() + 35_000_000
        await asyncio.sleep(0.02)
        assert played == [(0, left_at), (960, left_at), (1_920, left_at)]
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    run(hold())


def test_the_hello_world_talks_in_a_terminal(tmp_path: Path) -> None:
    """The README's first example, as it stands there, run as a program with the real voice; its input is a pipe."""
    program = tmp_path / "agent.py"
    program.write_text(blocks("README.md")[0])
    done = subprocess.run(
        [sys.executable, str(program), "console", "--text"],
        input="good morning\n",
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "agent: Hi! Talk to me, and interrupt me whenever you like.\nyou: good morning\nagent: You said: good morning\n"
    )
