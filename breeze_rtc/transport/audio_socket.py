"""Asterisk's AudioSocket: a call over TCP, with nothing but sound in it.

A message is its type, its length as 16 bits (big-endian) and so many bytes: 0x01 names the call, 0x03 is a key, 0x10 is
sound (signed 16 bits, little-endian, 8 kHz; 0x11 to 0x18 the same at other rates), 0x00 is the end, 0xff an error.
There is no mark, no clear and no flow control, and Asterisk hands on what comes when it comes.  So we are the clock: 20
ms leave each 20 ms on an absolute schedule, silence too, from the first moment on.  Nothing lies at the far end, and a
barge-in needs no message.

https://docs.asterisk.org/Configuration/Channel-Drivers/AudioSocket/
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass

from breeze_rtc.clock import Clock, samples_to_ns
from breeze_rtc.errors import PeerError
from breeze_rtc.media import rtp
from breeze_rtc.media.libopus import Decoder
from breeze_rtc.media.line_codec import LineCodec
from breeze_rtc.media.opus import LOOK_AHEAD_48K
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.transport.caller import CallerVoice
from breeze_rtc.transport.far_buffer import LINE_DELAY_NS
from breeze_rtc.transport.pacer import Pacer
from breeze_rtc.transport.playout import Playout, Slot

HANG_UP, NAME, KEY, ERROR = 0x00, 0x01, 0x03, 0xFF
SOUND = {
    kind: LineCodec("L16", rate)
    for kind, rate in zip(
        range(0x10, 0x19), (8_000, 12_000, 16_000, 24_000, 32_000, 44_100, 48_000, 96_000, 192_000), strict=True
    )
}
MAX_UNSENT_BYTES = 16_000
"""A second of sound that the socket has not taken: the other end is dead."""
TELL_SLOTS = 5
"""Positions are told each 100 ms."""

_HEADER = struct.Struct(">BH")


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `payload` is as long as its header says."""

    kind: int
    payload: bytes


class Inbox:
    """Bytes in any pieces -> whole messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        self._rest += data
        messages = []
        while len(self._rest) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._rest)
            if len(self._rest) < _HEADER.size + length:
                break
            messages.append(Message(kind, self._rest[_HEADER.size : _HEADER.size + length]))
            self._rest = self._rest[_HEADER.size + length :]
        return messages


def message(kind: int, payload: bytes = b"") -> bytes:
    """A message as it is written: at once, for Asterisk loses its place in a header that comes in two reads."""
    return _HEADER.pack(kind, len(payload)) + payload


_SILENCE = message(0x10, bytes(320))


class AudioSocketLine:
    """To an agent's session it is the sink, the listener's position and the microphone of one call."""

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        *,
        clock: Clock,
        pacer: Pacer,
        on_report: Callable[[PlaybackReport], None],
        sample_rate: int = 24_000,
    ) -> None:
        """Silence leaves from now on.  sample_rate: what media positions count in."""
        self.sink = Playout(sample_rate=sample_rate, ear=self._ear_ticks)
        self.call = ""
        """The call's UUID; "" until it is told."""
        self.closed = asyncio.Event()
        self.caller = CallerVoice(clock)
        self.on_digit: Callable[[str], None] = lambda digit: None
        """Called with each key that is pressed."""
        self.on_slot: Callable[[Slot, int], None] = lambda slot, clock_ns: None
        """Called with each slot that has left, and when slot 0 did."""
        self.unknown = 0
        self._transport = transport
        self._clock = clock
        self._pacer = pacer
        self._on_report = on_report
        self._inbox = Inbox()
        self._decoder: tuple[int, Decoder] | None = None
        self._told: set[int] = set()
        self.sink.start(pacer.join(self._tick))
        self.sink.open()

    def receive(self, data: bytes) -> None:
        """Some bytes have come.  Raises `PeerError` when Asterisk reports an error."""
        for item in self._inbox.feed(data):
            if item.kind in SOUND:
                codec = SOUND[item.kind]
                self.caller.hear(codec.decode(item.payload), codec.sample_rate)
            elif item.kind == NAME and len(item.payload) == 16 and not self.call:
                digits = item.payload.hex()
                self.call = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
            elif item.kind == KEY and item.payload[:1] and chr(item.payload[0]) in "0123456789*#ABCD":
                self.on_digit(chr(item.payload[0]))
            elif item.kind == HANG_UP:
                self.close()
            elif item.kind == ERROR:
                raise PeerError("audiosocket_error", f"Asterisk reports error {item.payload.hex() or 'without a code'}")
            else:
                self.unknown += 1

    def position(self, stream: int) -> PlaybackReport:
        """Where the caller is in `stream`: by the clock, for no message tells it."""
        now = self._clock.now()
        gaps, gap_ns = self.sink.gaps_in(stream)
        return PlaybackReport(
            stream=stream,
            heard_samples=self.sink.heard_samples(stream, self._ear_ticks()),
            at_ns=now,
            path_delay_ns=self.path_delay_ns,
            dry_at_ns=self.sink.dry_at(stream, now),
            is_playing=not self.sink.is_paused,
            is_measured=False,
            gaps=gaps,
            gap_ns=gap_ns,
        )

    def pause(self) -> None:
        """Fall silent and keep what is to be said.  What has left is heard."""
        self.sink.pause(self._clock.now())
        self.sink.silenced_at(self.sink.sent_ticks)

    def resume(self) -> None:
        """Speak on from the first sample that has not left."""
        self.sink.resume()

    @property
    def path_delay_ns(self) -> int:
        return LINE_DELAY_NS + samples_to_ns(LOOK_AHEAD_48K, rtp.RTP_RATE)

    def close(self) -> None:
        """The call is over: no more sound leaves."""
        self._pacer.leave(self._tick)
        self.closed.set()
        self.caller.close()

    # ---

    def _tick(self) -> None:
        while self.sink.next_at() <= (now := self._clock.now()):
            slot = self.sink.next_slot(now)
            if self._transport.is_closing() or self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self.close()
                return
            self._send(slot)
            assert self.sink.clock is not None
            self.on_slot(slot, self.sink.clock.start_ns)
            if slot.index % TELL_SLOTS == 0:
                self._tell()
                self.sink.forget(self._ear_ticks())

    def _send(self, slot: Slot) -> None:
        if slot.stream is None:
            self._transport.write(_SILENCE)
            return
        if self._decoder is None or self._decoder[0] != slot.stream:
            self._decoder = (slot.stream, Decoder(8_000))
        samples = self._decoder[1].decode_int16(slot.payload)
        if samples is None or len(samples) != 160:
            self._transport.write(_SILENCE)
        else:
            self._transport.write(message(0x10, SOUND[0x10].write(samples)))

    def _ear_ticks(self) -> int:
        if self.sink.clock is None:
            return 0
        return max(0, min(self.sink.clock.ticks_at(self._clock.now() - self.path_delay_ns), self.sink.sent_ticks))

    def _tell(self) -> None:
        streams = self.sink.streams
        self._told.intersection_update(streams)
        for stream in streams:
            if stream not in self._told:
                if self.sink.is_heard(stream, self._ear_ticks()):
                    self._told.add(stream)
                self._on_report(self.position(stream))
