"""The part of an object that cannot be pickled, and the path to it, for `UnpicklableError`.

The search is bounded in time, visits each object once, and calls no code of the user's classes but the
``__reduce_ex__`` of objects without attributes.
"""

from __future__ import annotations

import functools
import pickle
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from cloudpickle.cloudpickle import _extract_code_globals

from loom.errors import UnpicklableError

SECONDS = 2.0
"""Time for the search, besides the last pickling of a part."""

MOST_TRIALS = 16
"""Parts that are pickled alone to find the one at fault."""

KEPT = 256
"""Parts that a pickler keeps for the search, of those that it came to last."""

NEAR = 5000
"""Parts to look at on the way from an object that the pickler came to last."""

DEEP = 50
"""Objects inside one another from which on they count as the reason why pickle came to no end."""

_BARE = (dict, list, tuple, set, frozenset)
"""Containers without attributes, of which there may be hundred thousands."""

_LEAVES = (type(None), bool, int, float, complex, str, bytes, bytearray)


def explain(
    obj: Any,
    what: str,
    error: Exception,
    last: Iterable[Any],
    pickled: Callable[[Any], object],
    own: Callable[[str], bool],
) -> UnpicklableError:
    """Return the error for an object that cannot be pickled, which names the part at fault.

    Args:
        what: names the object.
        error: the error of pickling it.
        last: the parts that the pickler has come to before the error, the last one first.
        pickled: pickles a part.
        own: returns whether the code of a module travels by value.
    """
    last = list(last)
    if _is_too_deep(error):
        return _too_deep(what, nesting(obj, last, own))
    for part in last[:MOST_TRIALS]:
        cause = _failure(part, pickled)
        if cause is not None and not _is_too_deep(cause):
            path = _path(obj, part, last, own)
            return _error(f"a part of {what}" if path is None else what + path, part, cause)
    return _error(what, obj, error)


def _error(path: str, part: Any, cause: Exception) -> UnpicklableError:
    kind = f"{type(part).__module__}.{type(part).__qualname__}"
    return UnpicklableError(
        f"{path} cannot be pickled: it is a {kind.removeprefix('builtins.')} ({_text(cause)}). Make it inside the "
        f"actor, in __init__ or an endpoint, instead of sending it; or leave it out with __getstate__."
    )


def _text(error: Exception) -> str:
    try:
        said = str(error)[:1000]
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything
        return type(error).__name__
    return said if type(error) in (TypeError, pickle.PicklingError) else f"{type(error).__name__}: {said}"


def _is_too_deep(error: BaseException | None) -> bool:
    return isinstance(error, RecursionError) or isinstance(getattr(error, "__cause__", None), RecursionError)


def nesting(obj: Any, last: list[Any], own: Callable[[str], bool]) -> str:
    """Return how an object is nested too deeply, by the kinds of its containers; see `explain`."""
    nested = _Paths(obj, own).up(DEEP, time.monotonic() + SECONDS)[:MOST_TRIALS] or last[:MOST_TRIALS]
    kinds = list(dict.fromkeys(f"{type(part).__module__}.{type(part).__qualname__}" for part in nested))[:3]
    inside = " inside ".join(kind.removeprefix("builtins.") for kind in [*kinds, *kinds[:1]])
    return f"nested too deeply, as {inside or 'objects inside one another'}"


def _too_deep(what: str, nested: str) -> UnpicklableError:
    return UnpicklableError(
        f"{what} cannot be pickled: it is {nested}; pickle follows some hundreds of them. Send them in a list, or "
        f"leave the link to the next one out with __getstate__."
    )


def _failure(part: Any, pickled: Callable[[Any], object]) -> Exception | None:
    try:
        pickled(part)
    except Exception as error:  # noqa: BLE001 - the pickling that failed for the whole, now of a part
        return error
    return None


def _path(root: Any, part: Any, last: list[Any], own: Callable[[str], bool]) -> str | None:
    """Return the path from an object to a part; None if it is not found in time.

    The pickler has come to the part from one of those before it, so the search goes on from the first of these that
    it finds.
    """
    until = time.monotonic() + SECONDS
    paths = _Paths(root, own)
    wanted = {id(found): found for found in last}
    tried: set[int] = set()
    while time.monotonic() < until:
        for ident in [ident for ident in wanted if ident not in tried and paths.knows(ident)]:
            tried.add(ident)
            near = _Paths(wanted[ident], own)
            while not near.knows(id(part)) and near.size < NEAR and near.visit_next():
                pass
            if near.knows(id(part)):
                return paths.to(ident) + near.to(id(part))
        if not paths.visit_next():
            return None
    return None


_End = str | tuple[Any]
"""The end of a path: a text, or a key, which is only shown if it is asked for."""


class _Paths:
    """The shortest paths from an object to its parts, as far as they were visited."""

    def __init__(self, root: Any, own: Callable[[str], bool]) -> None:
        self._own = own
        self._root = root
        self._from: dict[int, tuple[int, _End]] = {}
        self._alive: list[Any] = [root]  # so that no id is given again
        self._visited = 0

    @property
    def size(self) -> int:
        return len(self._alive)

    def knows(self, ident: int) -> bool:
        return ident in self._from or ident == id(self._root)

    def to(self, ident: int) -> str:
        path = ""
        while ident != id(self._root):
            ident, name = self._from[ident]
            path = (name if isinstance(name, str) else f"[{_shown(name[0])}]") + path
        return path

    def up(self, depth: int, until: float) -> list[Any]:
        """Return at least so many objects inside one another, the innermost first; none if there are fewer."""
        for _ in range(depth):
            level = self.size
            while self._visited < level:
                if time.monotonic() > until or not self.visit_next():
                    return []
            if self.size == level:
                return []
        alive = {id(obj): obj for obj in self._alive}
        way = [self._alive[-1]]
        while way[-1] is not self._root:
            way.append(alive[self._from[id(way[-1])][0]])
        return way

    def visit_next(self) -> bool:
        """Come to the parts of the next object; return False if there is none."""
        if self._visited == len(self._alive):
            return False
        obj = self._alive[self._visited]
        self._visited += 1
        for name, child in _safely(_children(obj, self._own)):
            if type(child) not in _LEAVES and not self.knows(id(child)):
                self._from[id(child)] = id(obj), name
                self._alive.append(child)
        return True


def _safely(children: Iterator[tuple[_End, Any]]) -> Iterator[tuple[_End, Any]]:
    try:
        yield from children
    except Exception:  # noqa: BLE001 - a user's object may raise anything when it is looked at
        return


def _children(obj: Any, own: Callable[[str], bool]) -> Iterator[tuple[_End, Any]]:
    """Yield the parts of an object that pickle comes to, each with the end of its path."""
    if isinstance(obj, dict):
        yield from (((key,), value) for key, value in obj.items())
        yield from ((" (a key)", key) for key in obj)
    elif isinstance(obj, list | tuple | set | frozenset | deque):
        yield from (((index,), value) for index, value in enumerate(obj))
    elif isinstance(obj, type):
        yield from _members(obj, own)
    elif isinstance(obj, types.FunctionType):
        yield from _of_function(obj)
    elif isinstance(obj, types.ModuleType):
        if own(obj.__name__):
            yield from ((f".{name}", value) for name, value in vars(obj).items())
        return
    elif isinstance(obj, types.MethodType):
        yield from ((" (its object)", obj.__self__), ("", obj.__func__))
    elif isinstance(obj, staticmethod | classmethod):
        yield "", obj.__func__
    elif isinstance(obj, property):
        yield from (("", function) for function in (obj.fget, obj.fset, obj.fdel) if function is not None)
    elif isinstance(obj, functools.partial):
        yield from ((" (its function)", obj.func), (" (its arguments)", obj.args), ("", obj.keywords))
    if type(obj) not in _BARE and not isinstance(obj, type | types.FunctionType):
        yield from _attributes(obj)


def _shown(key: Any) -> str:
    try:
        return f"{key!r:.40}"
    except Exception:  # noqa: BLE001 - a user's __repr__ may raise anything
        return f"<{type(key).__name__}>"


def _members(cls: type, own: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    for base in cls.__mro__:
        if base is cls or own(base.__module__) or base.__module__ == "__main__":
            for name, value in vars(base).items():
                if not name.startswith("__weak"):
                    endpoint = getattr(value, "_method", None)
                    yield f".{name}", value if not isinstance(endpoint, types.FunctionType) else endpoint


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f" (its closure's {name})", cell.cell_contents
        except ValueError:  # an empty cell
            continue
    for name in _extract_code_globals(function.__code__):
        if name in function.__globals__:
            yield f" (its global {name})", function.__globals__[name]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from ((f" (its default {_shown(value)})", value) for value in defaults)
    yield from ((f".{name}", value) for name, value in vars(function).items())


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    try:
        names = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        names = {}
    yield from ((f".{name}", value) for name, value in names.items())
    for name, slot in _slots(type(obj)):
        try:
            yield f".{name}", slot.__get__(obj, type(obj))
        except AttributeError:  # an empty slot
            continue
    if not names and type(obj).__module__ != "builtins":
        reduced = obj.__reduce_ex__(4)
        if isinstance(reduced, tuple):
            yield from ((" (its content)", part) for part in reduced[1:3] if part is not None)
    yield " (its class)", type(obj)


def _slots(cls: type) -> list[tuple[str, Any]]:
    members = (item for base in cls.__mro__ for item in vars(base).items())
    return [(name, slot) for name, slot in members if isinstance(slot, types.MemberDescriptorType)]
