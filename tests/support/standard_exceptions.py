"""Every exception class of the standard library, and an instance of each."""

from __future__ import annotations

import importlib
import io
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from typing import Any

_LEFT_OUT = ("antigravity", "this", "idlelib", "lib2to3", "test", "tkinter", "turtle", "turtledemo", "pip")
"""Modules that do something when they are imported, or need a display."""


def standard_exceptions() -> list[type[BaseException]]:
    """Return the classes that can be found by their names, sorted by them. This imports the standard library."""
    _import_all()
    names = {f"{kind.__module__}:{kind.__qualname__}": kind for kind in _subclasses(BaseException)}
    return [kind for name, kind in sorted(names.items()) if _is_standard(kind) and _found(name) is kind]


def _import_all() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for top in sorted(sys.stdlib_module_names - set(_LEFT_OUT)):
            _import(top)
            for found in pkgutil.iter_modules(getattr(sys.modules.get(top), "__path__", ()), f"{top}."):
                if not found.name.endswith("__main__") and "test" not in found.name:
                    _import(found.name)


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except BaseException:  # noqa: BLE001 - it is for another system, or a program
        return


def _subclasses(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = type.__subclasses__(kind)
    for one in below:
        yield from _subclasses(one)


def _is_standard(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names and not kind.__module__.startswith("_")


def _found(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def instance(name: str) -> BaseException:
    """Return an exception of the class of a name, ``module:qualname``, by a constructor that works."""
    _import(name.partition(":")[0])
    kind = _found(name)
    for args in _arguments(name):
        try:
            error = kind(*args)
        except Exception:  # noqa: BLE001 - it takes others
            continue
        assert isinstance(error, BaseException)
        return error
    if make := getattr(kind, "from_exception_data", None):  # pydantic's has no constructor
        made: BaseException = make("why", [{"type": "missing", "loc": ("name", 0), "input": 1}])
    else:
        made = kind.__new__(kind)
    return made


def _arguments(name: str) -> Iterator[tuple[Any, ...]]:
    if name == "urllib.error:HTTPError":
        yield ("http://x.invalid", 404, "Not Found", {"Server": "x"}, io.BytesIO(b"gone"))
    if "Unicode" in name:
        yield ("utf-8", b"\xff", 0, 1, "bad") if "Decode" in name else ("utf-8", "\ud800", 0, 1, "bad")
        yield ("\ud800", 0, 1, "bad")
    if name.endswith("ExceptionGroup"):
        yield ("several", [ValueError("one"), OSError(2, "two")])
    yield ("why",)
    yield (2, "why")
    yield ("one", "two", 3)
    yield ("one", 2, "three", 4)
    yield ("one", 2, "three", 4, None)
    yield ()
