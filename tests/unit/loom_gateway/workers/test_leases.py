"""Workers that belong to one user while the user has sessions."""

from __future__ import annotations

import asyncio

import pytest

from loom.errors import WorkerUnreachable
from loom_gateway.workers.sources import WorkerList
from loom_gateway.workers.watcher import Lease, WorkerLeases

WORKERS = WorkerList([f"tcp://10.0.0.{n}:26600" for n in range(5)], {"a": [0, 1, 2], "b": [3, 4]})


async def test_users_have_different_workers_and_a_users_sessions_the_same() -> None:
    leases = WorkerLeases(2)

    first = await leases.acquire("ann", WORKERS, 0.0)
    second = await leases.acquire("bob", WORKERS, 0.0)

    assert await leases.acquire("ann", WORKERS, 0.0) == first
    assert not set(first.hosts) & set(second.hosts)


@pytest.mark.guarantees("drivers", "A user without free workers waits, and is told without naming others")
async def test_a_lease_ends_with_the_last_session_and_who_waits_gets_it() -> None:
    leases = WorkerLeases(3)
    lease = await leases.acquire("ann", WORKERS, 0.0)
    await leases.acquire("ann", WORKERS, 0.0)
    waiting = asyncio.ensure_future(leases.acquire("bob", WORKERS, 60.0))

    leases.release("ann")
    await asyncio.sleep(0)
    assert not waiting.done()
    leases.release("ann")

    assert await waiting == lease


@pytest.mark.parametrize(
    ("size", "said"),
    [(3, "gives each user 3 of its 5 workers .* Try again when other users"), (6, "6 workers .* and has 5")],
)
async def test_too_few_workers_are_a_clear_error(size: int, said: str) -> None:
    leases = WorkerLeases(size)
    if size == 3:
        leases.adopt("ann", (0, 1, 2))

    with pytest.raises(WorkerUnreachable, match=said) as refused:
        await leases.acquire("bob", WORKERS, 0.0)

    assert "ann" not in str(refused.value)


def test_a_lease_numbers_its_hosts_from_0_in_their_meshes() -> None:
    assert Lease((2, 3)).part_of(WORKERS) == WorkerList(
        ["tcp://10.0.0.2:26600", "tcp://10.0.0.3:26600"], {"a": [0], "b": [1]}
    )
    assert Lease((3, 4)).part_of(WORKERS).meshes == {"b": [0, 1]}
