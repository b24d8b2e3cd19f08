"""Who goes first: the order of service.

Each rule under the one before:

1. A stream that has not spoken goes first, if what is left of its way to sound fits into the smallest slack of those
   who have; otherwise the streams in danger run, in as small a step as helps them, and the question is asked again.
   Of a prompt too long for anybody's slack, as much is run as fits.
2. No first sound is put off like that for longer than its class allows (40 ms for a call); but after each of its steps
   then, those who have spoken get a frame step and a codec step.
3. Among those who have spoken, finished chunks go to the codec when the rest can spare the time; otherwise the least
   slack decides, and ready rows of the same shape ride along.  A full chunk waits for one frame step, once, if the
   cost table says that sharing a codec step with those whose chunks that step fills saves time, and everybody's slack
   stays positive.

Slack is the time until the listener runs dry, less the work the next sound still needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

from breeze_rtc.clock import MS, SECOND
from breeze_rtc.scheduling.admission import bucket_of
from breeze_rtc.scheduling.forecast import Forecast
from breeze_rtc.scheduling.policy import FirstSound, Order, Policy
from breeze_rtc.scheduling.step import Stage, StageSpec, Why
from breeze_rtc.scheduling.stream import NEVER, Feed, Priority, Stream
from breeze_rtc.scheduling.survey import Survey, Work, by_slack

DEFERRAL_NS = {Priority.LIVE: 40 * MS, Priority.STREAM: 160 * MS, Priority.BATCH: 1_000 * MS}
"""How long a first sound may wait for others."""
OWED_STEPS = 2
"""After each step of a first sound that has waited as long as it may, though it fits into nobody's slack, so many go to
those who have spoken: a frame and its way through the codec."""
HORIZON_NS = SECOND
"""`Order.CRITICAL`: less sound in hand is critical.  `Order.QOE`: how far ahead a choice is weighed."""

_arrival = attrgetter("priority", "ready_ns", "id")


class Choice(NamedTuple):
    """A step to be made of as many of the streams, in order, as the stage holds."""

    stage: Stage
    streams: list[Stream]
    why: Why
    frames: int = 1
    """CODEC: frames per row."""
    tokens: int = 0
    """PREFILL: no more than so many; 0 for the stage's own limit."""


class Chooser:
    """Chooses among what a survey found."""

    def __init__(
        self, specs: Mapping[Stage, StageSpec], policy: Policy, forecast: Forecast, survey: Survey, *, frame_ns: int
    ) -> None:
        """frame_ns: what one codec frame lasts."""
        self._specs = specs
        self._policy = policy
        self._forecast = forecast
        self._survey = survey
        self._frame_ns = frame_ns
        # Steps that those who have spoken are owed, because a first sound went before them that did not fit.
        self._owed = 0

    def choose(self, work: Work, now: int) -> Choice | None:
        """What to run; None when nothing is due."""
        policy = self._policy
        goes_by_slack = policy.order is Order.SLACK
        if work.new:
            if policy.first_sound is FirstSound.IN_ORDER:
                return self._in_turn(work, now)
            if policy.first_sound is FirstSound.ALWAYS:
                return self._first_step_of(sorted(work.new, key=_arrival), work, Why.FIRST_SOUND_ALWAYS)
            step = self._first_sound(work, now) or (self._go_on(work) if goes_by_slack else self._in_turn(work, now))
            # Nobody in danger can be helped now (a step is out for them): then waiting for them would help nobody.
            return step or self._first_step_of(sorted(work.new, key=_arrival), work, Why.FIRST_SOUND_ALONE)
        return self._go_on(work) if goes_by_slack else self._in_turn(work, now)

    # ---- first sounds ------------------------------------------------------------------------------------------------

    def _first_sound(self, work: Work, now: int) -> Choice | None:
        """Rules 1 and 2: a step for streams that have not spoken, or None when those who have come first."""
        forecast, policy = self._forecast, self._policy
        waiting = sorted(work.new, key=_arrival) if len(work.new) > 1 else work.new
        spare_ns = work.tightest_ns - policy.guard_ns
        work.first_sound_ns = way_ns = forecast.way_to_sound_ns(waiting)
        many = len(waiting)
        while way_ns > spare_ns:
            many //= 2
            if not many:
                break
            way_ns = forecast.way_to_sound_ns(waiting[:many])
        if many:
            self._owed = 0
            return self._first_step_of(waiting[:many], work, Why.FIRST_SOUND_FITS)
        if policy.deferral_is_bounded:
            overdue = [s for s in waiting if now - s.ready_ns >= DEFERRAL_NS[s.priority]]
            if overdue and not self._owed:
                self._owed = OWED_STEPS
                return self._first_step_of(overdue, work, Why.FIRST_SOUND_OVERDUE, spare_ns)
        self._owed = max(0, self._owed - 1)
        piece = self._piece_of_prompt(waiting, spare_ns)
        if piece is not None:
            return piece
        work.in_danger_below_ns = danger_ns = forecast.way_to_sound_ns(waiting[:1]) + policy.guard_ns
        if policy.rescues:
            # Nothing helps a stream in danger more quickly than the frames it has in hand.
            self._survey.bring_forward(work, danger_ns)
        return None

    def _first_step_of(self, waiting: list[Stream], work: Work, why: Why, spare_ns: int = NEVER) -> Choice:
        """The next step for these streams, none of which has spoken: what is closest to sound, except that text goes
        before prefill, because what is encoded now joins that prefill.  Others who need the same stage come along.

        spare_ns: what the others can spare, where the way to sound takes longer; a prompt is run in pieces then.
        """
        decodable = [s for s in waiting if s.made and (s.made >= s.target or not s.can_generate)]
        if decodable:
            return self._decode(*self._of_one_size(decodable + work.codec), work, why)
        texts = [s for s in waiting if s.can_encode]
        if texts:
            return Choice(Stage.TEXT, texts + work.text, why)
        prompts = [s for s in waiting if s.can_prefill]
        if not prompts:
            return Choice(Stage.BACKBONE, waiting, why)
        if not self._policy.prefills_together:
            del prompts[1:]
        tokens = 0
        if spare_ns < NEVER:
            rows = sum(s.rows for s in prompts)
            tokens = self._forecast.piece_of_prompt(rows, spare_ns) or self._forecast.least_piece_of_prompt(rows)
        return Choice(Stage.PREFILL, prompts, why, tokens=tokens)

    def _piece_of_prompt(self, waiting: list[Stream], spare_ns: int) -> Choice | None:
        """A piece of the first prompt that waits, between the steps of those who have spoken.

        Only of a prompt that will not fit whole: one that does runs with its first sound behind it.
        """
        first = next((s for s in waiting if s.feed is Feed.PREFIX and s.can_prefill and not s.can_encode), None)
        if first is None or spare_ns <= 0:
            return None
        tokens = self._forecast.piece_of_prompt(first.rows, spare_ns)
        if not 0 < tokens < (first.prompt - first.positions) * first.rows:
            return None
        return Choice(Stage.PREFILL, [first], Why.PROMPT_PIECE, tokens=tokens)

    # ---- those who have spoken ---------------------------------------------------------------------------------------

    def _go_on(self, work: Work) -> Choice | None:
        """Rule 3: a step for streams that have spoken; None when none of them is due."""
        forecast, codec, text = self._forecast, work.codec, work.text
        if len(text) > 1:
            text.sort(key=by_slack)
        # Frames are urgent for those who have none in hand: what the others need next is the codec.
        frame_ns = min([s.slack_ns for s in work.begins], default=NEVER)
        # Text is urgent for those who have nothing to speak without it.
        text_ns = min([s.slack_ns for s in text if s.starved_at is not None], default=NEVER)
        if codec:
            # How late the later of the two would be, either way round.
            other_ns = min(text_ns, frame_ns)
            frames, group = next(iter(work.sizes.items()))
            most = NEVER
            if self._policy.rescues:
                in_time = self._most_in_time(group, frames, work, other_ns)
                if in_time < len(group):
                    # Where there is no time for all of these, there is none for riders.
                    group, most = group[:in_time], in_time
            decode_ns = forecast.codec_ns(len(group), frames)
            spare_ns = codec[0].slack_ns + self._survey.codec_cost_ns - decode_ns
            codec_first_ns = max(0, -spare_ns, decode_ns - other_ns)
            codec_last_ns = max(0, -other_ns, work.rescue_ns - spare_ns)
            if other_ns == NEVER or codec_first_ns <= codec_last_ns:
                if text_ns == NEVER and self._waits_for_rows(group, work):
                    return Choice(Stage.BACKBONE, _by_need(work), Why.JOINS_CODEC)
                return self._decode(group, frames, work, _why_decode(codec[0], work), most)
        if text and (text_ns <= frame_ns or forecast.text_ns(text) <= frame_ns):
            return Choice(Stage.TEXT, text, Why.TEXT)
        if work.begins or work.fills:
            backbone = _by_need(work)
            chosen = self._helpful(backbone, work) if self._policy.rescues else backbone
            why = Why.LEAST_SLACK
            if len(chosen) < len(backbone):
                why = Why.DANGER_FRAME if work.in_danger_below_ns > -NEVER else Why.RESCUE_FRAME
            return Choice(Stage.BACKBONE, chosen, why)
        return None

    def _waits_for_rows(self, group: list[Stream], work: Work) -> bool:
        """Wait or go: one frame step first fills the chunks of others, who then share a codec step with this group.

        Not while a first sound waits: what is in hand then is worth more to it as slack.
        """
        spec, forecast = self._specs[Stage.BACKBONE], self._forecast
        rows = len(work.begins) + len(work.fills)
        if not self._policy.waits_for_rows or work.new or not rows:
            return False
        delay_ns = forecast.frame_ns(min(rows, spec.max_rows)) + self._policy.guard_ns
        if work.tightest_ns <= delay_ns:
            return False
        frames = group[0].target
        carried = [*work.begins, *work.fills] if rows <= spec.max_rows else _by_need(work)[: spec.max_rows]
        filled = [s.target for s in carried if s.made - s.delivered + 1 == s.target]
        together = len(group) + filled.count(frames)
        if frames not in filled or together > self._specs[Stage.CODEC].max_rows:
            return False
        if any(s.pending < s.target or s.is_generated or s.waited_at == s.delivered for s in group):
            return False
        saved_ns = forecast.codec_ns(len(group), frames) + forecast.codec_ns(together - len(group), frames)
        if forecast.codec_ns(together, frames) >= saved_ns:
            return False
        # Everybody's slack stays positive, even if the chunks of all other sizes go to the codec before his.
        for size in sorted({*filled, *work.sizes}):
            delay_ns += self._survey.chunk_cost_ns(size)
        if work.tightest_ns <= delay_ns:
            return False
        for s in group:
            s.waited_at = s.delivered
        return True

    def _helpful(self, backbone: list[Stream], work: Work) -> list[Stream]:
        """The streams, most urgent first, that one frame step should carry: usually all that may.

        While a first sound waits for some of them: those, and whoever comes along for a quarter more time.  Else, if
        the first would be late in a full step but not in a smaller one: as many as the smaller one holds, provided
        that those left out can wait for it.  A small step takes nearly as long as a full one, so it is for emergencies.
        """
        forecast, spec = self._forecast, self._specs[Stage.BACKBONE]
        first = backbone[0]
        danger_ns = work.in_danger_below_ns
        in_danger = 0
        if danger_ns > -NEVER:
            in_danger = sum(s.rows for s in backbone if not s.pending and s.slack_ns < danger_ns)
        if not in_danger and (first.pending or first.slack_ns == NEVER):
            return backbone
        rows = min(sum(s.rows for s in backbone), spec.max_rows)
        if in_danger:
            least = min(in_danger, rows)
            limit_ns = forecast.frame_ns(least) * 5 // 4
        else:
            least = first.rows
            limit_ns = min(work.rescue_ns + first.slack_ns, max(work.codec_spare_ns, forecast.frame_ns(least)))
        if forecast.frame_ns(rows) <= limit_ns:
            return backbone
        fitting = [
            bucket for bucket in spec.buckets if least <= bucket < rows and forecast.frame_ns(bucket) <= limit_ns
        ]
        if not fitting:
            # The first is late anyway, and the others are best served by a full step.
            return backbone
        chosen: list[Stream] = []
        used = 0
        for s in backbone:
            if used + s.rows <= fitting[-1]:
                chosen.append(s)
                used += s.rows
            elif not in_danger and s.slack_ns < limit_ns:
                return backbone
        return chosen

    def _most_in_time(self, group: list[Stream], frames: int, work: Work, other_ns: int) -> int:
        """How many chunks of so many frames, least slack first, one codec step may carry: usually as many as it holds.

        A step cannot be interrupted, and one of many large chunks may take longer than the first of the group, which
        has least slack, can wait, or than all others can (`other_ns`: those who have no frame in hand).  Then it
        carries as many as need three quarters of that time, since what a step misses its prediction by grows with its
        length; what is left is asked again after it.  Where the codec is fast, a step of its own for the rest costs
        more than that wait.
        """
        forecast, spec = self._forecast, self._specs[Stage.CODEC]
        limit_ns = self._frame_ns // 2
        if forecast.codec_ns(spec.max_rows, frames) <= limit_ns:
            return spec.max_rows
        others = [streams[0].slack_ns for size, streams in work.sizes.items() if size != frames]
        others += [s.slack_ns for s in work.fills]
        least_ns = min([group[0].slack_ns + self._survey.codec_cost_ns, other_ns, *others])
        limit_ns = max(limit_ns, least_ns * 3 // 4)
        most = 1
        for rows in spec.buckets:
            if forecast.codec_ns(rows, frames) > limit_ns:
                break
            most = rows
        return min(most, spec.max_rows)

    def _decode(self, rows: list[Stream], frames: int, work: Work, why: Why, most: int = NEVER) -> Choice:
        """A codec step for streams that have a chunk of so many frames, and for riders that have just as many in hand.

        Every row of a codec step has the same number of frames, because padding would enter the codec's state.  A
        rider's chunk is not full yet.  It comes along if one more frame step would make it due, since it saves a step
        of its own then, or if the bucket has room for it anyway.  most: rows it may carry, if fewer than it holds.
        """
        spec, survey = self._specs[Stage.CODEC], self._survey
        most = min(most, spec.max_rows)
        rows = rows[:most]
        if self._policy.rescues and work.fills and len(rows) < most:
            taken = {s.id for s in rows}
            ready = [
                s
                for s in work.fills
                if s.made - s.delivered >= frames and s.id not in taken and survey.ready_chunk(s) == frames
            ]
            if ready:
                soon_ns = 2 * (survey.frame_cost_ns + survey.codec_cost_ns + self._policy.guard_ns)
                rows += [s for s in ready if s.slack_ns < soon_ns][: most - len(rows)]
                room = min(bucket_of(spec, len(rows)), most) - len(rows)
                rows += [s for s in ready if s.slack_ns >= soon_ns][:room]
        return Choice(Stage.CODEC, rows, why, frames)

    def _of_one_size(self, due: list[Stream]) -> tuple[list[Stream], int]:
        """Those with as many frames to decode as the first of them, and how many that is."""
        frames = self._survey.ready_chunk(due[0])
        return [s for s in due if self._survey.ready_chunk(s) == frames], frames

    # ---- other policies ----------------------------------------------------------------------------------------------

    def _in_turn(self, work: Work, now: int) -> Choice | None:
        """A step for whoever comes first in the policy's order, with all who need the same stage, in that order."""
        rank = self._rank(now)
        codec = work.codec
        backbone = work.begins + work.fills
        if self._policy.order is Order.CRITICAL and backbone and not any(self._is_critical(s, now) for s in codec):
            # Nobody's sound is short, so the codec waits for somebody's to be; then all ride along.
            codec = []
        needs: dict[int, tuple[Stage, Stream]] = {s.id: (Stage.BACKBONE, s) for s in backbone}
        needs.update((s.id, (Stage.TEXT, s)) for s in work.text)
        needs.update((s.id, (Stage.CODEC, s)) for s in codec)
        if self._policy.first_sound is FirstSound.IN_ORDER:
            needs.update((s.id, (_next_stage(s), s)) for s in work.new)
        if not needs:
            return None
        first = min((s for _, s in needs.values()), key=rank)
        stage, _ = needs[first.id]
        streams = sorted((s for needed, s in needs.values() if needed is stage), key=rank)
        if stage is Stage.CODEC:
            return self._decode(*self._of_one_size(streams), work, Why.IN_TURN)
        if stage is Stage.PREFILL and not self._policy.prefills_together:
            del streams[1:]
        return Choice(stage, streams, Why.IN_TURN)

    def _rank(self, now: int) -> Callable[[Stream], tuple[int, ...]]:
        """The key of the policy's order: the least is served first."""
        match self._policy.order:
            case Order.FIRST_COME:
                return lambda s: (s.opened,)
            case Order.CLASS:
                return lambda s: (s.priority, s.opened)
            case Order.ROUND_ROBIN:
                return lambda s: (s.served, s.opened)
            case Order.CRITICAL:
                return lambda s: (not self._is_critical(s, now), s.opened)
            case Order.QOE:
                return lambda s: (-self._worth(s, now), s.opened)
            case Order.SLACK:
                return lambda s: (s.slack_ns if s.delivered else s.ready_ns + DEFERRAL_NS[s.priority] - now, s.id)

    def _is_critical(self, s: Stream, now: int) -> bool:
        return not s.delivered or s.listener.dry_at(now) - now < HORIZON_NS

    def _worth(self, s: Stream, now: int) -> int:
        """What not serving the stream for `HORIZON_NS` would take from its quality of experience, in billionths.

        Quality is one less the area by which the sound heard lags behind the sound expected, over the whole area
        expected by then: the same silence hurts a short utterance more than a long one.
        """
        # Before the first sound: minus the time that has been waited for it.
        lead_ns = (s.listener.dry_at(now) if s.delivered else s.ready_ns) - now
        silence_us = max(0, HORIZON_NS - lead_ns) // 1_000
        expected_us = (s.delivered * self._frame_ns + HORIZON_NS) // 1_000
        return 1_000_000_000 * silence_us**2 // expected_us**2


def _by_need(work: Work) -> list[Stream]:
    """Who may start a frame: first those who have none in hand, each by slack."""
    return [*sorted(work.begins, key=by_slack), *sorted(work.fills, key=by_slack)]


def _why_decode(first: Stream, work: Work) -> Why:
    if first.is_generated:
        return Why.CHUNK_LAST
    if first.pending >= first.target:
        return Why.CHUNK_FULL
    return Why.CHUNK_EARLY if work.in_danger_below_ns == -NEVER else Why.DANGER_CHUNK


def _next_stage(s: Stream) -> Stage:
    """What a stream that has not spoken needs next."""
    if s.made and (s.made >= s.target or not s.can_generate):
        return Stage.CODEC
    if s.can_encode:
        return Stage.TEXT
    return Stage.PREFILL if s.can_prefill else Stage.BACKBONE
