"""A user's session and its states."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from loom.session_life import AliveBecause
from loom.wire.messages import Buffer
from loom_gateway.sessions.driver_files import LastWords
from loom_gateway.sessions.driver_process import DriverProcess
from loom_gateway.sessions.driver_questions import DriverQuestions
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


@dataclass
class Traffic:
    """Counters of what this gateway has relayed between a session's clients and its driver."""

    frames: int = 0  # towards the driver
    bytes_in: int = 0  # towards the driver, including the frames' lengths
    bytes_out: int = 0  # towards the clients
    observer: Callable[[str, bool, Sequence[Buffer]], None] | None = None
    """Is given each frame, if there is one: the client's stream, whether it goes to the driver, and its pieces."""


@dataclass
class UserSession:
    """One user's session: its driver, its state and its counters."""

    driver: DriverProcess
    """The driver, whose record describes the session to the next gateway."""
    state: SessionState = SessionState.STARTING
    clients: int = 0
    greeted: int = 0
    """Clients that wait for the driver's answer to their hello."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the driver has ended and the reason is noted."""
    traffic: Traffic = field(default_factory=Traffic)
    questions: DriverQuestions = field(init=False, repr=False, compare=False)
    """What is asked of the driver for those who look at the session."""

    def __post_init__(self) -> None:
        self.questions = DriverQuestions(self.driver)

    @property
    def name(self) -> str:
        return self.driver.record.session

    @property
    def created_at(self) -> float:
        return self.driver.record.created

    @property
    def owner(self) -> str:
        """The id of the token that opened it."""
        return self.driver.record.owner

    @property
    def tokens(self) -> tuple[str, ...]:
        """The ids of its user's tokens that opened and drove it. It ends when none of them is good any more."""
        return self.owner, *self.driver.record.driven_with

    @property
    def user(self) -> str:
        """The user to whom it belongs."""
        return self.driver.record.user

    @property
    def shared(self) -> Mapping[str, str]:
        """The users with whom it is shared, each with the scope that they have in it."""
        return self.driver.record.shared

    @property
    def persist(self) -> bool:
        return self.driver.record.persist

    @property
    def pid(self) -> int:
        return self.driver.pid

    @property
    def client_connected(self) -> bool:
        return self.clients > 0

    @property
    def alive_because(self) -> Sequence[AliveBecause]:
        """The reasons for which it lives, as its driver told last; none if it has not told."""
        return self.questions.last_life.because

    @property
    def lives_until(self) -> float | None:
        return self.questions.last_life.until

    @property
    def operations(self) -> int:
        """The number of frames that clients have sent to this gateway."""
        return self.traffic.frames

    @property
    def is_ending(self) -> bool:
        return self.state in (SessionState.ENDING, SessionState.ENDED)

    def move_to(self, state: SessionState) -> None:
        """Change the state. Raise `RuntimeError` if the current one never changes to that one."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"session {self.name!r} cannot become {state.value}: it is {self.state.value}")
        self.state = state

    def begin_to_end(self) -> None:
        """Stop taking clients. Idempotent: a user, the driver and the end of a token may all end a session."""
        if not self.is_ending:
            self.move_to(SessionState.ENDING)

    def ended(self) -> EndedSession:
        """Return the session's entry in the history, when its driver has ended or is ending."""
        driver = self.driver
        words = LastWords(driver.reason or driver.files.read_last_words().reason, driver.exit_code)
        return EndedSession.of(driver.record, words, driver.how_it_ended, driver.output, driver.files.log)


LIVES_PATIENCE = 2.0
"""Seconds after which no further driver is asked."""

LIVES_AT_ONCE = 16
"""Drivers that are asked at once until when their sessions live."""


async def ask_lives(sessions: Iterable[UserSession]) -> None:
    """Ask the drivers until when their sessions live. Those that do not answer soon keep their last answers."""
    left, loop = iter(sessions), asyncio.get_running_loop()
    until = loop.time() + LIVES_PATIENCE

    async def ask_on() -> None:
        for session in left:
            await session.questions.life()
            if loop.time() > until:
                return

    await asyncio.gather(*(ask_on() for _ in range(LIVES_AT_ONCE)))
