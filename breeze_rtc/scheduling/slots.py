"""Who holds which state slot and which KV pages.

Pages are reserved for the worst case when a stream opens and taken one by one as its positions grow.  So a stream
that has started can always go on, and no two streams can wait for each other's pages.
"""

from __future__ import annotations


class Slots:
    """State slots 0 .. count - 1; the last one given back is the next one taken, because its memory is warm."""

    def __init__(self, count: int) -> None:
        assert count > 0
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free slot; ask `free` first."""
        assert self._free, "no slot is free"
        return self._free.pop()

    def give(self, slot: int) -> None:
        assert 0 <= slot < self.count
        assert slot not in self._free, f"slot {slot} was free already"
        self._free.append(slot)


class Pages:
    """KV pages 0 .. count - 1.  A reservation is a number, not a set of pages: those are chosen when they are taken."""

    def __init__(self, count: int) -> None:
        assert count > 0
        self.count = count
        # Pages promised to open streams, taken ones included.
        self.reserved = 0
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def unreserved(self) -> int:
        """Pages that nobody holds and nobody was promised."""
        return self.count - self.reserved

    def reserve(self, pages: int) -> bool:
        """Promise `pages` more; False, and nothing done, when they are not there."""
        if pages > self.unreserved:
            return False
        self.reserved += pages
        return True

    def take(self, pages: int) -> tuple[int, ...]:
        """`pages` of those promised earlier."""
        assert pages <= len(self._free), "more pages taken than were reserved"
        return tuple(self._free.pop() for _ in range(pages))

    def give(self, pages: list[int], reserved: int) -> None:
        """A stream ends: the pages it holds and its whole reservation come back."""
        assert len(pages) <= reserved <= self.reserved
        self.reserved -= reserved
        self._free.extend(reversed(pages))


def pages_for(positions: int, page_tokens: int, rows: int) -> int:
    """Pages that `positions` of a stream take; each of its `rows` has a KV cache of its own."""
    return -(-positions // page_tokens) * rows
