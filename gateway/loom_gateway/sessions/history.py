"""The last sessions that ended, with the reasons."""

from __future__ import annotations

import json
import logging
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from loom.errors import LoomError, SessionLost, UnknownSession
from loom_gateway.sessions.driver_files import write_atomically

KEEP = 100
"""The number of ended sessions to remember."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EndedSession:
    """A session that is over."""

    name: str
    reason: str
    lost: bool
    """Whether its driver ended unintentionally."""
    exit_code: int | None
    """The driver's exit code; negative: the signal that killed it; None: unknown."""
    created_at: float
    """Seconds since the epoch, as is `ended_at`."""
    ended_at: float
    output: str
    """The last lines of the driver's output."""
    log: str
    """The path of the session's log."""

    def error(self) -> LoomError:
        """Return the error for a client that wants to attach to the session."""
        if self.lost:
            return SessionLost(
                f"session {self.name!r} is lost: {self.reason}; its meshes are stopped. Open a new one with "
                f"loom.connect." + (f" Its last output:\n{self.output}" if self.output else ""),
                self.exit_code,
                self.output,
            )
        return UnknownSession(f"session {self.name!r} has ended: {self.reason}. Open a new one with loom.connect.")


class EndedSessions:
    """The last `KEEP` ended sessions, the newest last.

    Args:
        path: a file in which the next gateway finds them; None if no gateway will follow.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._sessions: deque[EndedSession] = deque(self._read(), maxlen=KEEP)

    def _read(self) -> list[EndedSession]:
        if self._path is None:
            return []
        try:
            return [EndedSession(**values) for values in json.loads(Path(self._path).read_text())]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            logger.warning("the sessions that ended earlier cannot be read from %s: %s", self._path, error)
            return []

    def add(self, session: EndedSession) -> None:
        """Note that a session has ended."""
        self._sessions.append(session)
        if self._path is not None:
            try:
                write_atomically(self._path, json.dumps([asdict(session) for session in self._sessions]))
            except OSError as error:
                logger.warning("the end of session %s cannot be written down: %s", session.name, error)

    def all(self) -> list[EndedSession]:
        """Return the remembered sessions, the newest last."""
        return list(self._sessions)

    def get(self, name: str) -> EndedSession | None:
        """Return a session by name, or None if it is not remembered."""
        return next((session for session in self._sessions if session.name == name), None)
