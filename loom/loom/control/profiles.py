"""Profiles of a training process: how often each stack was seen, and the frames that ask a threadlet for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loom.control.frame import Frame

RATE = 100
"""Looks a second at the process."""

LEAST_SECONDS = 1.0
MOST_SECONDS = 30.0
"""Bounds of how long a profile takes."""

DEFAULT_SECONDS = 10.0

MAX_FOLDED = 1 << 20
"""Bytes of a profile's text."""

MAX_DEPTH = 1000
"""Functions of a stack that are kept, the innermost ones."""


@dataclass(frozen=True, slots=True)
class ProfileRequest(Frame, kind="profile"):
    """``["profile", request id, seconds]``, to a threadlet: sample the stacks of the process for so long."""

    id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Profile(Frame, kind="profile"):
    """``["profile", request id, folded, samples, left out, error]``, from a threadlet: a `ProfileRequest`'s answer.

    ``folded`` and the counts are as `FoldedStacks` has them; ``error`` says why there are none, and is empty else.
    """

    id: str
    folded: str
    samples: int
    left_out: int
    error: str


class FoldedStacks:
    """Stacks with the number of samples of each, of at most so many bytes.

    A folded stack has its functions from the outermost to the innermost with semicolons between them.
    """

    def __init__(self, most: int = MAX_FOLDED) -> None:
        self._most = most
        self._size = 0
        self._counts: dict[str, int] = {}
        self.left_out = 0
        """Samples of stacks for which there was no room."""

    def add(self, stack: str, samples: int = 1) -> None:
        """Add samples of a stack; of a stack without room they are only counted."""
        if stack not in self._counts:
            size = len(stack.encode(errors="replace")) + 20  # the count and the end of the line
            if self._size + size > self._most:
                self.left_out += samples
                return
            self._size += size
            self._counts[stack] = 0
        self._counts[stack] += samples

    def add_lines(self, lines: Iterable[str]) -> None:
        """Add lines such as ``outer;inner 12``; other lines are ignored."""
        for line in lines:
            stack, _, samples = line.rpartition(" ")
            if stack and samples.isdecimal() and len(samples) < 10:
                self.add(stack, int(samples))

    @property
    def samples(self) -> int:
        """The samples of the stacks that are kept."""
        return sum(self._counts.values())

    @property
    def text(self) -> str:
        """A line for each stack, the most frequent first, with its samples at the end."""
        ordered = sorted(self._counts.items(), key=lambda item: -item[1])
        return "".join(f"{stack} {samples}\n" for stack, samples in ordered)
