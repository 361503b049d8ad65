"""The benchmark of orders beside streams runs, names each place, and adds up; no test says how fast anything is."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.benchmarks.machine import describe_machine
from tests.benchmarks.queue.measuring import measure_queue
from tests.benchmarks.queue.plan import SET_UPS, WAYS, QueuePlan
from tests.benchmarks.queue.report import QueueReport, queue_ms


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_measures_every_way_in_every_set_up(tmp_path: Path) -> None:
    said: list[str] = []

    windows = measure_queue(QueuePlan(rounds=1, seconds=3.0, period=0.5, settle=1.0), said.append)

    report = QueueReport(QueuePlan(rounds=1), "command", describe_machine(), windows)
    assert len(said) == len(SET_UPS) * len(WAYS)
    for set_up in SET_UPS:
        assert report.place(set_up) == set_up.place.value
        for way in WAYS:
            (window,) = windows[set_up.name][way]
            assert window.tokens_per_s > 0
            assert len(window.queue_ms) == len(window.rpc_ms) > 0
    for ratio, set_up in zip(report.ratios, SET_UPS, strict=False):
        best = statistics.median(windows[set_up.name][report.best(set_up)][0].queue_ms)
        assert ratio.median == pytest.approx(best / queue_ms(windows[set_up.name]["shared"][0]))
    report.plot(tmp_path / "queue.png")
    assert (tmp_path / "queue.png").stat().st_size > 1000
