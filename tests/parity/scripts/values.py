"""Value meshes, points and extents."""

from __future__ import annotations

from typing import Any

from tests.parity.actors import Counter, Relay, Where


def _values(api: Any) -> Any:
    where = api.spawn(Where)
    return where.own_rank.call().get(timeout=30)


def item(hosts: Any, api: Any) -> Any:
    values = _values(api)
    return [
        values.item(hosts=1, gpus=0),
        values.item(gpus=1, hosts=0),
        values.slice(hosts=0).item(gpus=1),
        values.slice(hosts=1, gpus=1).item(),
    ]


def items_that_are_not_there(hosts: Any, api: Any) -> Any:
    values = _values(api)
    wrong: list[dict[str, Any]] = [
        {},
        {"hosts": 1},
        {"hosts": 1, "gpus": 0, "racks": 0},
        {"hosts": 2, "gpus": 0},
        {"hosts": 1, "gpus": 2},
        {"hosts": -1, "gpus": 0},
        {"hosts": slice(0, 1), "gpus": 0},
        {"hosts": "1", "gpus": 0},
    ]
    return [api.raised(lambda one=one: values.item(**one)) for one in wrong]


def get_by_rank(hosts: Any, api: Any) -> Any:
    values = _values(api)
    return [values.get(rank) for rank in range(4)], [
        api.raised(lambda rank=rank: values.get(rank)) for rank in (4, -1)
    ]


def iteration(hosts: Any, api: Any) -> Any:
    values = _values(api)
    return [
        list(values),
        list(values.items()),
        list(values.values()),
        values.values()[2],
        [point.rank for point, _ in values.slice(gpus=1)],
        dict(list(values)[3][0]),
    ]


def representation(hosts: Any, api: Any) -> Any:
    values = _values(api)
    return (
        repr(values),
        repr(values.slice(hosts=1)),
        repr(values.slice(hosts=1, gpus=1)),
        str(values.flatten("rank")),
    )


def values_are_sliced_and_reshaped(hosts: Any, api: Any) -> Any:
    values = _values(api)
    return [
        values.slice(gpus=slice(1, 2)),
        values.flatten("rank").slice(rank=slice(1, 4)),
        values.rename(gpus="devices").slice(devices=0),
        values.flatten("rank").split(rank=("a", "b"), b=2),
    ]


def a_point_from_a_call(hosts: Any, api: Any) -> Any:
    points = [point for point, _ in _values(api).items()]
    last = points[3]
    return [
        points,
        last.rank,
        last.extent,
        last["gpus"],
        list(last),
        len(last),
        dict(last),
        {**last},
        last.size("hosts"),
        list(last.items()),
        list(last.values()),
        "gpus" in last,
        repr(last),
        last == api.Point(3, last.extent),
        last == points[2],
    ]


def what_a_point_does_not_have(hosts: Any, api: Any) -> Any:
    point = next(iter(_values(api)))[0]
    return [
        api.raised(lambda: point["racks"]),
        api.raised(lambda: point.size("racks")),
        api.raised(lambda: point.gpus),
        api.raised(lambda: point[0]),
        api.raised(lambda: dict(api.Point(4, point.extent))),
    ]


def points_that_a_program_makes(hosts: Any, api: Any) -> Any:
    extent = api.Extent(["a", "b"], [2, 3])
    return [
        [api.Point(rank, extent) for rank in range(6)],
        extent,
        extent.nelements,
        extent["b"],
        list(extent),
        len(extent),
        dict(extent),
        extent == api.Extent(["a", "b"], [2, 3]),
        extent == api.Extent(["a", "c"], [2, 3]),
        api.raised(lambda: extent["c"]),
        api.raised(lambda: api.Extent(["a"], [1, 2])),
    ]


def points_in_results(hosts: Any, api: Any) -> Any:
    where = api.spawn(Where)
    return [
        where.rank.call().get(timeout=30),
        where.points.call().get(timeout=30),
        where.mesh_extent.call().get(timeout=30),
        where.slice(hosts=1, gpus=1).points.call_one().get(timeout=30),
    ]


def points_as_arguments(hosts: Any, api: Any) -> Any:
    where = api.spawn(Where).slice(hosts=0, gpus=0)
    point = api.Point(5, api.Extent(["a", "b"], [2, 3]))
    module, coordinates, rank = where.coordinates_of.call_one(point).get(timeout=30)
    return module.partition(".")[0], coordinates, rank


def a_value_mesh_as_result_and_argument(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 3)
    relay = api.spawn(Relay).slice(hosts=0, gpus=0)
    values = relay.values_of.call_one(counters.slice(hosts=1), 2).get(timeout=30)
    kind = counters.slice(hosts=0, gpus=0).type_of.call_one(values).get(timeout=30)
    return values, values.slice(gpus=1).item(), kind


def values_keep_their_types(hosts: Any, api: Any) -> Any:
    one = api.spawn(Counter).slice(hosts=0, gpus=0)
    sent = [
        None,
        True,
        0,
        -(2**70),
        1.5,
        "ü",
        b"b",
        (1, (2,)),
        [1, [2]],
        {"a": {1: 2}},
        {1, 2},
        frozenset([3]),
        1 + 2j,
    ]
    return [one.echo.call_one(value).get(timeout=30) for value in sent], one.echo.call_one(sent).get(timeout=30)


def _shape(api: Any) -> Any:
    return api.Shape(["hosts", "gpus"], api.NDSlice.new_row_major([2, 2]))


def made_by_a_program(hosts: Any, api: Any) -> Any:
    shape = _shape(api)
    pairs = [(3, "d"), (0, "a"), (2, "c"), (1, "b"), (1, "again")]
    listed, indexed = api.ValueMesh(shape, list("abcd")), api.ValueMesh.from_indexed(shape, pairs)
    part = api.ValueMesh.from_indexed(shape.at("hosts", 1), [(1, "y"), (0, "x")])
    return [
        listed,
        indexed,
        part,
        indexed.slice(gpus=1),
        indexed.flatten("rank").item(rank=2),
        part.item(gpus=0),
        isinstance(indexed, api.ValueMesh),
    ]


def made_of_too_much_or_too_little(hosts: Any, api: Any) -> Any:
    shape = _shape(api)
    wrong: list[Any] = [[(0, "a")], [(rank, rank) for rank in range(5)], [(0, 1)] * 4, [(-1, 1)], [("0", 1)], 5]
    return [
        *(api.raised(lambda pairs=pairs: api.ValueMesh.from_indexed(shape, pairs)) for pairs in wrong),
        api.raised(lambda: api.ValueMesh(shape, [1, 2])),
        api.raised(lambda: api.ValueMesh(3, [1, 2])),
    ]


def made_and_sent(hosts: Any, api: Any) -> Any:
    shape = _shape(api)
    counter = api.spawn(Counter).slice(hosts=0, gpus=0)
    values = api.ValueMesh.from_indexed(shape, [(rank, rank * 10) for rank in range(4)])
    sent = [values, shape, shape.ndslice, shape.at("gpus", 1), api.Shape.unity(), {"in": [shape]}]
    return [
        [counter.type_of.call_one(one).get(timeout=30) for one in sent[:3]],
        [counter.echo.call_one(one).get(timeout=30) for one in sent],
    ]


def shape_of_ranks(hosts: Any, api: Any) -> Any:
    shape, ranks = _shape(api), api.NDSlice(offset=2, sizes=[2, 2], strides=[4, 1])
    return [
        str(shape),
        repr(shape),
        shape.ranks(),
        shape.labels,
        len(shape),
        shape.coordinates(2),
        shape.extent,
        shape.index(hosts=1, gpus=1).ranks(),
        shape.select("gpus", slice(1, None)),
        shape == _shape(api),
        list(ranks),
        [ranks.ndim, ranks.offset, ranks.sizes, ranks.strides, len(ranks), ranks[1], ranks[1:3], ranks.get(3)],
        [ranks.index(6), ranks.coordinates(7), ranks.nditem([1, 1])],
        api.raised(lambda: ranks.index(5)),
        api.raised(lambda: ranks[9]),
        api.raised(lambda: shape.coordinates(9)),
        api.raised(lambda: api.Shape(["a"], ranks)),
        api.raised(lambda: api.NDSlice(offset=0, sizes=[2, 2], strides=[1, 1])),
    ]
