"""Who can run what now, and how much time each has to spare.

Most streams that are generated ahead rest most of the time.  The survey knows of each that *rests* when it must be
looked at again: when it must begin its next chunk, when its last report is trusted less, or (NEVER) when something
happens to it.  Of those that are *filling* a chunk only slack and chunk are in question; the others are *awake*.
"""

from __future__ import annotations

from heapq import heappop, heappush
from operator import attrgetter

from breeze_rtc.clock import MS
from breeze_rtc.scheduling.chunking import flush_at, largest_rung, longest_chunk
from breeze_rtc.scheduling.forecast import Forecast
from breeze_rtc.scheduling.policy import Policy
from breeze_rtc.scheduling.stream import NEVER, Stream

by_slack = attrgetter("slack_ns", "id")

LEAST_LEAD_SHARE = 2
"""A resting stream waits for others to begin a chunk with it until one part in this many of the lead cap is left ..."""
LEAST_LEAD_CHUNKS = 4
"""... or the time that so many such chunks take: the slower the machine, the longer it may stumble."""
STRAINED_LEAD_PERCENT = 67
"""Of the lead cap, when there is little room.  More than half: the largest chunk still ends below it."""
LEAST_LEAD_CAP_NS = 480 * MS
"""The lead cap of a machine that has nothing else to do and never stumbles.  Half of it is always there when the next
chunk is begun: what a process may be kept from its processor for without anybody hearing it."""
AHEAD = 3
"""The lead is what it would have to be with so many times as many streams: it is made while there is time for it.
Twice would throw less away, and a first packet among 16 would wait for 2 ms more: small chunks are more steps."""


class Work:
    """What one look at the streams found."""

    __slots__ = (
        "begins",
        "codec",
        "codec_spare_ns",
        "fills",
        "first_sound_ns",
        "frameless",
        "in_danger_below_ns",
        "new",
        "one_must_begin",
        "rescue_ns",
        "rows_soon",
        "sizes",
        "text",
        "tightest_ns",
    )

    def __init__(self) -> None:
        # Predicted time of a frame step that carries those who need it soon.
        self.rescue_ns = 0
        # The least slack of all who have spoken, those whose step is out included.
        self.tightest_ns = NEVER
        # How long the codec may be kept from the chunks that are due.
        self.codec_spare_ns = NEVER
        # Predicted time until all first sounds that wait would be made; None when none waits.
        self.first_sound_ns: int | None = None
        # Streams with less slack than this keep a first sound waiting.
        self.in_danger_below_ns = -NEVER
        # Not spoken yet, and something to run.
        self.new: list[Stream] = []
        # Spoken: text to encode; frames to decode, least slack first; a frame to start, with none in hand or with some.
        self.text: list[Stream] = []
        self.codec: list[Stream] = []
        # The same by the size of the chunk, the size whose turn it is first.
        self.sizes: dict[int, list[Stream]] = {}
        self.begins: list[Stream] = []
        self.fills: list[Stream] = []
        # Those who are owed sound and have no frame in hand, and the rows of those who need one soon.
        self.frameless: list[Stream] = []
        self.rows_soon = 0
        # Somebody cannot wait any longer for others to begin a chunk with it.
        self.one_must_begin = False


class Survey:
    """The open streams, by whether they must be looked at."""

    def __init__(self, policy: Policy, forecast: Forecast, *, frame_ns: int) -> None:
        """frame_ns: what one codec frame lasts."""
        self._policy = policy
        # Interactive streams are made at most this far ahead of the ear, and what that was at the last look.
        self.lead_cap_ns = policy.lead_cap_ns
        self._looked_with_cap_ns = policy.lead_cap_ns or 0
        self._is_strained = False
        self._flushes_early = policy.flushes_early
        self._forecast = forecast
        self._frame_ns = frame_ns
        # Frames of the largest chunk that somebody who may interrupt ever gets.
        self.longest_interactive = longest_chunk(policy.ladder, frame_ns, policy.lead_cap_ns)
        # The same with the lead that is kept now.
        self._longest_now = self.longest_interactive
        # The largest chunk that so many frames fill.
        self._rungs = [largest_rung(policy.ladder, frames) for frames in range(policy.ladder[-1] + 1)]
        # Each open stream is in one of these: to be looked at with care; with frames in hand, text enough and nothing
        # in its way, so that only its slack and its chunk are in question; at rest.
        self._awake: dict[int, Stream] = {}
        self._filling: dict[int, Stream] = {}
        self._resting: dict[int, Stream] = {}
        # (time, stream id), the earliest first; out of date where it is not the `rests_until` of the stream.
        self._alarms: list[tuple[int, int]] = []
        # Predicted time with all open streams in it: of one frame, of a one-frame codec step, and of those sizes that
        # somebody asked for; and whether a chunk need not be begun as soon as it may.
        self.frame_cost_ns = 0
        self.codec_cost_ns = 0
        self._chunk_costs_ns: dict[int, int] = {}
        self._rests_long = False
        # How long before the deadline a chunk is sent that would be full too late.
        self._flush_ns = 0
        # How much sound is left when a stream with a listener must begin a chunk, by its frames, and the most.
        self._keeps_ns: dict[int, int] = {}
        self._longest_keep_ns = NEVER
        self._costs_are_for = (0, -1)

    def touch(self, s: Stream) -> None:
        """The stream is new, or something happens to it: look at it at the next decision."""
        if s.rests_until:
            del self._resting[s.id]
            s.rests_until = 0
        else:
            self._filling.pop(s.id, None)
        self._awake[s.id] = s

    def heard_from(self, s: Stream) -> None:
        """The stream's listener reported."""
        if s.rests_until or s.listener.is_held:
            self.touch(s)

    def strain(self, *, is_strained: bool) -> None:
        """Somebody began for whom there was little room, or has left: the others keep less sound in hand, or as much
        as before.
        """
        if is_strained is not self._is_strained:
            self._is_strained = is_strained
            self._costs_are_for = (0, -1)
            for s in list(self._resting.values()):
                self.touch(s)

    def forget(self, s: Stream) -> None:
        """The stream takes part in nothing any more."""
        self._awake.pop(s.id, None)
        self._filling.pop(s.id, None)
        self._resting.pop(s.id, None)

    def look(self, now: int) -> Work:
        """Sort the streams by what they can do, and find their slack.  Every stream that is due is in a list."""
        alarms = self._alarms
        while alarms and alarms[0][0] <= now:
            s = self._asleep_until(*heappop(alarms))
            if s is not None:
                self.touch(s)
        self.look_up_costs()
        self._follow_lead_cap()
        work = Work()
        self._look_with_care(work, now)
        self._look_at_filling(work, now)
        if work.one_must_begin:
            for s in self._resting.values():
                if s.may_begin_at <= now:
                    s.slack_ns = s.runs_dry_at - now - self.codec_cost_ns
                    work.frameless.append(s)
                    work.begins.append(s)
        # The step that would save those without a frame carries those who need it soon, not everybody.
        work.rescue_ns = self._forecast.frame_ns(max(1, work.rows_soon)) if work.frameless else 0
        for s in work.frameless:
            s.slack_ns -= work.rescue_ns
            work.tightest_ns = min(work.tightest_ns, s.slack_ns)
        if work.codec:
            work.tightest_ns = min(work.tightest_ns, self._line_up(work))
        if work.new and self._resting:
            dry_at = min([s.runs_dry_at for s in self._resting.values()])
            work.tightest_ns = min(work.tightest_ns, dry_at - now - self.codec_cost_ns - self._forecast.frame_ns(1))
        return work

    def _look_with_care(self, work: Work, now: int) -> None:
        """Sort those who are awake; who need not be looked at like this the next time goes where it belongs."""
        codec_cost_ns, soon_ns = self.codec_cost_ns, 2 * self.frame_cost_ns
        fills: list[Stream] = []
        rests: list[Stream] = []
        for s in self._awake.values():
            s.slack_ns = NEVER
            made, delivered = s.made, s.delivered
            if not delivered:
                if s.out is None and made == s.started:
                    if can_start(s):
                        work.new.append(s)
                    else:
                        s.rests_until = s.may_begin_at = s.runs_dry_at = NEVER
                        rests.append(s)
                continue
            listener = s.listener
            deadline_ns = listener.fresh_ns if now < listener.stale_ns else listener.dry_at(now)
            pending = made - delivered
            spare_ns = deadline_ns + s.ease_ns - now - codec_cost_ns
            if listener.is_held:
                pass
            elif pending:
                s.slack_ns = spare_ns
                work.tightest_ns = min(work.tightest_ns, spare_ns)
            elif s.starved_at is None or s.segments:
                s.slack_ns = spare_ns
                work.frameless.append(s)
                if spare_ns < soon_ns:
                    work.rows_soon += s.rows
            if s.out is not None or made < s.started:
                continue
            can_encode = s.segments and s.can_encode
            if can_encode:
                work.text.append(s)
            decode_at, must_begin_at, may_begin_at = self._sound_due_at(s, pending, deadline_ns)
            if pending and must_begin_at < NEVER and not s.segments:
                fills.append(s)
                continue
            if decode_at <= now:
                work.codec.append(s)
            if must_begin_at <= now:
                (work.fills if pending else work.begins).append(s)
                work.one_must_begin = work.one_must_begin or may_begin_at > 0
            elif not pending and not can_encode:
                s.may_begin_at = may_begin_at
                s.runs_dry_at = NEVER if s.slack_ns == NEVER else deadline_ns + s.ease_ns
                s.rests_until = min(must_begin_at, listener.changes_at(now))
                rests.append(s)
        for s in fills:
            del self._awake[s.id]
            self._filling[s.id] = s
        for s in rests:
            del self._awake[s.id]
            self._resting[s.id] = s
            if s.rests_until < NEVER:
                heappush(self._alarms, (s.rests_until, s.id))

    def _look_at_filling(self, work: Work, now: int) -> None:
        """Slack and chunk of those who have frames in hand and nothing in the way: `_sound_due_at` without the call."""
        flush_at_ns = now + self._flush_ns if self._flushes_early else -NEVER
        begins_by_ns = now + self._longest_keep_ns
        work_begins_ns = now + self.codec_cost_ns
        tightest_ns = work.tightest_ns
        for s in self._filling.values():
            listener = s.listener
            deadline_ns = listener.fresh_ns if now < listener.stale_ns else listener.dry_at(now)
            s.slack_ns = spare_ns = deadline_ns + s.ease_ns - work_begins_ns
            if spare_ns < tightest_ns:  # noqa: PLR1730 (a call takes longer, and this is the innermost loop)
                tightest_ns = spare_ns
            if s.out is not None or s.made < s.started:
                continue
            pending = s.made - s.delivered
            if pending < s.target:
                work.fills.append(s)
                if deadline_ns <= flush_at_ns and not s.recovers:
                    work.codec.append(s)
            else:
                work.codec.append(s)
                may_be_time = deadline_ns <= begins_by_ns or not s.interactive
                if may_be_time and self._begins_at(s, pending, deadline_ns)[0] <= now:
                    work.fills.append(s)
        work.tightest_ns = tightest_ns

    def _line_up(self, work: Work) -> int:
        """The least slack when everybody in a hurry is served one after the other, the earliest deadline first.

        Chunks of one size share a codec step; those of another size wait for it, and so do frames.
        """
        codec_cost_ns = self.codec_cost_ns
        work.codec.sort(key=by_slack)
        sizes, rungs = work.sizes, self._rungs
        sizes.clear()
        for s in work.codec:
            # As `ready_chunk` has it, without the call.
            pending, longest = s.made - s.delivered, s.longest_chunk
            size = rungs[pending if pending < longest else longest]
            if size in sizes:
                sizes[size].append(s)
            else:
                sizes[size] = [s]
        # (time until the deadline, work)
        line = []
        done_ns, least_ns = 0, NEVER
        for size, streams in sizes.items():
            deadline_ns = streams[0].slack_ns + codec_cost_ns
            decode_ns = self._forecast.codec_ns(len(streams), size)
            line.append((deadline_ns, decode_ns))
            done_ns += decode_ns
            least_ns = min(least_ns, deadline_ns - done_ns)
        work.codec_spare_ns = least_ns
        if not work.frameless:
            return least_ns
        rescue_ns = work.rescue_ns + codec_cost_ns
        line.append((min([s.slack_ns for s in work.frameless]) + rescue_ns, rescue_ns))
        line.sort()
        done_ns = 0
        for deadline_ns, work_ns in line:
            done_ns += work_ns
            least_ns = min(least_ns, deadline_ns - done_ns)
        return least_ns

    def longest_chunk_now(self, s: Stream) -> int:
        """Frames of the largest chunk the stream may have with the lead that is kept now."""
        return self._longest_now if s.interactive else s.longest_chunk

    def ready_chunk(self, s: Stream) -> int:
        """Frames of the chunk to decode now."""
        pending, longest = s.made - s.delivered, s.longest_chunk
        return self._rungs[pending if pending < longest else longest]

    def chunk_cost_ns(self, frames: int) -> int:
        """Predicted time of a codec step for chunks of this size, with as many open streams in it as it holds."""
        time_ns = self._chunk_costs_ns.get(frames)
        if time_ns is None:
            time_ns = self._chunk_costs_ns[frames] = self._forecast.codec_ns(self._costs_are_for[0], frames)
        return time_ns

    def bring_forward(self, work: Work, danger_ns: int) -> None:
        """Streams with less slack than `danger_ns` may send the frames they have in hand, chunk full or not."""
        due = {s.id for s in work.codec}
        for s in (*self._awake.values(), *self._filling.values()):
            if s.slack_ns >= danger_ns or s.recovers or s.out is not None or s.id in due:
                continue
            if s.made == s.started and s.made > s.delivered > 0:
                work.codec.append(s)
        self._line_up(work)

    def slack(self, s: Stream, now: int) -> int:
        """Time the stream alone has to spare; NEVER where no sound is owed.  Call `look_up_costs` first.

        `look` reckons with who else is in a hurry.  But it lets streams rest, so only a decision may look: whoever
        merely wants to know asks here, or a trace, which has only what was decided, would not replay.
        """
        has_frames = s.made > s.delivered
        is_starved = s.starved_at is not None and not s.segments and not has_frames
        if not s.delivered or s.listener.is_held or is_starved:
            return NEVER
        frame_ns = 0 if has_frames else self._forecast.frame_ns(1)
        return s.listener.dry_at(now) + s.ease_ns - now - self.codec_cost_ns - frame_ns

    def wake_at(self) -> int:
        """When the first stream is due; NEVER if none will be."""
        self.look_up_costs()
        if any(s.out is None for s in self._filling.values()):
            return 0
        at_ns = min(map(self._due_at, self._awake.values()), default=NEVER)
        # An alarm may ring because a report grows old, and nothing be due then.
        for alarm_ns, stream in sorted(self._alarms):
            if alarm_ns >= at_ns:
                break
            s = self._asleep_until(alarm_ns, stream)
            if s is not None:
                at_ns = min(at_ns, max(alarm_ns, self._due_at(s)))
        return at_ns

    def is_due(self, s: Stream, now: int) -> bool:
        """The stream by itself makes a step necessary."""
        self.look_up_costs()
        return self._due_at(s) <= now

    def _due_at(self, s: Stream) -> int:
        """The first time at which the stream by itself makes a step necessary, if nothing else happens; NEVER if none.

        Without any input the deadline changes only as the last report grows old.  It only moves forward then, and no
        time below is later for an earlier deadline; so a time found before such a moment stays right after it.
        """
        if s.out is not None:
            return NEVER
        if s.can_encode or s.made < s.started or s.can_prefill:
            return 0
        if not s.delivered:
            return 0 if can_start(s) else NEVER
        listener, pending = s.listener, s.pending
        decode_at, must_begin_at, _ = self._sound_due_at(s, pending, listener.fresh_ns)
        due_ns = min(decode_at, must_begin_at)
        if due_ns < listener.stale_ns:
            return due_ns
        for since_ns, deadline_ns in listener.fading:
            if due_ns < since_ns:
                break
            decode_at, must_begin_at, _ = self._sound_due_at(s, pending, deadline_ns)
            due_ns = max(since_ns, min(decode_at, must_begin_at))
        return due_ns

    def look_up_costs(self) -> None:
        """Predict what the times here are reckoned with, if it may have changed."""
        forecast = self._forecast
        streams = max(1, len(self._awake) + len(self._filling) + len(self._resting))
        if self._costs_are_for == (streams, forecast.version):
            return
        self._costs_are_for = (streams, forecast.version)
        self.frame_cost_ns = forecast.frame_ns(streams)
        self.codec_cost_ns = forecast.codec_ns(streams)
        self._chunk_costs_ns.clear()
        self._keeps_ns.clear()
        self._flush_ns = -flush_at(0, self.frame_cost_ns, self.codec_cost_ns, self._policy.guard_ns)
        self._rests_long = self._policy.lead_by_load or (
            self._policy.waits_for_rows and forecast.frame_ns(2) < 2 * forecast.frame_ns(1)
        )
        self._longest_keep_ns = NEVER
        lead_cap_ns = self._lead_cap()
        if lead_cap_ns != self.lead_cap_ns:
            self.lead_cap_ns = lead_cap_ns
            longest = longest_chunk(self._policy.ladder, self._frame_ns, lead_cap_ns)
            self._longest_now = min(longest, self.longest_interactive)
        if self._rests_long and self.lead_cap_ns is not None:
            self._longest_keep_ns = self._keep_ns(self.longest_interactive)

    def _lead_cap(self) -> int | None:
        """How far ahead interactive streams are made now, in whole frames below the policy's cap.

        Twice what must be there when a chunk is begun: a few such chunks, by what they would take with `AHEAD` times
        as many streams, or the worst that a step has lately taken beyond its prediction.  So it grows to the
        policy's while there is still time to make it, and an interruption throws little away where little is needed.
        """
        most_ns = self._policy.lead_cap_ns
        if most_ns is None:
            return None
        too_slow_ns = self._frame_ns * 3 // 4
        if self.frame_cost_ns + self.codec_cost_ns > too_slow_ns and self._forecast.mean_alone_ns() > too_slow_ns:
            # Never far ahead by itself.  What its listener has waited for is the lead that it lives on.
            return None
        if self._is_strained:
            most_ns = most_ns * STRAINED_LEAD_PERCENT // 100
        if not self._policy.lead_by_load:
            return most_ns
        soon = AHEAD * self._costs_are_for[0]
        chunk_ns = self.longest_interactive * self._forecast.frame_ns(soon) + self._forecast.codec_ns(soon)
        keep_ns = max(LEAST_LEAD_CHUNKS * chunk_ns, self._forecast.stumble_ns + chunk_ns)
        frames = -(-LEAST_LEAD_SHARE * keep_ns // self._frame_ns)
        return min(most_ns, max(LEAST_LEAD_CAP_NS, frames * self._frame_ns))

    def _follow_lead_cap(self) -> None:
        """Where more lead is kept than at the last look, who rests may have to begin already."""
        lead_cap_ns = self.lead_cap_ns or 0
        if lead_cap_ns > self._looked_with_cap_ns:
            for s in list(self._resting.values()):
                self.touch(s)
        self._looked_with_cap_ns = lead_cap_ns

    def _asleep_until(self, at_ns: int, stream: int) -> Stream | None:
        """The stream of an alarm that is not out of date."""
        s = self._resting.get(stream)
        return s if s is not None and s.rests_until == at_ns else None

    def _sound_due_at(self, s: Stream, pending: int, deadline_ns: int) -> tuple[int, int, int]:
        """For a stream that has spoken: when its frames should go to CODEC; when BACKBONE should start its next
        frame; when it may, riding in a step that runs anyway.

        A chunk may be begun when it will end below the lead cap, and once begun is completed.  It need not be begun
        yet, since what is not made is not thrown away; and if a frame for two takes less than two frames, whoever may
        waits for the first who must, so that they run together, and the machine is free for first sounds in between.
        Who must has several times the slack it needs.
        """
        if s.speech_ended or s.started >= s.max_frames:
            # Even if the listener is paused: then the stream ends, and what it holds is free.
            return 0 if pending else NEVER, NEVER, NEVER
        if s.listener.is_held:
            return NEVER, NEVER, NEVER
        is_full = pending >= s.target
        if is_full:
            decode_at = 0
        elif not pending or (s.starved_at is None and (s.recovers or not self._flushes_early)):
            decode_at = NEVER
        else:
            decode_at = deadline_ns - self._flush_ns
        if s.starved_at is not None:
            return decode_at, NEVER, NEVER
        if pending and not is_full:
            return decode_at, 0, 0
        return decode_at, *self._begins_at(s, pending, deadline_ns)

    def _begins_at(self, s: Stream, pending: int, deadline_ns: int) -> tuple[int, int]:
        """When BACKBONE should begin the next chunk of a stream, and when it may."""
        lead_cap_ns = self.lead_cap_ns
        if lead_cap_ns is None or not s.interactive:
            return 0, 0
        may_at = deadline_ns + (pending + s.target) * self._frame_ns - lead_cap_ns
        if not self._rests_long:
            return may_at, may_at
        must_at = deadline_ns - (self._keeps_ns.get(s.target) or self._keep_ns(s.target))
        return (must_at, may_at) if must_at > may_at else (may_at, may_at)

    def _keep_ns(self, frames: int) -> int:
        """How much sound is left when a chunk of so many frames must be begun; call it where there is a lead cap."""
        assert self.lead_cap_ns is not None
        work_ns = LEAST_LEAD_CHUNKS * self._chunk_work_ns(frames)
        keep_ns = self._keeps_ns[frames] = max(self.lead_cap_ns // LEAST_LEAD_SHARE, work_ns)
        return keep_ns

    def _chunk_work_ns(self, frames: int) -> int:
        """Predicted time of a chunk with everybody in it."""
        return frames * self.frame_cost_ns + self.codec_cost_ns


def can_start(s: Stream) -> bool:
    """A stream that has not spoken has something to run.

    A listener who is not playing yet is prepared for: the first chunk is made, and nothing after it.
    """
    if (s.segments and s.can_encode) or s.can_prefill:
        return True
    if s.made < s.target and not s.is_generated:
        return s.can_generate or (s.made > 0 and s.starved_at is not None)
    return s.made > 0
