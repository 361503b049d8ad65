"""The end of the process, and its forks: threadlets say goodbye at the one and are let go of in the other."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from multiprocessing.util import Finalize
from typing import Protocol


class Closable(Protocol):
    """What has a connection that the end of the process closes."""

    def close(self, error: BaseException | None = None) -> None: ...

    def abandon(self) -> None:
        """Let go of the connection, in a forked child."""


_open: set[Closable] = set()
"""Those of this process that have a link and are not closed."""


def opened(one: Closable) -> None:
    """Close something with the process, unless `closed` is called before."""
    _open.add(one)
    if multiprocessing.parent_process() is not None:
        # Such a child ends without the functions of `atexit`, but with these.
        Finalize(one, _close, (one,), exitpriority=10)


def closed(one: Closable) -> None:
    """Note that something is closed."""
    _open.discard(one)


def _close(one: Closable) -> None:
    one.close(_fatal_error())


def _fatal_error() -> BaseException | None:
    """Return what the interpreter ends of, as far as it is known here: not the code of a `sys.exit`."""
    if (error := sys.exc_info()[1]) is not None:
        return error
    # At a prompt, this is any earlier mistake.
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
