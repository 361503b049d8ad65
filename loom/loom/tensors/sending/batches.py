"""What is known of batches of commands on their way, and how many and how large they are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from loom.tensors.sending.sites import Site

MOST_COMMANDS = 2048
"""Commands of a batch."""
MOST_BYTES = 4 << 20
"""Bytes of data of a batch, from which on it is sent."""
MOST_FAILURES = 1000
"""Failures whose lines are remembered."""
SOON = 0.001
"""Seconds after which a batch is sent if it does not fill, and nothing is on its way."""
LATEST = 0.02
"""Seconds for which a batch that does not fill waits for the answer of the one before."""
IDLE = 2.0
"""Seconds without a command after which the thread that sends ends."""
MOST_BATCHES = 16
"""Batches that are not done yet; whoever adds one more waits."""
MOST_BYTES_WAITING = 64 << 20
"""Bytes of data in them."""


class Failure(NamedTuple):
    """What a worker says of a command that failed, or of one that needs its result."""

    batch: int
    place: int
    """The command's place in its batch; -1 if it is of no command."""
    like: str
    """The name of the exception's built-in class."""
    text: str


class Asked(NamedTuple):
    """A read on its way."""

    batch: int
    future: Any


class Sent(NamedTuple):
    """A batch that is not done, as far as is known."""

    number: int
    answer: Any
    sites: list[Site | None]
    size: int


def await_answer(lock: AbstractContextManager[Any], sent: Sequence[Sent]) -> None:
    """Wait a little while the workers are busy: each batch costs as much as dozens of commands."""
    # The first look is made alone: one of Monarch's futures can be waited for by several threads only after it.
    with lock:
        if not sent or is_done(answer := sent[-1].answer, 0):
            return
    is_done(answer, LATEST)


def is_done(answer: Any, seconds: float) -> bool:
    """Wait for an answer; return whether it has come. An error in it is told when its batch is settled."""
    try:
        answer.get(timeout=seconds)
    except TimeoutError:
        return False
    except Exception:  # noqa: BLE001
        pass
    return True
