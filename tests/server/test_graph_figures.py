"""What the graphs counted, as Prometheus reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from breeze_rtc.runtime.engine import Engine
from breeze_rtc.server.metrics import Metrics


def test_graphs_are_counted_by_stage_and_bucket() -> None:
    """Replays and memory by bucket, misses and padding by stage, and how many of them are ready."""
    graphs = {
        "replays": {"depth": {"4": 7, "8": 2}, "text": {"64": 1}},
        "bytes": {"depth": {"4": 1024}},
        "misses": {"codec": 3},
        "live": {"depth": 30},
        "padded": {"depth": 14},
        "recorded": 0.5,
    }
    engine = SimpleNamespace(stats={"graphs": graphs}, restarts=0)
    text = Metrics(cast(Engine, engine)).text().decode()
    for line in (
        'breeze_graph_replays_total{bucket="8",stage="depth"} 2.0',
        'breeze_graph_replays_total{bucket="64",stage="text"} 1.0',
        'breeze_graph_bytes{bucket="4",stage="depth"} 1024.0',
        'breeze_graph_misses_total{stage="codec"} 3.0',
        'breeze_graph_rows_total{row="stream",stage="depth"} 30.0',
        'breeze_graph_rows_total{row="pad",stage="depth"} 14.0',
        "breeze_graphs_recorded 0.5",
    ):
        assert line in text


def test_an_engine_without_graphs_counts_none() -> None:
    """No zero that looks like a measurement."""
    text = Metrics(cast(Engine, SimpleNamespace(stats={}, restarts=0))).text().decode()
    assert "breeze_graph_replays_total{" not in text
    assert "\nbreeze_graphs_recorded " not in text
