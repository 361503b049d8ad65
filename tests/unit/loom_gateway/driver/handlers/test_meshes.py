"""Stopping a mesh that Monarch does not stop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loom.errors import WrongState
from loom_gateway.driver.handlers import meshes as module
from loom_gateway.driver.handlers.meshes import MeshOperations
from loom_gateway.driver.monarch.mesh_table import MeshEntry


class NeverStopped:
    """Monarch's future of a stop whose controller waits for an answer that was lost."""

    def as_asyncio(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_PATIENCE", 0.01)


def operations(gone: list[tuple[int, int]]) -> MeshOperations:
    """The operations of a session that notes in ``gone`` which processes it gives up."""
    failures = SimpleNamespace(process_gone=lambda procs, rank: gone.append((procs, rank)))
    return MeshOperations(cast(Any, SimpleNamespace(failures=failures, on_retired=[])), cast(Any, None))


@pytest.mark.guarantees(
    "process link", "A mesh that Monarch does not stop after such a cut is ended, or says what to do"
)
async def test_processes_that_monarch_does_not_stop_are_given_up() -> None:
    gone: list[tuple[int, int]] = []

    await operations(gone)._stopped(MeshEntry("procs", "trainers", None, 7, procs=7, ranks=(0, 1)), NeverStopped())

    assert gone == [(7, 0), (7, 1)]


@pytest.mark.guarantees(
    "process link", "A mesh that Monarch does not stop after such a cut is ended, or says what to do"
)
async def test_actors_that_monarch_does_not_stop_say_what_to_do() -> None:
    gone: list[tuple[int, int]] = []

    with pytest.raises(WrongState, match=r"has not stopped counters .* stop its processes"):
        await operations(gone)._stopped(
            MeshEntry("actors", "counters", None, 8, procs=7, ranks=(0,)), NeverStopped()
        )

    assert gone == []


async def test_a_stop_of_actors_ends_with_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_PATIENCE", 60.0)
    stopping = operations([])
    actors = MeshEntry("actors", "trainers", None, 8, procs=7, ranks=(0, 1))
    stop = asyncio.ensure_future(stopping._stopped(actors, NeverStopped()))
    await asyncio.sleep(0)  # it waits for Monarch

    stopping._end_stops(6)  # other processes
    await asyncio.sleep(0)
    assert not stop.done()
    stopping._end_stops(7)
    await asyncio.wait_for(stop, 30)
