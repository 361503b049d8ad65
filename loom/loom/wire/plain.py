"""The plain form of values: what msgpack, JSON and every reader of Loom's messages know.

A user passes values that look like numbers and texts and are others: numpy scalars, members of an Enum, paths.
`plain` gives them their obvious plain form before they are sent, and refuses all else at the caller's line, with
the path of the value. It also copies lists and dicts, so that a later change of them does not reach the message.

`exact_json` is JSON that every reader accepts. A loss may be NaN or infinite. Python would write that as ``NaN``,
which a browser does not read. Here such numbers are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``,
which Python's ``float`` and JavaScript's ``Number`` convert back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import itertools
import json
import math
import os
import reprlib
from collections import deque
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, TypeAlias

from loom.errors import WrongArguments, describe_error


def exact_json(value: Any) -> str:
    """Return the JSON text of a value. Values that JSON cannot express become strings."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError):
        return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else _NAMES.get(value, "NaN")
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, int)):
        return value
    return repr(value)


_NAMES = {math.inf: "Infinity", -math.inf: "-Infinity"}


SMALLEST_INT, LARGEST_INT = -(1 << 63), (1 << 64) - 1
"""The integers that msgpack knows."""

MOST_LEVELS = 64  # levels of lists and dicts inside each other
MOST_VALUES = 200_000  # values in one argument, inside all of its lists and dicts

_ADVICE = {
    datetime.datetime: "value.isoformat() or value.timestamp()",
    datetime.date: "value.isoformat()",
    datetime.time: "value.isoformat()",
    datetime.timedelta: "value.total_seconds()",
    bytes: "value.decode(), value.hex() or a list of numbers",
    bytearray: "value.decode(), value.hex() or a list of numbers",
    memoryview: "value.hex() or a list of numbers",
    complex: "[value.real, value.imag]",
}
"""The stand-ins that are sent for values of some types."""

_KNOWN = "numbers, texts, booleans, None, or lists and dicts of them"

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


def number(value: Any, path: str) -> float:
    """Return the plain form of a number; raise `WrongArguments` for anything else, and for NaN and infinity."""
    found = plain(value, path, finite=True)
    if isinstance(found, (int, float)):
        return found
    raise WrongArguments(f"{path}: a number has to be given, not {shortened(value)}")


def shortened(value: Any) -> str:
    """Return the beginning of a value's ``repr``, for errors, however large or deep the value is."""
    try:
        return reprlib.repr(value)[:80]
    except Exception:  # noqa: BLE001 - a user's object may raise anything, and an int of over 4,300 digits does
        return _described(value)


Path: TypeAlias = "tuple[Path, str | int] | str"
"""A value's place: that of its list or dict, and its index or key there; or the name of the outermost value."""


class _Conversion:
    """One conversion, which counts its values and knows the containers that it is in."""

    def __init__(self, finite: bool) -> None:
        self._finite = finite
        self._left = MOST_VALUES
        self._inside: set[int] = set()

    def convert(self, value: Any, path: Path) -> Any:
        try:
            return self._converted(value, path)
        except WrongArguments:
            raise
        except Exception as error:  # a user's object may raise anything when it is looked at
            why = f"{_described(value)} cannot be read: {describe_error(error):.200}"
            raise _refused(path, why) from error

    def _converted(self, value: Any, path: Path) -> Any:
        self._left -= 1
        if self._left < 0:
            raise _refused(path, f"there are more than {MOST_VALUES:,} values, which is too much to send")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is float or kind is int or kind is str:
            return self._leaf(value, path)
        if isinstance(value, enum.Enum):
            return self.convert(value.value, path)
        if isinstance(value, (str, int, float)):
            return self._leaf(value, path)
        if isinstance(value, (Mapping, *_LISTS)) or _is_record(value):
            return self._container(value, path)
        return self._other(value, path)

    def _leaf(self, value: str | float, path: Path) -> Any:
        if isinstance(value, str):
            return _text(value, path)
        if isinstance(value, int):
            return _integer(int(value), path)
        if self._finite and not math.isfinite(value):
            raise _refused(path, f"{value} cannot be sent in JSON, which has finite numbers only")
        return float(value)

    def _container(self, value: Any, path: Path) -> Any:
        if id(value) in self._inside or len(self._inside) >= MOST_LEVELS:
            why = "contains itself" if id(value) in self._inside else f"is over {MOST_LEVELS} levels deep"
            raise _refused(path, f"this cannot be sent, because it {why}")
        self._inside.add(id(value))
        try:
            if isinstance(value, _LISTS):
                return [self.convert(item, (path, place)) for place, item in enumerate(self._ordered(value))]
            if not isinstance(value, Mapping):
                value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
            made = {}
            for key, item in self._copied(value.items()):  # a copy, since another thread may change it meanwhile
                name = _key(key, path)
                made[name] = self.convert(item, (path, name))
            return made
        finally:
            self._inside.discard(id(value))

    def _copied(self, values: Iterable[Any]) -> list[Any]:
        return list(itertools.islice(values, self._left + 1))

    def _ordered(self, values: Any) -> list[Any]:
        if isinstance(values, (set, frozenset)):
            with contextlib.suppress(TypeError):
                return sorted(values)
        return self._copied(values)

    def _other(self, value: Any, path: Path) -> Any:
        if isinstance(value, os.PathLike):
            return self.convert(os.fspath(value), path)
        if isinstance(value, Decimal):
            return self._decimal(value, path)
        if _is_scalar(value):
            try:
                found = value.item()
                if type(found) is type(value):  # a long double, which is no number of Python's
                    found = float(found)
            except Exception as error:
                raise _refused(path, f"{_described(value)} gives no number: {error}") from error
            return self.convert(found, path)
        advice = next((text for kind, text in _ADVICE.items() if isinstance(value, kind)), _KNOWN)
        if advice is _KNOWN and not isinstance(value, type) and getattr(value, "shape", None):
            advice = "value.tolist()"  # an array or a tensor
        raise _refused(path, f"{_described(value)} cannot be sent; send {advice}")

    def _decimal(self, value: Decimal, path: Path) -> int | float:
        if value.is_finite() and value == value.to_integral_value() and abs(value) <= LARGEST_INT:
            return _integer(int(value), path)
        number: float = self._leaf(float(value), path)
        if value.is_finite() and Decimal(repr(number)) != value:
            raise _refused(path, f"no float is the Decimal {value!s:.60}; send float(value) or str(value)")
        return number


def _text(value: str, path: Path) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _refused(
                path,
                f"the text {value!a:.80} is not Unicode, because of the lone surrogate {value[error.start]!a}; "
                f"send value.encode(errors='replace').decode()",
            ) from None
    return value if type(value) is str else str.__str__(value)


def _integer(value: int, path: Path) -> int:
    if SMALLEST_INT <= value <= LARGEST_INT:
        return value
    bits = value.bit_length()
    raise _refused(path, f"an integer of {bits} bits cannot be sent; integers are from -2**63 to 2**64 - 1")


def _key(key: Any, path: Path) -> str:
    if isinstance(key, enum.Enum):
        key = key.value
    if not isinstance(key, str):
        raise _refused(path, f"keys are texts, not {_described(key)}; send str(key)")
    return _text(key, path)


def _refused(path: Path, why: str) -> WrongArguments:
    steps: list[str | int] = []
    while not isinstance(path, str):
        path, step = path
        steps.insert(0, step)
    shown = path
    for step in steps:
        if isinstance(step, int):
            shown += f"[{step}]"
        else:
            named = step.isidentifier()
            shown += (f".{step}" if shown else step) if named else f"[{step!a:.40}]"
    shown = shown if len(shown) <= 120 else f"{shown[:60]}…{shown[-40:]}"
    return WrongArguments(f"{shown}: {why}" if shown else why)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_scalar(value: Any) -> bool:
    """Return whether a value is a scalar of numpy, or an array or tensor without dimensions, without an import."""
    if isinstance(value, type) or not callable(getattr(value, "item", None)):
        return False
    if any(one.__name__ == "generic" and one.__module__ == "numpy" for one in type(value).__mro__):
        return True
    return hasattr(value, "dtype") and bool(getattr(value, "shape", None) == ())


def _described(value: Any) -> str:
    kind = type(value)
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"a value of type {where}{kind.__qualname__}"
