"""What can no longer answer, and why."""

from __future__ import annotations

from loom_gateway.driver.monarch.mesh_table import MeshEntry, MeshTable
from loom_gateway.driver.session.failures import DeadElements


def test_a_process_is_gone_also_where_its_mesh_has_been_forgotten() -> None:
    meshes = MeshTable()
    dead = DeadElements(meshes)
    actors = MeshEntry("actors", "counters", None, 2, procs=1, ranks=(0, 1))
    meshes.add(1, MeshEntry("procs", "trainers", None, 1, procs=1, ranks=(0, 1)))
    assert dead.why_silent(actors) is None

    dead.add_process(1, 1)

    assert str(dead.why_silent(actors)).startswith("process 1 of proc mesh 'trainers' is gone")
    meshes.forget(1)
    assert str(dead.why_silent(actors)).startswith("process 1 under 'counters' is gone")
