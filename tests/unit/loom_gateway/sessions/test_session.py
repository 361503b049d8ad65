"""A session's states, and what it has passed on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loom.errors import SessionHostUnreachable, SessionLost, SessionRestarted, UnknownSession
from loom_gateway.relay.links import DriverLink
from loom_gateway.sessions.driver_process import DriverProcess
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.sessions.session import SessionState, Traffic, UserSession
from loom_gateway.sessions.state_dir import DriverFiles, DriverRecord, LastWords


class Driver(DriverProcess):
    """A driver that is no process."""

    def signal(self, number: int) -> None:
        """Nobody is there."""

    def abandon(self) -> None:
        """Nobody is there."""


@pytest.fixture
async def session(tmp_path: Path) -> UserSession:
    files = DriverFiles(str(tmp_path / "driver"))
    return UserSession(Driver(files, DriverRecord(1, 0, "session-1")))


@pytest.mark.parametrize(
    "states",
    [
        (SessionState.OPEN, SessionState.ENDING, SessionState.ENDED),
        (SessionState.OPEN, SessionState.ENDED),
        (SessionState.ENDING, SessionState.ENDED),
        (SessionState.ENDED,),
    ],
)
async def test_a_session_ends_from_every_state(session: UserSession, states: tuple[SessionState, ...]) -> None:
    for state in states:
        session.move_to(state)

    assert session.state is SessionState.ENDED
    assert session.is_ending


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SessionState.OPEN, SessionState.OPEN),
        (SessionState.OPEN, SessionState.STARTING),
        (SessionState.ENDING, SessionState.OPEN),
        (SessionState.ENDING, SessionState.ENDING),
        (SessionState.ENDED, SessionState.ENDING),
        (SessionState.ENDED, SessionState.ENDED),
    ],
)
async def test_a_session_never_goes_back(session: UserSession, before: SessionState, after: SessionState) -> None:
    session.state = before

    with pytest.raises(RuntimeError, match=f"'session-1' cannot become {after.value}: it is {before.value}"):
        session.move_to(after)


@pytest.mark.parametrize("before", [SessionState.ENDING, SessionState.ENDED])
async def test_several_may_want_it_to_end(session: UserSession, before: SessionState) -> None:
    session.state = before

    session.begin_to_end()

    assert session.state is before


async def test_what_is_passed_on_is_counted_over_all_connections(session: UserSession, tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(7))
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "socket")
    for connections in (1, 2):
        _, link = await loop.create_unix_connection(lambda: DriverLink(session.traffic), str(tmp_path / "socket"))
        link.write(b"abc")
        assert await link.next() == b"abc"
        assert session.operations == connections
        assert session.traffic == Traffic(frames=connections, bytes_in=7 * connections, bytes_out=7 * connections)
        link.close()
    server.close()


async def test_a_session_that_was_told_to_end_says_why(session: UserSession) -> None:
    session.driver.files.write_last_words(LastWords("a user ended it"))

    error = session.ended().error()

    assert type(error) is UnknownSession
    assert "'session-1' has ended: a user ended it" in str(error)


async def test_a_session_whose_driver_died_is_lost(session: UserSession) -> None:
    session.driver._ended(-9)
    await asyncio.wait_for(session.driver.exited.wait(), 20.0)

    with pytest.raises(SessionLost, match="'session-1' is lost: its driver was killed by SIGKILL") as lost:
        raise session.ended().error()
    assert lost.value.exit_code == -9


async def test_a_session_that_has_moved_to_another_host_is_not_lost(session: UserSession) -> None:
    session.driver.leaves_functions = True
    session.move_to(SessionState.RESTARTING)
    manager = SessionManager(["tcp://127.0.0.1:1"])
    waiting = asyncio.ensure_future(manager.settled(session))
    await asyncio.sleep(0)
    session.moved = True
    session.move_to(SessionState.ENDED)

    with pytest.raises(SessionHostUnreachable, match="goes on on another session host"):
        await waiting
    assert isinstance(session.lost(session.driver), SessionRestarted)
    await manager.close()
