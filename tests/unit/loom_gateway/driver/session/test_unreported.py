"""Which failures are published besides Monarch's reports."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from monarch._src.actor.shape import NDSlice

from loom_gateway.driver.monarch.errors import failed_element
from loom_gateway.driver.monarch.mesh_table import HostTable, MeshEntry, MeshTable
from loom_gateway.driver.session import failures as unreported
from loom_gateway.driver.session.failures import UnreportedFailures


class Mesh:
    """The shape and the name of a mesh of two processes on each of two hosts; stands for Monarch's."""

    _labels = ("hosts", "gpus")
    _ndslice = NDSlice.new_row_major([2, 2])

    def __init__(self, name: str) -> None:
        self._inner = SimpleNamespace(name=lambda: SimpleNamespace(as_asyncio=lambda: _later(name)))


async def _later(name: str) -> str:
    return name


class Session:
    """A session with processes ``trainers`` (id 1) and actors ``counters`` (id 2) on them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, actors: bool = True) -> None:
        self.meshes = MeshTable()
        self.hosts = HostTable(["tcp://a:1", "tcp://b:1"])
        ranks = (0, 1, 2, 3)
        self.meshes.add(
            1, MeshEntry("procs", "trainers", Mesh("trainers"), 1, procs=1, ranks=ranks, hosts=(0, 0, 1, 1))
        )
        if actors:
            self.meshes.add(
                2, MeshEntry("actors", "counters", Mesh("counters-4xYz"), 2, procs=1, ranks=ranks, cls=Mesh)
            )
        self.published: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.failures = UnreportedFailures(loop, self.meshes, self.hosts, self.published.put_nowait)

    def monarch_reports(self, mesh: str, point: str) -> bool:
        report = f"The actor <root>.<a.B {mesh.partition('-')[0]}{point}> and all its descendants have failed:\n  x"
        place = failed_element(mesh, report)
        assert place is not None
        element = self.meshes.element(place.mesh, place.point)
        return self.failures.reported(mesh, place, element)

    async def next(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.published.get(), 30)


@pytest.fixture(autouse=True)
def no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreported, "MONARCHS_TURN", 0.0)


def test_what_monarch_reports_is_not_published_again() -> None:
    async def lose_two() -> None:
        session = Session(asyncio.get_running_loop())
        assert not session.monarch_reports("counters-4xYz", "{'hosts': 0/2, 'gpus': 1/2}")
        session.failures.lost(1, 1)
        session.failures.lost(1, 2)

        found = await session.next()

        assert (found["id"], found["ranks"], found["mesh"]) == (2, [2], "counters-4xYz")
        assert found["report"].startswith("The actor <root>.<")
        assert "counters{'hosts': 1/2, 'gpus': 0/2}> and all its descendants have failed:" in found["report"]
        assert session.published.empty()

    asyncio.run(lose_two())


def test_a_late_report_of_monarchs_is_known_to_be_late() -> None:
    async def lose() -> None:
        session = Session(asyncio.get_running_loop())
        session.failures.lost(1, 3)
        assert (await session.next())["ranks"] == [3]

        assert session.monarch_reports("counters-4xYz", "{'hosts': 1/2, 'gpus': 1/2}")
        assert not session.monarch_reports("counters-4xYz", "{'hosts': 0/2, 'gpus': 1/2}")
        session.failures.retire(2)
        assert not session.monarch_reports("counters-4xYz", "{'hosts': 1/2, 'gpus': 1/2}")

    asyncio.run(lose())


def test_a_process_without_actors_is_known_by_monarchs_own() -> None:
    async def lose_two() -> None:
        session = Session(asyncio.get_running_loop(), actors=False)
        session.monarch_reports("setup-1aB", "{'hosts': 0/2, 'gpus': 0/2}")
        session.failures.lost(1, 0)
        session.failures.lost(1, 1)

        found = await session.next()

        assert (found["id"], found["ranks"], found["mesh"]) == (1, [1], "trainers")
        assert found["report"] == "The process {'hosts': 0/2, 'gpus': 1/2} of proc mesh 'trainers' has failed"
        assert session.published.empty()

    asyncio.run(lose_two())


def test_processes_that_were_lost_with_their_host_are_no_failures_of_their_own() -> None:
    async def lose_all() -> None:
        session = Session(asyncio.get_running_loop())
        session.hosts.lost.add(1)
        for rank in (3, 2, 1):
            session.failures.lost(1, rank)

        assert (await session.next())["ranks"] == [1]
        assert session.published.empty()

    asyncio.run(lose_all())


@pytest.mark.parametrize(("stopped", "published"), [(False, [0, 1, 2, 3]), (True, [])])
def test_a_mesh_that_is_not_made_has_failed_on_every_rank(stopped: bool, published: list[int]) -> None:
    text = "error spawning actor mesh: statuses: Failed(ValueError: cannot be made\n)=1..2;Running=0..1"

    async def fail_to_spawn(error: Exception) -> list[int]:
        session = Session(asyncio.get_running_loop())
        entry = session.meshes.entry(2)
        made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry.mesh.initialized = SimpleNamespace(as_asyncio=lambda: made)
        session.failures.watch_spawn(2, entry)
        entry.stopped = stopped

        made.set_exception(error)
        await asyncio.sleep(0)

        return session.published.get_nowait()["ranks"] if session.published.qsize() else []

    assert asyncio.run(fail_to_spawn(RuntimeError(text))) == published
    assert asyncio.run(fail_to_spawn(RuntimeError("on mesh with supervision events"))) == []
