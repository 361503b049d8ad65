"""The names of `loom` in processes of the cluster, and the test for being one.

In the cluster a program holds Monarch's own objects, not Loom's proxies. So that its code is the same on both
sides, Loom's classes hold for Monarch's of the same names:

- ``isinstance(mesh, loom.ProcMesh)`` is true of a Monarch proc mesh (`Counterpart`);
- ``loom.Point(…)`` makes Monarch's point in the cluster (`MonarchsInCluster`), ``loom.Shape(…)`` its shape;
- ``except loom.SupervisionError`` catches Monarch's in every process that runs Monarch (`be_base_of`), and
  ``except loom.WaitTimeout`` what its futures raise when the time is up (`time_out_with`).
"""

from __future__ import annotations

import functools
import importlib
import sys
from abc import ABCMeta
from typing import Any


def in_cluster() -> bool:
    """Return whether this process is a driver or an actor's, rather than a program that holds a job."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return getattr(spec, "name", "").startswith(("loom_gateway.driver", "monarch._src.actor."))


def monarchs() -> Any:
    """Return the module ``monarch.actor``. In the cluster only."""
    return importlib.import_module("monarch.actor")


def is_monarchs(thing: object) -> bool:
    """Return whether an object is of one of Monarch's classes."""
    return type(thing).__module__.startswith("monarch.")


class Counterpart(ABCMeta):
    """A metaclass that makes ``isinstance`` and ``issubclass`` hold for Monarch's class of the same name.

    The suffix ``Proxy`` of a name does not count.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or _is_monarchs(type(instance), cls.__name__)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return super().__subclasscheck__(subclass) or _is_monarchs(subclass, cls.__name__)


class MonarchsInCluster(Counterpart):
    """A metaclass of classes that a program makes objects of: in the cluster these are Monarch's own."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if in_cluster():
            home = monarchs() if hasattr(monarchs(), cls.__name__) else importlib.import_module("monarch")
            return getattr(home, cls.__name__)(*args, **kwargs)
        return super().__call__(*args, **kwargs)


_OTHER_NAMES = {"ActorEndpoint": "Endpoint", "Slice": "NDSlice"}
"""Public names of Monarch's classes that have another name of their own."""


def _is_monarchs(cls: type, name: str) -> bool:
    name = name.removesuffix("Proxy")
    return any(
        base.__module__.startswith("monarch.") and _OTHER_NAMES.get(base.__name__, base.__name__) == name
        for base in cls.__mro__
    )


def be_base_of(monarchs_class: type[Exception], error: type[Exception]) -> None:
    """Make an exception class of Loom's the base of Monarch's class of the same name, in this process.

    An ``except`` clause asks for real base classes: neither a metaclass nor ``register`` can answer for it. What
    Monarch raises is still of its own class, and is pickled as that.

    Raises:
        TypeError: objects of the two classes differ in layout. ``error`` and its bases must have empty
            ``__slots__`` and, besides these, only the bases of Monarch's class.
    """
    if not issubclass(monarchs_class, error):
        monarchs_class.__reduce__ = Exception.__reduce__  # type: ignore[method-assign]
        monarchs_class.__bases__ = (error,)


def time_out_with(error: type[TimeoutError]) -> None:
    """Make ``get(timeout)`` of Monarch's futures raise this class, in this process; Monarch raises its base."""
    future = monarchs().Future
    monarchs_get = future.get
    if hasattr(monarchs_get, "__wrapped__"):
        return

    @functools.wraps(monarchs_get)
    def get(self: Any, timeout: float | None = None) -> Any:
        try:
            return monarchs_get(self, timeout)
        except TimeoutError as late:
            if timeout is None or type(late) is not TimeoutError:
                raise
            raise error(str(late) or no_answer_within(timeout)) from None

    future.get = get


def no_answer_within(timeout: float) -> str:
    """Return the text of the error that a wait for an answer ends with after ``timeout`` seconds."""
    return f"no answer within {timeout:g} s; the operation goes on, and can be waited for again"
