"""How many frames go to the codec at a time.

Small chunks first, because the listener waits; larger ones once there is sound in hand, because each codec step has a
fixed cost.  A chunk is always a rung of the ladder, so the codec sees few shapes; what does not fill a rung is sent
as smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable

LADDER = (1, 2, 4, 8, 16)

SUSTAINED_PERCENT = 80
"""Share of a frame's own time that making and decoding it may take, if sound in hand is to grow at a useful pace."""


def largest_rung(ladder: tuple[int, ...], frames: int) -> int:
    """The largest rung that `frames` fill; all of them when they do not fill the first."""
    best = min(frames, ladder[0])
    for rung in ladder:
        if rung > frames:
            break
        best = rung
    return best


def longest_chunk(ladder: tuple[int, ...], frame_ns: int, lead_cap_ns: int | None) -> int:
    """The largest rung that lasts at most half of the lead cap, if there is one, and at least the first.

    A chunk longer than the cap could never be filled: the stream would be stopped at the cap with the chunk
    unfinished, and the listener would run dry waiting for it.
    """
    if lead_cap_ns is None:
        return ladder[-1]
    return max(ladder[0], largest_rung(ladder, lead_cap_ns // (2 * frame_ns)))


def next_rung(ladder: tuple[int, ...], *, last: int, longest: int) -> int:
    """Frames of the chunk after one of `last`, whatever the slack: one rung more, and not beyond `longest`."""
    for rung in ladder:
        if last < rung <= longest:
            return rung
    return max(ladder[0], largest_rung(ladder, longest))


def next_chunk(
    ladder: tuple[int, ...],
    *,
    last: int,
    longest: int,
    room_ns: int,
    frame_cost_ns: int,
    codec_cost_ns: Callable[[int], int],
) -> int:
    """Frames of the chunk after one of `last`: the largest rung that can be made and decoded within `room_ns`.

    Grows by one rung at a time and not beyond `longest`; falls back at once when there is no room.
    codec_cost_ns(frames) is the time of the codec step that carries the chunk.
    """
    allowed = 0
    for rung in ladder:
        if rung > longest:
            break
        allowed += 1
        if rung > last:
            break
    while allowed:
        allowed -= 1
        rung = ladder[allowed]
        if rung * frame_cost_ns + codec_cost_ns(rung) <= room_ns:
            return rung
    return ladder[0]


def flush_at(deadline_ns: int, frame_cost_ns: int, codec_cost_ns: int, guard_ns: int) -> int:
    """From this time on, a chunk that waits for one more frame comes too late: send what there is."""
    return deadline_ns - frame_cost_ns - codec_cost_ns - guard_ns


def recovery_chunk(
    ladder: tuple[int, ...],
    *,
    longest: int,
    frame_ns: int,
    frame_cost_ns: int,
    codec_cost_ns: Callable[[int], int],
) -> int:
    """Frames of the next chunk for a listener who has run dry: the smallest rung that the machine sustains.

    Small chunks cost the most time per frame.  Where one frame at a time is no faster than it is heard, sound in hand
    never grows again: each frame is followed by a hole, although larger chunks would keep up.  One longer pause ends
    that.  Where even `longest` does not keep up it makes the fewest pauses.
    """
    for rung in ladder:
        if rung >= longest or (
            (rung * frame_cost_ns + codec_cost_ns(rung)) * 100 <= rung * frame_ns * SUSTAINED_PERCENT
        ):
            return min(rung, longest)
    return longest
