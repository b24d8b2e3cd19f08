"""What the server counts, for Prometheus (`GET /metrics`).

Each server has a registry of its own, so that two of them in one process (tests do that) do not add up.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from breeze_rtc.agent.figures import STAGES, TurnFigures

if TYPE_CHECKING:
    from breeze_rtc.runtime.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SOON = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
_SLACK = (-1.0, -0.3, -0.1, -0.03, 0.0, 0.03, 0.1, 0.2, 0.4, 0.8, 1.2, 2.0)


class Metrics:
    """The server's counters; `text()` is what Prometheus reads."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self.calls = Gauge("breeze_calls", "Calls open now", registry=self._registry)
        self.calls_ended = Counter("breeze_calls_ended", "Calls ended, by reason", ["reason"], registry=self._registry)
        self.first_packet = Histogram(
            "breeze_first_packet_seconds",
            "From a request or a user's turn to the first packet of the answer",
            buckets=_SOON,
            registry=self._registry,
        )
        self.first_sound = Histogram(
            "breeze_first_sound_seconds",
            "From a user's turn to the first sample at the listener's ear",
            buckets=_SOON,
            registry=self._registry,
        )
        self.stop = Histogram(
            "breeze_stop_seconds",
            "From the decision to interrupt to silence at the listener's ear",
            buckets=_SOON,
            registry=self._registry,
        )
        self.slack = Histogram(
            "breeze_slack_seconds",
            "Time the scheduler has in hand for a call's stream, sampled while it speaks",
            buckets=_SLACK,
            registry=self._registry,
        )
        self.reconnections = Counter(
            "breeze_reconnections",
            "Calls that went on after their path or socket died",
            ["what"],
            registry=self._registry,
        )
        self.gaps = Counter(
            "breeze_gaps", "Silences inside a speech that the listener could hear", registry=self._registry
        )
        self.gap_seconds = Counter("breeze_gap_seconds", "How long those silences were", registry=self._registry)
        self.position = Counter(
            "breeze_position_seconds",
            "Time of calls, by who said where the ear was (playout, context and none were reported; held, rtcp and "
            "estimate were not, and are less sure)",
            ["source"],
            registry=self._registry,
        )
        self.microphone_lost = Counter(
            "breeze_microphone_lost_seconds",
            "Sound of callers that did not arrive, by what took its place (redundancy, a guess, silence)",
            ["by"],
            registry=self._registry,
        )
        self.microphone_dropped = Counter(
            "breeze_microphone_dropped",
            "Packets of callers that were of no use, by why",
            ["why"],
            registry=self._registry,
        )
        self.heard = Counter("breeze_heard_audio_seconds", "Speech that was heard", registry=self._registry)
        self.wasted = Counter(
            "breeze_wasted_audio_seconds",
            "Speech that was made and, after an interruption, never heard",
            registry=self._registry,
        )
        self.turn_delay = Histogram(
            "breeze_turn_delay_seconds",
            "From the end of a user's turn to its transcript, the answer's first text, its first sound made, and its "
            "first sound at the ear",
            ["to"],
            buckets=_SOON,
            registry=self._registry,
        )
        self.interruptions = Counter(
            "breeze_interruptions",
            "Times that a caller's sound stopped the agent: for good, or until it proved to be no speech",
            ["kind"],
            registry=self._registry,
        )
        self.speeches = Counter(
            "breeze_speeches",
            "What agents said, by how it was heard: without a break, or with silence in it because sound was late",
            ["sound"],
            registry=self._registry,
        )
        self.words = Counter(
            "breeze_words",
            "Words of what agents said: heard, not heard, and those at a cut of which the position does not say it",
            ["were"],
            registry=self._registry,
        )
        self.held_back = Counter(
            "breeze_held_back_seconds",
            "Silence before and between sentences of a voice that is slower than speech, so that none breaks off",
            registry=self._registry,
        )
        self.concealed = Counter(
            "breeze_concealed_seconds",
            "Sound that listeners' players made up during speech, for what the network lost or brought late",
            registry=self._registry,
        )
        self.refused = Counter(
            "breeze_refused", "Requests and messages refused, by error code", ["code"], registry=self._registry
        )
        self._registry.register(_EngineFigures(engine))

    def observe(self, figures: TurnFigures) -> None:
        """The agent has said something."""
        for stage in STAGES:
            delay_s = figures.delay_s(stage)
            if delay_s is not None:
                self.turn_delay.labels(stage).observe(delay_s)
        self.interruptions.labels("real").inc(figures.interrupted)
        self.interruptions.labels("false").inc(figures.false_interruptions)
        self.speeches.labels("broken" if figures.gaps else "whole").inc()
        for fate in ("heard", "unheard", "unsure"):
            self.words.labels(fate).inc(getattr(figures, f"words_{fate}"))
        self.held_back.inc(figures.held_back_s)
        self.concealed.inc(figures.concealed_s)

    def text(self) -> bytes:
        """The exposition format, UTF-8."""
        return generate_latest(self._registry)


class _EngineFigures:
    """The engine's own counts, read from its latest snapshot when somebody asks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats
        seconds = CounterMetricFamily("breeze_stage_seconds", "Time spent in steps, by stage", labels=["stage"])
        steps = CounterMetricFamily("breeze_stage_steps", "Steps run, by stage", labels=["stage"])
        for stage, values in stats.get("stages", {}).items():
            seconds.add_metric([str(stage)], values["seconds"])
            steps.add_metric([str(stage)], values["steps"])
        yield seconds
        yield steps
        ratios = HistogramMetricFamily(
            "breeze_step_ratio",
            "Time a step took over the time the scheduler had predicted; above 1 it was late",
            labels=["stage"],
        )
        margins = GaugeMetricFamily(
            "breeze_step_margin", "What the scheduler multiplies a typical step's time with", labels=["stage"]
        )
        for stage, values in stats.get("step_ratios", {}).items():
            ratios.add_metric([str(stage)], **_counted(values))
            margins.add_metric([str(stage)], values["margin"])
        yield ratios
        yield margins
        moves = HistogramMetricFamily(
            "breeze_deadline_error_seconds",
            "By how much a listener's report moved the time at which the scheduler thought they would run dry: below 0 "
            "there was less time than believed; by what had been believed, the estimate or an earlier report",
            labels=["believed"],
        )
        for source, values in stats.get("moves", {}).items():
            moves.add_metric([str(source)], **_counted(values))
        yield moves
        yield from _graph_figures(stats.get("graphs", {}))
        yield GaugeMetricFamily("breeze_streams", "Streams being made now", value=len(stats.get("streams", {})))
        queued = GaugeMetricFamily("breeze_queued_streams", "Streams that wait for room, by class", labels=["class"])
        refused = CounterMetricFamily(
            "breeze_refused_streams", "Streams for which there was no room, by class", labels=["class"]
        )
        for name, count in stats.get("queued", {}).items():
            queued.add_metric([name], count)
            refused.add_metric([name], stats["refused"][name])
        yield queued
        yield refused
        yield GaugeMetricFamily(
            "breeze_strained",
            "1 while listeners get larger chunks and less lead than usual, so that one more could begin",
            value=int(stats.get("is_strained", False)),
        )
        yield CounterMetricFamily(
            "breeze_engine_restarts", "Times a dead engine was started again", value=self._engine.restarts
        )


def _graph_figures(graphs: dict[str, Any]) -> Iterable[Metric]:
    """What `runtime.graphs.GraphTable` counted; nothing where no graphs are used."""
    replays = CounterMetricFamily(
        "breeze_graph_replays", "Steps that replayed a graph, by stage and bucket", labels=["stage", "bucket"]
    )
    taken = GaugeMetricFamily(
        "breeze_graph_bytes", "Memory that graphs take, by stage and bucket", labels=["stage", "bucket"]
    )
    for family, name in ((replays, "replays"), (taken, "bytes")):
        for stage, buckets in graphs.get(name, {}).items():
            for bucket, count in buckets.items():
                family.add_metric([stage, bucket], count)
    misses = CounterMetricFamily("breeze_graph_misses", "Steps that no graph fitted, by stage", labels=["stage"])
    for stage, count in graphs.get("misses", {}).items():
        misses.add_metric([stage], count)
    rows = CounterMetricFamily(
        "breeze_graph_rows",
        "Rows of replayed graphs (tokens, of text and prompts): those of streams, and those that were padding",
        labels=["stage", "row"],
    )
    for row, name in (("stream", "live"), ("pad", "padded")):
        for stage, count in graphs.get(name, {}).items():
            rows.add_metric([stage, row], count)
    recorded = GaugeMetricFamily("breeze_graphs_recorded", "Share of the graphs that are ready for use")
    if graphs:
        recorded.add_metric([], graphs["recorded"])
    yield from (replays, taken, misses, rows, recorded)


def _counted(values: dict[str, Any]) -> dict[str, Any]:
    """A `scheduling.histogram.Histogram` of the snapshot as Prometheus has it: each count with those below it."""
    bounds = [*(str(bound) for bound in values["bounds"]), "+Inf"]
    return {"buckets": list(zip(bounds, accumulate(values["counts"]), strict=True)), "sum_value": values["sum"]}
