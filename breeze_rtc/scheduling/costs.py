"""How long a step will take: measured before serving, learnt while serving.

A step is known by (stage, bucket, size).  Size is the total of tokens, rounded up to a power of two, for TEXT and
PREFILL; the frames per row for CODEC; 1 for BACKBONE and DEPTH.  Each key keeps its last durations, and the
prediction is their 90th percentile: one stall in ten steps does not move it, a slower machine does within a few steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping

from .step import Stage

CostKey = tuple[Stage, int, int]
"""(stage, bucket, size)"""

WINDOW = 32


def size_of(stage: Stage, units: int) -> int:
    """The size of a step that carries `units`: tokens over all rows, or frames per row (see the module's docstring)."""
    if stage <= Stage.PREFILL:
        return 1 << (units - 1).bit_length() if units > 16 else 16
    return units if stage is Stage.CODEC else 1


class CostTable:
    """Predicted time per kind of step, in ns."""

    def __init__(self, measured: Mapping[CostKey, int] | None = None) -> None:
        """`measured`: durations of a warm-up, one per key; each counts as the first observation of its key."""
        # The last durations of each key, in order of arrival and sorted.
        self._recent: dict[CostKey, deque[int]] = {}
        self._sorted: dict[CostKey, list[int]] = {}
        # Goes up with every observation: what was looked up before may have changed.
        self.version = 0
        # What `predict_ns` answers, for keys that have been seen ...
        self._known: dict[CostKey, int] = {}
        # ... and for those that have not; forgotten when the stage learns something.
        self._guessed: dict[Stage, dict[CostKey, int]] = {stage: {} for stage in Stage}
        for (stage, bucket, size), duration_ns in (measured or {}).items():
            self.observe(stage, bucket, size, duration_ns)

    def predict_ns(self, stage: Stage, bucket: int, units: int = 1) -> int:
        """The time a step of `stage` padded to `bucket` rows will very likely not exceed.

        A kind of step never seen takes the time of the cheapest known one that is at least as large, else the largest
        known one scaled up by its work; 0 when nothing is known of the stage, which lets a cold start begin and learn.
        """
        key = (stage, bucket, size_of(stage, units))
        known = self._known.get(key)
        if known is not None:
            return known
        guesses = self._guessed[stage]
        guess = guesses.get(key)
        if guess is None:
            guess = guesses[key] = self._guess(key)
        return guess

    def observe(self, stage: Stage, bucket: int, units: int, duration_ns: int) -> None:
        """A step of this kind took `duration_ns`."""
        key = (stage, bucket, size_of(stage, units))
        recent = self._recent.get(key)
        if recent is None:
            recent = self._recent[key] = deque()
            self._sorted[key] = []
        ordered = self._sorted[key]
        if len(recent) == WINDOW:
            del ordered[bisect_left(ordered, recent.popleft())]
        recent.append(duration_ns)
        insort(ordered, duration_ns)
        # The smallest value that nine of ten do not exceed; the largest while there are fewer than ten.
        self._known[key] = ordered[(9 * len(ordered) - 1) // 10]
        self._guessed[stage].clear()
        self.version += 1

    def state(self) -> list[tuple[int, int, int, tuple[int, ...]]]:
        """Everything learnt, as (stage, bucket, size, durations): plain values, to be written down."""
        return [(int(stage), bucket, size, tuple(recent)) for (stage, bucket, size), recent in self._recent.items()]

    @classmethod
    def from_state(cls, state: Iterable[tuple[int, int, int, Iterable[int]]]) -> CostTable:
        """The table whose `state()` was `state`."""
        table = cls()
        for stage, bucket, size, durations in state:
            for duration_ns in durations:
                table.observe(Stage(stage), bucket, size, duration_ns)
        return table

    def _guess(self, key: CostKey) -> int:
        stage, bucket, size = key
        above: int | None = None
        below_work, below_ns = 0, 0
        for (other, other_bucket, other_size), ns in self._known.items():
            if other is not stage:
                continue
            if other_bucket >= bucket and other_size >= size:
                above = ns if above is None else min(above, ns)
            work = _work(other, other_bucket, other_size)
            if work > below_work:
                below_work, below_ns = work, ns
        if above is not None:
            return above
        if not below_work:
            return 0
        return max(below_ns, below_ns * _work(*key) // below_work)


def _work(stage: Stage, bucket: int, size: int) -> int:
    """What the time of a step grows with.  Tokens of TEXT and PREFILL are counted over all rows already."""
    return size if stage <= Stage.PREFILL else bucket * size
