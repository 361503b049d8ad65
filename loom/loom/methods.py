"""Descriptions of functions and of classes that are no actors, for checking a call before it is sent."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from loom.errors import EndpointNotFound, WrongArguments
from loom.signatures import CallSignature


@dataclass(frozen=True)
class Method:
    """A method of a class, or a function."""

    title: str  # the name for error messages, such as ``Trainer.step``
    signature: CallSignature | None = None  # None if it is not known; then no call is checked
    is_async: bool = False
    yields: bool = False

    @classmethod
    def of(cls, title: str, function: Any, skip: int) -> Method:
        yields = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        return cls(title, _signature(title, function, skip), inspect.iscoroutinefunction(function), yields)

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise `WrongArguments` if the arguments do not fit."""
        if self.signature is not None:
            self.signature.check(args, kwargs)

    def check_returns(self, instead: str) -> None:
        """Raise `WrongArguments`, with what to do instead, if the method yields."""
        if self.yields:
            raise WrongArguments(f"{self.title} yields, and a generator cannot travel from there: {instead}")

    def has(self, parameter: str) -> bool:
        """Return whether the method has a parameter of that name itself."""
        return self.signature is not None and any(name == parameter for name, _, _ in self.signature.parameters)


def methods_of(cls: type) -> dict[str, Method]:
    """Return the methods of a class that are not private, by name."""
    found = {}
    for name in dir(cls):
        value = inspect.getattr_static(cls, name, None)
        if name.startswith("_") or isinstance(value, type):
            continue
        title = f"{cls.__name__}.{name}"
        if isinstance(value, (staticmethod, classmethod)):
            found[name] = Method.of(title, value.__func__, int(isinstance(value, classmethod)))
        elif callable(value):
            found[name] = Method.of(title, value, 1)
    return found


def function_of(function: Any) -> Method:
    """Return the description of a function."""
    return Method.of(getattr(function, "__name__", "the function"), function, 0)


def constructor_of(cls: type) -> CallSignature | None:
    """Return the signature of a class's constructor, if it is known."""
    return _signature(cls.__name__, cls, 0)


def _signature(title: str, function: Any, skip: int) -> CallSignature | None:
    """Return a signature; None if Python cannot tell, as for some C functions."""
    try:
        return CallSignature.of(title, function, skip)
    except (TypeError, ValueError):
        return None


def no_method(class_name: str, name: str, methods: Mapping[str, Method] | None, exists: bool) -> NoReturn:
    """Raise `NoSuchMethod` for a name that cannot be called.

    Args:
        methods: the existing methods; None if they are not known here.
        exists: whether the class has another attribute of that name.
    """
    if name.startswith("_"):
        raise EndpointNotFound(
            f"{class_name}.{name} is private: only public methods can be called from here", code="no_such_method"
        )
    near = difflib.get_close_matches(name, methods or (), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    known = ", ".join(methods or ()) or "none"
    what = "is no method, and attributes cannot be read from here: write a method that returns it" if exists else ""
    text = f"{class_name}.{name} {what}" if exists else f"{class_name} has no method {name!r}"
    raise EndpointNotFound(f"{text}{hint} Its methods: {known}", code="no_such_method")
