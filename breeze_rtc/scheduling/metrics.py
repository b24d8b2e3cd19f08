"""What a listener got, in figures: the definitions that every simulation and benchmark here goes by.

A request is sent at t0.  Its chunk i, i >= 1, arrives at a_i and lasts d_i; D_i is the sum of the durations before it.

    underrun at chunk i      u_i = max(0, (a_i - a_1) - D_i): for a player that starts with the first and has no buffer
    required prebuffer       the largest u_i: a start so much later would have made no gap
    potential gap            the required prebuffer is above epsilon
    true gap                 the player itself ran dry; only a player can say so

Two rules keep a figure from looking better than what was seen.  What cannot be said is None, and None is never counted
as good: a reply of one chunk has no boundary at which it could break, so it is left out of every share of continuous
replies.  And a reply that did not come, or of which it is not known whether all of it came, is a failed one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from breeze_rtc.clock import MS, SECOND


class Ending(Enum):
    """How a request ended."""

    COMPLETE = "complete"
    """All of it was received."""
    INTERRUPTED = "interrupted"
    """The listener had heard enough."""
    REFUSED = "refused"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Delivery:
    """One request as its client saw it.  Times are on the client's clock."""

    sent_ns: int
    """t0: the last byte of the request left the client."""
    chunks: tuple[tuple[int, int], ...]
    """(arrival, duration) in ns of each chunk that holds sound, in order; a header is no chunk."""
    ending: Ending = Ending.UNKNOWN
    gap_ns: int | None = None
    """How long the player stood dry between its first sound and its last; None: no player said."""
    made_ns: int | None = None
    """Sound made for this request, received or not; None: not known."""
    heard_ns: int | None = None
    """Of it, how much left the loudspeaker; None: not known."""


# ---- one request -----------------------------------------------------------------------------------------------------


def first_packet_ns(delivery: Delivery) -> int | None:
    """a_1 - t0."""
    return delivery.chunks[0][0] - delivery.sent_ns if delivery.chunks else None


def first_playable_ns(delivery: Delivery, frame_ns: int) -> int | None:
    """From t0 until a whole codec frame has come: a player can start."""
    received_ns = 0
    for arrival_ns, duration_ns in delivery.chunks:
        received_ns += duration_ns
        if received_ns >= frame_ns:
            return arrival_ns - delivery.sent_ns
    return None


def underruns_ns(delivery: Delivery) -> list[int]:
    """u_i of every chunk; that of the first is 0."""
    result = []
    before_ns = 0
    for arrival_ns, duration_ns in delivery.chunks:
        result.append(max(0, arrival_ns - delivery.chunks[0][0] - before_ns))
        before_ns += duration_ns
    return result


def required_prebuffer_ns(delivery: Delivery) -> int | None:
    """The largest u_i; None for fewer than two chunks, which cannot be torn apart."""
    return max(underruns_ns(delivery)) if len(delivery.chunks) > 1 else None


def has_potential_gap(delivery: Delivery, epsilon_ns: int = 0) -> bool | None:
    """The required prebuffer is above `epsilon_ns`; None where there is none."""
    needed_ns = required_prebuffer_ns(delivery)
    return None if needed_ns is None else needed_ns > epsilon_ns


def has_true_gap(delivery: Delivery) -> bool | None:
    """The player stood dry; None if no player said."""
    return None if delivery.gap_ns is None else delivery.gap_ns > 0


def received_ns(delivery: Delivery) -> int:
    """Duration of what came."""
    return sum(duration_ns for _, duration_ns in delivery.chunks)


def real_time_factor(delivery: Delivery, *, from_first_packet: bool = False) -> float | None:
    """Time until the last chunk, from t0 or from the first chunk, over the duration of what came; small is fast.

    It says nothing about gaps: chunks at 200, 1000, 1800, 2600 ms and at 200, 2300, 2400, 2600 ms have the same factor.
    """
    if not delivery.chunks:
        return None
    begin_ns = delivery.chunks[0][0] if from_first_packet else delivery.sent_ns
    return (delivery.chunks[-1][0] - begin_ns) / received_ns(delivery)


def intervals(delivery: Delivery) -> list[float]:
    """(a_i - a_{i-1}) / d_{i-1}, i >= 2: the time between two chunks, over what the first of them lasts."""
    return [
        (arrival_ns - before_ns) / duration_ns
        for (before_ns, duration_ns), (arrival_ns, _) in zip(delivery.chunks, delivery.chunks[1:], strict=False)
    ]


def wasted_ns(delivery: Delivery) -> int | None:
    """Sound made for an interrupted request and never heard; 0 for others, None where it is not known."""
    if delivery.ending is not Ending.INTERRUPTED:
        return 0
    if delivery.made_ns is None or delivery.heard_ns is None:
        return None
    return max(0, delivery.made_ns - delivery.heard_ns)


# ---- many requests ---------------------------------------------------------------------------------------------------


def continuity_of_chunks(deliveries: Iterable[Delivery]) -> float | None:
    """Share of the chunks i >= 2 of all requests that came in time (u_i = 0); None without any."""
    underruns = [u_ns for delivery in deliveries for u_ns in underruns_ns(delivery)[1:]]
    return sum(u_ns == 0 for u_ns in underruns) / len(underruns) if underruns else None


def continuity_of_requests(deliveries: Iterable[Delivery], epsilon_ns: int = 100 * MS) -> float | None:
    """Share of the requests that a player with a buffer of `epsilon_ns` would have played without a gap.

    Complete and interrupted ones count by what came; all others are failed.  Those to whom the question does not apply
    are left out; None without any other.
    """
    good = asked = 0
    for delivery in deliveries:
        if delivery.ending not in _CAME or not delivery.chunks:
            asked += 1
        elif (breaks := has_potential_gap(delivery, epsilon_ns)) is not None:
            asked += 1
            good += not breaks
    return good / asked if asked else None


def is_good(delivery: Delivery, *, within_ns: int, epsilon_ns: int = 0) -> bool:
    """All of it came, the first packet within `within_ns`, and there was no gap: by the player's own word where there
    is one, else for a player with a buffer of `epsilon_ns`.  One chunk has none.
    """
    first_ns = first_packet_ns(delivery)
    if delivery.ending is not Ending.COMPLETE or first_ns is None or first_ns > within_ns:
        return False
    has_gap = has_true_gap(delivery)
    return not (has_potential_gap(delivery, epsilon_ns) if has_gap is None else has_gap)


def goodput(deliveries: Iterable[Delivery], *, within_ns: int, over_ns: int, epsilon_ns: int = 0) -> float:
    """Good requests (see `is_good`) per second of a run that took `over_ns`."""
    good = sum(is_good(delivery, within_ns=within_ns, epsilon_ns=epsilon_ns) for delivery in deliveries)
    return good * SECOND / over_ns


def audio_rate(deliveries: Iterable[Delivery], *, over_ns: int) -> float:
    """Seconds of sound received per second of a run that took `over_ns`."""
    return sum(received_ns(delivery) for delivery in deliveries) / over_ns


def wasted_share(deliveries: Iterable[Delivery]) -> float | None:
    """Sound made and never heard because of interruptions, over all sound made; None where either is not known."""
    wasted = made = 0
    for delivery in deliveries:
        one = wasted_ns(delivery)
        if one is None or delivery.made_ns is None:
            return None
        wasted += one
        made += delivery.made_ns
    return wasted / made if made else None


def quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that at least the share `q` of `values` do not exceed; None without values."""
    if not values:
        return None
    # 0.07 of 100 is 7.000000000000001.
    return sorted(values)[max(0, math.ceil(round(q * len(values), 6)) - 1)]


_CAME = (Ending.COMPLETE, Ending.INTERRUPTED)
