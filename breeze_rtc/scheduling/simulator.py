"""The scheduler in virtual time: a cost table in place of a machine, simulated listeners in place of ears.

The loop is the driver's: run the step that was chosen, then take what came in meanwhile.  Nothing here is random
unless a source of numbers is handed in, so a run can be repeated exactly.  Every figure that comes out is simulated;
say so where it is shown.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

from ..clock import MS, US, ns_to_samples, samples_to_ns
from ..errors import Overloaded
from ..playback import PlaybackReport
from .costs import CostTable, size_of
from .scheduler import Scheduler
from .step import AudioReady, DeadlineMissed, RowResult, Stage, StageSpec, Step, StepResult, StreamFinished
from .stream import NEVER, Feed, Priority


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Time of a step: the base, plus so much per row of the bucket, plus so much per token, or per frame and row."""

    base_ns: int
    row_ns: int = 0
    unit_ns: int = 0


SimulatedCosts = Mapping[Stage, LinearCost]

_H100_HOST_NS = 600 * US
H100_GRAPH_COSTS: SimulatedCosts = {
    Stage.TEXT: LinearCost(_H100_HOST_NS + 2_000 * US, unit_ns=6 * US),
    Stage.PREFILL: LinearCost(_H100_HOST_NS + 4_000 * US, unit_ns=6 * US),
    Stage.BACKBONE: LinearCost(_H100_HOST_NS + 2_200 * US, row_ns=15 * US),
    Stage.DEPTH: LinearCost(_H100_HOST_NS + 6_700 * US, row_ns=260 * US),
    Stage.CODEC: LinearCost(_H100_HOST_NS + 3_000 * US, unit_ns=60 * US),
}
"""SIMULATED.  The 3B model on one H100 with unfused kernels in CUDA graphs, host time included: scaled from times
others have published for models of this structure, not measured."""
H100_SPECS = {
    Stage.TEXT: StageSpec(max_rows=16, buckets=(1, 2, 4, 8, 16), max_tokens=512),
    Stage.PREFILL: StageSpec(max_rows=16, buckets=(1, 2, 4, 8, 16), max_tokens=1024),
    Stage.BACKBONE: StageSpec(max_rows=64, buckets=(1, 2, 4, 8, 12, 16, 24, 32, 48, 64)),
    Stage.DEPTH: StageSpec(max_rows=64, buckets=(1, 2, 4, 8, 12, 16, 24, 32, 48, 64)),
    Stage.CODEC: StageSpec(max_rows=32, buckets=(1, 2, 4, 8, 16, 32)),
}


def cost_ns(costs: SimulatedCosts, stage: Stage, bucket: int, units: int) -> int:
    """Time of one step; units: tokens over all rows, or codec frames per row."""
    cost = costs[stage]
    return cost.base_ns + cost.row_ns * bucket + cost.unit_ns * (units if stage <= Stage.PREFILL else units * bucket)


def warmed_up(costs: SimulatedCosts, specs: Mapping[Stage, StageSpec], ladder: Iterable[int]) -> CostTable:
    """The table that a warm-up over all shapes would have measured."""
    measured = {}
    for stage, spec in specs.items():
        sizes = [size_of(stage, 1)]
        if stage is Stage.CODEC:
            sizes = list(ladder)
        while stage <= Stage.PREFILL and sizes[-1] < spec.max_tokens:
            sizes.append(2 * sizes[-1])
        for bucket in spec.buckets:
            for size in sizes:
                measured[stage, bucket, size] = cost_ns(costs, stage, bucket, size)
    return CostTable(measured)


@dataclass(frozen=True, slots=True)
class SimulatedListener:
    """How one listener hears and reports.  The defaults hear at once, without a buffer, and say nothing."""

    network_ns: int = 0
    """From our sink to the player, and back for reports."""
    jitter_ns: int = 0
    """Up to this much more for a chunk; chunks stay in order."""
    buffer_ns: int = 0
    """The player starts this long after the first chunk has come."""
    report_every_ns: int = 0
    """0: no reports."""
    stalls: tuple[tuple[int, int], ...] = ()
    """(start, duration) since the first chunk was sent: what is sent meanwhile arrives at the end."""
    pause: tuple[int, int] | None = None
    """(start, duration) since the player started: it stands still, and says so."""
    barge_in_samples: int | None = None
    """The listener interrupts on hearing this position."""


@dataclass(frozen=True, slots=True)
class Utterance:
    """One stream to be spoken."""

    frames: int
    """Length that the model will find."""
    pieces: tuple[tuple[int, int], ...] = ((0, 24),)
    """(time since arrival, tokens) of each piece of text; the text ends with the last."""
    arrival_ns: int = 0
    """Open loop: when it comes.  Ignored in a closed loop."""
    feed: Feed = Feed.PREFIX
    priority: Priority = Priority.LIVE
    interactive: bool = True
    listener: SimulatedListener = SimulatedListener()


@dataclass(slots=True)
class Outcome:
    """What became of one utterance.  Times of a stage that was never reached are None."""

    arrival_ns: int
    is_refused: bool = False
    is_finished: bool = False
    first_packet_ns: int | None = None
    """From arrival to the first chunk handed to the sink."""
    potential_gap_ns: int = 0
    """The buffer a player starting with the first chunk would have needed, from the times chunks reached it."""
    true_gaps: int = 0
    """Times the simulated player ran dry before the end."""
    true_gap_ns: int = 0
    missed_deadlines: int = 0
    wasted_samples: int = 0
    """Made and never heard, because of a barge-in."""
    samples: int = 0
    chunks: list[int] = field(default_factory=list)
    """Frames of each chunk."""
    most_ahead_ns: int = 0
    """The longest stretch of made and unheard sound at any delivery, as an ideal listener would have it."""


class _Player:
    """A player with its buffer, advanced only when somebody looks."""

    def __init__(self, sample_rate: int, listener: SimulatedListener) -> None:
        self._sample_rate = sample_rate
        self._listener = listener
        # Sound that has arrived, in ns; of it, what has been heard.
        self.arrived_ns = 0
        self.heard_ns = 0
        self.gaps = 0
        self.gap_ns = 0
        self.starts_at: int | None = None
        self._now = 0
        self._dry_since: int | None = None

    def arrive(self, duration_ns: int, now: int) -> None:
        self.advance(now)
        if self.starts_at is None:
            self.starts_at = now + self._listener.buffer_ns
        if self._dry_since is not None:
            self.gaps += 1
            self.gap_ns += now - self._dry_since
            self._dry_since = None
        self.arrived_ns += duration_ns

    def advance(self, now: int) -> None:
        """Play up to `now`."""
        if self.starts_at is not None and now > self.starts_at:
            begin = max(self._now, self.starts_at)
            played_ns = now - begin - self._paused_between(begin, now)
            left_ns = self.arrived_ns - self.heard_ns
            if played_ns > left_ns and self._dry_since is None:
                self._dry_since = now - (played_ns - left_ns)
            self.heard_ns += min(played_ns, left_ns)
        self._now = max(self._now, now)

    def is_paused(self, now: int) -> bool:
        pause = self._listener.pause
        return pause is not None and self.starts_at is not None and 0 <= now - self.starts_at - pause[0] < pause[1]

    def heard_samples(self) -> int:
        return ns_to_samples(self.heard_ns, self._sample_rate)

    def _paused_between(self, begin: int, end: int) -> int:
        if self._listener.pause is None or self.starts_at is None:
            return 0
        start = self.starts_at + self._listener.pause[0]
        return max(0, min(end, start + self._listener.pause[1]) - max(begin, start))


class _Call:
    """One utterance on its way: what the simulator knows and the scheduler does not."""

    def __init__(self, utterance: Utterance, player: _Player, now: int) -> None:
        self.utterance = utterance
        self.player = player
        self.outcome = Outcome(arrival_ns=now)
        self.tokens = sum(tokens for _, tokens in utterance.pieces)
        self.encoded = 0
        self.is_text_ended = False
        # When the last chunk reached, or will reach, the player.
        self.last_arrival_ns = 0
        self.first_arrival_ns = 0
        self.arriving_ns = 0
        self.first_sent_ns = 0
        self.ideal_dry_ns = 0
        self.is_over = False


def simulate(
    scheduler: Scheduler,
    utterances: Iterable[Utterance],
    *,
    costs: SimulatedCosts,
    sample_rate: int,
    frame_samples: int,
    concurrency: int | None = None,
    uniform: Callable[[], float] | None = None,
    spread: float = 0.05,
) -> list[Outcome]:
    """Speak `utterances` in virtual time; the outcomes are in their order.

    concurrency: closed loop with so many streams, the next begins when one has been made in full or was interrupted;
    None: open loop, each comes at its `arrival_ns`.  uniform: gives numbers in [0, 1), for network jitter and for
    step times that are log-normal around the cost table with a deviation of `spread`; None: neither varies.
    """
    return _Simulation(
        scheduler, list(utterances), costs, sample_rate, frame_samples, concurrency, uniform, spread
    ).run()


class _Simulation:
    def __init__(  # noqa: PLR0917 (one caller, above)
        self,
        scheduler: Scheduler,
        utterances: list[Utterance],
        costs: SimulatedCosts,
        sample_rate: int,
        frame_samples: int,
        concurrency: int | None,
        uniform: Callable[[], float] | None,
        spread: float,
    ) -> None:
        self._scheduler = scheduler
        self._utterances = utterances
        self._costs = costs
        self._sample_rate = sample_rate
        self._frame_samples = frame_samples
        self._frame_ns = samples_to_ns(frame_samples, sample_rate)
        self._uniform = uniform
        self._spread = spread
        self._now = 0
        self._order = count()
        self._inbox: list[tuple[int, int, Callable[[], None]]] = []
        self._calls: dict[int, _Call] = {}
        # Closed loop: utterances that have not begun.
        self._queue: deque[int] = deque()
        if concurrency is None:
            for index, utterance in enumerate(utterances):
                self._at(utterance.arrival_ns, partial(self._begin, index, utterance.arrival_ns))
        else:
            self._queue.extend(range(len(utterances)))
            for _ in range(concurrency):
                self._begin_next()

    def run(self) -> list[Outcome]:
        scheduler = self._scheduler
        while True:
            while self._inbox and self._inbox[0][0] <= self._now:
                heappop(self._inbox)[2]()
            step = scheduler.next_step(self._now)
            if step is not None:
                self._run(step)
                continue
            wake_at = scheduler.wake_at()
            assert wake_at is None or wake_at > self._now, "the scheduler asked to be woken and had nothing to do"
            then = min(self._inbox[0][0] if self._inbox else NEVER, NEVER if wake_at is None else wake_at)
            if then == NEVER:
                break
            self._now = then
        return [self._calls[index].outcome for index in range(len(self._utterances)) if index in self._calls]

    # ---- the machine -------------------------------------------------------------------------------------------------

    def _run(self, step: Step) -> None:
        units = step.rows[0].count if step.stage is Stage.CODEC else sum(row.count for row in step.rows)
        duration_ns = self._vary(cost_ns(self._costs, step.stage, step.bucket, units))
        self._now += duration_ns
        rows = tuple(self._result(step.stage, row.stream, row.start, row.count) for row in step.rows)
        self._scheduler.step_done(step, StepResult(rows, duration_ns), self._now)
        self._take_events()

    def _result(self, stage: Stage, stream: int, start: int, units: int) -> RowResult:
        call = self._calls[stream]
        utterance = call.utterance
        if stage is Stage.TEXT:
            call.encoded += units
        if stage is Stage.CODEC:
            call.outcome.chunks.append(units)
            return RowResult(stream, samples=units * self._frame_samples)
        if stage is Stage.PREFILL or stage is Stage.BACKBONE:
            frame = start if stage is Stage.BACKBONE else 0
            # Text is spoken evenly; the next frame needs the token after the one it speaks.
            needed = 1 + (frame + 1) * call.tokens // utterance.frames
            starved = utterance.feed is Feed.PER_FRAME and call.encoded < min(needed, call.tokens)
            return RowResult(stream, ended=frame >= utterance.frames, wants_text=starved)
        return RowResult(stream)

    def _take_events(self) -> None:
        for event in self._scheduler.events():
            call = self._calls[event.stream]
            if isinstance(event, AudioReady):
                self._send(event.stream, call, event.samples)
            elif isinstance(event, DeadlineMissed):
                call.outcome.missed_deadlines += 1
            elif isinstance(event, StreamFinished):
                call.outcome.is_finished = True
                # The caller has to learn of it, and the next request has to come here: it does not arrive in step
                # with us.
                self._begin_next(2 * call.utterance.listener.network_ns)

    # ---- the listeners -----------------------------------------------------------------------------------------------

    def _send(self, stream: int, call: _Call, samples: int) -> None:
        outcome, listener = call.outcome, call.utterance.listener
        duration_ns = samples_to_ns(samples, self._sample_rate)
        if outcome.first_packet_ns is None:
            outcome.first_packet_ns = self._now - outcome.arrival_ns
            call.first_sent_ns = self._now
            if listener.report_every_ns:
                self._at(self._now + listener.report_every_ns, lambda: self._report(stream, call))
        call.ideal_dry_ns = max(call.ideal_dry_ns, self._now) + duration_ns
        outcome.most_ahead_ns = max(outcome.most_ahead_ns, call.ideal_dry_ns - self._now)
        sent_at = self._now
        for start, length in listener.stalls:
            if start <= sent_at - call.first_sent_ns < start + length:
                sent_at = call.first_sent_ns + start + length
        jitter_ns = int(self._uniform() * listener.jitter_ns) if self._uniform is not None else 0
        arrival = max(call.last_arrival_ns, sent_at + listener.network_ns + jitter_ns)
        if not outcome.samples:
            call.first_arrival_ns = arrival
        outcome.potential_gap_ns = max(outcome.potential_gap_ns, arrival - call.first_arrival_ns - call.arriving_ns)
        call.arriving_ns += duration_ns
        call.last_arrival_ns = arrival
        outcome.samples += samples
        self._at(arrival, lambda: self._arrive(stream, call, duration_ns, arrival))

    def _arrive(self, stream: int, call: _Call, duration_ns: int, at_ns: int) -> None:
        call.player.arrive(duration_ns, at_ns)
        call.outcome.true_gaps, call.outcome.true_gap_ns = call.player.gaps, call.player.gap_ns
        self._watch_for_barge_in(stream, call, at_ns)

    def _watch_for_barge_in(self, stream: int, call: _Call, at_ns: int) -> None:
        """Interrupt at the moment the position is heard, if that can be before the buffer is empty."""
        limit = call.utterance.listener.barge_in_samples
        if limit is None or call.is_over:
            return
        player = call.player
        player.advance(at_ns)
        limit_ns = samples_to_ns(limit, self._sample_rate)
        if player.heard_ns >= limit_ns:
            call.is_over = True
            # The position is known where it is heard; the engine hears of it one way later.
            self._at(at_ns + call.utterance.listener.network_ns, lambda: self._interrupt(stream, call))
        elif player.arrived_ns >= limit_ns:
            begin = max(at_ns, player.starts_at or 0)
            then = max(at_ns + MS, begin + limit_ns - player.heard_ns)
            self._at(then, lambda: self._watch_for_barge_in(stream, call, then))

    def _interrupt(self, stream: int, call: _Call) -> None:
        made = call.outcome.samples
        call.outcome.wasted_samples = max(0, made - (call.utterance.listener.barge_in_samples or 0))
        self._scheduler.cancel(stream, self._now)
        if not call.outcome.is_finished:
            self._begin_next()

    def _report(self, stream: int, call: _Call) -> None:
        if call.is_over or call.outcome.is_finished:
            return
        listener, player, at_ns = call.utterance.listener, call.player, self._now
        player.advance(at_ns)
        report = PlaybackReport(
            stream=stream,
            heard_samples=player.heard_samples(),
            at_ns=at_ns,
            path_delay_ns=listener.network_ns,
            is_playing=not player.is_paused(at_ns),
        )
        self._at(at_ns + listener.network_ns, lambda: self._scheduler.report(report, self._now))
        self._at(at_ns + listener.report_every_ns, lambda: self._report(stream, call))

    # ---- arrivals ----------------------------------------------------------------------------------------------------

    def _begin_next(self, after_ns: int = 0) -> None:
        if self._queue:
            index = self._queue.popleft()
            self._at(self._now + after_ns, partial(self._begin, index, self._now + after_ns))

    def _begin(self, index: int, arrival_ns: int) -> None:
        utterance = self._utterances[index]
        call = self._calls[index] = _Call(utterance, _Player(self._sample_rate, utterance.listener), arrival_ns)
        try:
            self._scheduler.open(
                index,
                self._now,
                feed=utterance.feed,
                max_frames=utterance.frames + 1,
                priority=utterance.priority,
                interactive=utterance.interactive,
            )
        except Overloaded:
            call.outcome.is_refused = True
            self._begin_next()
            return
        for number, (offset_ns, tokens) in enumerate(utterance.pieces, start=1):
            is_last = number == len(utterance.pieces)
            if offset_ns:
                self._at(arrival_ns + offset_ns, partial(self._push, index, tokens, is_last))
            else:
                self._push(index, tokens, is_last)

    def _push(self, index: int, tokens: int, is_last: bool) -> None:
        self._scheduler.push_text(index, tokens, self._now)
        if is_last:
            self._scheduler.end_text(index, self._now)
            self._take_events()

    # ---- time --------------------------------------------------------------------------------------------------------

    def _at(self, at_ns: int, act: Callable[[], None]) -> None:
        heappush(self._inbox, (at_ns, next(self._order), act))

    def _vary(self, duration_ns: int) -> int:
        if self._uniform is None:
            return duration_ns
        # Box-Muller; 1 - u is never 0.
        normal = math.sqrt(-2.0 * math.log(1.0 - self._uniform())) * math.cos(2.0 * math.pi * self._uniform())
        return int(duration_ns * math.exp(self._spread * normal))
