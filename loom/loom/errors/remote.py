"""Exceptions that report failures in an actor, in a process or in the driver."""

from __future__ import annotations

import builtins
import functools
from typing import Any

from loom.errors.base import LoomError


class OperationFailed(LoomError, code="operation_failed"):
    """An operation failed in the driver, outside any actor; the text carries the remote traceback.

    If Monarch raised a built-in class there, such as `ValueError`, the exception is of that class too.
    """

    built_in = ""
    """Name of the built-in class, if there is one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return operation_failed, (str(self), self.built_in)


@functools.cache
def _operation_failed_as(name: str) -> type[OperationFailed]:
    base = getattr(builtins, name, None)
    if name not in _AS_MONARCH or base is None:
        return OperationFailed
    return type("OperationFailed", (OperationFailed, base), {"__module__": __name__, "built_in": name})


_AS_MONARCH = frozenset(
    ("ArithmeticError", "AssertionError", "AttributeError", "EOFError", "IndexError", "KeyError", "LookupError")
    + ("NotImplementedError", "OSError", "OverflowError", "RuntimeError", "TimeoutError", "TypeError")
    + ("ValueError", "ZeroDivisionError")
)
"""Built-in classes that take any text. Others need other arguments, or mean something to the interpreter."""


def operation_failed(text: str, like: BaseException | str = "") -> OperationFailed:
    """Return an `OperationFailed` that is also of an exception's built-in class.

    Args:
        like: the exception, or the name of its built-in class.
    """
    if isinstance(like, str):
        return _operation_failed_as(like)(text)
    names = (cls.__name__ for cls in type(like).__mro__ if cls.__module__ == "builtins")
    return _operation_failed_as(next((name for name in names if name in _AS_MONARCH), ""))(text)


class SupervisionError(LoomError, RuntimeError, code="supervision"):
    """Part of a mesh has died (a process, an actor or a host), so that a call on it cannot be answered."""


class RemoteException(LoomError, code="remote_exception"):
    """A stand-in for a remote exception whose class cannot be unpickled here.

    ``type_name`` is the qualified name of the original class, ``text`` what ``str()`` of it gave there, and
    ``unpickle_error`` why the original object could not be rebuilt.
    """

    def __init__(self, type_name: str, text: str, unpickle_error: str = "") -> None:
        super().__init__(f"{type_name}: {text}")
        self.type_name = type_name
        self.text = text
        self.unpickle_error = unpickle_error

    @classmethod
    def received(cls, message: str) -> RemoteException:
        return cls("unknown", message)

    def __reduce__(self) -> tuple[type[RemoteException], tuple[str, str, str]]:
        return RemoteException, (self.type_name, self.text, self.unpickle_error)


class ActorError(LoomError, code="actor_error"):
    """An endpoint raised an exception. The actor lives on.

    ``exception`` is the original exception object, or a `RemoteException` that stands in for it;
    ``message`` says which call failed; ``exception_formatted`` is the remote traceback. Monarch's
    ``monarch.actor.ActorError`` has the same attributes.
    """

    def __init__(
        self,
        exception: BaseException,
        message: str = "A remote actor call has failed.",
        exception_formatted: str = "",
    ) -> None:
        super().__init__(message)
        self.exception = exception
        self.message = message
        self.exception_formatted = exception_formatted

    @classmethod
    def received(cls, message: str) -> ActorError:
        return cls(RemoteException("unknown", message), message)

    def __str__(self) -> str:
        return f"{self.message}\n {self.exception_formatted}"

    def __reduce__(self) -> tuple[type[ActorError], tuple[BaseException, str, str]]:
        return ActorError, (self.exception, self.message, self.exception_formatted)
