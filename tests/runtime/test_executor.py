"""The executor: what a stream says does not depend on what runs beside it, nor on how its steps are cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from executor_driver import ExecutorDriver
from numpy.typing import NDArray

from breeze_rtc.clock import VirtualClock
from breeze_rtc.errors import BadSampling, UnknownVoice
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import SpeechModel, TextSegment
from breeze_rtc.runtime.executor import RING_FRAMES, ROW_COUNTS, Executor, independent_row_counts
from breeze_rtc.runtime.kv_cache import Prefix
from breeze_rtc.scheduling.step import Row, Stage, Step

FEEDS = ("tiny", "tiny-pointer")
FRAMES = 18
TEXTS = [
    "one, two. ",
    "a somewhat longer text, in two parts.",
    "x",
    "what? " * 7,
    "yes",
    "no. " * 20,
    "hm, hm",
    "eight",
]


@pytest.fixture(scope="module", params=FEEDS)
def model(request: pytest.FixtureRequest) -> SpeechModel:
    return SpeechModel.load(request.param)


@pytest.fixture(scope="module")
def prefix() -> SpeechModel:
    return SpeechModel.load("tiny")


@pytest.fixture(scope="module")
def pointer() -> SpeechModel:
    return SpeechModel.load("tiny-pointer")


Sound = NDArray[np.float32]
_ALONE: dict[tuple[object, ...], Sound] = {}


def alone(model: SpeechModel, text: str, seed: int, *, frames: int = FRAMES) -> Sound:
    """What a stream says with the executor to itself, in slot 3, decoded frame by frame."""
    key = (model.config.name, text, seed, frames)
    if key not in _ALONE:
        _ALONE[key] = lone(model, text, seed, frames=frames)
    return _ALONE[key]


def lone(
    model: SpeechModel, text: str, seed: int, *, slot: int = 3, frames: int = FRAMES, chunks: tuple[int, ...] = (1,)
) -> Sound:
    driver = ExecutorDriver(model)
    driver.open(1, slot, text, seed=seed)
    return driver.speak(1, frames, chunks)


def test_together_is_alone(model: SpeechModel) -> None:
    """Reproduction 9 (vllm-omni 6361, sglang-omni 1399 and 1475: a seed gave other sound in company).

    Eight streams that join at random, run in random parts and are decoded in random chunks each say, sample for sample,
    what each says alone.
    """
    driver = ExecutorDriver(model)
    slots = np.random.default_rng(1).permutation(8).tolist()
    for stream, text in enumerate(TEXTS):
        driver.open(stream, slots[stream], text, seed=100 + stream)
    together = driver.speak_together(list(range(8)), FRAMES, seed=1)
    assert not any(u.error for u in driver.streams.values())
    assert sum(len(pcm) > 0 for pcm in together.values()) >= 6
    for stream, text in enumerate(TEXTS):
        assert np.array_equal(together[stream], alone(model, text, 100 + stream)), f"stream {stream}"


@pytest.mark.parametrize("chunks", [(1, 2, 4, 8, 16), (3,), (16,)])
def test_chunks_do_not_matter(model: SpeechModel, chunks: tuple[int, ...]) -> None:
    """The sound is the same, bit for bit, for any sizes of codec chunks, past the codec's window of 6 frames."""
    whole = alone(model, TEXTS[3], 7)
    assert len(whole) == FRAMES * model.frame_samples
    assert np.array_equal(lone(model, TEXTS[3], 7, chunks=chunks), whole)


def test_slot_does_not_matter_and_seed_does(model: SpeechModel) -> None:
    """Randomness belongs to the request: another slot gives the same, another seed something else."""
    first = alone(model, TEXTS[1], 5)
    assert np.array_equal(first, lone(model, TEXTS[1], 5, slot=7))
    assert not np.array_equal(first, lone(model, TEXTS[1], 6))


def test_a_used_slot_leaves_nothing_behind(model: SpeechModel) -> None:
    """A second stream in the slot and the pages of a closed one says what it says in fresh ones (reproduction 5)."""
    driver = ExecutorDriver(model)
    driver.open(1, 3, TEXTS[3], seed=1)
    driver.speak(1, 12)
    driver.close(1)
    driver.executor.close(1)
    driver.open(2, 3, TEXTS[1], seed=5)
    assert np.array_equal(driver.speak(2, FRAMES), alone(model, TEXTS[1], 5))


@pytest.mark.parametrize("chunk", [3, 16])
def test_prefill_in_pieces(prefix: SpeechModel, chunk: int) -> None:
    """A prompt of 80 tokens run in pieces leads to the same sound as run at once (reproduction 22)."""
    driver = ExecutorDriver(prefix)
    driver.open(1, 3, TEXTS[5], seed=4)
    driver.prefill([1], chunk)
    driver.depth([1])
    while driver.goes_on(1, 10):
        driver.backbone([1])
        driver.depth([1])
    assert np.array_equal(driver.decode_all(1, (1,)), alone(prefix, TEXTS[5], 4, frames=10))


def test_pads_touch_nobody(model: SpeechModel) -> None:
    """Poison in every slot and page that is not a stream's own, the dummies' included, never reaches its sound."""
    driver = ExecutorDriver(model)
    driver.open(1, 3, TEXTS[1], seed=5)
    executor = driver.executor
    bad = [slot for slot in range(9) if slot != 3]
    kv = executor._kv
    zero = kv.pool[:, :, :, kv.zero].clone()
    with torch.inference_mode():
        executor.state.codec.flat[bad] = float("nan")
        executor.state.hidden[bad] = float("nan")
        executor.state.codes[bad] = model.config.codec.codes - 1
        kv.pool.fill_(float("nan"))
        kv.pool[:, :, :, kv.zero] = zero
    assert np.array_equal(driver.speak(1, FRAMES), alone(model, TEXTS[1], 5))
    assert torch.equal(kv.pool[:, :, :, kv.zero], zero), "the token that pads read stays zero"


def test_nan_in_one_row_is_that_rows_error(model: SpeechModel) -> None:
    """A stream whose state has gone bad fails by name; the one beside it says what it says alone."""
    driver = ExecutorDriver(model)
    driver.open(1, 3, TEXTS[1], seed=5)
    driver.open(2, 4, TEXTS[3], seed=6)
    driver.prefill([1, 2])
    driver.depth([1, 2])
    table = driver.executor._streams[2].tables[0]
    place = int(table.places(0, 1)[0])
    with torch.inference_mode():
        driver.executor._kv.pool[:, :, :, place] = float("nan")
    while driver.goes_on(1, FRAMES):
        driver.backbone([s for s in (1, 2) if driver.goes_on(s, FRAMES)])
        driver.depth([s for s in (1, 2) if not driver.streams[s].error])
    assert "not finite" in driver.streams[2].error
    assert driver.streams[1].error == ""
    assert np.array_equal(driver.decode_all(1, (1,)), alone(model, TEXTS[1], 5))


def test_an_exception_is_every_rows_error(pointer: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be put down to a row fails the whole step, and nothing is raised into the driver."""
    driver = ExecutorDriver(pointer)
    driver.open(1, 0, "hello", seed=1)
    driver.open(2, 1, "hello", seed=1)

    def broken(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(driver.executor.model.depth, "embed_frame", broken)
    results = driver.run(Stage.PREFILL, {1: (0, 1), 2: (0, 1)}, 4)
    assert [result.error for result in results.values()] == ["MemoryError: no room"] * 2


def test_a_row_of_a_closed_stream_is_its_own_error(pointer: SpeechModel) -> None:
    """A stream closed while a step was on its way is told apart from those that run."""
    driver = ExecutorDriver(pointer)
    driver.open(1, 0, "hello there", seed=1)
    driver.open(2, 1, "hello there", seed=1)
    driver.executor.close(2)
    results = driver.run(Stage.PREFILL, {1: (0, 1), 2: (0, 1)}, 4)
    assert results[1].error == ""
    assert "not open" in results[2].error


def test_frames_that_are_not_there(model: SpeechModel) -> None:
    """A codec step for frames not made is that row's error."""
    driver = ExecutorDriver(model)
    driver.open(1, 0, TEXTS[1], seed=5)
    driver.prefill([1])
    driver.depth([1])
    result = driver.run(Stage.CODEC, {1: (0, 2)}, 1)[1]
    assert "0 to 2 asked, 0 to 1 there" in result.error


def test_too_many_frames_wait_for_the_codec(pointer: SpeechModel) -> None:
    """A frame that would overwrite one not decoded yet is an error, not wrong sound."""
    driver = ExecutorDriver(pointer)
    driver.open(1, 0, "a" * 500, seed=5, sampling={"temperature": 0.0, "depth_temperature": 0.0})
    s = driver.executor._streams[1]
    driver.prefill([1])
    s.made, driver.streams[1].made, s.started = RING_FRAMES, 0, RING_FRAMES + 1
    assert "wait for the codec" in driver.run(Stage.DEPTH, {1: (RING_FRAMES, 1)}, 4)[1].error


# ---- text fed per frame --------------------------------------------------------------------------------------------


def _segments(model: SpeechModel, text: str) -> list[TextSegment]:
    frontend = model.frontend()
    return frontend.push(text) + frontend.end()


def test_text_may_come_late(pointer: SpeechModel) -> None:
    """A stream that waits for its text piece by piece says what it says with all of it at once."""
    text = TEXTS[5] + TEXTS[1]
    segments = _segments(pointer, text)
    assert len(segments) > 4
    driver = ExecutorDriver(pointer)
    driver.open(1, 3, segments[:1], end=False, seed=5)
    waiting = segments[1:]

    def feed() -> None:
        while driver.streams[1].wants_text and waiting:
            driver.add_text(1, [waiting.pop(0)])
            if not waiting:
                driver.executor.end_text(1)
            driver.streams[1].wants_text = driver.executor._streams[1].lacks_text

    driver.prefill([1])
    driver.depth([1])
    waits = 0
    while driver.goes_on(1, 40):
        waits += driver.streams[1].wants_text
        feed()
        driver.backbone([1])
        driver.depth([1])
    assert waits > 2
    assert np.array_equal(driver.decode_all(1, (1,)), alone(pointer, text, 5, frames=40))


def test_pointer_ends_the_speech_and_marks_it(pointer: SpeechModel) -> None:
    """The frame that leaves the last token is the last; its mark is the whole text, at the end of the sound."""
    driver = ExecutorDriver(pointer)
    text = "hello, you."
    driver.open(1, 0, text, seed=3)
    pcm = driver.speak(1, 200, (8,))
    u = driver.streams[1]
    assert u.has_ended
    assert len(pcm) == u.made * 960
    assert (u.marks[-1].samples, u.marks[-1].chars) == (len(pcm), len(text))
    assert [mark.chars for mark in u.marks] == sorted({mark.chars for mark in u.marks})
    assert all(mark.samples % 960 == 0 for mark in u.marks)


def test_marks_come_with_their_sound(pointer: SpeechModel) -> None:
    """A mark is handed over no earlier than the sample it names."""
    driver = ExecutorDriver(pointer)
    driver.open(1, 0, "hello, you.", seed=3)
    driver.prefill([1])
    driver.depth([1])
    while driver.goes_on(1, 500):
        driver.backbone([1])
        driver.depth([1])
    made = 0
    while driver.streams[1].decoded < driver.streams[1].made:
        before = len(driver.streams[1].marks)
        driver.codec({1: 1})
        assert all(made < mark.samples <= made + 960 for mark in driver.streams[1].marks[before:])
        made += 960


def test_no_text_is_no_speech(pointer: SpeechModel) -> None:
    """A text that ends before it began ends at the first position."""
    driver = ExecutorDriver(pointer)
    driver.open(1, 0, "", seed=3)
    assert driver.run(Stage.PREFILL, {1: (0, 1)}, 4)[1].ended


# ---- text as a prefix ----------------------------------------------------------------------------------------------


def test_end_class_ends_the_speech(prefix: SpeechModel) -> None:
    """Speech stops where the model draws the end class; no frame comes of it."""
    driver = ExecutorDriver(prefix)
    driver.open(1, 0, TEXTS[1], seed=101)
    pcm = driver.speak(1, 200, (8,))
    u = driver.streams[1]
    assert u.has_ended
    assert u.error == ""
    assert 0 < len(pcm) == u.started * 1920


def test_positions_end_the_speech(prefix: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt and frames together stop one short of the model's longest sequence."""
    object.__setattr__(prefix.config, "max_positions", 50)
    try:
        driver = ExecutorDriver(prefix)
        driver.open(1, 0, "a" * 40, seed=1, sampling={"temperature": 0.0, "depth_temperature": 0.0})
        driver.speak(1, 100)
    finally:
        object.__setattr__(prefix.config, "max_positions", 2048)
    assert driver.streams[1].has_ended
    assert driver.streams[1].started <= 9


def test_guidance_needs_an_unguided_prompt(prefix: SpeechModel) -> None:
    """A guided stream whose text has no unguided form fails by name."""
    driver = ExecutorDriver(prefix)
    tokens = tuple(range(65, 75))
    row = TextSegment(tokens, tuple(range(1, 11)))
    driver.open(1, 0, [row], seed=1, sampling=Sampling(cfg_scale=3))
    driver.streams[1].rows = 2
    assert "no unguided form" in driver.run(Stage.PREFILL, {1: (0, 10)}, 4)[1].error


def _guided(prefix: SpeechModel) -> list[TextSegment]:
    guided, unguided = tuple(range(65, 95)), tuple(range(70, 82))
    return [TextSegment(unguided, (0,) * 12, row=1), TextSegment(guided, tuple(range(1, 31)))]


@pytest.mark.parametrize("chunk", [1 << 30, 5])
def test_guided_streams_keep_beside_plain_ones(prefix: SpeechModel, chunk: int) -> None:
    """Two backbone rows of unequal length per guided stream: the same alone and in a mixed batch, whatever the
    prefill."""
    options = {"seed": 9, "sampling": Sampling(cfg_scale=3.0)}
    lone = ExecutorDriver(prefix)
    lone.open(1, 5, _guided(prefix), **options)
    expected = lone.speak(1, 12)
    assert lone.streams[1].started > 0
    driver = ExecutorDriver(prefix)
    driver.open(1, 5, _guided(prefix), **options)
    driver.open(2, 2, TEXTS[1], seed=105)
    driver.prefill([1, 2], chunk)
    driver.depth([1, 2])
    while driver.goes_on(1, 12) or driver.goes_on(2, FRAMES):
        going = [s for s, frames in ((2, FRAMES), (1, 12)) if driver.goes_on(s, frames)]
        driver.backbone(going)
        driver.depth(going)
    assert np.array_equal(driver.decode_all(1, (2,)), expected)
    assert np.array_equal(driver.decode_all(2, (2,)), alone(prefix, TEXTS[1], 105))


def test_guidance_changes_the_speech(prefix: SpeechModel) -> None:
    """The unguided row is really read: a stream with another scale says something else."""
    sounds = []
    for scale in (2.0, 5.0):
        driver = ExecutorDriver(prefix)
        driver.open(1, 0, _guided(prefix), seed=9, sampling=Sampling(cfg_scale=scale))
        sounds.append(driver.speak(1, 12))
    assert not np.array_equal(sounds[0], sounds[1])


# ---- what streams have in common -------------------------------------------------------------------------------------

VOICE = [
    TextSegment(tuple(range(40, 57)), (0,) * 17),
    TextSegment((1, 1, 1, 2), (0,) * 4, codes=((1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12))),
]
"""Words and sound of a reference: 21 positions, which end within a page."""


def _text(text: str, row: int = 0) -> list[TextSegment]:
    tokens = tuple(text.encode())
    return [TextSegment(tokens, (0,) * len(tokens) if row else tuple(range(1, len(tokens) + 1)), row)]


def _stored(driver: ExecutorDriver) -> Prefix:
    voice = driver.executor.add_prefix(torch.cat(driver.executor.encode(VOICE)))
    assert voice is not None
    return voice


def _said(driver: ExecutorDriver, texts: list[str], frames: int = 12, **options: object) -> list[Sound]:
    """Streams of one voice side by side, their prompts run five positions a step."""
    for stream, text in enumerate(texts):
        driver.open(stream, stream + 2, _text(text), seed=7 + stream, **options)
    streams = list(range(len(texts)))
    driver.prefill(streams, 5)
    driver.depth(streams)
    while any(driver.goes_on(stream, frames) for stream in streams):
        going = [stream for stream in streams if driver.goes_on(stream, frames)]
        driver.backbone(going)
        driver.depth(going)
    return [driver.decode_all(stream, (2,)) for stream in streams]


def test_a_voice_is_prefilled_once_and_says_what_it_says_written_out(prefix: SpeechModel) -> None:
    """vllm-omni's and sglang-omni's voices bled (sglang-omni issue 350, reproduction 20): streams that begin with a
    stored voice, together with one that does not, say sample for sample what they say with all of it in their own
    prompt, and hold pages for their own text alone."""
    texts = ["first", "the second text is longer"]
    expected = []
    for stream, text in enumerate(texts):
        lone = ExecutorDriver(prefix)
        lone.open(1, 3, VOICE + _text(text), seed=7 + stream)
        expected.append(lone.speak(1, 12))
    driver = ExecutorDriver(prefix, prefix_pages=4)
    voice = _stored(driver)
    driver.open(9, 1, TEXTS[1], seed=5)
    found = _said(driver, texts, prefixes=(voice,))
    assert all(len(sound) for sound in found)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert np.array_equal(driver.speak(9, FRAMES), alone(prefix, TEXTS[1], 5))
    own = driver.streams[0]
    assert len(own.pages) == -(-own.positions // 16)
    assert own.positions <= 5 + 12


def test_guided_rows_share_a_voice(prefix: SpeechModel) -> None:
    """With an instruction over a reference, guided and unguided row begin with the same positions, computed once."""
    options = {"seed": 9, "sampling": Sampling(cfg_scale=3.0)}
    unguided, guided = "plain text", "<with words how> plain text"
    lone = ExecutorDriver(prefix)
    rows = [replace(segment, row=row) for row, text in ((1, unguided), (0, guided)) for segment in VOICE + _text(text)]
    lone.open(1, 5, rows, **options)
    expected = lone.speak(1, 12)
    driver = ExecutorDriver(prefix, prefix_pages=2)
    voice = _stored(driver)
    driver.open(1, 5, _text(unguided, row=1) + _text(guided), prefixes=(voice, voice), **options)
    assert np.array_equal(driver.speak(1, 12), expected)
    assert len(expected) > 0


def test_a_voice_from_the_store_is_not_computed_again(prefix: SpeechModel) -> None:
    """Keys and values that were written down are put back, and no stage runs for them."""
    driver = ExecutorDriver(prefix, prefix_pages=4)
    first = _stored(driver)
    kv = driver.executor.prefix_kv(first)
    assert kv.shape[3] == first.positions == 21
    expected = _said(driver, ["words"], prefixes=(first,))
    driver.close(0)
    again = ExecutorDriver(prefix, prefix_pages=4)
    vectors = torch.full((21, kv.shape[0]), float("nan"))
    second = again.executor.add_prefix(vectors, kv)
    assert second is not None
    assert np.array_equal(_said(again, ["words"], prefixes=(second,))[0], expected[0])


def test_a_voice_that_is_dropped_speaks_on(prefix: SpeechModel) -> None:
    """Its pages are free when the last stream that began with it has closed or been cancelled, and not before."""
    driver = ExecutorDriver(prefix, prefix_pages=2)
    voice = _stored(driver)
    expected = _said(driver, ["some words"], prefixes=(voice,))
    driver.close(0)
    driver.open(0, 2, _text("some words"), seed=7, prefixes=(voice,))
    driver.open(1, 3, _text("others"), seed=8, prefixes=(voice,))
    driver.executor.drop_prefix(voice)
    vectors = torch.zeros(21, prefix.config.text.output)
    assert driver.executor.add_prefix(vectors) is None
    driver.close(1)
    assert driver.executor.add_prefix(vectors) is None
    assert np.array_equal(driver.speak(0, 12), expected[0])
    driver.close(0)
    assert driver.executor.add_prefix(vectors) is not None


def test_texts_of_several_streams_in_one_step(model: SpeechModel) -> None:
    """They are encoded in one call, and what each says is what it says alone."""
    driver = ExecutorDriver(model)
    calls = []
    packed = model.text.packed
    segments = []
    for stream, text in enumerate(TEXTS[:4]):
        driver.open(stream, stream, [], end=False, seed=100 + stream)
        frontend = model.frontend()
        first, *rest = frontend.push(text) + frontend.end()
        segments.append(rest)
        assert driver.executor.add_text(stream, first) == len(first.tokens)
        driver.streams[stream].prompt = len(first.tokens)
    spans = {stream: (0, driver.streams[stream].prompt) for stream in range(4)}
    model.text.packed = lambda *args: calls.append(args) or packed(*args)  # type: ignore[method-assign]
    try:
        driver.run(Stage.TEXT, spans, 4)
    finally:
        model.text.packed = packed  # type: ignore[method-assign]
    assert len(calls) == 1
    for stream, rest in enumerate(segments):
        driver.add_text(stream, rest)
        driver.executor.end_text(stream)
        assert np.array_equal(driver.speak(stream, FRAMES), alone(model, TEXTS[stream], 100 + stream))


# ---- opening and the rest ------------------------------------------------------------------------------------------


def test_open_checks_what_it_is_given(pointer: SpeechModel) -> None:
    """Unknown voices, unknown or impossible sampling values, and guidance where there is none are refused by name."""
    executor = Executor(pointer, max_streams=2, kv_pages=8)
    with pytest.raises(UnknownVoice):
        executor.open(1, 0, voice="nobody")
    with pytest.raises(BadSampling, match="warmth"):
        executor.open(1, 0, sampling={"warmth": 1.0})
    with pytest.raises(BadSampling, match="temperature"):
        executor.open(1, 0, sampling={"temperature": -1.0})
    with pytest.raises(BadSampling, match="cfg_scale"):
        executor.open(1, 0, sampling={"cfg_scale": 2.0})
    executor.open(1, 0, sampling={"top_k": 3.0})
    assert executor._streams[1].sampling.top_k == 3


def test_steps_are_timed_by_the_clock_given(pointer: SpeechModel) -> None:
    """The duration of a step is the clock's, so that a simulation can lend its own."""
    clock = VirtualClock(5)
    executor = Executor(pointer, max_streams=2, kv_pages=8, clock=clock)
    executor.open(1, 0)
    executor.add_text(1, TextSegment((65, 66, 67), (1, 2, 3)))
    inner = executor.model.text.packed

    def slow(*arguments: torch.Tensor) -> torch.Tensor:
        clock.advance(1_234)
        return inner(*arguments)

    executor.model.text.packed = slow  # type: ignore[method-assign]
    try:
        result = executor.run(Step(1, Stage.TEXT, (Row(1, 0, 0, 3),), 1))
    finally:
        executor.model.text.packed = inner  # type: ignore[method-assign]
    assert result.duration_ns == 1_234


def test_a_step_waits_for_the_device_once(pointer: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """BACKBONE and DEPTH read back one tensor each (on CUDA each read is a wait)."""
    driver = ExecutorDriver(pointer)
    driver.open(1, 0, "hello there", seed=1)
    driver.prefill([1])
    reads: list[str] = []
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        original = getattr(torch.Tensor, name)

        def counted(tensor: torch.Tensor, *arguments: object, original=original, name: str = name) -> object:  # type: ignore[no-untyped-def]
            reads.append(name)
            return original(tensor, *arguments)

        monkeypatch.setattr(torch.Tensor, name, counted)
    driver.depth([1])
    assert reads == ["tolist"]
    reads.clear()
    driver.backbone([1])
    assert reads == ["tolist"]


def test_steps_are_padded_to_row_counts_whose_products_agree(model: SpeechModel) -> None:
    """What is measured on this machine holds for other numbers than those it was measured with."""
    counts = independent_row_counts(model)
    assert counts[-1] == ROW_COUNTS[-1]
    assert Executor(model, max_streams=4, kv_pages=64).specs[Stage.DEPTH].buckets[0] == counts[0]
    weight = model.backbone.output.weight
    x = torch.randn(ROW_COUNTS[-1], weight.shape[1], generator=torch.Generator().manual_seed(2))
    whole = torch.nn.functional.linear(x, weight)
    for rows in counts:
        assert torch.equal(torch.nn.functional.linear(x[:rows], weight), whole[:rows]), rows
