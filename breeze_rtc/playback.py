"""The seam between what computes speech and what carries it to an ear.

Sound goes forward through an `AudioSink`; what the listener has really heard comes back as a `PlaybackReport`.  The
runtime and the transports know only this module of each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SpeechPacket:
    """One ready-made Opus packet of one stream (20 ms, 48 kHz RTP clock, mono)."""

    start_samples: int
    """Media position of its first sample, at the model's sample rate, from the start of the stream."""
    payload: bytes


@dataclass(frozen=True, slots=True)
class TextMark:
    """Once `samples` of a stream have been heard, `text[:chars]` of its text has been spoken in full."""

    samples: int
    chars: int


@dataclass(frozen=True, slots=True)
class PlaybackReport:
    """Where one listener is in one stream.  All times are on the machine's monotonic clock."""

    stream: int
    heard_samples: int
    """Media position that was leaving the listener's loudspeaker at `at_ns`, in samples at the model's sample rate."""
    at_ns: int
    path_delay_ns: int
    """Time from our sink to the ear: network, jitter buffer and output device."""
    dry_at_ns: int | None = None
    """When the sink's own queue of this stream runs empty; None for a sink that buffers at the far end."""
    is_playing: bool = True
    """False while nothing reaches the ear: muted, paused, asleep.  Such a stream is held, not fed."""
    is_measured: bool = True
    """False when the position is an estimate rather than the listener's own word."""
    error_ns: int | None = None
    """How far the position may be off, either way; None where nobody knows."""
    gaps: int = 0
    """Times that silence stood inside of the stream because its sound came too late."""
    gap_ns: int = 0
    """How long that was, together."""
    concealed_ns: int = 0
    """Sound that the listener's player has made up since the call began, for what was lost on the way or late."""


class AudioSink(Protocol):
    """Where the packets of a call's streams go, one stream after another."""

    def write(self, stream: int, packets: tuple[SpeechPacket, ...]) -> None:
        """Queue the next packets of `stream`, in order.  Packets of a cleared stream are dropped."""

    def rest(self, stream: int, samples: int) -> None:
        """At media position `samples` the speaker may pause: silence before the packet that begins there is no gap."""

    def end(self, stream: int) -> None:
        """No more packets of `stream` will come."""

    def clear(self, stream: int) -> int:
        """Silence `stream` at once and for good; return the samples queued or sent, but not heard."""
