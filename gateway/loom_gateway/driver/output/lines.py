"""Splitting of printed bytes into lines, and aggregation of equal lines."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

LONGEST_LINE = 16 << 10  # characters of the longest line; the rest of a longer one becomes the next line


class LineSplitter:
    """Splits one stream of bytes into lines. Bytes that are not UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""  # the unfinished line

    @property
    def has_rest(self) -> bool:
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that end in ``data``."""
        lines = (self._rest + self._decoder.decode(data)).split("\n")
        # A progress bar overwrites itself with carriage returns. Keep only what a terminal would show last.
        self._rest = _after_returns(lines.pop())
        whole = [piece for line in lines for piece in _pieces(_after_returns(line).rstrip("\r"))]
        while len(self._rest) > LONGEST_LINE:
            whole.append(self._rest[:LONGEST_LINE])
            self._rest = self._rest[LONGEST_LINE:]
        return whole

    def flush(self) -> list[str]:
        """Return the unfinished line, if any, as a line."""
        rest, self._rest = self._rest.rstrip("\r"), ""
        return [rest] if rest.strip() else []


def _after_returns(line: str) -> str:
    return line[line.rfind("\r", 0, max(0, len(line) - 1)) + 1 :]


def _pieces(line: str) -> Sequence[str]:
    if len(line) <= LONGEST_LINE:
        return (line,)
    return [line[start : start + LONGEST_LINE] for start in range(0, len(line), LONGEST_LINE)]


@dataclass
class Aggregate:
    """One line, and the ranks that printed it."""

    time: float  # time of its first appearance, in seconds since the epoch
    stream: str
    text: str
    count: int = 0
    ranks: list[int] = field(default_factory=list)  # without repetition, in the order of their first lines


class Aggregator:
    """Merges equal lines of several ranks, and consecutive equal lines of one rank.

    Lines come in the order in which they first appeared. Two equal lines of a rank with others between them stay
    apart, so that the traceback of eight ranks becomes one complete traceback.
    """

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str, int], Aggregate] = {}
        self._last: dict[tuple[int, str], tuple[str, str, int]] = {}  # the last line of each rank and stream
        self._seen: Counter[tuple[int, str, str]] = Counter()  # how often each rank has printed a line

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, time: float, rank: int, stream: str, text: str) -> None:
        last = self._last.get((rank, stream))
        if last is not None and last[1] == text:
            self._lines[last].count += 1
            return
        seen = (rank, stream, text)
        key = (stream, text, self._seen[seen])
        self._seen[seen] += 1
        self._last[rank, stream] = key
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Aggregate(time, stream, text)
        line.count += 1
        line.ranks.append(rank)

    def take(self) -> list[Aggregate]:
        """Return the lines so far in the order of their first appearance, and start anew."""
        lines = list(self._lines.values())
        self._lines, self._last, self._seen = {}, {}, Counter()
        return lines
