"""The release of stopped meshes, which Monarch itself keeps until the process ends (torchmonarch 0.7 and 0.8).

A session of days may make and stop thousands of meshes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from monarch._src.actor.actor_mesh import ActorMesh
from monarch._src.actor.proc_mesh import ProcMesh
from monarch.actor import context


def release(meshes: Iterable[Any]) -> None:
    """Drop Monarch's own references to whole actor and proc meshes that have stopped."""
    children = context().actor_instance._children or []
    for mesh in meshes:
        _drop(children, mesh)
        if isinstance(mesh, ActorMesh):
            if mesh._proc_mesh is not None:
                _drop(mesh._proc_mesh._pending_actor_spawns, mesh)
        elif isinstance(mesh, ProcMesh):
            for child in children.copy():  # such as the actor that has run the bootstrap function
                if isinstance(child, ActorMesh) and child._proc_mesh is mesh:
                    _drop(children, child)
            mesh._pending_actor_spawns.clear()
            if hasattr(mesh._logging_manager, "_log_level_actor"):  # in 0.8: its endpoint holds the mesh, in Rust
                mesh._logging_manager._log_level_actor = None
            hosts = mesh._host_mesh
            _drop(hosts._proc_meshes, mesh)
            for spawn in hosts._pending_spawns.copy():
                if _is_done(spawn):
                    _drop(hosts._pending_spawns, spawn)


def _drop(references: list[Any], thing: Any) -> None:
    with contextlib.suppress(ValueError):
        references.remove(thing)  # in one step, because other threads append


def _is_done(spawn: Any) -> bool:
    try:
        return spawn.poll() is not None
    except Exception:  # noqa: BLE001 - the spawn failed with any of Monarch's errors
        return True
