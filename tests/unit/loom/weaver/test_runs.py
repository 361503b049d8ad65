"""Runs: which process is of which, how each ended, and what is kept of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loom.control import operations
from loom.control.commands import CommandKind
from loom.control.operations import ReportEnded
from loom.errors import Denied, LimitReached, LoomError, NotFound, ProtocolMismatch, RunLives, WrongArguments
from loom.weaver.run_views import RunComparison, RunDetails, RunRecord
from loom.weaver.runs import runs as bounds
from loom.weaver.runs.catalog import Catalog
from loom.weaver.runs.run import MAX_PLACES, TOGETHER, Run
from loom.weaver.runs.timeline import KEPT, MAX_MARKS
from loom.weaver.server.guests_and_admins import Asker, Guest
from tests.unit.loom.weaver.bench import START, Bench, Threadlet


def do(bench: Bench, asked: operations.Operation) -> Any:
    """Do an operation on the runs of a bench's user."""
    known = bench.weaver.known
    catalog = Catalog("ann", known.runs, known.history, bench.weaver.outbox.hurry)
    answer = catalog.handlers[type(asked)](asked, Asker(), bench.now)
    bench.commit()
    return answer


def runs(bench: Bench, **wanted: Any) -> list[RunRecord]:
    found: list[RunRecord] = do(bench, operations.GetRuns(**wanted))
    return found


def details(bench: Bench, run: str = "train") -> RunDetails:
    found: RunDetails = do(bench, operations.GetRun(run))
    return found


def curve(bench: Bench, run: str, metric: str = "loss", replica: str | None = None) -> list[int | None]:
    return [step for _, step, _ in do(bench, operations.GetRunHistory(run, metric, replica, 20_000))]


def marks(bench: Bench, run: str = "train") -> list[str]:
    return [mark["kind"] for mark in details(bench, run).timeline]


def ranks(bench: Bench, count: int = 2, **hello: Any) -> list[Threadlet]:
    return [Threadlet(bench, f"train_{rank}", rank=rank, **hello) for rank in range(count)]


def die(bench: Bench, *dying: Threadlet, reason: str = "killed") -> None:
    for one in dying:
        replica = one.replica
        assert replica is not None
        bench.weaver.lost(one, bench.now)
        bench.weaver.died(replica, one.instance, reason, bench.now)
    bench.commit()


def test_the_ranks_of_a_start_are_one_run_with_its_id(bench: Bench) -> None:
    ranks(bench, 3, start="abc123")

    (run,) = runs(bench)

    assert (run.id, run.name, run.state, run.user) == ("abc123", "train", "running", "ann")
    assert (run.ranks, run.replicas) == (3, {"running": 3})
    assert run.config == {"learning_rate": 0.001}


def test_a_new_start_is_a_new_run_with_a_curve_of_its_own(bench: Bench) -> None:
    for start in ("first", "second"):
        one = Threadlet(bench, "train_0", start=start)
        for step in range(3):
            one.step(step, loss=1.0)
        die(bench, one)
        bench.now += 10

    assert [run.id for run in runs(bench)] == ["second", "first"]
    assert curve(bench, "first") == curve(bench, "second") == [0, 1, 2]
    assert bench.weaver.known.history.between("train_0", "loss")[0][0] == START  # the replica's history has both


def test_without_an_id_ranks_join_the_others_and_a_new_start_is_a_new_run(bench: Bench) -> None:
    first = ranks(bench)
    die(bench, *first)
    ranks(bench)

    assert [run.ranks for run in runs(bench)] == [2, 2]
    assert [run.state for run in runs(bench)] == ["running", "crashed"]


def test_a_restart_of_the_launcher_goes_on_in_the_run(bench: Bench) -> None:
    for hello in ({"start": "abc"}, {}):
        name = f"with{len(hello)}"
        one = Threadlet(bench, name, group=name, **hello)
        one.step(1, loss=1.0)
        die(bench, one)
        assert runs(bench)[0].state == "crashed"
        bench.now += 5

        again = Threadlet(bench, name, group=name, restarted=1, **hello)
        again.step(1, loss=2.0)

        run = runs(bench)[0]
        assert (run.state, run.restarts, run.ended, run.reason) == ("running", 1, None, None)
        assert curve(bench, run.id) == [1, 1]
        assert marks(bench, run.id) == ["started", "crashed", "ended", "restarted"]


def test_a_requeued_job_is_the_run_though_its_launcher_has_another_id(bench: Bench) -> None:
    die(bench, Threadlet(bench, "train_0", start="first"))
    Threadlet(bench, "train_0", start="after", restarted=1)

    (run,) = runs(bench)
    assert (run.id, run.state) == ("first", "running")


def test_a_completed_run_is_not_continued_without_its_id(bench: Bench) -> None:
    first = Threadlet(bench, "train_0")
    first.step(7, loss=1.0)
    first.say("bye", "done", "finished")
    Threadlet(bench, "train_0", restarted=1)

    latest, completed = runs(bench)
    assert [latest.state, completed.state] == ["running", "completed"]
    assert latest.parent == {"run": completed.id, "step": completed.step, "kind": "restart"}


def test_a_start_that_is_none_again_or_names_its_parent_itself_gets_no_other(bench: Bench) -> None:
    Threadlet(bench, "train_0", start="first").say("bye", "done", "finished")
    Threadlet(bench, "train_0", start="new").say("bye", "done", "finished")
    Threadlet(bench, "train_0", start="named", restarted=1, parent="requeue:first:3")

    assert [run.parent for run in runs(bench)] == [{"run": "first", "step": 3, "kind": "requeue"}, None, None]


def test_a_rank_that_is_respawned_alone_or_says_that_something_respawns_it_stays_in_the_run(bench: Bench) -> None:
    _, second = ranks(bench)
    die(bench, second)
    Threadlet(bench, "train_1", rank=1)
    lonely = Threadlet(bench, "solo", group="", respawns=True)
    die(bench, lonely)
    Threadlet(bench, "solo", group="", respawns=True)

    assert sorted((run.name, run.restarts) for run in runs(bench)) == [("solo", 1), ("train", 1)]


def test_a_second_node_with_an_id_of_its_own_joins(bench: Bench) -> None:
    Threadlet(bench, "train_0", start="node0")
    Threadlet(bench, "train_1", start="node1", rank=1)
    die(bench, Threadlet(bench, "train_2", start="node1", rank=2))

    (run,) = runs(bench)
    assert (run.id, run.ranks) == ("node0", 3)


def test_a_new_start_joins_no_ranks_that_are_silent(bench: Bench) -> None:
    for one in ranks(bench, 2, start="first"):
        one.lose()
    bench.now += 3.5
    ranks(bench, 2, start="second")

    assert [(run.id, run.state) for run in runs(bench)] == [("second", "running"), ("first", "lost")]


def test_groups_of_one_start_are_one_run_named_by_the_training(bench: Bench) -> None:
    Threadlet(bench, "train_job", group="train_jobs", start="abc")
    Threadlet(bench, "train_0", group="train", start="abc", rank=0).step(1, loss=1.0)
    Threadlet(bench, "eval_0", group="eval", start="abc").step(1, accuracy=0.5)

    (run,) = runs(bench)
    assert (run.name, run.groups) == ("train", ("train_jobs", "train", "eval"))
    assert {name: one.last for name, one in run.summary.items()} == {"loss": 1.0, "accuracy": 0.5}


def test_a_start_reaches_no_run_of_another_session(bench: Bench) -> None:
    Threadlet(bench, "train_0", start="abc")
    Threadlet(bench, "train_1", start="abc", session="s", key_of="s")

    assert sorted((run.session or "", run.ranks) for run in runs(bench)) == [("", 1), ("s", 1)]


def test_a_process_that_reconnects_stays_in_its_run_and_one_that_was_lost_makes_it_go_on(bench: Bench) -> None:
    one = Threadlet(bench, "train_0")
    one.lose()
    bench.wait(20)
    assert runs(bench)[0].state == "lost"

    Threadlet(bench, "train_0", instance=one.instance).step(3, loss=1.0)

    (run,) = runs(bench)
    assert (run.state, run.step, run.restarts) == ("running", 3, 0)


@pytest.mark.parametrize("start", ["", "a b", "x" * 65, "../..", "é"])
def test_an_id_that_makes_no_sense_is_refused(bench: Bench, start: str) -> None:
    with pytest.raises(ProtocolMismatch, match="start is an id"):
        Threadlet(bench, "train_0", start=start)


@pytest.mark.parametrize("wait", [0, 150])
def test_the_start_of_a_removed_run_begins_another(tmp_path: Path, wait: int) -> None:
    bench = Bench(tmp_path / "store")
    before = Threadlet(bench, "train_0", start="abc")
    before.step(1, loss=1.0, other=1.0)
    before.say("bye", "done", "finished")
    do(bench, operations.RemoveRun("abc"))
    for _ in range(wait):
        bench.now += 1
        bench.commit()

    Threadlet(bench, "train_0", start="abc").step(2, loss=1.0)
    bench.restart()

    (run,) = runs(bench)
    assert (run.id == "abc") is bool(wait)  # as long as the journal may name the former one
    assert curve(bench, run.id) == [2]
    assert details(bench, run.id).metrics == ("loss",)
    assert len(details(bench, run.id).timeline) == 1


# Ends


def test_a_crash_names_the_rank_that_failed_first(bench: Bench) -> None:
    one, two, three = ranks(bench, 3)
    two.step(7, loss=1.0)
    die(bench, two, reason="CUDA error")
    bench.now += 1
    die(bench, one, three, reason="Signal 15")

    (run,) = runs(bench)
    assert (run.state, run.first, run.reason, run.step) == ("crashed", "train_1", "CUDA error", 7)


def test_a_run_that_was_cut_is_not_completed(bench: Bench) -> None:
    one = Threadlet(bench, "train_0")
    one.say("status", [[1, bench.now, 4255, None, 20_000, {}, None]])
    one.say("bye", "it came to its end", "finished")

    (run,) = runs(bench)
    assert (run.state, run.step, run.max_step) == ("ended early", 4255, 20_000)


def test_a_stopped_run_says_by_whom(bench: Bench) -> None:
    one = Threadlet(bench, "train_0")
    bench.weaver.dispatcher.give(CommandKind.STOP, {}, "*", "alice", bench.now)
    bench.commit()
    one.ack(one.last_command())
    one.say("bye", "it was told to stop", "stopped")

    (run,) = runs(bench)
    assert (run.state, run.by) == ("stopped", "alice")


def test_ranks_that_completed_without_a_dead_one_make_the_run_completed(bench: Bench) -> None:
    one, two = ranks(bench)
    one.step(1, loss=1.0)
    die(bench, one)
    two.step(9, loss=1.0)
    two.say("bye", "done", "finished")

    assert runs(bench)[0].state == "completed"


def test_a_crash_after_the_last_step_is_one(bench: Bench) -> None:
    one, two = ranks(bench)
    for each in (one, two):
        each.step(9, loss=1.0)
    two.say("bye", "done", "finished")
    die(bench, one)

    assert (runs(bench)[0].state, runs(bench)[0].first) == ("crashed", "train_0")


@pytest.mark.parametrize(("what", "lost", "state"), [("stopped", False, "cancelled"), (None, True, "lost")])
def test_a_session_that_ends_or_loses_its_processes_gives_the_cause(
    bench: Bench, what: str | None, lost: bool, state: str
) -> None:
    Threadlet(bench, "train_0", session="s", procs="p", rank=0, key_of="s")
    bench.weaver.supervision(ReportEnded("s", "p", what=what, lost=lost), bench.now)
    bench.commit()

    assert runs(bench)[0].state == state


def test_a_session_that_explains_an_end_later_changes_the_cause(bench: Bench) -> None:
    one = Threadlet(bench, "train_0", session="s", procs="p", rank=0, key_of="s")
    one.say("bye", "its process ended within its training", "early")
    assert runs(bench)[0].state == "ended early"

    exit = {"signal": "SIGKILL", "code": None, "out_of_memory": True, "last_lines": []}
    bench.weaver.supervision(ReportEnded("s", "p", reason="killed", exit=exit), bench.now)
    bench.commit()

    assert (runs(bench)[0].state, runs(bench)[0].first) == ("crashed", "train_0")
    assert marks(bench) == ["started", "ended", "crashed", "ended"]


# What is kept


def test_a_summary_has_the_last_least_and_greatest_values_of_the_lowest_rank(bench: Bench) -> None:
    second = Threadlet(bench, "train_1", rank=1)
    second.step(1, loss=99.0)
    first = Threadlet(bench, "train_0", rank=0)
    for step, loss in enumerate([float("nan"), 3.0, 1.0, float("nan"), 2.0]):
        first.step(step, loss=loss)
        second.step(step, loss=-1.0)

    assert runs(bench)[0].summary["loss"] == (2.0, 1.0, 3.0, 4)


def test_the_first_value_of_a_key_is_the_configuration_and_a_command_is_a_mark(bench: Bench) -> None:
    both = ranks(bench)
    both[0].say("status", [[1, bench.now, 1, None, None, {}, {"momentum": 0.9, "learning_rate": 0.5}]])
    both[0].say("status", [[2, bench.now, 2, None, None, {}, {"momentum": 0.8}]])
    bench.now += 1
    given = bench.weaver.dispatcher.give(CommandKind.UPDATE_CONFIG, {"learning_rate": 0.1}, "*", "alice", bench.now)
    bench.commit()
    for place, one in enumerate(both):
        change = {"old": 0.5, "new": 0.1, "step": 1642 + place}
        one.say("ack", given.id, 1642 + place, {"ok": True, "reason": None, "changes": {"learning_rate": change}})

    found = details(bench)
    mark = found.timeline[-1]
    assert found.config == {"learning_rate": 0.001, "momentum": 0.9}
    assert (mark["kind"], mark["by"], mark["applied"], mark["refused"]) == ("command", "alice", 2, 0)
    assert (mark["step"], mark["last_step"]) == (1642, 1643)
    assert mark["changes"]["learning_rate"]["old"] == 0.5
    assert mark["params"] == {"learning_rate": 0.1}


def test_a_refusal_is_in_the_mark_with_its_reason(bench: Bench) -> None:
    one = Threadlet(bench, "train_0")
    bench.weaver.dispatcher.give(CommandKind.PAUSE, {}, "*", "alice", bench.now)
    bench.commit()
    one.ack(one.last_command(), ok=False, reason="not now")

    mark = details(bench).timeline[-1]
    assert (mark["do"], mark["refused"], mark["reason"]) == ("pause", 1, "not now")


def test_ranks_that_fail_together_are_one_mark(bench: Bench) -> None:
    die(bench, *ranks(bench, 5))

    found = details(bench).timeline
    assert [(mark["kind"], mark.get("count")) for mark in found] == [
        ("started", 5),
        ("crashed", 5),
        ("ended", None),
    ]


def test_a_stall_is_a_mark(bench: Bench) -> None:
    one = Threadlet(bench, "train_0")
    for step in range(10):
        bench.now += 0.1
        one.step(step, loss=1.0)
    bench.wait(5, one)

    assert marks(bench) == ["started", "stalled"]


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    for start in ("first", "second"):
        one, two = ranks(bench, 2, start=start)
        one.say("start", {"command": ["python", "train.py"], "clean": True, "commit": "c" * 40})
        for step in range(5):
            one.step(step, loss=float(step))
            two.step(step, loss=9.0)
        if start == "first":
            die(bench, one, two)
            bench.now += 5
    do(bench, operations.NoteRun("first", "**best**"))
    do(bench, operations.TagRun("first", ["good", "old"], []))
    do(bench, operations.TagRun("first", [], ["old"]))
    before = [details(bench, one) for one in ("first", "second")]

    bench.restart()

    after = [details(bench, one) for one in ("first", "second")]
    assert after[0] == before[0]
    assert (after[0].note, after[0].tags, after[0].first) == ("**best**", ("good",), "train_0")
    assert after[0].clean is True
    assert [one["replica"] for one in after[0].members] == ["train_0", "train_1"]
    assert after[0].members[0]["ending"] == "crashed"
    assert after[1].timeline == before[1].timeline
    assert after[1].summary == before[1].summary
    assert curve(bench, "first") == curve(bench, "second") == [0, 1, 2, 3, 4]
    assert curve(bench, "first", replica="train_1") == [0, 1, 2, 3, 4]


def test_a_replica_of_before_runs_gets_one_when_it_comes_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    one = Threadlet(bench, "train_0")
    replica = bench.weaver.known.replicas["train_0"]
    bench.weaver.known.store.put("replicas", "train_0", {**replica.to_dict(), "run": None, "devices": ["GPU-0"]})
    bench.weaver.known.store.drop("runs", runs(bench)[0].id)
    bench.commit()
    bench.restart()
    assert runs(bench) == []

    Threadlet(bench, "train_0", instance=one.instance).step(1, loss=1.0)

    assert curve(bench, runs(bench)[0].id) == [1]


# Facts of the start


def welcomes(*threadlets: Threadlet) -> list[bool]:
    return [one.told[0][1]["start"] for one in threadlets]


def test_the_first_process_is_asked_for_the_start_and_then_the_lowest_rank(bench: Bench) -> None:
    two, three = Threadlet(bench, "train_2", rank=2), Threadlet(bench, "train_3", rank=3)
    zero = Threadlet(bench, "train_0", rank=0)
    two.say("start", {"command": ["of rank 2"]})
    zero.say("start", {"command": ["of rank 0"], "future": object.__name__})
    three.say("start", {"command": ["of rank 3"]})
    one = Threadlet(bench, "train_1", rank=1)
    again = Threadlet(bench, "train_0", rank=0, instance=zero.instance)

    assert welcomes(two, three, zero, one, again) == [True, False, True, False, False]
    assert details(bench).command == ("of rank 0",)
    assert "future" not in details(bench).start


def test_another_process_is_asked_if_one_has_not_answered(bench: Bench) -> None:
    Threadlet(bench, "train_0", rank=0)
    bench.now += bounds.ASK_EVERY
    assert welcomes(Threadlet(bench, "train_1", rank=1)) == [True]


@pytest.mark.parametrize(
    "facts",
    [
        ["list"],
        {"command": "text"},
        {"command": [1]},
        {"clean": "yes"},
        {"versions": {"torch": 1}},
        {"versions": []},
        {"commit": "x" * 5000},
        {"command": ["x" * 4000] * 20},
    ],
)
def test_garbage_in_the_facts_is_refused(bench: Bench, facts: Any) -> None:
    with pytest.raises(ProtocolMismatch):
        Threadlet(bench, "train_0").say("start", facts)


# Lists, comparisons and edits


def three_runs(bench: Bench) -> None:
    for number, (start, rate) in enumerate([("aaaa1", 0.1), ("aaaa2", 0.2), ("bbbb3", None)]):
        name = "eval" if number == 2 else "train"
        config = {} if rate is None else {"learning_rate": rate}
        one = Threadlet(bench, f"{name}_0", group=name, start=start, config=config)
        for step in range(0, 30, 10):
            one.step(step, **({"loss": (number + 1) * step / 10} if number < 2 else {}))
        if number < 2:
            die(bench, one)
        bench.now += 100


def test_runs_are_filtered_and_sorted(bench: Bench) -> None:
    three_runs(bench)
    do(bench, operations.TagRun("aaaa2", ["best"]))

    def ids(**wanted: Any) -> list[str]:
        return [run.id for run in runs(bench, **wanted)]

    assert ids() == ["bbbb3", "aaaa2", "aaaa1"]
    assert ids(run="tr*") == ids(run="aaaa?") == ids(state="crashed") == ["aaaa2", "aaaa1"]
    assert ids(tag="best") == ["aaaa2"]
    assert ids(since=START + 150) == ["bbbb3"]
    assert ids(until=START) == ["aaaa1"]
    assert ids(sort="summary.loss") == ["aaaa1", "aaaa2", "bbbb3"]
    assert ids(sort="-config.learning_rate", limit=1) == ["aaaa2"]
    assert ids(sort="name") == ["bbbb3", "aaaa1", "aaaa2"]
    with pytest.raises(WrongArguments, match=r"summary.METRIC or config.KEY"):
        ids(sort="loss")


def test_archived_runs_are_listed_alone(bench: Bench) -> None:
    three_runs(bench)
    do(bench, operations.ArchiveRun("aaaa1"))

    assert [run.id for run in runs(bench)] == ["bbbb3", "aaaa2"]
    assert [run.id for run in runs(bench, archived=True)] == ["aaaa1"]
    do(bench, operations.ArchiveRun("aaaa1", back=True))
    assert len(runs(bench)) == 3


def test_a_run_is_found_by_id_name_or_the_beginning_of_its_id(bench: Bench) -> None:
    three_runs(bench)

    assert details(bench, "aaaa1").id == "aaaa1"
    assert details(bench, "train").id == "aaaa2"
    assert details(bench, "bbbb").id == "bbbb3"
    with pytest.raises(NotFound, match="several runs begin with 'aaaa'"):
        details(bench, "aaaa")
    with pytest.raises(NotFound, match="no run 'bb'; there are bbbb3, aaaa2, aaaa1"):
        details(bench, "bb")


def test_two_runs_are_compared(bench: Bench) -> None:
    three_runs(bench)

    found: RunComparison = do(bench, operations.CompareRuns("aaaa1", "aaaa2", step=15))

    assert found.config == {"learning_rate": (0.1, 0.2)}
    assert [one and one.last for one in found.summary["loss"]] == [2.0, 4.0]
    assert found.at_step == {"loss": (1.0, 2.0)}
    with_other: RunComparison = do(bench, operations.CompareRuns("aaaa1", "bbbb3", step=15))
    assert with_other.at_step == {}
    assert with_other.summary["loss"][1] is None
    assert RunComparison.from_body(found.to_body()).runs[0].id == "aaaa1"


def test_a_metric_that_a_run_lacks_is_named_with_those_that_it_has(bench: Bench) -> None:
    three_runs(bench)
    with pytest.raises(WrongArguments, match="no metric 'accuracy'; it has loss"):
        curve(bench, "aaaa1", "accuracy")
    with pytest.raises(WrongArguments, match="no metric 'loss' of 'nobody'; it has none"):
        curve(bench, "aaaa1", "loss", "nobody")


def test_edits_are_bounded(bench: Bench) -> None:
    three_runs(bench)
    for asked, error in [
        (operations.TagRun("aaaa1", [str(number) for number in range(33)]), LimitReached),
        (operations.TagRun("aaaa1", [""]), WrongArguments),
        (operations.TagRun("aaaa1", ["x" * 65]), WrongArguments),
        (operations.NoteRun("aaaa1", "é" * 20_000), LimitReached),
    ]:
        with pytest.raises(error):
            do(bench, asked)
    assert details(bench, "aaaa1").tags == ()


def test_a_list_leaves_out_what_is_large_and_says_so(bench: Bench) -> None:
    config = {f"key_{number}": "x" * 500 for number in range(20)}
    one = Threadlet(bench, "train_0", config={**config, "huge": "y" * 70_000})
    one.say("start", {"command": ["x" * 2000] * 3})

    (run,) = runs(bench)

    assert run.left_out == ("config", "command")
    assert 0 < len(run.config) < 20
    assert len(details(bench).config) == 20
    assert RunRecord.from_body(run.to_body()) == run


def test_a_living_run_is_not_removed_and_a_removed_one_leaves_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    both = ranks(bench, 2, start="abc")
    for one in both:
        one.step(1, loss=1.0)
    with pytest.raises(RunLives, match="'abc' lives"):
        do(bench, operations.RemoveRun("abc"))
    die(bench, *both)

    do(bench, operations.RemoveRun("abc"))

    assert runs(bench) == []
    bench.restart()
    for _ in range(150):
        bench.now += 1
        bench.commit()
    db = bench.weaver.known.store.db
    for table in ("runs", "run_marks", "run_ranks", "runs_of_series", "series", "chunks"):
        assert db.execute(f"SELECT COUNT(*) FROM {table}").fetchone() == (0,), table
    assert runs(bench) == []


# Bounds


def test_the_runs_that_ended_first_are_removed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_ENDED", 3)
    for number in range(6):
        one = Threadlet(bench, "train_0", start=f"run-{number}")
        one.step(1, loss=1.0)
        die(bench, one)
        bench.now += 1
    assert [run.id for run in runs(bench)] == ["run-5", "run-4", "run-3"]

    monkeypatch.setattr(bounds, "MAX_RANKS", 1)
    Threadlet(bench, "train_1", start="run-6")
    bench.commit()
    assert [run.id for run in runs(bench)] == ["run-6"]


def test_an_old_run_is_removed(bench: Bench) -> None:
    die(bench, Threadlet(bench, "train_0"))
    bench.now += bounds.MAX_AGE + 1
    bench.commit()
    assert runs(bench) == []


def test_a_forgotten_replica_stays_in_its_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", keep_ended=1)
    both = ranks(bench, 3, start="abc")
    for one in both:
        one.step(1, loss=1.0)
    die(bench, *both)
    bench.restart()

    found = details(bench, "abc")
    assert (found.ranks, found.state) == (3, "crashed")
    assert [one["replica"] for one in found.members] == ["train_0", "train_1", "train_2"]
    assert curve(bench, "abc", replica="train_0") == curve(bench, "abc", replica="train_2") == [1]


def test_marks_are_bounded_and_the_start_stays(bench: Bench) -> None:
    one = Threadlet(bench, "train_0")
    for _ in range(MAX_MARKS + 10):
        bench.weaver.dispatcher.give(CommandKind.PAUSE, {"note": "x" * 2000}, "*", "alice", bench.now)
        bench.commit()
        one.ack(one.last_command())

    found = details(bench)
    assert len(found.timeline) == MAX_MARKS
    assert found.marks_left_out == 11
    assert found.timeline[0]["kind"] == "started"
    assert len(found.timeline[-1]["params"]["note"]) < 300
    assert bench.weaver.known.store.db.execute("SELECT COUNT(*) FROM run_marks").fetchone() == (MAX_MARKS,)


def test_the_marks_of_many_runs_are_read_from_the_store(bench: Bench) -> None:
    for number in range(KEPT + 5):
        die(bench, Threadlet(bench, "train_0", start=f"run-{number}"))

    assert marks(bench, "run-0") == marks(bench, f"run-{KEPT + 4}") == ["started", "crashed", "ended"]
    Threadlet(bench, "train_0", start="run-0")
    assert marks(bench, "run-0") == ["started", "crashed", "ended", "restarted"]


def test_a_run_with_many_metrics_is_short_in_a_list_and_whole_by_itself(bench: Bench) -> None:
    one = Threadlet(bench, "train_0")
    one.step(1, **{f"metric_{number:0100}": 1.0 for number in range(900)})

    (run,) = runs(bench)

    assert 0 < len(run.summary) < 100
    assert "summary" in run.left_out
    assert len(details(bench).summary) == 900


# Two users, and guests


def guest(bench: Bench, session: str) -> Guest:
    known = bench.weaver.known
    catalog = Catalog("ann", known.runs, known.history, bench.weaver.outbox.hurry)
    return Guest(session, bench.weaver, lambda asked, asker: catalog.handlers[type(asked)](asked, asker, 0.0))


def test_a_guest_sees_the_runs_of_the_session_and_changes_none(bench: Bench) -> None:
    Threadlet(bench, "train_0", start="mine").step(1, loss=1.0)
    Threadlet(bench, "train_1", start="shared", session="s", key_of="s").step(1, loss=1.0)
    asks = guest(bench, "s").answer

    assert [run.id for run in asks("runs", {})] == ["shared"]
    assert asks("run", {"id": "train"}).id == "shared"
    assert len(asks("run_history", {"run": "shared", "metric": "loss"})) == 1
    refused: list[tuple[str, Mapping[str, Any]]] = [
        ("run", {"id": "mine"}),
        ("run_history", {"run": "mine", "metric": "loss"}),
        ("compare_runs", {"run": "shared", "other": "mine"}),
    ]
    for operation, arguments in refused:
        with pytest.raises(NotFound, match="no run 'mine'; there are shared"):
            asks(operation, arguments)
    for operation in ("note_run", "tag_run", "archive_run", "remove_run"):
        with pytest.raises(Denied):
            asks(operation, {"run": "shared"})


def test_the_user_sees_branches_in_other_sessions_and_a_guest_learns_of_none(bench: Bench) -> None:
    Threadlet(bench, "train_0", start="elder", session="s", key_of="s")
    Threadlet(bench, "near_0", group="near", start="near", session="s", key_of="s", parent="branch:elder:5")
    Threadlet(bench, "far_0", group="far", start="far", session="t", key_of="t", parent="branch:elder:9")

    assert [child["run"] for child in details(bench, "elder").children] == ["near", "far"]
    assert details(bench, "far").parent == {"run": "elder", "name": "train", "step": 9, "kind": "branch"}

    of_parent, of_branch = guest(bench, "s").answer, guest(bench, "t").answer
    assert [child["run"] for child in of_parent("run", {"id": "elder"}).children] == ["near"]
    assert of_parent("run", {"id": "near"}).parent["name"] == "train"
    (listed,) = of_branch("runs", {})
    compared = of_branch("compare_runs", {"run": "far", "other": "far"})
    for seen in (listed, of_branch("run", {"id": "far"}), *compared.runs):
        assert seen.parent is None
        assert "elder" not in str(seen.to_body())
    for hidden in ("elder", "near", "no-such"):
        with pytest.raises(NotFound, match=f"no run '{hidden}'; there are far"):
            of_branch("run", {"id": hidden})


def begun(bench: Bench, *places: str, session: str = "s") -> list[tuple[str, str, list[float]]]:
    found = bench.weaver.known.runs.begun_in(session, places)
    return [(one.place, one.run, [time - START for time in one.times]) for one in found]


def test_a_run_keeps_where_and_when_processes_of_it_began(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    own = {"session": "s", "key_of": "s"}
    controller = Threadlet(bench, "train_job", group="train_jobs", start="abc", place="7@s", **own)
    for rank in range(3):
        Threadlet(bench, f"train_{rank}", start="abc", rank=rank, procs=5, **own)
    Threadlet(bench, "other_0", group="other", procs=5, session="t", key_of="t")
    Threadlet(bench, "apart_0", group="apart", place="7@s")  # of no session
    bench.now += 10
    Threadlet(bench, "train_1", start="abc", rank=1, procs=6, **own)

    wanted = [("7@s", "abc", [0.0]), ("5", "abc", [0.0]), ("6", "abc", [10.0])]
    assert begun(bench, "7@s", "5", "6", "8") == wanted
    bench.restart()
    bench.now += 10
    Threadlet(bench, "train_job", group="train_jobs", start="abc", instance=controller.instance, place="7@s", **own)
    assert begun(bench, "7@s", "5", "6") == wanted  # a process that comes back does not begin
    Threadlet(bench, "train_0", start="abc", rank=0, procs=5, **own)
    assert begun(bench, "5") == [("5", "abc", [0.0, 20.0])]


def test_the_places_of_a_run_are_bounded() -> None:
    run = Run("abc", "train", "s", START)
    for number in range(3 * MAX_PLACES):
        run.begin_in("same", START + number)
        run.begin_in("same", START + number + TOGETHER / 2)
        run.begin_in(f"another {number}", START + number)

    assert len(run.places) == len(run.places["same"]) == MAX_PLACES
    assert run.places["same"][:2] == [START, START + 2 * MAX_PLACES + 1]  # the first time stays
    assert [*run.places][-2:] == ["same", f"another {number}"]


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("runs", {"limit": "many"}),
        ("runs", {"run": 5}),
        ("runs", {"run": "x" * 300}),
        ("run", {}),
        ("run", {"id": 3}),
        ("note_run", {"run": "train", "text": 7}),
        ("tag_run", {"run": "train", "add": "text"}),
        ("compare_runs", {"run": "train"}),
        ("run_history", {"run": "train", "metric": None}),
    ],
)
def test_garbage_in_an_operation_is_refused(bench: Bench, operation: str, arguments: Mapping[str, Any]) -> None:
    Threadlet(bench, "train_0")
    with pytest.raises(LoomError):
        do(bench, operations.find_operation(operation).read(arguments))


def test_a_branch_names_its_parent_which_names_its_children(bench: Bench) -> None:
    die(bench, Threadlet(bench, "train_0", start="first"))
    Threadlet(bench, "half_0", group="half", start="second", parent="branch:first:900")
    Threadlet(bench, "half_0", group="half", start="second", parent="branch:first:900")
    Threadlet(bench, "own_0", group="own", start="third", parent="branch:third:1")
    Threadlet(bench, "odd_0", group="odd", start="fourth", parent="cousin:first:1")
    Threadlet(bench, "theirs_0", group="theirs", start="fifth", parent="branch:first:1", session="s")

    parents = {run.id: run.parent for run in runs(bench)}

    branch = {"run": "first", "step": 900, "kind": "branch"}
    assert parents.pop("fifth") == {**branch, "step": 1}
    assert parents == {"first": None, "second": branch, "third": None, "fourth": None}
    child = {"run": "second", "name": "half", "state": "running", "step": 900, "kind": "branch"}
    theirs = {"run": "fifth", "name": "theirs", "state": "running", "step": 1, "kind": "branch"}
    assert details(bench, "first").children == (child, theirs)
    assert details(bench, "second").parent == {**branch, "name": "train"}
    assert details(bench, "odd").parent is None
    bench.commit()
    assert details(bench, "first").children == (child, theirs)


def test_the_values_with_which_a_branch_begins_are_one_mark_of_all_ranks(bench: Bench) -> None:
    wanted = {"learning_rate": "0.5x"}
    both = [
        Threadlet(
            bench,
            f"half_{rank}",
            group="half",
            rank=rank,
            start="second",
            parent="branch:first:900",
            branch_config=wanted,
            cohort=["c", rank, 2],
        )
        for rank in range(2)
    ]
    for one in both:
        assert one.commands() == [("update_config", wanted)]
        one.ack("branch-second", changes={"learning_rate": {"old": 0.1, "new": 0.05}})

    (mark,) = [mark for mark in details(bench, "half").timeline if mark["kind"] == "command"]
    assert (mark["applied"], mark["by"], mark["params"]) == (2, "branch of first", wanted)
    assert mark["changes"] == {"learning_rate": {"old": 0.1, "new": 0.05}}

    again = Threadlet(
        bench, "half_0", group="half", rank=0, start="second", parent="branch:first:900", branch_config=wanted
    )
    assert again.commands() == []  # it was acknowledged; the process applies it by itself


ODD = [
    "<script>alert(1)</script>",
    "a\0b",
    "\u202egpj.exe",
    "\x1b[31m",
    "é" * 200,
    " ",
    "../../etc",
    "%s{0}",
]
"""Names and texts that other programs may choose."""


@pytest.mark.parametrize("odd", ODD, ids=ascii)
def test_odd_names_and_notes_are_kept_as_they_are_also_after_a_restart(tmp_path: Path, odd: str) -> None:
    bench = Bench(tmp_path / "store")
    one = Threadlet(bench, "train_0", group=odd, start="abc", config={odd[:100]: odd})
    one.step(1, **{odd[:100]: 1.0})
    do(bench, operations.NoteRun("abc", odd))
    bench.restart()

    found = details(bench, "abc")
    assert (found.name, found.note, found.config) == (odd, odd, {odd[:100]: odd})
    assert details(bench, odd).id == runs(bench, run="a*c")[0].id == "abc"
    assert curve(bench, "abc", odd[:100]) == [1]


def test_a_name_that_is_too_long_is_refused_and_no_run_begins(bench: Bench) -> None:
    with pytest.raises(ProtocolMismatch, match="group is a text of at most 200 characters"):
        Threadlet(bench, "train_0", group="x" * 10_000)
    with pytest.raises(ProtocolMismatch, match="place is a text of at most 200 characters"):
        Threadlet(bench, "train_0", place="x" * 10_000)
    assert runs(bench) == []


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (
            operations.NoteRun("abc", "x" * (1 << 20)),
            "a note has at most 32 KiB, not 1,048,576 characters: link to more",
        ),
        (
            operations.TagRun("abc", [f"tag {number}" for number in range(10_000)]),
            "would have 10001 tags; 32 are the most",
        ),
        (operations.TagRun("abc", ["\u202ebest"]), "printable characters, not '\\\\u202ebest'"),
        (operations.TagRun("abc", ["a\0b"]), "printable characters, not 'a\\\\x00b'"),
        (operations.TagRun("abc", ["x" * 10_000]), "a tag has 1 to 64 printable characters, not 'xxx"),
    ],
)
def test_an_edit_beyond_bounds_says_so_and_changes_nothing(
    bench: Bench, asked: operations.Operation, why: str
) -> None:
    Threadlet(bench, "train_0", start="abc")
    do(bench, operations.NoteRun("abc", "before"))
    do(bench, operations.TagRun("abc", ["best"]))

    with pytest.raises(LoomError, match=why):
        do(bench, asked)

    found = details(bench, "abc")
    assert (found.note, found.tags) == ("before", ("best",))
