"""A caller speaks over the agent: what came out of the telephone, beside what the history says, and what the machine
did meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from exchange import exchange
from machine import waited_ns
from page import serving, until
from softphone import JITTER_BUFFER_MS, Softphone
from speech import spoken
from tone_engine import RATE, WORD, ToneEngine
from tone_words import sounds, words

from breeze_rtc.agent.session import AgentSession, Callbacks, SpeechHandle
from breeze_rtc.clock import MS, MonotonicClock
from breeze_rtc.server.phone import Phone
from breeze_rtc.server.sip import Sip
from breeze_rtc.transport.far_buffer import MARK_PACKETS, PACKET_NS
from breeze_rtc.transport.paced_line import TELL_SLOTS
from breeze_rtc.transport.phone import PhoneLine
from breeze_rtc.transport.playout import SLOT_NS, Slot
from breeze_rtc.transport.rtp_line import RtpLine

LINES = ("twilio", "telnyx", "plivo", "vonage", "asterisk", "sip")
LONG = "one two three four five six seven eight nine ten eleven twelve one two three four five six seven eight"
COUGH = "stop it please, I want to ask you something"
PHONE = Phone("https://agent.example.org", key="secret", sip=Sip("127.0.0.1:0"))
WAITED_MS = 200
"""In some four seconds a thread waits for a core less than that together where nobody else wants it."""


@dataclass(frozen=True)
class Cut:
    """One call."""

    kind: str
    history: str
    rest: str
    believed_words: float
    """How far the listener was, in words and parts of one, by the line; and by what came out of the telephone."""
    heard_words: float
    silent_ms: float
    """From the decision to silence at the ear."""
    own_ms: tuple[float, float]
    """What the telephone held: from when the first sound, and the last, was given to RTP, to the ear."""
    told: list[dict[str, Any]]
    """What the carrier tells."""
    stalls: list[str]
    """What the machine did to the telephone, the carrier and the server, by what neither of them says."""

    @property
    def faults(self) -> list[str]:
        """Where it breaks what is promised: a word of the history at most is another, counted as the history counts,
        in whole words; and after the decision the telephone is silent within what its jitter buffer may hold and one
        mark or report."""
        interval_ms = (TELL_SLOTS * SLOT_NS if self.kind == "sip" else MARK_PACKETS * PACKET_NS) / MS
        faults = []
        if abs(len(self.history.split()) - int(self.heard_words)) > 1:
            faults.append(f"the history has {len(self.history.split())} words of {self.heard_words:.2f} heard")
        if abs(self.believed_words - self.heard_words) * WORD * 1_000 / RATE > interval_ms:
            faults.append(f"{self.believed_words:.2f} words were believed heard, and {self.heard_words:.2f} were")
        if self.silent_ms > JITTER_BUFFER_MS + interval_ms:
            faults.append(f"{self.silent_ms:.0f} ms from the decision to silence")
        return faults

    def __str__(self) -> str:
        return (
            f"{self.kind}: history {len(self.history.split())}, believed {self.believed_words:.2f}, "
            f"heard {self.heard_words:.2f} words; decision to silence {self.silent_ms:.0f} ms; "
            f"the telephone held {self.own_ms[0]:.0f} to {self.own_ms[1]:.0f} ms; "
            f"{'; '.join(self.stalls) or 'no stall'}"
        )


async def barge_in(kind: str, folder: Path, *, after_s: float = 1.5) -> Cut:
    """kind: a carrier's personality, or `sip`.  after_s: of speech at the ear, the caller speaks."""
    cut: list[SpeechHandle] = []
    decided: list[int] = []
    left: list[int] = []

    async def greet(session: AgentSession) -> AsyncIterator[str]:
        yield LONG

    async def interrupted(session: AgentSession, speech: SpeechHandle) -> None:
        cut.append(speech)

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            decided.append(MonotonicClock().now())
            return method(*args)

        return noted

    def noting_put(line: RtpLine, slot: Slot) -> None:
        if slot.stream is not None:
            left.append(MonotonicClock().now())
        put(line, slot)

    put = RtpLine._put
    with ExitStack() as patches:
        for line, method in ((PhoneLine, PhoneLine.pause), (PhoneLine, PhoneLine.clear), (RtpLine, RtpLine.pause)):
            patches.enter_context(patch.object(line, method.__name__, noting(method)))
        patches.enter_context(patch.object(RtpLine, "_put", noting_put))
        engine = ToneEngine(tells_words_apart=True)
        callbacks = Callbacks(on_enter=greet, on_interrupted=interrupted)
        async with serving(callbacks, phone=PHONE, engine=engine) as hall, exchange(hall, kind) as carrier:
            with Softphone(folder, carrier.uri, codec="pcma" if kind == "telnyx" else "pcmu") as phone:
                await until(lambda: phone.loud_s > 0)
                pids = {"server": os.getpid(), "telephone": phone.pid, "carrier": carrier.pid or phone.pid}
                waited = {name: waited_ns(pid) for name, pid in pids.items()}
                await until(lambda: phone.loud_s > after_s)
                phone.say(spoken(COUGH, rate=8_000))
                await until(lambda: bool(cut))
                await asyncio.sleep(0.7)
                heard = phone.heard()
                phone.save(folder / "heard.wav")
                waited = {name: (waited_ns(pid) - waited[name]) // MS for name, pid in pids.items()}
                stalls = [f"the {name} waited {ms} ms for a core" for name, ms in waited.items() if ms > WAITED_MS]
                if phone.late_ns:
                    worst_ms = max(phone.late_ns) / MS
                    stalls.append(f"its sound card was late {len(phone.late_ns)} times, by up to {worst_ms:.0f} ms")
                if phone.unready:
                    stalls.append(f"it was not ready for its sound card {phone.unready} times")
            await hall.is_free()
    (speech,) = cut
    if kind == "sip":
        left = [left[0], left[-1] + SLOT_NS]
    else:
        dry = [item["at_ns"] for item in carrier.all("dry") if item["at_ns"] > decided[0]]
        left = [carrier.all("plays")[0]["at_ns"], dry[0]]
    when = sounds(heard)
    began, ended = (phone.at_ns(int(when[at]) * 80 + 160) for at in (0, -1))
    number, share = words(heard)
    return Cut(
        kind,
        speech.heard_text,
        speech.unheard_text,
        speech._transcript.heard_samples / WORD,
        number - 1 + share,
        (ended - decided[0]) / MS,
        ((began - left[0]) / MS, (ended - left[1]) / MS),
        carrier.told,
        stalls,
    )
