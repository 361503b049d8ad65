"""`MeshTrait` on host, proc, actor and value meshes."""

from __future__ import annotations

from typing import Any

from tests.parity.actors import Counter, Where


def _about(mesh: Any) -> Any:
    return mesh.sizes, mesh.extent, len(mesh), mesh.size(), mesh.extent.labels, mesh.extent.sizes


def _on_each(hosts: Any, api: Any) -> list[Any]:
    counters = api.spawn(Counter)
    return [api.procs, counters, counters.value.call().get(timeout=30)]


def whole_meshes(hosts: Any, api: Any) -> Any:
    return [_about(mesh) for mesh in [hosts, *_on_each(hosts, api)]]


def slices_by_int(hosts: Any, api: Any) -> Any:
    by_host = [_about(mesh.slice(hosts=1)) for mesh in [hosts, *_on_each(hosts, api)]]
    return by_host, [_about(mesh.slice(hosts=1, gpus=0)) for mesh in _on_each(hosts, api)]


def slices_by_range(hosts: Any, api: Any) -> Any:
    ranges = [
        slice(0, 1),
        slice(1, None),
        slice(None, 2),
        slice(-1, None),
        slice(None),
        slice(0, 2, 2),
        slice(0, 99),
    ]
    meshes = _on_each(hosts, api)
    return [[_about(mesh.slice(gpus=one)) for one in ranges] for mesh in meshes]


def slices_of_slices(hosts: Any, api: Any) -> Any:
    where = api.spawn(Where)
    part = where.slice(hosts=slice(1, 2)).slice(gpus=1)
    return _about(part), part.own_rank.call().get(timeout=30), part.rank.call().get(timeout=30)


def slices_out_of_range(hosts: Any, api: Any) -> Any:
    wrong = [2, -1, 99, slice(2, None), slice(1, 1), slice(1, 0), "1", 1.0, [0, 1], None]
    errors = []
    for mesh in _on_each(hosts, api):
        errors += [api.raised(lambda mesh=mesh, one=one: mesh.slice(gpus=one)) for one in wrong]
    return errors, [api.raised(lambda one=one: hosts.slice(hosts=one)) for one in wrong]


def slices_of_unknown_dimensions(hosts: Any, api: Any) -> Any:
    meshes = [hosts, *_on_each(hosts, api)]
    return [api.raised(lambda mesh=mesh: mesh.slice(racks=0)) for mesh in meshes]


def steps(hosts: Any, api: Any) -> Any:
    flat = api.procs.flatten("rank")
    odd = flat.slice(rank=slice(1, 4, 2))
    ends = flat.slice(rank=slice(0, 4, 3))
    return [
        _about(odd),
        odd.spawn("where", Where).rank.call().get(timeout=30),
        ends.spawn("where", Where).own_rank.call().get(timeout=30),
        api.raised(lambda: flat.split(rank=("a", "b"), a=1).slice(a=slice(1, None, 2))),
    ]


def booleans_select_as_ints_do(hosts: Any, api: Any) -> Any:
    return [_about(mesh.slice(gpus=True)) for mesh in _on_each(hosts, api)]


def an_empty_slice_is_the_mesh(hosts: Any, api: Any) -> Any:
    return [_about(mesh.slice()) for mesh in [hosts, *_on_each(hosts, api)]]


def flatten(hosts: Any, api: Any) -> Any:
    meshes = [hosts, *_on_each(hosts, api)]
    flat = [_about(mesh.flatten("rank")) for mesh in meshes]
    one_host = [_about(mesh.slice(hosts=1).flatten("rank")) for mesh in meshes[1:]]
    sparse = [api.raised(lambda mesh=mesh: mesh.slice(gpus=1).flatten("rank")) for mesh in meshes[1:]]
    return flat, one_host, sparse, api.raised(lambda: hosts.flatten()), api.raised(lambda: hosts.flatten(3))


def flattened_actors_are_called_by_rank(hosts: Any, api: Any) -> Any:
    flat = api.spawn(Where).flatten("rank")
    return [
        [flat.slice(rank=rank).own_rank.call_one().get(timeout=30) for rank in range(4)],
        flat.rank.call().get(timeout=30),
        flat.mesh_size.call().get(timeout=30),
    ]


def split(hosts: Any, api: Any) -> Any:
    flat = [mesh.flatten("rank") for mesh in _on_each(hosts, api)]
    return [
        [_about(mesh.split(rank=("dp", "tp"), tp=2)) for mesh in flat],
        [_about(mesh.split(rank=("dp", "pp", "tp"), dp=1, pp=4)) for mesh in flat],
        [_about(mesh.split(rank=("dp", "tp"), tp=2).slice(dp=1)) for mesh in flat],
        [_about(mesh.split(hosts=("a", "b"), a=2, gpus=("c", "d"), d=1)) for mesh in _on_each(hosts, api)],
        _about(hosts.split(hosts=("racks", "units"), units=1)),
    ]


def splits_that_cannot_be(hosts: Any, api: Any) -> Any:
    wrong: list[dict[str, Any]] = [
        {"gpus": "ab"},
        {"gpus": ("a", "b")},
        {"gpus": ("a", "b"), "a": 3},
        {"gpus": ("a", "b"), "a": 2, "b": 2},
        {"gpus": ("hosts",)},
        {"gpus": ()},
        {"racks": ("a", "b"), "a": 1},
        {"racks": 2},
        {"gpus": ("a", 3), "a": 1},
        {"gpus": 3},
    ]
    return [
        api.raised(lambda mesh=mesh, one=one: mesh.split(**one)) for mesh in _on_each(hosts, api) for one in wrong
    ]


def rename(hosts: Any, api: Any) -> Any:
    meshes = _on_each(hosts, api)
    return [
        [_about(mesh.rename(gpus="devices")) for mesh in meshes],
        [_about(mesh.rename(hosts="gpus", gpus="hosts").slice(gpus=1)) for mesh in meshes],
        [api.raised(lambda mesh=mesh: mesh.rename(racks="a")) for mesh in meshes],
        [api.raised(lambda mesh=mesh: mesh.rename(gpus="hosts")) for mesh in meshes],
        [api.raised(lambda mesh=mesh: mesh.rename(gpus=3)) for mesh in meshes],
        _about(hosts.rename(hosts="nodes").slice(nodes=0)),
    ]


def renamed_actors_keep_their_ranks(hosts: Any, api: Any) -> Any:
    where = api.spawn(Where).rename(hosts="dp", gpus="tp")
    return where.rank.call().get(timeout=30), where.slice(dp=1).own_rank.call().get(timeout=30)


def size(hosts: Any, api: Any) -> Any:
    meshes = _on_each(hosts, api)
    known = [mesh.size(dim) for mesh in meshes for dim in (None, "gpus", ["hosts", "gpus"], ("gpus",), ())]
    errors = [
        api.raised(lambda mesh=mesh, dim=dim: mesh.size(dim)) for mesh in meshes for dim in ("racks", ["a"], 3)
    ]
    return known, errors


def slices_are_of_the_same_class(hosts: Any, api: Any) -> Any:
    return [type(mesh.slice(hosts=0)).__name__.removesuffix("Proxy") for mesh in [hosts, *_on_each(hosts, api)]]


def meshes_are_of_the_public_classes(hosts: Any, api: Any) -> Any:
    procs, counters, values = _on_each(hosts, api)
    return [
        isinstance(hosts, api.HostMesh),
        isinstance(procs, api.ProcMesh),
        isinstance(values, api.ValueMesh),
        isinstance(hosts.extent, api.Extent),
        isinstance(next(iter(values))[0], api.Point),
        isinstance(counters.value.call(), api.Future),
        isinstance(procs, api.HostMesh),
    ]


def host_mesh_of_one_process(hosts: Any, api: Any) -> Any:
    one = api.procs.slice(hosts=1, gpus=0)
    return [
        _about(one.host_mesh),
        api.raised(lambda: api.procs.host_mesh),
        one.host_mesh.spawn_procs(name="beside").spawn("where", Where).rank.call().get(timeout=30),
    ]
