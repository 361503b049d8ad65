"""Exceptions about a session: what waits or runs in it, and folders that are synced to its hosts."""

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
    """No living session has the name that was asked for."""


class SessionInUse(Conflict, code="session_in_use"):
    """Another client is connected to the session."""


class SessionTakenOver(LoomError, code="session_taken_over"):
    """Another client has taken the place of this one in the session, which lives on."""


class WatcherTooSlow(LoomError, code="watcher_too_slow"):
    """A client that watches did not take what it was sent; it may attach again."""


class ReadOnlySession(Denied, code="read_only_session", http_status=500, exit_status=1):
    """A client that watches tried to change something."""


class SessionClosed(LoomError, code="session_closed"):
    """The session was closed or detached from here; its proxies cannot be used any more."""


class SessionLost(LoomError, code="session_lost", http_status=410):
    """The session's driver process ended.

    ``exit_code`` is its exit code (negative: the signal that killed it), or None where it is not known;
    ``output`` is the last lines that it printed.
    """

    def __init__(self, message: str, exit_code: int | None = None, output: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.output = output


class ConnectionLost(Unavailable, code="connection_lost", http_status=404):
    """The connection to the gateway broke while something was waiting for an answer."""


class WaitTimeout(LoomError, TimeoutError, code="timeout"):
    """`FutureProxy.get` waited for ``timeout`` seconds. The operation goes on and can be waited for again."""


class OperationCancelled(LoomError, CancelledError, code="cancelled"):
    """An operation was taken back before it was started, or a run was cancelled.

    A `concurrent.futures.CancelledError`, which is an ordinary `Exception`; it is not ``asyncio.CancelledError``.
    """


class NoSuchRun(NotFound, code="no_such_run", http_status=500, exit_status=1):
    """The driver has no run of that id or name: it never had, or has forgotten it since it finished."""


class TooManyRuns(LimitReached, code="too_many_runs", http_status=500):
    """As many functions run in the driver as it allows; the text has the number."""


class NotAFolder(LoomError, NotADirectoryError, code="not_a_folder"):
    """`Job.sync` was given a path that is no folder."""


class UnreadableFile(Denied, code="unreadable_file", http_status=500, exit_status=1):
    """A file or a folder inside a folder that is to be synced cannot be read, or has a name that is not UTF-8."""


class FileChanged(LoomError, code="file_changed"):
    """A file was changed while it was being read. Nothing was synced; sync again."""


class SyncFailed(LoomError, code="sync_failed"):
    """A host could not take a synced folder, or no longer has it; the text says which host and why."""


NoOpenJob = WrongState
RunNameTaken = NameTaken
SyncNameTaken = NameTaken
UnsafeLink = Invalid
