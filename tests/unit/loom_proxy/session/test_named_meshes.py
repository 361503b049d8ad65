"""The names of a session's meshes: none hides another."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from loom_proxy.session.calls import KEPT_STOPPED, NamedMeshes


def mesh(ident: int, name: str, procs: int | None = None) -> Any:
    return SimpleNamespace(_whole=SimpleNamespace(ident=ident, name=name, procs=procs))


def names(meshes: NamedMeshes) -> dict[str, int]:
    return {name: one._whole.ident for name, one in meshes.by_name().items()}


def test_the_newest_has_the_name_and_the_others_are_there() -> None:
    meshes = NamedMeshes()
    for ident, name in ((3, "trainers"), (4, "other"), (7, "trainers"), (5, "trainers")):
        meshes.add(mesh(ident, name))

    assert names(meshes) == {"trainers": 7, "trainers#3": 3, "trainers#5": 5, "other": 4}


def test_a_mesh_that_was_stopped_leaves_its_name_to_one_that_was_not() -> None:
    meshes = NamedMeshes()
    for ident in (3, 5, 7):
        meshes.add(mesh(ident, "trainers"))

    meshes.note_stopped(7)
    assert names(meshes) == {"trainers": 5, "trainers#3": 3, "trainers#7": 7}
    meshes.note_stopped(None)
    assert names(meshes)["trainers"] == 7


def test_actors_are_stopped_with_their_processes_and_a_removed_mesh_is_gone() -> None:
    meshes = NamedMeshes()
    procs, actors, others = mesh(1, "x"), mesh(2, "x", procs=1), mesh(3, "y", procs=9)
    for one in (procs, actors, others):
        meshes.add(one)
    meshes.note_stopped(1)
    later = mesh(4, "x")
    meshes.add(later)
    assert names(meshes) == {"x": 4, "x#2": 2, "x#1": 1, "y": 3}

    for one in (procs, actors, procs):
        meshes.remove(one)
    assert names(meshes) == {"x": 4, "y": 3}


def test_no_mesh_is_ever_hidden() -> None:
    chosen, meshes, idents = random.Random(56), NamedMeshes(), set[int]()
    for ident in range(200):
        meshes.add(mesh(ident, chosen.choice("abc")))
        idents.add(ident)
        if chosen.random() < 0.2 and len(meshes._stopped) < KEPT_STOPPED:
            meshes.note_stopped(chosen.choice([*idents]))
        assert set(names(meshes).values()) == idents
        assert all(ident in meshes for ident in idents)


def test_those_that_were_stopped_long_ago_are_dropped() -> None:
    meshes = NamedMeshes()
    for ident in range(KEPT_STOPPED + 3):
        meshes.add(mesh(ident, f"m{ident}"))
        meshes.note_stopped(ident)

    assert list(names(meshes).values()) == list(range(3, KEPT_STOPPED + 3))
