"""The last sessions that ended, with the reasons."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from loom.errors import LoomError, SessionLost, UnknownSession, because
from loom.process.state_file import write_json
from loom.token_file import ADMIN
from loom_gateway.sessions.state_dir import DriverRecord, LastWords

KEEP = 100  # the number of ended sessions to remember of each user
KEEP_IN_ALL = 400  # and of all users; beyond it, the oldest of the user with the most is forgotten

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EndedSessionInfo:
    """A session that is over, as REST describes it."""

    name: str
    reason: str
    exit_code: int | None
    """The driver's exit code; negative: the signal that killed it; None: unknown."""
    created_at: float
    """Seconds since the epoch, as is `ended_at`."""
    ended_at: float
    user: str
    """The user to whom it belonged."""


@dataclass(frozen=True)
class EndedSession(EndedSessionInfo):
    """A session that is over, as the gateway remembers it."""

    lost: bool
    """True if its driver ended unintentionally."""
    output: str
    """The last lines of the driver's output."""
    log: str
    """The path of the session's log."""
    moves: int = 0
    """How often it had moved to another session host."""

    @property
    def shared(self) -> Mapping[str, str]:
        """The users with whom it is shared: none, because a share lasts as long as the session."""
        return {}

    @classmethod
    def of(cls, record: DriverRecord, words: LastWords, how: str, output: Sequence[str], log: str) -> EndedSession:
        """Return the entry of a session whose driver has ended; ``how`` counts if no reason was left."""
        return cls(
            name=record.session,
            reason=words.reason or f"its driver {how}",
            exit_code=words.exit_code,
            created_at=record.created,
            ended_at=time.time(),
            user=record.user,
            lost=not words.reason,
            output="\n".join(output),
            log=log,
            moves=record.moves,
        )

    def error(self) -> LoomError:
        """Return the error for a client that wants to attach to the session."""
        if self.lost:
            return SessionLost(
                f"{because(f'session {self.name!r} is lost', self.reason)}; its meshes are stopped. "
                "Open a new one with loom.connect." + (f" Its last output:\n{self.output}" if self.output else ""),
                self.exit_code,
                self.output,
            )
        return UnknownSession(
            f"{because(f'session {self.name!r} has ended', self.reason)}. Open a new one with loom.connect."
        )


@dataclass(frozen=True)
class SessionEnd:
    """The end of a session, as an audit has it."""

    opened_by: str
    """The id of the token."""
    user: str
    session: str
    reason: str
    exit_code: int | None


OnEnd: TypeAlias = Callable[[SessionEnd], Future[None] | None]
"""Writes the end of a session down; returns what is done once the disk has, or refuses, it."""


class EndedSessions:
    """The last `KEEP` ended sessions of each user, the newest last.

    The next gateway finds them in the file ``path``, if there is one.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._sessions: list[EndedSession] = [] if path is None else self._read(path)
        self._writing = asyncio.Lock()

    @staticmethod
    def _read(path: str) -> list[EndedSession]:
        try:
            # An older gateway noted no users: what it knew is for the admin.
            before: dict[str, object] = {"user": ADMIN}
            return [EndedSession(**(before | values)) for values in json.loads(Path(path).read_text())]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            logger.warning("the sessions that ended earlier cannot be read from %s: %s", path, error)
            return []

    def add(self, session: EndedSession) -> None:
        self._sessions.append(session)
        users = Counter(one.user for one in self._sessions)
        if users[session.user] > KEEP:
            self._forget_oldest(session.user)
        elif len(self._sessions) > KEEP_IN_ALL:
            self._forget_oldest(users.most_common(1)[0][0])

    async def write(self) -> None:
        """Write the sessions down for the next gateway. The disk does not hold up the event loop."""
        if self._path is None:
            return
        async with self._writing:
            try:
                await asyncio.to_thread(write_json, self._path, list(self._sessions))
            except OSError as error:
                logger.warning("the last sessions that ended cannot be written down: %s", error)

    def _forget_oldest(self, user: str) -> None:
        self._sessions.remove(next(one for one in self._sessions if one.user == user))

    def all(self) -> list[EndedSession]:
        return list(self._sessions)

    def get(self, name: str) -> EndedSession | None:
        return next((session for session in self._sessions if session.name == name), None)
