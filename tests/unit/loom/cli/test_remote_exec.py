"""The mesh that ``loom exec`` and its like mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loom.cli.remote_exec import _mesh
from loom.errors import NoSuchMesh
from loom_proxy.mesh.procs import ProcMeshProxy


def procs(stopped: bool = False) -> Any:
    made = ProcMeshProxy.__new__(ProcMeshProxy)
    made.__dict__["_whole"] = SimpleNamespace(stopped=stopped)
    return made


def shown() -> dict[str, Any]:
    """A gateway's answer about meshes, of which some were stopped."""
    below = [{"name": "old actors", "stopped": True}, {"name": "actors", "stopped": False}]
    meshes = [{"name": "old", "stopped": True, "actors": below}, {"name": "x", "stopped": False, "actors": []}]
    return {"hosts": {"name": "hosts", "stopped": False, "procs": meshes}}


def test_one_mesh_of_processes_needs_no_name() -> None:
    only = procs()
    actors: Any = object()

    assert _mesh({"x": actors, "x#1": only, "old": procs(stopped=True)}, None, shown) is only
    assert _mesh({"x": actors, "x#1": only}, "x", shown) is actors
    assert _mesh({"x": actors, "x#1": only}, "x#1", shown) is only


@pytest.mark.parametrize(
    ("meshes", "name", "text"),
    [
        ({}, None, "no mesh of processes; its meshes: none"),
        ({"old": procs(stopped=True)}, None, "no mesh of processes; its meshes: old"),
        ({"x": procs(), "x#1": procs(), "a": object()}, None, "choose with --mesh .* processes: x, x#1$"),
        ({"x": procs()}, "y", "there is no mesh 'y'; the session's meshes: x"),
        ({"x": procs()}, "old", "mesh 'old' was stopped; the session's meshes: x"),
        ({}, "old actors", "mesh 'old actors' was stopped; the session's meshes: none"),
    ],
)
def test_a_choice_is_asked_for_where_there_is_one(meshes: dict[str, Any], name: str | None, text: str) -> None:
    with pytest.raises(NoSuchMesh, match=text):
        _mesh(meshes, name, shown)
