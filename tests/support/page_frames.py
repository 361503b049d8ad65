"""Binary frames of the weaver's WebSocket, read as a page reads them."""

from __future__ import annotations

import struct
from typing import NamedTuple

COLUMNS = ("state", "step", "loss", "pace")
TYPES = "BIf"
NO_NUMBER = b"\xff\xff\xff\xff"

Values = dict[int, float | None]
"""The values of a section by number; None for no step and no number."""


class Section(NamedTuple):
    column: str
    dense: bool
    values: Values


class Frame(NamedTuple):
    position: int
    sections: list[Section]

    def section(self, column: str) -> Section | None:
        return next((one for one in self.sections if one.column == column), None)


def read_frame(data: bytes) -> Frame:
    kind, version, count, position = struct.unpack_from("<BBHI", data)
    assert (kind, version) == (1, 1)
    at, sections = 8, []
    for _ in range(count):
        assert at % 4 == 0
        column, type, layout, zero, n = struct.unpack_from("<BBBBI", data, at)
        assert zero == 0
        at += 8
        numbers = range(n)
        if layout == 0:
            numbers = struct.unpack_from(f"<{n}I", data, at)
            at += 4 * n
        size = struct.calcsize(TYPES[type])
        values = [_value(TYPES[type], data[at + size * i : at + size * (i + 1)]) for i in range(n)]
        at += size * n
        assert data[at : at + -at % 4] == bytes(-at % 4)
        at += -at % 4
        sections.append(Section(COLUMNS[column], layout == 1, dict(zip(numbers, values, strict=True))))
    assert at == len(data)
    return Frame(position, sections)


def _value(type: str, data: bytes) -> float | None:
    if type != "B" and data == NO_NUMBER:
        return None
    (value,) = struct.unpack(f"<{type}", data)
    return value  # type: ignore[no-any-return]
