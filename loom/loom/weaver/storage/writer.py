"""`StoreWriter`: writes the commits of one user's weaver, one after the other, beside the event loop.

The event loop never waits for the disk. While a commit is written, further changes collect for the next one. A
commit that a full disk does not take is written again until it does.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import NamedTuple

from loom.errors import Conflict
from loom.weaver.storage.store import Commit, Store

_log = logging.getLogger(__name__)

RETRY = 1.0
"""Seconds after which a commit is written again that the disk did not take."""

_PASSING = ("full", "disk i/o", "unable to open", "readonly", "locked", "out of memory")
"""Words of SQLite's errors that say nothing against the store's file."""


class Undurable(NamedTuple):
    """Why nothing is stored now."""

    since: float
    """Seconds since the epoch."""
    reason: str


class StoreWriter:
    """Writes commits on other threads.

    Args:
        threads: where to write; at least two, because a checkpoint may take long.
        clock: returns the seconds since the epoch, and never goes back.
        failed: called on the event loop when the store is broken, after which nothing may be written.
        changed: called on the event loop with what `undurable` was, whenever it has begun or ended.
    """

    def __init__(
        self,
        store: Store,
        threads: Executor,
        clock: Callable[[], float],
        failed: Callable[[Exception], object],
        changed: Callable[[Undurable | None], object],
    ) -> None:
        self._store = store
        self._threads = threads
        self._clock = clock
        self._failed = failed
        self._changed = changed
        self.undurable: Undurable | None = None
        """Why nothing is stored now; None if it is."""
        self._writing: Future[None] | None = None
        self._again: asyncio.TimerHandle | None = None
        self._commit: Commit | None = None
        """The commit that is being written, or waits for room."""
        self._then: Callable[[], object] = lambda: None
        self._checkpoint: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """True if a commit is being written; nothing may be written beside it."""
        return self._commit is not None

    def write(self, commit: Commit, then: Callable[[], object]) -> None:
        """Write a commit, and call something on the event loop when it is stored."""
        self._commit, self._then = commit, then
        self._submit(commit)

    def write_now(self, commit: Commit, then: Callable[[], object]) -> None:
        """Write a commit as `write` does, and wait for it."""
        self.write(commit, then)
        self.wait()

    def wait(self) -> None:
        """Wait until the commit that is being written, if there is one, is stored or was not taken by the disk."""
        if self._writing is not None:
            self._writing.exception()
            self._finish(self._writing)

    def close(self) -> None:
        """Close the store, after what is being written."""
        self.wait()
        if self._again is not None:
            self._again.cancel()
        if self.undurable is not None:
            _log.error("the weaver ends, and what came since its store has no room is lost")
        if self._checkpoint is not None:
            self._checkpoint.exception()
        self._store.close()

    def _submit(self, commit: Commit) -> None:
        loop = asyncio.get_running_loop()
        self._again = None
        self._writing = writing = self._threads.submit(self._store.write, commit)
        writing.add_done_callback(lambda done: loop.call_soon_threadsafe(self._finish, done))

    def _finish(self, done: Future[None]) -> None:
        if done is not self._writing:  # `wait` was faster
            return
        commit, self._writing = self._commit, None
        assert commit is not None
        try:
            done.result()
        except (sqlite3.Error, OSError, Conflict) as error:
            if _passes(error):
                self._try_again(commit, error)
            else:
                self._failed(error)
            return
        self._commit = None
        commit.stored()
        if self.undurable is not None:
            before, self.undurable = self.undurable, None
            _log.warning(
                "there is room again: the store takes what came since %.0f s", self._clock() - before.since
            )
            self._changed(before)
        self._then()
        if self._store.checkpoint_due and (self._checkpoint is None or self._checkpoint.done()):
            self._checkpoint = self._threads.submit(self._checkpoint_store)

    def _try_again(self, commit: Commit, error: Exception) -> None:
        self._again = asyncio.get_running_loop().call_later(RETRY, self._submit, commit)
        if self.undurable is None:
            self.undurable = Undurable(self._clock(), str(error))
            _log.error("the store takes nothing now, and is tried every %g s: %s", RETRY, error)
            self._changed(None)

    def _checkpoint_store(self) -> None:
        try:
            self._store.checkpoint()
        except sqlite3.Error as error:  # everything is in SQLite's log; the next checkpoint moves it
            _log.warning("the store's log cannot be moved into its file: %s", error)


def _passes(error: Exception) -> bool:
    """Return whether the same commit may be written later: the disk is full, or does not answer now."""
    said = isinstance(error, sqlite3.OperationalError) and any(word in str(error).lower() for word in _PASSING)
    return said or isinstance(error, OSError)
