"""Payloads: data, what of it travels out of band, and meshes."""

from __future__ import annotations

import datetime
import fractions
import gc
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loom.errors import NoSuchMesh, SessionClosed, UnpicklableError
from loom.wire.codec import Decoder, Encoder, Made, Reference, dumps, loads, plain_payload
from loom.wire.messages import Buffer

LARGE = 64 << 10
"""Bytes that are worth a part of their own."""

laptop = Encoder(ship_project=True)


def received(parts: list[Buffer]) -> list[Buffer]:
    """The parts as they come from a socket: views of bytes that nobody may change."""
    return [memoryview(bytes(part)) for part in parts]


# -- data ---------------------------------------------------------------------------------------------------

plain_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=20) | st.lists(inner, max_size=5).map(tuple) | st.dictionaries(st.text(), inner)
    ),
    max_leaves=40,
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(plain_data)
def test_plain_data_is_read_back(data: Any) -> None:
    parts = dumps(data)

    assert len(parts) == 1
    assert loads(received(parts)) == data


def test_a_list_that_contains_itself_is_read_back() -> None:
    knot: list[Any] = [1]
    knot.append(knot)

    read = loads(dumps(knot))

    assert read[1] is read


def test_data_nested_deeply_is_read_back() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]

    assert loads(dumps(deep)) == deep


def test_what_is_given_twice_arrives_as_one_object() -> None:
    state = [object]

    first, second = loads(dumps((state, state)))

    assert first is second


@pytest.mark.parametrize("data", [bytes(LARGE), bytearray(LARGE)])
def test_large_byte_strings_travel_out_of_band(data: bytes | bytearray) -> None:
    pickled, part = dumps(data)

    assert memoryview(part).obj is data
    assert len(pickled) < 200
    read = loads(received([pickled, part]))
    assert (type(read), read) == (type(data), data)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda data: ((data,), {}),
        lambda data: ((1, (data,)), {}),
        lambda data: [data],
        lambda data: {"image": data},
    ],
)
def test_large_byte_strings_among_arguments_travel_out_of_band(wrap: Callable[[Any], Any]) -> None:
    data = bytes(LARGE)

    parts = dumps(wrap(data))

    assert [len(part) for part in parts[1:]] == [LARGE]
    assert loads(received(parts)) == wrap(data)


class Samples:
    """Pickles its bytes as a buffer, as types of native code do."""

    def __init__(self, data: Buffer) -> None:
        self.data = bytes(data)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Samples, (pickle.PickleBuffer(self.data),)


@pytest.mark.parametrize(("size", "parts"), [(LARGE, 2), (5, 1)])
def test_a_large_buffer_of_a_users_type_travels_out_of_band(size: int, parts: int) -> None:
    payload = dumps({"samples": Samples(b"x" * size)})

    assert len(payload) == parts
    assert loads(received(payload))["samples"].data == b"x" * size


def test_a_mapping_of_many_keys_is_read_back() -> None:
    many = {f"metric {number}": float(number) for number in range(1000)}

    assert loads(received(dumps(many))) == many


def test_small_byte_strings_stay_in_the_pickle() -> None:
    assert len(dumps((bytes(100), bytearray(100)))) == 1


def test_an_array_is_not_copied_into_the_pickle() -> None:
    array = numpy.arange(LARGE, dtype=numpy.float64)

    pickled, part = dumps({"weights": array})

    assert len(pickled) < 1000
    assert numpy.shares_memory(numpy.frombuffer(part), array)


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(10),
        numpy.arange(LARGE).reshape(2, -1),
        numpy.asfortranarray(numpy.arange(LARGE).reshape(4, -1)),
        numpy.arange(LARGE)[::3],
        numpy.array([1, "two", None], dtype=object),
        numpy.array([], dtype=numpy.float32),
        numpy.array(3.5),
    ],
    ids=["small", "matrix", "fortran", "strided", "objects", "empty", "scalar"],
)
def test_an_array_can_be_changed_where_it_arrives(array: numpy.ndarray[Any, Any]) -> None:
    read = loads(received(dumps(array)))

    assert read.dtype == array.dtype
    numpy.testing.assert_array_equal(read, array)
    assert read.flags.writeable
    read[...] = 0


def test_an_array_over_memory_that_may_be_changed_is_not_copied() -> None:
    pickled, part = dumps(numpy.zeros(LARGE))
    memory = bytearray(part)

    read = loads([pickled, memory])

    assert numpy.shares_memory(read, numpy.frombuffer(memory))


@pytest.mark.parametrize("parts", [[], [b""], [b"not a pickle"], [b"\x80\x05\x97."]])
def test_what_is_no_payload_is_refused(parts: list[Buffer]) -> None:
    with pytest.raises(UnpicklableError, match="cannot be unpickled on this side"):
        loads(parts)


# -- meshes -------------------------------------------------------------------------------------------------


class Mesh:
    """Has the protocol by which the encoder recognises a proxy of a mesh, and nothing else of one."""

    def __init__(self, ident: int, session: object = None) -> None:
        self.ident = ident
        self.session = session

    def __loom_reference__(self, session: object) -> int:
        if session is not self.session:
            raise SessionClosed("this mesh belongs to another session")
        return self.ident


def test_a_mesh_travels_as_a_reference() -> None:
    assert loads(dumps(({"peers": [Mesh(4)]}, Mesh(5)))) == ({"peers": [Reference(4)]}, Reference(5))


def test_a_decoder_puts_the_meshes_in_place_of_references() -> None:
    meshes = {4: "trainers", 5: "readers"}

    read = Decoder(meshes.__getitem__).loads(dumps(({"peers": [Mesh(4)]}, Mesh(5))))

    assert read == ({"peers": ["trainers"]}, "readers")


def test_what_is_swapped_arrives_as_the_replacement() -> None:
    made = Made("values", -1, "losses", (("rank",), 0, (2,), (1,)), values=[0.5, 0.25])
    encoder = Encoder(swaps={datetime.date: lambda date: made, fractions.Fraction: lambda half: (float, (0.5,))})

    assert loads(encoder.dumps([datetime.date(2026, 1, 1), fractions.Fraction(1, 2)])) == [made, 0.5]


def test_a_mesh_may_be_an_attribute_of_what_travels() -> None:
    holder = fractions.Fraction(1, 2)
    namespace = {"holder": holder, "mesh": Mesh(4)}

    assert Decoder({4: "trainers"}.__getitem__).loads(laptop.dumps(namespace)) == {**namespace, "mesh": "trainers"}


def test_an_error_about_a_mesh_surfaces_as_it_is() -> None:
    def resolve(ident: int) -> Any:
        raise NoSuchMesh(f"this session has no mesh with the id {ident}")

    with pytest.raises(NoSuchMesh, match="no mesh with the id 4"):
        Decoder(resolve).loads(dumps([Mesh(4)]))


def test_a_mesh_of_another_session_is_refused_with_its_own_error() -> None:
    with pytest.raises(SessionClosed, match="another session"):
        Encoder(session="mine").dumps([Mesh(4, session="theirs")])


def test_a_resolver_is_forgotten_after_its_payload() -> None:
    Decoder({4: "trainers"}.__getitem__).loads(dumps([Mesh(4)]))

    assert loads(dumps([Mesh(4)])) == [Reference(4)]


class LoadsInside:
    """Unpickles another payload while it is unpickled itself."""

    def __reduce__(self) -> Any:
        return loads, ([bytes(part) for part in dumps("inner")],)


def test_a_payload_unpickled_inside_another_leaves_its_resolver() -> None:
    read = Decoder({4: "trainers"}.__getitem__).loads(dumps([LoadsInside(), Mesh(4)]))

    assert read == ["inner", "trainers"]


@pytest.mark.parametrize("value", [None, 5, "text", [1, (2.5, {"a": b"b"})], list(range(100))])
def test_a_plain_payload_is_passed_on_as_it_is(value: Any) -> None:
    pickled = plain_payload(dumps(value))
    assert pickled is not None
    assert pickle.loads(pickled) == value


@pytest.mark.parametrize("value", [Path("/a"), [1, {"a": Path}], len, "\N{GREEK CAPITAL LETTER GAMMA}", {1, 0x93}])
def test_a_payload_that_may_name_something_is_not_plain(value: Any) -> None:
    assert plain_payload(dumps(value)) is None


def test_a_payload_of_several_parts_is_not_plain() -> None:
    assert plain_payload(dumps(b"x" * (1 << 20))) is None


def test_a_payload_in_a_cycle_of_references_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of a BytesIO in one crashes Python 3.12.1, and is an error that cannot be raised in 3.13."""
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    parts = laptop.dumps({1, 2, fractions.Fraction(1, 3)})
    views = [part for part in parts if isinstance(part, memoryview)]
    cycle: list[object] = [parts]
    cycle.append(cycle)
    del cycle, parts

    gc.collect()

    assert not raised
    assert not views, "Python 3.10 and 3.11 do not mind them, later ones do"
