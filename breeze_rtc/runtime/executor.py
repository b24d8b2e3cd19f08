"""Runs one `Step` at a time: gathers the state of its rows, pads them, calls the stage, scatters the state back.

The scheduler has chosen; nothing is decided here.  Pads point at the dummy slot and the dummy page, so they touch
nobody.  A row's result does not depend on what else is in the step: shapes that would make a CPU kernel round
differently are avoided (`independent_row_counts`, and see `kv_cache` and `codec`), and randomness is a hash of the
stream's own seed.
So eight streams together say, sample for sample, what each says alone.

On the way from queue to queue a step waits for the device once, to learn what ended and how far the text has been read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from breeze_rtc.clock import Clock, MonotonicClock
from breeze_rtc.errors import BadSampling, UnknownVoice
from breeze_rtc.models.pointer import LOOK_AHEAD
from breeze_rtc.models.presets import ModelConfig
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import SpeechModel, TextSegment
from breeze_rtc.playback import TextMark
from breeze_rtc.runtime.frame_steps import (
    RING_FRAMES,
    Batch,
    BatchRow,
    Kind,
    SlotState,
    batch_of,
    choose_first,
    codec_frames,
    depth_frame,
    first_codes,
    next_hidden,
)
from breeze_rtc.runtime.graphs import GraphTable, Recorder, StepGraph
from breeze_rtc.runtime.kv_cache import KVRow, PagedKV, PageTable
from breeze_rtc.runtime.lane import OnItsWay, lane_of
from breeze_rtc.runtime.sounding import Sounding
from breeze_rtc.runtime.step_sessions import StepSessions
from breeze_rtc.scheduling.step import Row, RowResult, Stage, StageSpec, Step, StepResult

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Rows that a step may be padded to, as far as this machine's matrix products allow: see `independent_row_counts`."""
GRAPH_COLUMNS = (128, 512, 2_048)
"""Positions of the backbone, past and new, that its graphs are made for; a longer history runs eagerly."""
GRAPH_FRAMES = (1, 2, 4, 8, 16)
"""Frames per row that the codec's graphs are made for."""
GRAPH_TOP_K = 64
"""Graphs draw among so many codes at most: no full sort is needed.  Rows that want more run eagerly."""
GREEDY = Sampling(0, 0, 0, 1, 1)
"""What a pad samples with."""
TEXT_STEP = 16
"""Text rows are padded to multiples of this, and only rows of equal padded length are encoded together."""


class _Stream:
    """One utterance: what is kept of it on the host, and its text."""

    def __init__(self, slot: int, seed: int, sampling: Sampling, *, tables: list[PageTable], like: Tensor) -> None:
        self.slot = slot
        self.seed = seed
        self.sampling = sampling
        # One KV cache per backbone row; with guidance there are two.
        self.tables = tables
        # Segments not encoded yet.
        self.waiting: list[TextSegment] = []
        # Characters spoken once token i of the text has been passed, for the tokens added so far (row 0 only).
        self.ends: list[int] = []
        self.is_text_ended = False
        # Encoded text of each row, (tokens + spare, width) with zeros behind the `encoded[row]` tokens that are there.
        self.vectors = [like.new_zeros(LOOK_AHEAD + 61, like.shape[-1]) for _ in tables]
        self.encoded = [0] * len(tables)
        # Frames that have a code 0; frames that have all codes; frames given to the codec; frames that are sound here.
        self.started = self.made = self.decoded = self.sounded = 0
        # per_frame: token the next frame speaks, and frames spent on it so far.
        self.pointer = 0
        self.elapsed = 0
        # Sound and marks not taken yet.
        self.pcm: list[NDArray[np.float32]] = []
        self.marks: list[TextMark] = []
        self.marked_chars = 0

    @property
    def has_spoken_all(self) -> bool:
        """per_frame: the pointer has left the last token of a text that has ended."""
        return self.is_text_ended and not self.waiting and self.pointer >= self.encoded[0]

    @property
    def lacks_text(self) -> bool:
        """per_frame: the next frame would look at tokens that are not encoded, and more may come."""
        is_complete = self.is_text_ended and not self.waiting
        return not is_complete and self.pointer + LOOK_AHEAD > self.encoded[0]

    def add_vectors(self, row: int, vectors: Tensor) -> None:
        start = self.encoded[row]
        end = start + len(vectors)
        buffer = self.vectors[row]
        if end + LOOK_AHEAD > len(buffer):
            grown = buffer.new_zeros(2 * (end + LOOK_AHEAD), buffer.shape[-1])
            grown[:start] = buffer[:start]
            self.vectors[row] = buffer = grown
        buffer[start:end] = vectors
        self.encoded[row] = end

    def mark(self, frames: int, chars: int, frame_samples: int) -> None:
        """After `frames` frames, `chars` characters have been spoken."""
        if chars > self.marked_chars:
            self.marked_chars = chars
            self.marks.append(TextMark(frames * frame_samples, chars))


class Executor:
    """The stages of one model on one device, and the state of the streams that are open."""

    def __init__(
        self,
        model: SpeechModel,
        *,
        max_streams: int,
        kv_pages: int,
        page_tokens: int = 16,
        device: torch.device | str = "cpu",
        clock: Clock | None = None,
    ) -> None:
        """max_streams: state slots.  kv_pages: pages of `page_tokens` positions of the backbone."""
        self.model = model.to(device).eval()
        self.device = torch.device(device)
        self._lane = lane_of(self.device)
        self.meanwhile: Callable[[], bool] = lambda: False
        """Called while a step waits for the device: see `Lane.read`."""
        self.overlaps = self.device.type == "cuda"
        """Sound is made beside the next steps: `issue` returns before it is there."""
        self.sample_rate = model.sample_rate
        self.frame_samples = model.frame_samples
        self.page_tokens = page_tokens
        self.feed = model.config.feed
        self._clock = clock or MonotonicClock()
        self._streams: dict[int, _Stream] = {}
        config = model.config
        codebooks = config.depth.codebooks
        rows = max_streams if self.feed == "per_frame" else 2 * max_streams
        # On a CPU, steps that have graphs are run by ONNX Runtime, whose rows never depend on each other.
        self._sessions = StepSessions(model, model.graphs) if model.graphs and self.device.type == "cpu" else None
        self._row_counts = independent_row_counts(self.model)
        self._least_rows = self._row_counts[0]
        self.specs = _specs(rows, max_streams, self.feed, ROW_COUNTS if self._sessions else self._row_counts)
        self.kv_positions = kept_positions(config, page_tokens)
        block = config.backbone.block
        weight = model.depth.table.weight
        self._dummy = max_streams
        with torch.inference_mode():
            self._kv = PagedKV(
                layers=config.backbone.layers,
                kv_heads=block.kv_heads,
                head_dim=block.head_dim,
                pages=kv_pages,
                page_tokens=page_tokens,
                window=config.backbone.window,
                dtype=weight.dtype,
                device=self.device,
            )
            slots = max_streams + 1
            self.state = SlotState(
                codes=torch.zeros(slots, codebooks, dtype=torch.int64, device=self.device),
                hidden=weight.new_zeros(slots, 2, block.hidden),
                ring=torch.zeros(slots, RING_FRAMES, codebooks, dtype=torch.int64, device=self.device),
                seen=torch.zeros(slots, config.backbone.classes, dtype=torch.bool, device=self.device),
                codec=model.codec.new_state(max_streams),
                depth_codebooks=torch.arange(1, codebooks, device=self.device),
                first_codebook=torch.zeros(1, dtype=torch.int64, device=self.device),
            )
            self._text_like = weight.new_zeros(1, config.text.output)
        self.graphs: GraphTable | None = None
        """None until `record_graphs`: every step runs eagerly."""

    @property
    def state_bytes(self) -> int:
        """Memory that the state of all streams takes, in use or not."""
        state = self.state
        parts = (self._kv.pool, state.codes, state.hidden, state.ring, state.seen, state.codec.flat)
        return sum(tensor.nbytes for tensor in parts)

    # ---- the life of a stream ----------------------------------------------------------------------------------------

    def open(
        self,
        stream: int,
        slot: int,
        *,
        seed: int = 0,
        sampling: Sampling | Mapping[str, float] | None = None,
        voice: str | None = None,
    ) -> None:
        """Begin a stream in a free slot.  A mapping changes single values of the model's own sampling.

        Raises BadSampling and UnknownVoice, with nothing changed.
        """
        assert stream not in self._streams, f"stream {stream} is open"
        assert 0 <= slot < self._dummy
        if voice is not None and voice not in self.model.voices:
            raise UnknownVoice(voice, self.model.voices)
        chosen = sampling if isinstance(sampling, Sampling) else merged(self.model.sampling, sampling or {})
        if chosen.cfg_scale != 1 and self.feed == "per_frame":
            raise BadSampling("cfg_scale", chosen.cfg_scale, "1: this model has no unguided form")
        rows = 1 if chosen.cfg_scale == 1 else 2
        with torch.inference_mode():
            # Sound of the stream that had the slot before may be in work.
            self._lane.join()
            self.state.codec.open(slot)
            self.state.codes[slot] = 0
            self.state.hidden[slot] = 0
            self.state.seen[slot] = False
            self._streams[stream] = _Stream(
                slot,
                seed & 0x7FFFFFFFFFFFFFFF,
                chosen,
                tables=[PageTable(self.page_tokens, self.kv_positions) for _ in range(rows)],
                like=self._text_like,
            )

    def add_text(self, stream: int, segment: TextSegment) -> int:
        """Queue a segment of the stream's text and return the tokens that one TEXT row will have to encode.

        Segments of the unguided row count 0: they are encoded along with the next row.
        """
        s = self._streams[stream]
        assert not s.is_text_ended, "text after the end of the text"
        if segment.row >= len(s.tables):
            return 0
        s.waiting.append(segment)
        if segment.row:
            return 0
        s.ends += segment.ends
        return len(segment.tokens)

    def end_text(self, stream: int) -> None:
        """The stream's text is complete."""
        self._streams[stream].is_text_ended = True

    def take(self, stream: int) -> tuple[NDArray[np.float32], tuple[TextMark, ...]]:
        """The sound the codec has made since the last call, and the marks that lie in it.

        Marks of a pointer model are exact to a frame.  A prefix model does not say where it is in its text, so its
        marks share the characters out evenly over the duration expected of that many tokens, and may be off by a word
        or more.
        """
        s = self._streams[stream]
        pcm = np.concatenate(s.pcm) if s.pcm else np.empty(0, np.float32)
        s.pcm.clear()
        made = s.sounded * self.frame_samples
        ready = tuple(mark for mark in s.marks if mark.samples <= made)
        del s.marks[: len(ready)]
        return pcm, ready

    def close(self, stream: int) -> None:
        """Forget a stream, if it is open.  Its slot and pages may be given to others at once."""
        self._streams.pop(stream, None)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def run(self, step: Step) -> StepResult:
        """Compute a step.  A row that fails gets an error and the others are good.

        An exception that cannot be put down to one row is the error of every row of the step.
        """
        if step.stage is Stage.CODEC:
            return self.issue(step).result()
        began_ns = self._clock.now()
        stage: Callable[[Step, list[Row], dict[int, RowResult]], None] = {
            Stage.TEXT: self._text,
            Stage.PREFILL: self._prefill,
            Stage.BACKBONE: self._backbone,
            Stage.DEPTH: self._depth,
        }[step.stage]
        results: dict[int, RowResult] = {}
        rows = self._known(step, results)
        try:
            with torch.inference_mode():
                if rows:
                    stage(step, rows, results)
        except Exception as error:
            for row in rows:
                results[row.stream] = RowResult(row.stream, error=f"{type(error).__name__}: {error}")
        return StepResult(
            tuple(results.get(row.stream, RowResult(row.stream)) for row in step.rows), self._clock.now() - began_ns
        )

    def issue(self, step: Step) -> Sounding:
        """Begin a CODEC step.  Its frames count as decoded from now on, so that the stream can go on; their sound comes
        with `Sounding.result`."""
        assert step.stage is Stage.CODEC
        began_ns = self._clock.now()
        results: dict[int, RowResult] = {}
        parts: list[tuple[list[Row], list[_Stream], OnItsWay]] = []
        groups: dict[int, list[Row]] = {}
        for row in self._known(step, results):
            s = self._streams[row.stream]
            if row.start != s.decoded or row.start + row.count > s.made:
                detail = f"frames {row.start} to {row.start + row.count} asked, {s.decoded} to {s.made} there"
                results[row.stream] = RowResult(row.stream, error=detail)
            else:
                groups.setdefault(row.count, []).append(row)
        for count, members in groups.items():
            streams = [self._streams[row.stream] for row in members]
            try:
                with torch.inference_mode():
                    parts.append((members, streams, self._sound(streams, count)))
            except Exception as error:
                for row in members:
                    results[row.stream] = RowResult(row.stream, error=f"{type(error).__name__}: {error}")
            for s in streams:
                s.decoded += count
        return Sounding(step, parts, results, frame_samples=self.frame_samples, began_ns=began_ns, clock=self._clock)

    def _known(self, step: Step, results: dict[int, RowResult]) -> list[Row]:
        """The rows whose streams are open, with their new pages; the others have failed."""
        rows = []
        for row in step.rows:
            s = self._streams.get(row.stream)
            if s is None or s.slot != row.slot:
                results[row.stream] = RowResult(row.stream, error="the stream is not open in this slot")
                continue
            self._extend(s, row.new_pages)
            rows.append(row)
        return rows

    def _extend(self, s: _Stream, pages: tuple[int, ...]) -> None:
        """Share new pages out: each backbone row has as many pages as the others."""
        rows = len(s.tables)
        for index, table in enumerate(s.tables):
            table.extend(pages[index::rows])

    def _text(self, step: Step, rows: list[Row], results: dict[int, RowResult]) -> None:
        """Encode the next segment of each row, and the unguided segments waiting behind it."""
        groups: dict[int, list[tuple[_Stream, int, TextSegment]]] = {}
        encoded: list[tuple[_Stream, TextSegment, Tensor | None]] = []
        for row in rows:
            s = self._streams[row.stream]
            tokens = 0
            while s.waiting and (tokens < row.count or s.waiting[0].row):
                segment = s.waiting.pop(0)
                tokens += 0 if segment.row else len(segment.tokens)
                if segment.codes:
                    encoded.append((s, segment, self.model.embed_audio(segment)))
                    continue
                length = -(-len(segment.tokens) // TEXT_STEP) * TEXT_STEP
                groups.setdefault(length, []).append((s, len(encoded), segment))
                encoded.append((s, segment, None))
        for length, members in groups.items():
            tokens_of = np.zeros((len(members), length), np.int64)
            for index, (_, _, segment) in enumerate(members):
                tokens_of[index, : len(segment.tokens)] = segment.tokens
            lengths = torch.tensor([len(segment.tokens) for _, _, segment in members], device=self.device)
            vectors = self.model.text(torch.from_numpy(tokens_of).to(self.device), lengths)
            for index, (s, place, segment) in enumerate(members):
                encoded[place] = (s, segment, vectors[index, : len(segment.tokens)])
        for s, segment, found in encoded:
            assert found is not None
            s.add_vectors(segment.row, found)

    def _prefill(self, step: Step, rows: list[Row], results: dict[int, RowResult]) -> None:
        if self.feed == "per_frame":
            self._backbone(step, rows, results)
            return
        done = []
        for row in rows:
            s = self._streams[row.stream]
            end = row.start + row.count
            assert end <= s.encoded[0], "prefill of text that is not encoded"
            if not all(s.encoded):
                results[row.stream] = RowResult(row.stream, error="this voice's prompt has no unguided form")
                continue
            # One row at a time: a long prompt fills the machine by itself, and its shape stays its own.
            for index, (table, length) in enumerate(zip(s.tables, s.encoded, strict=True)):
                count = min(end, length) - row.start
                if count <= 0:
                    continue
                x = s.vectors[index][row.start : row.start + count]
                bucket = -(-self._least_rows // count)
                cache = self._kv.step([KVRow(table, row.start, count)], bucket)
                positions = torch.arange(row.start, row.start + count, device=self.device)
                hidden = self.model.backbone(x.expand(bucket, -1, -1), positions[None], cache)
                cache.commit()
                if row.start + count == length:
                    self.state.hidden[s.slot, index] = hidden[0, -1]
            if end == s.encoded[0]:
                done.append((row.stream, s))
        if done:
            self._first_codes(done, step.bucket, results)

    def _backbone(self, step: Step, rows: list[Row], results: dict[int, RowResult]) -> None:
        """The hidden state and code 0 of each row's next frame, or the end of its speech."""
        going = []
        limit = self.model.config.max_positions
        for row in rows:
            s = self._streams[row.stream]
            if self.feed == "per_frame":
                has_ended = s.has_spoken_all
            else:
                has_ended = limit is not None and s.encoded[0] + s.started >= limit - 1
            if has_ended:
                results[row.stream] = RowResult(row.stream, ended=True)
            else:
                going.append((row.stream, s))
        if not going:
            return
        if self._sessions is not None:
            self._backbone_session(self._sessions, going, results)
            return
        if self._backbone_graph(going, results):
            return
        # Guided rows, then the unguided rows of those that have one.
        members = [(s, 0) for _, s in going] + [(s, 1) for _, s in going if len(s.tables) > 1]
        bucket = max(step.bucket, len(members), self._least_rows)
        pads = bucket - len(members)
        slots = torch.tensor([s.slot for s, _ in members] + [self._dummy] * pads, device=self.device)
        starts = [s.started if self.feed == "per_frame" else s.encoded[i] + s.started - 1 for s, i in members]
        positions = torch.tensor(starts + [0] * pads, device=self.device)
        cache = self._kv.step(
            [KVRow(s.tables[index], start, 1) for (s, index), start in zip(members, starts, strict=True)], bucket
        )
        if self.model.pointer is None:
            twins = torch.tensor([index for _, index in members] + [0] * pads, device=self.device)
            next_hidden(self.model, self.state, slots, twins, positions, cache)
        else:
            x = self._with_text(self.model.depth.embed_frame(self.state.codes[slots]), [s for s, _ in members])
            self.state.hidden[slots, 0] = self.model.backbone(x[:, None], positions[:, None], cache)[:, 0]
            cache.commit()
        self._first_codes(going, step.bucket, results)

    def _backbone_graph(self, going: list[tuple[int, _Stream]], results: dict[int, RowResult]) -> bool:
        """The same by replaying a graph, if there is one for it."""
        if self.graphs is None or self.feed != "prefix":
            return False
        streams = [s for _, s in going]
        starts = [[encoded + s.started - 1 for encoded in s.encoded] for s in streams]
        columns = next((n for n in GRAPH_COLUMNS if n > max(map(max, starts))), 0)
        guides = any(len(s.tables) > 1 for s in streams)
        bucket = self._graph_rows(len(streams), guides)
        ints, floats, kind = self._rows(streams, bucket, [s.started for s in streams], depth=False)
        graph = self._graph(("backbone", bucket, guides, columns), kind, len(streams), bucket)
        if graph is None:
            return False
        # Rows of streams and pads, then their twins; a stream without one has a pad there.
        rows: list[KVRow | None] = []
        for index in range(2 if guides else 1):
            rows += [
                KVRow(s.tables[index], start[index], 1) if index < len(s.tables) else None
                for s, start in zip(streams, starts, strict=True)
            ]
            rows += [None] * (bucket - len(streams))
        slots = torch.tensor([self._dummy if row is None else streams[n % bucket].slot for n, row in enumerate(rows)])
        (chosen,) = graph.run(ints, floats, slots, *self._kv.places(rows, len(rows), columns))
        self._read_first(going, self._read(chosen), results)
        return True

    def _backbone_session(
        self, sessions: StepSessions, going: list[tuple[int, _Stream]], results: dict[int, RowResult]
    ) -> None:
        streams = [s for _, s in going]
        slots = torch.tensor([s.slot for s in streams])
        frames = [s.started for s in streams]
        started = torch.tensor(frames)
        hidden, logits, advance = sessions.backbone(
            self.state.codes[slots],
            started == 0,
            torch.stack([s.vectors[0][s.pointer : s.pointer + LOOK_AHEAD] for s in streams]),
            torch.tensor([s.elapsed for s in streams]),
            started,
            self._kv.step([KVRow(s.tables[0], s.started, 1) for s in streams], len(streams)),
        )
        self.state.hidden[slots, 0] = hidden
        ints, floats, kind = self._rows(streams, len(streams), frames, depth=False)
        codes, is_good = choose_first(self.model, self.state, Batch(ints, floats), kind, logits)
        self._read_first(going, torch.stack((codes, is_good.long(), advance.argmax(-1)), 1).tolist(), results)

    def _with_text(self, x: Tensor, streams: list[_Stream]) -> Tensor:
        """Add what each frame reads of the text to the embeddings (bucket, hidden) of the frames before."""
        pointer = self.model.pointer
        assert pointer is not None
        bucket = x.shape[0]
        windows = [s.vectors[0][s.pointer : s.pointer + LOOK_AHEAD] for s in streams]
        windows += [windows[0]] * (bucket - len(streams))
        elapsed = torch.tensor([s.elapsed for s in streams] + [0] * (bucket - len(streams)), device=self.device)
        if any(s.started == 0 for s in streams):
            is_first = [s.started == 0 for s in streams] + [False] * (bucket - len(streams))
            x = torch.where(torch.tensor(is_first, device=self.device)[:, None], pointer.start, x)
        return x + pointer.item(torch.stack(windows), elapsed)

    def _first_codes(self, going: list[tuple[int, _Stream]], bucket: int, results: dict[int, RowResult]) -> None:
        """Choose code 0 of a frame from the hidden states in the slots; move the pointers on."""
        model = self.model
        streams = [s for _, s in going]
        bucket = max(bucket, self._least_rows)
        ints, floats, kind = self._rows(streams, bucket, [s.started for s in streams], depth=False)
        batch = Batch(ints.to(self.device), floats.to(self.device))
        codes, is_good = first_codes(model, self.state, batch, kind)
        columns = [codes, is_good.long()]
        if model.pointer is not None:
            columns.append(model.pointer.advance_logits(self.state.hidden[batch.slots, 0]).argmax(-1))
        self._read_first(going, self._read(torch.stack(columns, 1)), results)

    def _read_first(
        self, going: list[tuple[int, _Stream]], chosen: list[list[int]], results: dict[int, RowResult]
    ) -> None:
        """Take note of what was chosen: code 0, whether its logits were finite, and how far the pointer moves."""
        for (stream, s), (code, good, *moved) in zip(going, chosen, strict=False):
            if not good:
                results[stream] = RowResult(stream, error="the logits of codebook 0 are not finite")
            elif code == self.model.config.end_class:
                s.mark(s.started, s.ends[-1] if s.ends else 0, self.frame_samples)
                results[stream] = RowResult(stream, ended=True)
            else:
                s.started += 1
                results[stream] = RowResult(stream, wants_text=self._moved(s, *moved))

    def _moved(self, s: _Stream, advance: int | None = None) -> bool:
        """Move the pointer on after a frame, and mark what has been spoken.  True: the next frame wants more text."""
        if advance is None:
            expected = max(s.started, round(self.model.config.frames_per_token * len(s.ends)))
            spoken = len(s.ends) * s.started // expected
        else:
            s.elapsed = 0 if advance else s.elapsed + 1
            s.pointer = min(s.pointer + advance, s.encoded[0])
            spoken = s.pointer
        if spoken:
            s.mark(s.started, s.ends[spoken - 1], self.frame_samples)
        return advance is not None and s.lacks_text

    def _depth(self, step: Step, rows: list[Row], results: dict[int, RowResult]) -> None:
        """The other codes of each row's frame."""
        greedy = [row for row in rows if not self._streams[row.stream].sampling.depth_temperature]
        if self._sessions is None or not greedy:
            self._depth_eagerly(step.bucket, rows, results)
            return
        streams = [self._streams[row.stream] for row in greedy]
        slots = torch.tensor([s.slot for s in streams])
        codes, largest = self._sessions.depth(self.state.hidden[slots, 0], self.state.codes[slots, 0])
        self.state.codes[slots] = codes
        self.state.ring[slots, torch.tensor([s.made % RING_FRAMES for s in streams])] = codes
        self._made(greedy, largest, results)
        drawn = [row for row in rows if self._streams[row.stream].sampling.depth_temperature]
        if drawn:
            # Draws are made between the codebooks, where no graph can be interrupted.
            bucket = next(n for n in self._row_counts if n >= len(drawn))
            self._depth_eagerly(bucket, drawn, results)

    def _depth_eagerly(self, bucket: int, rows: list[Row], results: dict[int, RowResult]) -> None:
        streams = [self._streams[row.stream] for row in rows]
        frames = [s.made for s in streams]
        if self.graphs is not None:
            guides = any(len(s.tables) > 1 for s in streams)
            graph_rows = self._graph_rows(len(streams), guides)
            ints, floats, kind = self._rows(streams, graph_rows, frames, depth=True)
            graph = self._graph(("depth", graph_rows, guides), kind, len(streams), graph_rows)
            if graph is not None:
                self._made(rows, graph.run(ints, floats)[0], results)
                return
        ints, floats, kind = self._rows(streams, max(bucket, self._least_rows), frames, depth=True)
        batch = Batch(ints.to(self.device), floats.to(self.device))
        self._made(rows, depth_frame(self.model, self.state, batch, kind), results)

    def _made(self, rows: list[Row], largest: Tensor, results: dict[int, RowResult]) -> None:
        """Count the frames just completed; largest: (rows or more,), finite where all logits were."""
        streams = [self._streams[row.stream] for row in rows]
        for row, s, good in zip(rows, streams, self._read(largest.isfinite()), strict=False):
            if not good:
                results[row.stream] = RowResult(row.stream, error="the depth decoder's logits are not finite")
            elif s.made - s.sounded >= RING_FRAMES:
                results[row.stream] = RowResult(row.stream, error=f"more than {RING_FRAMES} frames wait for the codec")
            else:
                s.made += 1

    def _sound(self, streams: list[_Stream], frames: int) -> OnItsWay:
        """The next `frames` frames of each stream, (streams or more, samples) float32."""
        bucket = len(streams) if self._sessions else max(len(streams), -(-self._least_rows // frames))
        graph = None
        if self.graphs is not None:
            rows = next((n for n in self.specs[Stage.CODEC].buckets if n >= bucket), bucket)
            graph = self.graphs.get(("codec", rows, frames), len(streams), rows)
            bucket = rows if graph is not None else bucket
        pads = bucket - len(streams)
        slots = torch.tensor([s.slot for s in streams] + [self._dummy] * pads)
        starts = torch.tensor([s.decoded for s in streams] + [0] * pads)

        def work() -> Tensor:
            if graph is not None:
                return graph.run(slots, starts)[0].float()
            return codec_frames(
                self.model,
                self.state,
                slots.to(self.device),
                starts.to(self.device),
                frames,
                live=len(streams),
                features=self._sessions.features if self._sessions else None,
            ).float()

        return self._lane.run(work)

    def _read(self, values: Tensor) -> list[Any]:
        """Values of this step, on the host."""
        found: list[Any] = self._lane.read(values, self.meanwhile).tolist()
        return found

    def _rows(
        self, streams: list[_Stream], bucket: int, frames: list[int], *, depth: bool
    ) -> tuple[Tensor, Tensor, Kind]:
        """The streams of a step and its pads, on the host: what `Batch` is made of, and its kind."""
        assert len(streams) <= bucket, "more rows than the bucket holds"
        rows = [BatchRow(s.slot, s.seed, frame, s.sampling) for s, frame in zip(streams, frames, strict=True)]
        rows += [BatchRow(self._dummy, 0, 0, GREEDY)] * (bucket - len(streams))
        columns = self.model.config.depth.vocab if depth else self.model.config.backbone.classes
        return batch_of(rows, columns, depth=depth)

    # ---- graphs ------------------------------------------------------------------------------------------------------

    def record_graphs(self, recorder: Recorder, told: Callable[[float], None] = lambda share: None) -> None:
        """Record a graph for every shape of BACKBONE, DEPTH and CODEC, the largest first; before serving, for it takes
        a minute.  All or none: what one raises, this raises.

        told: how much is done, 0 to 1.  Only models that are fed a prefix have graphs.
        """
        assert self.feed == "prefix", "the graphs are of a model that reads nothing but its own past"
        table = GraphTable(recorder)
        # The codec's graphs run beside the others, so they share no memory with them.
        beside = type(recorder)()
        shapes = self._graph_shapes()
        with torch.inference_mode():
            for done, key in enumerate(shapes):
                table.record(key, *self._recordable(*key), recorder=beside if key[0] == "codec" else recorder)
                told((done + 1) / len(shapes))
        table.misses = 0
        self.graphs = table

    def graph_counts(self) -> dict[str, int]:
        """Frame and codec steps that were replayed or had no graph, and the rows replayed; empty without graphs."""
        table = self.graphs
        if table is None:
            return {}
        return {
            "replays": table.replays,
            "misses": table.misses,
            "live_rows": table.live_rows,
            "padded_rows": table.padded_rows,
        }

    def _graph_shapes(self) -> list[tuple[Any, ...]]:
        """Keys of all graphs, the largest first."""
        shapes: list[tuple[Any, ...]] = []
        for guides in (False, True):
            for rows in self.specs[Stage.BACKBONE].buckets:
                if (2 if guides else 1) * rows > self.specs[Stage.BACKBONE].buckets[-1]:
                    continue
                shapes.append(("depth", rows, guides))
                shapes += [("backbone", rows, guides, columns) for columns in GRAPH_COLUMNS]
        for rows in self.specs[Stage.CODEC].buckets:
            shapes += [("codec", rows, frames) for frames in GRAPH_FRAMES]
        return sorted(shapes, key=lambda key: -key[1])

    def _recordable(self, stage: str, rows: int, *shape: int) -> tuple[Any, ...]:
        """The function of one shape, and inputs of pads to run it with."""
        model, state = self.model, self.state
        if stage == "codec":
            frames = shape[0]
            slots = torch.full((rows,), self._dummy, device=self.device)
            return (
                lambda slots, starts: (codec_frames(model, state, slots, starts, frames),),
                slots,
                torch.zeros_like(slots),
            )
        depth = stage == "depth"
        guides = bool(shape[0])
        ints, floats, _ = self._rows([], rows, [], depth=depth)
        classes = model.config.depth.vocab if depth else model.config.backbone.classes
        kind = Kind(
            draws=True, max_top_k=min(GRAPH_TOP_K, classes), uses_top_p=False, penalises=not depth, guides=guides
        )
        ints, floats = ints.to(self.device), floats.to(self.device)
        if depth:
            return lambda ints, floats: (depth_frame(model, state, Batch(ints, floats), kind),), ints, floats
        twin_rows = 2 * rows if guides else rows
        twins = torch.arange(twin_rows, device=self.device) // rows

        def frame(  # noqa: PLR0917 (a graph's inputs)
            ints: Tensor, floats: Tensor, slots: Tensor, read: Tensor, write: Tensor, starts: Tensor
        ) -> tuple[Tensor, ...]:
            next_hidden(model, state, slots, twins, starts, self._kv.fixed(read, write, starts))
            codes, is_good = first_codes(model, state, Batch(ints, floats), kind)
            return (torch.stack((codes, is_good.long()), 1),)

        slots = torch.full((twin_rows,), self._dummy, device=self.device)
        places = [tensor.to(self.device) for tensor in self._kv.places([], twin_rows, shape[1])]
        return frame, ints, floats, slots, *places

    def _graph_rows(self, streams: int, guides: bool) -> int:
        """Rows of the smallest graph that so many streams fit; as many as there are where none does."""
        most = self.specs[Stage.BACKBONE].buckets[-1] // (2 if guides else 1)
        return next((n for n in self.specs[Stage.BACKBONE].buckets if streams <= n <= most), streams)

    def _graph(self, key: tuple[Any, ...], kind: Kind, live: int, rows: int) -> StepGraph | None:
        """The graph of a shape, if rows of this kind can use it."""
        assert self.graphs is not None
        classes = self.model.config.depth.vocab if key[0] == "depth" else self.model.config.backbone.classes
        is_wide = kind.draws and classes > GRAPH_TOP_K and not 0 < kind.max_top_k <= GRAPH_TOP_K
        return self.graphs.get(None if is_wide or kind.uses_top_p else key, live, rows)


def kept_positions(config: ModelConfig, page_tokens: int) -> int | None:
    """Positions of a stream that pages are needed for at most, in whole pages; None: all of them.

    Where the model looks back no further than a window and goes on by one position a step, a new one may take the place
    of one that has left the window.
    """
    window = config.backbone.window
    if window is None or config.feed != "per_frame":
        return None
    return -(-window // page_tokens) * page_tokens


def merged(base: Sampling, changes: Mapping[str, Any]) -> Sampling:
    """`base` with some values changed by name.  Raises BadSampling."""
    values = {f.name: getattr(base, f.name) for f in fields(Sampling)}
    for name, value in changes.items():
        if name not in values:
            raise BadSampling(name, value, f"one of {', '.join(values)}")
        values[name] = int(value) if name == "top_k" else float(value)
    return Sampling(**values)


def independent_row_counts(model: SpeechModel) -> tuple[int, ...]:
    """Those of `ROW_COUNTS` at which a row of a matrix product comes out the same, bit for bit, as at the largest.

    Which kernel multiplies, and so how it rounds, depends on the number of rows; where the change is, depends on the
    processor, the library and the shape of the weights.  So it is measured, once, with every shape of the model.
    """
    tables = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    weights = {w.shape: w for w in model.parameters() if w.dim() == 2 and id(w) not in tables}
    safe = set(ROW_COUNTS)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for weight in [*weights.values(), model.depth.heads[0].t()]:
            x = torch.randn(ROW_COUNTS[-1], weight.shape[1], generator=generator).to(weight)
            whole = x @ weight.t()
            safe = {rows for rows in safe if torch.equal(x[:rows] @ weight.t(), whole[:rows])}
    return tuple(sorted(safe))


def _specs(rows: int, streams: int, feed: str, row_counts: tuple[int, ...]) -> dict[Stage, StageSpec]:
    """What one step of each stage may carry; `rows` backbone rows and `streams` streams at most."""

    def ladder(limit: int, counts: tuple[int, ...] = ROW_COUNTS) -> tuple[int, ...]:
        above = next((n for n in counts if n >= limit), counts[-1])
        return tuple(n for n in counts if n <= above)

    frame = ladder(rows, row_counts)
    sound = ladder(min(streams, 16))
    text = ladder(min(streams, 8))
    prompt = 512 if feed == "prefix" else frame[-1]
    return {
        Stage.TEXT: StageSpec(text[-1], text, max_tokens=1024),
        Stage.PREFILL: StageSpec(frame[-1], frame, max_tokens=prompt),
        Stage.BACKBONE: StageSpec(frame[-1], frame),
        Stage.DEPTH: StageSpec(frame[-1], frame),
        Stage.CODEC: StageSpec(sound[-1], sound),
    }
