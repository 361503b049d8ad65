"""The replica groups of torchft take commands at one step of their quorum, or none takes them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateways import await_true
from tests.support.torchft_training import STARTS, ReplicaGroups, replica_groups
from tests.system.cohorts.test_cohorts import applied_at, begin, give, outcome
from tests.unit.loom.weaver.raw_threadlet import RawGateway, WeaverProcess, running_weaver

pytest.importorskip("torchft")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def weaver() -> Iterator[WeaverProcess]:
    with running_weaver() as running:
        yield running


def check_change(groups: ReplicaGroups, step: int | None, rate: float, of: list[int] | None = None) -> None:
    """Check that ranks make the step after a change with the new learning rate, and not one before."""
    assert step is not None
    groups.await_steps(2, of)
    groups.check_equal()
    for rank in range(groups.world) if of is None else of:
        rates = groups.rates(rank)
        assert rates[step + 1] == rate
        assert rates[step - 1] != rate


def test_groups_change_at_one_step_through_pauses_and_deaths(weaver: WeaverProcess, tmp_path: Path) -> None:
    with replica_groups(weaver, tmp_path / "groups") as groups:
        asking = weaver.gateway()
        check_change(groups, applied_at(give(asking, "update_config", learning_rate=0.02)), 0.02)

        assert applied_at(give(asking, "pause")) is not None
        time.sleep(1.5)  # longer than the lighthouse waits for a heartbeat
        paused = applied_at(give(asking, "update_config", learning_rate=0.03))
        assert applied_at(give(asking, "resume")) == paused
        groups.await_steps(2)

        groups.kill(1)
        groups.start_again(1)
        groups.await_cohort(asking)
        groups.await_steps(2)
        assert {line["lr"] for line in groups.lines(1)[-2:]} == {0.03}
        check_change(groups, applied_at(give(asking, "update_config", learning_rate=0.01)), 0.01)

        assert applied_at(give(asking, "stop")) is not None
        assert [process.wait(STARTS) for process in groups.processes] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "way"), [(1, "run"), (1, "register"), (2, "run"), (2, "register")])
def test_changes_at_random_times(weaver: WeaverProcess, tmp_path: Path, ranks: int, way: str) -> None:
    chance, applied = random.Random(f"{ranks} {way}"), 0
    with replica_groups(weaver, tmp_path / "groups", ranks=ranks, way=way) as groups:
        asking = weaver.gateway()
        for number in range(100):
            applied += applied_at(give(asking, "update_config", learning_rate=0.01 + number * 1e-5)) is not None
            time.sleep(chance.choice([0.0, 0.01, 0.05]))
        assert None not in [applied_at(give(asking, kind)) for kind in ("pause", "resume")]
        groups.await_steps(2)
        groups.check_equal()
        applied_at(give(asking, "stop"))
        assert [process.wait(STARTS) for process in groups.processes] == [0] * groups.world
    assert applied == 100


def kill_a_group(weaver: WeaverProcess, groups: ReplicaGroups, chance: random.Random, rate: float) -> None:
    """Kill a group in the middle of a change: the others make it at one step, or not; then it heals."""
    asking = weaver.gateway()
    groups.await_cohort(asking)
    id = begin(asking, learning_rate=rate)
    time.sleep(chance.choice([0.0, 0.002, 0.005, 0.01, 0.02, 0.05]))
    dead = chance.randrange(groups.groups)
    groups.kill(dead)
    others = [one for one in range(groups.world) if one // groups.ranks != dead]
    answers = outcome(asking, id)
    assert len(answers) == groups.world
    applied_at({name: one for name, one in answers.items() if int(name.rpartition("_")[2]) in others})
    groups.await_steps(3, others)
    groups.check_equal()

    groups.start_again(dead)
    groups.await_cohort(asking)
    groups.await_steps(2)
    groups.check_equal()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_group_killed_in_the_middle_of_a_change(weaver: WeaverProcess, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    count, ranks = chance.choice([(2, 1), (3, 1), (3, 1), (2, 2)])
    with replica_groups(weaver, tmp_path / "groups", count, ranks) as groups:
        for number in range(3):
            kill_a_group(weaver, groups, chance, 0.02 + number * 0.001)


def connected(asking: RawGateway) -> int:
    return sum(one["connected"] for one in asking.ask("replicas"))


def has_died(asking: RawGateway, replica: str) -> bool:
    return any(one["id"] == replica and one["state"] == "failed" for one in asking.ask("replicas"))


def all_paused(asking: RawGateway) -> bool:
    return {one["state"] for one in asking.ask("replicas") if one["connected"]} == {"paused"}


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["gone", "started again"])
def test_a_group_that_dies_in_a_pause_ends_nothing(weaver: WeaverProcess, tmp_path: Path, again: bool) -> None:
    with replica_groups(weaver, tmp_path / "groups", 3) as groups:
        asking = weaver.gateway()
        assert applied_at(give(asking, "pause")) is not None
        groups.kill(0)  # its store is that of the cohort
        await_true(lambda: has_died(asking, "train_0"))  # until then nothing goes on without it
        if again:
            groups.start_again(0)
            await_true(lambda: connected(asking) == 3, STARTS)
        else:
            await_true(lambda: all_paused(asking))
        refused = give(asking, "update_config", learning_rate=0.02)
        resumed = give(asking, "resume")
        groups.await_steps(3, [0, 1, 2] if again else [1, 2])
        groups.check_equal()

    assert not any(one["ok"] for one in refused.values())
    assert all("not connected" in one["reason"] or "failed" in one["reason"] for one in refused.values())
    assert resumed["train_1"]["ok"]
    assert resumed["train_2"]["ok"]


@pytest.mark.slow
def test_a_group_that_hangs_is_left_behind_and_follows(weaver: WeaverProcess, tmp_path: Path) -> None:
    with replica_groups(weaver, tmp_path / "groups", 3, bound=1.0) as groups:
        asking = weaver.gateway()
        assert applied_at(give(asking, "update_config", learning_rate=0.02)) is not None
        groups.signal(2, "SIGSTOP")
        aborted = give(asking, "update_config", learning_rate=0.03)
        groups.await_cohort(asking, world=2)
        groups.await_steps(3, [0, 1])
        groups.signal(2, "SIGCONT")
        groups.await_cohort(asking)
        check_change(groups, applied_at(give(asking, "update_config", learning_rate=0.04)), 0.04)

    assert [aborted[f"train_{rank}"]["ok"] for rank in range(3)] == [True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", ["run", "register"])
def test_a_group_that_heals_makes_no_step_without_the_values_of_others_that_come_late(
    weaver: WeaverProcess, tmp_path: Path, ranks: int, way: str
) -> None:
    with replica_groups(weaver, tmp_path / "groups", ranks=ranks, way=way, bound=0.5) as groups:
        asking = weaver.gateway()
        check_change(groups, applied_at(give(asking, "update_config", learning_rate=0.02)), 0.02)
        groups.kill(1)
        groups.await_steps(2, list(range(ranks)))
        with groups.held_up(0):
            groups.start_again(1)
            healing = range(ranks, 2 * ranks)
            await_true(lambda: all("no rank has come" in groups.errors(rank) for rank in healing), STARTS)
        groups.await_cohort(asking)
        groups.await_steps(2)
        groups.check_equal()
        assert {line["lr"] for rank in healing for line in groups.lines(rank)[-2:]} == {0.02}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_that_are_all_started_again_get_their_values_once(
    weaver: WeaverProcess, tmp_path: Path, ranks: int
) -> None:
    with replica_groups(weaver, tmp_path / "groups", ranks=ranks) as groups:
        asking = weaver.gateway()
        assert applied_at(give(asking, "update_config", learning_rate_factor=2.0)) is not None
        for restarts in (1, 2):
            for group in range(groups.groups):
                groups.kill(group)
            before = [len(groups.lines(rank)) for rank in range(groups.world)]
            for group in range(groups.groups):
                groups.start_again(group, restarts)
            groups.await_cohort(asking)
            await_true(lambda: overrides(asking) == {2.0}, STARTS)
            groups.await_steps(2)
            groups.check_equal_from(before)
            rates = {round(line["lr"] / 0.01) for rank in range(groups.world) for line in groups.lines(rank)[-1:]}
            assert rates == {2}


def overrides(asking: RawGateway) -> set[object]:
    return {one["config"].get("learning_rate_factor") for one in asking.ask("replicas")}


@pytest.mark.slow
def test_a_change_that_meets_another_quorum_is_made_by_its_ranks(weaver: WeaverProcess, tmp_path: Path) -> None:
    chance, applied = random.Random(7), 0
    with replica_groups(weaver, tmp_path / "groups", 3) as groups:
        asking = weaver.gateway()
        for number in range(6):
            groups.await_cohort(asking)
            dead = chance.randrange(3)
            id = begin(asking, learning_rate=0.02 + number * 0.001)
            time.sleep(chance.choice([0.0, 0.002, 0.005, 0.01]))
            groups.kill(dead)
            answers = outcome(asking, id)
            others = [rank for rank in range(3) if rank != dead]
            applied += (
                applied_at({name: answers[name] for name in (f"train_{rank}" for rank in others)}) is not None
            )
            groups.await_steps(2, others)
            groups.start_again(dead)
        groups.await_cohort(asking)
        groups.await_steps(2)
        groups.check_equal()
    assert applied == 6


@pytest.mark.slow
def test_a_weaver_killed_in_the_middle_of_changes(weaver: WeaverProcess, tmp_path: Path) -> None:
    chance, applied = random.Random(5), 0
    with replica_groups(weaver, tmp_path / "groups") as groups:
        for number in range(10):
            asking = weaver.gateway()
            groups.await_cohort(asking)
            id = begin(asking, learning_rate=0.01 + number * 1e-4)
            time.sleep(chance.choice([0.0, 0.005, 0.02, 0.05]))
            weaver.end()
            weaver.start()
            applied += applied_at(outcome(weaver.gateway(), id)) is not None
        groups.await_steps(2)
        groups.check_equal()
    assert applied > 2
