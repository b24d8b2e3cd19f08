"""How often which values came: what is predicted is compared with what is, and somebody looks at it later."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any


class Histogram:
    """Counts of integer values in classes, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        """bounds: ascending; a value is in the first class whose bound it does not exceed, or beyond them all."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def add(self, value: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def above(self, bound: int) -> int:
        """How many values were above one of the bounds."""
        return sum(self.counts[self.bounds.index(bound) + 1 :])

    def in_units_of(self, one: int) -> dict[str, Any]:
        """Plain values, to be sent: bounds and sum in units that are `one` here."""
        return {"bounds": [bound / one for bound in self.bounds], "counts": list(self.counts), "sum": self.total / one}
