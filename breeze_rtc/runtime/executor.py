"""Runs one `Step` at a time: gathers the state of its rows, pads them, calls the stage, scatters the state back.

The scheduler has chosen; nothing is decided here.  Pads point at the dummy slot and the dummy page, so they touch
nobody.  A row's result does not depend on what else is in the step: shapes that would make a CPU kernel round
differently are avoided (`independent_row_counts`, and see `kv_cache` and `codec`), and randomness is a hash of the
stream's own seed.
So eight streams together say, sample for sample, what each says alone.

On the way from queue to queue a step waits for the device once, to learn what ended and how far the text has been read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from breeze_rtc.clock import Clock, MonotonicClock
from breeze_rtc.errors import BadSampling, BadText, UnknownVoice
from breeze_rtc.models.codec import Heard
from breeze_rtc.models.cpu_layout import keep_by_inputs
from breeze_rtc.models.pointer import LOOK_AHEAD
from breeze_rtc.models.presets import ModelConfig
from breeze_rtc.models.sampling import Sampling
from breeze_rtc.models.speech_model import SpeechModel, TextSegment
from breeze_rtc.playback import TextMark
from breeze_rtc.runtime.frame_graphs import FrameGraphs, Piece, Times
from breeze_rtc.runtime.frame_steps import (
    RING_FRAMES,
    Batch,
    Kind,
    SlotState,
    batch_of,
    choose_first,
    codec_frames,
    codes_in_ring,
    depth_frame,
    first_codes,
    next_hidden,
    pad_row,
)
from breeze_rtc.runtime.graphs import Recorder
from breeze_rtc.runtime.kv_cache import KVRow, PagedKV, PageTable, Prefix, PrefixPages
from breeze_rtc.runtime.lane import OnItsWay, lane_of
from breeze_rtc.runtime.prompts import Prompts
from breeze_rtc.runtime.sounding import Sounding
from breeze_rtc.runtime.step_sessions import StepSessions
from breeze_rtc.runtime.stream_state import StreamState
from breeze_rtc.scheduling.step import Row, RowResult, Stage, StageSpec, Step, StepResult

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Rows that a step may be padded to, as far as this machine's matrix products allow: see `independent_row_counts`."""
ENDED = -1
"""In the place of code 0: the whole frame has ended speech."""
CACHED_FRAMES = 8
"""Codec frames that a CPU decodes at once: of Breeze's codec at a quarter of its width, 8 frames take 7.5 ms each, 64
more than 12."""


class Executor:
    """The stages of one model on one device, and the state of the streams that are open."""

    def __init__(
        self,
        model: SpeechModel,
        *,
        max_streams: int,
        kv_pages: int,
        page_tokens: int = 16,
        prefix_pages: int = 0,
        device: torch.device | str = "cpu",
        codec_apart: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """max_streams: state slots.  kv_pages: pages of `page_tokens` positions of the backbone, for streams.
        prefix_pages: more of them, for what streams have in common (`add_prefix`).  codec_apart: the codec runs on the
        CPU, in a thread of its own, beside what runs on `device`."""
        self.model = model.to(device).eval()
        self.device = torch.device(device)
        self.codec_apart = codec_apart
        """The codec, its weights and its state, is on the CPU and runs in a thread there."""
        if codec_apart:
            model.codec.to("cpu")
        if self.device.type == "cpu" and not model.graphs:
            keep_by_inputs(model)
        self._lane = lane_of(self.device, codec_apart=codec_apart)
        self.meanwhile: Callable[[], bool] = lambda: False
        """Called while a step waits for the device: see `Lane.read`."""
        self.overlaps = codec_apart or self.device.type == "cuda"
        """Sound is made beside the next steps: `issue` returns before it is there."""
        self.sample_rate = model.sample_rate
        self.frame_samples = model.frame_samples
        self.page_tokens = page_tokens
        self.feed = model.config.feed
        self._clock = clock or MonotonicClock()
        self._streams: dict[int, StreamState] = {}
        config = model.config
        codebooks = config.depth.codebooks
        # A stream alone may take three rows, in dual guidance.
        rows = max_streams if self.feed == "per_frame" else max(3, 2 * max_streams)
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
                pages=kv_pages + prefix_pages,
                page_tokens=page_tokens,
                window=config.backbone.window,
                dtype=weight.dtype,
                device=self.device,
            )
            slots = max_streams + 1
            self.state = SlotState(
                codes=torch.zeros(slots, codebooks, dtype=torch.int64, device=self.device),
                hidden=weight.new_zeros(slots, 3, block.hidden),
                ring=torch.zeros(slots, RING_FRAMES, codebooks, dtype=torch.int64, device=self.device),
                seen=torch.zeros(slots, config.backbone.classes, dtype=torch.bool, device=self.device),
                codec=model.codec.new_state(max_streams),
                depth_codebooks=torch.arange(1, codebooks, device=self.device),
                first_codebook=torch.zeros(1, dtype=torch.int64, device=self.device),
            )
            self._text_like = weight.new_zeros(1, config.text.output)
        self._prompts = Prompts(
            self.model,
            self.state,
            self._kv,
            PrefixPages(range(kv_pages, kv_pages + prefix_pages), page_tokens),
            dummy=self._dummy,
            least_tokens=self._least_rows,
            most_tokens=self.specs[Stage.PREFILL].max_tokens,
        )
        # What streams have in common: see `Prompts`.
        self.encode = self._prompts.encode
        self.add_prefix = self._prompts.add_prefix
        self.prefix_kv = self._prompts.prefix_kv
        self.drop_prefix = self._prompts.drop_prefix
        self.graphs: FrameGraphs | None = None
        """None until `record_graphs`: every step runs eagerly."""
        # Steps and the measurement of graphs take turns: see `FrameGraphs`.
        self._turn = threading.RLock()
        self.goes_ahead = self.device.type == "cuda"
        """Launch the depth decoder behind the choice of code 0 before that choice is known here.  Nothing else can come
        next but the depth of those whose speech goes on, and the device need not wait to be told who they are."""
        # What was launched so: the frame of each stream, and which of the rows is its.
        self._ahead: dict[StreamState, tuple[int, int]] = {}
        self._ahead_good: OnItsWay | None = None

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
        prefixes: Sequence[Prefix | None] = (),
        heard: Heard | None = None,
    ) -> None:
        """Begin a stream in a free slot.  A mapping changes single values of the model's own sampling.

        prefixes: what each of its backbone rows begins with, if anything.  Its text, and the positions that steps
        speak of, are counted from behind that.  heard: what its sound goes on from.
        Raises BadSampling and UnknownVoice, with nothing changed.
        """
        assert stream not in self._streams, f"stream {stream} is open"
        assert 0 <= slot < self._dummy
        if voice is not None and voice not in self.model.voices:
            raise UnknownVoice(voice, self.model.voices)
        chosen = sampling if isinstance(sampling, Sampling) else merged(self.model.sampling, sampling or {})
        rows = chosen.rows
        if rows > 1 and self.feed == "per_frame":
            raise BadSampling("cfg_scale", chosen.cfg_scale, "1: this model has no unguided form")
        assert len(prefixes) <= rows, "a prefix for a row that the stream does not have"
        begins = [*prefixes, *[None] * (rows - len(prefixes))]
        for prefix in begins:
            if prefix is not None:
                self._prompts.prefixes.hold(prefix)
        with torch.inference_mode():
            # Sound of the stream that had the slot before may be in work.
            self._lane.join()
            self.state.codec.open(slot, heard)
            self.state.codes[slot] = 0
            self.state.hidden[slot] = 0
            self.state.seen[slot] = False
            self._streams[stream] = StreamState(
                slot,
                seed & 0x7FFFFFFFFFFFFFFF,
                chosen,
                tables=[PageTable(self.page_tokens, self.kv_positions, prefix) for prefix in begins],
                like=self._text_like,
            )

    def add_text(self, stream: int, segment: TextSegment) -> int:
        """Queue a segment of the stream's text and return the tokens that one TEXT row will have to encode.

        Segments of the other rows of guidance count 0: they are encoded along with the next of row 0.
        Raises BadText for a prompt that is longer than the model reads.
        """
        s = self._streams[stream]
        assert not s.is_text_ended, "text after the end of the text"
        if segment.row >= len(s.tables):
            return 0
        if segment.codes:
            s.recording_row = segment.row
        limit = self.model.config.max_positions
        if limit is not None:
            waiting = sum(len(other.tokens) for other in s.waiting if other.row == segment.row)
            length = s.prompt(segment.row) + waiting + len(segment.tokens)
            if length >= limit - 1:
                raise BadText(
                    f"the text takes {length} tokens, those of its voice included, and this model reads {limit - 2}: "
                    "send a shorter text, or use a shorter recording"
                )
        s.waiting.append(segment)
        if segment.row:
            return 0
        # Of a prompt, the tokens of reference, speaker and instruction are not spoken, and take no share of the marks.
        s.ends += segment.ends if self.feed == "per_frame" else [end for end in segment.ends if end]
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
        s = self._streams.pop(stream, None)
        if s is None:
            return
        self._ahead.pop(s, None)
        for table in s.tables:
            if table.prefix is not None:
                self._prompts.prefixes.let_go(table.prefix)

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
            with self._turn, torch.inference_mode():
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
        parts: list[tuple[list[Row], list[StreamState], OnItsWay]] = []
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

    def _extend(self, s: StreamState, pages: tuple[int, ...]) -> None:
        """Share new pages out: each backbone row has as many pages as the others."""
        rows = len(s.tables)
        for index, table in enumerate(s.tables):
            table.extend(pages[index::rows])

    def _text(self, step: Step, rows: list[Row], results: dict[int, RowResult]) -> None:
        """Encode the next segment of each row, and the unguided segments waiting behind it, all in one call."""
        owners: list[StreamState] = []
        segments: list[TextSegment] = []
        for row in rows:
            s = self._streams[row.stream]
            tokens = 0
            while s.waiting and (tokens < row.count or s.waiting[0].row):
                segment = s.waiting.pop(0)
                tokens += 0 if segment.row else len(segment.tokens)
                owners.append(s)
                segments.append(segment)
        for s, segment, vectors in zip(owners, segments, self._prompts.encode(segments), strict=True):
            s.add_vectors(segment.row, vectors)

    def _prefill(self, step: Step, rows: list[Row], results: dict[int, RowResult]) -> None:
        """Pieces of prompts, those of unguided rows too, and code 0 of the first frame where a prompt ends."""
        if self.feed == "per_frame":
            self._backbone(step, rows, results)
            return
        done = []
        pieces: list[Piece] = []
        for row in rows:
            s = self._streams[row.stream]
            end = row.start + row.count
            assert end <= s.encoded[0], "prefill of text that is not encoded"
            if not all(s.encoded):
                results[row.stream] = RowResult(row.stream, error="this voice's prompt has no unguided form")
                continue
            for index, (table, length) in enumerate(zip(s.tables, s.encoded, strict=True)):
                # A longer unguided row takes what is left of it with the guided row's end.
                stop = length if end == s.encoded[0] else min(end, length)
                if stop > row.start:
                    x = s.vectors[index][row.start : stop]
                    kv_row = KVRow(table, s.shared[index] + row.start, stop - row.start)
                    pieces.append((s if stop == length else None, index, kv_row, x))
            if end == s.encoded[0]:
                done.append((row.stream, s))
        self._prompts.run(pieces)
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
                has_ended = limit is not None and max(map(s.prompt, range(len(s.tables)))) + s.started >= limit - 1
            if has_ended:
                results[row.stream] = RowResult(row.stream, ended=True)
            else:
                going.append((row.stream, s))
        if not going:
            return
        if self._sessions is not None:
            self._backbone_session(self._sessions, going, results)
            return
        if self.graphs is not None:
            chosen = self.graphs.backbone([s for _, s in going])
            if chosen is not None:
                self._choose_first(going, chosen, results)
                return
        # All first rows, then the second ones of those that have one, and so on.
        members = [(s, row) for row in range(3) for _, s in going if row < len(s.tables)]
        bucket = max(step.bucket, len(members), self._least_rows)
        pads = bucket - len(members)
        slots = torch.tensor([s.slot for s, _ in members] + [self._dummy] * pads, device=self.device)
        starts = [s.started if self.feed == "per_frame" else s.prompt(i) + s.started - 1 for s, i in members]
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

    def _backbone_session(
        self, sessions: StepSessions, going: list[tuple[int, StreamState]], results: dict[int, RowResult]
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

    def _with_text(self, x: Tensor, streams: list[StreamState]) -> Tensor:
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

    def _first_codes(self, going: list[tuple[int, StreamState]], bucket: int, results: dict[int, RowResult]) -> None:
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
        self._choose_first(going, torch.stack(columns, 1), results)

    def _choose_first(
        self, going: list[tuple[int, StreamState]], chosen: Tensor, results: dict[int, RowResult]
    ) -> None:
        """Go on with the frames whose code 0 was chosen, and read what it is: the one wait of the step."""
        streams = [s for _, s in going]
        if self.model.config.ends_with_zeros:
            # Only the whole frame says whether speech goes on, so this step makes it, and DEPTH finds it made.  What a
            # graph gave is not there any more when another has run.
            chosen = chosen.clone()
            self._go_ahead(streams)
            slots = torch.tensor([s.slot for s in streams], device=self.device)
            is_end = (self.state.codes[slots, :-1] == 0).all(-1)
            chosen[: len(streams), 0].masked_fill_(is_end, ENDED)
            sent = self._lane.send(chosen)
        else:
            sent = self._lane.send(chosen)
            if self.goes_ahead and all(s.made == s.started < s.sounded + RING_FRAMES for s in streams):
                self._go_ahead(streams)
        self._read_first(going, self._read(sent), results)

    def _go_ahead(self, streams: list[StreamState]) -> None:
        """Make the other codes of the frames whose code 0 was chosen; DEPTH will ask for them."""
        frames = [s.made for s in streams]
        self._ahead = {s: (frame, row) for row, (s, frame) in enumerate(zip(streams, frames, strict=True))}
        self._ahead_good = self._lane.send(self._depth_of(streams, frames, len(streams)).isfinite())

    def _read_first(
        self, going: list[tuple[int, StreamState]], chosen: list[list[int]], results: dict[int, RowResult]
    ) -> None:
        """Take note of what was chosen: code 0, whether its logits were finite, and how far the pointer moves."""
        for (stream, s), (code, good, *moved) in zip(going, chosen, strict=False):
            if not good:
                results[stream] = RowResult(stream, error="the logits of codebook 0 are not finite")
            elif code in {self.model.config.end_class, ENDED}:
                s.mark(s.started, s.ends[-1] if s.ends else 0, self.frame_samples)
                results[stream] = RowResult(stream, ended=True)
            else:
                s.started += 1
                results[stream] = RowResult(stream, wants_text=self._moved(s, *moved))

    def _moved(self, s: StreamState, advance: int | None = None) -> bool:
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
        self._made(greedy, largest.isfinite().tolist(), results)
        drawn = [row for row in rows if self._streams[row.stream].sampling.depth_temperature]
        if drawn:
            # Draws are made between the codebooks, where no graph can be interrupted.
            self._depth_eagerly(len(drawn), drawn, results)

    def _depth_eagerly(self, bucket: int, rows: list[Row], results: dict[int, RowResult]) -> None:
        ahead, good = self._ahead, self._ahead_good
        self._ahead, self._ahead_good = {}, None
        rest = []
        places = []
        for row in rows:
            s = self._streams[row.stream]
            frame, place = ahead.get(s, (-1, 0))
            if frame == s.made:
                places.append((row, place))
            else:
                rest.append(row)
        if rest:
            streams = [self._streams[row.stream] for row in rest]
            largest = self._depth_of(streams, [s.made for s in streams], bucket)
            self._made(rest, self._read(self._lane.send(largest.isfinite())), results)
        if places and good is not None:
            found = self._read(good)
            self._made([row for row, _ in places], [found[place] for _, place in places], results)

    def _depth_of(self, streams: list[StreamState], frames: list[int], bucket: int) -> Tensor:
        """The other codes of these frames, into the slots: (streams or more,), finite where all logits were."""
        if self.graphs is not None:
            largest = self.graphs.depth(streams, frames)
            if largest is not None:
                return largest
        bucket = next(n for n in self._row_counts if n >= max(bucket, len(streams)))
        ints, floats, kind = self._rows(streams, bucket, frames, depth=True)
        return depth_frame(self.model, self.state, Batch(ints.to(self.device), floats.to(self.device)), kind)

    def _made(self, rows: list[Row], are_good: list[bool], results: dict[int, RowResult]) -> None:
        """Count the frames just completed; are_good: of each row or more, whether its logits were all finite."""
        streams = [self._streams[row.stream] for row in rows]
        for row, s, good in zip(rows, streams, are_good, strict=False):
            if not good:
                results[row.stream] = RowResult(row.stream, error="the depth decoder's logits are not finite")
            elif s.made - s.sounded >= RING_FRAMES:
                results[row.stream] = RowResult(row.stream, error=f"more than {RING_FRAMES} frames wait for the codec")
            else:
                s.made += 1

    def _sound(self, streams: list[StreamState], frames: int) -> OnItsWay:
        """The next `frames` frames of each stream, (streams or more, samples) float32."""
        least = -(-self._least_rows // frames)
        bucket = len(streams) if self._sessions else max(len(streams), least)
        if self.graphs is not None:
            work = self.graphs.sound(streams, frames, bucket)
            if work is not None:
                return self._lane.run(work)
        pads = bucket - len(streams)
        slots = torch.tensor([s.slot for s in streams] + [self._dummy] * pads)
        starts = torch.tensor([s.decoded for s in streams] + [0] * pads)
        if self.codec_apart:
            ring = codes_in_ring(self.state, slots.to(self.device), starts.to(self.device), frames)
            sent = self._lane.send(ring)
            features = self._sessions.features if self._sessions else None
            return self._lane.run(
                lambda: self.model.codec(
                    sent.wait(), self.state.codec, slots, live=len(streams), features=features
                ).float()
            )

        # On a CPU few rows at a time, so that what passes between the layers stays in its cache; pads are never enough
        # to be a share.
        is_eager_cpu = self._sessions is None and self.device.type == "cpu"
        shares = max(1, bucket // max(1, CACHED_FRAMES // frames, least)) if is_eager_cpu else 1

        def decode() -> Tensor:
            sounds = [
                codec_frames(
                    self.model,
                    self.state,
                    share.to(self.device),
                    start.to(self.device),
                    frames,
                    live=min(len(streams), len(share)),
                    features=self._sessions.features if self._sessions else None,
                ).float()
                for share, start in zip(slots.tensor_split(shares), starts.tensor_split(shares), strict=True)
            ]
            return sounds[0] if shares == 1 else torch.cat(sounds)

        return self._lane.run(decode)

    def _read(self, sent: OnItsWay) -> list[Any]:
        """Values of this step, on the host."""
        found: list[Any] = self._lane.read(sent, self.meanwhile).tolist()
        return found

    def _rows(
        self, streams: list[StreamState], bucket: int, frames: list[int], *, depth: bool
    ) -> tuple[Tensor, Tensor, Kind]:
        """The streams of a step and its pads, on the host: what `Batch` is made of, and its kind."""
        assert len(streams) <= bucket, "more rows than the bucket holds"
        rows = [s.batch_row(frame) for s, frame in zip(streams, frames, strict=True)]
        rows += [pad_row(self._dummy)] * (bucket - len(streams))
        columns = self.model.config.depth.vocab if depth else self.model.config.backbone.classes
        return batch_of(rows, columns, depth=depth)

    # ---- graphs ------------------------------------------------------------------------------------------------------

    def record_graphs(self, recorder: Recorder, told: Callable[[float], None] = lambda share: None) -> None:
        """Record a graph for every common shape: it takes a minute, in which steps run eagerly if this is called on a
        thread of its own.  See `FrameGraphs.record`."""
        assert self.graphs is None, "graphs are recorded once"
        self.graphs = FrameGraphs(
            self.model,
            self.state,
            self._kv,
            recorder,
            frame_rows=self.specs[Stage.BACKBONE].buckets,
            # What runs on the CPU has no graphs.
            sound_rows=() if self.codec_apart else self.specs[Stage.CODEC].buckets,
            dummy=self._dummy,
            turn=self._turn,
            clock=self._clock,
        )
        self._prompts.graphs = self.graphs
        self.graphs.record(told)

    def taken_over(self) -> list[tuple[Stage, Times]]:
        """The stages that graphs have taken over since the last call, and what their steps take.

        Nothing is said while a frame's depth is ahead, which may have been launched without them.
        """
        found: list[tuple[Stage, Times]] = []
        while self.graphs is not None and self.graphs.times and not self._ahead:
            found.append(self.graphs.times.popleft())
        return found

    def graph_counts(self) -> dict[str, Any]:
        """How graphs served so far, see `GraphTable`, and which share of them is `recorded`; empty without graphs."""
        graphs = self.graphs
        return {} if graphs is None else {**graphs.table.counts(), "recorded": graphs.recorded}


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
