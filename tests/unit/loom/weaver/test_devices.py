"""The weaver's core: devices that fail, are taken out of use, and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loom.control.commands import CommandKind
from loom.errors import UnknownDevice, UnknownReplica
from loom.weaver.views import WeaverEvent
from tests.unit.loom.weaver.bench import START, Bench, Threadlet
from tests.unit.loom.weaver.raw_threadlet import GPU


def test_a_device_failure_shows_the_device_the_replicas_and_what_was_done(bench: Bench) -> None:
    shared = [GPU, {**GPU, "uuid": "GPU-1"}]
    trainer = Threadlet(bench, "train_0", group="trainers", devices=shared)
    evaluator = Threadlet(bench, "eval_0", group="evaluators", devices=[GPU])
    elsewhere = Threadlet(bench, "train_1", group="trainers", devices=[shared[1]])
    bench.weaver.set_policy("trainers", "pause", "anna", bench.now)

    event = bench.weaver.dispatcher.fail_device("GPU-0", "ECC errors", "dcgm", bench.now)
    bench.commit()

    failure = {"device": "GPU-0", "reason": "ECC errors"}
    assert trainer.commands() == [("device_failed", failure), ("pause", failure)]
    assert evaluator.commands() == [("device_failed", failure)]
    assert elsewhere.commands() == []
    logged = bench.event("device_failed")
    assert logged["device"] == GPU
    assert (logged["reason"], logged["by"]) == ("ECC errors", "dcgm")
    assert [(entry["replica"], entry["action"], len(entry["commands"])) for entry in logged["replicas"]] == [
        ("train_0", "pause", 2),
        ("eval_0", "notify", 1),
    ]
    assert {one["cause"] for one in bench.events if one["kind"] == "command"} == {event.id}
    assert bench.weaver.known.devices.state("GPU-0") == "failed"


def test_a_replica_that_is_to_be_put_elsewhere_is_asked_for(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0", group="trainers", session="s", procs="p", rank=2)
    bench.weaver.set_policy("trainers", "respawn", "anna", bench.now)

    failure = bench.weaver.dispatcher.fail_device("GPU-0", "gone", "dcgm", bench.now)
    bench.commit()
    wanted = bench.event("respawn_wanted")
    threadlet.say("bye", "device lost", "failed")

    assert (wanted["replica"], wanted["device"], wanted["cause"]) == ("train_0", "GPU-0", failure.id)
    assert (wanted["session"], wanted["procs"], wanted["rank"]) == ("s", "p", 2)
    assert bench.event("respawn_wanted")["cause"] == bench.event("failed")["id"]


def test_a_failure_of_a_device_that_nobody_has_is_refused(bench: Bench) -> None:
    with pytest.raises(UnknownDevice, match="no device 'GPU-0'; registered: none"):
        bench.weaver.dispatcher.fail_device("GPU-0", "gone", "dcgm", bench.now)


def test_a_failure_that_is_reported_again_changes_nothing(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    first = bench.weaver.dispatcher.fail_device("GPU-0", "gone", "dcgm", bench.now)
    again = bench.weaver.dispatcher.fail_device("GPU-0", "gone", "dcgm", bench.now)
    bench.commit()

    assert again is first
    assert len(threadlet.commands()) == 1


def test_a_report_with_an_id_changes_nothing_again_even_if_the_device_is_back(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")

    def report(id: str) -> WeaverEvent:
        event = bench.weaver.dispatcher.fail_device("GPU-0", "gone", "dcgm", bench.now, id)
        bench.commit()
        return event

    first = report("one")
    bench.weaver.dispatcher.give(CommandKind.REACTIVATE, {"device": "GPU-0"}, "*", "test", bench.now)
    again = report("one")

    assert again == first
    assert bench.weaver.known.devices.state("GPU-0") == "active"
    assert report("two").id > first.id
    assert [kind for kind, _ in threadlet.commands()] == ["device_failed", "reactivate", "device_failed"]


def test_a_new_process_on_a_failed_device_is_told_at_once_and_its_policy_carried_out(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0", group="trainers")
    bench.weaver.set_policy("trainers", "stop", "anna", bench.now)
    first = bench.weaver.dispatcher.fail_device("GPU-0", "gone", "dcgm", bench.now)
    threadlet.lose()

    second = Threadlet(bench, "train_0", group="trainers")

    failure = {"device": "GPU-0", "reason": "gone"}
    assert second.commands() == [("device_failed", failure), ("stop", failure)]
    assert bench.event("command")["cause"] == bench.event("registered")["id"]
    assert bench.weaver.dispatcher.fail_device("GPU-0", "gone", "dcgm", bench.now) is first


def test_a_new_process_on_a_failed_device_is_not_respawned_again(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0", group="trainers")
    bench.weaver.set_policy("trainers", "respawn", "anna", bench.now)
    bench.weaver.dispatcher.fail_device("GPU-0", "gone", "dcgm", bench.now)
    bench.commit()
    threadlet.say("bye", "it moves", "stopped")

    second = Threadlet(bench, "train_0", group="trainers")

    assert second.commands() == [("device_failed", {"device": "GPU-0", "reason": "gone"})]
    assert bench.kinds().count("respawn_wanted") == 1


def test_a_new_process_on_a_device_that_is_out_of_use_is_told_and_one_that_reconnects_is_not(bench: Bench) -> None:
    Threadlet(bench, "train_0")
    bench.weaver.dispatcher.give(CommandKind.DEACTIVATE_DEVICE, {"device": "GPU-0"}, [], "anna", bench.now)

    newcomer = Threadlet(bench, "train_1")
    newcomer.lose()
    again = Threadlet(bench, "train_1", instance=newcomer.instance)

    told = ("deactivate_device", {"device": "GPU-0", "reason": "deactivated by anna"})
    assert newcomer.commands() == [told]
    assert again.commands() == [told]  # the same command, which it has not acknowledged
    assert bench.kinds().count("command") == 2
    assert bench.weaver.known.devices.reason("GPU-0") == "deactivated by anna"


def test_a_replica_reports_the_failure_of_a_device_of_its_own(bench: Bench) -> None:
    mine, other = Threadlet(bench, "train_0"), Threadlet(bench, "train_1", devices=[{**GPU, "uuid": "GPU-1"}])

    mine.say("device_failed", "f1", "GPU-0", "Xid 79")
    mine.say("device_failed", "f1", "GPU-0", "Xid 79")

    assert mine.told.count(["failure_noted", "f1"]) == 2
    failed = bench.event("device_failed")
    assert (failed["device"]["uuid"], failed["reason"], failed["by"]) == ("GPU-0", "Xid 79", "train_0")
    assert [entry["replica"] for entry in failed["replicas"]] == ["train_0"]
    assert bench.kinds().count("device_failed") == 1
    assert mine.commands() == [("device_failed", {"device": "GPU-0", "reason": "Xid 79"})]
    assert other.commands() == []


def test_a_failure_of_a_device_that_the_replica_does_not_use_is_noted_and_changes_nothing(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    Threadlet(bench, "train_1", devices=[{**GPU, "uuid": "GPU-1"}])

    threadlet.say("device_failed", "f1", "GPU-1", "Xid 79")

    assert ["failure_noted", "f1"] in threadlet.told
    assert bench.weaver.known.devices.state("GPU-1") == "active"


def test_a_device_that_is_well_again_can_fail_again(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    bench.weaver.dispatcher.fail_device("GPU-0", "gone", "dcgm", bench.now)
    bench.weaver.dispatcher.give(CommandKind.REACTIVATE, {"device": "GPU-0"}, "*", "anna", bench.now)
    bench.weaver.dispatcher.fail_device("GPU-0", "gone", "dcgm", bench.now)
    bench.commit()

    assert [kind for kind, _ in threadlet.commands()] == ["device_failed", "reactivate", "device_failed"]


def test_a_device_is_deactivated_and_reactivated_by_command(bench: Bench) -> None:
    Threadlet(bench, "train_0")

    bench.weaver.dispatcher.give(CommandKind.DEACTIVATE_DEVICE, {"device": "GPU-0"}, "*", "anna", bench.now)
    inactive = bench.weaver.known.devices.state("GPU-0"), bench.weaver.known.devices.reason("GPU-0")
    bench.weaver.dispatcher.give(CommandKind.REACTIVATE, {"device": "GPU-0"}, "*", "anna", bench.now)

    assert inactive == ("inactive", "deactivated by anna")
    assert bench.weaver.known.devices.state("GPU-0") == "active"


def use(bench: Bench, kind: CommandKind, **params: str) -> None:
    bench.weaver.dispatcher.give(kind, params, [], "anna", bench.now)
    bench.commit()


def test_the_devices_of_a_group_are_deactivated_and_those_on_them_told(bench: Bench) -> None:
    gpus = [{**GPU, "uuid": f"GPU-{number}"} for number in range(3)]
    one = Threadlet(bench, "train_0", group="train", devices=gpus[:1])
    two = Threadlet(bench, "train_1", group="train", devices=gpus[1:2])
    other = Threadlet(bench, "eval_0", group="eval", devices=gpus[1:2])
    elsewhere = Threadlet(bench, "eval_1", group="eval", devices=gpus[2:])

    use(bench, CommandKind.DEACTIVATE_DEVICE, group="train")

    states = {f"GPU-{number}": bench.weaver.known.devices.state(f"GPU-{number}").value for number in range(3)}
    assert states == {"GPU-0": "inactive", "GPU-1": "inactive", "GPU-2": "active"}
    told = ("deactivate_device", {"group": "train", "devices": ["GPU-0", "GPU-1"]})
    assert one.commands() == two.commands() == other.commands() == [told]
    assert elsewhere.commands() == []


def test_a_group_gets_back_what_it_was_on_when_that_failed_or_was_deactivated(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    gpus = [{**GPU, "uuid": f"GPU-{number}"} for number in range(4)]
    first = Threadlet(bench, "train_0", group="train", devices=gpus[:1])
    Threadlet(bench, "eval_0", group="eval", devices=gpus[3:])
    bench.weaver.dispatcher.fail_device("GPU-0", "Xid 79", "train_0", bench.now)
    first.say("bye", "it moves", "stopped")
    moved = Threadlet(bench, "train_0", group="train", devices=gpus[1:2])
    use(bench, CommandKind.DEACTIVATE_DEVICE, group="train")
    use(bench, CommandKind.DEACTIVATE_DEVICE, group="eval")
    moved.say("bye", "it moves", "stopped")
    bench.commit()
    bench.restart()
    Threadlet(bench, "train_0", group="train", devices=gpus[2:3])

    use(bench, CommandKind.REACTIVATE, group="train")

    states = {f"GPU-{number}": bench.weaver.known.devices.state(f"GPU-{number}").value for number in range(4)}
    assert states == {"GPU-0": "active", "GPU-1": "active", "GPU-2": "active", "GPU-3": "inactive"}
    with pytest.raises(UnknownDevice, match="no device of a group 'train' is out of use"):
        use(bench, CommandKind.REACTIVATE, group="train")


def test_a_group_that_is_not_there_has_no_devices_to_deactivate(bench: Bench) -> None:
    Threadlet(bench, "train_0", group="train")

    with pytest.raises(UnknownReplica, match="no replica of a group 'tain' lives on a device; groups: train"):
        use(bench, CommandKind.DEACTIVATE_DEVICE, group="tain")


def test_the_status_of_devices_is_kept_as_it_is_now(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")

    threadlet.say("devices", bench.now, {"GPU-0": {"utilization": 0.5, "memory_used": 7}, "GPU-9": {}})

    status = bench.weaver.known.device_status
    assert set(status) == {"GPU-0"}
    assert {name: value for name, value in status["GPU-0"].items() if value is not None} == {
        "utilization": 0.5,
        "memory_used": 7,
        "time": START,
        "by": "train_0",
    }


def test_the_health_of_a_device_is_there_after_a_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")
    threadlet = Threadlet(bench, "train_0")

    def report(**status: Any) -> None:
        threadlet.say("devices", bench.now, {"GPU-0": status})
        bench.commit()

    report(temperature=60.0)
    bench.now += 5
    report(temperature=90.0)  # is written only once a minute
    bench.restart()
    assert bench.weaver.known.device_status["GPU-0"]["temperature"] == 60.0

    threadlet = Threadlet(bench, "train_0", instance=threadlet.instance)
    report(temperature=91.0, throttled=["thermal"])  # is written at once
    bench.restart()
    kept = bench.weaver.known.device_status["GPU-0"]
    assert (kept["temperature"], kept["throttled"], kept["by"]) == (91.0, ["thermal"], "train_0")


def test_a_process_changes_its_devices_while_it_runs(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    other = {**GPU, "uuid": "GPU-1"}

    threadlet.say("register", [GPU, other])
    threadlet.say("register", [other])
    threadlet.say("register", [{**other, "type": "B200"}])

    changes = [event for event in bench.events if event["kind"] == "devices_changed"]
    assert [(one["added"], one["removed"]) for one in changes] == [(["GPU-1"], []), ([], ["GPU-0"])]
    assert [device.uuid for device in bench.weaver.known.devices] == ["GPU-1"]
    assert bench.weaver.known.devices.device("GPU-1").type == "B200"


def test_a_process_that_drains_by_its_own_choice_is_shown_with_its_reason(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")

    threadlet.say("draining", "the data has ended")
    threadlet.say("draining", "again")

    event = bench.event("draining")
    assert (event["by"], event["reason"], event["from"]) == ("train_0", "the data has ended", "running")
    assert bench.kinds().count("draining") == 1


def test_of_the_devices_out_of_use_that_nobody_uses_only_so_many_are_remembered(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", keep_unused=3)

    def leave_one_failed(session: str, number: int) -> None:
        device = {**GPU, "uuid": f"GPU-{session}-{number}"}
        threadlet = Threadlet(bench, f"train_{number}@{session}", session=session, devices=[device])
        bench.weaver.dispatcher.fail_device(device["uuid"], "fell off the bus", "monitor", bench.now)
        threadlet.say("bye", "done", "finished")

    def known() -> list[str]:
        return sorted(device.uuid for device in bench.weaver.known.devices)

    leave_one_failed("mine", 0)
    for number in range(6):
        leave_one_failed("flooding", number)
    assert known() == ["GPU-flooding-4", "GPU-flooding-5", "GPU-mine-0"]

    bench.restart()
    leave_one_failed("flooding", 6)
    assert known() == ["GPU-flooding-5", "GPU-flooding-6", "GPU-mine-0"]
    assert [bench.weaver.known.devices.state(uuid) for uuid in known()] == ["failed"] * 3

    again = Threadlet(bench, "train_7@mine", session="mine", devices=[{**GPU, "uuid": "GPU-mine-0"}])
    leave_one_failed("flooding", 7)
    leave_one_failed("flooding", 8)
    assert known() == ["GPU-flooding-6", "GPU-flooding-7", "GPU-flooding-8", "GPU-mine-0"]
    assert again.commands() != []
