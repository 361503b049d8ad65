"""Lines that show something: where they stand and what they say."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LINE = 300
"""Characters of a line that are kept."""
NAMED = 20
"""Problems that are kept; all are counted."""

COLOURS = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")


@dataclass(frozen=True, order=True)
class Evidence:
    """A line of a log."""

    file: str
    line: int
    """Its number, from 1 on."""
    text: str
    trace: str | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Problem:
    """A line that is broken, or that contradicts itself."""

    file: str
    line: int
    why: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.why}: {self.text}"


@dataclass
class Problems:
    """The first problems, and the number of all."""

    count: int = 0
    first: list[Problem] = field(default_factory=list)

    def add(self, make: Callable[[], Problem]) -> None:
        """Count a problem; make it if it is one of the first `NAMED`."""
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append(make())


class Largest:
    """The lines with the largest values of a metric."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: list[tuple[float, int, Evidence]] = []
        self._seen = 0

    def extend(self, values: Sequence[float], evidence: Callable[[int], Evidence]) -> None:
        """Consider a batch of values; ``evidence`` returns the line of the value at an index."""
        if not values or (len(self._found) == self._most and max(values) <= self._found[0][0]):
            return
        for value, index in heapq.nlargest(self._most, zip(values, range(len(values)), strict=True)):
            if len(self._found) == self._most and value <= self._found[0][0]:
                break
            self._seen += 1
            entry = (value, -self._seen, evidence(index))
            if len(self._found) < self._most:
                heapq.heappush(self._found, entry)
            else:
                heapq.heapreplace(self._found, entry)

    def lines(self) -> list[Evidence]:
        """Return the lines, that of the largest value first."""
        return [evidence for _, _, evidence in sorted(self._found, reverse=True)]


def readable(line: bytes) -> str:
    """Return a line without colours and control characters, not longer than `LINE`."""
    text = COLOURS.sub(b"", line[: 4 * LINE]).decode(errors="replace").strip()
    if not text.isprintable():
        text = "".join(character if character.isprintable() else " " for character in text)
    return text if len(text) <= LINE else text[: LINE - 1] + "…"
