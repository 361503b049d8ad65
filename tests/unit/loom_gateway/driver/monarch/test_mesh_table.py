"""The element of a mesh that a name and coordinates stand for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from loom.errors import LoomError, NoSuchMesh, SupervisionError
from loom_gateway.driver.monarch.mesh_table import KEPT_NAMES, MeshEntry, MeshTable

HOSTS, GPUS = 2, 2


def mesh(offset: int = 0) -> SimpleNamespace:
    """What has a Monarch mesh's shape."""
    slice_ = SimpleNamespace(offset=offset, sizes=[HOSTS, GPUS], strides=[GPUS, 1])
    return SimpleNamespace(_labels=["hosts", "gpus"], _ndslice=slice_)


@pytest.fixture
def meshes() -> MeshTable:
    table = MeshTable()
    table.add(1, MeshEntry("actors", "echoes", mesh(), 1))
    return table


def test_an_element_is_found_by_name_and_coordinates(meshes: MeshTable) -> None:
    assert meshes.element("echoes", {"hosts": (1, HOSTS), "gpus": (0, GPUS)}) == (1, 2)


def test_no_element_is_found_of_another_size_or_name(meshes: MeshTable) -> None:
    assert meshes.element("echoes", {"hosts": (1, 3), "gpus": (0, GPUS)}) is None
    assert meshes.element("others", {"hosts": (1, HOSTS), "gpus": (0, GPUS)}) is None
    assert meshes.element("echoes", {}) is None


def test_of_two_meshes_with_one_name_neither_is_meant(meshes: MeshTable) -> None:
    meshes.add(2, MeshEntry("actors", "echoes", mesh(offset=4), 2))
    assert meshes.element("echoes", {"hosts": (1, HOSTS), "gpus": (0, GPUS)}) is None


def test_of_a_stopped_mesh_the_name_is_kept_and_of_the_last_ones_only(meshes: MeshTable) -> None:
    meshes.add(2, MeshEntry("actors", "steppers", None, 2, procs=7))
    meshes.fail(3, "actors", LoomError("its constructor raised"))
    assert set(meshes.retire(1)) == {1}
    with pytest.raises(SupervisionError, match="mesh 'echoes' was stopped"):
        meshes.entry(1)
    assert set(meshes.retire(7)) == {2}
    assert set(meshes.retire(1)) == set()
    with pytest.raises(LoomError, match="constructor raised"):
        meshes.entry(3)
    for ident in range(20, 20 + KEPT_NAMES):
        meshes.add(ident, MeshEntry("actors", f"mesh {ident}", None, ident))
        meshes.retire(ident)
    assert meshes.known(1) is None
    with pytest.raises(NoSuchMesh, match="stopped long ago"):
        meshes.entry(1)
    assert meshes.known(19 + KEPT_NAMES) is not None
