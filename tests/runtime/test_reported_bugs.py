"""Bugs that were reported of other engines, each tried on ours.

The numbers are those of the list that the issue tracker names "reproductions".  Where the same is held by another test,
its docstring has the number.
"""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from executor_driver import PAGE_TOKENS, Direct, ExecutorDriver
from torch.utils._python_dispatch import TorchDispatchMode

from breeze_rtc.clock import MS, VirtualClock
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import SpeechModel, TextSegment
from breeze_rtc.runtime import frame_graphs
from breeze_rtc.runtime.driver import Driver, Hangup, Speaker
from breeze_rtc.runtime.executor import Executor
from breeze_rtc.runtime.frame_steps import Batch, BatchRow, batch_of, choose_first
from breeze_rtc.runtime.graphs import Function
from breeze_rtc.runtime.messages import Cancel, Chunk, EndText, Failed, Finished, Message, Open, Text
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.machines import H100_GRAPH_COSTS, H100_SPECS, warmed_up
from breeze_rtc.scheduling.metrics import Ending
from breeze_rtc.scheduling.policy import Policy
from breeze_rtc.scheduling.scheduler import Scheduler
from breeze_rtc.scheduling.simulator import Outcome, Utterance, simulate
from breeze_rtc.scheduling.step import Stage

SLOTS = 3
PAGES = 90


@pytest.fixture(scope="module")
def model() -> SpeechModel:
    return SpeechModel.load("tiny")


def speaking(model: SpeechModel, frames: int, *, streams: int = 2, seed: int = 5) -> ExecutorDriver:
    """Stream 1 with so many frames made and none decoded."""
    driver = ExecutorDriver(model, streams=streams)
    # Greedy it goes on for long.
    driver.open(1, 0, "some text", seed=seed)
    make(driver, 1, frames)
    return driver


def make(driver: ExecutorDriver, stream: int, frames: int) -> None:
    driver.prefill([stream])
    driver.depth([stream])
    while driver.goes_on(stream, frames):
        driver.backbone([stream])
        driver.depth([stream])
    assert driver.streams[stream].made == frames, "this text and seed speak for longer"


# ---- codec -----------------------------------------------------------------------------------------------------------


def test_every_split_of_a_speech_has_all_of_its_samples(model: SpeechModel) -> None:
    """1 (sglang-omni 1354, Qwen3-TTS 223 and 234): 555 samples were lost at each chunk.

    All 32 ways to cut six frames give 1,920 samples a frame, and the same ones.
    """
    frames = 6
    driver = speaking(model, frames)
    whole = driver.decode_all(1, (frames,))
    assert len(whole) == frames * 1920
    for cuts in itertools.product((False, True), repeat=frames - 1):
        sizes = [len(list(group)) for _, group in itertools.groupby(itertools.accumulate(cuts, initial=0))]
        s = driver.executor._streams[1]
        with torch.inference_mode():
            driver.executor.state.codec.open(s.slot)
        s.decoded = s.sounded = driver.streams[1].decoded = 0
        driver.streams[1].pcm.clear()
        for size in sizes:
            driver.codec({1: size})
        assert np.array_equal(driver.streams[1].sound, whole), sizes


def test_the_tail_survives_a_bucket(model: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 (vllm-omni 4466 and 4525): a graph padded to its bucket cut 46 ms off the end.

    With buckets of one, two and four frames, chunks of three, four and five end with the samples of an eager decode.
    """
    monkeypatch.setattr(frame_graphs, "GRAPH_COLUMNS", (64,))
    monkeypatch.setattr(frame_graphs, "GRAPH_FRAMES", (1, 2, 4))
    monkeypatch.setattr(frame_graphs, "GRAPH_TOKENS", (32,))
    expected = speaking(model, 5).decode_all(1, (1,))
    graphed = ExecutorDriver(model, streams=1)
    graphed.executor.record_graphs(Direct())
    for frames in (3, 4, 5):
        graphed.open(1, 0, "some text", seed=5)
        make(graphed, 1, frames)
        sound = graphed.decode_all(1, (frames,))
        assert np.array_equal(sound[-1920:], expected[(frames - 1) * 1920 : frames * 1920])
        graphed.close(1)
    assert graphed.executor.graphs is not None
    assert not graphed.executor.graphs.table.misses


def test_no_frame_is_decoded_twice_or_left_out(model: SpeechModel) -> None:
    """4 (vllm-omni 3032, 2943, 3031): a stream began again from its start.

    A codec step that begins anywhere but behind the last decoded frame is an error of its row.
    """
    driver = speaking(model, 4)
    driver.codec({1: 2})
    for start in (0, 1, 3):
        assert "asked, 2 to 4 there" in driver.run(Stage.CODEC, {1: (start, 1)}, 1)[1].error
    assert driver.run(Stage.CODEC, {1: (2, 2)}, 1)[1].samples == 2 * 1920


def test_each_stream_of_a_batch_hears_its_own_codes(model: SpeechModel) -> None:
    """6 (vllm-omni 4415, 4316, 4355): every request got the codes of request 0.

    Sixteen streams of one constant code each, decoded together in slots of another order: each is what it is alone.
    """
    slots = np.random.default_rng(2).permutation(16).tolist()
    driver = ExecutorDriver(model, streams=16)
    lone = ExecutorDriver(model, streams=1)
    for stream, slot in enumerate(slots):
        driver.open(stream, slot, "x")
        _set_codes(driver, stream, stream + 1)
    driver.codec(dict.fromkeys(range(16), 3))
    for stream in range(16):
        lone.open(stream, 0, "x")
        _set_codes(lone, stream, stream + 1)
        lone.codec({stream: 3})
        assert np.array_equal(driver.streams[stream].sound, lone.streams[stream].sound), stream
        lone.close(stream)
    assert len({driver.streams[stream].sound.tobytes() for stream in range(16)}) == 16


@torch.inference_mode()
def _set_codes(driver: ExecutorDriver, stream: int, code: int) -> None:
    s = driver.executor._streams[stream]
    driver.executor.state.ring[s.slot, :3] = code
    s.made = s.started = driver.streams[stream].made = driver.streams[stream].started = 3


# ---- seeds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_seed_says_the_same_in_every_slot(model: SpeechModel, temperature: float) -> None:
    """9 (vllm-omni 6361, sglang-omni 1399 and 1475): a seed gave other sound in company.

    Sixteen requests side by side, by turns of two texts and seeds: in each slot each is what it is alone.
    """
    sampling = Sampling(temperature=temperature, depth_temperature=temperature)
    requests = (("some text", 5), ("another", 6))
    expected = []
    for text, seed in requests:
        lone = ExecutorDriver(model, streams=1)
        lone.open(1, 0, text, seed=seed, sampling=sampling)
        expected.append(lone.speak(1, 5))
    assert len(expected[0]) > 1920
    assert not np.array_equal(*expected)
    driver = ExecutorDriver(model, streams=16)
    for slot in range(16):
        text, seed = requests[slot % 2]
        driver.open(slot, slot, text, seed=seed, sampling=sampling)
    driver.prefill(list(range(16)))
    driver.depth(list(range(16)))
    while going := [slot for slot in range(16) if driver.goes_on(slot, 5)]:
        driver.backbone(going)
        driver.depth(going)
    for slot in range(16):
        assert np.array_equal(driver.decode_all(slot, (2,)), expected[slot % 2]), slot


def test_the_first_request_is_like_the_second(model: SpeechModel) -> None:
    """12 (breeze-tts 6): the seed was set before things were made lazily, which drew from it."""
    for records in (False, True):
        driver = ExecutorDriver(SpeechModel.load("tiny"), streams=1)
        if records:
            driver.executor.record_graphs(Direct())
        sounds = []
        for _ in range(2):
            driver.open(1, 0, "one, two. ", seed=5)
            sounds.append(driver.speak(1, 5))
            driver.close(1)
        assert np.array_equal(*sounds)
        if not records:
            expected = sounds[0]
        assert np.array_equal(sounds[0], expected)


def test_a_seed_costs_nothing(model: SpeechModel) -> None:
    """11 (vllm-omni 4889): rows with seeds were sampled in a Python loop, 37 ms a step where it had been 16.

    A frame of four seeded rows runs as many operations as a frame of one, and as one whose rows share a seed.
    """

    class Counts(TorchDispatchMode):
        operations: Counter[str]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.operations[str(func)] += 1
            return func(*args, **(kwargs or {}))

    counted = []
    for seeds in ((1, 1, 1, 1), (1, 2, 3, 4), (7,)):
        driver = ExecutorDriver(model, streams=4)
        for stream, seed in enumerate(seeds):
            driver.open(stream, stream, "one, two. ", seed=seed, sampling=Sampling(repetition_penalty=1.3))
        streams = list(range(len(seeds)))
        driver.prefill(streams)
        with Counts() as counts:
            counts.operations = Counter()
            driver.depth(streams)
            driver.backbone(streams)
        counted.append(counts.operations)
    assert counted[0] == counted[1] == counted[2]
    assert counted[0].total() > 100


# ---- cancel, and what is left ----------------------------------------------------------------------------------------


class Listener:
    """The other side of a driver: says things when so many steps have run, and hangs up when nothing is left."""

    def __init__(self, clock: VirtualClock, script: list[tuple[int, Message]]) -> None:
        self._clock = clock
        self.script = sorted(script, key=lambda entry: entry[0])
        self.steps = 0
        self.heard: list[Message] = []
        self.on_message: Callable[[Message], None] = lambda _message: None

    def receive(self, timeout_ns: int | None) -> list[Message]:
        if timeout_ns is None and self.script:
            # Nothing runs any more: whatever was to be said later is said now.
            self.steps = max(self.steps, self.script[0][0])
        self._clock.advance(timeout_ns or 0)
        due = []
        while self.script and self.script[0][0] <= self.steps:
            due.append(self.script.pop(0)[1])
        if not due and timeout_ns is None:
            raise Hangup
        return due

    def send(self, message: Message) -> None:
        self.heard.append(message)
        self.on_message(message)


class Whole:
    """Driver, scheduler and the executor of a real model, in virtual time."""

    def __init__(
        self,
        model: SpeechModel,
        script: list[tuple[int, Message]],
        *,
        slots: int = SLOTS,
        pages: int = PAGES,
        max_frames: int = 6,
        step_ns: int = 400 * MS,
    ) -> None:
        """step_ns: the time that goes by with each step, or a listener would have heard nothing and everything would
        rest at the lead cap."""
        self.clock = VirtualClock()
        self.line = Listener(self.clock, script)
        self.executor = Executor(model, max_streams=slots, kv_pages=pages, page_tokens=PAGE_TOKENS, clock=self.clock)
        self.scheduler = Scheduler(
            specs=self.executor.specs,
            sample_rate=self.executor.sample_rate,
            frame_samples=self.executor.frame_samples,
            slots=slots,
            kv_pages=pages,
            page_tokens=PAGE_TOKENS,
            kv_positions=self.executor.kv_positions,
            costs=CostTable(),
        )
        self.driver = Driver(
            line=self.line,
            clock=self.clock,
            scheduler=self.scheduler,
            executor=self.executor,
            speaker=lambda message: Speaker(model.frontend(message.voice)),
            max_frames=max_frames,
            rows=lambda sampling: 1,
        )
        run = self.executor.run

        def stepped(step: Any) -> Any:
            result = run(step)
            self.line.steps += 1
            self.clock.advance(step_ns)
            return result

        self.executor.run = stepped  # type: ignore[method-assign]


def asked(stream: int, text: str, at: int = 0, *, temperature: float = 0.0) -> list[tuple[int, Message]]:
    sampling = {"temperature": temperature, "depth_temperature": temperature}
    opening = Open(stream, "default", stream, sampling, 0, True)
    return [(at, opening), (at, Text(stream, text)), (at, EndText(stream))]


def sound_of(heard: list[Message], stream: int) -> bytes:
    return b"".join(m.pcm for m in heard if isinstance(m, Chunk) and m.stream == stream)


@pytest.mark.parametrize("name", ["tiny", "tiny-pointer"])
def test_a_cancel_between_any_two_steps_leaves_nothing(name: str) -> None:
    """17 (vllm-omni 3312, 6352): an abort leaked what the request had sent and its KV cache.

    A stream is cancelled before each of the steps that it would take, another time at random with others that come and
    go: every slot and page is free afterwards, the executor knows nobody, and the stream beside it says what it says
    alone.
    """
    model = SpeechModel.load(name)
    beside = Whole(model, asked(1, "beside"))
    beside.driver.run()
    expected = sound_of(beside.line.heard, 1)
    assert expected
    scripts = [
        [*asked(1, "beside"), *asked(2, "to be cancelled"), (step, Cancel(2))]
        for step in range(0, 2 * beside.line.steps)
    ]
    chance = random.Random(4)
    for _ in range(5):
        script = asked(1, "beside")
        for stream in range(2, 8):
            at = chance.randrange(20)
            script += [
                *asked(stream, "word " * chance.randrange(1, 4), at),
                (at + chance.randrange(12), Cancel(stream)),
            ]
        scripts.append(script)
    cancelled = 0
    for script in scripts:
        whole = Whole(model, script)
        whole.driver.run()
        stats = whole.scheduler.stats(whole.clock.now())
        assert (stats.free_slots, stats.free_pages, stats.streams) == (SLOTS, PAGES, ())
        assert whole.executor._streams == {}
        assert sound_of(whole.line.heard, 1) == expected
        cancelled += not any(isinstance(m, Finished | Failed) and m.stream == 2 for m in whole.line.heard)
    assert cancelled >= 10


def test_a_retry_under_the_same_id_says_it_once(model: SpeechModel) -> None:
    """5 (vllm-omni 3326): a request sent again after a timeout was spoken twice, in one."""
    once = Whole(model, asked(1, "once"))
    once.driver.run()
    expected = sound_of(once.line.heard, 1)
    again = Whole(model, [*asked(1, "once"), (4, Cancel(1)), *asked(1, "once", at=4)])
    again.driver.run()
    before = [index for index, message in enumerate(again.line.heard) if isinstance(message, Finished | Failed)]
    assert len(before) == 1
    chunks = [message for message in again.line.heard if isinstance(message, Chunk)]
    starts = [index for index, chunk in enumerate(chunks) if chunk.start_samples == 0 and chunk.pcm]
    assert b"".join(chunk.pcm for chunk in chunks[starts[-1] :]) == expected


def test_streams_leave_no_cycle_behind(model: SpeechModel) -> None:
    """18 (sglang-omni 1174): each request left 7.8 MiB in a reference cycle.

    With the collector off, what the executor kept of a stream is gone the moment it closes, and sixty streams
    leave no more objects than two.
    """
    driver = ExecutorDriver(model, streams=2)
    gc.collect()
    gc.disable()
    try:
        counts = []
        for stream in range(60):
            driver.open(stream, stream % 2, "text", seed=stream)
            driver.prefill([stream])
            driver.depth([stream])
            driver.decode_all(stream, (1,))
            state = weakref.ref(driver.executor._streams[stream])
            vectors = weakref.ref(driver.executor._streams[stream].vectors[0])
            driver.close(stream)
            assert state() is None
            assert vectors() is None
            counts.append(len(gc.get_objects()))
    finally:
        gc.enable()
    assert counts[-1] - counts[1] < 60


def test_a_server_under_load_misses_no_graph(model: SpeechModel) -> None:
    """16 (sglang-omni 886 and 1912): 61 % and 72 % of the steps had a shape without a graph.

    Sixteen sentences as long as those of Seed-TTS test-en (35 to 92 characters in nine of ten), up to sixteen at once,
    some drawn and ending where they like, in the buckets a server has: 99 % of the steps of each stage are replays.
    """

    class Unrecorded(Direct):
        """Not run when recorded: a shape that is not used costs nothing."""

        def record(self, function: Function, buffers: tuple[torch.Tensor, ...]) -> Any:
            return lambda: tuple(output.clone() for output in function(*buffers))

    chance = random.Random(16)
    script: list[tuple[int, Message]] = []
    for stream in range(16):
        text = "a" * min(160, max(18, round(chance.gauss(63.5, 17.4))))
        script += asked(stream, text, at=2 * stream, temperature=0.9 * (stream % 2))
    whole = Whole(model, script, slots=16, pages=16 * 32, max_frames=15, step_ns=2 * MS)
    whole.executor.record_graphs(Unrecorded())
    most = 0

    def counted(message: Message) -> None:
        nonlocal most
        most = max(most, len(whole.executor._streams))

    whole.line.on_message = counted
    whole.driver.run()
    ends = [message for message in whole.line.heard if isinstance(message, Finished | Failed)]
    assert len(ends) == 16
    assert {end.detail.partition(" after ")[0] for end in ends if isinstance(end, Failed)} == {"the speech was cut off"}
    assert most >= 12
    print(most, whole.executor.graph_counts(), whole.line.steps)
    assert whole.executor.graphs is not None
    table = whole.executor.graphs.table
    for stage in frame_graphs.STAGES:
        replays = sum(count for (name, _), count in table.replays.items() if name == stage)
        assert replays >= 3, stage
        assert replays / (replays + table.misses[stage]) >= 0.99, stage


# ---- history ---------------------------------------------------------------------------------------------------------


def test_a_penalty_belongs_to_its_stream(model: SpeechModel) -> None:
    """21 (VoxServe's penalty cache): when row 0 ended, its history went on in row 1.

    What is marked as used in a slot are the codes that its stream has drawn, whoever came and went beside it.
    """
    sampling = Sampling(repetition_penalty=1.9)
    driver = ExecutorDriver(model, streams=3)
    used: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}

    def note(streams: list[int]) -> None:
        for stream in streams:
            used[stream].add(int(driver.executor.state.codes[driver.streams[stream].slot, 0]))

    for stream in (0, 1):
        driver.open(stream, stream, "some text", seed=5 + stream, sampling=sampling)
    driver.prefill([0, 1])
    driver.depth([0, 1])
    note([0, 1])
    for turn in range(6):
        if turn == 2:
            driver.close(0)
            driver.open(2, 0, "other text", seed=5, sampling=sampling)
            driver.prefill([2])
            driver.depth([2])
            note([2])
        going = [1, 2] if turn >= 2 else [0, 1]
        going = [stream for stream in going if driver.goes_on(stream, 20)]
        driver.backbone(going)
        going = [stream for stream in going if driver.goes_on(stream, 20)]
        note(going)
        driver.depth(going)
    for stream in (1, 2):
        marked = driver.executor.state.seen[driver.streams[stream].slot].nonzero().flatten().tolist()
        assert set(marked) - {model.config.end_class} == used[stream]
        assert len(marked) >= 3


def test_no_code_comes_of_a_prompt_that_goes_on(model: SpeechModel) -> None:
    """22 (vllm-omni 7084): the first frame was taken from a prompt of which only a part had run."""
    driver = ExecutorDriver(model, streams=1)
    driver.open(1, 0, "no. " * 8, seed=4)
    u, s = driver.streams[1], driver.executor._streams[1]
    for start in range(0, u.prompt, 7):
        assert s.started == 0
        assert not driver.executor.state.seen[0].any()
        assert not driver.executor.state.hidden[0].any()
        result = driver.run(Stage.PREFILL, {1: (start, min(7, u.prompt - start))}, 1)[1]
        assert not result.error
    assert s.started == 1
    assert driver.executor.state.seen[0].sum() == 1


@torch.inference_mode()
@pytest.mark.parametrize("penalty", [1.0, 1.1, 10.0])
def test_the_end_is_never_penalised(model: SpeechModel, penalty: float) -> None:
    """23 (vllm-omni 7667, 6158): the class that ends speech was lost, and 30 s of repeated silence followed.

    It is the one class that cannot have been used: where all are as likely and all codes have been, it is chosen.
    """
    end = model.config.end_class
    assert end is not None
    state = ExecutorDriver(model, streams=1).executor.state
    state.seen[0] = True
    state.seen[0, end] = False
    logits = torch.full((1, model.config.backbone.classes), 1.0)
    logits[0, end] = 1.001
    sampling = Sampling(temperature=0, repetition_penalty=penalty)
    ints, floats, kind = batch_of([BatchRow(0, 0, 3, sampling)], logits.shape[1], depth=False)
    codes, _ = choose_first(model, state, Batch(ints, floats), kind, logits)
    assert codes.item() == end


@pytest.mark.parametrize("code", [0, 1, "end"])
def test_only_the_end_class_ends_speech(monkeypatch: pytest.MonkeyPatch, code: int | str) -> None:
    """23 (vllm-omni 7667): the text tokenizer's end, 1, was taken for the speech's; it is a code like any other.

    A model that never says its end is stopped at the limit of frames: its sound until then is heard, and whoever asked
    is told.
    """
    model = SpeechModel.load("tiny")
    likeliest = model.config.end_class if code == "end" else code
    logits = torch.zeros(model.config.backbone.classes)
    logits[likeliest] = 9.0
    monkeypatch.setattr(model.backbone, "head", lambda hidden: logits.expand(*hidden.shape[:-1], -1).clone())
    whole = Whole(model, asked(1, "for ever"))
    whole.driver.run()
    (end,) = [message for message in whole.line.heard if isinstance(message, Finished | Failed)]
    frames = 0 if code == "end" else 6
    assert end == Finished(1, 0) if code == "end" else isinstance(end, Failed) and "cut off" in end.detail
    assert len(sound_of(whole.line.heard, 1)) == 2 * frames * model.frame_samples


def test_the_rate_of_speech_does_not_drift() -> None:
    """24 (Qwen3-TTS 239 and 362, osaurus 2321): after half a minute speech grew faster, or another voice's.

    Forty seconds of the nano voice: characters a second, by its own marks, and loudness are the same in the last
    quarter as in the first, within a quarter.
    """
    voice = SpeechModel.load("nano")
    driver = ExecutorDriver(voice, streams=1)
    sentence = "The boat left the harbour early in the morning, and nobody on the shore saw it go. "
    driver.open(1, 0, sentence * 9, seed=3)
    driver.prefill([1])
    driver.depth([1])
    u = driver.streams[1]
    while driver.goes_on(1, 3_000):
        driver.backbone([1])
        driver.depth([1])
        if u.made - u.decoded >= 16:
            driver.codec({1: 16})
    sound = driver.decode_all(1, (16,))
    assert u.has_ended
    seconds = len(sound) / 24_000
    assert seconds > 35
    quarter = len(sound) // 4
    spans = [(0, quarter), (3 * quarter, len(sound))]
    rates = []
    for start, end in spans:
        chars = [mark.chars for mark in u.marks if start <= mark.samples <= end]
        rates.append((chars[-1] - chars[0]) / quarter)
    assert rates[1] == pytest.approx(rates[0], rel=0.25)
    loudness = [float(np.sqrt(np.mean(sound[start:end] ** 2))) for start, end in spans]
    assert loudness[1] == pytest.approx(loudness[0], rel=0.25)


def test_segments_of_the_unguided_row_are_counted_once() -> None:
    """A stream's marks are shared out over the text that is spoken, not over what surrounds it in the prompt."""
    driver = ExecutorDriver(SpeechModel.load("tiny"), streams=1)
    driver.open(1, 0, [TextSegment((1, 2, 3), (0, 0, 0)), TextSegment((65, 66), (1, 2))])
    assert driver.executor._streams[1].ends == [1, 2]


# ---- load ------------------------------------------------------------------------------------------------------------


def simulated_load(policy: Policy) -> list[Outcome]:
    """SIMULATED: thirty-two streams speak on an H100 with graphs, sixteen more come at once."""
    costs = H100_GRAPH_COSTS
    scheduler = Scheduler(
        specs=H100_SPECS,
        sample_rate=24_000,
        frame_samples=1_920,
        slots=64,
        kv_pages=64 * 60,
        page_tokens=16,
        costs=warmed_up(costs, H100_SPECS, policy.ladder),
        policy=policy,
    )
    running = [Utterance(frames=70, arrival_ns=1 + 53 * MS * number) for number in range(32)]
    late = [Utterance(frames=40, arrival_ns=2_000 * MS) for _ in range(16)]
    utterances = [*running, *late]
    run = simulate(
        scheduler, utterances, costs=costs, sample_rate=24_000, frame_samples=1_920, uniform=random.Random(25).random
    )
    return run.outcomes


def faults_of(outcome: Outcome) -> set[str]:
    """What is wrong with a stream's chunks, as they arrived."""
    faults = set()
    if outcome.chunks[0] != 1:
        faults.add("the first chunk is what had piled up")
    if any(later > 2 * earlier for earlier, later in itertools.pairwise(outcome.chunks)):
        faults.add("a chunk is more than twice the one before")
    dry_ns = None
    for at_ns, duration_ns in outcome.arrivals:
        if dry_ns is not None and at_ns > dry_ns:
            faults.add("a chunk came after the ones before it had been played")
        dry_ns = max(at_ns, dry_ns or 0) + duration_ns
    return faults


def test_a_stream_that_comes_late_is_heard_at_once_and_without_a_gap() -> None:
    """25 (sglang-omni 1055, vllm-omni 2562 and 4913): the first chunk of a stream that came late was all that had piled
    up for it, and under load the second came a second after the first.

    Forty-eight streams: each begins with one frame, grows by rungs, and no chunk arrives later than what was sent
    before it lasts.  One frame and then sixteen, or sixteen at once, and the same load has each of the faults.
    """
    outcomes = simulated_load(Policy())
    assert len(outcomes) == 48
    assert {outcome.ending for outcome in outcomes} == {Ending.COMPLETE}
    assert set().union(*map(faults_of, outcomes)) == set()
    cliff = set().union(
        *map(
            faults_of,
            simulated_load(Policy(ladder=(1, 16), lead_cap_ns=None, chunk_by_slack=False, flushes_early=False)),
        )
    )
    assert cliff == {
        "a chunk is more than twice the one before",
        "a chunk came after the ones before it had been played",
    }
    whole = set().union(*map(faults_of, simulated_load(Policy(ladder=(16,)))))
    assert "the first chunk is what had piled up" in whole
