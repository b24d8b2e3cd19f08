"""Asterisk's AudioSocket: a call over TCP, with nothing but sound in it.

A message is its type, its length as 16 bits (big-endian) and so many bytes: 0x01 names the call, 0x03 is a key, 0x10 is
sound (signed 16 bits, little-endian, 8 kHz; 0x11 to 0x18 the same at other rates), 0x00 is the end, 0xff an error.
There is no mark, no clear and no flow control, and Asterisk hands on what comes when it comes.  So we are the clock,
from the first moment on.

https://docs.asterisk.org/Configuration/Channel-Drivers/AudioSocket/
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass

from breeze_rtc.clock import Clock
from breeze_rtc.errors import PeerError
from breeze_rtc.media.line_codec import LineCodec
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.transport.far_buffer import EAR_DELAY_NS, LOOK_AHEAD_NS
from breeze_rtc.transport.paced_line import PacedLine
from breeze_rtc.transport.pacer import Pacer
from breeze_rtc.transport.playout import Slot

HANG_UP, NAME, KEY, ERROR = 0x00, 0x01, 0x03, 0xFF
SOUND = {
    kind: LineCodec("L16", rate)
    for kind, rate in zip(
        range(0x10, 0x19), (8_000, 12_000, 16_000, 24_000, 32_000, 44_100, 48_000, 96_000, 192_000), strict=True
    )
}
MAX_UNSENT_BYTES = 16_000
"""A second of sound that the socket has not taken: the other end is dead."""

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


class AudioSocketLine(PacedLine):
    """One call's sound, and all that is said of it."""

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        *,
        clock: Clock,
        pacer: Pacer,
        on_report: Callable[[PlaybackReport], None],
        sample_rate: int = 24_000,
        ear_delay_ns: int = EAR_DELAY_NS,
    ) -> None:
        """Silence leaves from now on.  ear_delay_ns: from Asterisk to the ear."""
        super().__init__(clock=clock, pacer=pacer, on_report=on_report, sample_rate=sample_rate)
        self.call = ""
        """The call's UUID; "" until it is told."""
        self.unknown = 0
        self._transport = transport
        self._ear_delay_ns = ear_delay_ns
        self._inbox = Inbox()
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

    @property
    def path_delay_ns(self) -> int:
        return self._ear_delay_ns + LOOK_AHEAD_NS

    def _ear_ticks(self) -> int:
        if self.sink.clock is None:
            return 0
        return max(0, min(self.sink.clock.ticks_at(self._clock.now() - self.path_delay_ns), self.sink.sent_ticks))

    def _put(self, slot: Slot) -> None:
        if self._transport.is_closing() or self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.close()
            return
        samples = self._sound(slot)
        self._transport.write(_SILENCE if samples is None else message(0x10, SOUND[0x10].write(samples)))
