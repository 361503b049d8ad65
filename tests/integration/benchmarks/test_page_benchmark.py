"""The benchmark of the page runs and adds up; how fast anything is, it says, and no test does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from tests.benchmarks.page.measuring import measure_page, missing
from tests.benchmarks.page.plan import VIEWS, Heap, Load, PageFigures, PagePlan, ViewFigures
from tests.benchmarks.page.report import PageReport, page_report
from tests.benchmarks.page.trace import KINDS, Trace, Update, read_trace
from tests.integration.benchmarks.test_port_benchmark import MACHINE
from tests.support.needs import skipped_if

MAIN = {"pid": 7, "tid": 7}


def slice_of(name: str, begin: float, took: float, **where: int) -> dict[str, Any]:
    """An event of a trace; times in milliseconds."""
    cpu = {"tdur": took * 500} if name == "RunTask" else {}
    return {"name": name, "ph": "X", "ts": begin * 1e3, "dur": took * 1e3, "args": {}, **cpu, **MAIN, **where}


def message(at: float, **where: int) -> dict[str, Any]:
    return {"name": "WebSocketReceive", "ph": "I", "ts": at * 1e3, "args": {}, **MAIN, **where}


def traced(*events: dict[str, Any]) -> Trace:
    named = {"name": "thread_name", "ph": "M", "ts": 0, "args": {"name": "CrRendererMain"}, **MAIN}
    return read_trace([*events, named], 1.0)


def frame(begin: float, took: float = 2.0) -> list[dict[str, Any]]:
    return [slice_of("RunTask", begin, took), slice_of("Commit", begin, took)]


def totals(trace: Trace) -> list[float]:
    return [one.total for one in trace.updates]


def test_an_update_has_each_task_until_the_next_one() -> None:
    trace = traced(
        slice_of("RunTask", 0, 50),  # before the first message
        slice_of("RunTask", 100, 3),
        message(101),
        *frame(110),
        slice_of("RunTask", 200, 5),  # work that was put off
        slice_of("RunTask", 600, 4),
        message(601),
        *frame(610),
    )

    assert totals(trace) == [10.0, 6.0]
    assert [one.longest for one in trace.updates] == [5.0, 4.0]
    assert [one.cpu for one in trace.updates] == [5.0, 3.0]
    assert trace.busy == pytest.approx(0.066)


def test_messages_that_are_shown_together_are_one_update() -> None:
    trace = traced(
        slice_of("RunTask", 0, 3), message(1), slice_of("RunTask", 5, 3), message(6), *frame(10), *frame(20)
    )

    assert totals(trace) == [10.0]


def test_a_message_that_shows_nothing_does_not_take_later_ones() -> None:
    trace = traced(slice_of("RunTask", 0, 3), message(1), slice_of("RunTask", 500, 4), message(501), *frame(510))

    assert totals(trace) == [3.0, 6.0]


def test_an_update_that_the_trace_cuts_off_is_left_out() -> None:
    assert totals(
        traced(slice_of("RunTask", 0, 3), message(1), *frame(10), slice_of("RunTask", 600, 3), message(601))
    ) == [5.0]


def test_the_kinds_of_work_add_up() -> None:
    trace = traced(
        slice_of("RunTask", 0, 20),
        message(1),
        slice_of("FireAnimationFrame", 2, 10),
        slice_of("Layout", 4, 3),  # which the script asks for
        slice_of("UpdateLayoutTree", 13, 1),
        slice_of("Paint", 15, 2),
        slice_of("Commit", 18, 1),
        slice_of("Paint", 4, 400, tid=8),  # of another thread
    )

    (update,) = trace.updates
    assert update.kinds == {"script": 7.0, "style": 1.0, "layout": 3.0, "paint": 3.0, "other": 6.0}
    assert sum(update.kinds.values()) == update.total
    assert update.bounded == 14.0


def test_a_trace_without_a_message_has_no_update() -> None:
    assert traced(*frame(0)).updates == ()


def test_messages_in_another_thread_are_not_measured() -> None:
    with pytest.raises(AssertionError, match="another than the main thread"):
        traced(message(1, tid=8))


def figures(
    update: float = 10.0,
    growth: int = 0,
    received: float = 150_000.0,
    second: float = 2.0,
    size: int = 100 << 10,
    stored: float = 1.0,
) -> PageFigures:
    """Figures within all budgets, but for what is given."""
    kinds = {**dict.fromkeys(KINDS, 0.0), "script": update, "other": 3.0}
    trace = Trace(10.0, tuple(Update(update + 3.0, 5.0, 8.0, kinds) for _ in range(20)), 0.2)
    views = {
        name: ViewFigures(
            [trace, trace], [received] * 2, [16.7] * 9, [second, 1.0, second], [Heap(1, 9), Heap(61, 9 + growth)]
        )
        for name in VIEWS
    }
    loads = [Load(10.0, 0.5, 4.0, 3.0)] * 4
    return PageFigures(views, size, 2.0, loads, [stored] * 4, [0.5], [3.0, 4.0], [9.0], [4.0, 5.0], [200.0])


def report(**changed: Any) -> PageReport:
    return page_report(PagePlan(), "command", MACHINE, figures(**changed))


def test_a_page_within_its_budgets() -> None:
    assert report().within_budgets


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"update": 16.1}, {f"update, p95, {name}" for name in VIEWS}),
        ({"growth": 257 << 10}, {"growth of the heap"}),
        ({"received": 201e3}, {f"received, {name}" for name in VIEWS}),
        ({"second": 5.1}, {"a second watcher"}),
        ({"size": 151 << 10}, {"the page's files, gzipped"}),
        ({"stored": 0.94}, {"reports stored"}),
    ],
)
def test_each_budget_of_the_page_can_be_missed(changed: dict[str, Any], names: set[str]) -> None:
    found = report(**changed)

    assert not found.within_budgets
    assert {each.name for each in found.budgets if not each.met} == names


@skipped_if(missing())
@pytest.mark.slow
def test_it_measures_every_view_of_a_real_page() -> None:
    plan = PagePlan(replicas=200, group=50, runs=20, points=20_000, seconds=36.0, rounds=2)
    said: list[str] = []

    found = page_report(plan, "command", MACHINE, measure_page(plan, said.append))

    assert len(said) == 3 + 2 * len(VIEWS)
    console = Console(record=True, width=160)
    console.print(found.as_table())
    printed = console.export_text()
    for row in (
        *(f"update, p95, {name}" for name in VIEWS),
        "growth of the heap",
        *(f"received, {name}" for name in VIEWS),
        "a second watcher",
        "the page's files, gzipped",
        "reports stored",
        "gateway, one watcher",
        "weaver, one watcher",
        "simulated threadlets",
        "call beside the page, p99",
        "a run of many points is opened",
        *KINDS,
    ):
        assert row in printed
    views = json.loads(json.dumps(found.as_json()))["views"]
    assert list(views) == list(VIEWS)
    for view, row in views.items():
        assert row["a second"] > 0, view
        assert row["p95"] > 0, view
        assert row["KB a second"] > 0, view
        assert row["frames, p50"] > 0, view
        assert row["heap, MiB"] > 0, view
