"""The description of meshes that are many, large or stopped. Stand-ins for those of Monarch have only a shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from loom.errors import SupervisionError
from loom_gateway.driver.monarch.mesh_table import HOST_MESH, MeshEntry, MeshTable
from loom_gateway.driver.session.mesh_view import LONGEST_REASON, MOST_MESHES, MOST_REASONS, SHOWN_STOPPED, MeshView
from loom_gateway.sessions.descriptions import SHOWN_RANKS, ElementState, SessionMeshes

ALIVE, FAILED, STARTING, STOPPED = (
    ElementState.ALIVE,
    ElementState.FAILED,
    ElementState.STARTING,
    ElementState.STOPPED,
)


def mesh(size: int) -> Any:
    return SimpleNamespace(_labels=["gpus"], _ndslice=SimpleNamespace(offset=0, sizes=[size], strides=[1]))


class Known:
    """What a driver knows of its session."""

    def __init__(self) -> None:
        self.meshes = MeshTable()
        self.meshes.add(HOST_MESH, MeshEntry("hosts", "hosts", mesh(2), HOST_MESH, ranks=(0, 1)))
        self.hosts = SimpleNamespace(lost=set[int](), addresses=["tcp://a:1", "tcp://b:1"])
        self.reasons: dict[tuple[int, int], str] = {}
        self.in_flight: dict[tuple[int, str], int] = {}
        self.alive: dict[int, set[int]] = {}
        self.lost: set[tuple[int, int]] = set()

    def procs(self, ident: int, size: int) -> MeshEntry:
        ranks = tuple(range(size))
        entry = MeshEntry("procs", f"procs {ident}", mesh(size), ident, procs=ident, ranks=ranks, hosts=(0,) * size)
        self.meshes.add(ident, entry)
        self.alive[ident] = set(ranks)
        return entry

    def actors(self, ident: int, procs: MeshEntry) -> MeshEntry:
        entry = MeshEntry(
            "actors", f"actors {ident}", procs.mesh, ident, procs=procs.procs, ranks=procs.ranks, cls=Known
        )
        self.meshes.add(ident, entry)
        return entry

    def stop(self, ident: int) -> None:
        entry = self.meshes.entry(ident)
        entry.failure, entry.stopped = SupervisionError("stopped"), True

    def describe(self) -> SessionMeshes:
        context: Any = SimpleNamespace(
            meshes=self.meshes,
            hosts=self.hosts,
            replies=SimpleNamespace(calls_in_flight=lambda: self.in_flight),
            failures=SimpleNamespace(reasons=lambda: self.reasons),
        )
        processes: Any = SimpleNamespace(alive=lambda ident: self.alive.get(ident, set()), lost=lambda: self.lost)
        return MeshView(context, processes).describe()


def test_a_small_mesh_has_the_state_of_each_rank() -> None:
    known = Known()
    procs = known.procs(1, 4)
    known.actors(2, procs)
    known.alive[1] = {0, 1, 2}
    known.lost = {(1, 1)}
    known.reasons = {(2, 2): "it raised\n  in a message"}

    (shown,) = known.describe().hosts.procs

    assert shown.elements.states == [ALIVE, FAILED, ALIVE, STARTING]
    assert [(one.rank, one.reason) for one in shown.elements.failures] == [
        (1, "process 1 of proc mesh 'procs 1' is gone")
    ]
    assert shown.actors[0].elements.counts == {ALIVE: 1, FAILED: 2, STARTING: 1}
    assert [one.reason for one in shown.actors[0].elements.failures] == [
        "process 1 of proc mesh 'procs 1' is gone",
        "it raised in a message",
    ]


def test_actors_on_a_part_have_ranks_of_their_own() -> None:
    known = Known()
    known.procs(1, 4)
    part = MeshEntry("actors", "part", mesh(2), 2, procs=1, ranks=(2, 3))
    known.meshes.add(2, part)
    known.reasons = {(2, 3): "it raised"}

    (shown,) = known.describe().hosts.procs[0].actors

    assert shown.elements.states == [ALIVE, FAILED]
    assert [one.rank for one in shown.elements.failures] == [1]


def test_a_large_mesh_has_counts_and_the_first_failures() -> None:
    known = Known()
    procs = known.procs(1, 10_000)
    known.actors(2, procs)
    known.lost = {(1, rank) for rank in range(5000, 10_000)}
    known.reasons = {(2, 7): "x" * 10_000}

    (shown,) = known.describe().hosts.procs

    assert shown.elements.counts == {ALIVE: 5000, FAILED: 5000}
    assert shown.elements.states == []
    assert [one.rank for one in shown.elements.failures] == list(range(5000, 5000 + SHOWN_RANKS))
    assert LONGEST_REASON - 3 <= len(shown.actors[0].elements.failures[0].reason) <= LONGEST_REASON


def test_so_many_failures_are_told_of_all_meshes() -> None:
    known = Known()
    for ident in range(1, 101):
        known.procs(ident, 64)
        known.lost |= {(ident, rank) for rank in range(64)}

    shown = known.describe().hosts.procs

    assert sum(len(one.elements.failures) for one in shown) == MOST_REASONS
    assert {one.elements.counts[FAILED] for one in shown} == {64}


def test_a_lost_host_is_why_its_processes_are_gone() -> None:
    known = Known()
    known.procs(1, 1)
    known.hosts.lost, known.lost = {0}, {(1, 0)}

    hosts = known.describe().hosts

    assert hosts.elements.states == [FAILED, ALIVE]
    assert hosts.procs[0].elements.failures[0].reason == "worker host 0 at tcp://a:1 is gone"


def test_a_part_that_was_stopped() -> None:
    known = Known()
    procs = known.procs(1, 2)
    known.actors(2, procs)
    known.meshes.add(3, MeshEntry("procs", "procs 1", mesh(1), 1, procs=1, ranks=(1,), stopped=True))

    (shown,) = known.describe().hosts.procs

    assert shown.elements.states == [ALIVE, STOPPED]
    assert shown.actors[0].elements.states == [ALIVE, STOPPED]
    assert not shown.stopped


def test_of_stopped_meshes_the_newest_are_shown_without_calls() -> None:
    known = Known()
    procs = known.procs(1, 1)
    for ident in range(2, 102):
        known.actors(ident, procs).calls_of("add", 0.0)
        if ident > 2:
            known.stop(ident)

    shown = known.describe()

    (only,) = shown.hosts.procs
    assert [one.id for one in only.actors] == [2, *range(102 - SHOWN_STOPPED, 102)]
    assert [len(one.endpoints) for one in only.actors] == [1, *[0] * SHOWN_STOPPED]
    assert shown.left_out == 99 - SHOWN_STOPPED


def test_more_meshes_than_there_is_room_for_are_counted() -> None:
    known = Known()
    for ident in range(1, MOST_MESHES + 101):
        known.procs(ident, 1)

    shown = known.describe()

    assert len(shown.hosts.procs) == MOST_MESHES
    assert shown.left_out == 100


def test_a_mesh_of_the_clusters_own_is_left_out() -> None:
    known = Known()
    known.meshes.add(-1, MeshEntry("actors", "returned", mesh(1), -1))
    assert known.describe().hosts.procs == []


def test_calls_in_flight_are_calls() -> None:
    known = Known()
    actors = known.actors(2, known.procs(1, 1))
    actors.calls_of("add", 0.0).answered(0.0, 0.01, failed=True)
    known.in_flight = {(2, "add"): 3, (2, "wait"): 1, (5, "wait"): 7}

    (procs,) = known.describe().hosts.procs

    calls = [(one.name, one.calls, one.failures, one.in_flight) for one in procs.actors[0].endpoints]
    assert calls == [("add", 4, 1, 3), ("wait", 1, 0, 1)]
    assert procs.actors[0].class_name == "Known"
