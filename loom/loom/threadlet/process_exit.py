"""The hooks for the process's end, when threadlets say goodbye, and for forks, when the child abandons them."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from multiprocessing.util import Finalize
from typing import Protocol


class Closable(Protocol):
    """An object with a connection that has to be closed when the process ends."""

    def close(self, error: BaseException | None = None) -> None: ...

    def abandon(self) -> None:
        """Release the connection, in a forked child."""


_open: set[Closable] = set()
"""The open objects of this process."""


def opened(one: Closable) -> None:
    """Close an object when the process ends, unless `closed` is called first."""
    _open.add(one)
    if multiprocessing.parent_process() is not None:
        # A child of multiprocessing runs these finalizers at its end, but not the functions of `atexit`.
        Finalize(one, _close, (one,), exitpriority=10)


def closed(one: Closable) -> None:
    """Note that an object is closed."""
    _open.discard(one)


def _close(one: Closable) -> None:
    one.close(_fatal_error())


def _fatal_error() -> BaseException | None:
    """Return the error that ends the interpreter, if it is known here; the code of a `sys.exit` is not."""
    if (error := sys.exc_info()[1]) is not None:
        return error
    # At an interactive prompt, `last_value` is any earlier error.
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def _close_all() -> None:
    for one in list(_open):
        _close(one)


def _abandon_all() -> None:
    for one in list(_open):
        one.abandon()
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
