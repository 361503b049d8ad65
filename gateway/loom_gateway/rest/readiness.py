"""The readiness of a gateway: whether it takes new sessions, and how many of its workers answer."""

from __future__ import annotations

import asyncio
import time
from enum import Enum

from pydantic import BaseModel

from loom_gateway.access.audit import Audit
from loom_gateway.sessions.directory import SessionDirectory
from loom_gateway.workers.watcher import answers

CHECKED_FOR = 5.0
"""Seconds for which an answer is given again: nobody needs a token to ask."""


class ReadyStatus(str, Enum):
    """Whether a gateway takes new sessions."""

    OK = "ok"
    DRAINING = "draining"
    """The gateway was told to stop."""
    STATE_NOT_WRITABLE = "state_not_writable"
    """The state folder cannot be written, as when its disk is full: no session can be opened."""
    NO_SESSION_HOST = "no_session_host"
    """No session host answers and takes sessions."""
    AUDIT_NOT_WRITABLE = "audit_not_writable"
    """The audit cannot be written, and is required."""


class Ready(BaseModel):
    """The readiness of a gateway.

    Workers that do not answer leave it ready: their sessions live, and clients have to reach these.
    """

    status: ReadyStatus = ReadyStatus.OK
    reason: str = ""
    """The fault, in a sentence."""
    workers: int = 0
    """The number of known workers."""
    workers_reachable: int = 0
    """The number of workers that answer."""


class Readiness:
    """Checks a gateway's workers, and its state folder or session hosts."""

    def __init__(self, sessions: SessionDirectory, audit: Audit) -> None:
        self._sessions = sessions
        self._audit = audit
        self._checked: Ready | None = None
        self._at = 0.0
        self._checking = asyncio.Lock()

    async def check(self, draining: bool) -> Ready:
        """Return the readiness, which may be some seconds old."""
        async with self._checking:
            if self._checked is None or time.monotonic() - self._at > CHECKED_FOR:
                self._checked = await self._check()
                self._at = time.monotonic()
        if draining:
            return self._checked.model_copy(update={"status": ReadyStatus.DRAINING})
        if self._audit.refuses:
            why = f"the audit cannot be written: {self._audit.failure}"
            return self._checked.model_copy(update={"status": ReadyStatus.AUDIT_NOT_WRITABLE, "reason": why})
        return self._checked

    async def _check(self) -> Ready:
        addresses = list(self._sessions.workers)
        answering = await asyncio.gather(*map(answers, addresses))
        reason = await self._sessions.cannot_open()
        status = self._sessions.unready if reason else ReadyStatus.OK
        return Ready(
            status=ReadyStatus(status), reason=reason, workers=len(addresses), workers_reachable=sum(answering)
        )
