"""Live cells: what they show, when they stop, and how their controls are refused."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from loom.errors import ScopeError, WeaverUnavailable
from loom.weaver.run_views import RunRecord
from loom_proxy.notebook import live
from loom_proxy.notebook.html import run_html, runs_html
from loom_proxy.notebook.live import LiveHtml, Shown
from loom_proxy.notebook.live_runs import LiveRuns
from tests.support.gateways import await_true

RUN = {
    "id": "3f2a9c",
    "name": "<train>",
    "state": "running",
    "step": 30,
    "max_step": 100,
    "ranks": 2,
    "replicas": {"running": 2},
    "summary": {
        "memory_bytes": [1, 1, 1, 30],
        "train_loss": [0.5, 0.5, 2.0, 30],
        "learning_rate": [0.1, 0.1, 0.1, 30],
    },
}

ENDED = {**RUN, "id": "81d04e", "state": "crashed", "reason": "it ran out of memory", "replicas": {}}


class Weaver:
    """A stand-in for the weaver's operations."""

    def __init__(self, *runs: Mapping[str, Any]) -> None:
        self.runs = list(runs)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.refusal: Exception | None = None

    def found(self) -> list[RunRecord]:
        return [RunRecord.from_body(one) for one in self.runs]

    def __call__(self, operation: str, **arguments: Any) -> Any:
        self.asked.append((operation, arguments))
        if operation == "run_history":
            return [[1.0, 10, 2.0], [2.0, None, 3.0], [3.0, 20, float("nan")], [4.0, 30, 0.5]]
        if operation == "replica":
            return {"config": {"learning_rate": 0.02}}
        if operation == "run":
            members = [{"replica": "train_0"}, {"replica": "train_1", "ending": "crashed"}]
            return {**self.runs[0], "members": members}
        if self.refusal is not None:
            raise self.refusal
        outcome = {"ok": True, "step": 31}
        refused = {"ok": False, "reason": "it is draining"}
        return {
            "id": "c1",
            "done": True,
            "kind": arguments["kind"],
            "params": arguments["params"],
            "replicas": ["train_0", "train_1"],
            "outcomes": {"train_0": outcome, "train_1": refused},
        }


def runs_of(weaver: Weaver, **options: Any) -> LiveRuns:
    return LiveRuns(weaver.found, weaver, **options)


def test_a_run_has_its_curve_its_progress_and_its_rate() -> None:
    weaver = Weaver(RUN, ENDED)
    state = runs_of(weaver).state()
    run = state["run"]
    assert (run["metric"], run["metrics"][0], run["step"], run["max_step"]) == ("train_loss", "train_loss", 30, 100)
    assert run["points"] == [[10, 2.0], [20, None], [30, 0.5]]
    assert (run["rate"], run["living"], state["may"]) == (0.1, True, True)
    assert [id for id, _ in state["runs"]] == ["3f2a9c", "81d04e"]


def test_the_rate_of_a_training_that_reports_none_is_that_of_its_configuration() -> None:
    without = {**RUN, "summary": {"loss": [0.5, 0.5, 2.0, 30]}}
    weaver = Weaver({**without, "config": {"learning_rate": 0.1}})
    live_runs = runs_of(weaver)
    for _ in range(2):
        assert live_runs.state()["run"]["rate"] == 0.02
    assert [arguments for operation, arguments in weaver.asked if operation == "run"] == [{"id": "3f2a9c"}]
    assert runs_of(Weaver(without)).state()["run"]["rate"] is None
    assert runs_of(Weaver({**without, **{"state": "completed"}})).state()["run"]["rate"] is None


def test_another_run_and_another_metric_are_chosen_in_the_cell() -> None:
    live_runs = runs_of(Weaver(RUN, ENDED))
    live_runs.message({"run": "81d04e"})
    live_runs.message({"metric": "memory_bytes"})
    run = live_runs.state()["run"]
    assert (run["id"], run["metric"], run["state"], run["living"]) == ("81d04e", "memory_bytes", "crashed", False)
    assert run["detail"] == "2 ranks, it ran out of memory"


def test_a_run_whose_ranks_are_all_paused_is_paused() -> None:
    paused = {**RUN, "replicas": {"paused": 2}}
    assert runs_of(Weaver(paused)).state()["run"]["state"] == "paused"
    assert runs_of(Weaver({**RUN, "replicas": {"paused": 1, "running": 1}})).state()["run"]["state"] == "running"


def test_controls_go_to_the_living_ranks_and_tell_their_answer() -> None:
    weaver = Weaver(RUN)
    live_runs = runs_of(weaver)
    live_runs.message({"command": "pause"})
    assert weaver.asked[-1] == ("command", {"kind": "pause", "params": {}, "target": ["train_0"]})
    assert live_runs.state()["said"] == "pause: applied by 1 of 2 ranks at step 31, refused by 1: it is draining"
    live_runs.message({"command": "learning_rate", "value": " 0.05 "})
    assert weaver.asked[-1][1]["params"] == {"learning_rate": 0.05}
    before = len(weaver.asked)
    for content in ({"command": "learning_rate", "value": "half"}, {"command": "rm -rf"}, {"other": 1}):
        live_runs.message(content)
    assert len(weaver.asked) == before
    assert "'half' is no learning rate" in live_runs.state()["said"]


def test_a_token_that_only_views_is_refused_and_the_controls_with_it() -> None:
    weaver = Weaver(RUN)
    weaver.refusal = ScopeError("the token may view, and a command needs operate")
    live_runs = runs_of(weaver)
    live_runs.message({"command": "stop"})
    state = live_runs.state()
    assert (state["may"], state["said"]) == (False, "ScopeError: the token may view, and a command needs operate")


def test_a_weaver_that_is_away_is_told_and_the_cell_goes_on() -> None:
    def away() -> list[RunRecord]:
        raise WeaverUnavailable("the weaver is away")

    live_runs = LiveRuns(away, Weaver(), html=lambda: "<b>job</b>")
    state = live_runs.state()
    assert (state["html"], state["run"]) == ("<b>job</b>", None)
    assert "the weaver is away" in state["said"]
    assert not live_runs.ended()


def test_a_cell_ends_with_its_runs_and_a_job_s_with_the_job() -> None:
    weaver = Weaver(RUN)
    closed = False
    of_run, of_job = runs_of(weaver), runs_of(weaver, over=lambda: closed)
    weaver.runs = [ENDED]
    for one in (of_run, of_job):
        one.state()
    assert (of_run.ended(), of_job.ended()) == (True, False)
    closed = True
    assert of_job.ended()


class Widget:
    """A stand-in for anywidget's."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = state

    def on_msg(self, receive: Callable[[Any, Any, Any], None]) -> None:
        self.receive = receive


@pytest.fixture
def widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_widget_class", lambda: Widget)
    monkeypatch.setattr(live, "EVERY", 0.01)
    monkeypatch.setattr(live, "_shown", type(live._shown)())


@pytest.mark.usefixtures("widgets")
def test_html_changes_after_the_cell_has_ended_until_it_is_over() -> None:
    html, over = "pending", threading.Event()
    cell = live.show(LiveHtml(lambda: html, over.is_set))
    assert cell.widget.state == {"html": "pending"}
    html = "done"
    await_true(lambda: cell.widget.state == {"html": "done"})
    over.set()
    await_true(cell._stopped.is_set)


@pytest.mark.usefixtures("widgets")
def test_a_cell_that_nobody_sees_asks_for_nothing() -> None:
    asked = threading.Event()

    def html() -> str:
        asked.set()
        return ""

    cell = live.show(LiveHtml(html, lambda: False))
    cell.widget.receive(cell.widget, {"visible": False}, [])
    with cell._lock:
        asked.clear()
    assert not asked.wait(0.1)
    cell.widget.receive(cell.widget, {"visible": True}, [])
    assert asked.wait(10)
    cell.stop()


@pytest.mark.usefixtures("widgets")
def test_the_oldest_cells_stay_as_they_are_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST", 2)
    cells = [live.show(LiveHtml(str, lambda: False)) for _ in range(3)]
    assert [cell._stopped.is_set() for cell in cells] == [True, False, False]
    for cell in cells:
        cell.stop()


@pytest.mark.usefixtures("widgets")
def test_a_cell_whose_subject_fails_stops_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    broken = False

    def html() -> str:
        if broken:
            raise RuntimeError("broken")
        return ""

    cell = live.show(LiveHtml(html, lambda: False))
    broken = True
    await_true(cell._stopped.is_set)
    assert "not kept up to date" in caplog.text


class Thing(Shown):
    def _live(self) -> LiveHtml:
        return LiveHtml(self._repr_html_, lambda: True)

    def _repr_html_(self) -> str:
        return "<i>thing</i>"


def test_without_a_notebook_or_anywidget_the_static_html_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Thing()._repr_mimebundle_() == {}
    monkeypatch.setattr(live, "in_notebook", lambda: True)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.setattr(live.importlib.util, "find_spec", lambda name: None)
    assert Thing()._repr_mimebundle_() == {}


def test_marimo_shows_the_static_html_without_anywidget(monkeypatch: pytest.MonkeyPatch) -> None:
    marimo = types.SimpleNamespace(running_in_notebook=lambda: True, Html=lambda text: ("html", text))
    monkeypatch.setitem(sys.modules, "marimo", marimo)
    monkeypatch.setattr(live.importlib.util, "find_spec", lambda name: None)
    assert Thing()._display_() == ("html", "<i>thing</i>")
    assert Thing()._repr_mimebundle_() == {}


def test_a_function_that_runs_has_its_name_its_state_and_its_time() -> None:
    assert "since " in run_html("<fit>", "running", 1_000.0, None)
    ended = run_html("<fit>", "failed", 1_000.0, 1_012.3)
    assert ("12.3 s" in ended, "failed" in ended, "&lt;fit&gt;" in ended, "since" in ended) == (
        True,
        True,
        True,
        False,
    )
    assert "since" not in run_html("fit", "cancelled", None, None)
    assert "12.3 s; trains &lt;sft&gt;" in run_html("fit", "done", 1_000.0, 1_012.3, "trains <sft>")


def test_runs_are_a_table_whose_texts_are_escaped() -> None:
    html = runs_html([RunRecord.from_body(RUN), RunRecord.from_body(ENDED)])
    assert "&lt;train&gt;" in html
    assert "<train>" not in html
    assert "30 of 100" in html
    assert 'title="it ran out of memory"' in html
    assert runs_html([]).startswith("<div")
