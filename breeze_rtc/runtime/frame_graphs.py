"""Which shapes of a model's steps have graphs, and how a step's rows are brought into one.

One small set of buckets a stage:

| stage    | bucket                    | what else makes a shape                                |
| -------- | ------------------------- | ------------------------------------------------------ |
| text     | tokens over all segments  | at most `PACK_ROWS` segments                           |
| prefill  | tokens over all prompts   | at most `PACK_ROWS` rows of at most `PROMPT_COLUMNS`   |
| backbone | rows                      | rows of a stream (1 to 3), positions (`GRAPH_COLUMNS`) |
| depth    | rows                      | rows of a stream                                       |
| codec    | rows                      | frames (`GRAPH_FRAMES`)                                |

What does not fit (a longer prompt or history, a nucleus limit) is told so and runs eagerly.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from breeze_rtc.clock import MS, Clock
from breeze_rtc.models.attention import Ragged
from breeze_rtc.models.depth import DepthWay
from breeze_rtc.models.speech_model import SpeechModel
from breeze_rtc.runtime.frame_steps import (
    Batch,
    Kind,
    SlotState,
    batch_of,
    codec_frames,
    depth_frame,
    first_codes,
    next_hidden,
    pad_row,
    prompt_hidden,
)
from breeze_rtc.runtime.graphs import GraphTable, Key, Recorder, StepGraph
from breeze_rtc.runtime.kv_cache import KVRow, PagedKV, PromptPlaces
from breeze_rtc.runtime.stream_state import StreamState
from breeze_rtc.scheduling.step import Stage

log = logging.getLogger(__name__)

GRAPH_COLUMNS = (128, 512, 2_048)
"""Positions of the backbone, past and new, that its graphs are made for; a longer history runs eagerly."""
GRAPH_FRAMES = (1, 2, 4, 8, 16)
"""Frames per row that the codec's graphs are made for."""
DUAL_ROWS = 4
"""Streams of a step for which there are graphs with dual guidance; three rows are computed for each."""
GRAPH_TOP_K = 64
"""Graphs draw among so many codes at most: no full sort is needed.  Rows that want more run eagerly."""
GRAPH_TOKENS = (32, 64, 128, 256, 512)
"""Tokens over all pieces that the graphs of text and prompts are made for."""
PACK_ROWS = 8
"""Pieces of text, or of prompts, in one call."""
PACK_TOKENS = GRAPH_TOKENS[-1]
"""Tokens in one call, unless a single piece has more."""
LONGEST_PIECE = 256
"""Tokens of one piece in a graph: attention is as wide as the longest might be."""
PROMPT_COLUMNS = 512
"""Positions of a prompt, those of its voice included, that the graphs of prompts are made for."""
DEPTH_WAYS = ("eager", "compiled", "fused")
"""Ways of running the depth decoder's passes; a graph of each is timed, and the fastest is taken."""
REPLAYS_TIMED = 5
STAGES = ("depth", "backbone", "codec", "prefill", "text")
"""In the order in which they are recorded: what makes most of a frame's time comes first."""

Times = dict[tuple[int, int], int]
"""ns by (bucket, size): see `scheduling.costs`."""

Piece = tuple[StreamState | None, int, KVRow, Tensor]
"""A piece of a prompt: the stream whose slot takes the hidden state behind it, None where the prompt goes on; which of
its rows; where it stands; and what is read there, (count, hidden)."""


def packs(lengths: Sequence[int]) -> list[range]:
    """Pieces of these lengths, in order, shared out over calls of at most `PACK_ROWS` and `PACK_TOKENS`."""
    shares: list[range] = []
    start = tokens = 0
    for index, length in enumerate(lengths):
        if index > start and (index - start == PACK_ROWS or tokens + length > PACK_TOKENS):
            shares.append(range(start, index))
            start, tokens = index, 0
        tokens += length
    if lengths:
        shares.append(range(start, len(lengths)))
    return shares


class FrameGraphs:
    """The graphs of one executor's steps.  Each method gives what the step of the same name computes, or None where no
    graph fits."""

    def __init__(
        self,
        model: SpeechModel,
        state: SlotState,
        kv: PagedKV,
        recorder: Recorder,
        *,
        frame_rows: tuple[int, ...],
        sound_rows: tuple[int, ...],
        dummy: int,
        turn: RLock,
        clock: Clock,
    ) -> None:
        """frame_rows: buckets of BACKBONE and DEPTH; sound_rows: of CODEC; dummy: the slot of pads.  turn: held by who
        replays a graph, until what it gave is read or copied."""
        assert model.config.feed == "prefix", "the graphs are of a model that reads nothing but its own past"
        self.table = GraphTable()
        self.recorded = 0.0
        """Share of the shapes that are recorded."""
        self.times: deque[tuple[Stage, Times]] = deque()
        """What the steps of a stage take that graphs have taken over; who reads it takes it away."""
        self.turn = turn
        self._recorder = recorder
        self._model = model
        self._state = state
        self._kv = kv
        self._frame_rows = frame_rows
        self._sound_rows = sound_rows
        self._dummy = dummy
        self._device = state.codes.device
        self._clock = clock
        self.depth_ways: dict[str, DepthWay] = {}
        """The ways of running the depth decoder's passes that there are on this machine."""
        # The one that the graphs run; None: as they run without graphs.
        self._depth_way: DepthWay | None = None

    def record(self, told: Callable[[float], None] = lambda share: None) -> None:
        """Record every shape, stage by stage, the largest of each first, and take a stage into use when it is whole.
        What its steps will take is measured before, and said in `times`.

        It takes a minute, and may run on a thread of its own while steps run.  What a recording raises, this raises;
        the stages before it are of use.  told: how much is done, 0 to 1.
        """
        shapes = {stage: self._shapes(stage) for stage in STAGES}
        total = sum(map(len, shapes.values()))
        done = 0
        for stage, keys in shapes.items():
            graphs: dict[Key, StepGraph] = {}
            times: Times = {}
            # The codec's graphs run beside the others, so they share no memory with them.
            recorder = type(self._recorder)() if stage == "codec" else self._recorder
            with torch.inference_mode():
                if stage == "depth" and recorder.compiles:
                    self._choose_depth(keys[0])
                for key in keys:
                    function, *inputs = self._recordable(key)
                    graph = graphs[key] = StepGraph(recorder, function, tuple(inputs))
                    kind = _kind(key)
                    # On meta there is nothing that could be replayed.
                    if kind is not None and self._device.type != "meta":
                        times[kind] = self._least_ns(graph, inputs)
                    done += 1
                    self.recorded = done / total
                    told(self.recorded)
            self.table.publish(graphs)
            if times:
                self.times.append((Stage[stage.upper()], times))

    def _choose_depth(self, key: Key) -> None:
        """Let the graphs run the depth decoder in the way whose graph of the largest shape is the fastest on this
        machine.  Steps that run eagerly meanwhile go on as they are."""
        self.depth_ways = {name: way for name in DEPTH_WAYS if (way := self._depth_by(name)) is not None}
        times_ns = self.depth_times(key)
        name = min(times_ns, key=times_ns.__getitem__, default="eager")
        said = ", ".join(f"{other} {ns / MS:.2f} ms" for other, ns in times_ns.items())
        log.info("a depth step of %d rows takes %s: it runs %s", key[1], said, name)
        self._depth_way = self.depth_ways.get(name)

    def _depth_by(self, name: str) -> DepthWay | None:
        try:
            return self._model.depth.way(name)
        except Exception:
            # No compiler or Triton, or one that cannot do this: a reason to run as it is.
            log.warning("the depth decoder cannot be %s here", name, exc_info=True)
            return None

    def depth_times(self, key: Key) -> dict[str, int]:
        """How long a graph of this shape takes in each way, in ns; those that cannot be captured are left out."""
        chosen = self._depth_way
        times_ns = {}
        try:
            for name, way in self.depth_ways.items():
                self._depth_way = way
                try:
                    times_ns[name] = self._replay_ns(key)
                except Exception:
                    log.warning("a depth step cannot be captured %s", name, exc_info=True)
        finally:
            self._depth_way = chosen
        return times_ns

    def _replay_ns(self, key: Key) -> int:
        """The time that a graph of this shape takes."""
        function, *inputs = self._recordable(key)
        return self._least_ns(StepGraph(self._recorder, function, tuple(inputs)), inputs)

    def _least_ns(self, graph: StepGraph, inputs: Sequence[Tensor]) -> int:
        """The time that a graph takes from its inputs to a result that can be read, as a step does: the least of some,
        for whatever else runs can only add to it."""
        times = []
        for _ in range(REPLAYS_TIMED):
            # Between two steps: what a step's own replay gave may lie where this one works.
            with self.turn:
                _wait_for(inputs[0])
                began_ns = self._clock.now()
                _wait_for(graph.run(*inputs)[0])
                times.append(self._clock.now() - began_ns)
        return min(times)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def text(self, tokens: list[tuple[int, ...]]) -> Tensor | None:
        """Vectors of segments, one behind another: (tokens or more, output)."""
        lengths = [len(segment) for segment in tokens]
        total = sum(lengths)
        bucket = self._token_bucket(lengths)
        graph = self.table.get(None if bucket is None else ("text", bucket), "text", total)
        if graph is None or bucket is None:
            return None
        ragged = _ragged(lengths, bucket)
        flat = torch.zeros(bucket, dtype=torch.int64)
        flat[:total] = torch.tensor([token for segment in tokens for token in segment])
        counts = torch.tensor(lengths + [0] * (len(ragged.places) - len(lengths)))
        (vectors,) = graph.run(flat, counts, ragged.places, ragged.back)
        return vectors

    def prefill(self, pieces: list[Piece]) -> bool:
        """Run pieces of prompts and put the hidden states behind them into the slots.  False: nothing was done."""
        rows = [row for _, _, row, _ in pieces]
        lengths = [row.count for row in rows]
        bucket = self._token_bucket(lengths)
        if bucket is not None and max(row.start + row.count for row in rows) > PROMPT_COLUMNS:
            bucket = None
        graph = self.table.get(None if bucket is None else ("prefill", bucket), "prefill", sum(lengths))
        if graph is None or bucket is None:
            return False
        inputs = prompt_inputs(self._kv, pieces, _ragged(lengths, bucket), PROMPT_COLUMNS, self._dummy)
        graph.run(*inputs)
        return True

    def backbone(self, streams: list[StreamState]) -> Tensor | None:
        """Code 0 of each stream's next frame, and whether its logits were finite: (streams or more, 2)."""
        starts = [[s.prompt(index) + s.started - 1 for index in range(len(s.tables))] for s in streams]
        columns = next((n for n in GRAPH_COLUMNS if n > max(map(max, starts))), 0)
        guides = max(len(s.tables) for s in streams) - 1
        bucket = self._rows(len(streams), guides)
        ints, floats, kind = self._batch(streams, [s.started for s in streams], bucket, depth=False)
        graph = self._graph(("backbone", bucket, guides, columns), kind, len(streams))
        if graph is None:
            return None
        # Rows of streams and pads, then their twins; a stream without one has a pad there.
        rows: list[KVRow | None] = []
        for index in range(1 + guides):
            rows += [
                KVRow(s.tables[index], start[index], 1) if index < len(s.tables) else None
                for s, start in zip(streams, starts, strict=True)
            ]
            rows += [None] * (bucket - len(streams))
        slots = torch.tensor([self._dummy if row is None else streams[n % bucket].slot for n, row in enumerate(rows)])
        (chosen,) = graph.run(ints, floats, slots, *self._kv.places(rows, len(rows), columns))
        return chosen

    def depth(self, streams: list[StreamState], frames: list[int]) -> Tensor | None:
        """The other codes of each stream's frame, into the slots: (streams or more,), finite where all logits were."""
        guides = max(len(s.tables) for s in streams) - 1
        bucket = self._rows(len(streams), guides)
        ints, floats, kind = self._batch(streams, frames, bucket, depth=True)
        graph = self._graph(("depth", bucket, guides), kind, len(streams))
        return None if graph is None else graph.run(ints, floats)[0]

    def sound(self, streams: list[StreamState], frames: int, least: int) -> Callable[[], Tensor] | None:
        """What makes the next `frames` frames of each stream, in at least so many rows: (streams or more, samples)
        float32."""
        bucket = next((n for n in self._sound_rows if n >= max(least, len(streams))), 0)
        # An odd chunk (the last of a stream may be any) is some that are not, one after the other.
        sizes = [n for n in sorted(GRAPH_FRAMES, reverse=True) if n & frames] if frames < 2 * max(GRAPH_FRAMES) else []
        if sum(sizes) != frames:
            sizes = [frames]
        pads = bucket - len(streams)
        slots = torch.tensor([s.slot for s in streams] + [self._dummy] * pads)
        starts = torch.tensor([s.decoded for s in streams] + [0] * pads)
        graphs = []
        for size in sizes:
            graph = self.table.get(("codec", bucket, size), "codec", len(streams))
            if graph is None:
                return None
            graphs.append(graph)

        def work() -> Tensor:
            pieces = []
            start = starts
            for size, graph in zip(sizes, graphs, strict=True):
                sound = graph.run(slots, start)[0].float()
                # The next replay overwrites it.
                pieces.append(sound.clone() if len(sizes) > 1 else sound)
                start = start + size
            return torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0]

        return work

    # ---- shapes ------------------------------------------------------------------------------------------------------

    def _shapes(self, stage: str) -> list[Key]:
        """Keys of a stage's graphs, the largest first."""
        shapes: list[Key] = []
        if stage in {"text", "prefill"}:
            shapes += [(stage, tokens) for tokens in GRAPH_TOKENS]
        elif stage == "codec":
            shapes += [(stage, rows, frames) for rows in self._sound_rows for frames in GRAPH_FRAMES]
        else:
            for guides in (0, 1, 2):
                for rows in self._frame_rows:
                    # Dual guidance is too rare to be worth a third of all graphs: many such streams run eagerly.
                    if (1 + guides) * rows > self._frame_rows[-1] or (guides == 2 and rows > DUAL_ROWS):
                        continue
                    shapes += [("depth", rows, guides)] if stage == "depth" else []
                    shapes += [("backbone", rows, guides, n) for n in GRAPH_COLUMNS] if stage == "backbone" else []
        return sorted(shapes, key=lambda key: -key[1])

    def _recordable(self, key: Key) -> tuple[Any, ...]:
        """The function of one shape, and inputs of pads to run it with."""
        stage, bucket, *shape = key
        if stage == "text":
            return self._text_step(bucket)
        if stage == "prefill":
            return self._prefill_step(bucket)
        if stage == "codec":
            return self._codec_step(bucket, *shape)
        return self._frame_step(stage, bucket, *shape)

    def _text_step(self, tokens: int) -> tuple[Any, ...]:
        model, device = self._model, self._device
        ragged = _ragged([], tokens)

        def encode(tokens: Tensor, lengths: Tensor, places: Tensor, back: Tensor) -> tuple[Tensor, ...]:
            return (model.text.packed(tokens, lengths, Ragged(places, back)),)

        nothing = torch.zeros(len(ragged.places), dtype=torch.int64, device=device)
        blank = torch.zeros(tokens, dtype=torch.int64, device=device)
        return encode, blank, nothing, ragged.places.to(device), ragged.back.to(device)

    def _prefill_step(self, tokens: int) -> tuple[Any, ...]:
        model, state, kv = self._model, self._state, self._kv

        def prefill(  # noqa: PLR0917 (a graph's inputs)
            x: Tensor,
            places: Tensor,
            back: Tensor,
            read: Tensor,
            write: Tensor,
            starts: Tensor,
            ends: Tensor,
            slots: Tensor,
            twins: Tensor,
        ) -> tuple[Tensor, ...]:
            at = PromptPlaces(read, write, starts)
            prompt_hidden(model, state, kv, x, Ragged(places, back), at, ends, slots, twins)
            return (slots,)

        like = model.depth.table.weight.new_zeros(0, model.config.backbone.block.hidden)
        inputs = prompt_inputs(kv, [], _ragged([], tokens), PROMPT_COLUMNS, self._dummy, like=like)
        return prefill, *(tensor.to(self._device) for tensor in inputs)

    def _codec_step(self, rows: int, frames: int) -> tuple[Any, ...]:
        model, state = self._model, self._state
        slots = torch.full((rows,), self._dummy, device=self._device)
        return (
            lambda slots, starts: (codec_frames(model, state, slots, starts, frames),),
            slots,
            torch.zeros_like(slots),
        )

    def _frame_step(self, stage: str, rows: int, *shape: int) -> tuple[Any, ...]:
        model, state = self._model, self._state
        depth = stage == "depth"
        guides = shape[0]
        ints, floats, _ = self._batch([], [], rows, depth=depth)
        kind = Kind(
            draws=True,
            max_top_k=min(GRAPH_TOP_K, self._classes(depth=depth)),
            uses_top_p=False,
            penalises=not depth,
            guides=guides,
        )
        ints, floats = ints.to(self._device), floats.to(self._device)
        if depth:
            way = self._depth_way
            return lambda ints, floats: (depth_frame(model, state, Batch(ints, floats), kind, way),), ints, floats
        twin_rows = (1 + guides) * rows
        twins = torch.arange(twin_rows, device=self._device) // rows

        def frame(  # noqa: PLR0917 (a graph's inputs)
            ints: Tensor, floats: Tensor, slots: Tensor, read: Tensor, write: Tensor, starts: Tensor
        ) -> tuple[Tensor, ...]:
            next_hidden(model, state, slots, twins, starts, self._kv.fixed(read, write, starts))
            codes, is_good = first_codes(model, state, Batch(ints, floats), kind)
            return (torch.stack((codes, is_good.long()), 1),)

        slots = torch.full((twin_rows,), self._dummy, device=self._device)
        places = [tensor.to(self._device) for tensor in self._kv.places([], twin_rows, shape[1])]
        return frame, ints, floats, slots, *places

    def _classes(self, *, depth: bool) -> int:
        return self._model.config.depth.vocab if depth else self._model.config.backbone.classes

    def _batch(
        self, streams: list[StreamState], frames: list[int], bucket: int, *, depth: bool
    ) -> tuple[Tensor, Tensor, Kind]:
        rows = [s.batch_row(frame) for s, frame in zip(streams, frames, strict=True)]
        rows += [pad_row(self._dummy)] * (bucket - len(rows))
        return batch_of(rows, self._classes(depth=depth), depth=depth)

    def _rows(self, streams: int, guides: int) -> int:
        """Rows of the smallest graph that so many streams fit; as many as there are where none does."""
        most = self._frame_rows[-1] // (1 + guides)
        return next((n for n in self._frame_rows if streams <= n <= most), streams)

    @staticmethod
    def _token_bucket(lengths: list[int]) -> int | None:
        """The smallest bucket that holds pieces of these lengths."""
        return next(
            (
                n
                for n in GRAPH_TOKENS
                if n >= sum(lengths) and _most_rows(n) >= len(lengths) and _longest(n) >= max(lengths)
            ),
            None,
        )

    def _graph(self, key: Key, kind: Kind, live: int) -> StepGraph | None:
        """The graph of a shape, if rows of this kind can use it."""
        classes = self._classes(depth=key[0] == "depth")
        is_wide = kind.draws and classes > GRAPH_TOP_K and not 0 < kind.max_top_k <= GRAPH_TOP_K
        return self.table.get(None if is_wide or kind.uses_top_p else key, key[0], live)


def prompt_inputs(
    kv: PagedKV,
    pieces: list[Piece],
    ragged: Ragged,
    columns: int,
    dummy: int,
    *,
    like: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """What `prompt_hidden` is given of these pieces, as tensors: what is read where they are, all else on the host.

    like: (0, hidden), of the type and on the device of what is read, where there is no piece.
    """
    count = len(ragged.places)
    vectors = [x for *_, x in pieces]
    like = vectors[0] if like is None else like
    pads = len(ragged.back) - sum(map(len, vectors))
    x = torch.cat([*vectors, like.new_zeros(pads, like.shape[-1])])
    places = kv.prompt([row for _, _, row, _ in pieces], ragged, columns)
    ends = np.zeros(count, np.int64)
    slots = np.full(count, dummy, np.int64)
    twins = np.zeros(count, np.int64)
    at = 0
    for index, (s, row_index, row, _) in enumerate(pieces):
        at += row.count
        if s is not None:
            ends[index], slots[index], twins[index] = at - 1, s.slot, row_index
    host = (ragged.places, ragged.back, *places, *map(torch.from_numpy, (ends, slots, twins)))
    return x, *host


def _wait_for(tensor: Tensor) -> None:
    """Until the device has done what was asked of it before, this tensor included."""
    tensor.flatten()[:1].tolist()


def _kind(key: Key) -> tuple[int, int] | None:
    """Bucket and size, as the scheduler tells steps apart (`scheduling.costs`), of the largest steps that a shape is
    for; None where another shape stands for those."""
    stage, bucket, *shape = key
    if stage in {"text", "prefill"}:
        return _most_rows(bucket), bucket
    if stage == "codec":
        return bucket, shape[0]
    # With guidance as many rows are computed for fewer streams.  A history of middle length stands for all.
    is_usual = shape[0] == 0 and (stage == "depth" or shape[1] == GRAPH_COLUMNS[len(GRAPH_COLUMNS) // 2])
    return (bucket, 1) if is_usual else None


def _ragged(lengths: list[int], tokens: int) -> Ragged:
    return Ragged.of(lengths, tokens, _most_rows(tokens), _longest(tokens))


def _most_rows(tokens: int) -> int:
    return min(PACK_ROWS, tokens // 8)


def _longest(tokens: int) -> int:
    return min(tokens, LONGEST_PIECE)
