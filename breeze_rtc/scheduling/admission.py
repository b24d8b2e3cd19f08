"""May one more stream start?

A slot and worst-case KV pages must be free, beyond those kept for the classes above; and, for a stream that somebody
listens to, all listeners together must need at most `MAX_LOAD_PERCENT` of this machine, by learnt costs.  Reports have
no say here: a listener could claim to be always empty.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import Overloaded
from .costs import CostTable
from .slots import Pages, Slots
from .step import Stage, StageSpec
from .stream import Priority

MAX_LOAD_PERCENT = 90
"""The rest is for first sounds, which are not part of the steady rate."""
KEPT_SHARE = {Priority.LIVE: 0, Priority.STREAM: 16, Priority.BATCH: 4}
"""One part in this many of the slots and pages is out of reach for the class; 0 keeps nothing back."""
STEADY_CHUNK = 4
"""Frames per codec step of a stream in full flow; the codec's fixed cost is spread over them."""


def bucket_of(spec: StageSpec, rows: int) -> int:
    """The smallest bucket that holds `rows`."""
    for bucket in spec.buckets:
        if bucket >= rows:
            return bucket
    raise AssertionError(f"{rows} rows do not fit the largest bucket {spec.buckets[-1]}")


def stage_ns(costs: CostTable, specs: Mapping[Stage, StageSpec], stage: Stage, rows: int, units: int = 1) -> int:
    """Predicted time to take `rows` through a stage, in as many steps as its batch limit asks for."""
    spec = specs[stage]
    full, rest = divmod(rows, spec.max_rows)
    time_ns = full * costs.predict_ns(stage, bucket_of(spec, spec.max_rows), units) if full else 0
    return time_ns + (costs.predict_ns(stage, bucket_of(spec, rest), units) if rest else 0)


def load_percent(
    costs: CostTable, specs: Mapping[Stage, StageSpec], *, backbone_rows: int, streams: int, frame_ns: int
) -> int:
    """Time to make one frame for every listener, in percent of the time they take to hear it.

    A batch is taken to cost at most what its rows cost one by one: the small steps are learnt anew whenever a stream
    runs, while a large one that was slow once would otherwise be held against every stream that could teach us better.
    """

    def time_ns(stage: Stage, rows: int, units: int = 1) -> int:
        return min(stage_ns(costs, specs, stage, rows, units), rows * stage_ns(costs, specs, stage, 1, units))

    codec_ns = time_ns(Stage.CODEC, streams, STEADY_CHUNK) // STEADY_CHUNK
    return 100 * (time_ns(Stage.BACKBONE, backbone_rows) + time_ns(Stage.DEPTH, backbone_rows) + codec_ns) // frame_ns


def admit(*, slots: Slots, pages: Pages, pages_needed: int, priority: Priority, load: int) -> None:
    """Raise `Overloaded` unless one more stream of this class may start.  Changes nothing.

    load: percent, with the new stream counted in; 0 for a stream that nobody listens to, which takes what is left
    over, and for the only listener, who is better served slowly than not at all.
    """
    share = KEPT_SHARE[priority]
    if slots.free <= (slots.count // share if share else 0):
        raise Overloaded(f"{slots.count - slots.free} of {slots.count} streams are open", retry_after_s=1.0)
    if pages.unreserved - pages_needed < (pages.count // share if share else 0):
        raise Overloaded("the memory for one more stream is not free", retry_after_s=1.0)
    if load > MAX_LOAD_PERCENT:
        raise Overloaded(f"one more listener would need {load} % of this machine", retry_after_s=2.0)
