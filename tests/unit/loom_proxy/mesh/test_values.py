"""Results of a call: the same values at the same coordinates as Monarch's `ValueMesh` has, and the same repr."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monarch._src.actor.actor_mesh import ValueMesh
from monarch._src.actor.shape import NDSlice
from monarch._src.actor.shape import Shape as MonarchShape

import loom
from loom.errors import NoSuchDimension, SliceOutOfRange, WrongArguments
from loom.shape import Shape
from loom_proxy.mesh.values import ValueMeshProxy
from tests.support.monarch_texts import says_it_too

repeatable = settings(derandomize=True, deadline=None)

labels = st.sampled_from(["hosts", "gpus", "dp", "pp"])
extents = st.dictionaries(labels, st.integers(1, 5), max_size=3)
slices = st.builds(
    slice, st.none() | st.integers(-6, 6), st.none() | st.integers(-6, 6), st.none() | st.integers(1, 3)
)


def both(sizes: dict[str, int]) -> tuple[ValueMeshProxy[str], ValueMesh[str]]:
    shape = Shape.row_major(sizes)
    values = [f"value {rank}" for rank in range(len(shape))]
    theirs = MonarchShape(list(sizes), NDSlice.new_row_major(list(sizes.values())))
    return ValueMeshProxy(shape, values), ValueMesh(theirs, values)


def outcome(mesh: Any, method: str, *args: Any, **kwargs: Any) -> tuple[Any, Exception | None]:
    """What a method returns, or what it raises."""
    try:
        return getattr(mesh, method)(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001 - whatever Monarch raises is what Loom is compared with
        return None, error


def both_do(ours: Any, theirs: Any, method: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Do the same with both; None twice if both refuse it."""
    got, error = outcome(ours, method, *args, **kwargs)
    expected, expected_error = outcome(theirs, method, *args, **kwargs)
    assert isinstance(error, type(expected_error)), (error, expected_error)
    return got, expected


@repeatable
@given(
    extents, st.lists(st.dictionaries(labels, st.integers(0, 5) | slices, max_size=2), max_size=3), st.booleans()
)
def test_values_stay_at_their_coordinates_as_monarchs_do(
    sizes: dict[str, int], selections: list[dict[str, Any]], flatten: bool
) -> None:
    ours, theirs = both(sizes)
    for selection in selections:
        got, expected = both_do(ours, theirs, "slice", **selection)
        if got is not None:
            ours, theirs = got, expected
    if flatten:
        got, expected = both_do(ours, theirs, "flatten", "rank")
        if got is not None:
            ours, theirs = got, expected

    assert repr(ours) == repr(theirs)
    assert list(ours.values()) == list(theirs.values())
    assert [(dict(point), value) for point, value in ours] == [(dict(point), value) for point, value in theirs]
    assert [point.rank for point, _ in ours.items()] == [point.rank for point, _ in theirs.items()]
    assert len(ours) == len(theirs)
    for rank in range(len(theirs)):
        assert ours.get(rank) == theirs.get(rank)


# Monarch's answer to a negative coordinate is an OverflowError of its bindings; Loom's is in a test below.
@settings(repeatable, max_examples=40)
@given(extents, st.dictionaries(labels, st.integers(0, 2), max_size=2), st.dictionaries(labels, st.integers(0, 5)))
def test_an_item_is_monarchs_item(
    sizes: dict[str, int], selection: dict[str, int], coordinates: dict[str, int]
) -> None:
    ours, theirs = both(sizes)
    got, expected = both_do(ours, theirs, "slice", **selection)
    if got is None:
        got, expected = ours, theirs

    item, monarchs_item = both_do(got, expected, "item", **coordinates)
    assert item == monarchs_item


@repeatable
@given(extents, st.data())
def test_every_value_is_found_by_its_point(sizes: dict[str, int], data: st.DataObject) -> None:
    values, _ = both(sizes)

    for point, value in values.items():
        assert values.item(**point) == value


@pytest.fixture
def values() -> ValueMeshProxy[int]:
    return ValueMeshProxy(Shape.row_major({"hosts": 2, "gpus": 2}), [0, 1, 10, 11])


def test_a_single_value_needs_no_coordinates(values: ValueMeshProxy[int]) -> None:
    assert values.slice(hosts=1, gpus=0).item() == 10


def test_an_item_without_all_coordinates_is_refused(values: ValueMeshProxy[int]) -> None:
    with pytest.raises(NoSuchDimension, match=r"item\(\) needs a coordinate for each .*: \['gpus'\]"):
        values.item(hosts=1)


def test_an_item_of_a_dimension_that_does_not_exist_is_refused(values: ValueMeshProxy[int]) -> None:
    with pytest.raises(NoSuchDimension, match=r"item has extra dimensions: \['pp'\]; the dimensions: hosts, gpus"):
        values.item(hosts=1, gpus=0, pp=0)


@pytest.mark.parametrize("index", [2, -1])
def test_an_item_out_of_range_is_refused(values: ValueMeshProxy[int], index: int) -> None:
    with pytest.raises(SliceOutOfRange, match=rf"gpus={index}, but gpus has 2 \(0 to 1\)"):
        values.item(hosts=1, gpus=index)


def test_an_item_takes_no_slice(values: ValueMeshProxy[int]) -> None:
    with pytest.raises(WrongArguments, match="one coordinate for 'gpus', not a slice"):
        values.item(hosts=1, gpus=slice(0, 1))  # type: ignore[arg-type]


def test_values_are_equal_if_their_shapes_and_values_are(values: ValueMeshProxy[int]) -> None:
    same = ValueMeshProxy(Shape.row_major({"hosts": 2, "gpus": 2}), (0, 1, 10, 11))

    assert values == same
    assert values != values.flatten("rank")
    assert values != ValueMeshProxy(Shape.row_major({"hosts": 2, "gpus": 2}), [0, 1, 10, 12])
    assert values != [0, 1, 10, 11]


def test_slices_of_the_same_values_are_equal(values: ValueMeshProxy[int]) -> None:
    assert values.slice(hosts=1) == ValueMeshProxy(Shape.row_major({"gpus": 2}), [10, 11])


def test_values_can_be_pickled(values: ValueMeshProxy[int]) -> None:
    assert pickle.loads(pickle.dumps(values.slice(gpus=1))) == values.slice(gpus=1)


def test_values_have_to_fill_the_mesh() -> None:
    with pytest.raises(ValueError, match="invalid value mesh: expected 4 ranks, but contains 3 ranks"):
        ValueMeshProxy(Shape.row_major({"hosts": 2, "gpus": 2}), [0, 1, 10])


SHAPES = (
    loom.Shape(["hosts", "gpus"], loom.NDSlice.new_row_major([2, 2])).at("hosts", 1),
    MonarchShape(["hosts", "gpus"], NDSlice.new_row_major([2, 2])).at("hosts", 1),
)


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, "a"), (1, "b")],
        [(1, "b"), (0, "a")],
        ((0, "a"), (1, "b"), (0, "again")),
        [(0, "a")],
        [(0, "a"), (0, "b")],
        [(0, "a"), (2, "b")],
        [(0, "a"), (7, "b")],
        [(0, "a"), (1, "b"), (2, "c")],
        [],
        [(-1, "a")],
        [(0, "a", "b")],
        [("0", "a")],
        [[0, "a"]],
        5,
        (pair for pair in [(0, "a"), (1, "b")]),
    ],
)
def test_values_by_index_are_what_monarch_makes_of_them(pairs: Any) -> None:
    ours, theirs = (SHAPES[0], ValueMeshProxy), (SHAPES[1], ValueMesh)
    got, error = outcome(ours[1], "from_indexed", ours[0], pairs)
    expected, expected_error = outcome(theirs[1], "from_indexed", theirs[0], pairs)

    assert repr(got) == repr(expected)
    assert isinstance(error, type(expected_error)), (error, expected_error)
    assert expected_error is None or says_it_too(error, expected_error), (error, expected_error)


def test_a_value_mesh_of_monarchs_shape_is_monarchs() -> None:
    assert type(loom.ValueMesh(SHAPES[1], ["a", "b"])) is ValueMesh
    assert type(loom.ValueMesh.from_indexed(SHAPES[1], [(1, "b"), (0, "a")])) is ValueMesh
    assert type(loom.ValueMesh(SHAPES[0], ["a", "b"])) is ValueMeshProxy


def test_a_value_mesh_of_no_shape_is_refused_with_monarchs_text() -> None:
    for make in (loom.ValueMesh, loom.ValueMesh.from_indexed):
        with pytest.raises(TypeError, match="argument 'shape': 'int' object cannot be cast as 'Shape'"):
            make(3, [])


def test_a_rank_without_a_value_is_refused_with_monarchs_text() -> None:
    with pytest.raises(ValueError, match=r"index 7 out of range \(len=2\)"):
        ValueMesh(SHAPES[1], ["a", "b"]).get(7)
    with pytest.raises(ValueError, match=r"index 7 out of range \(len=2\)"):
        loom.ValueMesh(SHAPES[0], ["a", "b"]).get(7)
