"""`Notes`, short facts that are kept for a while: a gateway's own, or on a session host those of all gateways."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from loom.errors import TooLarge

MAX_NOTE = 256 << 10
"""Bytes of a note."""

MAX_NOTES = 8 << 20
"""Bytes of the notes of a topic. Beyond them, the oldest are forgotten."""

_OVERHEAD = 500  # bytes that a note takes besides its content


@dataclass(frozen=True)
class Note:
    """A fact, of a topic, which a key tells from others of the topic."""

    topic: str
    key: str
    value: Any
    number: int
    until: float
    size: int


class Notes:
    """Notes in memory, until they expire or are taken.

    Args:
        clock: returns seconds, and never jumps.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._notes: dict[tuple[str, str], Note] = {}  # the oldest first
        self._sizes: Counter[str] = Counter()  # by topic
        self._last = 0

    async def put(self, topic: str, key: str, value: Any, lasts: float) -> None:
        """Keep a note for some seconds, in the place of one with its key. Raise `TooLarge`."""
        size = len(msgpack.packb([topic, key, value])) + _OVERHEAD
        if size > MAX_NOTE:
            raise TooLarge(f"a note of {size} bytes is over the limit of {MAX_NOTE}")
        self._remove(topic, key)
        self._last += 1
        self._notes[topic, key] = Note(topic, key, value, self._last, self._clock() + lasts, size)
        self._sizes[topic] += size
        while self._sizes[topic] > MAX_NOTES:
            self._remove(topic, next(key for of, key in self._notes if of == topic))

    async def take(self, topic: str, key: str) -> Any:
        """Return the value of a note, which is forgotten; None if there is none, or its time is over."""
        note = self._remove(topic, key)
        return None if note is None or note.until <= self._clock() else note.value

    def _remove(self, topic: str, key: str) -> Note | None:
        if (note := self._notes.pop((topic, key), None)) is not None:
            self._sizes[topic] -= note.size
        return note

    def after(self, number: int) -> list[Note]:
        """Return the notes with higher numbers than one, the oldest first."""
        found: list[Note] = []
        for note in reversed(self._notes.values()):
            if note.number <= number:
                break
            if note.until > self._clock():
                found.append(note)
        return found[::-1]
