"""How long a step will take: measured before serving, learnt while serving, and how wrong that was.

A step is known by (stage, bucket, size).  Size is the total of tokens, rounded up to a power of two, for TEXT and
PREFILL; the frames per row for CODEC; 1 for BACKBONE and DEPTH.  A prediction is a product of three:

    level of the kind x pace of the stage x margin of the stage

- The *level* is the median of the kind's last `WINDOW` durations, each divided by the pace at its time.
- The *pace* is how fast the machine is now, over what the levels say, by the last steps of the whole stage: their
  median, or the smaller of the last two if that is more.  So one stall moves nothing, a machine that becomes three
  times slower is believed at the second slow step and one that becomes faster at the eighth, and kinds of step that
  have not run since are believed slower or faster along with those that have.  What lasts becomes the level of the
  kinds that run, with a time constant of 2,000 steps, or else the two would drift against each other.  A machine that
  is another one from now on cannot be told from a load that will pass; who knows says so (`take_over`).
- The *margin* makes of that typical time one that `COVERED_TENTHS` of ten steps do not exceed.  It is a quantile
  tracker: up by nine units after a step that took longer than predicted, down by one after one that did not.  As the
  ups and downs of a bounded number add up to little, in the long run one step in ten takes longer, whatever the
  durations do.  (Gibbs and Candes, "Adaptive conformal inference under distribution shift", 2021; with the pace as
  its forecaster it is the quantile tracking of Angelopoulos, Candes and Tibshirani, "Conformal PID control for time
  series prediction", 2023.)  It never falls below one: where durations hardly vary, fewer take longer.

What a step took beyond its prediction is also remembered as it is: the *stumble* is the worst of late, forgotten by one
part in `STUMBLE_STEPS` with each step.  A lead that lasts as long covers the next such step.

What many steps take together is another question: their quantiles do not add up, their means do.  The mean of a kind
is level x pace x the stage's mean of durations over that, of about the last `MEAN_STEPS` steps.

All in integers; nothing here is random.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from breeze_rtc.scheduling.histogram import Histogram
from breeze_rtc.scheduling.step import Stage

CostKey = tuple[Stage, int, int]
"""(stage, bucket, size)"""

WINDOW = 31
"""Durations a kind of step is judged by."""
PACE_WINDOW = 15
"""Steps of a stage that say how fast the machine is now.  Half of them are a quarter of `WINDOW`: a change of pace is
taken for one before it looks like a change of level.  Both are odd: the lower of two middle values, taken for the
median again and again, would let the levels sink."""
COVERED_TENTHS = 9
"""Of ten steps, so many take at most as long as predicted."""
ONE = 1_000
"""A pace or margin of 1."""
MARGIN_UNIT = 3
"""What the margin falls by after a step within its prediction, in parts of `ONE`: 0.3 %."""
LARGEST_MARGIN = 4 * ONE
MEAN_STEPS = 64
LARGEST_RATIO = 8 * ONE
"""What one stall may count for in a mean."""
STUMBLE_STEPS = 4_096
"""Half of a stumble is forgotten after 2,800 steps: a minute or two of a machine at work."""
MEASURED_COUNTS = 16
"""A duration measured before serving counts as so many observations: a machine that is slower than it was then must be
taken for that before it looks as if this kind of step alone were."""

RATIO_BOUNDS = tuple(ONE * percent // 100 for percent in (25, 50, 70, 80, 90, 100, 110, 125, 150, 200, 400))
"""Steps are counted by their duration over its prediction, in parts of `ONE`, up to each of these."""


def size_of(stage: Stage, units: int) -> int:
    """The size of a step that carries `units`: tokens over all rows, or frames per row (see the module's docstring)."""
    if stage <= Stage.PREFILL:
        return 1 << (units - 1).bit_length() if units > 16 else 16
    return units if stage is Stage.CODEC else 1


class _Pace:
    """How one stage runs now; see the module's docstring."""

    __slots__ = ("factor", "margin", "mean_sum", "ordered", "ratios", "usual")

    def __init__(self) -> None:
        # Duration over level of the last steps, in parts of ONE; before any, the machine is as it was measured.
        self.ratios = deque([ONE] * PACE_WINDOW)
        self.ordered = list(self.ratios)
        self.margin = ONE
        # `MEAN_STEPS` times the mean of duration over level times pace.
        self.mean_sum = MEAN_STEPS * ONE
        # What durations are divided by, and what levels are multiplied by: pace times margin.
        self.usual = ONE
        self.factor = ONE * ONE

    def correct(self, predicted_ns: int, duration_ns: int) -> None:
        """Widen or tighten the margin by the error just made."""
        ratio = min(duration_ns * self.margin // max(1, predicted_ns), LARGEST_RATIO)
        self.mean_sum += ratio - self.mean_sum // MEAN_STEPS
        if duration_ns > predicted_ns:
            self.margin = min(self.margin + COVERED_TENTHS * MARGIN_UNIT, LARGEST_MARGIN)
        elif self.margin > ONE:
            self.margin = max(self.margin - (10 - COVERED_TENTHS) * MARGIN_UNIT, ONE)

    def follow(self, ratio: int) -> None:
        """One more step of a known kind took `ratio` of its level."""
        ratios, ordered = self.ratios, self.ordered
        del ordered[bisect_left(ordered, ratios.popleft())]
        ratios.append(ratio)
        insort(ordered, ratio)
        median = ordered[PACE_WINDOW // 2]
        self.usual = max(1, median - (median - ONE) // 64)
        self.factor = max(median, min(ratio, ratios[-2])) * self.margin


class CostTable:
    """Predicted time per kind of step, in ns."""

    def __init__(self, measured: Mapping[CostKey, int] | None = None) -> None:
        """`measured`: durations of a warm-up, one per key; each counts as the first observation of its key."""
        # The last durations of each key at pace 1, in order of arrival and sorted; the level is the (lower) median.
        self._recent: dict[CostKey, deque[int]] = {}
        self._sorted: dict[CostKey, list[int]] = {}
        self._levels: dict[Stage, dict[CostKey, int]] = {stage: {} for stage in Stage}
        self._paces = {stage: _Pace() for stage in Stage}
        # Duration over prediction of the steps of which something was known; see `RATIO_BOUNDS`.
        self.ratios = {stage: Histogram(RATIO_BOUNDS) for stage in Stage}
        # The worst by which a step took longer than predicted, of late; see the module's docstring.
        self.stumble_ns = 0
        # Goes up with every observation: what was looked up before may have changed.
        self.version = 0
        # What was known of each stage that was taken over, before it was: its kinds, and its line of `state`.
        self._before: dict[Stage, tuple[list[list[Any]], list[Any]]] = {}
        # What `predict_ns` has answered; forgotten when the stage learns something.
        self._predicted: dict[Stage, dict[CostKey, int]] = {stage: {} for stage in Stage}
        for key, duration_ns in (measured or {}).items():
            self._begin_with(key, duration_ns)

    def predict_ns(self, stage: Stage, bucket: int, units: int = 1) -> int:
        """The time a step of `stage` padded to `bucket` rows will very likely not exceed.

        A kind of step never seen takes the time of the cheapest known one that is at least as large, else the largest
        known one scaled up by its work; 0 when nothing is known of the stage, which lets a cold start begin and learn.
        """
        key = (stage, bucket, size_of(stage, units))
        predicted = self._predicted[stage]
        time_ns = predicted.get(key)
        if time_ns is None:
            level = self._levels[stage].get(key)
            if level is None:
                level = self._guess(key)
            time_ns = predicted[key] = level * self._paces[stage].factor // (ONE * ONE)
        return time_ns

    def mean_ns(self, stage: Stage, bucket: int, units: int = 1) -> int:
        """The time such steps take on average, to be added up over many; of kinds never seen as `predict_ns` has it."""
        pace = self._paces[stage]
        return self.predict_ns(stage, bucket, units) * pace.mean_sum // (MEAN_STEPS * pace.margin)

    def observe(self, stage: Stage, bucket: int, units: int, duration_ns: int) -> None:
        """A step of this kind took `duration_ns`."""
        key = (stage, bucket, size_of(stage, units))
        pace = self._paces[stage]
        predicted_ns = self.predict_ns(stage, bucket, units)
        if predicted_ns:
            # Rounded up: what took longer than predicted is never counted as if it had not.
            self.ratios[stage].add(-(-duration_ns * ONE // predicted_ns))
        level = self._levels[stage].get(key)
        if level:
            # A kind never seen before says nothing about the pace: what was expected of it was a guess.
            self.stumble_ns = max(self.stumble_ns - self.stumble_ns // STUMBLE_STEPS, duration_ns - predicted_ns)
            pace.correct(predicted_ns, duration_ns)
            pace.follow(duration_ns * ONE // level)
        self._learn(key, duration_ns * ONE // pace.usual)

    def take_over(self, stage: Stage, measured: Mapping[tuple[int, int], int]) -> None:
        """The stage runs in another way from now on, as when CUDA graphs take it over: nothing that was learnt of it is
        true any more, of kinds that were not measured either.

        measured: ns by (bucket, size), of one kind at least; each counts as it would before serving.
        """
        assert measured, "a stage of which nothing is known would be predicted to take no time"
        levels = self._levels[stage]
        self._before.setdefault(stage, (self._kinds(levels), self._line(stage)))
        for key in levels:
            del self._recent[key], self._sorted[key]
        levels.clear()
        self._paces[stage] = _Pace()
        for (bucket, size), duration_ns in measured.items():
            self._begin_with((stage, bucket, size), duration_ns)

    def margin(self, stage: Stage) -> int:
        """The margin of a stage now, in parts of `ONE`."""
        return self._paces[stage].margin

    def state(self) -> dict[str, Any]:
        """Everything learnt, as plain values to be written down."""
        return {
            "kinds": self._kinds(self._recent),
            "stages": [self._line(stage) for stage in self._paces],
            "stumble_ns": self.stumble_ns,
        }

    def state_at_start(self) -> dict[str, Any]:
        """As `state`, but of stages that were taken over what was learnt before: what the next start begins with, which
        runs in the old way at first."""
        before = self._before
        kinds = self._kinds(key for key in self._recent if key[0] not in before)
        for stage_kinds, _ in before.values():
            kinds += stage_kinds
        lines = [before[stage][1] if stage in before else self._line(stage) for stage in self._paces]
        return self.state() | {"kinds": kinds, "stages": lines}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CostTable:
        """The table whose `state()` was `state`.  Raises ValueError, TypeError or KeyError for anything else."""
        table = cls()
        for stage, bucket, size, durations in state["kinds"]:
            for duration_ns in durations:
                table._learn((Stage(stage), _natural(bucket), _natural(size)), _natural(duration_ns))
        for stage, margin, mean_sum, ratios in state["stages"]:
            pace = table._paces[Stage(stage)]
            pace.margin = min(max(ONE, _natural(margin)), LARGEST_MARGIN)
            pace.mean_sum = _natural(mean_sum)
            for ratio in ratios:
                pace.follow(_natural(ratio))
        table.stumble_ns = _natural(state["stumble_ns"])
        return table

    def _kinds(self, keys: Iterable[CostKey]) -> list[list[Any]]:
        return [[int(key[0]), key[1], key[2], list(self._recent[key])] for key in keys]

    def _line(self, stage: Stage) -> list[Any]:
        pace = self._paces[stage]
        return [int(stage), pace.margin, pace.mean_sum, list(pace.ratios)]

    def _begin_with(self, key: CostKey, duration_ns: int) -> None:
        """A duration that was measured, not observed."""
        for _ in range(MEASURED_COUNTS):
            self._learn(key, duration_ns)

    def _learn(self, key: CostKey, duration_ns: int) -> None:
        """One more duration of a kind, at pace 1."""
        recent = self._recent.get(key)
        if recent is None:
            recent = self._recent[key] = deque()
            self._sorted[key] = []
        ordered = self._sorted[key]
        if len(recent) == WINDOW:
            del ordered[bisect_left(ordered, recent.popleft())]
        recent.append(duration_ns)
        insort(ordered, duration_ns)
        stage = key[0]
        self._levels[stage][key] = ordered[(len(ordered) - 1) // 2]
        self._predicted[stage].clear()
        self.version += 1

    def _guess(self, key: CostKey) -> int:
        """The level of a kind that was never seen."""
        stage, bucket, size = key
        above: int | None = None
        below_work, below_ns = 0, 0
        for (other, other_bucket, other_size), ns in self._levels[stage].items():
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


def _natural(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _work(stage: Stage, bucket: int, size: int) -> int:
    """What the time of a step grows with.  Tokens of TEXT and PREFILL are counted over all rows already."""
    return size if stage <= Stage.PREFILL else bucket * size
