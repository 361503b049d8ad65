"""Values that users pass by mistake, or in good faith, where a name, a number or a configuration has to be."""

from __future__ import annotations

import collections
import collections.abc
import datetime
import decimal
import enum
import fractions
import itertools
import os
import pathlib
import unittest.mock
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

LONE = "a\ud800b"  # a text that is not Unicode, as some names of files are


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Odd(enum.Enum):
    """Its members have values without a plain form."""

    ONE = object()


class Text(str):
    pass


class Number(float):
    pass


@dataclass
class Record:
    lr: float = 0.5
    names: tuple[str, ...] = ("a",)


@dataclass
class Unset:
    lr: float = field(init=False)


class Raising(os.PathLike[str]):
    """Raises whatever is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise KeyError(name)

    def __fspath__(self) -> str:
        raise KeyError("path")

    __hash__ = __eq__ = __len__ = __bool__ = __iter__ = __str__ = __repr__ = __fspath__  # type: ignore[assignment]


class NoClass:
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise KeyError("class")


class NoItems(dict[str, int]):
    def items(self) -> Any:
        raise KeyError("items")


class Endless(collections.abc.Mapping[str, int]):
    def __iter__(self) -> Iterator[str]:
        return map(str, itertools.count())

    def __len__(self) -> int:
        return 1

    def __getitem__(self, name: str) -> int:
        return 1


Point = collections.namedtuple("Point", "x y")


def itself() -> list[Any]:
    made: list[Any] = []
    made += [made, made]
    return made


def deep(levels: int) -> Any:
    made: Any = 1
    for _ in range(levels):
        made = [made]
    return made


def wide(levels: int) -> Any:
    """Return few objects that are 2 ** levels values when they are written out."""
    made: Any = [1, 1]
    for _ in range(levels):
        made = [made, made]
    return made


PLAIN: dict[str, tuple[Any, Any]] = {
    "float32": (np.float32(0.5), 0.5),
    "float64": (np.float64(0.5), 0.5),
    "longdouble": (np.longdouble(0.5), 0.5),
    "int64": (np.int64(3), 3),
    "uint64": (np.uint64(2**64 - 1), 2**64 - 1),
    "bool_": (np.bool_(True), True),
    "str_": (np.str_("a"), "a"),
    "0-d array": (np.array(0.5), 0.5),
    "0-d tensor": (torch.tensor(3), 3),
    "path": (pathlib.Path("/a/b"), "/a/b"),
    "enum": (Colour.RED, "red"),
    "int enum": (Level.LOW, 1),
    "whole decimal": (decimal.Decimal("10"), 10),
    "decimal": (decimal.Decimal("0.1"), 0.1),
    "text": (Text("a"), "a"),
    "number": (Number(0.5), 0.5),
    "tuple": ((1, (2, 3)), [1, [2, 3]]),
    "named tuple": (Point(1, 2), [1, 2]),
    "set": ({2, 1}, [1, 2]),
    "frozenset": (frozenset("a"), ["a"]),
    "range": (range(3), [0, 1, 2]),
    "deque": (collections.deque([1]), [1]),
    "mapping": (collections.OrderedDict(a=np.int8(1)), {"a": 1}),
    "record": (Record(), {"lr": 0.5, "names": ["a"]}),
    "nested": ({"a": [np.float32(0.5), {"b": Colour.RED}]}, {"a": [0.5, {"b": "red"}]}),
    "enum key": ({Colour.RED: 1}, {"red": 1}),
    "infinity": (float("inf"), float("inf")),
}
"""By name: a value, and its plain form."""

REFUSED: dict[str, Any] = {
    "bytes": b"a",
    "bytearray": bytearray(b"a"),
    "memoryview": memoryview(b"a"),
    "complex": 1j,
    "2**70": 2**70,
    "-2**64": -(2**64),
    "lone surrogate": LONE,
    "surrogate inside": {"a": [LONE]},
    "surrogate key": {LONE: 1},
    "path of bytes": pathlib.Path(LONE),
    "number key": {1: 2},
    "none key": {None: 2},
    "tuple key": {"a": {(1, 2): 3}},
    "datetime": datetime.datetime(2026, 1, 1),
    "date": datetime.date(2026, 1, 1),
    "timedelta": datetime.timedelta(1),
    "fraction": fractions.Fraction(1, 3),
    "long decimal": decimal.Decimal("0.1234567890123456789012345"),
    "uuid": uuid.UUID(int=1),
    "object": object(),
    "class": Record,
    "function": deep,
    "module": enum,
    "odd enum": Odd.ONE,
    "array": np.arange(3),
    "tensor": torch.ones(2),
    "datetime64": np.datetime64("2026-01-01"),
    "dtype": torch.float32,
    "raising": Raising(),
    "no class": NoClass(),
    "no items": NoItems(a=1),
    "unset record": Unset(),
    "mock": unittest.mock.Mock(),
    "signaling nan": decimal.Decimal("sNaN"),
    "long integer": 10**5000,
    "endless": Endless(),
    "itself": itself(),
    "deep": deep(5000),
    "wide": wide(60),
    "many": list(range(1_000_001)),
}
"""By name: values without a plain form."""

LARGE = {"2 MiB": "x" * (2 << 20), "2 MiB inside": {"a": ["x" * (2 << 20)]}}
"""By name: values with a plain form that is too large for a header."""

ODD: dict[str, Any] = {**{name: value for name, (value, _) in PLAIN.items()}, **REFUSED, **LARGE}
