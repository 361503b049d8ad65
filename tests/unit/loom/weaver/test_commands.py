"""Commands: whom they name, who has answered, and what is refused before anybody is told."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loom.control.commands import Acknowledgement, Command, CommandKind
from loom.errors import WrongArguments
from loom.weaver.commands import Commands, GivenCommand, check_command, select
from loom.weaver.replicas import Replica
from loom.weaver.states import ReplicaState
from loom.weaver.storage.store import Store
from tests.unit.loom.weaver.bench import Bench, Threadlet

REPLICAS = ["train_0", "train_1", "eval_0"]


def replicas() -> dict[str, Replica]:
    found = {}
    for id in REPLICAS:
        replica = found[id] = Replica(id)
        replica.group = "eval" if id.startswith("eval") else "trainers"
        replica.state = ReplicaState.RUNNING
    return found


def command(id: str, *names: str) -> GivenCommand:
    return GivenCommand(Command(id, CommandKind.PAUSE, {}), "*", "test", 1.0, list(names))


OK = Acknowledgement(True, 3)
NO = Acknowledgement.failed("no")


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("train_0", ["train_0"]),
        ("*", REPLICAS),
        ("train_*", ["train_0", "train_1"]),
        ("train_[1-9]", ["train_1"]),
        ("trainers", ["train_0", "train_1"]),
        ("ev?l", ["eval_0"]),
        (["eval_0", "train_1", "eval_0"], ["eval_0", "train_1"]),
        ("nobody*", []),
    ],
)
def test_a_target_names_replicas(target: str | list[str], names: list[str]) -> None:
    there, absent = select(target, replicas())

    assert [replica.id for replica in there] == names
    assert absent == {}


def test_a_glob_means_those_that_live() -> None:
    known = replicas()
    known["train_1"].state = ReplicaState.FAILED

    assert [replica.id for replica in select("train_*", known)[0]] == ["train_0"]
    assert [replica.id for replica in select("train_1", known)[0]] == ["train_1"]


@pytest.mark.parametrize("target", ["train_7", ["train_7"]])
def test_a_name_of_nobody_is_answered(target: str | list[str]) -> None:
    there, absent = select(target, replicas())

    assert there == []
    assert absent == {
        "train_7": Acknowledgement.failed('no replica named "train_7"; registered: train_0, train_1, eval_0')
    }


@pytest.mark.parametrize("target", [5, None, {"id": "train_0"}, ["train_0", 1]])
def test_what_is_no_target_is_refused(target: object) -> None:
    with pytest.raises(WrongArguments, match="a target is"):
        select(target, replicas())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("dance", {}, "there is no command 'dance'; choose one of update_config, pause"),
        ("update_config", {}, "at least one key"),
        ("pause", ["x"], "names and values"),
        ("pause", {1: "x"}, "names and values"),
        ("reactivate", {}, "the uuid of a device"),
        ("deactivate_device", {"device": 5}, "the uuid of a device"),
        ("reactivate", {"group": 5}, "or the name of a group, as `group`"),
        ("reactivate", {"device": "GPU-0", "group": "train"}, "the uuid of a device, as `device`, or the name of"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(kind: str, params: object, message: str) -> None:
    with pytest.raises(WrongArguments, match=message):
        check_command(CommandKind.read(kind), params)


def test_a_command_is_done_when_everybody_has_answered() -> None:
    commands = Commands(Store(":memory:"))
    given = command("1", "train_0", "train_1")
    commands.add(given, {})

    commands.acknowledge("1", "train_0", OK)
    before = given.done
    commands.acknowledge("1", "train_1", NO)

    assert not before
    assert given.done
    assert given.acknowledgements == {"train_0": OK, "train_1": NO}


def test_a_second_answer_changes_nothing() -> None:
    commands = Commands(Store(":memory:"))
    given = command("1", "train_0")
    commands.add(given, {})
    commands.acknowledge("1", "train_0", OK)

    assert commands.acknowledge("1", "train_0", NO) is None
    assert commands.acknowledge("2", "train_0", OK) is None
    assert given.acknowledgements == {"train_0": OK}


def test_what_a_replica_has_to_answer_is_in_the_order_of_telling() -> None:
    commands = Commands(Store(":memory:"))
    for id in ("2", "1", "3"):
        commands.add(command(id, "train_0"), {})
    commands.acknowledge("1", "train_0", OK)

    assert [waiting.id for waiting in commands.unacknowledged("train_0")] == ["2", "3"]
    assert commands.unacknowledged("train_1") == []


class Keeping(RuleBasedStateMachine):
    """Only so many done commands are remembered, and never is one that waits forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.commands = Commands(Store(":memory:"), keep=3)
        self.waiting: dict[str, set[str]] = {}
        self.given = 0

    @rule(names=st.sets(st.sampled_from(REPLICAS)))
    def add(self, names: set[str]) -> None:
        self.given += 1
        id = str(self.given)
        self.commands.add(command(id, *sorted(names)), {})
        if names:
            self.waiting[id] = set(names)

    @rule(number=st.integers(0, 20), name=st.sampled_from(REPLICAS))
    def answer(self, number: int, name: str) -> None:
        id = str(number)
        answered = self.commands.acknowledge(id, name, OK)
        assert (answered is not None) == (name in self.waiting.get(id, ()))
        if answered is not None:
            self.waiting[id].discard(name)
            if not self.waiting[id]:
                del self.waiting[id]

    @invariant()
    def those_that_wait_are_kept(self) -> None:
        kept = list(self.commands)
        assert {one.id: set(one.waiting) for one in kept if not one.done} == self.waiting
        assert sum(one.done for one in kept) <= 3
        for name in REPLICAS:
            unanswered = {one.id for one in self.commands.unacknowledged(name)}
            assert unanswered == {id for id, names in self.waiting.items() if name in names}


TestKeeping = Keeping.TestCase


def test_a_replica_of_a_session_is_found_by_its_short_name() -> None:
    replicas = {id: Replica(id) for id in ("train_0@one", "train_1@one", "train_0@two")}

    def found(target: str) -> list[str]:
        there, _ = select(target, replicas)
        return [replica.id for replica in there]

    assert found("train_1") == ["train_1@one"]
    assert found("train_0") == ["train_0@one", "train_0@two"]
    assert found("train_?") == list(replicas)
    assert found("train_0@two") == ["train_0@two"]


def test_equal_acknowledgements_of_a_command_are_one_object(bench: Bench) -> None:
    threadlets = [Threadlet(bench, f"train_{number}", devices=[]) for number in range(3)]
    given = bench.weaver.dispatcher.give(CommandKind.UPDATE_CONFIG, {"lr": 0.1}, "*", "ann", bench.now)
    bench.commit()
    for threadlet in threadlets[:2]:
        threadlet.ack(given.id, changes={"lr": {"old": 1.0, "new": 0.1}})
    threadlets[2].ack(given.id, ok=False, reason="no")

    made = given.acknowledgements
    assert made["train_0"] is made["train_1"]
    assert (made["train_1"].ok, made["train_2"].ok, made["train_2"].reason) == (True, False, "no")
    assert given.done
