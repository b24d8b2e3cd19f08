"""One telephone call over a carrier's WebSocket: its messages in and out, its far buffer, the caller's voice.

The socket belongs to somebody else: what it brings goes into `receive`, what it is to carry comes out of `run`.  Speech
comes as Opus packets, like everywhere, and is decoded at the line's own rate, which is all the resampling it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import numpy as np

from breeze_rtc.clock import MS, SECOND, Clock
from breeze_rtc.errors import PeerError
from breeze_rtc.media.libopus import Decoder
from breeze_rtc.media.line_codec import LineCodec
from breeze_rtc.playback import PlaybackReport, SpeechPacket
from breeze_rtc.transport.caller import CallerVoice
from breeze_rtc.transport.carrier import Audio, Carrier, Complaint, Digit, Flow, Out, Played, Started, Stopped
from breeze_rtc.transport.far_buffer import EAR_DELAY_NS, Clear, FarBuffer, Mark, Sound

REPORT_NS = 100 * MS


class PhoneLine:
    """To an agent's session it is the sink, the listener's position and the microphone of one call."""

    def __init__(
        self,
        carrier: Carrier,
        *,
        clock: Clock,
        on_report: Callable[[PlaybackReport], None],
        sample_rate: int = 24_000,
        ear_delay_ns: int = EAR_DELAY_NS,
    ) -> None:
        """sample_rate: what media positions count in.  on_report: where the caller is, ten times a second.
        ear_delay_ns: from the carrier's player to the ear."""
        self.sink = FarBuffer(sample_rate=sample_rate, ear_delay_ns=ear_delay_ns)
        self.started: Started | None = None
        """What the carrier said about the call; None until it has."""
        self.closed = asyncio.Event()
        """The carrier ended the call."""
        self.caller = CallerVoice(clock)
        self.on_digit: Callable[[str], None] = lambda digit: None
        """Called with each key that is pressed."""
        self.on_sending: Callable[[Sound | Clear], None] = lambda sending: None
        """Called with what is sent, and with what takes it back."""
        self.complaints: list[Complaint] = []
        self._carrier = carrier
        self._clock = clock
        self._on_report = on_report
        self._changed = asyncio.Event()
        self._has_started = asyncio.Event()
        # The decoder of the stream that is being spoken.
        self._decoder: tuple[int, Decoder] | None = None
        # How much there was in the last piece of the caller's voice: as much as in one that is lost.
        self._piece_samples = 0
        self._told: set[int] = set()

    # --- the carrier's side

    def receive(self, raw: str | bytes) -> None:
        """A message has come.  Raises `PeerError` for one that breaks the rules; the call can go on."""
        for event in self._carrier.read(raw):
            match event:
                case Started():
                    self.started = event
                    self._has_started.set()
                case Audio():
                    self._hear(event.payload)
                case Played():
                    self.sink.played(event.mark, self._clock.now())
                case Digit():
                    self.on_digit(event.digit)
                case Flow():
                    self.sink.has_room = event.has_room
                case Complaint():
                    self.complaints.append(event)
                case Stopped():
                    self.close()
            if not isinstance(event, Audio):
                # The caller's voice comes fifty times a second, and would have each packet leave alone.
                self._changed.set()

    async def wait_started(self) -> Started:
        """What the carrier says about the call, once it does; raises `PeerError` when the call ends before that."""
        starts = asyncio.ensure_future(self._has_started.wait())
        ends = asyncio.ensure_future(self.closed.wait())
        try:
            await asyncio.wait((starts, ends), return_when=asyncio.FIRST_COMPLETED)
        finally:
            starts.cancel()
            ends.cancel()
        if self.started is None:
            raise PeerError("never_started", "the carrier ended the call before it said what it is")
        return self.started

    async def run(self, send: Callable[[Out], Awaitable[None]]) -> None:
        """Send what is due when it is due, and tell positions, until cancelled."""
        started = await self.wait_started()
        told_at = 0
        while True:
            now = self._clock.now()
            self._changed.clear()
            for out in self.sink.due(now):
                if not isinstance(out, Mark):
                    self.on_sending(out)
                match out:
                    case Sound():
                        payload = b"".join(self._written(out.stream, packet, started.speaks) for packet in out.packets)
                        await send(self._carrier.audio(payload))
                    case Mark():
                        await send(self._carrier.mark(out.name))
                    case Clear():
                        for message in self._carrier.clear():
                            await send(message)
            if now - told_at >= REPORT_NS:
                told_at = now
                self._tell(now)
            wake_at = self.sink.next_at(now)
            wait_ns = min(REPORT_NS, max(0, wake_at - now) if wake_at is not None else REPORT_NS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.001, wait_ns / SECOND)):
                    await self._changed.wait()

    def hang_up(self) -> Out | None:
        """What to send to end the call; None where closing the socket ends it."""
        return self._carrier.hang_up() if self.started is not None else None

    def keys(self, keys: str) -> Out | None:
        """What to send to press keys; None where only tones in the sound will do."""
        return self._carrier.keys(keys)

    def close(self) -> None:
        """The call is over."""
        self.closed.set()
        self.caller.close()
        self._changed.set()

    # --- the session's side

    def write(self, stream: int, packets: tuple[SpeechPacket, ...]) -> None:
        self.sink.write(stream, packets)
        self._changed.set()

    def rest(self, stream: int, samples: int) -> None:
        self.sink.rest(stream, samples)

    def end(self, stream: int) -> None:
        self.sink.end(stream)
        self._changed.set()

    def clear(self, stream: int) -> int:
        unheard = self.sink.clear(stream)
        self._changed.set()
        return unheard

    def pause(self) -> None:
        """Fall silent and keep what is to be said."""
        self.sink.pause()
        self._changed.set()

    def resume(self) -> None:
        """Speak on from the first sample that was not heard."""
        self.sink.resume()
        self._changed.set()

    @property
    def path_delay_ns(self) -> int:
        return self.sink.path_delay_ns

    def position(self, stream: int) -> PlaybackReport:
        """Where the caller is in `stream` now."""
        return self.sink.report(stream, self._clock.now())

    # ---

    def _written(self, stream: int, packet: SpeechPacket, codec: LineCodec) -> bytes:
        """A packet as the line writes it: 20 ms, whatever the decoder thinks of it."""
        if self._decoder is None or self._decoder[0] != stream:
            self._decoder = (stream, Decoder(codec.sample_rate))
        samples = self._decoder[1].decode_int16(packet.payload)
        wanted = codec.sample_rate // 50
        if samples is None or len(samples) != wanted:
            return codec.silence(wanted)
        return codec.write(samples)

    def _hear(self, payload: bytes | None) -> None:
        if self.started is None:
            return
        hears = self.started.hears
        if payload is None:
            pcm = np.zeros(self._piece_samples, np.int16)
        else:
            pcm = hears.decode(payload)
            self._piece_samples = len(pcm)
        self.caller.hear(pcm, hears.sample_rate)

    def _tell(self, now: int) -> None:
        streams = self.sink.streams
        self._told.intersection_update(streams)
        for stream in streams:
            if stream not in self._told:
                if self.sink.is_heard(stream, now):
                    self._told.add(stream)
                self._on_report(self.sink.report(stream, now))
