"""The conversion of values, from the link or a command line, to the types that handlers declare.

A value comes as JSON or as text: ``0.002`` and ``"0.002"`` are the same learning rate. A value that would need a
loss or a guess is refused: 3.5 is no int, ``"maybe"`` no bool.
"""

from __future__ import annotations

import enum
import json
import math
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union

_TRUE = ("true", "1", "yes")
_FALSE = ("false", "0", "no")
_NONE = ("none", "null")


class BadValue(ValueError):
    """A value that cannot be converted to the declared type."""


def convert(value: Any, wanted: Any) -> Any:
    """Convert a value of JSON to a type that `is_convertible` knows; raise `BadValue` if it cannot be."""
    if wanted is Any or wanted is object:
        return value
    if wanted is None:
        wanted = type(None)
    if (simple := _SIMPLE.get(wanted)) is not None:
        return simple(value)
    origin = typing.get_origin(wanted)
    if origin is list or wanted is list:
        return _list(value, wanted)
    if origin is Literal:
        return _chosen(value, [(choice, choice) for choice in typing.get_args(wanted)], wanted)
    if _is_union(origin):
        return _union(value, wanted)
    return _enum(value, wanted)


def is_convertible(wanted: Any) -> bool:
    """Return whether `convert` knows the type."""
    if wanted in (Any, object, None, list) or wanted in _SIMPLE:
        return True
    origin = typing.get_origin(wanted)
    if origin is Literal:
        return True
    if origin is list or _is_union(origin):
        return all(is_convertible(argument) for argument in typing.get_args(wanted))
    return isinstance(wanted, type) and issubclass(wanted, enum.Enum)


def type_name(wanted: Any) -> str:
    """Return a type as a user writes it: ``float``, ``int | None``, ``list[float]``, ``Schedule(COSINE)``."""
    if wanted is None or wanted is type(None):
        return "None"
    origin = typing.get_origin(wanted)
    if _is_union(origin):
        return " | ".join(type_name(argument) for argument in typing.get_args(wanted))
    if origin is list:
        return f"list[{', '.join(type_name(argument) for argument in typing.get_args(wanted))}]"
    if origin is Literal:
        return " | ".join(repr(choice) for choice in typing.get_args(wanted))
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return f"{wanted.__name__}({', '.join(wanted.__members__)})"
    return getattr(wanted, "__name__", str(wanted))


def _refuse(value: Any, wanted: Any) -> BadValue:
    shown = repr(value)
    return BadValue(f"{shown if len(shown) <= 80 else shown[:79] + '…'} is not of type {type_name(wanted)}")


def _int(value: Any) -> int:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not (whole or isinstance(value, str)):
        raise _refuse(value, int)
    try:
        return int(value)
    except ValueError:
        raise _refuse(value, int) from None


def _float(value: Any) -> float:
    if isinstance(value, float):
        return value
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise _refuse(value, float) from None
        # The text "nan" is usually the output of a broken computation: a user who means it gives a number.
        if not math.isnan(number):
            return number
    raise _refuse(value, float)


def _bool(value: Any) -> bool:
    text = value.strip().lower() if isinstance(value, str) else value
    if isinstance(text, bool):
        return text
    if text in _TRUE or (text == 1 and isinstance(text, int)):
        return True
    if text in _FALSE or (text == 0 and isinstance(text, int)):
        return False
    raise _refuse(value, bool)


def _str(value: Any) -> str:
    if isinstance(value, str):
        return value
    # A command line parses a text such as "16" as a number.
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise _refuse(value, str)


def _none(value: Any) -> None:
    if value is not None and not (isinstance(value, str) and value.strip().lower() in _NONE):
        raise _refuse(value, None)


_SIMPLE: dict[Any, Callable[[Any], Any]] = {int: _int, float: _float, bool: _bool, str: _str, type(None): _none}


def _list(value: Any, wanted: Any) -> list[Any]:
    items = value
    if isinstance(value, str):
        try:
            items = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise _refuse(value, wanted) from None
    if not isinstance(items, (list, tuple)):
        raise _refuse(value, wanted)
    (inner,) = typing.get_args(wanted) or (Any,)
    try:
        return [convert(item, inner) for item in items]
    except BadValue as error:
        raise BadValue(f"{_refuse(value, wanted)}: {error}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"JSON has no {name}")


def _enum(value: Any, wanted: type[enum.Enum]) -> Any:
    if isinstance(value, wanted):
        return value
    if isinstance(value, str) and value in wanted.__members__:
        return wanted[value]
    return _chosen(value, [(member.value, member) for member in wanted], wanted)


def _chosen(value: Any, choices: list[tuple[Any, Any]], wanted: Any) -> Any:
    """Return the result for the choice that equals the value, or whose text is the value."""
    for choice, chosen in choices:
        if type(choice) is type(value) and choice == value:
            return chosen
    for choice, chosen in choices:
        if choice is not None and not isinstance(choice, bool) and choice == value and not isinstance(value, bool):
            return chosen
        if isinstance(value, str) and str(choice) == value:
            return chosen
    raise _refuse(value, wanted)


def _union(value: Any, wanted: Any) -> Any:
    """Convert the value to the member that is its type already, or else to the first member that it can be."""
    members = typing.get_args(wanted)
    if type(value) in members:
        return convert(value, type(value))
    # None comes before str, because every text can be a str.
    for member in sorted(members, key=lambda member: (member is str, member is not type(None))):
        try:
            return convert(value, member)
        except BadValue:
            continue
    raise _refuse(value, wanted)


def _is_union(origin: Any) -> bool:
    return origin is Union or origin is types.UnionType
