"""A user's session and its states.

`DriverQuestions` are the gateway's questions to a session's driver for the people who look at the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from loom.errors import DriverUnavailable, LoomError, ProtocolMismatch, WrongState
from loom.session_alive import AliveBecause, SessionLife
from loom.wire.bodies import Describe
from loom.wire.frames import decode_frame
from loom.wire.handshake import error_from_refusal
from loom.wire.length_prefix import LENGTH, behind_length
from loom.wire.messages import Buffer, Kind
from loom.wire.stream import unnumbered_frame
from loom_gateway.offload import OFFLOAD, SMALL_WORK, Work
from loom_gateway.sessions.descriptions import SessionMeshes, SessionRuns, SessionTensors
from loom_gateway.sessions.driver_process import DriverProcess, NotOurDriver
from loom_gateway.sessions.ended_sessions import EndedSession, SessionEnd
from loom_gateway.sessions.restarts import restarted
from loom_gateway.sessions.state_dir import LastWords

logger = logging.getLogger(__name__)

PATIENCE = 3.0  # seconds that the driver has to answer
LIFE_PATIENCE = 1.0  # seconds that it has in a list of sessions, which has to come soon
SHARE = 0.1  # of its time that a driver describes its session at most, however many look at it
LONGEST_FRESH = 1.0  # seconds for which an answer is good for everyone who asks for the same
LONGEST = 8 << 20  # bytes of an answer


class DriverQuestions:
    """Asks one driver to describe its session, on one connection, for all who ask.

    A driver that is busy gets a question once: whoever asks meanwhile waits for the same answer.
    """

    def __init__(self, driver: DriverProcess) -> None:
        self._driver = driver
        self._asking: dict[str, asyncio.Task[bytes]] = {}
        self._turn = asyncio.Lock()  # held while a question is on its way
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._answers: dict[str, tuple[float, bytes]] = {}  # the last of each kind, and until when it is good
        self.last_life = SessionLife()
        """The last answer of `life`."""

    async def meshes(self) -> bytes:
        """Return the session's `SessionMeshes` as JSON. Raise as `ask` does."""
        return await self.ask("meshes")

    async def runs(self) -> bytes:
        """Return the session's `SessionRuns` as JSON. Raise as `ask` does."""
        return await self.ask("runs")

    async def tensors(self) -> bytes:
        """Return the session's `SessionTensors` as JSON. Raise as `ask` does."""
        return await self.ask("tensors")

    async def life(self) -> SessionLife:
        """Return until when the session lives; the last that is known if the driver does not answer soon."""
        with contextlib.suppress(LoomError, asyncio.TimeoutError):  # it is busy, ending, or of an older Loom
            told = await asyncio.wait_for(self.ask("life"), LIFE_PATIENCE)
            self.last_life = SessionLife.of(json.loads(told))
        return self.last_life

    async def ask(self, subject: str) -> bytes:
        """Return the description of ``meshes``, ``runs``, ``tensors`` or the ``life`` as JSON.

        Raises:
            DriverUnavailable: the driver is starting, ending, or too busy to answer in `PATIENCE` seconds.
            WrongState: it is of an older Loom, or its answer makes no sense; or nothing of it is called so.
        """
        if (kind := _SUBJECTS.get(subject)) is None:
            raise WrongState(f"no driver tells of {subject!r:.40}")
        until, answer = self._answers.get(subject, (0.0, b""))
        if time.monotonic() < until:
            return answer
        asking = self._asking.get(subject)
        if asking is None:
            asking = self._asking[subject] = asyncio.create_task(self._answer(subject, kind))
            asking.add_done_callback(functools.partial(self._asked, subject))
        try:
            return await asyncio.wait_for(asyncio.shield(asking), PATIENCE)
        except asyncio.TimeoutError:
            name = self._driver.record.session
            raise DriverUnavailable(
                f"the driver of session {name!r} has not answered within {PATIENCE:g} s: it is busy, perhaps "
                f"with a function of job.run; what it does goes on, and it may answer later"
            ) from None

    def _asked(self, subject: str, asking: asyncio.Task[bytes]) -> None:
        del self._asking[subject]
        if not asking.cancelled():
            asking.exception()  # whoever still waits gets it

    async def _answer(self, subject: str, kind: type) -> bytes:
        async with self._turn:
            began = time.monotonic()
            try:
                answer = await self._exchange(subject)
            except (OSError, EOFError, NotOurDriver) as error:
                self.close()
                raise DriverUnavailable(
                    f"the driver of session {self._driver.record.session!r} does not answer: it is ending, or has "
                    f"died ({error})"
                ) from None
            except BaseException:
                self.close()
                raise
        if len(answer) > SMALL_WORK:
            checked = await OFFLOAD.do(Work.DESCRIPTION, answer, kind.__name__)
        else:
            checked = check_description(answer, kind.__name__)
        now = time.monotonic()
        self._answers[subject] = (now + min((now - began) / SHARE, LONGEST_FRESH), checked)
        return checked

    async def _exchange(self, subject: str) -> bytes:
        reader, writer = self._connection = self._connection or await self._driver.connect()
        writer.write(behind_length(unnumbered_frame(Describe(subject).message())))
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > LONGEST:
            raise WrongState(f"the session's driver answers with {length} bytes, over the limit of {LONGEST}")
        messages = decode_frame(await reader.readexactly(length)).messages
        if len(messages) != 1:
            raise WrongState("the session's driver does not answer with one message")
        (message,) = messages
        if message.kind == Kind.DESCRIPTION:
            return b"".join(message.parts)
        if message.kind == Kind.REFUSE:
            raise self._refused(error_from_refusal(message))
        raise WrongState(f"the session's driver answers with a message {message.kind}")

    def _refused(self, error: LoomError) -> LoomError:
        if isinstance(error, ProtocolMismatch):
            name = self._driver.record.session
            return WrongState(
                f"session {name!r} is of an older Loom, whose driver cannot tell this: open a new one"
            )
        return error

    def close(self) -> None:
        """Close the connection, if there is one. The next question opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                connection[1].close()


_SUBJECTS: dict[str, type] = {
    "life": SessionLife,
    "meshes": SessionMeshes,
    "runs": SessionRuns,
    "tensors": SessionTensors,
}
_KINDS = {kind.__name__: kind for kind in _SUBJECTS.values()}


@functools.cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(_KINDS[kind])


def check_description(answer: bytes, kind: str) -> bytes:
    """Return a description as JSON again, without what does not belong there."""
    try:
        return _adapter(kind).dump_json(_adapter(kind).validate_json(answer))
    except ValidationError as error:
        logger.warning("a driver's answer makes no sense: %s", str(error)[:500])
        raise WrongState(f"the session's driver answers with no {kind}") from None


class SessionState(str, enum.Enum):
    """The states of a session."""

    STARTING = "starting"
    OPEN = "open"
    RESTARTING = "restarting"
    """Its driver has died, and another one is to start its functions with restarts again."""
    ENDING = "ending"
    ENDED = "ended"


_NEXT = {
    SessionState.STARTING: {
        SessionState.OPEN,
        SessionState.RESTARTING,
        SessionState.ENDING,
        SessionState.ENDED,
    },
    SessionState.OPEN: {SessionState.RESTARTING, SessionState.ENDING, SessionState.ENDED},
    SessionState.RESTARTING: {SessionState.OPEN, SessionState.ENDING, SessionState.ENDED},
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
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it takes no clients any more."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set unless the session is restarting."""
    moved: bool = False
    """True if it goes on on another session host."""
    why_not_yet: str = ""
    """Why the last attempt to restart it has failed."""
    traffic: Traffic = field(default_factory=Traffic)
    questions: DriverQuestions = field(init=False, repr=False, compare=False)
    """Questions to the driver on behalf of watchers of the session."""

    def __post_init__(self) -> None:
        self.questions = DriverQuestions(self.driver)
        if self.state is not SessionState.RESTARTING:
            self.settled.set()

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
        if state is SessionState.RESTARTING:
            self.settled.clear()
        else:
            self.settled.set()

    def go_on_with(self, driver: DriverProcess) -> None:
        """Have another driver in place of one that has died."""
        self.driver = driver
        self.questions = DriverQuestions(driver)
        self.move_to(SessionState.OPEN)

    def begin_to_end(self) -> None:
        """Stop taking clients. Idempotent: a user, the driver and the end of a token may all end a session."""
        if not self.is_ending:
            self.move_to(SessionState.ENDING)
            self.ends.set()

    def lost(self, driver: DriverProcess) -> LoomError:
        """Return the error for a client of a driver that has ended."""
        if driver.leaves_functions and (self.moved or self.state is not SessionState.ENDED):
            return restarted(self.name, driver.how_it_ended)
        return self.ended().error()

    def ended(self) -> EndedSession:
        """Return the session's entry in the history, when its driver has ended or is ending."""
        driver = self.driver
        words = LastWords(driver.reason or driver.files.read_last_words().reason, driver.exit_code)
        return EndedSession.of(driver.record, words, driver.how_it_ended, driver.output, driver.files.log)

    def end(self) -> SessionEnd:
        """Return the session's end, when its driver has ended."""
        reason = self.driver.reason or "its driver ended by itself"
        return SessionEnd(self.owner, self.user, self.name, reason, self.driver.exit_code)


LIVES_PATIENCE = 2.0
"""Seconds after which no further driver is asked."""

LIVES_AT_ONCE = 16
"""Drivers that are asked at once until when their sessions live."""


async def ask_lives(sessions: Iterable[UserSession]) -> None:
    """Ask the drivers until when their sessions live. Drivers that do not answer soon keep their last answers."""
    left, loop = iter(sessions), asyncio.get_running_loop()
    until = loop.time() + LIVES_PATIENCE

    async def ask_on() -> None:
        for session in left:
            await session.questions.life()
            if loop.time() > until:
                return

    await asyncio.gather(*(ask_on() for _ in range(LIVES_AT_ONCE)))
