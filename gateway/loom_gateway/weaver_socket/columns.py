"""The columns of a page's replicas, as binary frames.

They are little-endian, and every section begins at a multiple of 4 bytes::

    u8  1 (columns)      u8 1 (version)      u16 number of sections     u32 position (its low 32 bits)
    section: u8 column   u8 type   u8 layout (0 sparse, 1 dense)   u8 0    u32 n
             sparse: u32[n] numbers; dense: the numbers are 0 … n-1
             n values, padded with zeros to a multiple of 4 bytes
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import Any


class Column(IntEnum):
    """A value that each replica has, and its number in frames."""

    STATE = 0
    """The low 7 bits are the index of the state in `loom.weaver.states.ReplicaState`; see `AWAY` and `NOBODY`."""
    STEP = 1
    """The step; `NO_STEP` for none, or for one that has more than 32 bits."""
    LOSS = 2
    """The metric ``loss``, or the first one like it, which may be a NaN; `NO_NUMBER` for none."""
    PACE = 3
    """Seconds a step, smoothed; `NO_NUMBER` for none."""


NAMES = {column.name.lower(): column for column in Column}
"""The columns by the names that pages give them."""

AWAY = 0x80
"""The bit of a state that is set while the replica is not connected."""

NOBODY = 0x7F
"""The state of a number that no replica has."""

NO_STEP = 0xFFFFFFFF

NO_NUMBER: float = struct.unpack("<f", b"\xff\xff\xff\xff")[0]
"""The NaN that stands for no number. An `array` keeps its bits."""

NAN = float("nan")
"""The NaN that stands for every other NaN."""

TYPES = {Column.STATE: "B", Column.STEP: "I", Column.LOSS: "f", Column.PACE: "f"}
"""The type of each column's values, as `array` names it."""

_TYPE_NUMBERS = {"B": 0, "I": 1, "f": 2}
_HEAD = struct.Struct("<BBHI")
_SECTION = struct.Struct("<BBBxI")
_COLUMNS, _VERSION = 1, 1
_SPARSE, _DENSE = 0, 1


def encode_frame(position: int, sections: Sequence[bytes]) -> bytes:
    """Return a frame of sections, each made by `encode_all` or `encode_changed`."""
    return b"".join((_HEAD.pack(_COLUMNS, _VERSION, len(sections), position & 0xFFFFFFFF), *sections))


def encode_all(column: Column, values: array[Any]) -> bytes:
    """Return the section with the values of all numbers."""
    head = _SECTION.pack(column, _TYPE_NUMBERS[values.typecode], _DENSE, len(values))
    return head + _padded(values.tobytes())


def encode_changed(column: Column, values: array[Any], changed: Sequence[int]) -> bytes:
    """Return the section with the values of some numbers, or of all if that has fewer bytes."""
    if len(changed) * (4 + values.itemsize) > len(values) * values.itemsize:
        return encode_all(column, values)
    head = _SECTION.pack(column, _TYPE_NUMBERS[values.typecode], _SPARSE, len(changed))
    picked = array(values.typecode, map(values.__getitem__, changed))
    return head + array("I", changed).tobytes() + _padded(picked.tobytes())


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
