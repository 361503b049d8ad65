"""How code of a synced folder is pickled: by its name, as far as it has one."""

from __future__ import annotations

import pickletools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

from loom.wire.codec import Decoder, Encoder

MODULE = """
import enum

class Thing:
    class Inner: pass
    def method(self): return 1

class Colour(enum.Enum):
    RED = 1

def function(): return 2

def make():
    def inner(): return function()
    return inner

nameless = lambda: 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "by_name_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import by_name_module  # type: ignore[import-not-found]

    yield by_name_module
    if by_name_module.__name__ in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.unregister_pickle_by_value(by_name_module)
    del sys.modules["by_name_module"]


def encoder(by_name: bool) -> Encoder:
    made = Encoder(ship_project=True)
    made.by_name = lambda module, procs: by_name and module == "by_name_module" and procs != 5
    return made


def has_code(obj: Any, encoder: Encoder, procs: int | None = None) -> bool:
    """Whether code travels in the pickle of an object."""
    pickled = bytes(encoder.dumps(obj, procs=procs)[0])
    return any(
        "_builtin_type" in str(arg) or "_make_function" in str(arg) for _, arg, _ in pickletools.genops(pickled)
    )


@pytest.mark.parametrize("path", ["Thing", "Thing.Inner", "Thing.method", "Colour", "function", ""])
def test_what_has_a_name_travels_by_it(module: ModuleType, path: str) -> None:
    obj: Any = module
    for part in filter(None, path.split(".")):
        obj = getattr(obj, part)

    assert not has_code(obj, encoder(by_name=True))
    assert Decoder().loads(encoder(by_name=True).dumps(obj)) is obj


def test_an_instance_goes_with_the_name_of_its_class(module: ModuleType) -> None:
    assert not has_code([module.Thing(), module.Colour.RED], encoder(by_name=True))


@pytest.mark.parametrize("what", ["closure", "lambda"])
def test_what_has_no_name_travels_by_value_and_names_the_rest(module: ModuleType, what: str) -> None:
    obj = module.make() if what == "closure" else module.nameless

    parts = encoder(by_name=True).dumps(obj)

    assert has_code(obj, encoder(by_name=True))
    assert Decoder().loads(parts)() == obj()


def test_a_class_that_its_name_no_longer_gives_travels_by_value(module: ModuleType) -> None:
    older = module.Thing
    module.Thing = type("Thing", (), {"__module__": "by_name_module"})

    assert has_code(older, encoder(by_name=True))


def test_one_session_does_not_decide_for_another(module: ModuleType) -> None:
    for _ in range(2):
        assert has_code(module.Thing, encoder(by_name=False))
        assert not has_code(module.Thing, encoder(by_name=True))


def test_processes_that_do_not_have_the_folder_get_the_code(module: ModuleType) -> None:
    assert has_code(module.Thing, encoder(by_name=True), procs=5)
    assert not has_code(module.Thing, encoder(by_name=True), procs=6)
