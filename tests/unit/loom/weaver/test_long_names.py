"""What a user names cannot cost more than a name costs, and what a user makes is bounded in number."""

from __future__ import annotations

import time
from typing import Any

import pytest

from loom.control.commands import CommandKind
from loom.errors import LimitReached, WrongArguments
from loom.weaver import device_failures, persistent_state
from loom.weaver.commands import MAX_IDS, select
from loom.weaver.device_failures import Action, Policy
from loom.weaver.server import guests_and_admins
from tests.unit.loom.weaver.bench import Bench, Threadlet

LONG: list[Any] = ["*a" * 30_000, "x" * 201, "[" + "a-b" * 20_000 + "]*"]
LONG.append([f"train_{n}" for n in range(MAX_IDS + 1)])


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("target", LONG, ids=lambda target: f"{target!r:.20}")
def test_a_target_longer_than_any_name_is_refused(bench: Bench, target: Any) -> None:
    Threadlet(bench, "train_0")
    began = time.process_time()
    with pytest.raises(WrongArguments, match="at most"):
        select(target, bench.weaver.known.replicas)
    assert time.process_time() - began < 1.0  # it took seconds to compile the first


def test_the_longest_target_that_there_may_be_selects(bench: Bench) -> None:
    replica = Threadlet(bench, "train_0")
    found, unknown = select("*_?" + "*" * 197, bench.weaver.known.replicas)
    assert [one.link for one in found] == [replica]
    assert not unknown


def test_policies_are_bounded_in_number_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_failures, "MAX_POLICIES", 3)
    policies = Policy()
    for group in ("a", "b", "c", "a"):
        policies.set(group, Action.PAUSE)

    with pytest.raises(LimitReached, match="3 groups"):
        policies.set("d", Action.PAUSE)
    with pytest.raises(WrongArguments, match="at most 200 characters"):
        policies.set("a" * 201, Action.PAUSE)
    assert policies.set("b", Action.STOP) is Action.STOP


def test_replicas_that_live_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent_state, "MAX_REPLICAS", 2)
    Threadlet(bench, "train_0")
    Threadlet(bench, "train_1")
    with pytest.raises(LimitReached, match="2 replicas"):
        Threadlet(bench, "train_2")
    assert list(bench.weaver.known.replicas) == ["train_0", "train_1"]

    replica = bench.weaver.known.replicas["train_0"]
    bench.weaver.died(replica, replica.instance, "its process is gone", bench.now)
    Threadlet(bench, "train_2")
    assert "train_2" in bench.weaver.known.replicas


def test_descriptions_are_bounded_by_replica_and_by_user(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent_state, "MAX_DESCRIPTION", 1000)
    monkeypatch.setattr(persistent_state, "MAX_DESCRIBED", 2000)
    first = Threadlet(bench, "train_0", config={"notes": "x" * 900})
    known = bench.weaver.known.replicas
    more: dict[str, Any] = {"more": "x" * 900}
    for frame in (
        ["status", [[1, bench.now, 1, None, None, {}, more]]],
        ["handlers", {f"key {n}": "float" for n in range(100)}],
    ):
        with pytest.raises(LimitReached, match="1,000 are the most"):
            first.say(*frame)
    with pytest.raises(LimitReached, match="1,000 are the most"):
        Threadlet(bench, "train_1", config={"notes": "x" * 1001})
    second = Threadlet(bench, "train_1", config={"notes": "x" * 900})
    with pytest.raises(LimitReached, match="2,000 are the most"):
        Threadlet(bench, "train_2", config={"notes": "x" * 300})

    assert {id: list(replica.config) for id, replica in known.items()} == {
        "train_0": ["notes"],
        "train_1": ["notes"],
    }
    Threadlet(bench, "train_1", instance=second.instance, config={})
    Threadlet(bench, "train_2", config={"notes": "x" * 900})


def test_what_a_command_changed_is_acknowledged_though_it_is_too_large_to_be_shown(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistent_state, "MAX_DESCRIPTION", 1000)
    replica = Threadlet(bench, "train_0", config={"notes": "short"}, handlers={"notes": "str"})
    bench.weaver.dispatcher.give(CommandKind.UPDATE_CONFIG, {"notes": "x" * 1001}, "train_0", "test", bench.now)
    bench.commit()

    replica.ack(replica.last_command(), changes={"notes": {"old": "short", "new": "x" * 1001}})

    assert bench.event("applied")["replica"] == "train_0"
    assert bench.weaver.known.replicas["train_0"].config == {"notes": "short"}


@pytest.mark.parametrize("wanted", [*LONG[:3], ["a*"] * 17, [1], 5, {"a": 1}], ids=lambda given: f"{given!r:.20}")
def test_a_guest_of_a_session_names_no_more_than_an_owner(wanted: Any) -> None:
    with pytest.raises(WrongArguments):
        guests_and_admins._meaning([wanted] if isinstance(wanted, str) else wanted)


def test_a_guest_names_replicas_by_id_short_name_group_or_glob(bench: Bench) -> None:
    Threadlet(bench, "train_0")
    replica = bench.weaver.known.replicas["train_0"]
    for wanted in ("train_0", "train_*", "*", replica.group, replica.short_name):
        assert guests_and_admins._meaning(["nothing", wanted])(replica)
    assert not guests_and_admins._meaning(["nothing", "x*"])(replica)
