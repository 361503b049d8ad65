"""Exceptions about a session: its waits and runs, and the folders that are synced to its hosts."""

from __future__ import annotations

from concurrent.futures import CancelledError

from loom.errors.base import (
    Conflict,
    Denied,
    Invalid,
    LimitReached,
    LoomError,
    NameTaken,
    NotFound,
    Unavailable,
    WrongState,
)


class UnknownSession(NotFound, code="unknown_session", exit_status=8):
    """No living session has the requested name."""


class SessionInUse(Conflict, code="session_in_use"):
    """Another client is connected to the session."""


class SessionTakenOver(LoomError, code="session_taken_over"):
    """Another client has taken over the session from this one. The session lives on."""


class WatcherTooSlow(LoomError, code="watcher_too_slow"):
    """A watching client did not read fast enough; it may attach again."""


class ReadOnlySession(Denied, code="read_only_session", http_status=500, exit_status=1):
    """A watching client tried to change something."""


class SessionClosed(LoomError, code="session_closed"):
    """The session was closed or detached from here, so that its proxies are unusable."""


class SessionLost(LoomError, code="session_lost", http_status=410):
    """The session's driver process ended.

    ``exit_code`` is the process's exit code (negative: the signal that killed it), or None if it is unknown;
    ``output`` is the last lines that it printed.
    """

    def __init__(self, message: str, exit_code: int | None = None, output: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.output = output


class ConnectionLost(Unavailable, code="connection_lost", http_status=404):
    """The connection to the gateway broke while a caller was waiting for an answer."""


class WaitTimeout(LoomError, TimeoutError, code="timeout"):
    """`FutureProxy.get` waited for ``timeout`` seconds.

    The operation goes on, and a caller can wait for it again.
    """


class OperationCancelled(LoomError, CancelledError, code="cancelled"):
    """An operation was cancelled before it started, or a run was cancelled.

    It is a `concurrent.futures.CancelledError`, an ordinary `Exception`, not an ``asyncio.CancelledError``.
    """


class NoSuchRun(NotFound, code="no_such_run", http_status=500, exit_status=1):
    """The driver has no run with that id or name: it never existed, or was forgotten after it had finished."""


class TooManyRuns(LimitReached, code="too_many_runs", http_status=500):
    """The driver runs as many functions as it allows; the text has the number."""


class NotAFolder(LoomError, NotADirectoryError, code="not_a_folder"):
    """The argument of `Job.sync` is no folder."""


class UnreadableFile(Denied, code="unreadable_file", http_status=500, exit_status=1):
    """A file or folder in a folder to sync cannot be read, or its name is not UTF-8."""


class FileChanged(LoomError, code="file_changed"):
    """A file changed while it was being read. Nothing was synced; sync again."""


class SyncFailed(LoomError, code="sync_failed"):
    """A host could not store a synced folder, or no longer has it; the text says which host and why."""


NoOpenJob = WrongState
RunNameTaken = NameTaken
SyncNameTaken = NameTaken
UnsafeLink = Invalid
