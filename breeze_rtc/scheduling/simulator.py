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

from breeze_rtc.clock import MS, SECOND, ns_to_samples, samples_to_ns
from breeze_rtc.errors import Overloaded
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.scheduling.costs import CostKey
from breeze_rtc.scheduling.machines import SimulatedCosts, cost_ns
from breeze_rtc.scheduling.metrics import Delivery, Ending
from breeze_rtc.scheduling.scheduler import Scheduler
from breeze_rtc.scheduling.step import (
    AudioReady,
    DeadlineMissed,
    RowResult,
    Stage,
    Step,
    StepResult,
    StreamFailed,
    StreamFinished,
    StreamRefused,
)
from breeze_rtc.scheduling.stream import NEVER, Feed, Priority


@dataclass(frozen=True, slots=True)
class SimulatedListener:
    """How one listener hears and reports.  The defaults hear at once, without a buffer, and say nothing."""

    network_ns: int = 0
    """From our sink to the player; and from the client to us, for requests and reports."""
    jitter_ns: int = 0
    """Up to this much more for a chunk; chunks stay in order."""
    buffer_ns: int = 0
    """The player starts this long after the first chunk has come: its jitter buffer, or a click that came late."""
    drift_ppm: int = 0
    """How much faster than ours the loudspeaker's clock is."""
    report_every_ns: int = 0
    """0: no reports."""
    stalls: tuple[tuple[int, int], ...] = ()
    """(start, duration) since the first chunk was sent: what is sent meanwhile, either way, arrives at the end."""
    pause: tuple[int, int] | None = None
    """(start, duration) since the player started: it stands still, and says so at once."""
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
    """Open loop: when it reaches us.  Ignored in a closed loop."""
    feed: Feed = Feed.PREFIX
    priority: Priority = Priority.LIVE
    interactive: bool = True
    listener: SimulatedListener = SimulatedListener()


@dataclass(frozen=True, slots=True)
class LazyCapture:
    """What a server that captures graphs while it serves suffers: now and then a shape is met for the first time."""

    every_steps: int
    """One step in so many, on average."""
    stall_ns: int = 350 * MS


@dataclass(frozen=True, slots=True)
class Takeover:
    """What a server that captures its graphs while it serves gains: they take over between two steps."""

    after_steps: int
    costs: SimulatedCosts
    """What steps take from then on."""
    measured: Mapping[CostKey, int] = field(default_factory=dict)
    """What the scheduler is told of that, ns; nothing: it has to find out."""


@dataclass(slots=True)
class Outcome:
    """What became of one utterance."""

    arrival_ns: int
    """When it reached us."""
    sent_ns: int
    """When its client sent it."""
    ending: Ending = Ending.UNKNOWN
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    """(time, duration) of each chunk at the listener."""
    first_packet_ns: int | None = None
    """From our having the request to the first chunk handed to the sink; without the network.  None: never."""
    true_gaps: int = 0
    """Times the simulated player ran dry before the end."""
    true_gap_ns: int = 0
    missed_deadlines: int = 0
    frames: int = 0
    """Frames generated, decoded or not."""
    heard_samples: int | None = None
    """Where an interrupted listener had got to."""
    samples: int = 0
    """Decoded."""
    chunks: list[int] = field(default_factory=list)
    """Frames of each chunk."""
    most_ahead_ns: int = 0
    """The longest stretch of made and unheard sound at any delivery, as an ideal listener would have it."""

    def delivery(self, sample_rate: int, frame_samples: int) -> Delivery:
        """This utterance as its client saw it, and what a player and an engine add to that."""
        made_ns = samples_to_ns(self.frames * frame_samples, sample_rate)
        heard_ns = None if self.heard_samples is None else samples_to_ns(self.heard_samples, sample_rate)
        return Delivery(
            sent_ns=self.sent_ns,
            chunks=tuple(self.arrivals),
            ending=self.ending,
            gap_ns=self.true_gap_ns if self.arrivals else None,
            made_ns=made_ns,
            heard_ns=heard_ns,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What a simulation gave."""

    outcomes: list[Outcome]
    """In the order of the utterances; those that never began are left out."""
    end_ns: int
    """When the last of it happened."""
    steps: dict[Stage, int]
    busy_ns: dict[Stage, int]
    """Time the machine spent in each stage."""


class _Player:
    """A player with its buffer, advanced only when somebody looks."""

    __slots__ = (
        "_buffer_ns",
        "_drift_ppm",
        "_dry_since",
        "_now",
        "_pause",
        "arrived_ns",
        "gap_ns",
        "gaps",
        "heard_ns",
        "starts_at",
    )

    def __init__(self, listener: SimulatedListener) -> None:
        self._buffer_ns = listener.buffer_ns
        self._drift_ppm = listener.drift_ppm
        self._pause = listener.pause
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
            self.starts_at = now + self._buffer_ns
        if self._dry_since is not None:
            self.gaps += 1
            assert now >= self._dry_since
            self.gap_ns += now - self._dry_since
            self._dry_since = None
        self.arrived_ns += duration_ns

    def advance(self, now: int) -> None:
        """Play up to `now`."""
        if self.starts_at is not None and now > self.starts_at:
            begin = max(self._now, self.starts_at)
            played_ns = now - begin
            if self._pause is not None:
                start = self.starts_at + self._pause[0]
                played_ns -= max(0, min(now, start + self._pause[1]) - max(begin, start))
            if self._drift_ppm:
                played_ns += played_ns * self._drift_ppm // 1_000_000
            left_ns = self.arrived_ns - self.heard_ns
            if played_ns > left_ns and self._dry_since is None:
                self._dry_since = now - (played_ns - left_ns)
            self.heard_ns += min(played_ns, left_ns)
        self._now = max(self._now, now)

    def is_paused(self, now: int) -> bool:
        pause = self._pause
        return pause is not None and self.starts_at is not None and 0 <= now - self.starts_at - pause[0] < pause[1]


class _Call:
    """One utterance on its way: what the simulator knows and the scheduler does not."""

    __slots__ = (
        "encoded",
        "first_sent_ns",
        "ideal_dry_ns",
        "is_listened_to",
        "is_over",
        "last_arrival_ns",
        "on_its_way",
        "outcome",
        "player",
        "tokens",
        "utterance",
    )

    def __init__(self, utterance: Utterance, now: int) -> None:
        self.utterance = utterance
        self.player = _Player(utterance.listener)
        self.outcome = Outcome(arrival_ns=now, sent_ns=now - utterance.listener.network_ns)
        self.tokens = sum(tokens for _, tokens in utterance.pieces)
        self.encoded = 0
        # Chunks sent that have not arrived, and when the last of them does.
        self.on_its_way = 0
        self.last_arrival_ns = 0
        self.first_sent_ns = 0
        self.ideal_dry_ns = 0
        # The listener hears the rest, and nothing more will be made.
        self.is_listened_to = False
        # The listener has interrupted or heard everything.
        self.is_over = False


def simulate(
    scheduler: Scheduler,
    utterances: Iterable[Utterance],
    *,
    costs: SimulatedCosts,
    sample_rate: int,
    frame_samples: int,
    concurrency: int | None = None,
    until_heard: bool = False,
    uniform: Callable[[], float] | None = None,
    spread: float = 0.05,
    captures: LazyCapture | None = None,
    takeover: Takeover | None = None,
) -> Run:
    """Speak `utterances` in virtual time.

    concurrency: closed loop with so many streams, the next begins when one has been made in full (until_heard: heard in
    full) or was interrupted; None: open loop, each comes at its `arrival_ns`.  uniform: gives numbers in [0, 1), for
    network jitter, for step times that are log-normal around the cost table with a deviation of `spread`, and for
    `captures`; None: nothing varies.
    """
    return _Simulation(
        scheduler,
        list(utterances),
        costs=costs,
        sample_rate=sample_rate,
        frame_samples=frame_samples,
        concurrency=concurrency,
        until_heard=until_heard,
        uniform=uniform,
        spread=spread,
        captures=captures,
        takeover=takeover,
    ).run()


class _Simulation:
    def __init__(
        self,
        scheduler: Scheduler,
        utterances: list[Utterance],
        *,
        costs: SimulatedCosts,
        sample_rate: int,
        frame_samples: int,
        concurrency: int | None,
        until_heard: bool,
        uniform: Callable[[], float] | None,
        spread: float,
        captures: LazyCapture | None,
        takeover: Takeover | None,
    ) -> None:
        self._scheduler = scheduler
        self._utterances = utterances
        self._costs = costs
        self._sample_rate = sample_rate
        self._frame_samples = frame_samples
        self._until_heard = until_heard
        self._uniform = uniform
        self._spread = spread
        self._captures = captures
        # Until it has happened.
        self._takeover = takeover
        self._now = 0
        self._steps = dict.fromkeys(Stage, 0)
        self._busy_ns = dict.fromkeys(Stage, 0)
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

    def run(self) -> Run:
        scheduler, inbox = self._scheduler, self._inbox
        while True:
            while inbox and inbox[0][0] <= self._now:
                heappop(inbox)[2]()
            if self._takeover is not None and sum(self._steps.values()) >= self._takeover.after_steps:
                self._take_over(self._takeover)
            step = scheduler.next_step(self._now)
            # Who waited for room may have begun, or been refused.
            self._take_events()
            if step is not None:
                self._run(step)
                continue
            # Those who waited for room too long are told so.
            self._take_events()
            wake_at = scheduler.wake_at()
            assert wake_at is None or wake_at > self._now, "the scheduler asked to be woken and had nothing to do"
            then = min(inbox[0][0] if inbox else NEVER, NEVER if wake_at is None else wake_at)
            if then == NEVER:
                break
            self._now = then
        return Run(
            outcomes=[self._calls[index].outcome for index in range(len(self._utterances)) if index in self._calls],
            end_ns=self._now,
            steps=self._steps,
            busy_ns=self._busy_ns,
        )

    # ---- the machine -------------------------------------------------------------------------------------------------

    def _run(self, step: Step) -> None:
        stage = step.stage
        units = step.rows[0].count if stage is Stage.CODEC else sum(row.count for row in step.rows)
        duration_ns = self._vary(cost_ns(self._costs, stage, step.bucket, units))
        self._now += duration_ns
        self._steps[stage] += 1
        self._busy_ns[stage] += duration_ns
        rows = tuple(self._result(stage, row.stream, row.start, row.count) for row in step.rows)
        self._scheduler.step_done(step, StepResult(rows, duration_ns), self._now)
        self._take_events()

    def _take_over(self, takeover: Takeover) -> None:
        self._takeover = None
        self._costs = takeover.costs
        for stage in Stage:
            times = {(bucket, size): ns for (of, bucket, size), ns in takeover.measured.items() if of is stage}
            if times:
                self._scheduler.measured(stage, times, self._now)

    def _result(self, stage: Stage, stream: int, start: int, units: int) -> RowResult:
        call = self._calls[stream]
        if stage is Stage.DEPTH:
            call.outcome.frames += 1
            return RowResult(stream)
        if stage is Stage.CODEC:
            call.outcome.chunks.append(units)
            return RowResult(stream, samples=units * self._frame_samples)
        if stage is Stage.TEXT:
            call.encoded += units
            return RowResult(stream)
        utterance = call.utterance
        frame = start if stage is Stage.BACKBONE else 0
        is_starved = False
        if utterance.feed is Feed.PER_FRAME and call.encoded < call.tokens:
            # Text is spoken evenly; the next frame needs the token after the one it speaks.
            is_starved = call.encoded < min(1 + (frame + 1) * call.tokens // utterance.frames, call.tokens)
        return RowResult(stream, ended=frame >= utterance.frames, wants_text=is_starved)

    def _vary(self, duration_ns: int) -> int:
        if self._uniform is None:
            return duration_ns
        # Box-Muller; 1 - u is never 0.
        normal = math.sqrt(-2.0 * math.log(1.0 - self._uniform())) * math.cos(2.0 * math.pi * self._uniform())
        duration_ns = int(duration_ns * math.exp(self._spread * normal))
        if self._captures is not None and self._uniform() * self._captures.every_steps < 1.0:
            duration_ns += self._captures.stall_ns
        return duration_ns

    def _take_events(self) -> None:
        for event in self._scheduler.events():
            call = self._calls[event.stream]
            if isinstance(event, AudioReady):
                self._send(event.stream, call, event.samples)
            elif isinstance(event, DeadlineMissed):
                call.outcome.missed_deadlines += 1
            elif isinstance(event, StreamFinished):
                if call.outcome.ending is Ending.UNKNOWN:
                    call.outcome.ending = Ending.COMPLETE
                call.is_listened_to = True
                if not self._until_heard:
                    self._begin_after(call)
                elif not call.on_its_way:
                    self._listen(event.stream, call, self._now)
            elif isinstance(event, StreamRefused):
                call.outcome.ending = Ending.REFUSED
                self._begin_next(int(event.retry_after_s * SECOND))
            elif isinstance(event, StreamFailed):
                call.outcome.ending = Ending.FAILED
                self._begin_after(call)

    # ---- the listeners -----------------------------------------------------------------------------------------------

    def _send(self, stream: int, call: _Call, samples: int) -> None:
        outcome, listener = call.outcome, call.utterance.listener
        duration_ns = samples_to_ns(samples, self._sample_rate)
        if outcome.first_packet_ns is None:
            outcome.first_packet_ns = self._now - outcome.arrival_ns
            call.first_sent_ns = self._now
            if listener.report_every_ns:
                then = self._now + listener.report_every_ns
                self._at(then, partial(self._report, stream, call, then))
        call.ideal_dry_ns = max(call.ideal_dry_ns, self._now) + duration_ns
        outcome.most_ahead_ns = max(outcome.most_ahead_ns, call.ideal_dry_ns - self._now)
        jitter_ns = int(self._uniform() * listener.jitter_ns) if listener.jitter_ns and self._uniform else 0
        arrival = max(call.last_arrival_ns, _through(call, self._now) + listener.network_ns + jitter_ns)
        call.last_arrival_ns = arrival
        call.on_its_way += 1
        outcome.samples += samples
        outcome.arrivals.append((arrival, duration_ns))
        self._at(arrival, partial(self._arrive, stream, call, duration_ns, arrival))

    def _arrive(self, stream: int, call: _Call, duration_ns: int, at_ns: int) -> None:
        call.on_its_way -= 1
        if call.is_over:
            return
        player, listener = call.player, call.utterance.listener
        is_first = player.starts_at is None
        player.arrive(duration_ns, at_ns)
        call.outcome.true_gaps, call.outcome.true_gap_ns = player.gaps, player.gap_ns
        if is_first and listener.pause is not None and listener.report_every_ns:
            assert player.starts_at is not None
            begins_at = player.starts_at + listener.pause[0]
            for at in (begins_at, begins_at + listener.pause[1]):
                self._at(at, partial(self._say, stream, call, at))
        if self._until_heard and not call.on_its_way:
            self._listen(stream, call, at_ns)
        elif listener.barge_in_samples is not None:
            limit_ns = samples_to_ns(listener.barge_in_samples, self._sample_rate)
            if player.arrived_ns - duration_ns < limit_ns <= player.arrived_ns:
                self._listen(stream, call, at_ns)

    def _listen(self, stream: int, call: _Call, at_ns: int) -> None:
        """Interrupt at the moment the position is heard, or go when all has been; look again when that may be so."""
        if call.is_over:
            return
        player, limit = call.player, call.utterance.listener.barge_in_samples
        player.advance(at_ns)
        limit_ns = NEVER if limit is None else samples_to_ns(limit, self._sample_rate)
        if player.heard_ns >= limit_ns:
            call.is_over = True
            call.outcome.heard_samples = limit
            # The position is known where it is heard; the engine hears of it one way later.
            self._at(at_ns + call.utterance.listener.network_ns, partial(self._interrupt, stream, call))
            return
        if player.arrived_ns < limit_ns:
            if call.on_its_way or not call.is_listened_to or not self._until_heard:
                return
            limit_ns = player.arrived_ns
            if player.heard_ns >= limit_ns:
                call.is_over = True
                self._begin_after(call)
                return
        left_ns = (limit_ns - player.heard_ns) * 1_000_000 // (1_000_000 + call.utterance.listener.drift_ppm)
        then = max(at_ns + MS, max(at_ns, player.starts_at or 0) + left_ns)
        self._at(then, partial(self._listen, stream, call, then))

    def _interrupt(self, stream: int, call: _Call) -> None:
        is_begun = call.outcome.ending is Ending.COMPLETE and not self._until_heard
        call.outcome.ending = Ending.INTERRUPTED
        self._scheduler.cancel(stream, self._now)
        if not is_begun:
            self._begin_next()

    def _report(self, stream: int, call: _Call, at_ns: int) -> None:
        if not call.is_over and not call.is_listened_to:
            self._say(stream, call, at_ns)
            then = at_ns + call.utterance.listener.report_every_ns
            self._at(then, partial(self._report, stream, call, then))

    def _say(self, stream: int, call: _Call, at_ns: int) -> None:
        """The player says where it is at `at_ns`, which is not later than now: the machine may have been at work."""
        if call.is_over or call.is_listened_to:
            return
        listener, player = call.utterance.listener, call.player
        player.advance(at_ns)
        report = PlaybackReport(
            stream=stream,
            heard_samples=ns_to_samples(player.heard_ns, self._sample_rate),
            at_ns=at_ns,
            path_delay_ns=listener.network_ns,
            is_playing=not player.is_paused(at_ns),
        )
        arrival = _through(call, at_ns) + listener.network_ns
        self._at(arrival, lambda: self._scheduler.report(report, self._now))

    # ---- arrivals ----------------------------------------------------------------------------------------------------

    def _begin_after(self, call: _Call) -> None:
        """The caller has to learn of the end, and the next request has to come here: it does not arrive in step with
        us.
        """
        self._begin_next(2 * call.utterance.listener.network_ns)

    def _begin_next(self, after_ns: int = 0) -> None:
        if self._queue:
            index = self._queue.popleft()
            self._at(self._now + after_ns, partial(self._begin, index, self._now + after_ns))

    def _begin(self, index: int, arrival_ns: int) -> None:
        utterance = self._utterances[index]
        call = self._calls[index] = _Call(utterance, arrival_ns)
        try:
            self._scheduler.open(
                index,
                self._now,
                feed=utterance.feed,
                max_frames=utterance.frames + 1,
                priority=utterance.priority,
                interactive=utterance.interactive,
            )
        except Overloaded as refusal:
            call.outcome.ending = Ending.REFUSED
            self._begin_next(int(refusal.retry_after_s * SECOND))
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

    def _at(self, at_ns: int, act: Callable[[], None]) -> None:
        heappush(self._inbox, (at_ns, next(self._order), act))


def _through(call: _Call, at_ns: int) -> int:
    """When what is put on the way at `at_ns` can move: now, or when the network is there again."""
    for start, length in call.utterance.listener.stalls:
        if start <= at_ns - call.first_sent_ns < start + length:
            return call.first_sent_ns + start + length
    return at_ns
