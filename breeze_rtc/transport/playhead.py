"""Where the listener is now: reports in, position at the ear out.

A player says: at time T the packet with timestamp R left my jitter buffer, and from there to the loudspeaker it takes
D.  Media leaves the loudspeaker in real time, so at any t

    ticks at the ear = R + 48 (t - T - D) - 312       t, T, D in ms; 312 is the Opus look-ahead (RFC 7845 section 4.2)

and since the sender is a straight line too (tick 960k leaves in slot k), one number says it all: the path delay from
our slot to the ear, `T + D - time_of(R)`, plus the look-ahead.  A report is worth what its own age makes it, however
late it arrives, and when none comes there are steps down, each less sure than the one before:

    playout, context, none   reported within the last second; the word says who measured the device
    held                     no report, or only old ones: the last delay, as sure as this path has been steady
    rtcp                     never a report, yet the receiver's RTCP: half a round trip, its jitter, and a guess
    estimate                 nothing but our own clock

`bench/playout_truth.py` compares all of them with what a loudspeaker got; `docs/playhead.md` has the figures.

What a listener says may be late, stale, missing or nonsense; none of that raises.  No I/O and no clock in here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from breeze_rtc.clock import MS, SECOND, samples_to_ns
from breeze_rtc.media import rtp
from breeze_rtc.media.opus import LOOK_AHEAD_48K
from breeze_rtc.transport.playout import SLOT_TICKS, SlotClock
from breeze_rtc.transport.signaling import Flushed, Report

LOOK_AHEAD_NS = samples_to_ns(LOOK_AHEAD_48K, rtp.RTP_RATE)

DEVICE_DELAY_NS = 40 * MS
"""A loudspeaker nobody measured: what Chromium and Firefox have on a plain sound card (33 to 43 ms)."""

ESTIMATE_NS = 80 * MS
"""Without any word from the listener the path is half a round trip and this: jitter buffer, device, one packet."""

ESTIMATE_ERROR_NS = 300 * MS
RTCP_ERROR_NS = 250 * MS
"""Neither knows of a player that has once been starved: it keeps 300 ms in hand for nine seconds."""

NOT_ADVANCING_NS = 60 * MS
"""Three packets.  A player pulls one each 20 ms; with none for so long it plays what it made up."""

STALE_NS = SECOND
"""A report that old is no measurement any more; the delay it told is held: better than any constant."""

FROZEN_NS = 5 * SECOND
HIDDEN_FROZEN_NS = 2_500 * MS
"""Without a report for so long the page sleeps.  One that said it was hidden gets less time; it reports each second."""

RTCP_ALIVE_NS = 8 * SECOND
"""Chromium sends receiver reports 2.5 to 7.5 s apart.  As long as they come, it is the channel of the reports that is
stuck, not the listener."""

STUCK_NS = SECOND
"""A player whose packet is that old plays nothing: its output is suspended, or no packet reaches it."""

EARLY_NS = 50 * MS
"""How far two clocks may disagree before a time counts as impossible: the page finds its offset within 1 ms."""

LATE_NS = 30 * SECOND
"""How late a report may arrive before its clock counts as wrong: a slow uplink may hold reports up for long."""

MAX_PATH_NS = 30 * SECOND
MAX_DEVICE_NS = 2 * SECOND

MEASURED_ERROR_NS = 12 * MS
MEMORY_NS = 20 * SECOND
"""The path delay may go again where it was so lately, and nobody tells."""

DRIFT_STEPS = 120
DRIFT_LEAST_STEPS = 30
"""Seconds from which the drift is told, at most and at least: in less, 3 ms of noise look like 150 ppm."""
DRIFT_JUMP_NS = 8 * MS

FLUSH_GRACE_TICKS = rtp.RTP_RATE // 2
"""How long after the resume timestamp a page may stay muted before that is the user's wish."""


@dataclass(frozen=True, slots=True)
class ReceiverReport:
    """What a listener's RTP stack says of our packets (RFC 3550 section 6.4.1): they arrive; not their sound."""

    arrived_ticks: int
    """The end of the newest packet that arrived."""
    jitter_ns: int
    """Mean deviation of the packets' arrival."""
    rtt_ns: int | None
    """Round trip; None where it could not be told."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where the ear is."""

    ticks: int
    """Ticks of the call's sound, as it went into the encoder, that left the loudspeaker; never past what left us."""
    at_ns: int
    path_delay_ns: int
    """From a slot's time to the ear."""
    error_ns: int
    """The position is this close, nineteen times of twenty."""
    source: str
    """`playout`, `context`, `none` (reported; the word says who measured the device), `held`, `rtcp` or `estimate`."""
    is_measured: bool
    is_playing: bool


@dataclass(frozen=True, slots=True)
class _Anchor:
    """The newest report that had a position."""

    ticks: int
    # When the page said it, on our clock: what it tells is as old as that, not as its arrival.
    said_ns: int
    pulled_ns: int
    device_ns: int
    error_ns: int
    # Error that each second of extrapolation adds, in ns: more while the player stretches time.
    drift_ns: int
    source: str
    is_advancing: bool


class Playhead:
    """One listener's place in one call.  The same for a browser and for a Python peer."""

    def __init__(self, clock: SlotClock, origin_rtp: int, *, estimate_ns: int = ESTIMATE_NS) -> None:
        """`origin_rtp` is the timestamp that tick 0 had on the wire."""
        self._clock = clock
        self.estimate_ns = estimate_ns
        """Jitter buffer, device and one packet of a listener that never reports.  May be set when it is told."""
        self.origin_rtp = origin_rtp
        # The newest report, None before the first, and when it arrived.
        self._last: Report | None = None
        self._last_at = 0
        self._anchor: _Anchor | None = None
        # Path delay, last measured while the player advanced.
        self._path_ns: int | None = None
        # What it was in the last while before that: (when, delay).
        self._paths: deque[tuple[int, int]] = deque()
        # The newest receiver report, and when one last told of packets that arrived.
        self._rtcp: ReceiverReport | None = None
        self._rtcp_at = 0
        self._drift = _Drift()
        # Round trip to the listener: the least of the last few, for a stack that was busy adds to it.
        self.rtt_ns: int | None = None
        self._rtts_ns: deque[int] = deque(maxlen=4)
        # The last position told; positions do not go back behind it.
        self._floor_ticks = 0
        # Where the ear stopped, while nothing is played.
        self._stopped_ticks: int | None = None
        # Packets before this left on a connection that is gone.
        self._connection_ticks = 0
        # A page that is muted before this was muted by our flush.
        self._resume_ticks = -FLUSH_GRACE_TICKS
        # What became of the reports.
        self.accepted = 0
        self.old = 0
        self.impossible = 0

    # --- inputs

    def report(self, report: Report, sent_ticks: int, now: int) -> bool:
        """Take a report that arrived at `now`, when the slots before `sent_ticks` had left.

        Returns whether it gave a position.  False too for a report that is older than the newest (ignored), that has no
        timestamp yet, or whose values cannot be (counted; what it says of mute and volume still holds).
        """
        if self._last is not None and report.seq <= self._last.seq:
            self.old += 1
            return False
        previous, was_playing = self._last, self.is_playing(now)
        stopped = self._ticks(now, sent_ticks) if was_playing else self._stopped_ticks
        self._last, self._last_at = report, now
        anchor = self._anchor_of(report, previous, sent_ticks, now)
        if anchor is not None:
            self.accepted += 1
            if self._anchor is None:
                # Told so far were estimates; the first measurement may lie behind them.
                self._floor_ticks, stopped = 0, None
            self._anchor = anchor
            if anchor.is_advancing:
                self._measured(self._path_of(anchor), anchor.said_ns, report)
        if self.is_playing(now):
            self._stopped_ticks = None
        else:
            self._stopped_ticks = stopped if stopped is not None else self._ticks(now, sent_ticks)
        return anchor is not None

    def receiver_report(self, report: ReceiverReport, now: int) -> None:
        """Take what the listener's RTP stack said at `now`."""
        if self._rtcp is None or report.arrived_ticks > self._rtcp.arrived_ticks:
            self._rtcp_at = now
        self._rtcp = report
        if report.rtt_ns is not None and 0 <= report.rtt_ns < 10 * SECOND:
            self._rtts_ns.append(report.rtt_ns)
            self.rtt_ns = min(self._rtts_ns)

    def flush(self, resume_ticks: int) -> None:
        """The page was told to mute until `resume_ticks`.  The position may go back once."""
        self._resume_ticks = resume_ticks
        self._floor_ticks = 0

    def reconnect(self, sent_ticks: int) -> None:
        """The listener comes on a new connection, on which slots from `sent_ticks` on leave.

        It has played none yet, and nothing is known of the way to it.  The position may go back once.
        """
        self._last = self._anchor = self._path_ns = self._stopped_ticks = self._rtcp = self.rtt_ns = None
        self._floor_ticks = 0
        self._paths.clear()
        self._rtts_ns.clear()
        self._drift = _Drift()
        self._connection_ticks = sent_ticks

    def flushed(self, message: Flushed, sent_ticks: int) -> int | None:
        """The ticks after which the listener heard nothing more; None where the page's word cannot be."""
        ticks = rtp.unwrap(message.rtp, sent_ticks, self.origin_rtp) - LOOK_AHEAD_48K
        if not 0 <= ticks <= sent_ticks:
            self.impossible += 1
            return None
        return ticks

    # --- outputs

    @property
    def has_played(self) -> bool:
        """Whether the listener has pulled a packet out of its jitter buffer: from now on sound is heard."""
        return self._anchor is not None

    @property
    def last(self) -> Report | None:
        """The newest report."""
        return self._last

    @property
    def drift_ppm(self) -> float | None:
        """How much faster the listener's loudspeaker runs than our clock; None where it cannot be told (yet).

        The player adds and drops samples to make up for it, so the path delay does not run away.
        """
        return self._drift.ppm

    def server_ns(self, t_ms: float) -> int | None:
        """A time of the page's clock on ours; None before the first report."""
        return round((t_ms + self._last.offset_ms) * MS) if self._last is not None else None

    def is_playing(self, now: int) -> bool:
        """False while nothing reaches the ear: muted, paused, silent, suspended, or asleep.

        A page in the background still sounds, so `visible` alone says nothing; it only shortens the patience with a
        page that stops reporting.  One that is silent for longer sleeps, unless RTCP says that its packets arrive.
        """
        last = self._last
        if last is None:
            return True
        if now > self._awake_until():
            return False
        if last.paused or last.volume <= 0:
            return False
        if last.muted and not self._is_flushing():
            return False
        return not (last.rtp is not None and last.age_ms * MS > STUCK_NS)

    def position(self, now: int, sent_ticks: int) -> Position:
        """Where the ear is at `now`, when the slots before `sent_ticks` have left.

        Positions do not go back, but for a flush, for the first measurement after estimates, and for a new connection.
        """
        path_ns, error_ns, source, is_measured = self._path(now)
        ticks = self._floor_ticks = self._ticks(now, sent_ticks)
        return Position(ticks, now, path_ns, error_ns, source, is_measured, self.is_playing(now))

    def arrives_at(self, ticks: int, now: int) -> int:
        """When `ticks` reach the ear, as things stand at `now`."""
        return self._clock.time_of(ticks) + self._path(now)[0]

    # ---

    def _ticks(self, now: int, sent_ticks: int) -> int:
        is_playing = self.is_playing(now)
        if not is_playing and self._stopped_ticks is not None:
            return max(self._floor_ticks, self._stopped_ticks)
        # A page that went to sleep was heard until our patience ended, at the most.
        heard_until = now if is_playing or self._last is None else min(now, self._awake_until())
        path_ns, _, _, is_measured = self._path(now)
        ticks = self._clock.ticks_at(heard_until - path_ns)
        anchor = self._anchor
        if anchor is not None and not anchor.is_advancing and is_measured:
            ticks = min(ticks, anchor.ticks + SLOT_TICKS - LOOK_AHEAD_48K)
        return max(self._floor_ticks, min(ticks, sent_ticks))

    def _awake_until(self) -> int:
        """Until when a page that says nothing counts as awake."""
        assert self._last is not None
        until = self._last_at + (FROZEN_NS if self._last.visible else HIDDEN_FROZEN_NS)
        # A receiver report from the time of the page's last word proves nothing.
        if self._rtcp is not None and self._rtcp_at > self._last_at + STALE_NS:
            until = max(until, self._rtcp_at + RTCP_ALIVE_NS)
        return until

    def _path(self, now: int) -> tuple[int, int, str, bool]:
        """Path delay, its error, its source, and whether it is measured."""
        anchor = self._anchor
        if anchor is None:
            half_rtt_ns = (self.rtt_ns or 0) // 2
            if self._rtcp is not None:
                path_ns = half_rtt_ns + self.estimate_ns + self._rtcp.jitter_ns + LOOK_AHEAD_NS
                return path_ns, RTCP_ERROR_NS + self._rtcp.jitter_ns, "rtcp", False
            return half_rtt_ns + self.estimate_ns + LOOK_AHEAD_NS, ESTIMATE_ERROR_NS, "estimate", False
        if self._path_ns is None:
            return self._path_of(anchor), ESTIMATE_ERROR_NS, "estimate", False
        age_ns = max(0, now - anchor.said_ns)
        if age_ns > STALE_NS:
            swing_ns = max(path for _, path in self._paths) - min(path for _, path in self._paths)
            error_ns = anchor.error_ns + swing_ns + 10 * MS * age_ns // SECOND
            return self._path_ns, min(ESTIMATE_ERROR_NS, error_ns), "held", False
        path_ns = self._path_of(anchor) if anchor.is_advancing else self._path_ns
        error_ns = anchor.error_ns + anchor.drift_ns * age_ns // SECOND
        return path_ns, error_ns, anchor.source, True

    def _path_of(self, anchor: _Anchor) -> int:
        delay_ns = anchor.pulled_ns + anchor.device_ns - self._clock.time_of(anchor.ticks)
        return max(0, delay_ns) + LOOK_AHEAD_NS

    def _measured(self, path_ns: int, said_ns: int, report: Report) -> None:
        """The path delay was `path_ns` when the page said so."""
        self._path_ns = path_ns
        self._paths.append((said_ns, path_ns))
        while said_ns - self._paths[0][0] > MEMORY_NS:
            self._paths.popleft()
        self._drift.add(path_ns, said_ns, report)

    def _is_flushing(self) -> bool:
        seen = self._anchor.ticks if self._anchor is not None else 0
        return seen < self._resume_ticks + FLUSH_GRACE_TICKS

    def _anchor_of(self, report: Report, previous: Report | None, sent_ticks: int, now: int) -> _Anchor | None:
        if report.rtp is None or report.rtp_t_ms is None:
            return None
        ticks = rtp.unwrap(report.rtp, sent_ticks, self.origin_rtp)
        if 0 <= ticks < self._connection_ticks:
            return None
        age_ns = round((report.t_ms - report.rtp_t_ms) * MS)
        # A packet that has not left cannot be played; nor can one be pulled after the report that tells of it, or
        # before one that was told already.
        is_back = self._anchor is not None and ticks < self._anchor.ticks
        if not 0 <= ticks < sent_ticks or not -EARLY_NS <= age_ns <= MAX_PATH_NS or is_back:
            self.impossible += 1
            return None
        error_ns = MEASURED_ERROR_NS
        said_ns = round((report.t_ms + report.offset_ms) * MS)
        if not -EARLY_NS <= now - said_ns <= LATE_NS:
            # The clocks are not joined (yet): say it was sent half a round trip ago.
            said_ns = now - (self.rtt_ns or 0) // 2
            error_ns += 50 * MS
        pulled_ns = said_ns - age_ns
        left_ns = self._clock.time_of(ticks)
        if not -EARLY_NS <= pulled_ns - left_ns <= MAX_PATH_NS:
            self.impossible += 1
            return None
        device_ns, source = round(report.device_delay_ms * MS), report.device_delay_source
        if source == "none" or not 0 <= device_ns <= MAX_DEVICE_NS:
            device_ns, source = DEVICE_DELAY_NS, "none"
        error_ns += {"playout": 0, "context": 10 * MS}.get(source, 60 * MS)
        is_stretching = previous is not None and (
            report.inserted != previous.inserted or report.removed != previous.removed
        )
        return _Anchor(
            ticks=ticks,
            said_ns=min(said_ns, now),
            pulled_ns=pulled_ns,
            device_ns=device_ns,
            error_ns=error_ns,
            # Normal time stretching runs at up to 1.1 times; sound card clocks differ by less than 1 ms in a second.
            drift_ns=(100 if is_stretching else 5) * MS,
            source=source,
            is_advancing=max(age_ns, round(report.age_ms * MS)) <= NOT_ADVANCING_NS,
        )


class _Drift:
    """The slope of the path delay while the player leaves the sound as it is."""

    def __init__(self) -> None:
        # The delay about a second ago: when, how much, and the player's counters.
        self._before: tuple[int, int, tuple[int, ...]] | None = None
        # By how much it changed, and in which time, over the seconds in which no counter moved.
        self._steps: deque[tuple[int, int]] = deque(maxlen=DRIFT_STEPS)

    def add(self, path_ns: int, at_ns: int, report: Report) -> None:
        counters = (report.inserted, report.removed, report.concealed)
        if self._before is not None:
            at_before, path_before, counters_before = self._before
            if at_ns - at_before < SECOND:
                return
            step_ns = path_ns - path_before
            # The device may stall or be changed, and no counter says so.
            if counters == counters_before and abs(step_ns) < DRIFT_JUMP_NS:
                self._steps.append((step_ns, at_ns - at_before))
        self._before = at_ns, path_ns, counters

    @property
    def ppm(self) -> float | None:
        if len(self._steps) < DRIFT_LEAST_STEPS:
            return None
        return -1e6 * sum(step for step, _ in self._steps) / sum(time for _, time in self._steps)
