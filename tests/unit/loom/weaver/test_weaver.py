"""The weaver's core, with a clock of the test's own: who lives, who is told what, and what the log says."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from loom.control.commands import CommandKind
from loom.control.introduction import ThreadletHello
from loom.errors import Conflict, ProtocolMismatch, UnknownDevice, UnknownReplica
from loom.weaver.commands import GivenCommand
from loom.weaver.goodput import goodput
from loom.weaver.liveness import SUCCESSOR_WITHIN
from loom.weaver.outbox import Peer
from loom.weaver.registry import Registry
from loom.weaver.storage.store import Store
from loom.weaver.views import WeaverEvent
from loom.weaver.weaver import Weaver
from tests.unit.loom.weaver.raw_threadlet import GPU, hello_of

START = 1_700_000_000.0


class Threadlet(Peer):
    """One end of a link without a socket."""

    def __init__(self, bench: Bench, replica: str, **hello: Any) -> None:
        self.bench = bench
        self.told: list[list[Any]] = []
        self.closed = False
        self.instance = hello.pop("instance", f"instance-{next(bench.numbers)}")
        self.seq = 0
        session = hello.pop("key_of", None)
        frame = ["hello", hello_of("any", replica, self.instance, **hello)]
        bench.weaver.hello(self, ThreadletHello.from_body(frame), bench.now, session)
        bench.commit()

    def say(self, *frame: Any) -> None:
        self.bench.weaver.receive(self, [list(frame)], self.bench.now)
        self.bench.commit()

    def step(self, step: int, **metrics: float) -> None:
        self.seq += 1
        self.say("status", [[self.seq, self.bench.now, step, None, None, metrics, None]])

    def beat(self, step: int | None = None, phase: str = "step") -> None:
        self.say("beat", self.bench.now, step, phase)

    def ack(self, id: str, ok: bool = True, **rest: Any) -> None:
        self.say("ack", id, 5, {"ok": ok, "reason": None, "changes": {}, "refused": {}, **rest})

    def commands(self) -> list[tuple[str, dict[str, Any]]]:
        """Kinds and parameters of the commands so far."""
        return [(frame[2], frame[3]) for frame in self.told if frame[0] == "command"]

    def last_command(self) -> str:
        return next(frame[1] for frame in reversed(self.told) if frame[0] == "command")

    def lose(self) -> None:
        self.bench.weaver.lost(self, self.bench.now)
        self.bench.commit()


class Bench:
    """A weaver and its clock."""

    def __init__(self, path: Path | str = ":memory:", **options: Any) -> None:
        self.path = path
        self.now = START
        self.numbers = itertools.count()
        self.events: list[dict[str, Any]] = []
        self.stacks: list[tuple[str, str]] = []
        self.options = options
        self.weaver = Weaver(Registry(Store(path), self.now, **options), self.now)

    def commit(self) -> None:
        output = self.weaver.commit(self.now)
        for peer, frame in output.frames:
            assert isinstance(peer, Threadlet)
            if frame is None:
                peer.closed = True
            else:
                peer.told.append(frame.to_body())
        self.events += [event.to_body() for event in output.events]
        self.stacks += [(id, replica.id) for id, replica in output.stacks]

    def wait(self, seconds: float, *beating: Threadlet) -> None:
        """Let time pass, in which some threadlets say that they live."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.25)
            for threadlet in beating:
                threadlet.beat()
            self.weaver.tick(self.now)
            self.commit()

    def state(self, replica: str = "train_0") -> str:
        return self.weaver.known.replicas[replica].state.value

    def event(self, kind: str) -> dict[str, Any]:
        """The last event of a kind."""
        return next(event for event in reversed(self.events) if event["kind"] == kind)

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]

    def restart(self) -> None:
        self.weaver.known._store.close()
        self.weaver = Weaver(Registry(Store(self.path), self.now, **self.options), self.now)


@pytest.fixture
def bench() -> Bench:
    return Bench()


# -- who lives ------------------------------------------------------------------------------------------------


def test_a_replica_that_is_back_within_the_grace_was_never_gone(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    threadlet.lose()
    bench.wait(0.75)
    again = Threadlet(bench, "train_0", instance=threadlet.instance)
    bench.wait(10, again)

    assert "recovering" not in bench.kinds()
    assert bench.event("reconnected")["replica"] == "train_0"
    assert bench.state() == "running"


def test_a_replica_without_a_connection_recovers_or_fails(bench: Bench) -> None:
    bench.now += 100
    threadlet = Threadlet(bench, "train_0")
    lost = bench.now
    threadlet.lose()

    bench.wait(1.25)
    recovering = bench.state()
    bench.wait(2)

    assert recovering == "recovering"
    assert bench.state() == "failed"
    event = bench.event("failed")
    assert event["time"] - lost == 3.0
    assert (event["from"], event["why"], event["devices"]) == ("recovering", "silent", ["GPU-0"])
    assert "not connected for 3.0 s" in event["reason"]


def test_a_replica_that_has_not_begun_is_registering_until_it_steps(bench: Bench) -> None:
    first = Threadlet(bench, "train_0", state="registering")
    first.lose()
    bench.wait(2)
    again = Threadlet(bench, "train_0", instance=first.instance, state="registering")
    before = bench.state()
    again.step(1)

    assert (before, bench.state()) == ("registering", "running")


def test_a_replica_that_was_thought_dead_and_says_hello_runs(bench: Bench) -> None:
    bench.now += 100
    threadlet = Threadlet(bench, "train_0")
    threadlet.lose()
    bench.wait(5)
    before = bench.state()

    Threadlet(bench, "train_0", instance=threadlet.instance)

    assert (before, bench.state()) == ("failed", "running")
    assert bench.weaver.known.replicas["train_0"].died_of is None


def test_a_connection_on_which_nothing_comes_is_given_up(bench: Bench) -> None:
    bench.now += 100
    threadlet = Threadlet(bench, "train_0")

    bench.wait(3.5)
    closed = threadlet.closed
    bench.wait(1)
    recovering = bench.state()
    bench.wait(2)

    assert (closed, recovering, bench.state()) == (True, "recovering", "failed")


def test_a_process_that_is_dead_has_failed_at_once_and_only_once(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0", session="s", procs="trainers", rank=3)
    Threadlet(bench, "train_1", session="s", procs="trainers", rank=4)

    ended = bench.weaver.supervision(
        {
            "session": "s",
            "procs": "trainers",
            "rank": 3,
            "host": "h",
            "what": "dead",
            "reason": "killed by signal 9",
        },
        bench.now,
    )
    threadlet.lose()
    bench.wait(10)

    assert ended == ["train_0"]
    failed = next(event for event in bench.events if event["kind"] == "failed")
    assert failed["cause"] == bench.event("supervision")["id"]
    assert (failed["why"], failed["reason"], failed["time"]) == ("died", "killed by signal 9", START)
    assert [event["replica"] for event in bench.events if event["kind"] == "failed"].count("train_0") == 1


def test_the_death_of_a_process_that_another_has_replaced_changes_nothing(bench: Bench) -> None:
    first = Threadlet(bench, "train_0")
    first.lose()
    Threadlet(bench, "train_0")

    bench.weaver.died(bench.weaver.known.replicas["train_0"], first.instance, "its process is gone", bench.now)

    assert bench.state() == "running"


def test_a_mesh_that_was_stopped_has_finished(bench: Bench) -> None:
    Threadlet(bench, "train_0", session="s", procs="trainers", rank=0)

    bench.weaver.supervision({"session": "s", "procs": "trainers", "rank": None, "what": "stopped"}, bench.now)

    assert bench.state() == "finished"


def test_news_of_processes_without_replicas_are_only_logged(bench: Bench) -> None:
    assert bench.weaver.supervision({"session": "s", "procs": "p", "rank": 0, "what": "dead"}, bench.now) == []
    bench.commit()
    assert bench.event("supervision")["replicas"] == []


@pytest.mark.parametrize(
    ("ending", "state"), [("finished", "finished"), ("stopped", "finished"), ("failed", "failed")]
)
def test_a_goodbye_says_how_it_ended(bench: Bench, ending: str, state: str) -> None:
    threadlet = Threadlet(bench, "train_0")

    threadlet.say("bye", "all steps done", ending)
    threadlet.lose()
    bench.wait(10)

    assert bench.state() == state
    assert bench.event(state)["reason"] == "all steps done"
    assert threadlet.closed


def test_a_new_process_takes_over_from_one_that_is_gone(bench: Bench) -> None:
    first = Threadlet(bench, "train_0")
    first.step(10, loss=1.0)
    first.lose()

    second = Threadlet(bench, "train_0", devices=[{**GPU, "uuid": "GPU-1"}])

    replica = bench.weaver.known.replicas["train_0"]
    assert (replica.instance, replica.step, replica.seq) == (second.instance, None, 0)
    assert bench.weaver.known.devices.devices_of("train_0") == ["GPU-1"]
    assert "GPU-0" not in bench.weaver.known.devices


def test_a_new_process_takes_over_from_one_that_is_silent(bench: Bench) -> None:
    first = Threadlet(bench, "train_0")
    bench.now += 3.0

    second = Threadlet(bench, "train_0")

    assert first.closed
    assert second.told[0][0] == "welcome"


# -- progress -------------------------------------------------------------------------------------------------


def test_a_replica_that_takes_no_step_while_it_beats_is_stalled_until_it_does(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    for step in range(10):
        bench.wait(0.5)
        threadlet.step(step)
    stopped = bench.now

    bench.wait(4.75, threadlet)
    before = bench.state()
    bench.wait(0.75, threadlet)
    stalled = bench.state()
    id, replica = bench.stacks[-1]
    bench.weaver.stacks.take(id, "in all_reduce()")
    bench.commit()
    bench.wait(30, threadlet)
    threadlet.step(10)

    event = next(event for event in bench.events if event["kind"] == "stalled")
    assert (before, stalled, bench.state()) == ("running", "stalled", "running")
    assert event["time"] - stopped == pytest.approx(5.0, abs=0.3)
    assert (event["step"], event["usual_step_time"], event["phase"]) == (9, 0.5, "step")
    assert replica == "train_0"
    assert bench.weaver.known.events.after(event["id"] - 1, 1)[0].data["stack"] == "in all_reduce()"
    assert bench.kinds().count("stalled") == 2  # once more with its stack


def test_short_steps_are_waited_for_two_seconds(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    for step in range(40):
        bench.now += 0.01
        threadlet.step(step)

    bench.wait(1.75, threadlet)
    before = bench.state()
    bench.wait(0.5, threadlet)

    assert (before, bench.state()) == ("running", "stalled")


def test_a_replica_that_is_paused_is_not_stalled(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    for step in range(10):
        bench.wait(0.25)
        threadlet.step(step)
    bench.weaver.dispatcher.give(CommandKind.PAUSE, {}, "train_0", "test", bench.now)
    bench.commit()
    threadlet.ack(threadlet.last_command())
    for _ in range(40):
        bench.wait(0.5)
        threadlet.beat(phase="paused")
    paused = bench.state()

    bench.weaver.dispatcher.give(CommandKind.RESUME, {}, "train_0", "test", bench.now)
    bench.commit()
    threadlet.ack(threadlet.last_command())
    bench.wait(1, threadlet)

    assert (paused, bench.state()) == ("paused", "running")
    assert "stalled" not in bench.kinds()


def test_steps_in_heartbeats_are_progress_too(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    for step in range(60):
        bench.wait(0.5)
        threadlet.beat(step)

    assert bench.state() == "running"


def test_a_replica_that_reports_no_steps_is_never_stalled(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")

    bench.wait(60, threadlet)

    assert bench.state() == "running"


# -- commands -------------------------------------------------------------------------------------------------


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
    with pytest.raises(Conflict, match="'chosen-by-me' is a pause"):
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


# -- devices --------------------------------------------------------------------------------------------------


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


# -- failures of peers ----------------------------------------------------------------------------------------


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


# -- what is kept ---------------------------------------------------------------------------------------------


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
    assert weaver.supervision({"session": "s", "procs": "p", "rank": 1, "what": "dead"}, bench.now) == ["train_0"]


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

    assert list(bench.weaver.known._store.journal()) == []
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
    assert bench.weaver.known.history.metrics("train_0") == []
    assert bench.weaver.known.states["failed"] == 3  # type: ignore[index]


def test_what_a_forgotten_replica_reported_stays_forgotten_after_a_restart(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", keep_ended=0)
    living, ending = Threadlet(bench, "train_0"), Threadlet(bench, "train_1")
    living.step(1, loss=1.0)
    ending.step(1, loss=1.0)
    ending.say("bye", "done", "finished")
    reported = {entry[0] for _, entries in bench.weaver.known._store.journal() for entry in entries}

    bench.restart()

    assert reported == {"train_0", "train_1"}
    assert list(bench.weaver.known.replicas) == ["train_0"]
    assert bench.weaver.known.history.metrics("train_1") == []


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


def test_of_many_replicas_not_every_account_of_time_is_taken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "ACCOUNTS_A_SECOND", 0.5)
    threadlet = Threadlet(bench, "train_0")
    for seconds in (0.5, 1.0):
        bench.now = START + seconds
        threadlet.say("spent", [seconds, 0.0, 0, 1, 0.0, {"compute": seconds}])

    assert bench.weaver.known.goodput.record("train", bench.now).seconds["compute"] == 0.0

    bench.now = START + 2.0
    threadlet.say("spent", [2.0, 0.0, 0, 1, 0.0, {"compute": 2.0}])
    assert bench.weaver.known.goodput.record("train", bench.now).seconds["compute"] == 2.0


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

    assert len(bench.weaver._liveness._checks) == 200
    assert bench.weaver._liveness._checks[0][0] > bench.now + 0.5


# -- a replica that changes hands -----------------------------------------------------------------------------


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


# -- what is on the disk --------------------------------------------------------------------------------------


def test_a_commit_with_a_command_or_an_acknowledgement_waits_for_the_disk(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store")

    def waits() -> bool:
        return bool(bench.weaver.known._store.db.execute("PRAGMA synchronous").fetchone() == (2,))

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
