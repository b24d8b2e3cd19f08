"""How long what the scheduler weighs will take: frames, chunks, the way to a first sound.

Sums over the cost table.  Each is reckoned once and kept until a stage it is made of has run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from breeze_rtc.scheduling.admission import stage_ns
from breeze_rtc.scheduling.costs import CostTable
from breeze_rtc.scheduling.step import Stage, StageSpec
from breeze_rtc.scheduling.stream import Stream

SMALLEST_PIECE = 16
"""Tokens of the smallest kind of prefill step that is told apart; see `costs.size_of`."""


class Forecast:
    """Predicted times, in ns."""

    def __init__(self, specs: Mapping[Stage, StageSpec], costs: CostTable, *, is_on: bool = True) -> None:
        """is_on: False to predict 0 for everything, as a scheduler that knows nothing would."""
        self._specs = specs
        self._codec_rows = specs[Stage.CODEC].max_rows
        self._costs = costs
        self._is_on = is_on
        # (rows, units) of each stage, and rows of a frame.
        self._stages: dict[Stage, dict[tuple[int, int], int]] = {stage: {} for stage in Stage}
        self._frames: dict[int, int] = {}
        # Goes up with everything that is forgotten.
        self.version = 0

    def forget(self, stage: Stage) -> None:
        """The stage has run: its times may have changed."""
        self.version += 1
        self._stages[stage].clear()
        if stage is Stage.BACKBONE or stage is Stage.DEPTH:
            self._frames.clear()

    def stage_ns(self, stage: Stage, rows: int, units: int = 1) -> int:
        """To take `rows` through a stage, in as many steps as it needs; units: tokens, or codec frames per row."""
        time_ns = self._stages[stage].get((rows, units))
        if time_ns is None:
            time_ns = stage_ns(self._costs.predict_ns, self._specs, stage, rows, units) if self._is_on else 0
            self._stages[stage][rows, units] = time_ns
        return time_ns

    def steady_ns(self, stage: Stage, rows: int, units: int = 1) -> int:
        """As `stage_ns`, but to be added up over many steps: half way from what such a step takes on average to what
        nine of ten stay below.  What varies from step to step evens out; what varies over seconds, with whatever else
        the machine does, does not.
        """
        if not self._is_on:
            return 0
        mean_ns = stage_ns(self._costs.mean_ns, self._specs, stage, rows, units)
        return (mean_ns + self.stage_ns(stage, rows, units)) // 2

    def mean_alone_ns(self) -> int:
        """What a frame of a stream that is alone takes on average, its decoding included; 0 when nothing is known."""
        stages = (Stage.BACKBONE, Stage.DEPTH, Stage.CODEC)
        return sum(stage_ns(self._costs.mean_ns, self._specs, stage, 1) for stage in stages) if self._is_on else 0

    @property
    def stumble_ns(self) -> int:
        """By how much a step took longer than predicted, at worst and of late."""
        return self._costs.stumble_ns if self._is_on else 0

    def frame_ns(self, rows: int) -> int:
        """One frame for `rows`."""
        time_ns = self._frames.get(rows)
        if time_ns is None:
            time_ns = self._frames[rows] = self.stage_ns(Stage.BACKBONE, rows) + self.stage_ns(Stage.DEPTH, rows)
        return time_ns

    def codec_ns(self, streams: int, frames: int = 1) -> int:
        """One codec step of as many of `streams` as it holds."""
        return self.stage_ns(Stage.CODEC, streams if streams < self._codec_rows else self._codec_rows, frames)

    def text_ns(self, streams: list[Stream]) -> int:
        """One step of the text encoder for the next pieces of as many of `streams` as it holds."""
        rows = min(len(streams), self._specs[Stage.TEXT].max_rows)
        return self.stage_ns(Stage.TEXT, rows, sum(s.segments[0] * s.rows for s in streams[:rows]))

    def way_to_sound_ns(self, streams: Iterable[Stream]) -> int:
        """Until all of these, who have not spoken, have; if they run together from here."""
        count = rows = tokens = prompt = 0
        frames = chunk = 0
        for s in streams:
            count += 1
            rows += s.rows
            tokens += (s.tokens - s.encoded) * s.rows
            chunk = max(chunk, s.target)
            if s.started:
                frames = max(frames, s.target - s.made)
            else:
                # The first frame comes with the prompt.
                frames = max(frames, s.target - 1)
                prompt += max(1, s.prompt - s.positions) * s.rows
        time_ns = self.stage_ns(Stage.CODEC, count, chunk) + frames * self.frame_ns(rows)
        if prompt:
            carried = min(prompt, self._specs[Stage.PREFILL].max_tokens or prompt)
            time_ns += self.stage_ns(Stage.PREFILL, rows, carried) * -(-prompt // carried)
            time_ns += self.stage_ns(Stage.DEPTH, rows)
        if tokens:
            time_ns += self.stage_ns(Stage.TEXT, count, tokens)
        return time_ns

    def piece_of_prompt(self, rows: int, spare_ns: int) -> int:
        """Tokens of the largest prefill step worth running that takes at most `spare_ns`; 0 when there is none.

        A step of the smallest size is nearly all fixed cost.  One that takes twice as long is worth running: half of
        its time goes by tokens.  (A prefill chunk sized by slack: Niyama, arXiv 2503.22562.)
        """
        best = 0
        for tokens, time_ns in self._worthwhile_pieces(rows):
            if time_ns > spare_ns:
                break
            best = tokens
        return best

    def least_piece_of_prompt(self, rows: int) -> int:
        """Tokens of the smallest prefill step worth running; 0 when only whole prompts are."""
        return next((tokens for tokens, _ in self._worthwhile_pieces(rows)), 0)

    def _worthwhile_pieces(self, rows: int) -> Iterator[tuple[int, int]]:
        worth_ns = 2 * self.stage_ns(Stage.PREFILL, rows, SMALLEST_PIECE)
        tokens = 2 * SMALLEST_PIECE
        while tokens <= self._specs[Stage.PREFILL].max_tokens:
            time_ns = self.stage_ns(Stage.PREFILL, rows, tokens)
            if time_ns >= worth_ns:
                yield tokens, time_ns
            tokens *= 2
