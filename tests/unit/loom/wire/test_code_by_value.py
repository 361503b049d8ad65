"""Payloads with code: what travels by value and what by reference."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy
import pytest

import loom.actor
from loom.actor import endpoint
from loom.wire.codec import Decoder, Encoder, loads, travels_by_value
from loom.wire.frames import encode_frame
from loom.wire.messages import Buffer, Kind, Message

laptop = Encoder(ship_project=True)

GREETING = "hello"


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
        (__name__, True),
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
