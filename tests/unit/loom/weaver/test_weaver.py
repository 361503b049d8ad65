"""The weaver's core: what replicas hear of each other, and what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loom.control.commands import CommandKind
from loom.control.operations import ReportEnded
from loom.errors import ProtocolMismatch, UnknownReplica
from loom.weaver import reports
from loom.weaver.goodput import goodput
from tests.unit.loom.weaver.bench import START, Bench, Threadlet
from tests.unit.loom.weaver.raw_threadlet import GPU


def told_of(threadlet: Threadlet) -> list[list[list[str]]]:
    """The failures of peers in each frame."""
    return [frame[1] for frame in threadlet.told if frame[0] == "peers"]


def test_the_replicas_of_a_job_hear_of_failures_in_one_frame(bench: Bench) -> None:
    staying, ended = Threadlet(bench, "train_0"), Threadlet(bench, "train_3")
    other = Threadlet(bench, "eval_0", group="evaluators")
    elsewhere = Threadlet(bench, "train_4", session="s")
    ended.say("bye", "done", "finished")
    dying = [Threadlet(bench, name) for name in ("train_1", "train_2")]

    for one in dying:
        replica = one.replica
        assert replica is not None
        bench.weaver.died(replica, one.instance, "killed", bench.now)
    bench.commit()

    assert told_of(staying) == [
        [["train_1", dying[0].instance, "killed"], ["train_2", dying[1].instance, "killed"]]
    ]
    assert [told_of(one) for one in (ended, other, elsewhere, *dying)] == [[]] * 5


def test_a_replica_that_reconnects_hears_of_the_failures_in_its_time(tmp_path: Path) -> None:
    kept = Bench(tmp_path / "weaver.db")
    Threadlet(kept, "train_1").say("bye", "before it began", "failed")
    kept.now += 1
    threadlet = Threadlet(kept, "train_0")
    threadlet.lose()
    kept.now += 0.1
    peer = Threadlet(kept, "train_2")
    peer.say("bye", "x" * 600, "failed")
    Threadlet(kept, "eval_0", group="evaluators").say("bye", "of another job", "failed")
    kept.restart()

    again = Threadlet(kept, "train_0", instance=threadlet.instance)
    successor = Threadlet(kept, "train_1")

    assert told_of(threadlet) == []
    assert told_of(again) == [[["train_2", peer.instance, "x" * 500]]]
    assert told_of(successor) == []


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    threadlet = Threadlet(bench, "train_0", session="s", procs="p", rank=1)
    other = Threadlet(bench, "train_1", devices=[GPU, {**GPU, "uuid": "GPU-1"}])
    threadlet.step(7, loss=0.5)
    other.say("bye", "done", "finished")
    bench.weaver.set_policy("train*", "stop", "anna", bench.now)
    bench.weaver.dispatcher.fail_device("GPU-0", "gone", "dcgm", bench.now)
    bench.commit()
    before = {id: replica.to_dict() for id, replica in bench.weaver.known.replicas.items()}

    bench.restart()

    weaver = bench.weaver
    assert {id: replica.to_dict() for id, replica in weaver.known.replicas.items()} == before
    assert weaver.known.devices.replicas_of("GPU-0") == ["train_0"]
    assert weaver.known.devices.state("GPU-0") == "failed"
    assert weaver.known.policy.action("train_9") == "stop"
    assert [command.kind for command in weaver.known.commands.unacknowledged("train_0")] == [
        "device_failed",
        "stop",
    ]
    assert weaver.supervision(
        ReportEnded.read({"session": "s", "procs": "p", "rank": 1, "what": "dead"}), bench.now
    ) == ["train_0"]


def test_replicas_have_time_to_find_a_weaver_that_was_started_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    threadlet = Threadlet(bench, "train_0")
    Threadlet(bench, "train_1")
    bench.restart()

    bench.wait(9)
    before = bench.state("train_0"), bench.state("train_1")
    again = Threadlet(bench, "train_0", instance=threadlet.instance)
    bench.wait(2, again)

    assert before == ("recovering", "recovering")
    assert (bench.state("train_0"), bench.state("train_1")) == ("running", "failed")


def test_a_commit_without_news_keeps_the_status_in_the_journal_only_so_long(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", save_after=5.0)
    threadlet = Threadlet(bench, "train_0")
    threadlet.step(1, loss=1.0)
    bench.now += 100
    threadlet.beat()
    bench.commit()

    assert list(bench.weaver.known.store.journal()) == []
    bench.restart()
    assert (bench.weaver.known.replicas["train_0"].step, bench.weaver.known.replicas["train_0"].seq) == (1, 1)


def test_only_so_many_replicas_that_ended_are_remembered(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", keep_ended=3)
    for number in range(6):
        threadlet = Threadlet(bench, f"train_{number}", devices=[{**GPU, "uuid": f"GPU-{number}"}])
        threadlet.step(1, loss=1.0)
        threadlet.say("bye", "done", "failed")

    before = list(bench.weaver.known.replicas), [device.uuid for device in bench.weaver.known.devices]
    bench.restart()

    assert before == (["train_3", "train_4", "train_5"], ["GPU-3", "GPU-4", "GPU-5"])
    assert (list(bench.weaver.known.replicas), [device.uuid for device in bench.weaver.known.devices]) == before
    assert bench.weaver.known.history.metrics("train_0") == ["loss"]  # its run has it, and only that
    assert bench.weaver.known.history.metrics("train_0", "") == []
    assert bench.weaver.known.states["failed"] == 3  # type: ignore[index]


def test_what_a_forgotten_replica_reported_stays_in_its_run_after_a_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", keep_ended=0)
    living, ending = Threadlet(bench, "train_0"), Threadlet(bench, "train_1")
    living.step(1, loss=1.0)
    ending.step(1, loss=1.0)
    ending.say("bye", "done", "finished")
    reported = {entry[0] for _, entries in bench.weaver.known.store.journal() for entry in entries}

    bench.restart()

    assert reported == {"train_0", "train_1"}
    assert list(bench.weaver.known.replicas) == ["train_0"]
    (run,) = bench.weaver.known.runs
    assert [step for _, step, _ in bench.weaver.known.history.between("train_1", "loss", run=run.id)] == [1]


def test_a_replica_that_comes_back_in_another_mesh_has_left_the_one_before(bench: Bench) -> None:
    for number in range(2):
        Threadlet(bench, f"train_{number}", session="s", procs="1", rank=number).lose()

    def in_mesh(procs: str) -> list[str]:
        return [replica.id for replica in bench.weaver.known.in_procs("s", procs)]

    Threadlet(bench, "train_0", session="s", procs="2", rank=0)
    assert (in_mesh("1"), in_mesh("2")) == (["train_1"], ["train_0"])

    Threadlet(bench, "train_1", session="s", procs="2", rank=1)
    assert (in_mesh("1"), in_mesh("2")) == ([], ["train_0", "train_1"])


def test_a_replica_is_found_by_its_short_name_while_only_one_has_it(bench: Bench) -> None:
    first = Threadlet(bench, "train_0@s1")
    assert bench.weaver.known.replica("train_0").id == "train_0@s1"

    Threadlet(bench, "train_0@s2")
    with pytest.raises(UnknownReplica):
        bench.weaver.known.replica("train_0")

    first.say("bye", "done", "finished")
    assert bench.weaver.known.replica("train_0").id == "train_0@s2"


def test_a_stack_that_comes_a_second_time_is_told_once(bench: Bench) -> None:
    Threadlet(bench, "train_0")
    told: list[str] = []
    id = bench.weaver.stacks.want(bench.weaver.known.replicas["train_0"], tell=told.append)

    bench.weaver.stacks.take(id, "in train()")
    bench.weaver.stacks.take(id, "its threadlet did not answer")

    assert told == ["in train()"]


def test_a_replica_that_is_away_is_not_told_what_is_stored(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    threadlet.step(1)
    threadlet.lose()
    bench.wait(1.0)

    assert not any(frame[0] == "stored" for frame in threadlet.told)


def test_if_thousands_report_several_reports_are_acknowledged_together(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "FEW_UNACKNOWLEDGED", 0.1)
    old, patient = Threadlet(bench, "train_0"), Threadlet(bench, "train_1", patient=True)
    for seconds, step in ((0.0, 1), (1.0, 2), (1.11, 3), (4.5, 4), (5.01, 5)):
        bench.now = START + seconds
        old.step(step)
        patient.step(step)

    assert [frame for frame in old.told if frame[0] == "stored"] == [["stored", 3]]
    assert [frame for frame in patient.told if frame[0] == "stored"] == [["stored", 4]]


def test_many_reports_of_a_replica_are_acknowledged_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_MANY_UNSTORED", 3)
    threadlet = Threadlet(bench, "train_0", patient=True)
    for step in (1, 2, 3, 4):
        threadlet.step(step)

    assert [frame for frame in threadlet.told if frame[0] == "stored"] == [["stored", 3]]


def test_metrics_may_be_reported_without_a_step(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    threadlet.step(7)
    threadlet.say("status", [[2, bench.now, None, None, None, {"loss": 0.5}, None]])

    replica = bench.weaver.known.replicas["train_0"]
    assert (replica.step, replica.metrics) == (7, {"loss": 0.5})


def test_a_configuration_that_is_what_it_was_is_no_change(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0", config={"learning_rate": 0.001})
    threadlet.say("status", [[1, bench.now, 1, None, None, {}, {"learning_rate": 0.001}]])
    assert "config" not in bench.kinds()

    threadlet.say("status", [[2, bench.now, 2, None, None, {}, {"learning_rate": 0.002}]])
    assert bench.event("config")["changes"] == {"learning_rate": {"old": 0.001, "new": 0.002}}


def test_a_configuration_that_a_command_or_a_report_changed_survives_the_weaver(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "weaver.sqlite")
    threadlet = Threadlet(bench, "train_0", config={"learning_rate": 0.1, "seed": 1})
    threadlet.say("status", [[1, bench.now, 1, None, None, {}, {"learning_rate": 0.2}]])
    given = bench.weaver.dispatcher.give(
        CommandKind.UPDATE_CONFIG, {"learning_rate": 0.3}, "train_0", "ann", bench.now
    )
    threadlet.ack(given.id, changes={"learning_rate": {"old": 0.2, "new": 0.3}})

    bench.restart()

    assert bench.weaver.known.replicas["train_0"].config == {"learning_rate": 0.3, "seed": 1}


def test_a_configuration_in_the_journal_does_not_replace_a_later_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "weaver.sqlite")
    threadlet = Threadlet(bench, "train_0", config={"learning_rate": 0.1})
    threadlet.say("status", [[1, bench.now, 1, None, None, {}, {"learning_rate": 0.2}]])
    Threadlet(bench, "train_0", instance=threadlet.instance, config={"learning_rate": 0.4})
    bench.commit()

    bench.restart()

    assert bench.weaver.known.replicas["train_0"].config == {"learning_rate": 0.4}


def test_of_many_replicas_each_is_told_to_account_for_its_time_less_often(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goodput, "ACCOUNTS_A_SECOND", 0.5)
    patient, old = Threadlet(bench, "train_0", patient=True), Threadlet(bench, "train_1")
    for seconds in (0.5, 1.0):
        bench.now = START + seconds
        for threadlet in (patient, old):
            threadlet.say("spent", [seconds, 0.0, 0, 1, 0.0, {"compute": seconds}])

    assert [frame for frame in patient.told if frame[0] == "account_pause"] == [["account_pause", 4.0]]
    assert not any(frame[0] == "account_pause" for frame in old.told)
    assert bench.weaver.known.goodput.record("train", bench.now).seconds["compute"] == 2.0


def test_an_account_of_time_that_is_none_is_refused_however_soon_it_comes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goodput, "ACCOUNTS_A_SECOND", 0.001)
    threadlet = Threadlet(bench, "train_0", patient=True)
    threadlet.say("spent", [1.0, 0.0, 0, 1, 0.0, {"compute": 1.0}])

    with pytest.raises(ProtocolMismatch, match="a time is from 0"):
        threadlet.say("spent", [1.0, 0.0, 0, 1, 0.0, {"compute": -1.0}])


def test_an_unknown_replica_is_named_with_those_that_are_known(bench: Bench) -> None:
    Threadlet(bench, "train_0")

    with pytest.raises(UnknownReplica) as caught:
        bench.weaver.known.replica("train_7")

    assert str(caught.value) == 'no replica named "train_7"; registered: train_0'


@pytest.mark.parametrize(
    "frame",
    [
        ["nonsense"],
        ["beat", 1.0],
        ["beat", 1.0, None, "dancing"],
        ["beat", "now", 1, "step"],
        ["ack", "id", 1, {}],
        ["ack", "id", 1, {"ok": True, "changes": {"x": 1}}],
        ["devices", 1.0, {"GPU-0": {"utilization": "much"}}],
        ["handlers", {"x": 1}],
        ["bye", "reason", "sadly"],
        ["stack", 1],
        ["status"],
        ["status", [[1, START, 1, None, None, {}]]],
        ["status", [[1, START, -1, None, None, {}, None]]],
        ["status", [[1, START, 1, None, None, [], None]]],
        ["status", [["1", START, 1, None, None, {}, None]]],
        ["status", [[1, START, 1, None, None, {}, [1]]]],
        ["status", 5],
    ],
)
def test_frames_that_make_no_sense_are_refused(bench: Bench, frame: list[Any]) -> None:
    threadlet = Threadlet(bench, "train_0")

    with pytest.raises(ProtocolMismatch):
        threadlet.say(*frame)


@pytest.mark.parametrize("bad", [[3, START, "x", None, None, {}, None], ["3", 1, 1], [3], 3, None, []])
def test_reports_before_one_that_is_refused_are_taken_once(tmp_path: Path, bad: Any) -> None:
    bench = Bench(tmp_path / "store")
    threadlet = Threadlet(bench, "train_0")
    good = [[number, START + number, number, None, None, {"loss": 1.0}, None] for number in (1, 2)]

    with pytest.raises(ProtocolMismatch):
        threadlet.say("status", [*good, bad])
    again = Threadlet(bench, "train_0", instance=threadlet.instance)
    again.say("status", good)
    bench.restart()

    assert bench.weaver.known.replicas["train_0"].seq == 2
    assert [step for _, step, _ in bench.weaver.known.history.between("train_0", "loss")] == [1, 2]


def test_a_collective_that_hangs_has_the_stacks_of_a_few(bench: Bench) -> None:
    threadlets = [Threadlet(bench, f"train_{number}", devices=[]) for number in range(40)]
    for step in range(6):
        bench.now += 0.1
        for threadlet in threadlets:
            threadlet.step(step)

    bench.wait(4, *threadlets)

    assert bench.kinds().count("stalled") == 40
    assert len(bench.stacks) == 16


def test_an_empty_status_is_harmless(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")

    threadlet.say("status", [])

    assert bench.state() == "running"


def test_looking_after_replicas_costs_the_same_for_few_and_many(bench: Bench) -> None:
    """Every replica is looked at when something of its own is due, not whenever time passes."""
    for number in range(200):
        Threadlet(bench, f"train_{number}", devices=[])
    bench.weaver.tick(bench.now + 0.5)

    checks = [at for tenth in bench.weaver._liveness._checks.values() for at, _ in tenth]
    assert len(checks) == 200
    assert min(checks) > bench.now + 0.5


def test_a_replica_is_found_by_its_short_name_while_it_lives_and_after_its_end(bench: Bench) -> None:
    before = Threadlet(bench, "train_0@first", session="first")
    assert bench.weaver.known.replica("train_0").id == "train_0@first"
    before.say("bye", "done", "finished")
    assert bench.weaver.known.replica("train_0").id == "train_0@first"

    bench.now += 1
    after = Threadlet(bench, "train_0@second", session="second")
    assert bench.weaver.known.replica("train_0").id == "train_0@second"
    other = Threadlet(bench, "train_0@third", session="third")
    with pytest.raises(UnknownReplica):
        bench.weaver.known.replica("train_0")

    after.say("bye", "done", "finished")
    assert bench.weaver.known.replica("train_0").id == "train_0@third"
    bench.now += 1
    other.say("bye", "killed", "failed")
    assert bench.weaver.known.replica("train_0").id == "train_0@third"
