"""The benchmark of orders beside streams runs, names each place, and adds up; no test says how fast anything is."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.benchmarks.machine import describe_machine
from tests.benchmarks.queue.measuring import measure_queue
from tests.benchmarks.queue.plan import SERVER_SET_UPS, SERVER_WAYS, SET_UPS, WAYS, QueuePlan, ServersPlan
from tests.benchmarks.queue.report import QueueReport, queue_ms
from tests.benchmarks.queue.servers import measure_servers
from tests.benchmarks.queue.servers_report import ServersReport
from tests.support.real_vllm import needs_vllm


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


BETWEEN = "between the pool and the server's first line"
FINDINGS = {
    "client's pool": {("queue", "in the client's pool")},
    "event loop": {("queue", BETWEEN), ("queue", "on the way back")},
    "engine": {("loading", "")},
}
"""The primary finding of orders over the shared pool, and the place that it names."""
OF_VLLM = {
    # Its API server measures rpc_ms in its event loop, whose waiting counts there, too.
    "event loop": {("loading", ""), ("loading", BETWEEN)},
    # A second finding is below it.
    "engine": {("loading", BETWEEN)},
}


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("servers", [("Loom", "vLLM"), ("vLLM, 2 API servers",)])
def test_the_logs_of_looms_server_and_of_vllms_name_the_place(servers: tuple[str, ...]) -> None:
    said: list[str] = []
    plan = ServersPlan(seconds=2.5, servers=servers)

    cells = measure_servers(plan, said.append)

    report = ServersReport(plan, "command", describe_machine(), cells)
    assert report.as_table()
    assert list(cells) == list(servers)
    for server in servers:
        for set_up in SERVER_SET_UPS:
            assert list(cells[server][set_up.name]) == list(SERVER_WAYS)
            allowed = FINDINGS[set_up.name] | (OF_VLLM.get(set_up.name, set()) if server != "Loom" else set())
            (cell,) = cells[server][set_up.name]["shared"]
            assert (cell.primary, cell.place) in allowed, (server, set_up.name, cell)
