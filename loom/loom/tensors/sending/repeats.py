"""Repeats in a sequence of commands go as copies of earlier commands, sans-IO."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

SHORTEST_COPY = 4
LONG_COPY = 64
"""Commands of a copy from which on its inner parts are not noted once more."""
HISTORY = 1 << 15
"""Commands of the past that a copy may be of, at least."""


class Repeats:
    """A sequence of numbers, in which a repeated part of the next one is found.

    Args:
        history: numbers of the past that a copy may be of, at least; the same on both sides.
    """

    def __init__(self, history: int = HISTORY) -> None:
        self._history = history
        self._past: list[int] = []
        self._gone = 0
        self._places: dict[tuple[int, ...], int] = {}
        """The last beginning of each part of `SHORTEST_COPY` commands, but for those within long copies."""
        self._period = 0
        """The distance back of a copy that goes on with the last one; 0 if there is none."""

    def shorten(self, sequence: list[int]) -> list[int]:
        """Return the next sequence with copies for what was there before; a copy is ``-distance, length``."""
        past, places, period = self._past, self._places, self._period
        result: list[int] = []
        at, end = 0, len(sequence)
        # The parts that each command begins, and that each one ends.
        begun = [*_parts(sequence), *[()] * (SHORTEST_COPY - 1)]
        ended = list(_parts([*[-1] * (SHORTEST_COPY - 1 - len(past)), *past[1 - SHORTEST_COPY :], *sequence]))
        while at < end:
            now = len(past)
            place = now + self._gone + 1 - SHORTEST_COPY
            before = places.get(begun[at], -1) - self._gone
            start, length = before, _common(past, before, sequence, at) if before >= 0 else 0
            if 0 < period <= now and (longer := _common(past, now - period, sequence, at)) > length:
                start, length = now - period, longer
            if not length:
                period = 0
                result.append(sequence[at])
                past.append(sequence[at])
                places[ended[at]] = place
                at += 1
                continue
            result += (start - now, length)
            # No copy is longer than its distance. But two rounds of a loop can be copied when there were two.
            period = 2 * length if length == now - start else now - start if at + length == end else 0
            past += sequence[at : at + length]
            # Within a long copy what is known stays where it is: whoever finds the older place finds as much.
            known = length >= LONG_COPY and before >= 0 and now - before < self._history // 2
            many = SHORTEST_COPY - 1 if known else length
            for part in ended[at : at + many]:
                places[part] = place
                place += 1
            at += length
        self._period = period
        self._gone += _shorten(past, self._history)
        if len(places) > 4 * self._history:
            self._places = {key: place for key, place in places.items() if place >= self._gone}
        return result


def whole(past: list[int], sequence: Iterable[int], history: int = HISTORY) -> list[int]:
    """Return the sequence that `Repeats.shorten` was given, and add it to the past that it knew.

    Raises:
        ValueError: a copy is of what was not there.
    """
    begin = len(past)
    each = iter(sequence)
    for number in each:
        if number >= 0:
            past.append(number)
            continue
        start, length = len(past) + number, next(each, 0)
        if start < 0 or not 0 < length <= -number:
            raise ValueError("a copy of what was not there")
        past.extend(past[start : start + length])
    found = past[begin:]
    _shorten(past, history)
    return found


def _parts(sequence: list[int]) -> Iterator[tuple[int, ...]]:
    """Return each part of `SHORTEST_COPY` numbers in a row."""
    return zip(*[sequence[place:] for place in range(SHORTEST_COPY)], strict=False)


def _common(past: list[int], start: int, sequence: list[int], at: int) -> int:
    """Return how many commands of the past and the sequence are the same; 0 if too few for a copy."""
    most = min(len(past) - start, len(sequence) - at)
    if most < SHORTEST_COPY:
        return 0
    if past[start : start + most] == sequence[at : at + most]:
        return most
    length = 0
    while past[start + length] == sequence[at + length]:
        length += 1
    return length if length >= SHORTEST_COPY else 0


def _shorten(past: list[int], history: int) -> int:
    """Forget the oldest, when there are many; return how many. Both sides do so after each batch."""
    gone = len(past) - history if len(past) > 2 * history else 0
    del past[:gone]
    return gone
