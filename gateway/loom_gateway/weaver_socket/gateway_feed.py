"""The gateway's own part of what pages get: the sessions that each page's principal may see, and the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel

from loom.process import tasks
from loom.process.tasks import Turns
from loom.wire.plain import exact_json
from loom_gateway.access.control import AccessControl
from loom_gateway.access.sessions import Principal
from loom_gateway.rest.sessions import SessionInfo
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.sessions.session import UserSession, ask_lives
from loom_gateway.weaver_socket.subscribers import Since, SubscribingReader
from loom_gateway.workers.watcher import answers

SESSIONS_EVERY = 1.0
"""Seconds between two comparisons of the sessions with those that a page has."""

OPERATIONS_EVERY = 5
"""Comparisons between two pushes of sessions in which only the number of operations has changed."""

LIVES_EVERY = 3.0
"""Seconds between two questions to the sessions' drivers until when they live."""

WORKERS_EVERY = 5.0
"""Seconds between two checks of the workers, while there is a page."""


class WorkerInfo(BaseModel):
    """A worker host."""

    address: str
    reachable: bool
    """True if the worker answers now."""


async def check_workers(addresses: Sequence[str]) -> list[WorkerInfo]:
    """Return each worker with whether it answers now."""
    reachable = await asyncio.gather(*map(answers, addresses))
    return [WorkerInfo(address=address, reachable=one) for address, one in zip(addresses, reachable, strict=True)]


class GatewayFeed:
    """Pushes changes of sessions and workers to pages."""

    def __init__(self, manager: SessionManager, access: AccessControl) -> None:
        self._manager = manager
        self._access = access
        self._pages: dict[PageReader, None] = {}
        self._workers: list[Mapping[str, object]] | None = None
        """The workers at the last check; None before it."""
        self._described: dict[str, Mapping[str, object]] = {}
        """The sessions that pages see, by name, as they were at the last comparison."""
        self._tasks: list[asyncio.Task[Any]] = []

    def reader(self, principal: Principal, since: Since | None = None) -> PageReader:
        """Return a reader whose snapshots have the sessions that a principal may see, and the workers."""
        return PageReader(self, principal, since)

    @contextmanager
    def reading(self, page: PageReader) -> Iterator[None]:
        """Push each change to a reader, once it has a snapshot."""
        self._pages[page] = None
        if not self._tasks:
            self._tasks = [
                tasks.keep_running("compare sessions", self._compare_sessions),
                tasks.keep_running("ask until when sessions live", self._ask_lives),
                tasks.keep_running("check workers", self._check_workers),
            ]
        try:
            yield
        finally:
            del self._pages[page]
            if not self._pages:
                for task in self._tasks:
                    task.cancel()
                self._tasks = []
                self._workers = None
                self._described = {}

    @property
    def workers(self) -> list[Mapping[str, object]]:
        return self._workers or []

    def sessions(self, principal: Principal) -> list[Mapping[str, object]]:
        """Return the living sessions that a principal may see, as they were a moment ago."""
        return [self._described.get(one.name) or _describe(one) for one in self._access.sessions(principal)]

    async def look_at_sessions(self, principal: Principal) -> None:
        """Describe the sessions for a page that comes, in turns: this loop relays every session's calls."""
        turns = Turns()
        for session in self._access.sessions(principal):
            self._described[session.name] = self._describe_again(session, also_operations=True)
            await turns.rest()

    async def compare_sessions(self, also_operations: bool) -> None:
        """Push the sessions that have changed; numbers of operations count only with ``also_operations``."""
        turns = Turns()
        described: dict[str, Mapping[str, object]] = {}
        shown: dict[tuple[str, bool], list[Mapping[str, object]]] = {}
        for page in list(self._pages):
            whose = (page.principal.user, page.principal.is_admin)
            if whose in shown:
                continue
            found = shown[whose] = []
            for session in self._access.sessions(page.principal):
                if session.name not in described:
                    described[session.name] = self._describe_again(session, also_operations)
                    await turns.rest()
                found.append(described[session.name])
        self._described = described
        for page in list(self._pages):
            sessions = shown.get((page.principal.user, page.principal.is_admin))
            if sessions is not None:
                page.push_sessions(sessions)
            await turns.rest()

    def _describe_again(self, session: UserSession, also_operations: bool) -> Mapping[str, object]:
        """Return a session's description; the same object as before if it has not changed."""
        new, before = _describe(session), self._described.get(session.name)
        if before is None:
            return new
        compared = new if also_operations else {**new, "operations": before["operations"]}
        return before if compared == before else new

    async def _compare_sessions(self) -> None:
        rounds = 0
        while True:
            await asyncio.sleep(SESSIONS_EVERY)
            rounds += 1
            await self.compare_sessions(also_operations=rounds % OPERATIONS_EVERY == 0)

    async def _ask_lives(self) -> None:
        while True:
            shown = {one.name: one for page in self._pages for one in self._access.sessions(page.principal)}
            await ask_lives(shown.values())
            await asyncio.sleep(LIVES_EVERY)

    async def _check_workers(self) -> None:
        while True:
            found = await check_workers(self._manager.worker_watch.hosts.addresses)
            workers: list[Mapping[str, object]] = [worker.model_dump() for worker in found]
            if workers != self._workers:
                self._workers = workers
                for page in list(self._pages):
                    page.push(workers=workers)
            await asyncio.sleep(WORKERS_EVERY)


class PageReader(SubscribingReader):
    """The reader of a page, with the changes of the gateway."""

    def __init__(self, feed: GatewayFeed, principal: Principal, since: Since | None) -> None:
        super().__init__(since)
        self._feed = feed
        self.principal = principal
        self._sessions: list[Mapping[str, object]] | None = None
        """The sessions that the page has; None before its first snapshot."""

    def own_part(self) -> Mapping[str, object]:
        self._sessions = self._feed.sessions(self.principal)
        return {"sessions": self._sessions, "workers": self._feed.workers}

    def push_sessions(self, sessions: list[Mapping[str, object]]) -> None:
        """Push the sessions if the page has others."""
        if self._sessions is not None and sessions != self._sessions:
            self._sessions = sessions
            self.push(sessions=sessions)

    def push(self, **changed: Any) -> None:
        """Push what has changed in the gateway, to a page that has a snapshot."""
        if self._sessions is not None:
            self.add(exact_json({"type": "delta", "replicas": {}, "devices": {}, **changed, "at": self.at}))


def _describe(session: UserSession) -> Mapping[str, object]:
    return SessionInfo.model_validate(session).model_dump(mode="json")
