"""The weaver's core: who is told what, also while a replica changes hands, and what is on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from loom.control.commands import CommandKind
from loom.errors import CommandIdTaken, ProtocolMismatch
from loom.weaver.commands import GivenCommand
from loom.weaver.liveness import SUCCESSOR_WITHIN
from loom.weaver.storage.store import Store
from tests.unit.loom.weaver.bench import Bench, Threadlet
from tests.unit.loom.weaver.raw_threadlet import GPU


def test_a_command_leaves_when_it_is_stored(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    threadlet = Threadlet(bench, "train_0")

    bench.weaver.dispatcher.give(CommandKind.PAUSE, {}, "train_0", "test", bench.now)
    before = threadlet.commands()
    bench.commit()

    assert before == []
    assert threadlet.commands() == [("pause", {})]


def test_a_command_waits_for_a_replica_that_is_away(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    threadlet.lose()
    command = bench.weaver.dispatcher.give(CommandKind.PAUSE, {}, "train_0", "test", bench.now)
    bench.commit()

    again = Threadlet(bench, "train_0", instance=threadlet.instance)
    again.ack(again.last_command())
    twice = Threadlet(bench, "train_0", instance=threadlet.instance)

    assert again.commands() == [("pause", {})]
    assert command.acknowledgements["train_0"].ok is True
    assert twice.commands() == []


def test_a_command_with_an_id_is_given_once_also_by_a_weaver_that_was_started_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "weaver.sqlite")
    threadlet = Threadlet(bench, "train_0")

    def give(kind: CommandKind = CommandKind.PAUSE) -> GivenCommand:
        given = bench.weaver.dispatcher.give(kind, {}, "*", "test", bench.now, id="chosen-by-me")
        bench.commit()
        return given

    first, again = give(), give()
    threadlet.ack("chosen-by-me")
    bench.restart()
    later = give()

    assert first is again
    assert threadlet.commands() == [("pause", {})]
    assert later.done
    assert later.event == first.event
    with pytest.raises(CommandIdTaken, match="'chosen-by-me' is a pause"):
        give(CommandKind.STOP)


def test_a_command_to_a_replica_that_has_failed_is_answered(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    threadlet.say("bye", "out of memory", "failed")

    command = bench.weaver.dispatcher.give(CommandKind.PAUSE, {}, "train_0", "test", bench.now)

    assert command.done
    assert command.acknowledgements["train_0"].reason == "replica 'train_0' has failed: out of memory"


def test_a_command_that_a_process_took_to_its_grave_is_answered(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    command = bench.weaver.dispatcher.give(CommandKind.PAUSE, {}, "train_0", "test", bench.now)
    bench.commit()
    threadlet.say("bye", "killed", "failed")
    second = Threadlet(bench, "train_0")

    assert command.acknowledgements["train_0"].reason == "replica 'train_0' has failed: killed"
    assert bench.event("unanswered")["command"] == command.id
    assert second.commands() == []


def test_a_command_to_a_process_that_another_replaced_is_answered(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    threadlet.lose()
    command = bench.weaver.dispatcher.give(CommandKind.PAUSE, {}, "train_0", "test", bench.now)
    bench.commit()

    second = Threadlet(bench, "train_0")

    assert "a new process became 'train_0'" in command.acknowledgements["train_0"].reason
    assert second.commands() == []


def test_what_a_command_changed_is_the_configuration_now(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0", config={"learning_rate": 0.1, "momentum": 0.9})
    command = bench.weaver.dispatcher.give(
        CommandKind.UPDATE_CONFIG, {"learning_rate": 0.2, "x": 1}, "*", "anna", bench.now
    )
    bench.commit()

    changes = {"learning_rate": {"old": 0.1, "new": 0.2}}
    threadlet.ack(command.id, ok=False, reason="no handler for x", changes=changes, refused={"x": "no handler"})

    event = bench.event("refused")
    assert bench.weaver.known.replicas["train_0"].config == {"learning_rate": 0.2, "momentum": 0.9}
    assert (event["by"], event["cause"], event["step"]) == ("anna", command.event, 5)
    assert event["refused"] == {"x": "no handler"}


def test_a_command_to_two_is_done_when_both_have_acknowledged_it(bench: Bench) -> None:
    both = [Threadlet(bench, f"train_{number}") for number in range(2)]
    given = bench.weaver.dispatcher.give(CommandKind.PAUSE, {}, "*", "me", bench.now)
    bench.commit()
    done = []

    for one in both:
        one.ack(given.id)
        done.append(given.done)

    assert done == [False, True]


def test_a_command_that_was_done_long_ago_is_forgotten(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    give = bench.weaver.dispatcher.give
    given = [give(CommandKind.PAUSE, {}, [], "me", bench.now).id for _ in range(1001)]
    bench.commit()

    before = [command.id for command in bench.weaver.known.commands]
    bench.restart()

    assert before == given[1:]
    assert [command.id for command in bench.weaver.known.commands] == given[1:]


def test_a_fault_that_is_gone_is_logged_once_however_often_it_is_said(bench: Bench) -> None:
    removed = {"a-fault": {"pid": 7}}
    first = Threadlet(bench, "train_0", injectable=True, removed=removed)
    first.lose()
    again = Threadlet(bench, "train_0", injectable=True, removed=removed, instance=first.instance)
    again.say("fault", "a-fault", {"pid": 7})

    gone = [event for event in bench.events if event["kind"] == "fault_removed"]
    assert [(event["replica"], event["injection"], event["evidence"]) for event in gone] == [
        ("train_0", "a-fault", {"pid": 7})
    ]


def test_a_second_acknowledgement_is_not_logged(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    command = bench.weaver.dispatcher.give(CommandKind.PAUSE, {}, "*", "test", bench.now)
    bench.commit()

    threadlet.ack(command.id)
    threadlet.ack(command.id)

    assert bench.kinds().count("applied") == 1
    assert bench.weaver.dispatcher.latencies.to_dict()["counts"][0] == 1  # type: ignore[index]


def test_a_drained_replica_stays_draining_until_it_has_finished(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    bench.weaver.dispatcher.give(CommandKind.DRAIN, {}, "train_0", "test", bench.now)
    bench.commit()
    threadlet.ack(threadlet.last_command())
    threadlet.step(3)
    draining = bench.state()

    threadlet.say("bye", "drained", "finished")

    assert (draining, bench.state()) == ("draining", "finished")
    assert len(bench.weaver.known.devices) == 0


@pytest.mark.guarantees("weaver", "A command given while a replica changes hands is its next process's")
def test_a_command_given_while_the_next_process_waits_is_for_that_one(bench: Bench) -> None:
    hung = Threadlet(bench, "train_0")
    before = bench.weaver.dispatcher.give(CommandKind.PAUSE, {}, "train_0", "anna", bench.now)
    bench.now += 0.1
    refused = Threadlet(bench, "train_0", instance="next")
    given = bench.weaver.dispatcher.give(CommandKind.STOP, {}, "train_0", "anna", bench.now)
    hung.lose()
    bench.weaver.died(bench.weaver.known.replicas["train_0"], hung.instance, "killed", bench.now)
    bench.now += 0.1

    successor = Threadlet(bench, "train_0", instance="next")
    successor.ack(given.id)

    assert refused.told[0][:2] == ["refuse", "replica_taken"]
    assert before.done
    assert not before.acknowledgements["train_0"].ok
    assert successor.commands() == [("stop", {})]
    assert given.acknowledgements["train_0"].ok


def test_a_command_for_a_process_that_never_takes_over_is_answered(bench: Bench) -> None:
    hung = Threadlet(bench, "train_0")
    Threadlet(bench, "train_0", instance="next")
    bench.now += 0.1
    given = bench.weaver.dispatcher.give(CommandKind.STOP, {}, "train_0", "anna", bench.now)
    hung.lose()
    bench.weaver.died(bench.weaver.known.replicas["train_0"], hung.instance, "killed", bench.now)
    assert not given.done
    assert not bench.weaver.settled

    bench.wait(SUCCESSOR_WITHIN + 0.5)

    assert given.acknowledgements["train_0"].reason == "replica 'train_0' has failed: killed"


def test_a_fault_does_not_pass_to_the_next_process(bench: Bench) -> None:
    hung = Threadlet(bench, "train_0", injectable=True)
    Threadlet(bench, "train_0", instance="next")
    bench.now += 0.1
    fault = {"fault": "sigstop", "params": {}}
    given = bench.weaver.dispatcher.give(CommandKind.INJECT, fault, "train_0", "anna", bench.now)
    hung.lose()
    bench.weaver.died(bench.weaver.known.replicas["train_0"], hung.instance, "killed", bench.now)

    successor = Threadlet(bench, "train_0", instance="next", injectable=True)

    assert given.done
    assert successor.commands() == []


@pytest.mark.guarantees(
    "weaver",
    "An acknowledged command is on the disk; a page gets each acknowledgement once, also if the weaver is "
    "killed meanwhile",
)
def test_a_commit_with_a_command_or_an_acknowledgement_waits_for_the_disk(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")

    def waits() -> bool:
        return bool(bench.weaver.known.store.db.execute("PRAGMA synchronous").fetchone() == (2,))

    threadlet = Threadlet(bench, "train_0")
    threadlet.step(1, loss=0.5)
    assert not waits()
    given = bench.weaver.dispatcher.give(CommandKind.PAUSE, {}, "*", "anna", bench.now)
    bench.commit()
    assert waits()
    threadlet.step(2, loss=0.4)
    assert not waits()
    threadlet.ack(given.id)
    assert waits()
    bench.weaver.set_policy("train", "stop", "anna", bench.now)
    bench.commit()
    assert waits()


def test_every_commit_of_a_store_that_may_move_to_another_host_waits_for_the_disk(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", each_waits=True)
    store.log(b"\xc0")
    commit = store.begin()

    store.write(commit)

    assert commit.waits_for_disk
    assert store.db.execute("PRAGMA synchronous").fetchone() == (2,)


def pause(bench: Bench, threadlet: Threadlet, step: int) -> None:
    bench.weaver.dispatcher.give(CommandKind.PAUSE, {}, "train_0", "anna", bench.now)
    bench.commit()
    threadlet.say("ack", threadlet.last_command(), step, {"ok": True, "reason": None, "changes": {}, "refused": {}})


def test_a_paused_replica_that_makes_a_later_step_is_shown_as_running(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    threadlet.step(65)
    pause(bench, threadlet, 66)

    threadlet.step(66)  # made before the pause, and reported after it
    threadlet.beat(66)
    assert bench.state() == "paused"
    threadlet.step(67)
    assert bench.state() == "running"

    threadlet.beat(67, "paused")
    assert bench.state() == "paused"
    threadlet.beat(68)
    assert bench.state() == "running"


def test_a_replica_that_is_reactivated_while_it_is_paused_stays_so(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0", devices=[GPU])
    threadlet.step(65)
    pause(bench, threadlet, 65)
    bench.weaver.dispatcher.give(CommandKind.REACTIVATE, {"device": "GPU-0"}, None, "anna", bench.now)
    bench.commit()
    threadlet.ack(threadlet.last_command())

    assert bench.state() == "paused"


def test_news_of_a_configuration_is_told_apart_only_by_threadlets_that_can(tmp_path: Path) -> None:
    kept = Bench(tmp_path / "weaver.db")
    newer, older = Threadlet(kept, "train_0", announced=True), Threadlet(kept, "train_1")

    kept.weaver.dispatcher.give(CommandKind.UPDATE_CONFIG, {"lr": 1}, "*", "anna", kept.now, announced=True)
    kept.commit()
    kept.restart()
    newer_again = Threadlet(kept, "train_0", announced=True, instance=newer.instance)
    older_again = Threadlet(kept, "train_1", instance=older.instance)

    assert newer.told[-1][3:] == newer_again.told[-1][3:] == [{"lr": 1}, True]
    assert older.told[-1][3:] == older_again.told[-1][3:] == [{"lr": 1}]


def test_what_the_program_took_is_in_the_answer_and_in_the_event(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    given = bench.weaver.dispatcher.give(CommandKind.UPDATE_CONFIG, {"lr": 1}, "*", "anna", bench.now)
    bench.commit()

    threadlet.ack(threadlet.last_command(), changes={"lr": {"old": None, "new": 1}}, taken=["lr"])

    assert given.acknowledgements["train_0"].taken == ("lr",)
    assert bench.event("applied")["taken"] == ["lr"]


def test_what_a_status_is_about_is_kept(tmp_path: Path) -> None:
    kept = Bench(tmp_path / "weaver.db")
    threadlet = Threadlet(kept, "train_0")
    replica = kept.weaver.known.replicas["train_0"]
    assert "status_type" not in replica.changing()

    threadlet.say("status", [[1, kept.now, 3, None, None, {}, None, "batch_update"]])
    threadlet.say("status", [[2, kept.now, 4, None, None, {}, None]])

    assert replica.changing()["status_type"] == "batch_update"
    kept.restart()
    assert kept.weaver.known.replicas["train_0"].info("anna", [])["status_type"] == "batch_update"
    with pytest.raises(ProtocolMismatch, match="what a status is about"):
        Threadlet(kept, "train_0").say("status", [[1, kept.now, 3, None, None, {}, None, 5]])
