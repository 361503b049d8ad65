"""Shapes compute what Monarch's compute: the same ranks for the same slices, and errors of the same classes.

Left out of the comparison is what Monarch takes by mistake or refuses by accident: a negative step (it selects
other ranks than it says), a bool as an index or a size (it counts as 0 or 1), and a size of 0 or less in `split`
(a `ZeroDivisionError` or an `OverflowError`). Loom refuses the first and the last; see the tests at the end.
"""

from __future__ import annotations

import pickle
import re
from typing import Any

import monarch.actor
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monarch._rust_bindings.monarch_hyperactor.shape import Extent as MonarchExtent
from monarch._rust_bindings.monarch_hyperactor.shape import Point as MonarchPoint
from monarch._src.actor import shape as monarch_shape

from loom.errors import NoSuchDimension, SliceOutOfRange, WrongArguments
from loom.shape import Extent, MeshTrait, NDSlice, Point, Shape
from tests.support.monarch_texts import says_it_too

repeatable = settings(derandomize=True, deadline=None)

LABELS = ["hosts", "gpus", "dp", "pp", "tp"]


class Mesh(MeshTrait):
    """Nothing but a shape, with Loom's arithmetic."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    @property
    def _shape(self) -> Shape:
        return self.shape

    def _new_with_shape(self, shape: Shape) -> Mesh:
        return Mesh(shape)


class MonarchMesh(monarch_shape.MeshTrait):
    """Nothing but a shape, with Monarch's arithmetic."""

    def __init__(self, shape: monarch_shape.Shape) -> None:
        self.shape = shape

    @property
    def _ndslice(self) -> Any:
        return self.shape.ndslice

    @property
    def _labels(self) -> tuple[str, ...]:
        return tuple(self.shape.labels)

    def _new_with_shape(self, shape: monarch_shape.Shape) -> MonarchMesh:
        return MonarchMesh(shape)


def both(sizes: dict[str, int]) -> tuple[Mesh, MonarchMesh]:
    theirs = monarch_shape.Shape(list(sizes), monarch_shape.NDSlice.new_row_major(list(sizes.values())))
    return Mesh(Shape.row_major(sizes)), MonarchMesh(theirs)


def outcome(mesh: Any, method: str, *args: Any, **kwargs: Any) -> tuple[Any, Exception | None]:
    """What a method returns, or what it raises."""
    try:
        return getattr(mesh, method)(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001 - whatever Monarch raises is what Loom is compared with
        return None, error


Step = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A method of a mesh and its arguments."""

labels = st.sampled_from(LABELS)
indices = st.integers(-9, 9)
slices = st.builds(slice, st.none() | indices, st.none() | indices, st.none() | st.integers(0, 4))


@st.composite
def a_step(draw: st.DrawFn, sizes: dict[str, int]) -> Step:
    """Something to do with a mesh of these sizes. Most steps fit the mesh and some do not."""
    known = st.sampled_from(list(sizes)) if sizes else labels
    method = draw(st.sampled_from(["slice", "slice", "slice", "split", "flatten", "rename"]))
    if method == "flatten":
        return method, (draw(labels),), {}
    if method == "rename":
        return method, (), draw(st.dictionaries(known | labels, labels, max_size=2))
    if method == "slice":
        return (
            method,
            (),
            draw(st.dictionaries(st.one_of(known, known, known, labels), indices | slices, max_size=3)),
        )
    names = draw(st.lists(labels, max_size=3, unique=True))
    given_sizes = draw(st.dictionaries(st.sampled_from(names) if names else labels, st.integers(1, 8), max_size=3))
    return method, (), {**given_sizes, draw(known): tuple(names)}


@settings(repeatable, max_examples=250)
@given(st.dictionaries(labels, st.integers(1, 8), max_size=4), st.data())
def test_any_chain_of_steps_gives_what_monarch_gives(sizes: dict[str, int], data: st.DataObject) -> None:
    ours, theirs = both(sizes)
    for _ in range(data.draw(st.integers(1, 5), "steps")):
        method, args, kwargs = data.draw(a_step(ours.sizes), "step")
        got, error = outcome(ours, method, *args, **kwargs)
        expected, expected_error = outcome(theirs, method, *args, **kwargs)
        assert (error is None) == (expected_error is None), (error, expected_error)
        if expected_error is not None:
            assert isinstance(error, type(expected_error)), (error, expected_error)
            assert says_it_too(error, expected_error), (error, expected_error)
            continue
        ours, theirs = got, expected
        assert list(ours.sizes.items()) == list(theirs.sizes.items())
        assert ours.shape.ranks() == list(theirs.shape.ranks())
        assert ours.shape.offset == theirs.shape.ndslice.offset
        assert list(ours.shape.strides) == list(theirs.shape.ndslice.strides)
        assert len(ours) == len(theirs)
        assert repr(ours.extent) == repr(theirs.extent)


def test_a_slice_that_is_not_regular_is_refused_in_monarchs_words() -> None:
    ours, theirs = both({"tp": 3, "gpus": 1})
    errors = [outcome(mesh, "slice", gpus=slice(None, None, 2))[1] for mesh in (ours, theirs)]
    assert "stride 2 must be larger" in str(errors[0])
    assert "stride 2 must be larger" in str(errors[1])


@repeatable
@given(
    st.dictionaries(labels, st.integers(1, 8), max_size=4),
    st.none() | labels | st.lists(labels, max_size=3).map(tuple),
)
def test_size_gives_what_monarchs_gives(sizes: dict[str, int], dim: Any) -> None:
    ours, theirs = both(sizes)

    size, error = outcome(ours, "size", dim)
    expected, expected_error = outcome(theirs, "size", dim)

    assert size == expected
    assert isinstance(error, type(expected_error))
    assert expected_error is None or "does not have dimension " in str(error)


@repeatable
@given(st.dictionaries(labels, st.integers(1, 8), max_size=4), st.data())
def test_a_point_looks_like_monarchs(sizes: dict[str, int], data: st.DataObject) -> None:
    extent = Extent(list(sizes), list(sizes.values()))
    monarchs_extent = MonarchExtent(list(sizes), list(sizes.values()))
    rank = data.draw(st.integers(0, extent.nelements - 1))

    point, monarchs = Point(rank, extent), MonarchPoint(rank, monarchs_extent)

    assert repr(point) == repr(monarchs)
    assert dict(point) == dict(monarchs)
    assert (point.rank, len(point), list(point)) == (monarchs.rank, len(monarchs), list(monarchs))


@repeatable
@given(st.dictionaries(labels, st.integers(1, 8), max_size=4))
def test_an_extent_looks_like_monarchs(sizes: dict[str, int]) -> None:
    extent, monarchs = (kind(list(sizes), list(sizes.values())) for kind in (Extent, MonarchExtent))

    assert repr(extent) == repr(monarchs)
    assert dict(extent) == dict(monarchs)
    assert extent.nelements == monarchs.nelements


def do_both(ours: Any, theirs: Any, do: Any) -> tuple[Any, Any]:
    """Do the same with Loom's object and Monarch's; both refuse it, with the same class and text, or none does."""
    got, error = attempt(do, ours)
    expected, expected_error = attempt(do, theirs)
    assert (error is None) == (expected_error is None), (error, expected_error)
    if expected_error is not None:
        assert isinstance(error, type(expected_error)), (error, expected_error)
        assert says_it_too(error, expected_error), (error, expected_error)
    return got, expected


def attempt(do: Any, thing: Any) -> tuple[Any, Exception | None]:
    try:
        return do(thing), None
    except Exception as error:  # noqa: BLE001 - whatever Monarch raises is what Loom is compared with
        return None, error


numbers = st.lists(st.integers(1, 6), max_size=3)


@settings(repeatable, max_examples=300)
@given(st.integers(0, 5), numbers, numbers, st.integers(0, 30), st.lists(st.integers(0, 1), max_size=3))
def test_a_slice_of_ranks_does_what_monarchs_does(
    offset: int, sizes: list[int], strides: list[int], number: int, coordinates: list[int]
) -> None:
    kinds = (NDSlice, monarch_shape.NDSlice)
    ours, theirs = do_both(*kinds, lambda kind: kind(offset=offset, sizes=sizes, strides=strides))
    if theirs is None:
        ours, theirs = (kind.new_row_major(sizes) for kind in kinds)

    assert repr(ours) == repr(theirs)
    assert list(ours) == list(theirs)
    assert (len(ours), ours.ndim, ours.offset) == (len(theirs), theirs.ndim, theirs.offset)
    for do in (
        lambda ranks: ranks[number],
        lambda ranks: ranks[1:number],
        lambda ranks: ranks.get(number),
        lambda ranks: ranks.index(number),
        lambda ranks: ranks.coordinates(number),
    ):
        got, expected = do_both(ours, theirs, do)
        assert got == expected
    if all(position < size for position, size in zip(coordinates, sizes, strict=False)):
        got, expected = do_both(ours, theirs, lambda ranks: ranks.nditem(coordinates))
        assert got == expected
    assert ours == NDSlice(offset=ours.offset, sizes=ours.sizes, strides=ours.strides)
    assert pickle.loads(pickle.dumps(ours)) == ours


@settings(repeatable, max_examples=200)
@given(st.dictionaries(labels, st.integers(1, 5), max_size=3), labels, st.integers(0, 6), slices)
def test_a_shape_does_what_monarchs_does(sizes: dict[str, int], label: str, number: int, part: slice) -> None:
    ours = Shape(list(sizes), NDSlice.new_row_major(list(sizes.values())))
    theirs = monarch_shape.Shape(list(sizes), monarch_shape.NDSlice.new_row_major(list(sizes.values())))

    assert (str(ours), repr(ours), ours.labels) == (str(theirs), repr(theirs), theirs.labels)
    assert (ours.ranks(), len(ours)) == (theirs.ranks(), len(theirs))
    assert dict(ours.extent) == dict(theirs.extent)
    assert ours == Shape.row_major(sizes)
    assert pickle.loads(pickle.dumps(ours)) == ours
    steps = [
        lambda shape: shape.at(label, number),
        lambda shape: shape.index(**{label: number}),
        lambda shape: shape.coordinates(number),
    ]
    # Monarch reads a negative bound as an unsigned one, and a step of 0 as 1.
    if min(part.start or 0, part.stop or 0) >= 0 and part.step != 0:
        steps.append(lambda shape: shape.select(label, part))
    for do in steps:
        got, expected = do_both(ours, theirs, do)
        assert repr(got) == repr(expected)


def test_a_shape_of_other_labels_than_dimensions_is_refused_with_monarchs_text() -> None:
    with pytest.raises(ValueError, match="label slice dimension mismatch: 1 != 2"):
        Shape(["a"], NDSlice.new_row_major([2, 3]))
    with pytest.raises(TypeError, match="a shape is made of labels and an NDSlice"):
        Shape(["a"], [2])  # type: ignore[arg-type]
    assert str(Shape.unity()) == "{}"
    assert Shape.unity().ranks() == [0]


def test_a_coordinate_outside_its_dimension_is_refused() -> None:
    with pytest.raises(IndexError, match=r"index out of range: \[2, 1\] in a slice of sizes \[2, 2\]"):
        NDSlice.new_row_major([2, 2]).nditem([2, 1])


@pytest.mark.parametrize(
    ("do", "text"),
    [
        (lambda extent, point: extent(["a"], [1, 2]), "label/sizes dimension mismatch: 1 != 2"),
        (lambda extent, point: extent(["a"], [2])["z"], "Dimension 'z' not found"),
        (
            lambda extent, point: repr(point(5, extent(["a"], [2]))),
            "out of range: total ranks 2; does not contain rank 5",
        ),
        (lambda extent, point: point(1, extent(["a"], [2]))["z"], "Dimension 'z' not found"),
        (lambda extent, point: point(1, extent(["a"], [2])).size("z"), "Dimension 'z' not found"),
    ],
)
def test_a_point_and_an_extent_refuse_with_monarchs_texts(do: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        do(monarch.actor.Extent, monarch.actor.Point)
    with pytest.raises(ValueError, match=re.escape(text)):
        do(Extent, Point)


def mesh(**sizes: int) -> Mesh:
    return Mesh(Shape.row_major(sizes))


def test_a_slice_of_a_slice_selects_from_what_was_selected() -> None:
    part = mesh(hosts=4, gpus=8).slice(hosts=slice(1, 4)).slice(hosts=1, gpus=slice(0, 8, 3))

    assert part.sizes == {"gpus": 3}
    assert part.shape.ranks() == [16, 19, 22]


def test_a_point_equals_the_mapping_of_its_coordinates() -> None:
    point = Point(5, Extent(["hosts", "gpus"], [2, 4]))

    assert point == {"hosts": 1, "gpus": 1}
    assert point == Point(5, Extent(["hosts", "gpus"], [2, 4]))
    assert point != Point(5, Extent(["hosts", "gpus"], [4, 2]))
    assert {point: "value"}[Point(5, Extent(["hosts", "gpus"], [2, 4]))] == "value"


def test_a_coordinate_that_a_point_does_not_have_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="pp"):
        Point(5, Extent(["hosts", "gpus"], [2, 4]))["pp"]


@pytest.mark.parametrize(
    ("selection", "text"),
    [
        ({"gpus": 8}, r"index out of range: gpus=8, but gpus has 8 \(0 to 7\)"),
        ({"gpus": -1}, "index out of range: gpus=-1"),
        ({"gpus": slice(8, None)}, "out of range 8:8:1 for dimension gpus of size 8: gpus=8:: selects nothing"),
        ({"gpus": slice(5, 2)}, "empty range 5:2:1: gpus=5:2: selects nothing; gpus has 8"),
        ({"gpus": slice(None, None, -1)}, "gpus=::-1: a step must be at least 1"),
    ],
)
def test_a_slice_out_of_range_says_what_there_is(selection: dict[str, Any], text: str) -> None:
    with pytest.raises(SliceOutOfRange, match=text):
        mesh(hosts=2, gpus=8).slice(**selection)


@pytest.mark.parametrize("selector", ["1", 1.0, [0, 1]])
def test_a_selector_that_is_no_index_is_refused(selector: Any) -> None:
    with pytest.raises(WrongArguments, match="select with an int or a slice"):
        mesh(hosts=2, gpus=8).slice(gpus=selector)


def test_a_dimension_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(NoSuchDimension, match="have dimension labeled 'gpu'; its dimensions: hosts, gpus"):
        mesh(hosts=2, gpus=8).slice(gpu=0)


def test_a_slice_that_leaves_no_regular_mesh_is_refused_at_once() -> None:
    with pytest.raises(SliceOutOfRange, match=r"nonrectangular shape: gpus=::2 leaves a mesh .*; gpus has 3"):
        mesh(hosts=2, gpus=3).slice(gpus=slice(None, None, 2))


def test_the_same_slice_is_taken_from_one_row() -> None:
    assert mesh(hosts=2, gpus=3).slice(hosts=1).slice(gpus=slice(None, None, 2)).shape.ranks() == [3, 5]


@pytest.mark.parametrize("size", [0, -2])
def test_a_split_into_less_than_one_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="gpus"):
        mesh(hosts=2, gpus=8).split(gpus=("pp", "tp"), tp=size)
