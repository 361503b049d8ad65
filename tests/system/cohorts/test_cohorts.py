"""Ranks that average gradients take commands at one step, or none takes them."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cohort_training import WAYS, Ranks, ranks_of, training
from tests.support.gateways import await_true
from tests.unit.loom.weaver.raw_threadlet import RawGateway, WeaverProcess, running_weaver

WAIT = 30.0
"""Seconds in which every command has its answers."""


@pytest.fixture
def weaver() -> Iterator[WeaverProcess]:
    with running_weaver() as running:
        yield running


def give(asking: RawGateway, kind: str, target: object = "train", **params: Any) -> dict[str, Any]:
    """Give a command and return what became of it, when all have answered."""
    id = asking.ask("command", kind=kind, target=target, params=params)["id"]
    state = asking.ask("command_state", id=id, timeout=WAIT)
    assert state["done"], state
    return dict(state["outcomes"])


def applied_at(answers: dict[str, Any]) -> int | None:
    """Check that all ranks applied a command at one step, and return it, or that none did, and return None."""
    outcomes = {(one["ok"], one["step"] if one["ok"] else None) for one in answers.values()}
    assert len(outcomes) == 1, answers
    ((_, step),) = outcomes
    return step  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_change_at_one_step(weaver: WeaverProcess, tmp_path: Path, way: str) -> None:
    with training(weaver, tmp_path / way, world=2, way=way) as ranks:
        asking = weaver.gateway()
        values = [0.02, 0.05, 0.03]
        steps = [applied_at(give(asking, "update_config", learning_rate=value)) for value in values]
        paused = applied_at(give(asking, "pause"))
        applied_at(give(asking, "update_config", learning_rate=0.04)) if way != "taken" else None
        resumed = applied_at(give(asking, "resume"))
        saved = applied_at(give(asking, "save"))
        ranks.await_steps(2)
        stopped = applied_at(give(asking, "stop"))

        assert None not in (*steps, paused, resumed, saved, stopped)
        for process in ranks.processes:
            process.wait(WAIT)
        changes = [ranks.changes(rank) for rank in range(2)]
        assert changes[0] == changes[1]
        assert changes[0][:3] == list(zip(steps, values, strict=True))
        assert len({ranks.lines(rank)[-1]["step"] for rank in range(2)}) == 1
        assert ranks.check_equal() > 3
        assert [ranks.errors(rank) for rank in range(2)] == ["", ""]


def begin(asking: RawGateway, kind: str = "update_config", **params: Any) -> str:
    return str(asking.ask("command", kind=kind, target="train", params=params)["id"])


def outcome(asking: RawGateway, id: str) -> dict[str, Any]:
    state = asking.ask("command_state", id=id, timeout=WAIT)
    assert state["done"], state
    return dict(state["outcomes"])


def check_changes(ranks: Ranks, of: list[int] | None = None) -> None:
    """Check that some ranks, or all of them, have changed at the same steps."""
    there = of if of is not None else list(range(ranks.world))
    changes = [ranks.changes(rank) for rank in there]
    for rank, found in zip(there[1:], changes[1:], strict=True):
        assert found == changes[0], f"rank {rank} differs from rank {there[0]}"


def change_at_random(weaver: WeaverProcess, ranks: Ranks, count: int, chance: random.Random) -> int:
    """Change values at random times; some are refused by one rank. Return how many changes were applied."""
    asking, applied = weaver.gateway(), 0
    for number in range(count):
        refused = chance.random() < 0.1
        value = 1000.0 + chance.randrange(ranks.world) if refused else 0.001 + number * 1e-5
        step = applied_at(give(asking, "update_config", learning_rate=value))
        assert step is None or not refused
        applied += step is not None
        time.sleep(chance.choice([0.0, 0.01, 0.05]))
        if number % 20 == 0:
            ranks.check_equal()
    ranks.await_steps(1)
    ranks.check_equal()
    check_changes(ranks)
    return applied


@pytest.mark.slow
def test_a_thousand_changes(weaver: WeaverProcess, tmp_path: Path) -> None:
    with training(weaver, tmp_path / "ranks", world=4, bound=5.0) as ranks:
        applied = change_at_random(weaver, ranks, 1000, random.Random(58))

        assert applied > 800


def cut_lines(weaver: WeaverProcess, ranks: Ranks, count: int, chance: random.Random) -> int:
    """Cut one rank's line in the middle of each change; return how many changes were applied."""
    asking, applied = weaver.gateway(), 0
    for number in range(count):
        await_true(lambda: ranks_of(asking) == ranks.world)
        id = begin(asking, learning_rate=0.001 + number * 1e-5)
        time.sleep(chance.choice([0.0, 0.001, 0.005, 0.02, 0.05]))
        ranks.gates[chance.randrange(ranks.world)].cut()
        applied += applied_at(outcome(asking, id)) is not None
        check_changes(ranks)
    ranks.await_steps(1)
    ranks.check_equal()
    return applied


@pytest.mark.slow
def test_lines_cut_in_the_middle_of_changes(weaver: WeaverProcess, tmp_path: Path) -> None:
    with training(weaver, tmp_path / "ranks", world=4) as ranks:
        assert cut_lines(weaver, ranks, 50, random.Random(1)) > 10


def kill_weavers(weaver: WeaverProcess, ranks: Ranks, count: int, chance: random.Random) -> int:
    """Kill the weaver in the middle of each change; return how many changes were applied."""
    applied = 0
    for number in range(count):
        asking = weaver.gateway()
        await_true(lambda asking=asking: ranks_of(asking) == ranks.world)
        id = begin(asking, learning_rate=0.001 + number * 1e-5)
        time.sleep(chance.choice([0.0, 0.001, 0.005, 0.02, 0.05]))
        weaver.end()
        weaver.start()
        applied += applied_at(outcome(weaver.gateway(), id)) is not None
        check_changes(ranks)
    ranks.await_steps(1)
    ranks.check_equal()
    return applied


@pytest.mark.slow
def test_weavers_killed_in_the_middle_of_changes(weaver: WeaverProcess, tmp_path: Path) -> None:
    with training(weaver, tmp_path / "ranks", world=4) as ranks:
        assert kill_weavers(weaver, ranks, 50, random.Random(2)) > 10


def kill_a_rank(weaver: WeaverProcess, ranks: Ranks, chance: random.Random) -> None:
    """Kill a rank in the middle of a change: the others have all made it or none, and end as without Loom."""
    asking = weaver.gateway()
    id = begin(asking, learning_rate=0.002)
    time.sleep(chance.choice([0.0, 0.005, 0.01, 0.02, 0.05]))
    dead = chance.randrange(ranks.world)
    ranks.processes[dead].kill()
    others = [rank for rank in range(ranks.world) if rank != dead]
    for rank in others:
        ranks.processes[rank].wait(WAIT)  # in a collective without the dead one
    answers = outcome(asking, id)

    assert len(answers) == ranks.world
    check_changes(ranks, others)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_a_rank_killed_in_the_middle_of_a_change(weaver: WeaverProcess, tmp_path: Path, seed: int) -> None:
    with training(weaver, tmp_path / "ranks", world=3) as ranks:
        kill_a_rank(weaver, ranks, random.Random(seed))


@pytest.mark.slow
def test_ranks_far_from_the_store_change_with_the_others(weaver: WeaverProcess, tmp_path: Path) -> None:
    with training(weaver, tmp_path / "ranks", world=6, bound=5.0, delay=0.1) as ranks:
        asking = weaver.gateway()
        steps = [
            applied_at(give(asking, "update_config", learning_rate=0.001 + number * 1e-5)) for number in range(5)
        ]
        paused, resumed = (applied_at(give(asking, kind)) for kind in ("pause", "resume"))
        ranks.await_steps(1)
        ranks.check_equal()
        check_changes(ranks)

    assert None not in (*steps, paused, resumed)


@pytest.mark.slow
def test_a_rank_that_is_stopped_for_a_while_holds_nobody_for_longer(weaver: WeaverProcess, tmp_path: Path) -> None:
    with training(weaver, tmp_path / "ranks", world=3, bound=1.0) as ranks:
        asking = weaver.gateway()
        for victim in range(3):
            ranks.processes[victim].send_signal(signal.SIGSTOP)
            begun = time.monotonic()
            id = begin(asking, learning_rate=0.02 + victim * 0.001)
            time.sleep(3)
            ranks.processes[victim].send_signal(signal.SIGCONT)
            step = applied_at(outcome(asking, id))

            # Rank 0 has the store: while it is stopped nothing is decided, and all may be in time when it goes on.
            assert step is None or victim == 0
            assert time.monotonic() - begun < 15
        ranks.await_steps(1)
        assert applied_at(give(asking, "update_config", learning_rate=0.03)) is not None
        ranks.await_steps(1)
        ranks.check_equal()
        check_changes(ranks)


@pytest.mark.slow
def test_a_stop_comes_after_the_command_that_is_under_way(weaver: WeaverProcess, tmp_path: Path) -> None:
    with training(weaver, tmp_path / "ranks", world=2) as ranks:
        asking = weaver.gateway()
        ids = [begin(asking, learning_rate=0.02), begin(asking, "pause"), begin(asking, "stop")]

        steps = [applied_at(outcome(asking, id)) for id in ids]

        assert None not in steps
        assert steps == sorted(steps)  # type: ignore[type-var]
        assert [process.wait(WAIT) for process in ranks.processes] == [0, 0]
        check_changes(ranks)


@pytest.mark.slow
def test_ranks_that_are_started_again_get_their_values(weaver: WeaverProcess, tmp_path: Path) -> None:
    with training(weaver, tmp_path / "before", world=2) as ranks:
        step = applied_at(give(weaver.gateway(), "update_config", learning_rate=0.02))
    with training(weaver, tmp_path / "after", world=2, restarts=1) as ranks:
        await_true(lambda: all(ranks.changes(rank) for rank in range(2)))
        ranks.await_steps(1)
        check_changes(ranks)
        ranks.check_equal()
        values = [value for _, value in ranks.changes(0)]

    assert step is not None
    assert values == [0.02]


def test_some_of_everything(weaver: WeaverProcess, tmp_path: Path) -> None:
    chance = random.Random(3)
    with training(weaver, tmp_path / "ranks", world=2, bound=1.0) as ranks:
        assert change_at_random(weaver, ranks, 15, chance) > 5
        asking = weaver.gateway()
        assert None not in [applied_at(give(asking, kind)) for kind in ("pause", "resume", "save")]
        cut_lines(weaver, ranks, 2, chance)
        kill_weavers(weaver, ranks, 1, chance)
        await_true(lambda: ranks_of(weaver.gateway()) == 2)
        kill_a_rank(weaver, ranks, chance)
