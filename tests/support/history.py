"""What concurrent clients saw of a counter, and whether one counter that adds each call once can have told it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Added", "contradiction", "overlap"]


@dataclass(frozen=True)
class Added:
    """A client's call that adds 1 to a counter.

    Args:
        client: who called.
        start: seconds of `time.monotonic` at which it was called.
        end: seconds at which the answer was there.
        answer: the counter's new value; None for a call that failed: it may be carried out at any time, or never.
    """

    client: str
    start: float
    end: float
    answer: int | None


def contradiction(calls: Iterable[Added], value: int) -> str:
    """Return why no counter that began with 0 and adds each call once, in some order, gives these answers.

    Args:
        calls: all calls of all clients. One that had its answer before another was made came before it.
        value: of the counter after all of them.

    Returns:
        An empty text if the history is linearizable.
    """
    by_answer: dict[int, Added] = {}
    unknown = []
    for call in calls:
        if call.answer is None:
            unknown.append(call.start)
        elif (other := by_answer.get(call.answer)) is not None:
            return f"two calls have the same answer: {other} and {call}"
        else:
            by_answer[call.answer] = call
    for answer, call in by_answer.items():
        if not 1 <= answer <= value:
            return f"the counter is {value} at the end, and answered {call}"
    latest: dict[int, float] = {}  # until when each value had to be there
    until = float("inf")
    later: Added | None = None
    for answer in range(value, 0, -1):
        known = by_answer.get(answer)
        if known is None:
            latest[answer] = until
            continue
        if known.start > until:
            return f"{known} was made after {later} had its answer"
        if known.end < until:
            until, later = known.end, known
    return _unaccounted(sorted(unknown), latest)


def _unaccounted(starts: Sequence[float], latest: dict[int, float]) -> str:
    """Return which values that nobody has seen none of the failed calls explains."""
    free = iter(starts)
    for answer in sorted(latest):
        start = next(free, None)
        if start is None:
            return f"no call explains the value {answer}"
        if start > latest[answer]:
            return f"no call that was made in time explains the value {answer}"
    return ""


def overlap(seen: Iterable[tuple[float, str]]) -> str:
    """Return which of several owners of a thing acted after a later one had begun; empty if each ended in time.

    Args:
        seen: seconds of `time.monotonic`, and who acted then.
    """
    owners: list[str] = []
    for at, owner in sorted(seen):
        if owner not in owners:
            owners.append(owner)
        elif owner != owners[-1]:
            return f"{owner} acted at {at:.3f} after {owners[-1]} had begun"
    return ""
