"""A user's session and its states."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from loom.errors import LoomError
from loom_gateway.sessions.driver_files import DriverRecord
from loom_gateway.sessions.driver_process import DriverProcess
from loom_gateway.sessions.history import EndedSession


class SessionState(str, enum.Enum):
    """The states of a session."""

    STARTING = "starting"
    OPEN = "open"
    ENDING = "ending"
    ENDED = "ended"


_NEXT = {
    SessionState.STARTING: {SessionState.OPEN, SessionState.ENDING, SessionState.ENDED},
    SessionState.OPEN: {SessionState.ENDING, SessionState.ENDED},
    SessionState.ENDING: {SessionState.ENDED},
    SessionState.ENDED: set[SessionState](),
}


class Link(Protocol):
    """A connection between a client and a driver, with its counters."""

    frames: int
    bytes_in: int
    bytes_out: int


class Traffic:
    """Counters of what this gateway has relayed between a session's clients and its driver."""

    def __init__(self) -> None:
        self._earlier = Counter[str]()  # totals of the connections that have ended
        self._links: set[Link] = set()

    @contextlib.contextmanager
    def on(self, link: Link) -> Iterator[None]:
        """Include a connection's counters while it is open, and keep their totals afterwards."""
        self._links.add(link)
        try:
            yield
        finally:
            self._links.discard(link)
            self._earlier.update(frames=link.frames, bytes_in=link.bytes_in, bytes_out=link.bytes_out)

    @property
    def frames(self) -> int:
        """Frames towards the driver."""
        return self._earlier["frames"] + sum(link.frames for link in self._links)

    @property
    def bytes_in(self) -> int:
        """Bytes towards the driver."""
        return self._earlier["bytes_in"] + sum(link.bytes_in for link in self._links)

    @property
    def bytes_out(self) -> int:
        """Bytes towards the clients."""
        return self._earlier["bytes_out"] + sum(link.bytes_out for link in self._links)


@dataclass
class Session:
    """One user's session: its driver, its state and its counters."""

    name: str
    driver: DriverProcess
    record: DriverRecord
    """The driver's record, which the next gateway finds."""
    created_at: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    state: SessionState = SessionState.STARTING
    clients: int = 0
    """The number of connected clients."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the driver has ended and the reason is noted."""
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def owner(self) -> str:
        """The id of the token that opened the session; ``gateway`` for the gateway's own."""
        return self.record.owner

    @property
    def persist(self) -> bool:
        """Whether the session never ends for lack of a client."""
        return self.record.persist

    @property
    def pid(self) -> int:
        """The process id of the driver."""
        return self.driver.pid

    @property
    def client_connected(self) -> bool:
        """Whether any client is connected."""
        return self.clients > 0

    @property
    def operations(self) -> int:
        """The number of frames that clients have sent to this gateway."""
        return self.traffic.frames

    @property
    def is_ending(self) -> bool:
        """Whether the session takes no more clients."""
        return self.state in (SessionState.ENDING, SessionState.ENDED)

    def move_to(self, state: SessionState) -> None:
        """Change the state.

        Raises:
            RuntimeError: the current state never changes to that one.
        """
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"session {self.name!r} cannot become {state.value}: it is {self.state.value}")
        self.state = state

    def begin_to_end(self) -> None:
        """Stop taking clients. Idempotent: a user, the driver and the end of a token may all end a session."""
        if not self.is_ending:
            self.move_to(SessionState.ENDING)

    def ended(self) -> EndedSession:
        """Return the session's entry in the history, when its driver has ended or is ending."""
        reason = self.driver.reason or self.driver.files.read_last_words().reason
        return EndedSession(
            self.name,
            reason or f"its driver {self.driver.how_it_ended}",
            lost=not reason,
            exit_code=self.driver.exit_code,
            created_at=self.created_at,
            ended_at=time.time(),
            output="\n".join(self.driver.output),
            log=self.driver.files.log,
        )

    def ended_error(self) -> LoomError:
        """Return the error for a client whose driver has ended or is ending."""
        return self.ended().error()
