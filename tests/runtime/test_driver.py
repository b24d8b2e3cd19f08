"""The driver joins the real scheduler with an executor that makes a tone, in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tone_executor import Frontend, ToneExecutor, expected_pcm

from breeze_rtc.clock import MS, SECOND, VirtualClock
from breeze_rtc.errors import BadText
from breeze_rtc.playback import PlaybackReport
from breeze_rtc.runtime.driver import MAX_UNREAD_S, TEXT_SLICE_CHARS, Driver, Hangup, Speaker
from breeze_rtc.runtime.messages import (
    Cancel,
    Chunk,
    EndText,
    Failed,
    Finished,
    Message,
    Open,
    Report,
    Stats,
    Taken,
    Text,
)
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.scheduler import Scheduler
from breeze_rtc.scheduling.step import Stage, Step, StepResult
from breeze_rtc.scheduling.trace import TraceWriter, replay

SLOTS = 4
PAGES = 400


class ScriptedLine:
    """The other side: says each message at its time and hangs up when the engine has nothing left to do."""

    def __init__(self, clock: VirtualClock, script: list[tuple[int, Message]]) -> None:
        self._clock = clock
        self._script = sorted(script, key=lambda entry: entry[0])
        self.heard: list[Message] = []
        # Called with each message heard, at once.
        self.on_message: Callable[[Message], None] = lambda _message: None
        # Take chunks as they come.
        self.reads = True
        self._replies: list[Message] = []

    def receive(self, timeout_ns: int | None) -> list[Message]:
        now = self._clock.now()
        wake = None if timeout_ns is None else now + timeout_ns
        if not self._replies and (not self._script or self._script[0][0] > now):
            times = [at for at in (wake, self._script[0][0] if self._script else None) if at is not None]
            if not times:
                raise Hangup
            self._clock.advance_to(min(times))
        due, self._replies = self._replies, []
        while self._script and self._script[0][0] <= self._clock.now():
            due.append(self._script.pop(0)[1])
        return due

    def send(self, message: Message) -> None:
        self.heard.append(message)
        self.on_message(message)
        if self.reads and isinstance(message, Chunk):
            self._replies.append(Taken(message.stream, message.start_samples + len(message.pcm) // 2))


class Bench:
    """A driver with all its parts; `run` returns what was heard."""

    def __init__(self, script: list[tuple[int, Message]], *, slots: int = SLOTS) -> None:
        self.clock = VirtualClock()
        self.line = ScriptedLine(self.clock, script)
        self.executor = ToneExecutor(self.clock, max_streams=slots)
        self.trace: list[str] = []
        self.scheduler = Scheduler(
            specs=self.executor.specs,
            sample_rate=24_000,
            frame_samples=960,
            slots=slots,
            kv_pages=PAGES * slots,
            page_tokens=16,
            costs=CostTable(),
            trace=TraceWriter(self.trace.append),
        )
        self.driver = Driver(
            line=self.line,
            clock=self.clock,
            scheduler=self.scheduler,
            executor=self.executor,
            speaker=lambda _open: Speaker(Frontend()),
            max_frames=6_000,
        )

    def run(self) -> list[Message]:
        self.driver.run()
        return self.line.heard

    def assert_all_is_free(self) -> None:
        stats = self.scheduler.stats(self.clock.now())
        assert (stats.free_slots, len(stats.streams), self.executor.voices) == (self.executor.specs[0].max_rows, 0, {})
        assert stats.free_pages == PAGES * stats.free_slots


def opened(stream: int, seed: int = 0, *, interactive: bool = True) -> Open:
    return Open(stream, "a", seed, {}, 0, interactive)


def spoken(
    stream: int, text: str, *, seed: int = 0, at: int = 0, interactive: bool = True
) -> list[tuple[int, Message]]:
    return [(at, opened(stream, seed, interactive=interactive)), (at, Text(stream, text)), (at, EndText(stream))]


def pcm_of(heard: list[Message], stream: int) -> bytes:
    chunks = [message for message in heard if isinstance(message, Chunk) and message.stream == stream]
    at = 0
    for chunk in chunks:
        assert chunk.start_samples == at, "chunks follow one another"
        at += len(chunk.pcm) // 2
    return b"".join(chunk.pcm for chunk in chunks)


def ends_of(heard: list[Message], stream: int) -> list[Message]:
    return [message for message in heard if isinstance(message, Finished | Failed) and message.stream == stream]


def test_a_stream_says_its_text_and_frees_everything() -> None:
    """Text in, contiguous PCM, packets and marks out, then the end; nothing stays taken."""
    bench = Bench(spoken(1, "hello you"))
    heard = bench.run()
    assert pcm_of(heard, 1) == expected_pcm("hello you", 0)
    assert ends_of(heard, 1) == [Finished(1, 8 * 2 * 960)]
    chunks = [message for message in heard if isinstance(message, Chunk)]
    packets = [packet for chunk in chunks for packet in chunk.packets]
    assert [packet.start_samples for packet in packets] == [480 * k for k in range(8 * 4 + 1)]
    marks = [mark for chunk in chunks for mark in chunk.marks]
    assert (marks[0].chars, marks[-1].chars) == (1, 9)
    bench.assert_all_is_free()


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_nothing_to_say_is_said_at_once(text: str) -> None:
    """Empty text is a stream of no samples, no packets and no steps."""
    bench = Bench(spoken(1, text))
    heard = bench.run()
    assert ends_of(heard, 1) == [Finished(1, 0)]
    assert not [message for message in heard if isinstance(message, Chunk)]
    assert bench.executor.steps == []
    bench.assert_all_is_free()


def test_streams_together_say_what_each_says_alone() -> None:
    """Four streams that begin apart share their steps and nothing else."""
    script = [entry for k in range(4) for entry in spoken(k, f"stream {k}" * (k + 1), seed=k, at=k * 15 * MS)]
    bench = Bench(script)
    heard = bench.run()
    for k in range(4):
        assert pcm_of(heard, k) == expected_pcm(f"stream {k}" * (k + 1), k)
    assert max(len(step.rows) for step in bench.executor.steps) > 1
    bench.assert_all_is_free()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.text("ab c", max_size=5), st.integers(0, 400)), max_size=6))
def test_text_may_come_in_pieces_at_any_time(pieces: list[tuple[str, int]]) -> None:
    """A stream that waits for its text says the same in the end."""
    script: list[tuple[int, Message]] = [(0, opened(1))]
    at = 0
    for text, pause_ms in pieces:
        at += pause_ms * MS
        script.append((at, Text(1, text)))
    script.append((at + 100 * MS, EndText(1)))
    bench = Bench(script)
    assert pcm_of(bench.run(), 1) == expected_pcm("".join(text for text, _ in pieces), 0)
    bench.assert_all_is_free()


def test_a_long_text_does_not_delay_others() -> None:
    """The front end reads a slice between two steps, so that a stream beside a book starts as if alone."""
    read: list[int] = []

    class Slow(Frontend):
        def push(self, text: str):
            read.append(len(text))
            return super().push(text)

    bench = Bench(spoken(1, "x" * 600, interactive=False) + spoken(2, "hi", at=1))
    bench.driver._speaker = lambda _open: Speaker(Slow())
    heard = bench.run()
    assert max(read) == TEXT_SLICE_CHARS
    first = next(k for k, message in enumerate(heard) if isinstance(message, Chunk) and message.stream == 2)
    assert first < 20
    assert pcm_of(heard, 1) == expected_pcm("x" * 600, 0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 900), st.integers(0, 900))
def test_cancel_at_any_time_frees_everything_and_is_silent(first_ms: int, second_ms: int) -> None:
    """Nothing is heard of a stream after its cancel, which may come twice; its neighbour is untouched."""
    script = spoken(1, "a long enough text") + spoken(2, "neighbour")
    bench = Bench([*script, (first_ms * MS, Cancel(1)), (second_ms * MS, Cancel(1))])
    said_at: list[tuple[int, Message]] = []

    bench.line.on_message = lambda message: said_at.append((bench.clock.now(), message))
    heard = bench.run()
    # A step that was running when the cancel came still delivers; the next turn hears the cancel.
    after = min(first_ms, second_ms) * MS + 5 * MS
    assert not [m for at, m in said_at if at > after and isinstance(m, Chunk | Finished) and m.stream == 1]
    assert pcm_of(heard, 2) == expected_pcm("neighbour", 0)
    bench.assert_all_is_free()


@pytest.mark.parametrize("stage", list(Stage))
def test_a_stage_that_fails_on_one_stream_fails_only_that(stage: Stage) -> None:
    """Whichever stage: one stream ends with its error, the others say everything."""
    bench = Bench(spoken(1, "good") + spoken(2, "x", seed=1) + spoken(3, "fine", seed=2))
    bench.executor.broken.add((stage, "x"))
    heard = bench.run()
    assert ends_of(heard, 2) == [Failed(2, "StepFailed", "no x today", stage.name.lower())]
    assert pcm_of(heard, 1) == expected_pcm("good", 0)
    assert pcm_of(heard, 3) == expected_pcm("fine", 2)
    bench.assert_all_is_free()


def test_short_texts_that_come_together_are_encoded_together() -> None:
    """What four streams push at one moment is less than a slice, and one step."""
    bench = Bench([message for stream in (1, 2, 3, 4) for message in spoken(stream, "hello")])
    rows: list[int] = []
    run = bench.executor.run

    def counted(step: Step) -> StepResult:
        if step.stage is Stage.TEXT:
            rows.append(len(step.rows))
        return run(step)

    bench.executor.run = counted
    heard = bench.run()
    assert rows == [4]
    assert [type(end) for stream in (1, 2, 3, 4) for end in ends_of(heard, stream)] == [Finished] * 4


def test_a_step_that_raises_fails_its_rows_and_the_engine_goes_on() -> None:
    """An executor that raises fails every stream of that step; those who come later speak."""
    bench = Bench(spoken(1, "lost") + spoken(2, "good", at=SECOND))
    bench.executor.raises = RuntimeError("out of memory")
    heard = bench.run()
    assert ends_of(heard, 1) == [Failed(1, "StepFailed", "RuntimeError: out of memory", "text")]
    assert pcm_of(heard, 2) == expected_pcm("good", 0)
    bench.assert_all_is_free()


def test_sound_that_is_not_finite_is_not_sent() -> None:
    """NaN from the codec ends the stream in place of a bang."""
    bench = Bench(spoken(1, "bad") + spoken(2, "good"))
    take = bench.executor.take
    bench.executor.take = lambda stream: (np.full(960, np.nan, np.float32), ()) if stream == 1 else take(stream)
    heard = bench.run()
    assert [type(message) for message in ends_of(heard, 1)] == [Failed]
    assert pcm_of(heard, 1) == b""
    assert pcm_of(heard, 2) == expected_pcm("good", 0)
    bench.assert_all_is_free()


def test_text_the_front_end_cannot_read_fails_its_stream() -> None:
    """The front end's own error is a failure of the text stage; a BadText keeps its name."""
    bench = Bench(spoken(1, "a # b") + spoken(2, "good"))
    heard = bench.run()
    assert ends_of(heard, 1) == [Failed(1, "StepFailed", "ValueError: no way to say #", "text")]
    assert pcm_of(heard, 2) == expected_pcm("good", 0)
    bench.assert_all_is_free()
    bench = Bench(spoken(1, "a"))
    bench.executor.open_raises = BadText("not in this voice")
    assert ends_of(bench.run(), 1) == [Failed(1, "BadText", "not in this voice")]
    bench.assert_all_is_free()


def test_speech_without_end_is_cut_off_and_said_so() -> None:
    """A stream that reaches the frame limit delivers what it has, then fails with the reason."""
    bench = Bench(spoken(1, "endless"))
    bench.driver._max_frames = 6
    heard = bench.run()
    assert pcm_of(heard, 1) == expected_pcm("end", 0)
    (end,) = ends_of(heard, 1)
    assert isinstance(end, Failed)
    assert "cut off after 0.24 s" in end.detail
    bench.assert_all_is_free()


def test_one_stream_too_many_waits_and_is_refused_with_a_time() -> None:
    """The fifth of four long streams hears Overloaded half a second later; the four go on."""
    bench = Bench([entry for k in range(5) for entry in spoken(k, "word" * 40)])
    said_at: list[int] = []
    bench.line.on_message = lambda message: said_at.append(bench.clock.now()) if isinstance(message, Failed) else None
    heard = bench.run()
    (refusal,) = ends_of(heard, 4)
    assert isinstance(refusal, Failed)
    assert refusal.error == "Overloaded"
    assert refusal.retry_after_s > 0
    assert 500 * MS <= said_at[0] <= 520 * MS
    assert all(pcm_of(heard, k) == expected_pcm("word" * 40, 0) for k in range(4))
    bench.assert_all_is_free()


def test_a_stream_that_waits_for_room_says_all_of_its_text() -> None:
    """What was pushed while it waited, in pieces and with its end, is spoken when another stream has ended."""
    script = [entry for k in range(4) for entry in spoken(k, "hi" if k else "h")]
    waiting: list[tuple[int, Message]] = [(0, opened(4)), (1, Text(4, "  wa")), (2, Text(4, "it ")), (3, EndText(4))]
    bench = Bench(script + waiting)
    heard = bench.run()
    assert pcm_of(heard, 4) == expected_pcm("wait", 0)
    first = next(k for k, message in enumerate(heard) if isinstance(message, Chunk) and message.stream == 4)
    assert any(isinstance(message, Finished) for message in heard[:first])
    bench.assert_all_is_free()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 900), st.integers(0, 900))
def test_a_stream_cancelled_while_it_waits_is_never_heard_of(cancel_ms: int, also_ms: int) -> None:
    """Whenever that is; nothing stays taken, and another that waits gets what has come free."""
    script = [entry for k in range(4) for entry in spoken(k, "word" * (2 + k))]
    script += spoken(4, "never") + spoken(5, "later", at=1)
    bench = Bench([*script, (cancel_ms * MS, Cancel(4)), (also_ms * MS, Cancel(0))])
    said_at: list[tuple[int, Message]] = []
    bench.line.on_message = lambda message: said_at.append((bench.clock.now(), message))
    bench.run()
    after = cancel_ms * MS + 5 * MS
    assert not [m for at, m in said_at if at > after and isinstance(m, Chunk | Finished | Failed) and m.stream == 4]
    bench.assert_all_is_free()


def test_a_voice_that_cannot_be_had_fails_a_stream_that_waited() -> None:
    """Its slot is free again, and the next one that waits takes it."""
    bench = Bench([entry for k in range(6) for entry in spoken(k, "word" if k < 4 else "x", seed=k)])
    frontends = itertools.count()

    def speaker(_open: Open) -> Speaker:
        if next(frontends) == 4:
            raise BadText("not in this voice")
        return Speaker(Frontend())

    bench.driver._speaker = speaker
    heard = bench.run()
    assert ends_of(heard, 4) == [Failed(4, "BadText", "not in this voice")]
    assert pcm_of(heard, 5) == expected_pcm("x", 5)
    bench.assert_all_is_free()


def test_messages_of_streams_that_are_over_are_ignored() -> None:
    """Text, ends, reports and credits may arrive after a stream's end, or name one that never was."""
    late: list[Message] = [Text(1, "more"), EndText(1), Cancel(1), Taken(1, 9), Report(PlaybackReport(1, 0, 0, 0))]
    bench = Bench(spoken(1, "hi") + [(5 * SECOND, message) for message in late] + [(6 * SECOND, Cancel(77))])
    assert len(ends_of(bench.run(), 1)) == 1
    bench.assert_all_is_free()


@pytest.mark.parametrize("interactive", [True, False])
def test_a_stream_that_nobody_reads_waits_at_its_limit(interactive: bool) -> None:
    """Reproduction 7 (vllm-omni 4957: chunks were dropped in load).  Generation stops within one chunk of what may be
    unread, and goes on to the end, with every sample, once it has been read."""
    text = "y" * 600  # 48 s of sound
    bench = Bench([*spoken(1, text, interactive=interactive), (200 * SECOND, Taken(1, 48 * 24_000))])
    bench.line.reads = False
    made: list[int] = []
    bench.line.on_message = lambda message: (
        made.append(len(message.pcm) // 2) if isinstance(message, Chunk) and bench.clock.now() < 200 * SECOND else None
    )
    heard = bench.run()
    assert MAX_UNREAD_S * 24_000 < sum(made) <= MAX_UNREAD_S * 24_000 + 16 * 960
    assert pcm_of(heard, 1) == expected_pcm(text, 0)
    bench.assert_all_is_free()


def test_a_report_does_not_release_a_held_stream() -> None:
    """The listener plays, but nobody reads: still held."""
    report = Report(PlaybackReport(1, 24_000, 100 * SECOND, 0))
    bench = Bench([*spoken(1, "y" * 600, interactive=False), (100 * SECOND, report), (300 * SECOND, Cancel(1))])
    bench.line.reads = False
    made = len(pcm_of(bench.run(), 1)) // 2
    assert made <= MAX_UNREAD_S * 24_000 + 16 * 960


def test_stats_come_ten_times_a_second_and_once_when_all_is_quiet() -> None:
    """While something runs a snapshot each 100 ms; the last one shows that everything is free."""
    bench = Bench(spoken(1, "statistics of a stream"))
    times: list[int] = []
    bench.line.on_message = lambda message: times.append(bench.clock.now()) if isinstance(message, Stats) else None
    heard = bench.run()
    snapshots = [message for message in heard if isinstance(message, Stats)]
    # The last one does not wait for its turn.
    assert all(later - earlier >= 100 * MS for earlier, later in itertools.pairwise(times[:-1]))
    assert snapshots[0].values["streams"]["1"]["lead_ns"] > 0
    last = snapshots[-1].values
    assert last["frame_ns"] == pytest.approx(
        sum(last["stages"][stage]["seconds"] * SECOND for stage in ("BACKBONE", "DEPTH", "CODEC"))
        / last["stages"]["BACKBONE"]["steps"],
        rel=0.2,
    )
    ratios = last["step_ratios"]["DEPTH"]
    assert sum(ratios["counts"]) == last["stages"]["DEPTH"]["steps"] - 1, "the first step of all was not predicted"
    assert (ratios["margin"], ratios["sum"]) == (1.0, sum(ratios["counts"])), "steps of equal length are predicted so"
    assert (last["streams"], last["free_slots"], last["counts"]) == ({}, SLOTS, {"finished": 1})
    assert last["stages"]["CODEC"]["steps"] == sum(step.stage is Stage.CODEC for step in bench.executor.steps)


def test_what_was_recorded_replays_to_the_same_steps() -> None:
    """The trace of a run with cancels, failures and reports gives its steps again."""
    script = [entry for k in range(4) for entry in spoken(k, "trace me" * (k + 1), at=k * 50 * MS)]
    bench = Bench([*script, (300 * MS, Cancel(2)), (500 * MS, Report(PlaybackReport(3, 2_000, 450 * MS, 60 * MS)))])
    bench.executor.broken.add((Stage.DEPTH, "m"))
    bench.run()
    assert replay(bench.trace) == bench.executor.steps


def test_the_scheduler_is_told_what_was_measured_before_the_next_step() -> None:
    """Graphs take over while a stream speaks, and while nobody does: the next stream is let in by their times."""
    bench = Bench([*spoken(0, "a long text"), *spoken(1, "later", at=5 * SECOND)])
    told = [(30 * MS, Stage.DEPTH, {(1, 1): 7 * MS}), (3 * SECOND, Stage.CODEC, {(1, 1): 9 * MS})]

    def taken_over() -> list[tuple[Stage, dict[tuple[int, int], int]]]:
        found = [(stage, times) for at, stage, times in told if at <= bench.clock.now()]
        del told[: len(found)]
        return found

    bench.driver._taken_over = taken_over
    bench.run()
    assert replay(bench.trace) == bench.executor.steps
    kinds = [line.split(",", 1)[0][2:-1] for line in bench.trace[1:]]
    assert kinds.count("measured") == 2
    depth, codec = (number for number, kind in enumerate(kinds) if kind == "measured")
    assert kinds[depth + 1] in {"next", "text", "end"}
    assert kinds[codec + 1] == "open", "the stream is let in by what is true now"
