"""`SessionDirectory`, the sessions that a gateway serves, wherever their drivers are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from loom_gateway.sessions.ended_sessions import EndedSession, EndedSessions, OnEnd
from loom_gateway.sessions.logs import LogQuery
from loom_gateway.sessions.session import UserSession


class ReadableLogs(Protocol):
    """The logs of sessions; see `loom_gateway.sessions.logs.SessionLogs`."""

    async def read(self, session: str, query: LogQuery, user: str) -> AsyncIterator[bytes]:
        """Yield the matching lines that a log has now."""

    async def follow(self, session: str, query: LogQuery, user: str) -> AsyncIterator[bytes]:
        """Yield the matching lines, old and new, until the session ends."""

    def stop_following(self) -> None:
        """End every `follow`."""


class SessionDirectory(Protocol):
    """The sessions of this machine (`SessionManager`), or those of session hosts (`SessionHosts`)."""

    end_sessions: bool
    """True if `close` ends the sessions too."""
    on_end: OnEnd
    """Is called once for each session that ends, by one gateway of all."""

    @property
    def logs(self) -> ReadableLogs:
        """The sessions' logs."""

    @property
    def ended(self) -> EndedSessions:
        """The last sessions that have ended."""

    @property
    def isolation(self) -> tuple[bool, bool]:
        """True if drivers have user ids of their own, and whether users have workers of their own."""

    @property
    def spare_ready(self) -> bool:
        """True if a warm driver waits for the next session."""

    @property
    def workers(self) -> Sequence[str]:
        """The addresses of the workers that are known."""

    @property
    def workers_missing(self) -> str:
        """The workers that have not been found yet, and advice; empty if all have been."""

    @property
    def unready(self) -> str:
        """The `ReadyStatus` of a gateway whose sessions `cannot_open`."""

    async def cannot_open(self) -> str:
        """Return why no session can be opened now; empty if one can."""

    def sessions(self) -> list[UserSession]:
        """Return the living sessions."""

    def awaited(self) -> list[UserSession]:
        """Return the sessions that a gateway waits for before it ends: not those that outlive it."""

    def find(self, name: str) -> UserSession | EndedSession | None:
        """Return a session, one that lives before one that has ended. `AccessControl` decides on access."""

    async def look_up(self, name: str) -> None:
        """Learn of a session that another gateway may have opened a moment ago, so that it can be found."""

    def get(self, name: str) -> UserSession:
        """Return a living session, or raise why there is none."""

    def opened_by(self, user: str, opening: str) -> UserSession | None:
        """Return the session of a user that an earlier hello with the same made-up name has opened, or None."""

    async def create(self, owner: str, user: str, opening: str) -> UserSession:
        """Open a session of a user, with the token with the id ``owner``."""

    async def share(self, session: UserSession, user: str, scope: str | None) -> None:
        """Share a session with a user, or with ``None`` not any more."""

    async def drive(self, session: UserSession, token: str) -> None:
        """Note that a session's user drives it with a token of that id."""

    async def persist(self, session: UserSession) -> None:
        """Note that a session never ends for lack of a client."""

    def client(self, session: UserSession) -> AbstractContextManager[None]:
        """Count a client of a session."""

    async def end(self, session: UserSession, reason: str) -> None:
        """End a session; return when it has ended."""

    async def adopt(self, user_of: Callable[[str], str]) -> None:
        """Take over the sessions that there are. ``user_of`` returns the user of a token, given its id."""

    def prepare_spare(self) -> None:
        """Start a warm driver for the next session, unless there is one."""

    def end_all(self) -> Awaitable[None]:
        """End every session if `end_sessions` is set, while the clients can still be notified."""

    def close(self) -> Awaitable[None]:
        """Let the sessions go on, or end them if `end_sessions` is set."""

    def abandon(self) -> None:
        """Do the immediate part of `close` when this process ends with its parent. Safe on any thread."""
