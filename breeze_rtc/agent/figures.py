"""What one turn cost: when each stage of it was done, and what an interruption threw away.

A session gives a `TurnFigures` to its `observe` for each thing the agent has said.  With opentelemetry-api installed
(any exporter, or none) each is a span, too, with its stages as children.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from breeze_rtc.clock import SECOND, wall_offset_ns

if TYPE_CHECKING:
    from breeze_rtc.agent.speaking import SpeechHandle


@dataclass(slots=True)
class Timeline:
    """When things happened to one speech, in seconds of the event loop's clock; None for what has not."""

    user_ended_s: float | None = None
    """The user's last voiced sound, or the typed text's arrival; None for what answers no turn."""
    transcript_s: float | None = None
    """The words of the user's turn were there."""
    asked_s: float | None = None
    """Its callback began, or `say` was called."""
    first_text_s: float | None = None
    """The first text that is not blank."""
    first_sound_s: float | None = None
    """The voice's first chunk (codec frames, and the packets they make) went to the sink."""
    first_heard_s: float | None = None
    """The first sample was at the ear."""
    stopped_s: float | None = None
    """It was interrupted: the decision."""
    done_s: float | None = None
    """All was heard, or after an interruption the ear's last position was known."""


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """One thing the agent said, once it is over."""

    timeline: Timeline
    interrupted: bool
    has_failed: bool
    heard_s: float
    """Seconds of it that were heard."""
    wasted_s: float
    """Seconds that were made and never heard."""
    words_heard: int
    false_interruptions: int
    """Times that it was held by a sound that was no speech."""
    words_unheard: int = 0
    """Words of its text that were not heard: after an interruption, what was written in vain."""
    words_unsure: int = 0
    """Words at the cut that may or may not have been heard, by how far the listener's position may be off.  The history
    is wrong by no more than these."""
    gaps: int = 0
    """Times that silence stood inside of it because its sound was late."""
    gap_s: float = 0.0
    """How long that was, together."""
    held_back_s: float = 0.0
    """How much later its sentences began than their first sound was there, because the voice is slower than speech: it
    is silence before the first and between them, and none of the gaps."""
    concealed_s: float = 0.0
    """What the listener's player made up meanwhile, for what the network lost or brought late."""

    def delay_s(self, stage: str) -> float | None:
        """From the end of the user's turn to `transcript`, `first_text`, `first_sound` or `first_heard`."""
        at_s: float | None = getattr(self.timeline, f"{stage}_s")
        ended_s = self.timeline.user_ended_s
        return max(0.0, at_s - ended_s) if at_s is not None and ended_s is not None else None


STAGES = ("transcript", "first_text", "first_sound", "first_heard")
_SPANS = (
    ("transcribe", "user_ended_s", "transcript_s"),
    ("think", "asked_s", "first_text_s"),
    ("synthesise", "first_text_s", "first_sound_s"),
    ("deliver", "first_sound_s", "first_heard_s"),
    ("speak", "first_heard_s", "done_s"),
)


def figures_of(handle: SpeechHandle) -> TurnFigures:
    """The figures of a speech that is over."""
    return TurnFigures(
        timeline=handle.timeline,
        interrupted=handle.interrupted,
        has_failed=handle.error is not None,
        heard_s=handle.playback_position_s,
        wasted_s=handle.unheard_s,
        words_heard=len(handle.heard_text.split()),
        false_interruptions=handle.false_interruptions,
        words_unheard=len(handle.unheard_text.split()),
        words_unsure=handle.words_unsure,
        gaps=handle.gaps,
        gap_s=handle.gap_s,
        held_back_s=handle.held_back_s,
        concealed_s=handle.concealed_s,
    )


def trace(figures: TurnFigures) -> None:
    """Make the spans, where OpenTelemetry is installed."""
    try:
        from opentelemetry import trace as api
    except ImportError:
        return
    line = figures.timeline
    begins_s = line.user_ended_s if line.user_ended_s is not None else line.asked_s
    if begins_s is None or line.done_s is None:
        return
    tracer = api.get_tracer("breeze_rtc")
    # The loop's clock is the machine's monotonic one, except in tests.
    offset_ns = wall_offset_ns()

    def at(seconds: float) -> int:
        return round(seconds * SECOND) + offset_ns

    attributes: dict[str, Any] = {
        "breeze.interrupted": figures.interrupted,
        "breeze.failed": figures.has_failed,
        "breeze.heard_s": figures.heard_s,
        "breeze.wasted_s": figures.wasted_s,
        "breeze.words_heard": figures.words_heard,
        "breeze.words_unheard": figures.words_unheard,
        "breeze.words_unsure": figures.words_unsure,
        "breeze.false_interruptions": figures.false_interruptions,
        "breeze.gaps": figures.gaps,
        "breeze.gap_s": figures.gap_s,
        "breeze.held_back_s": figures.held_back_s,
        "breeze.concealed_s": figures.concealed_s,
    }
    if line.stopped_s is not None:
        attributes["breeze.stop_s"] = line.done_s - line.stopped_s
    turn = tracer.start_span("breeze.turn", start_time=at(begins_s), attributes=attributes)
    context = api.set_span_in_context(turn)
    for name, begins, ends in _SPANS:
        from_s, to_s = getattr(line, begins), getattr(line, ends)
        if from_s is not None and to_s is not None:
            span = tracer.start_span(f"breeze.{name}", context=context, start_time=at(from_s))
            span.end(at(max(from_s, to_s)))
    turn.end(at(line.done_s))
