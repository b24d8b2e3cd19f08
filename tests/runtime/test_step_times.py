"""Step times of a real, very small model: measured, kept, read again, or not."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from breeze_rtc.clock import MS, SECOND, MonotonicClock, VirtualClock
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.runtime import step_times
from breeze_rtc.runtime.engine import Engine
from breeze_rtc.runtime.executor import Executor
from breeze_rtc.runtime.step_times import conditions, known_or_measured, load, measure, save
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.slots import pages_for
from breeze_rtc.scheduling.step import Stage

STREAMS = 4
MADE_FOR = {"processor": "this one"}


def table() -> CostTable:
    return CostTable({(stage, 4, 16 if stage <= Stage.PREFILL else 1): 5 * MS for stage in Stage})


@pytest.fixture(scope="module", params=["tiny", "tiny-pointer"])
def model(request: pytest.FixtureRequest) -> SpeechModel:
    return SpeechModel.load(request.param)


@pytest.fixture
def executor(model: SpeechModel) -> Executor:
    return Executor(model, max_streams=STREAMS, kv_pages=STREAMS * pages_for(1_000, 16, 1))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_every_stage_is_measured_and_nothing_stays_open(model: SpeechModel, executor: Executor) -> None:
    """In the batch sizes there are, within the time there is; the share that is done climbs to 1."""
    clock = MonotonicClock()
    shares: list[float] = []
    began_at = clock.now()
    costs = measure(model, executor, clock, streams=STREAMS, told=shares.append, budget_ns=2 * SECOND)
    assert clock.now() - began_at < 4 * SECOND
    kinds = {(Stage(stage), bucket, size) for stage, bucket, size, _ in costs.state()["kinds"]}
    assert {stage for stage, _, _ in kinds} == set(Stage)
    for stage, spec in executor.specs.items():
        assert (stage, spec.buckets[0], 16 if stage <= Stage.PREFILL else 1) in kinds
    assert (Stage.CODEC, 1, 2) in kinds
    assert all(0 < costs.predict_ns(stage, bucket, size) < SECOND for stage, bucket, size in kinds)
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert not executor._streams


def test_a_second_start_reads_what_the_first_has_measured(
    model: SpeechModel, executor: Executor, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what serving has taught since; for other threads or another model it measures again."""
    told: list[float] = []
    monkeypatch.setattr(step_times, "LADDER", (1, 2))

    def start(threads: int = 1) -> tuple[CostTable, Callable[[], None]]:
        return known_or_measured(model, executor, MonotonicClock(), threads=threads, streams=STREAMS, told=told.append)

    costs, keep = start()
    assert told
    for _ in range(100):
        costs.observe(Stage.CODEC, 4, 2, 77 * MS)
    keep()
    told.clear()
    again, _ = start()
    assert told == []
    assert again.state() == costs.state()
    start(threads=2)
    assert told
    assert len(list(home.glob("breeze_rtc/step_times/*"))) == 2


def test_the_shapes_of_a_model_are_its_name(model: SpeechModel) -> None:
    """Other values take as long; another shape does not."""
    before = conditions(model, torch.device("cpu"), 1)
    assert before["processor"]
    assert conditions(SpeechModel.load("nano"), torch.device("cpu"), 1) != before
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert conditions(model, torch.device("cpu"), 1) == before


def test_a_file_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    """Whole, in a folder that is made for it, and nothing beside it."""
    path = tmp_path / "new" / "folder" / "times.json"
    assert load(path, MADE_FOR) is None
    save(path, MADE_FOR, table())
    save(path, MADE_FOR, table())
    again = load(path, MADE_FOR)
    assert again is not None
    assert again.state() == table().state()
    assert [file.name for file in path.parent.iterdir()] == ["times.json"]


def broken(**changes: object) -> str:
    return json.dumps({"format": 3, "made_for": MADE_FOR, "table": table().state()} | changes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        "\udcff",
        broken()[:-20],
        broken(format=0),
        broken(made_for={"processor": "another one"}),
        broken(table={}),
        broken(table={"kinds": [[4, 1, 1, [-5]]], "stages": []}),
        broken(table={"kinds": [[4, 1, 1, [10**18]]], "stages": []}),
        broken(table={"kinds": [[9, 1, 1, [5]]], "stages": []}),
        broken(table={"kinds": 5, "stages": []}),
        json.dumps({"made_for": MADE_FOR}),
    ],
)
def test_a_file_that_is_broken_or_foreign_is_ignored(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With one line that names it."""
    path = tmp_path / "times.json"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert load(path, MADE_FOR) is None
    (record,) = caplog.records
    assert str(path) in record.message
    assert "measured again" in record.message


def test_a_full_disk_keeps_the_old_file_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a file is never seen, and no other is left behind."""
    path = tmp_path / "times.json"
    save(path, MADE_FOR, table())

    def full(document: object, file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(step_times.json, "dump", full)
    save(path, MADE_FOR, CostTable())
    monkeypatch.undo()
    (record,) = caplog.records
    assert "No space left" in record.message
    assert [file.name for file in tmp_path.iterdir()] == ["times.json"]
    again = load(path, MADE_FOR)
    assert again is not None
    assert again.state() == table().state()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file stands where the folder would be."""
    (tmp_path / "file").write_text("")
    save(tmp_path / "file" / "times.json", MADE_FOR, table())
    assert load(tmp_path / "file" / "times.json", MADE_FOR) is None
    assert "cannot be kept" in caplog.records[0].message


@pytest.mark.parametrize("named", ["", "relative/folder", None])
def test_the_cache_is_the_users_own(named: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`XDG_CACHE_HOME` where it is a whole path, else `~/.cache`; a user without a home has a folder all the same."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    if named is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert step_times._folder() == tmp_path / ".cache" / "breeze_rtc" / "step_times"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert step_times._folder().is_absolute()


async def test_an_engine_measures_once_and_keeps_what_it_learns(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first start says how far it is; the next does not measure, and predicts from its first step on.  Where
    nothing can be kept, it works all the same.
    """
    caplog.set_level(logging.INFO)
    shares: list[float] = []

    async def run() -> dict[str, int]:
        async with Engine("tiny-pointer", process=False, max_streams=2, on_measuring=shares.append) as engine:
            speech = engine.speak(seed=1)
            speech.push("Hello.")
            speech.end()
            async for _ in speech:
                pass
            async with asyncio.timeout(10):
                while not engine.stats or engine.stats["streams"]:  # noqa: ASYNC110 - another thread's news
                    await asyncio.sleep(0.01)
            return {stage: sum(values["counts"]) for stage, values in engine.stats["step_ratios"].items()}

    await run()
    assert shares[0] == 0
    assert shares[-1] == 1
    (file,) = home.glob("breeze_rtc/step_times/*.json")  # noqa: ASYNC240 - a small folder
    kept = file.read_text()
    shares.clear()
    counts = await run()
    assert shares == []
    assert counts["PREFILL"] >= 1
    assert file.read_text() != kept
    file.parent.rename(home / "away")
    file.parent.touch()
    counts = await run()
    assert shares
    assert counts["PREFILL"] >= 1


def test_what_a_codec_takes_on_the_cpu_is_measured(model: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """In percent of the sound that it makes; what the first run loads is not counted."""
    clock = VirtualClock()
    sound_ns = 4 * model.frame_samples * SECOND // model.sample_rate
    times = [10 * sound_ns, sound_ns, sound_ns * 3 // 4, sound_ns]
    decode = model.codec.forward

    def slow(codes: torch.Tensor, *rest: object) -> torch.Tensor:
        clock.advance(times.pop(0))
        sound: torch.Tensor = decode(codes, *rest)
        assert sound.shape == (1, 4 * model.frame_samples)
        return sound

    monkeypatch.setattr(model.codec, "forward", slow)
    assert step_times.codec_percent(model, clock) == 75
    assert times == []


@pytest.mark.parametrize(("percent", "measures", "is_apart"), [(89, True, False), (88, True, True), (89, False, True)])
async def test_a_codec_that_is_too_slow_on_the_cpu_goes_to_the_device(
    percent: int, measures: bool, is_apart: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server's start finds it and says so.  Who has no deadlines to keep measures nothing, and gets what he asked
    for."""
    monkeypatch.setattr(step_times, "codec_percent", lambda *_: percent)
    monkeypatch.setattr(step_times, "known_or_measured", lambda *_, **__: (CostTable(), lambda: None))
    async with Engine("tiny", process=False, codec_device="cpu", measures=measures) as engine:
        assert ("the codec on the CPU" in engine.summary) is is_apart
        speech = engine.speak(seed=1)
        speech.push("Hello.")
        speech.end()
        assert b"".join([chunk.pcm async for chunk in speech])
    said = [record.getMessage() for record in caplog.records if "codec" in record.getMessage()]
    assert len(said) == (not is_apart)
    assert all("89 % of the time of one listener" in line and "runs on cpu instead" in line for line in said)


def test_an_engine_with_graphs_keeps_what_its_steps_took_without(tmp_path: Path) -> None:
    """What graphs take is measured at every start, and its first minute is without them."""
    costs = table()
    costs.take_over(Stage.DEPTH, {(4, 1): 1 * MS})
    for _ in range(100):
        costs.observe(Stage.DEPTH, 4, 1, 1 * MS)
    save(tmp_path / "times.json", MADE_FOR, costs)
    next_start = load(tmp_path / "times.json", MADE_FOR)
    assert next_start is not None
    assert next_start.predict_ns(Stage.DEPTH, 4) == 5 * MS
    # It ends before its graphs are there: nothing is lost.
    for _ in range(100):
        next_start.observe(Stage.DEPTH, 4, 1, 5 * MS)
    save(tmp_path / "times.json", MADE_FOR, next_start)
    again = load(tmp_path / "times.json", MADE_FOR)
    assert again is not None
    assert again.predict_ns(Stage.DEPTH, 4) == 5 * MS


def test_times_from_before_the_graphs_are_believed_for_eight_steps() -> None:
    """A machine is measured before its graphs are captured, and they make a stage's steps several times faster, also in
    the batches that have not run since."""
    rows = (1, 2, 4, 8, 16)
    costs = CostTable({(Stage.DEPTH, count, 1): (40 + count) * MS for count in rows})
    for _ in range(200):
        costs.observe(Stage.DEPTH, 1, 1, 41 * MS)
    assert costs.predict_ns(Stage.DEPTH, 16) > 50 * MS
    for _ in range(8):
        costs.observe(Stage.DEPTH, 1, 1, 5 * MS)
    assert 6 * MS < costs.predict_ns(Stage.DEPTH, 16) < 10 * MS
