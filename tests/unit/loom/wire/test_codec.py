"""Payloads: what travels by value, what by reference, what out of band, and what is said of what cannot travel."""

from __future__ import annotations

import collections
import datetime
import fractions
import importlib
import importlib.util
import json
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loom.actor
from loom.actor import Actor, endpoint
from loom.errors import NoSuchMesh, PythonVersionMismatch, SessionClosed, UnpicklableError
from loom.wire.codec import Decoder, Encoder, Made, Reference, dumps, loads, plain_payload, travels_by_value
from loom.wire.frames import encode_frame
from loom.wire.handshake import python_version
from loom.wire.messages import Buffer, Kind, Message

LARGE = 64 << 10
"""Bytes that are worth a part of their own."""

OTHER_PYTHON = (python_version()[0], python_version()[1] + 1)

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


# -- code ---------------------------------------------------------------------------------------------------


def in_fresh_python(path: Path, code: str, parts: list[Buffer]) -> str:
    """Run code in a new process that knows none of our modules; ``value`` is what it unpickled."""
    frame = path / "frame"
    frame.write_bytes(b"".join(encode_frame(1, 0, [Message(Kind.RUN, 1, (), parts)])))
    program = """
        import sys
        from loom.wire.codec import loads
        from loom.wire.frames import decode_frame
        value = loads(decode_frame(open(sys.argv[1], "rb").read()).messages[0].parts)
    """
    return run(path, textwrap.dedent(program) + textwrap.dedent(code), str(frame))


def run(folder: Path, program: str, *arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, cwd=folder
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package in the user's own folder, which uses a module beside it."""
    package = tmp_path / "project" / "orchard"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "baskets.py").write_text("LIMIT = 3\n\ndef fits(count):\n    return count <= LIMIT\n")
    (package / "trees.py").write_text(
        textwrap.dedent("""
            from orchard import baskets

            class Tree:
                def __init__(self, apples):
                    self.apples = apples

                def picked(self, count):
                    return self.apples - count if baskets.fits(count) else None

            def plant(apples):
                return Tree(apples)
        """)
    )
    before = set(cloudpickle.list_registry_pickle_by_value())
    monkeypatch.syspath_prepend(package.parent)
    try:
        yield importlib.import_module("orchard.trees")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "orchard"]:
            del sys.modules[name]
        for name in cloudpickle.list_registry_pickle_by_value() - before:
            cloudpickle.cloudpickle._PICKLE_BY_VALUE_MODULES.discard(name)


def test_an_object_of_a_project_arrives_where_the_project_is_not(project: ModuleType, tmp_path: Path) -> None:
    parts = laptop.dumps(project.Tree(5))

    assert in_fresh_python(tmp_path, "print(value.picked(2), value.picked(4))", parts) == "3 None"


def test_a_function_of_a_project_arrives_where_the_project_is_not(project: ModuleType, tmp_path: Path) -> None:
    parts = laptop.dumps(project.plant)

    assert in_fresh_python(tmp_path, "print(type(value(7)).__name__, value(7).picked(1))", parts) == "Tree 6"


def test_a_project_by_reference_is_missing_on_the_other_side(project: ModuleType, tmp_path: Path) -> None:
    parts = Encoder(ship_project=False).dumps(project.Tree(5))

    with pytest.raises(AssertionError, match=r"UnpicklableError: .*No module named 'orchard'"):
        in_fresh_python(tmp_path, "", parts)


def test_a_project_that_the_receiver_has_travels_to_it_by_name(project: ModuleType) -> None:
    encoder = Encoder(ship_project=True)
    encoder.by_name = lambda module, procs: module == project.__name__ and procs == 3
    code = {"module": project, "class": project.Tree, "function": project.plant}

    (by_name,) = encoder.dumps(code, procs=3)
    (by_value,) = encoder.dumps(code, procs=4)

    assert len(by_name) < 300 < len(by_value)
    assert loads([by_name]) == code


def test_code_that_names_no_module_travels_by_value() -> None:
    nameless = eval("lambda number: 2 * number", {})
    nameless.__module__ = None

    assert loads(laptop.dumps(nameless))(4) == 8


PROGRAM = """
STEP = 2

class Counter:
    start = 10
    def add(self, times):
        return self.start + double(times) * STEP

def double(number):
    return 2 * number

def write(frame):
    from loom.wire.codec import Encoder
    from loom.wire.frames import encode_frame
    from loom.wire.messages import Kind, Message

    parts = Encoder(ship_project=True).dumps((Counter, double))
    with open(frame, "wb") as file:
        file.write(b"".join(encode_frame(1, 0, [Message(Kind.RUN, 1, (), parts)])))
"""


@pytest.mark.parametrize("has_a_file", [True, False], ids=["script", "notebook"])
def test_what_the_main_module_defines_travels_by_value(has_a_file: bool, tmp_path: Path) -> None:
    script = PROGRAM + "\nimport sys\nwrite(sys.argv[1])\n"
    (tmp_path / "script.py").write_text(script)
    start = [str(tmp_path / "script.py")] if has_a_file else ["-c", script]
    frame = tmp_path / "frame_of_main"
    subprocess.run([sys.executable, *start, str(frame)], check=True, timeout=60)

    read = run(
        tmp_path,
        "import sys; from loom.wire.codec import loads; from loom.wire.frames import decode_frame\n"
        "cls, function = loads(decode_frame(open(sys.argv[1], 'rb').read()).messages[0].parts)\n"
        "print(cls().add(3), function(4), cls.__module__)",
        str(frame),
    )

    assert read == "22 8 __main__"


@pytest.mark.parametrize(
    "installed", [json.JSONEncoder, json.dumps, numpy.ndarray, numpy.linalg.norm, loom.errors.LoomError, len, numpy]
)
def test_what_is_installed_travels_by_reference(installed: Any) -> None:
    (pickled,) = laptop.dumps([installed])

    assert len(pickled) < 150
    assert loads([pickled]) == [installed]


@pytest.mark.parametrize(
    ("module", "by_value"),
    [
        ("tests.unit.loom.wire.test_codec", True),
        ("json", False),
        ("builtins", False),
        ("numpy.linalg", False),
        ("loom.wire.codec", False),
        ("no.such.module", False),
    ],
)
def test_only_modules_of_the_users_project_travel_by_value(module: str, by_value: bool) -> None:
    assert travels_by_value(module) is by_value


# -- an actor class of a laptop without Monarch -------------------------------------------------------------


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`loom.actor` as it is where torchmonarch is not installed."""
    monkeypatch.setitem(sys.modules, "monarch", None)
    spec = importlib.util.spec_from_file_location("loom.actor", loom.actor.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_stand_in_endpoint_becomes_monarchs(stand_ins: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as on_the_laptop:
        on_the_laptop.setitem(sys.modules, "loom.actor", stand_ins)

        class Counter(stand_ins.Actor):  # type: ignore[name-defined, misc]
            @stand_ins.endpoint  # type: ignore[untyped-decorator]
            def add(self, k: int) -> int:
                return k + 1

        parts = laptop.dumps(vars(Counter)["add"])
        assert type(vars(Counter)["add"]) is stand_ins.EndpointProperty

    read = loads(parts)

    assert type(read) is type(endpoint(lambda self: None))
    assert read._method(None, 1) == 2


def test_code_by_value_keeps_the_name_of_its_file() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def where():\n    return lambda: None", "/home/me/train.py", "exec"), names)

    where = Decoder().loads(Encoder().dumps(names["where"]))

    assert where is not names["where"]
    assert (where.__code__.co_filename, where().__code__.co_filename) == ("/home/me/train.py",) * 2


def test_code_travels_without_monarchs_way_to_its_source() -> None:
    import monarch.actor  # noqa: F401 - changes cloudpickle

    def add(k: int) -> int:
        return k + len(GREETING)

    (pickled,) = laptop.dumps(add)

    assert b"source_loader" not in pickled
    assert loads([pickled])(1) == 1 + len(GREETING)


# -- what cannot travel -------------------------------------------------------------------------------------

GREETING = "hello"
GLOBAL_LOCK = threading.Lock()


class HoldsLock:
    def __init__(self) -> None:
        self.name = "holds"
        self.guard = threading.Lock()


class SharesLock:
    def method(self) -> str:
        return SharesLock.__name__

    guard = threading.Lock()


class LockedParent:
    guard = threading.Lock()


class CallsParent(LockedParent):
    def __init__(self) -> None:
        super().__init__()


Pair = collections.namedtuple("Pair", ["left", "right"])


def uses_global_lock() -> bool:
    return GLOBAL_LOCK.locked()


def uses_global_lock_in_a_comprehension() -> list[bool]:
    return [GLOBAL_LOCK.locked() for _ in range(2)]


def uses_lock_by_default(guard: Any = GLOBAL_LOCK, *, other: int = 0) -> bool:
    return bool(guard.locked())


def closes_over_lock() -> Callable[[], bool]:
    guard = threading.Lock()

    def function() -> bool:
        return guard.locked()

    return function


def actor_whose_endpoint_closes_over_lock() -> type:
    guard = threading.Lock()

    class Guarded(Actor):
        def __init__(self) -> None:
            super().__init__()

        @endpoint
        def enter(self) -> bool:
            return guard.locked()

    return Guarded


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (HoldsLock, "it.guard"),
        (lambda: {"model": {"parts": [1, HoldsLock()]}}, "it['model']['parts'][1].guard"),
        (lambda: Pair(1, {"lock": threading.Lock()}), "it[1]['lock']"),
        (lambda: SharesLock, "it.guard"),
        (lambda: CallsParent, "it.guard"),
        (SharesLock, "it (its class).guard"),
        (lambda: closes_over_lock(), "it (its closure's guard)"),
        (lambda: uses_global_lock, "it (its global GLOBAL_LOCK)"),
        (lambda: uses_global_lock_in_a_comprehension, "it (its global GLOBAL_LOCK)"),
        (lambda: uses_lock_by_default, "it (its default"),
        (lambda: actor_whose_endpoint_closes_over_lock(), "it.enter (its closure's guard)"),
        (lambda: (actor_whose_endpoint_closes_over_lock(), (), {}), "it[0].enter (its closure's guard)"),
    ],
    ids=[
        "instance attribute",
        "nested dict",
        "named tuple",
        "class attribute",
        "inherited class attribute",
        "class attribute of an instance",
        "closure variable",
        "global of a function",
        "global of a comprehension",
        "default",
        "closure of an endpoint",
        "closure of an endpoint among arguments",
    ],
)
def test_an_error_names_what_cannot_be_pickled(make: Callable[[], Any], path: str) -> None:
    with pytest.raises(UnpicklableError) as caught:
        laptop.dumps(make(), "it")

    text = str(caught.value)
    assert text.startswith(path), text
    assert "cannot be pickled: it is a _thread.lock (cannot pickle '_thread.lock' object)" in text
    assert "Make it inside the actor" in text


def test_an_error_about_a_ring_of_objects_names_the_attribute() -> None:
    first, second = HoldsLock(), HoldsLock()
    del first.guard
    first.other, second.other = second, first  # type: ignore[attr-defined]

    with pytest.raises(UnpicklableError, match=r"^it\.other\.guard cannot be pickled"):
        laptop.dumps(first, "it")


def test_an_error_names_the_module_that_is_missing_here(tmp_path: Path) -> None:
    module = ModuleType("gone_soon")
    exec("class Thing: pass", module.__dict__)
    sys.modules["gone_soon"] = module
    try:
        parts = dumps(module.Thing())
    finally:
        del sys.modules["gone_soon"]

    with pytest.raises(UnpicklableError, match=r"the result cannot be unpickled on this side: .*gone_soon"):
        Decoder().loads(parts, "the result")


@pytest.mark.parametrize("parts", [[], [b""], [b"not a pickle"], [b"\x80\x05\x97."]])
def test_what_is_no_payload_is_refused(parts: list[Buffer]) -> None:
    with pytest.raises(UnpicklableError, match="cannot be unpickled on this side"):
        loads(parts)


# -- another version of Python on the other side ------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [HoldsLock, SharesLock, uses_global_lock, lambda: 1, actor_whose_endpoint_closes_over_lock()],
    ids=["class", "class of a project", "function", "lambda", "actor"],
)
def test_code_by_value_is_refused_if_the_peers_python_differs(code: Any) -> None:
    with pytest.raises(PythonVersionMismatch) as caught:
        Encoder(ship_project=True, peer_python=OTHER_PYTHON).dumps((code, 1))

    text = str(caught.value)
    assert f"tests.unit.loom.wire.test_codec.{code.__qualname__}" in text
    assert f"this is Python {python_version()[0]}.{python_version()[1]}" in text
    assert f"the cluster runs Python {OTHER_PYTHON[0]}.{OTHER_PYTHON[1]}" in text


@pytest.mark.parametrize(
    "data",
    [
        {"rate": [0.1, 1, None], "name": "run"},
        bytes(LARGE),
        fractions.Fraction(1, 3),
        datetime.date(2026, 1, 31),
        json.JSONEncoder,
        numpy.linalg.norm,
        collections.OrderedDict(a=1),
        Reference(3),
    ],
)
def test_data_and_installed_code_travel_even_if_the_peers_python_differs(data: Any) -> None:
    assert loads(Encoder(ship_project=True, peer_python=OTHER_PYTHON).dumps(data)) == data


def test_code_by_value_travels_if_the_peers_python_is_the_same() -> None:
    encoder = Encoder(ship_project=True, peer_python=list(python_version()))

    assert loads(encoder.dumps(lambda: 41 + 1))() == 42


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
