"""The plain form of values: what msgpack, JSON and every reader of Loom's messages know.

A user passes values that look like numbers and texts and are others: numpy scalars, members of an Enum, paths.
`plain` gives them their obvious plain form before they are sent, and refuses all else at the caller's line, with
the path of the value. It also copies lists and dicts, so that a later change of them does not reach the message.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
import os
from collections import deque
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from loom.errors import WrongArguments

SMALLEST_INT, LARGEST_INT = -(1 << 63), (1 << 64) - 1
"""The integers that msgpack knows."""

MOST_LEVELS = 64  # levels of lists and dicts inside each other
MOST_VALUES = 1_000_000  # values in one argument, inside all of its lists and dicts

_ADVICE = {
    datetime.datetime: "send value.isoformat() or value.timestamp()",
    datetime.date: "send value.isoformat()",
    datetime.time: "send value.isoformat()",
    datetime.timedelta: "send value.total_seconds()",
    bytes: "send value.decode(), value.hex() or a list of numbers",
    bytearray: "send value.decode(), value.hex() or a list of numbers",
    memoryview: "send value.hex() or a list of numbers",
    complex: "send [value.real, value.imag]",
}

_LISTS = (list, tuple, set, frozenset, deque, range)


def plain(value: Any, path: str, finite: bool = False) -> Any:
    """Return the plain form of a value: None, a bool, number or text, or lists and dicts of them, all new.

    - scalars of numpy, and arrays and tensors without dimensions, become the number that their ``item()`` returns;
    - members of an Enum become their value, paths their text;
    - a Decimal becomes an int if it is whole, or the float that prints as the same decimal;
    - tuples, sets, deques and ranges become lists, mappings and dataclasses dicts;
    - subclasses of bool, int, float and str become what they are subclasses of.

    Args:
        path: the name of the value for errors, such as ``config``; its items are ``config.lr[2]``.
        finite: whether to refuse NaN and infinity, which JSON does not know.

    Raises:
        WrongArguments: the value, or one inside it, has no such form: it is of another type, an integer of more
            than 64 bits, a text that is not Unicode, a key that is no text, nested deeper than `MOST_LEVELS`,
            or one of more than `MOST_VALUES`. The error names its path.
    """
    return _Conversion(finite).convert(value, path)


class _Conversion:
    """One conversion, which counts its values and knows the containers that it is in."""

    def __init__(self, finite: bool) -> None:
        self._finite = finite
        self._left = MOST_VALUES
        self._inside: set[int] = set()

    def convert(self, value: Any, path: str) -> Any:
        self._left -= 1
        if self._left < 0:
            raise WrongArguments(f"{path}: there are more than {MOST_VALUES:,} values, which is too much to send")
        if value is None or value is True or value is False:
            return value
        if isinstance(value, enum.Enum):
            return self.convert(value.value, path)
        if isinstance(value, str):
            return _text(value, path)
        if isinstance(value, int):
            return _integer(int(value), path)
        if isinstance(value, float):
            return self._number(float(value), path)
        if isinstance(value, (Mapping, *_LISTS)) or _is_record(value):
            return self._container(value, path)
        return self._other(value, path)

    def _number(self, value: float, path: str) -> float:
        if self._finite and not math.isfinite(value):
            raise WrongArguments(f"{path}: {value} cannot be sent in JSON, which has finite numbers only")
        return value

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self._inside or len(self._inside) >= MOST_LEVELS:
            why = "it contains itself" if id(value) in self._inside else f"it is over {MOST_LEVELS} levels deep"
            raise WrongArguments(f"{_shortened(path)}: this cannot be sent, because {why}")
        self._inside.add(id(value))
        try:
            if isinstance(value, _LISTS):
                return [self.convert(item, f"{path}[{place}]") for place, item in enumerate(_ordered(value))]
            if not isinstance(value, Mapping):
                value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
            made = {}
            for key, item in list(value.items()):
                name = _key(key, path)
                made[name] = self.convert(item, _inner(path, name))
            return made
        finally:
            self._inside.discard(id(value))

    def _other(self, value: Any, path: str) -> Any:
        if isinstance(value, os.PathLike):
            return self.convert(os.fspath(value), path)
        if isinstance(value, Decimal):
            return self._decimal(value, path)
        item = getattr(value, "item", None)
        if not isinstance(value, type) and callable(item) and _is_scalar(value):
            try:
                found = item()
                if type(found) is type(value):  # a long double, which is no number of Python's
                    found = float(found)
            except Exception as error:
                raise WrongArguments(f"{path}: {_described(value)} gives no number: {error}") from error
            return self.convert(found, path)
        if getattr(value, "shape", None) and callable(getattr(value, "tolist", None)):
            shape = tuple(value.shape)
            raise WrongArguments(f"{path}: an array of shape {shape} cannot be sent; send value.tolist()")
        advice = next((text for kind, text in _ADVICE.items() if isinstance(value, kind)), None)
        raise WrongArguments(
            f"{path}: {_described(value)} cannot be sent; "
            + (advice or "send numbers, texts, booleans, None, or lists and dicts of them")
        )

    def _decimal(self, value: Decimal, path: str) -> int | float:
        if not value.is_finite():
            return self._number(float(value), path)
        if value == value.to_integral_value() and abs(value) <= LARGEST_INT:
            return _integer(int(value), path)
        if Decimal(repr(float(value))) != value:
            raise WrongArguments(f"{path}: no float is the Decimal {value!s:.60}; send float(value) or str(value)")
        return self._number(float(value), path)


def _text(value: str, path: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise WrongArguments(
                f"{_shortened(path)}: the text {value!r:.80} is not Unicode, because of the lone surrogate "
                f"{value[error.start]!a}; send value.encode(errors='replace').decode()"
            ) from None
    return value if type(value) is str else str.__str__(value)


def _integer(value: int, path: str) -> int:
    if SMALLEST_INT <= value <= LARGEST_INT:
        return value
    raise WrongArguments(f"{path}: an integer of {value.bit_length()} bits cannot be sent; the most are 64 bits")


def _key(key: Any, path: str) -> str:
    if isinstance(key, enum.Enum):
        key = key.value
    if not isinstance(key, str):
        raise WrongArguments(f"{path}: keys are texts, not {_described(key)}; send str(key)")
    return _text(key, f"{path}: a key" if path else "a key")


def _inner(path: str, key: str) -> str:
    if not path:
        return key
    return f"{path}.{key}" if key.isidentifier() else f"{path}[{key!r:.40}]"


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_scalar(value: Any) -> bool:
    """Return whether a value is a scalar of numpy, or an array or tensor without dimensions, without an import."""
    if any(one.__name__ == "generic" and one.__module__ == "numpy" for one in type(value).__mro__):
        return True
    return hasattr(value, "dtype") and tuple(getattr(value, "shape", (0,))) == ()


def _ordered(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        try:
            return sorted(value)
        except TypeError:
            return list(value)
    return list(value)


def _described(value: Any) -> str:
    kind = type(value)
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    article = "an" if (where or kind.__qualname__)[0] in "aeiou" else "a"
    return f"{article} {where}{kind.__qualname__}"


def _shortened(path: str) -> str:
    return path if len(path) <= 120 else f"{path[:60]}…{path[-40:]}"
