"""`AsyncBarrier`: which step waits for which policy."""

from __future__ import annotations

import pytest

from loom.rl.run import AsyncBarrier


@pytest.mark.guarantees(
    "rl run",
    "The barrier is `step - ckpt_step > async_level`: 5 - 3 > 2 does not hold, and so nothing is waited for",
)
def test_a_policy_that_is_as_old_as_the_level_is_good_enough() -> None:
    assert not AsyncBarrier(async_level=2, ckpt_step=3).hit(5)  # 5 - 3 > 2 is false


@pytest.mark.guarantees(
    "rl run",
    "The barrier is `step - ckpt_step > async_level`: 5 - 3 > 2 does not hold, and so nothing is waited for",
)
def test_a_policy_that_is_older_than_the_level_is_waited_for() -> None:
    assert AsyncBarrier(async_level=2, ckpt_step=2).hit(5)  # 5 - 2 > 2
    assert AsyncBarrier(async_level=2, ckpt_step=2).target(5) == 3


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_the_staleness_grows_up_to_the_level_and_stays_there(level: int) -> None:
    barrier = AsyncBarrier(level, ckpt_step=0)
    found = []
    for step in range(8):
        if barrier.hit(step):
            barrier.ckpt_step = barrier.target(step)
        found.append(barrier.staleness(step))

    assert found == [min(step, level) for step in range(8)]


def test_without_a_policy_every_step_waits_for_the_first() -> None:
    assert AsyncBarrier(async_level=9).hit(0)
    assert AsyncBarrier(async_level=9).target(0) == 0
