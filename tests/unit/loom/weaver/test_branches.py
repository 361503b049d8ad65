"""Branches of living runs, which a process of the run starts: what it is told, and when a caller is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from loom.control import operations
from loom.control.commands import CommandKind
from loom.errors import BranchRefused, WrongArguments
from loom.weaver.run_views import RunRecord
from loom.weaver.runs.catalog import Catalog
from loom.weaver.server import branches
from loom.weaver.server.branches import RunBranches
from tests.unit.loom.weaver.bench import Bench, Threadlet

BRANCH = operations.BranchRun("first", 900, {"learning_rate": "0.5x"})


def branch(bench: Bench, asked: operations.BranchRun, *then: Callable[[], object]) -> RunRecord:
    """Ask for a branch; while the answer waits, do one thing after the other."""
    known = bench.weaver.known
    catalog = Catalog("ann", known.runs, known.history, bench.weaver.outbox.hurry)
    todo = iter(then)

    async def next_event(seconds: float) -> None:
        bench.commit()
        next(todo, lambda: None)()
        await asyncio.sleep(0)
        bench.commit()

    async def ask() -> RunRecord:
        here = RunBranches(bench.weaver, catalog.shown, lambda: bench.now, next_event)
        waiting = here.begin(asked, "token", bench.now)
        bench.commit()
        return await waiting

    return asyncio.run(ask())


def told(one: Threadlet) -> dict[str, Any]:
    return next(params for kind, params in reversed(one.commands()) if kind == "branch")


def begin(bench: Bench, one: Threadlet) -> None:
    """Let the branch that a process was told to start register."""
    Threadlet(bench, "half_0", group="half", start=told(one)["id"], parent="branch:first:880")


def timeline(bench: Bench, run: str) -> list[dict[str, Any]]:
    return bench.weaver.known.runs.timeline(bench.weaver.known.runs.find(run))


def test_the_lowest_rank_is_told_and_the_answer_is_the_run_that_registers(bench: Bench) -> None:
    second = Threadlet(bench, "train_1", rank=1, start="first")
    lead = Threadlet(bench, "train_0", rank=0, start="first")
    Threadlet(bench, "train-at-900_0", group="train-at-900", start="other")

    run = branch(bench, BRANCH, lambda: begin(bench, lead))

    assert second.commands() == []
    assert (run.name, run.parent) == ("half", {"run": "first", "step": 880, "kind": "branch"})
    params = told(lead)
    assert (params["run"], params["name"], params["step"], params["set"]) == (
        "first",
        "train",
        900,
        dict(BRANCH.set),
    )
    assert (params["taken"], params["known"], params["timeline"]) == (
        ["train-at-900"],
        {"learning_rate": 0.001},
        [],
    )
    mark = timeline(bench, "first")[-1]
    assert (mark["do"], mark["by"], mark["applied"], mark["step"]) == ("branch", "token", 1, 880)
    assert mark["params"] == {"id": run.id, "step": 900, "set": {"learning_rate": "0.5x"}, "replace": False}


def test_the_process_gets_the_changes_of_values_so_far(bench: Bench) -> None:
    lead = Threadlet(bench, "train_0", start="first")
    given = {"learning_rate": 0.5}
    bench.weaver.dispatcher.give(CommandKind.UPDATE_CONFIG, given, "train_0", "ann", bench.now)
    bench.commit()
    lead.ack(lead.last_command(), changes={"learning_rate": {"old": 0.001, "new": 0.5}})

    branch(bench, BRANCH, lambda: begin(bench, lead))

    (change,) = told(lead)["timeline"]
    changes = {"learning_rate": {"old": 0.001, "new": 0.5}}
    assert change == {"do": "update_config", "applied": 1, "step": 5, "changes": changes}


def test_a_refusal_of_the_process_says_what_to_call(bench: Bench) -> None:
    lead = Threadlet(bench, "train_0", start="first")
    lead.say("start", {"host": "node7", "command": ["python", "train.py"]})

    def refuse() -> None:
        lead.ack(lead.last_command(), ok=False, reason="no checkpoint")

    with pytest.raises(BranchRefused) as refused:
        branch(bench, BRANCH, refuse)

    line = "Call on node7: loom branch first --step 900 --set learning_rate=0.5x"
    assert str(refused.value) == f"run 'first' cannot be branched: no checkpoint. {line}"


def test_runs_whose_processes_cannot_start_it_are_refused_at_once(bench: Bench) -> None:
    cut = Threadlet(bench, "train_0", start="first")
    bench.weaver.lost(cut, bench.now)
    Threadlet(bench, "done_0", group="done", start="done").say("bye", "done", "finished")
    Threadlet(bench, "ours_0", group="ours", start="ours", session="s")

    for run, why in (
        ("first", "'train_0' is not connected"),
        ("done", "none of its"),
        ("ours", "of the session 's'"),
    ):
        asked = operations.BranchRun(run, set={"learning_rate": [1]}, replace=True)
        with pytest.raises(
            BranchRefused, match=rf"as .*{why}.*loom branch {run} --set 'learning_rate=\[1\]' --replace"
        ):
            branch(bench, asked)


def test_the_controller_of_a_job_starts_the_branches_of_a_run_in_its_session(bench: Bench) -> None:
    controller = Threadlet(bench, "train_job", group="train_jobs", start="first", session="s")
    group = Threadlet(bench, "train_0", start="first", session="s")

    run = branch(bench, BRANCH, lambda: begin(bench, controller))

    assert group.commands() == []
    assert run.parent is not None


def test_a_key_that_the_run_does_not_have_is_refused(bench: Bench) -> None:
    Threadlet(bench, "train_0", start="first")

    with pytest.raises(WrongArguments, match="set lerning: run 'first' has no such key; it has learning_rate"):
        branch(bench, operations.BranchRun("first", set={"lerning": 1}))


def test_in_its_place_it_begins_when_the_run_has_saved_and_ended(bench: Bench) -> None:
    lead = Threadlet(bench, "train_0", start="first")

    def ready() -> None:
        lead.ack(lead.last_command(), evidence={"log": "/own/log"})

    def saved() -> None:
        assert lead.commands()[-1][0] == "save"
        lead.ack(lead.last_command())

    def stopped() -> None:
        assert lead.commands()[-1][0] == "stop"
        lead.ack(lead.last_command())
        lead.say("bye", "told", "stopped")

    run = branch(
        bench,
        operations.BranchRun("first", replace=True),
        ready,
        lambda: None,
        saved,
        stopped,
        lambda: begin(bench, lead),
    )

    assert run.name == "half"
    assert bench.weaver.known.runs.find("first").state == "stopped"


def test_a_branch_that_does_not_register_is_refused_with_its_log(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations.BranchRun, "takes", lambda given: 0.2)
    monkeypatch.setattr(branches, "SAVES_WITHIN", 0.0)
    lead = Threadlet(bench, "train_0", start="first")

    with pytest.raises(BranchRefused, match=r"has not registered in 0\.2 s$"):
        branch(bench, BRANCH)

    with pytest.raises(BranchRefused, match="its output is in /own/log on"):
        branch(
            bench,
            operations.BranchRun("first", replace=True),
            lambda: lead.ack(lead.last_command(), evidence={"log": "/own/log"}),
        )


def test_the_time_that_it_may_take_is_longer_with_the_end_of_a_run() -> None:
    takes = operations.BranchRun.takes
    assert takes({"replace": True}) == 2 * takes({}) > 0
    assert BRANCH.noted() == ("commanded", {"run": "first", "do": "branch_run", "keys": ["learning_rate"]})
