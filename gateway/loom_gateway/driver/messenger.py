"""Speaks to worker hosts under a new name, so that one that was started again listens.

Monarch numbers what each of its actors sends to another, and whoever receives waits for the numbers in between
(torchmonarch 0.7: ``hyperactor::ordering``). A worker that comes back on the same address has the name of the one
before, but begins to count anew: what the root client sends it, numbered on, it never takes. Another actor, in the
same process, is counted from the first; so a messenger is made whenever hosts come back, and sends in the root
client's place what goes to hosts.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import monarch.actor
from monarch._src.actor import actor_mesh
from monarch.actor import Actor, endpoint, this_proc

__all__ = ["Messenger"]

START_TIMEOUT = 10.0
"""Seconds that an actor may take to start in this very process."""

_numbers = itertools.count()
_contexts: dict[int, Any] = {}


class _Speaker(Actor):  # type: ignore[misc]
    """Lends its name. It runs in the driver's own process, and so finds this module's variables."""

    @endpoint  # type: ignore[untyped-decorator]
    def give_context(self, number: int, process: int) -> None:
        assert process == os.getpid()
        _contexts[number] = monarch.actor.context()

    def __supervise__(self, failure: Any) -> bool:
        # What it spawned is its own, in Monarch's eyes. A fault there is not its end.
        monarch.actor.unhandled_fault_hook(failure)
        return True


class Messenger:
    """An actor of the driver's own. Made on any thread but the event loop's, which it would hold up."""

    def __init__(self) -> None:
        number = next(_numbers)
        self._speaker = this_proc().spawn(f"loom_messenger_{number}", _Speaker)
        self._speaker.give_context.call_one(number, os.getpid()).get(timeout=START_TIMEOUT)
        self._context = _contexts.pop(number)

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Have Monarch send in the messenger's name what this thread or task asks of it meanwhile."""
        token = actor_mesh._set_context(self._context)
        try:
            yield
        finally:
            actor_mesh._reset_context(token)
