"""The far end of a call, in virtual time: a network, a player with its jitter buffer, an ear that forgets nothing."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from breeze_rtc.clock import MS, SECOND, Clock
from breeze_rtc.media import rtp
from breeze_rtc.media.libopus import Decoder
from breeze_rtc.testing import tones
from breeze_rtc.testing.voice import Word
from breeze_rtc.transport.playout import SLOT_TICKS
from breeze_rtc.transport.signaling import Flushed, Report

GAP_S = 0.04
"""Silence inside a speech, beyond the voice's own pauses, that counts as a gap."""
_LOST = 3


@dataclass(frozen=True, slots=True)
class Network:
    """The path between the agent and its listener, the same both ways.

    delay_s: one way.  jitter_s: up to so much more, for each packet anew.  loss: the share of packets that do not
    arrive.  The same seed loses the same packets.
    """

    delay_s: float = 0.03
    jitter_s: float = 0.0
    loss: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class HeardWord:
    """One word of the agent's, as it sounded at the ear; times are seconds of the loop's clock."""

    word: Word
    start_s: float
    end_s: float
    sounded_s: float
    """How long it sounded; less than `end_s - start_s` where it broke off in between."""

    @property
    def text(self) -> str:
        return self.word.text

    @property
    def is_whole(self) -> bool:
        """All of it was heard, but for what two windows of the reader may miss."""
        return self.sounded_s >= self.word.voiced_s - 0.035


class Recording:
    """What an ear heard, and the words in it: of a simulated listener, or of any recording of a `ToneVoice`.

    origin_s: the time at which sample 0 sounded.
    """

    def __init__(self, pcm: NDArray[np.float32] | NDArray[np.int16], rate: int, words: Sequence[Word], origin_s: float):
        self.pcm = pcm
        self.rate = rate
        self.origin_s = origin_s
        self.words = _heard_words(tones.read(pcm, rate), words, origin_s)
        """The words, in the order in which they were heard."""

    @property
    def text(self) -> str:
        """All words that sounded, also those that were cut off."""
        return "".join(heard.text for heard in self.words)

    @property
    def gaps_s(self) -> list[float]:
        """Silence inside speeches, longer than the voice's own pauses by `GAP_S`."""
        gaps = []
        for one, other in zip(self.words, self.words[1:], strict=False):
            inside = (one.end_s - one.start_s) - one.sounded_s
            silence = other.start_s - one.end_s - tones.PAUSE_S if one.word.stream == other.word.stream else 0.0
            gaps += [gap for gap in (inside, silence) if gap > GAP_S]
        return gaps


def _heard_words(found: list[tones.Tone], words: Sequence[Word], origin_s: float) -> list[HeardWord]:
    heard: list[HeardWord] = []
    for tone in found:
        start_s, end_s, sounded_s = origin_s + tone.start_s, origin_s + tone.end_s, tone.end_s - tone.start_s
        if heard and heard[-1].word.number % tones.SYMBOLS == tone.symbol:
            before = heard[-1]
            heard[-1] = HeardWord(before.word, before.start_s, end_s, before.sounded_s + sounded_s)
            continue
        word = _next_word(tone.symbol, heard[-1].word if heard else None, words)
        if word is not None:
            heard.append(HeardWord(word, start_s, end_s, sounded_s))
    return heard


def _next_word(symbol: int, before: Word | None, words: Sequence[Word]) -> Word | None:
    """The word that sounds as `symbol` and may follow `before`; None for a misreading.

    Words come one after another.  A few may be lost or garbled on the way, and the rest of a stream may never be heard.
    """
    first = before.number + 1 if before is not None else 0
    for word in words[first : first + tones.SYMBOLS]:
        if word.number % tones.SYMBOLS == symbol:
            follows = before is not None and word.stream == before.stream and word.index - before.index <= _LOST
            return word if follows or word.index < _LOST else None
    return None


class Listener:
    """A page without a browser: packets in, sound at the ear, and reports like a page's.

    Its player takes a packet every 20 ms out of a buffer that adapts to the jitter it sees; what is late or lost is
    recovered from the next packet's copy or concealed, as a browser does.
    """

    _TARGET_NS = 40 * MS
    _MEMORY = 100

    def __init__(self, clock: Clock, *, device_s: float = 0.035) -> None:
        self.is_playing = True
        """False: the page is paused; nothing sounds and its player takes nothing."""
        self.lost = self.concealed = self.removed = 0
        """Packets: that did not come in time; of those, that no copy made good; and those left out."""
        self._clock = clock
        self._device_ns = round(device_s * SECOND)
        self._buffer: dict[int, bytes] = {}
        self._transits: deque[int] = deque(maxlen=self._MEMORY)
        self._next: int | None = None
        self._first_at = 0
        self._pulled: tuple[int, int] | None = None  # ticks, when
        self._mute_until: int | None = None
        self._seq = 0
        self._decoder = Decoder(rtp.RTP_RATE)
        # What sounded, in 20 ms pieces, and when its first sample left the loudspeaker.
        self._sound: list[NDArray[np.float32]] = []
        self._times: list[int] = []

    # --- the network's end

    def receive(self, ticks: int, payload: bytes) -> None:
        now = self._clock.now()
        self._transits.append(now - ticks * SECOND // rtp.RTP_RATE)
        if self._next is None and not self._buffer:
            self._first_at = now
        if self._next is None or ticks >= self._next:
            self._buffer[ticks] = payload

    # --- the sound card's end: called every 20 ms

    def pull(self) -> None:
        now = self._clock.now()
        if not self.is_playing:
            return
        if self._next is None:
            if not self._buffer or now - self._first_at < self._target_ns():
                return
            self._next = min(self._buffer)
        ahead = max(self._buffer, default=self._next)
        if ahead - self._next > (self._target_ns() + 60 * MS) * rtp.RTP_RATE // SECOND and self._next in self._buffer:
            # Deeper than it need be: one packet is left out, as a player that plays faster would have it in a while.
            self._decoder.decode(self._buffer.pop(self._next))
            self._next += SLOT_TICKS
            self.removed += 1
        payload = self._buffer.pop(self._next, None)
        pcm = self._decoder.decode(payload) if payload is not None else None
        if pcm is None:
            following = self._buffer.get(self._next + SLOT_TICKS)
            if following is not None:
                pcm = self._decoder.recover(following, SLOT_TICKS)
            if pcm is None:
                self.concealed += 1
                pcm = self._decoder.conceal(SLOT_TICKS)
        if payload is not None or self._buffer:
            self.lost += payload is None
            self._pulled = (self._next, now)
            self._next += SLOT_TICKS
        at = now + self._device_ns
        if self._is_muted():
            pcm = np.zeros_like(pcm)
        self._sound.append(pcm)
        self._times.append(at)

    def _target_ns(self) -> int:
        return self._TARGET_NS + (max(self._transits) - min(self._transits) if self._transits else 0)

    def _is_muted(self) -> bool:
        if self._mute_until is not None and self._next is not None and self._next > self._mute_until:
            self._mute_until = None
        return self._mute_until is not None

    # --- the page's messages; timestamps count from tick 0

    def report(self) -> Report:
        now = self._clock.now()
        self._seq += 1
        ticks, at = self._pulled if self._pulled is not None else (None, None)
        return Report(
            seq=self._seq,
            t_ms=now / MS,
            rtp=ticks,
            rtp_t_ms=None if at is None else at / MS,
            device_delay_ms=self._device_ns / MS,
            device_delay_source="playout",
            age_ms=0.0 if at is None else (now - at) / MS,
            concealed=self.concealed * SLOT_TICKS,
            lost=self.lost,
            paused=not self.is_playing,
        )

    def mute(self, resume_ticks: int) -> Flushed | None:
        """Fall silent until `resume_ticks`, and say where that was; None before the first sound."""
        now = self._clock.now()
        self._mute_until = resume_ticks
        if self._pulled is None:
            return None
        # What is on its way through the sound card is still heard: a page mutes what goes into it.
        ticks, at_ns = self._pulled
        inside = min(SLOT_TICKS, (now - at_ns) * rtp.RTP_RATE // SECOND)
        if self._times[-1] == at_ns + self._device_ns:
            self._sound[-1] = np.concatenate([self._sound[-1][:inside], np.zeros(SLOT_TICKS - inside, np.float32)])
        return Flushed(ticks + inside, now / MS)

    # --- the truth

    def is_sounding(self) -> bool:
        """Whether something audible is leaving the loudspeaker now."""
        now = self._clock.now()
        for at, piece in zip(reversed(self._times), reversed(self._sound), strict=True):
            if at <= now:
                return bool(np.abs(piece).max() > 0.05)
        return False

    def recording(self, words: Sequence[Word]) -> Recording:
        """What has left the loudspeaker until now."""
        now = self._clock.now()
        if not self._times:
            return Recording(np.zeros(0, np.float32), rtp.RTP_RATE, words, now / SECOND)
        origin = self._times[0]
        pcm = np.zeros(max(0, (now - origin) * rtp.RTP_RATE // SECOND), np.float32)
        for at, piece in zip(self._times, self._sound, strict=True):
            start = (at - origin) * rtp.RTP_RATE // SECOND
            part = pcm[start : start + len(piece)]
            part[:] = piece[: len(part)]
        return Recording(pcm, rtp.RTP_RATE, words, origin / SECOND)


class Path:
    """One direction of a network: what is sent arrives later, perhaps out of order, perhaps never."""

    def __init__(self, network: Network, *, seed: int) -> None:
        self._network = network
        self._random = random.Random(1_000 * network.seed + seed)
        self._in_order_s = 0.0

    def send(self, arrive: Callable[[], None], *, is_reliable: bool = False) -> None:
        """`arrive` is called when it has.  What is reliable comes in order, and later where it was sent again."""
        loop, network = asyncio.get_running_loop(), self._network
        at_s = loop.time() + network.delay_s + self._random.random() * network.jitter_s
        if self._random.random() < network.loss:
            if not is_reliable:
                return
            at_s += 2 * network.delay_s + 0.05
        if is_reliable:
            # A little later each: a loop runs timers of one time in any order.
            at_s = self._in_order_s = max(at_s, self._in_order_s + 1e-6)
        loop.call_at(at_s, arrive)
