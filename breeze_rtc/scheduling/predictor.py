"""Playback reports and deliveries in, the time at which this listener runs dry out.

Three sources, best first:

1. A sink that paces its sending says when its queue runs empty (`dry_at_ns`).  That is the deadline.
2. A sink whose far end buffers reports the heard position.  The deadline is when the last delivered sample will have
   been heard, minus the path from the sink to the ear; of what that grants beyond 3, `CUSHION_NS` are left to the
   listener, for the jitter that no path delay holds.
3. Without reports, the published method: the first output's time plus the audio sent.  It describes a listener with
   no buffer and no network, so no real one can have heard more (sound is not consumed faster than it lasts), and it
   bounds what a report may claim.  A listener who says that it is always empty gains nothing by it.

A report grows old: from `FADE_NS` on, what it granted beyond the estimate is taken back in steps and a guard put in
its place, until at `STALE_NS` nothing is left of it.  So silence makes a stream more urgent bit by bit, never late,
and never makes it stop.  Drift of the listener's clock needs no model: at 100 ppm it is 0.1 ms per second, and each
report starts anew.

Later deliveries are laid on top of a report as the sink's queue would lay them: at the end, or at their arrival if it
had run dry by then.
"""

from __future__ import annotations

from collections import deque

from breeze_rtc.clock import MS, SECOND, ns_to_samples, samples_to_ns
from breeze_rtc.playback import PlaybackReport

STALE_NS = SECOND
"""A report older than this is no longer trusted at all."""
FADE_NS = 400 * MS
"""A report older than this is trusted less and less; listeners report four times a second or more."""
FADE_STEPS = 4
STALE_GUARD_NS = 100 * MS
"""Subtracted from the estimate that replaces a stale report: the listener was last known to be elsewhere."""
CUSHION_NS = 60 * MS
"""What is not spent of a far listener's own buffer; three packets, as players keep against jitter."""
MAX_PATH_NS = SECOND
"""A longer path is a fault of the report."""
MAX_DRIFT_PPM = 1_000
"""How much faster than ours a listener's clock may be; those of sound cards are within 200."""
MOVE_BOUNDS = tuple(ms * MS for ms in (-500, -200, -100, -50, -20, -5, 5, 20, 50, 100, 200, 500))
"""Reports are counted by how far they moved the deadline, in ns, up to each of these."""
_NEVER = 1 << 62


class Predictor:
    """One listener of one stream.  No report makes it raise.

    Reported positions never go back; what is extrapolated between two reports may be corrected by the second.
    """

    __slots__ = (
        "_at_ns",
        "_began_ns",
        "_deliveries",
        "_dry_ns",
        "_estimate_ns",
        "_granted_ns",
        "_heard",
        "_is_paced",
        "_path_ns",
        "_sample_rate",
        "delivered",
        "fresh_ns",
        "has_report",
        "is_held",
        "stale_ns",
    )

    def __init__(self, sample_rate: int) -> None:
        self._sample_rate = sample_rate
        # Samples handed to the sink.
        self.delivered = 0
        # When the first of them were.
        self._began_ns = 0
        # The latest deliveries: time, duration, and what `delivered` and the estimate were before.  A report speaks
        # of what came before it and is extended by what came after.
        self._deliveries: deque[tuple[int, int, int, int]] = deque(maxlen=64)
        # When a listener without buffer and network runs dry.
        self._estimate_ns = 0

        # The last report that was believed: its time, position and path, and when by it the sound ends.
        self.has_report = False
        self._at_ns = 0
        self._heard = 0
        self._path_ns = 0
        self._dry_ns = 0
        # It spoke of the queue of a sink that paces its sending.
        self._is_paced = False
        # The listener said that it is not playing.  Stays until it says otherwise: a frozen page cannot report.
        self.is_held = False

        # The deadline is fresh_ns until stale_ns; from then on see `fading`.
        self.fresh_ns = 0
        self.stale_ns = _NEVER
        # What a report granted beyond the estimate, and the guard.
        self._granted_ns = 0

    @property
    def fading(self) -> tuple[tuple[int, int], ...]:
        """(since when, deadline) as the last report grows old; each is earlier than the one before."""
        if not self.has_report:
            return ()
        return tuple(
            (
                self.stale_ns + step * (STALE_NS - FADE_NS) // (FADE_STEPS - 1),
                self.fresh_ns - self._granted_ns * (step + 1) // FADE_STEPS,
            )
            for step in range(FADE_STEPS)
        )

    def dry_at(self, now: int) -> int:
        """Deadline of the next chunk: delivered later, the sound breaks.  Meaningless before the first delivery."""
        deadline_ns = self.fresh_ns
        if now >= self.stale_ns:
            for since_ns, faded_ns in self.fading:
                if now < since_ns:
                    break
                deadline_ns = faded_ns
        return deadline_ns

    def changes_at(self, now: int) -> int:
        """When the deadline moves next without any input: the last report will be trusted less."""
        if now < self.stale_ns:
            return self.stale_ns
        return next((since_ns for since_ns, _ in self.fading if now < since_ns), _NEVER)

    def late_ns(self, now: int) -> int:
        """By how much a chunk delivered now comes after the sound has broken; 0 or less if it has not, or in a pause.

        What guards a stale report is a wish to be early, and no reason to call a chunk late.
        """
        if self.is_held or not self.delivered:
            return 0
        dry_ns = self._dry_ns - self._path_ns
        return now - (dry_ns if self._is_trusted(now) else min(dry_ns, self._estimate_ns))

    def heard(self, now: int) -> int:
        """Samples heard by now, extrapolated from the last report and never more than were delivered."""
        if self.is_held:
            return self._heard
        if self.has_report and self._is_trusted(now):
            return min(self.delivered, self._heard + ns_to_samples(max(0, now - self._at_ns), self._sample_rate))
        return max(self._heard, self._heard_at_most(now, self.delivered, self._estimate_ns))

    def deliver(self, samples: int, now: int) -> None:
        """`samples` more were handed to the sink at `now`."""
        duration_ns = samples_to_ns(samples, self._sample_rate)
        if not self.delivered:
            self._began_ns = now
        estimate_ns, dry_ns, arrives_ns = self._estimate_ns, self._dry_ns, now + self._path_ns
        self._deliveries.append((now, duration_ns, self.delivered, estimate_ns))
        self.delivered += samples
        self._estimate_ns = (estimate_ns if estimate_ns > now else now) + duration_ns
        self._dry_ns = (dry_ns if dry_ns > arrives_ns else arrives_ns) + duration_ns
        self._settle()

    def report(self, report: PlaybackReport, now: int) -> int | None:
        """The listener spoke.  Older than the last report: ignored.  From the future: taken as of now.

        Returns by how much that moved the deadline: how wrong the prediction was.  Above 0 there was more time than
        believed.  None where nothing was predicted: before the first sound, and in a pause.
        """
        at_ns = report.at_ns if report.at_ns < now else now
        if self.has_report and at_ns < self._at_ns:
            return None
        expected_ns = self.fresh_ns
        since = []
        if self._deliveries and self._deliveries[-1][0] > at_ns:
            since = [entry for entry in self._deliveries if entry[0] > at_ns]
        _, _, delivered, estimate_ns = since[0] if since else (0, 0, self.delivered, self._estimate_ns)
        heard = min(report.heard_samples, delivered)
        if heard > self._heard:
            most = self._heard_at_most(at_ns, delivered, estimate_ns) + self._gained_by_drift(at_ns)
            self._heard = max(self._heard, min(heard, most))
        was_held = self.is_held
        self.has_report = True
        self._at_ns = at_ns
        self.is_held = not report.is_playing
        unheard_ns = samples_to_ns(max(0, delivered - self._heard), self._sample_rate)
        self._is_paced = report.dry_at_ns is not None
        if report.dry_at_ns is None:
            self._path_ns = min(max(0, report.path_delay_ns), MAX_PATH_NS, self._longest_path(at_ns))
            dry_ns = at_ns + unheard_ns
        else:
            # A queue holds at most what was delivered and not heard; a time beyond that would starve the stream.
            self._path_ns = 0
            dry_ns = max(at_ns, min(report.dry_at_ns, at_ns + unheard_ns))
        for time_ns, duration_ns, _, _ in since:
            dry_ns = max(dry_ns, time_ns + self._path_ns) + duration_ns
        if was_held and not self.is_held:
            # Nothing was consumed in the pause: even without buffer and network, this listener has that much left.
            self._estimate_ns = max(self._estimate_ns, dry_ns - self._path_ns)
        # A paced queue cannot be empty before the listener without network is.
        self._dry_ns = dry_ns if report.dry_at_ns is None else max(dry_ns, self._estimate_ns)
        self._settle()
        return None if was_held or self.is_held or not self.delivered else self.fresh_ns - expected_ns

    def _is_trusted(self, now: int) -> bool:
        return now < self._at_ns + STALE_NS

    def _gained_by_drift(self, at_ns: int) -> int:
        """Samples by which a listener whose clock is fast may be ahead of one whose clock is right."""
        return ns_to_samples(max(0, at_ns - self._began_ns) * MAX_DRIFT_PPM // 1_000_000, self._sample_rate)

    def _longest_path(self, at_ns: int) -> int:
        """What has been heard was sent before that: no path can be longer than the time since."""
        for time_ns, _, delivered, _ in reversed(self._deliveries):
            if delivered < self._heard:
                return max(0, at_ns - time_ns)
        return MAX_PATH_NS

    def _settle(self) -> None:
        if not self.has_report:
            self.fresh_ns = self._estimate_ns
            return
        dry_ns = self._dry_ns - self._path_ns
        self.fresh_ns = dry_ns if self._is_paced else max(min(dry_ns, self._estimate_ns), dry_ns - CUSHION_NS)
        self.stale_ns = self._at_ns + FADE_NS
        # Silence gives no right to be later.
        self._granted_ns = max(0, self.fresh_ns - self._estimate_ns + STALE_GUARD_NS)

    def _heard_at_most(self, at_ns: int, delivered: int, estimate_ns: int) -> int:
        """What the listener without buffer and network has heard of `delivered` samples that end at `estimate_ns`."""
        return max(0, delivered - ns_to_samples(max(0, estimate_ns - at_ns), self._sample_rate))
