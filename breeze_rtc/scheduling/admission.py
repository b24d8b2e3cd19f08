"""May one more stream start without making a deadline of anybody infeasible?

Three things must be there:

- a slot and worst-case KV pages, beyond those kept for the classes above;
- for a stream that somebody listens to, time: all listeners together must need at most `MAX_LOAD_PERCENT` of this
  machine, by what steps take in the long run, in the steady state that every call reaches, and by what beginnings
  (texts, prompts and first sounds, which hardly share steps) have really taken of late;
- and time for its first sound: made in what those who speak already leave of the machine, together with the first
  sounds that are being made, it must come within what its class can bear.

Where something is missing, `TERMS` says what happens, by class: the others give up some quality, the stream waits, in
the order of arrival and behind the classes above, or it is refused and told when to come back.  Reports have no say
here: a listener could claim to be always empty.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.scheduling.slots import Pages, Slots
from breeze_rtc.scheduling.step import Stage, StageSpec
from breeze_rtc.scheduling.stream import Priority, Stream

if TYPE_CHECKING:
    from breeze_rtc.scheduling.forecast import Forecast

MAX_LOAD_PERCENT = 88
"""What is left lets chunks stay large: in a machine without any slack all of them shrink, and each frame costs more."""
BEGINNINGS_WINDOW_NS = 4 * SECOND
"""What beginnings take is the average of so long: a burst on a machine with time to spare is no load."""
RELAXED_PERCENT = 80
"""Quality that was given up comes back below this load: not at once at the limit, or it would come and go."""
KEPT_SHARE = {Priority.LIVE: 0, Priority.STREAM: 16, Priority.BATCH: 4}
"""One part in this many of the slots and pages is out of reach for the class; 0 keeps nothing back."""
STEADY_CHUNK = 4
"""Frames per codec step of a stream in full flow; the codec's fixed cost is spread over them."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a class gets where there is no room for it."""

    wait_ns: int
    """It waits at most so long."""
    degrade_after_ns: int | None
    """When it has waited so long, those who run give up quality for it (`Admission.is_strained`); None: never."""
    first_sound_ns: int | None
    """A first sound that would come later than that had better not begin yet; None: it may take any time."""


TERMS = {
    Priority.LIVE: Terms(wait_ns=500 * MS, degrade_after_ns=0, first_sound_ns=500 * MS),
    Priority.STREAM: Terms(wait_ns=3 * SECOND, degrade_after_ns=SECOND, first_sound_ns=2 * SECOND),
    Priority.BATCH: Terms(wait_ns=60 * SECOND, degrade_after_ns=None, first_sound_ns=None),
}
LOOK_EVERY_STEPS = 8
"""While somebody waits for time, it is reckoned again after so many steps: that takes as long as a step's choice."""
MOST_WAITING = 64
"""Streams of one class that may wait; the next one is refused at once."""


def bucket_of(spec: StageSpec, rows: int) -> int:
    """The smallest bucket that holds `rows`."""
    buckets = spec.buckets
    assert rows <= buckets[-1], f"{rows} rows do not fit the largest bucket {buckets[-1]}"
    return buckets[bisect_left(buckets, rows)]


def stage_ns(
    time_ns: Callable[[Stage, int, int], int], specs: Mapping[Stage, StageSpec], stage: Stage, rows: int, units: int = 1
) -> int:
    """Time to take `rows` through a stage, in as many steps as its batch limit asks for.

    time_ns(stage, bucket, units): of one step; `CostTable.predict_ns` or `mean_ns`.
    """
    spec = specs[stage]
    if 0 < rows <= spec.max_rows:
        return time_ns(stage, bucket_of(spec, rows), units)
    full, rest = divmod(rows, spec.max_rows)
    whole_ns = full * time_ns(stage, bucket_of(spec, spec.max_rows), units) if full else 0
    return whole_ns + (time_ns(stage, bucket_of(spec, rest), units) if rest else 0)


def load_percent(
    stage_ns: Callable[[Stage, int, int], int], *, rows: int, chunks: Mapping[int, int], frame_ns: int
) -> int:
    """Time to make one frame for every listener, in percent of the time they take to hear it.

    stage_ns(stage, rows, units): time to take rows through a stage.  rows: backbone rows of all listeners.
    chunks: frames per codec step -> how many listeners get such chunks.

    A batch is taken to cost at most what its rows cost one by one: the small steps are learnt anew whenever a stream
    runs, while a large one that was slow once would otherwise be held against every stream that could teach us better.
    """

    def time_ns(stage: Stage, rows: int, units: int = 1) -> int:
        return min(stage_ns(stage, rows, units), rows * stage_ns(stage, 1, units))

    codec_ns = sum(time_ns(Stage.CODEC, streams, frames) // frames for frames, streams in chunks.items())
    return 100 * (time_ns(Stage.BACKBONE, rows) + time_ns(Stage.DEPTH, rows) + codec_ns) // frame_ns


class Admission:
    """Decides who starts, and keeps those who wait."""

    def __init__(
        self,
        *,
        slots: Slots,
        pages: Pages,
        forecast: Forecast,
        frame_ns: int,
        goes_by_load: bool,
    ) -> None:
        """frame_ns: what a codec frame lasts.  goes_by_load: False to look at slots and pages only."""
        self._slots = slots
        self._pages = pages
        self._forecast = forecast
        self._frame_ns = frame_ns
        self._goes_by_load = goes_by_load
        # Those who wait, in the order in which they came; `ready_ns` is when that was.
        self.waiting: dict[int, Stream] = {}
        # Streams refused since the start, by class.
        self.refused = [0] * len(Priority)
        # Listeners get larger chunks and less lead than they would if there was time; see `Survey` and `next_chunk`.
        self.is_strained = False
        # Whether to look again at those who wait: something has changed, or the time has come, or so many steps have
        # taught what they cost.
        self._has_changed = False
        self._look_at = 0
        self._steps_to_look = 0
        # Time that beginnings took in this window and in the one before, and since when this one lasts.
        self._began_now_ns = 0
        self._began_before_ns = 0
        self._window_ns = 0
        # How long the last streams held their slots, on average; 0 until one has given it back.
        self._held_ns = 0

    def lack(self, s: Stream, streams: Iterable[Stream], now: int) -> str:
        """What is missing for `s` to start beside the open `streams`, as a sentence; empty when nothing is.

        When nothing is if the others give up some quality, they do so from now on.
        """
        place = _place(s)
        ahead = sum(_place(other) < place for other in self.waiting.values())
        if ahead:
            return f"{ahead} others wait"
        share = KEPT_SHARE[s.priority]
        slots, pages = self._slots, self._pages
        kept = slots.count // share if share else 0
        if slots.free <= kept:
            return f"{slots.count - slots.free} of {slots.count} streams are open"
        if pages.unreserved - s.pages_kept < kept * (pages.count // slots.count):
            return "the memory for one more stream is not free"
        if s.priority is Priority.BATCH or not self._goes_by_load:
            return ""
        heard = _heard(streams)
        if not heard:
            # The only listener is better served slowly than not at all.
            return ""
        return self._lack_of_time(s, heard, now)

    def enqueue(self, s: Stream) -> bool:
        """Let `s` wait; False, and it is refused, when too many do or it could never begin."""
        if (
            s.pages_kept > self._pages.count
            or sum(other.priority is s.priority for other in self.waiting.values()) >= MOST_WAITING
        ):
            self.refused[s.priority] += 1
            return False
        self.waiting[s.id] = s
        self._has_changed = True
        return True

    def is_due(self, now: int) -> bool:
        """It is worth looking again at those who wait; once asked, not until something changes again."""
        if not self._has_changed and now < self._look_at:
            return False
        self._has_changed = False
        self._steps_to_look = LOOK_EVERY_STEPS
        self._look_at = self.wake_at(now) or now
        return True

    def stepped(self) -> None:
        """A step has run: what its kind costs is known better."""
        self._steps_to_look -= 1
        if self._steps_to_look <= 0:
            self._has_changed = True

    def beginning(self, duration_ns: int, now: int) -> None:
        """A step for a text, a prompt or a first sound has run."""
        self._roll(now)
        self._began_now_ns += duration_ns

    def beginnings_percent(self, now: int) -> int:
        """What beginnings took of this machine over the last `BEGINNINGS_WINDOW_NS`."""
        self._roll(now)
        left_ns = BEGINNINGS_WINDOW_NS - (now - self._window_ns)
        taken_ns = self._began_now_ns + self._began_before_ns * left_ns // BEGINNINGS_WINDOW_NS
        return 100 * taken_ns // BEGINNINGS_WINDOW_NS

    def _roll(self, now: int) -> None:
        windows = (now - self._window_ns) // BEGINNINGS_WINDOW_NS
        if windows:
            self._began_before_ns = self._began_now_ns if windows == 1 else 0
            self._began_now_ns = 0
            self._window_ns += windows * BEGINNINGS_WINDOW_NS

    def forget(self, s: Stream) -> None:
        """`s` does not wait any more."""
        self._has_changed = True
        del self.waiting[s.id]

    def queued(self) -> tuple[int, ...]:
        """How many wait, by class."""
        return tuple(sum(s.priority is priority for s in self.waiting.values()) for priority in Priority)

    def first(self) -> Stream:
        """Who begins next, of those who wait: the first of the highest class."""
        return min(self.waiting.values(), key=_place)

    def overdue(self, now: int) -> list[Stream]:
        """Those who have waited as long as their class may."""
        return [s for s in self.waiting.values() if now >= s.ready_ns + TERMS[s.priority].wait_ns]

    def refuse(self, s: Stream) -> None:
        self.forget(s)
        self.refused[s.priority] += 1

    def wake_at(self, now: int) -> int | None:
        """When time alone changes something for those who wait; None when nobody does."""
        times = [
            s.ready_ns + after_ns
            for s in self.waiting.values()
            for after_ns in (TERMS[s.priority].wait_ns, TERMS[s.priority].degrade_after_ns)
            if after_ns is not None
        ]
        return min((at_ns for at_ns in times if at_ns > now), default=None)

    def left(self, s: Stream, streams: Iterable[Stream], now: int) -> None:
        """`s` has given back what it held; `streams` are still open."""
        self._has_changed = True
        held_ns = now - s.began_ns
        self._held_ns = self._held_ns + (held_ns - self._held_ns) // 8 if self._held_ns else held_ns
        if self.is_strained:
            self.is_strained = self._load(_heard(streams), is_strained=False) > RELAXED_PERCENT

    def retry_after_s(self, s: Stream) -> float:
        """When there may be room for one like `s`: as many must leave as wait before it, and one more."""
        place = _place(s)
        ahead = sum(_place(other) < place for other in self.waiting.values())
        taken = max(1, self._slots.count - self._slots.free)
        return min(60.0, max(1.0, (ahead + 1) * self._held_ns / taken / SECOND))

    def _lack_of_time(self, s: Stream, heard: list[Stream], now: int) -> str:
        terms = TERMS[s.priority]
        is_strained = self.is_strained
        begun = self.beginnings_percent(now)
        load = self._load([*heard, s], is_strained=is_strained) + begun
        if load > MAX_LOAD_PERCENT and not is_strained and terms.degrade_after_ns is not None:
            is_strained = now >= s.ready_ns + terms.degrade_after_ns
            load = self._load([*heard, s], is_strained=is_strained) + begun
        if load > MAX_LOAD_PERCENT:
            return f"one more listener would need {load} % of this machine"
        if terms.first_sound_ns is not None:
            spoken = [other for other in heard if other.has_spoken]
            starting = [other for other in heard if not other.has_spoken and other.tokens]
            spare = max(0, 100 - self._load(spoken, is_strained=is_strained))
            if self._forecast.way_to_sound_ns([*starting, s]) * 100 > terms.first_sound_ns * spare:
                return f"{len(starting)} others are about to speak, and {spare} % of this machine is left for that"
        self.is_strained = is_strained
        return ""

    def _load(self, heard: list[Stream], *, is_strained: bool) -> int:
        """Percent of this machine that these listeners need."""
        chunks = {STEADY_CHUNK: len(heard)}
        if is_strained:
            chunks.clear()
            for s in heard:
                frames = max(STEADY_CHUNK, s.longest_chunk)
                chunks[frames] = chunks.get(frames, 0) + 1
        rows = sum([s.rows for s in heard])
        return load_percent(self._forecast.steady_ns, rows=rows, chunks=chunks, frame_ns=self._frame_ns) if rows else 0


def _heard(streams: Iterable[Stream]) -> list[Stream]:
    """Those that somebody listens to and that are still being made."""
    batch = Priority.BATCH
    return [s for s in streams if s.priority is not batch and not s.is_cancelled and not s.is_generated]


def _place(s: Stream) -> tuple[int, int]:
    """Where a stream stands in the queue; lower is sooner."""
    return s.priority, s.opened
