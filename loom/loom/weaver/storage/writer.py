"""`StoreWriter`: writes the commits of one user's weaver, one after the other, beside the event loop.

The event loop never waits for the disk. While a commit is written, further changes collect for the next one.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import Executor, Future

from loom.weaver.storage.commit import Commit
from loom.weaver.storage.store import Store

_log = logging.getLogger(__name__)


class StoreWriter:
    """Writes commits on other threads.

    Args:
        threads: where to write; at least two, because a checkpoint may take long.
        failed: called on the event loop when the store is broken, after which nothing may be written.
    """

    def __init__(self, store: Store, threads: Executor, failed: Callable[[Exception], object]) -> None:
        self._store = store
        self._threads = threads
        self._failed = failed
        self._writing: Future[None] | None = None
        self._commit: Commit | None = None
        self._then: Callable[[], object] = lambda: None
        self._checkpoint: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a commit is being written; nothing may be written beside it."""
        return self._writing is not None

    def write(self, commit: Commit, then: Callable[[], object]) -> None:
        """Write a commit, and call something on the event loop when it is stored."""
        loop = asyncio.get_running_loop()
        self._commit, self._then = commit, then
        self._writing = writing = self._threads.submit(self._store.write, commit)
        writing.add_done_callback(lambda done: loop.call_soon_threadsafe(self._finish, done))

    def wait(self) -> None:
        """Wait until the commit that is being written is stored, if there is one."""
        if self._writing is not None:
            self._writing.exception()
            self._finish(self._writing)

    def close(self) -> None:
        """Close the store, after what is being written."""
        self.wait()
        if self._checkpoint is not None:
            self._checkpoint.exception()
        self._store.close()

    def _finish(self, done: Future[None]) -> None:
        if done is not self._writing:  # `wait` was faster
            return
        self._writing = None
        try:
            done.result()
        except sqlite3.Error as error:
            self._failed(error)
            return
        assert self._commit is not None
        self._commit.stored()
        self._then()
        if self._store.checkpoint_due and (self._checkpoint is None or self._checkpoint.done()):
            self._checkpoint = self._threads.submit(self._checkpoint_store)

    def _checkpoint_store(self) -> None:
        try:
            self._store.checkpoint()
        except sqlite3.Error as error:  # everything is in SQLite's log; the next checkpoint moves it
            _log.warning("the store's log cannot be moved into its file: %s", error)
