"""From the bytes that processes print to lines, and from lines of many processes to few."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

LONGEST_LINE = 16 << 10
"""Characters; a longer line goes on as the next."""


class LineSplitter:
    """Cuts one stream of bytes into lines. What is not UTF-8 becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    @property
    def has_rest(self) -> bool:
        """Whether the last line has not ended yet."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        """The lines that end in ``data``."""
        lines = (self._rest + self._decoder.decode(data)).split("\n")
        # Of a progress bar, which overwrites itself, only what a terminal would show last is kept.
        self._rest = _after_returns(lines.pop())
        whole = [piece for line in lines for piece in _pieces(_after_returns(line).rstrip("\r"))]
        while len(self._rest) > LONGEST_LINE:
            whole.append(self._rest[:LONGEST_LINE])
            self._rest = self._rest[LONGEST_LINE:]
        return whole

    def flush(self) -> list[str]:
        """What there is of a line that has not ended, as a line."""
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
    """One line, and who printed it."""

    time: float
    """Seconds since the epoch, of the first."""
    stream: str
    text: str
    count: int = 0
    ranks: list[int] = field(default_factory=list)
    """Without repetition, the first to print it first."""


class Aggregator:
    """Makes one of identical lines of several ranks, and of a line that one rank repeats without a break.

    Each rank's lines keep their order, and the second of two equal lines with others in between is told from the
    first: a traceback of eight ranks comes out as one traceback.
    """

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str, int], Aggregate] = {}
        self._last: dict[tuple[int, str], tuple[str, str, int]] = {}
        self._seen: Counter[tuple[int, str, str]] = Counter()

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, time: float, rank: int, stream: str, text: str) -> None:
        """Take one line of one rank."""
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
        """The lines so far, by when each was first printed; it starts anew."""
        lines = list(self._lines.values())
        self._lines, self._last, self._seen = {}, {}, Counter()
        return lines
