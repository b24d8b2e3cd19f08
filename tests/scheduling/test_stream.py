from __future__ import annotations

from breeze_rtc.scheduling.stream import Feed, Priority, Stream


def stream(feed: Feed, *, max_frames: int = 10) -> Stream:
    return Stream(
        1,
        feed=feed,
        priority=Priority.LIVE,
        rows=1,
        max_frames=max_frames,
        interactive=True,
        sample_rate=24_000,
        first_chunk=1,
        longest_chunk=16,
        pages_kept=4,
        opened=0,
        served=0,
    )


def test_a_prefix_waits_for_the_end_of_its_text() -> None:
    """The whole text is the prompt."""
    s = stream(Feed.PREFIX)
    s.tokens = s.encoded = 8
    assert not s.can_prefill
    s.is_text_ended = True
    assert s.can_prefill
    assert s.prompt == 8


def test_text_per_frame_starts_with_the_first_piece() -> None:
    """The prompt is one position, whatever text follows."""
    s = stream(Feed.PER_FRAME)
    s.tokens = 8
    assert not s.can_prefill
    s.encoded = 8
    assert s.can_prefill
    assert s.prompt == 1


def test_a_frame_half_made_stops_the_next() -> None:
    """BACKBONE needs all codes of the frame before."""
    s = stream(Feed.PER_FRAME)
    s.started = 1
    assert not s.can_generate
    s.made = 1
    assert s.can_generate


def test_generation_stops_at_the_limit() -> None:
    """max_frames holds whatever the model says."""
    s = stream(Feed.PER_FRAME, max_frames=3)
    s.started = s.made = 3
    assert s.is_generated
    assert not s.can_generate
    assert not s.is_finished
    s.delivered = 3
    assert s.is_finished


def test_no_text_at_all_is_a_finished_stream() -> None:
    """There is nothing to say, and it is known."""
    s = stream(Feed.PER_FRAME)
    assert not s.is_finished
    s.is_text_ended = True
    assert s.is_finished
