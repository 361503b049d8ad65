"""Plans from incidents: a weaver's core logs real events by a clock of the test's own, and a plan replays them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loom.chaos.incident_replay import LEFT_OUT, parse_events, plan_text, read_events
from loom.chaos.plans import Plan, PlannedFault, parse_plan
from loom.chaos.targets import Target
from loom.control.commands import CommandKind
from loom.errors import EmptyLog, WrongArguments
from loom.weaver.views import WeaverEvent
from tests.unit.loom.weaver.bench import Bench, Threadlet
from tests.unit.loom.weaver.raw_threadlet import GPU


class Cluster:
    """Replicas of a weaver: ``train_0``, and so on, two on each host."""

    def __init__(self, count: int) -> None:
        self.bench = Bench()
        self.bench.now += 100  # the weaver has not just started
        self.step = 0
        self.processes: dict[str, Threadlet] = {}
        for number in range(count):
            self.start(number)

    def start(self, number: int, **hello: Any) -> Threadlet:
        hello = {"host": f"host-{number // 2}", "rank": number, "injectable": True, "devices": [], **hello}
        process = self.processes[f"train_{number}"] = Threadlet(self.bench, f"train_{number}", **hello)
        return process

    def train(self, seconds: float, *but: str) -> None:
        """Let all processes but some train for so long."""
        until = self.bench.now + seconds
        while self.bench.now < until:
            self.step += 1
            for id, process in self.processes.items():
                if id not in but:
                    process.step(self.step)
            self.bench.wait(0.25)

    def dies(self, id: str, reason: str = "killed by SIGKILL") -> float:
        known = self.bench.weaver.known.replicas[id]
        self.bench.weaver.died(known, known.instance, reason, self.bench.now)
        self.bench.commit()
        del self.processes[id]
        return self.bench.now

    def comes_back(self, number: int, seconds: float) -> None:
        """Start another process of a replica, which trains after so many seconds."""
        self.train(seconds)
        self.start(number, state="registering")
        self.train(0.25)

    def events(self) -> list[WeaverEvent]:
        return [WeaverEvent.from_body(one) for one in self.bench.events]

    def plan(self) -> Plan:
        return parse_plan(plan_text(self.events()))


def times(plan: Plan) -> list[tuple[str, float | None, Target]]:
    return [(one.fault, one.when.time, one.target) for one in plan.faults]


def expected(fault: PlannedFault) -> list[str]:
    return [one.text for one in fault.expect]


def test_a_death_is_replayed_as_a_kill_of_the_same_rank_that_recovers_as_quickly() -> None:
    cluster = Cluster(4)
    first = cluster.dies("train_1")
    cluster.comes_back(1, seconds=6.0)
    second = cluster.dies("train_3")
    cluster.train(5.0)

    plan = cluster.plan()

    assert times(plan) == [
        ("sigkill", 0.0, Target(mesh="train", rank=1)),
        ("sigkill", second - first, Target(mesh="train", rank=3)),
    ]
    assert expected(plan.faults[0]) == ["recovers within 12 s"]
    assert expected(plan.faults[1]) == []
    assert plan.watch == "train"
    assert "train_1 died: killed by SIGKILL; it ran again after 6.0 s" in plan.text
    assert "train_3 died: killed by SIGKILL; it had not recovered when the events end" in plan.text


def test_a_process_that_says_that_it_failed_is_replayed_as_an_exception() -> None:
    cluster = Cluster(1)
    cluster.processes["train_0"].say("bye", "ValueError: a bad\nbatch: #7", "failed")

    (fault,) = cluster.plan().faults

    assert (fault.fault, fault.params) == ("exception", {"text": "ValueError: a bad\nbatch: #7"})


@pytest.mark.parametrize(("again", "kind"), [(True, "partition"), (False, "lost_host")])
def test_a_silent_host_is_replayed_once_as_a_partition_or_as_lost(again: bool, kind: str) -> None:
    cluster = Cluster(4)
    lost = {rank: cluster.processes[f"train_{rank}"] for rank in (2, 3)}
    for process in lost.values():
        process.lose()
    cluster.train(8.0, "train_2", "train_3")
    for rank, process in lost.items():
        same = {"instance": process.instance} if again else {"state": "registering"}
        cluster.start(rank, **same)
    cluster.train(0.25)

    (fault,) = cluster.plan().faults

    assert (fault.fault, fault.target) == (kind, Target(mesh="train", rank=2))
    assert fault.duration == pytest.approx(7.0, abs=0.3)  # it is silent once the grace is over
    assert expected(fault) == ["recovers within 5 s"] if again else ["recovers within 15 s"]


@pytest.mark.parametrize(("again", "kind"), [(True, "sigstop"), (False, "sigkill")])
def test_a_silent_process_on_a_host_that_is_not_silent_is_stopped_or_killed(again: bool, kind: str) -> None:
    cluster = Cluster(2)
    process = cluster.processes["train_1"]
    process.lose()
    cluster.train(8.0, "train_1")
    cluster.start(1, **({"instance": process.instance} if again else {"state": "registering"}))
    cluster.train(0.25)

    (fault,) = cluster.plan().faults

    assert (fault.fault, fault.target) == (kind, Target(mesh="train", rank=1))
    assert fault.duration == (pytest.approx(7.0, abs=0.3) if again else None)


def test_a_stall_is_replayed_as_one_slow_step() -> None:
    cluster = Cluster(2)
    cluster.train(10.0)
    slow = cluster.processes["train_1"]
    for _ in range(24):
        cluster.step += 1
        cluster.processes["train_0"].step(cluster.step)
        cluster.bench.wait(0.25, slow)
    cluster.train(1.0)

    (fault,) = cluster.plan().faults

    assert (fault.fault, fault.target) == ("slow_rank", Target(mesh="train", rank=1))
    assert fault.duration == fault.params["seconds"] == pytest.approx(6.25, abs=0.5)
    assert expected(fault) == ["recovers within 5 s"]


def test_a_process_that_hangs_is_replayed_once_though_its_steps_and_then_its_heartbeats_are_missed() -> None:
    cluster = Cluster(2)
    cluster.train(10.0)
    hung = cluster.processes["train_1"]
    for _ in range(12):
        cluster.step += 1
        cluster.processes["train_0"].step(cluster.step)
        cluster.bench.wait(0.25, hung)
    hung.lose()
    cluster.train(2.0, "train_1")
    cluster.start(1, instance=hung.instance)

    (fault,) = cluster.plan().faults

    assert fault.fault == "sigstop"
    assert fault.duration == pytest.approx(5.0, abs=0.5)


def test_an_injected_fault_is_replayed_itself_and_not_its_consequences() -> None:
    cluster = Cluster(2)
    bench = cluster.bench
    give = bench.weaver.dispatcher.give
    give(CommandKind.INJECT, {"fault": "sigkill", "params": {}}, ["train_0"], "anna", bench.now)
    bench.commit()
    bench.wait(0.5)
    cluster.dies("train_0")
    cluster.comes_back(0, seconds=3.0)
    cluster.train(20.0)
    slow = {"fault": "slow_rank", "params": {"seconds": 0.2}, "duration": 30.0}
    injection = give(CommandKind.INJECT, slow, "train_1", "anna", bench.now)
    bench.commit()
    cluster.processes["train_1"].ack(injection.command.id)
    cluster.train(4.0)
    cluster.processes["train_1"].say("fault", injection.command.id, {})
    bench.commit()

    kill, slowed = cluster.plan().faults

    assert (kill.fault, kill.target, kill.duration) == ("sigkill", Target(mesh="train", rank=0), None)
    assert expected(kill) == ["detected within 2 s", "recovers within 7 s"]
    assert (slowed.fault, slowed.when.time, slowed.params) == ("slow_rank", 23.75, {"seconds": 0.2})
    assert slowed.duration == 4.0


def test_what_no_fault_replays_is_listed_with_its_reason() -> None:
    cluster = Cluster(2)
    bench = cluster.bench
    bench.weaver.dispatcher.give(CommandKind.PAUSE, {}, "train_*", "anna\nfaults: []", bench.now)
    broken = {"fault": "sigkill", "params": {}}
    given = bench.weaver.dispatcher.give(CommandKind.INJECT, broken, ["train_0"], "anna", bench.now)
    bench.commit()
    cluster.processes["train_0"].ack(given.command.id, ok=False, reason="it is not allowed here")
    cluster.start(
        1,
        instance=cluster.processes["train_1"].instance,
        devices=[GPU],
    )
    bench.weaver.dispatcher.fail_device("GPU-0", "Xid 79", "anna", bench.now)
    bench.commit()

    with pytest.raises(EmptyLog, match="tell of nothing that a fault replays"):
        cluster.plan()
    cluster.dies("train_1")
    plan = cluster.plan()

    assert [one.fault for one in plan.faults] == ["sigkill"]
    assert "pause of train_* by anna faults: []: a plan has faults only" in plan.text
    assert "sigkill of ['train_0']: it is not allowed here" in plan.text
    assert "device GPU-0 failed: no fault breaks a device" in plan.text


def test_a_weaver_that_starts_again_is_replayed_and_not_the_silence_of_its_replicas() -> None:
    cluster = Cluster(2)
    bench = cluster.bench
    bench.weaver.known.events.append(bench.now, "weaver_started", None, instance="another", replicas=2)
    bench.commit()
    for rank in range(2):
        cluster.processes[f"train_{rank}"].lose()
    bench.wait(1.5)
    for rank in range(2):
        cluster.start(rank, instance=cluster.processes[f"train_{rank}"].instance)

    assert times(cluster.plan()) == [("dead_weaver", 0.0, Target())]


def test_a_replica_without_a_rank_of_its_own_is_named() -> None:
    cluster = Cluster(0)
    for number, rank in enumerate((None, 1, 1)):
        cluster.start(number, rank=rank)
    cluster.dies("train_0")
    cluster.dies("train_1")

    assert [one.target for one in cluster.plan().faults] == [Target(replica="train_0"), Target(replica="train_1")]


def test_there_are_no_more_comments_than_a_reader_reads() -> None:
    cluster = Cluster(1)
    for number in range(LEFT_OUT + 7):
        cluster.bench.weaver.dispatcher.give(CommandKind.PAUSE, {}, "nobody", f"user {number}", cluster.bench.now)
    cluster.dies("train_0")

    assert "#   and 7 more" in plan_text(cluster.events())


def test_events_are_read_from_lines(tmp_path: Path) -> None:
    cluster = Cluster(1)
    cluster.dies("train_0")
    file = tmp_path / "events.jsonl"
    file.write_text("\n".join(json.dumps(one) for one in cluster.bench.events) + "\n\n")

    assert read_events(file) == cluster.events()


@pytest.mark.parametrize(
    "line", ["{", "[]", "1", '{"id": 1}', '{"id": "1", "time": 0, "kind": "", "replica": null}']
)
def test_a_line_that_is_no_event_is_refused_with_its_number(line: str) -> None:
    with pytest.raises(WrongArguments, match=r"^events:2: .* is no event: write what `loom events --json` prints"):
        parse_events(["\n", line], "events")
