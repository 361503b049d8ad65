"""What a gateway knows of sessions on session hosts, which tell it in parts, fall silent, and are newer."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import pytest

from loom.errors import LoomError, SessionHostUnreachable, UnknownSession
from loom.wire.handshake import Hello, refusal
from loom.wire.stream import unnumbered_frame
from loom_gateway.session_hosts.hosts import HostedLines, SessionHosts
from loom_gateway.session_hosts.line import Line, LineServer, Request
from loom_gateway.sessions.ended_sessions import EndedSession, SessionEnd
from loom_gateway.sessions.logs import LogQuery
from loom_gateway.sessions.session import SessionState
from loom_gateway.sessions.state_dir import DriverRecord
from loom_gateway.workers.sources import WorkerHosts, parse_source

KEY = "k" * 32

BOUND = 20.0

ABOUT = {
    "workers": ["tcp://w:1"],
    "missing": "",
    "spare_ready": True,
    "isolation": [False, False],
    "draining": False,
}


class Host:
    """A stand-in for a session host, which tells what a test gives it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.server = LineServer(KEY, self._serve)
        self.lines: asyncio.Queue[Line] = asyncio.Queue()
        self.asked: asyncio.Queue[list[Any]] = asyncio.Queue()

    async def _serve(self, line: Line, request: Request) -> None:
        self.lines.put_nowait(line)
        while True:
            self.asked.put_nowait(await line.take())


def described(name: str, pid: int = 1, **about: Any) -> dict[str, Any]:
    record = asdict(DriverRecord(pid, 1, name, user="ann", owner="token", opening=f"opening of {name}"))
    return {"record": {**record, **about}, "state": "open", "clients": 1, "why_not_yet": ""}


@contextlib.asynccontextmanager
async def served(*hosts: Host) -> AsyncIterator[SessionHosts]:
    sessions = SessionHosts(WorkerHosts([parse_source(host.address) for host in hosts]), KEY)
    adopting = asyncio.ensure_future(sessions.adopt(lambda owner: "admin"))
    try:
        yield sessions
    finally:
        adopting.cancel()
        await sessions.close()
        for host in hosts:
            host.server.close()


async def told(sessions: SessionHosts, *names: str) -> None:
    """Wait until a gateway knows just these sessions."""
    while {session.name for session in sessions.sessions()} != set(names):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def all_heard(sessions: SessionHosts) -> None:
    """Wait until a gateway has heard of all hosts."""
    while not sessions.workers or sessions.workers_missing:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def started() -> Host:
    host = Host()
    await host.server.start(host.listener)
    return host


async def test_what_is_told_in_parts_is_known_when_all_have_come() -> None:
    host = await started()
    async with served(host) as sessions:
        line = await asyncio.wait_for(host.lines.get(), BOUND)
        line.send({"news": {"sessions": [described("a")]}})
        line.send({"news": {"sessions": [described("b")]}})
        await asyncio.wait_for(told(sessions, "a", "b"), BOUND)
        assert await sessions.cannot_open()  # more may come
        line.send({"news": {"names": ["b"], "host": ABOUT}})
        await asyncio.wait_for(told(sessions, "b"), BOUND)

        assert await sessions.cannot_open() == ""
        assert sessions.opened_by("ann", "opening of b") is sessions.get("b")
        assert sessions.opened_by("ben", "opening of b") is None
        assert list(sessions.workers) == ["tcp://w:1"]


async def test_what_only_a_newer_host_tells_is_left_out() -> None:
    host = await started()
    async with served(host) as sessions:
        line = await asyncio.wait_for(host.lines.get(), BOUND)
        line.send({"of_the_future": 1})
        line.send({"news": {"sessions": [described("a", of_the_future=1)], "names": ["a"], "host": ABOUT}})
        await asyncio.wait_for(told(sessions, "a"), BOUND)


async def test_a_session_that_ends_says_how_and_one_that_is_gone_ends_too() -> None:
    host = await started()
    over: list[SessionEnd] = []
    async with served(host) as sessions:
        sessions.on_end = over.append
        line = await asyncio.wait_for(host.lines.get(), BOUND)
        line.send({"news": {"sessions": [described("a"), described("b")], "names": ["a", "b"], "host": ABOUT}})
        await asyncio.wait_for(told(sessions, "a", "b"), BOUND)
        first, second = sessions.get("a"), sessions.get("b")
        ended = asdict(EndedSession("a", "a user ended it", 0, 1.0, 2.0, "ann", False, "", "log"))
        end = SessionEnd("token", "ann", "a", "a user ended it", 0)
        line.send({"news": {"ended": [ended], "names": [], "audit": [asdict(end)]}})
        await asyncio.wait_for(told(sessions), BOUND)

        assert [session.over.is_set() and session.driver.exited.is_set() for session in (first, second)] == [
            True
        ] * 2
        assert (await asyncio.wait_for(host.asked.get(), BOUND))[1:] == ["audited", {"session": "a"}]
        assert over == [end]
        assert first.driver.reason == "a user ended it"
        with pytest.raises(LoomError, match="a user ended it"):
            sessions.get("a")
        with pytest.raises(UnknownSession, match="no session named"):
            sessions.get("b")


async def test_another_driver_takes_the_place_of_the_first() -> None:
    host = await started()
    async with served(host) as sessions:
        line = await asyncio.wait_for(host.lines.get(), BOUND)
        line.send({"news": {"sessions": [described("a")], "names": ["a"], "host": ABOUT}})
        await asyncio.wait_for(told(sessions, "a"), BOUND)
        session = sessions.get("a")
        first = session.driver
        line.send({"news": {"sessions": [described("a", pid=2)]}})
        await asyncio.wait_for(first.exited.wait(), BOUND)

        assert first.leaves_functions
        assert sessions.get("a") is session
        assert (session.pid, session.state) == (2, SessionState.OPEN)


@pytest.mark.guarantees("nothing lost", "A session on a session host that is silent is not said to be unknown")
async def test_a_session_may_be_on_a_host_that_is_silent() -> None:
    host, silent = await started(), Host()  # which never serves
    async with served(host, silent) as sessions:
        line = await asyncio.wait_for(host.lines.get(), BOUND)
        line.send({"news": {"sessions": [described("a")], "names": ["a"], "host": ABOUT}})
        await asyncio.wait_for(told(sessions, "a"), BOUND)

        assert sessions.get("a").name == "a"
        with pytest.raises(SessionHostUnreachable, match=silent.address):
            sessions.get("b")
        assert silent.address in sessions.workers_missing
        silent.listener.close()


@pytest.mark.parametrize(
    ("names", "draining", "is_missed"), [([], True, False), (["a"], True, True), ([], False, True)]
)
async def test_a_host_that_was_told_to_stop_is_not_missed_once_its_last_session_has_ended(
    names: list[str], draining: bool, is_missed: bool
) -> None:
    host = await started()
    async with served(host) as sessions:
        line = await asyncio.wait_for(host.lines.get(), BOUND)
        described_ones = [described(name) for name in names]
        line.send({"news": {"sessions": described_ones, "names": names, "host": ABOUT | {"draining": draining}}})
        await asyncio.wait_for(told(sessions, *names), BOUND)
        while not sessions.workers:  # noqa: ASYNC110 - until it is heard
            await asyncio.sleep(0.01)
        (connection,) = sessions._hosts.all()
        host.server.close()
        while connection.heard.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

        assert (host.address in sessions.workers_missing) == is_missed
        with pytest.raises(SessionHostUnreachable if is_missed else UnknownSession):
            sessions.get("b")


async def test_a_log_is_read_though_another_host_is_silent() -> None:
    silent, host = Host(), await started()
    silent.listener.close()
    async with served(silent, host) as sessions:
        line = await asyncio.wait_for(host.lines.get(), BOUND)
        line.send({"news": {"names": [], "host": ABOUT}})
        reading = asyncio.ensure_future(sessions.logs.read("a", LogQuery(), "ann"))
        reader = await asyncio.wait_for(host.lines.get(), BOUND)
        reader.send({"begun": True})
        reader.send({"lines": b"a line"})
        reader.send({"over": True})

        assert [some async for some in await asyncio.wait_for(reading, BOUND)] == [b"a line"]


async def test_what_was_asked_of_a_host_that_goes_is_not_waited_for() -> None:
    host = await started()
    async with served(host) as sessions:
        line = await asyncio.wait_for(host.lines.get(), BOUND)
        line.send({"news": {"sessions": [described("a")], "names": ["a"], "host": ABOUT}})
        await asyncio.wait_for(told(sessions, "a"), BOUND)
        ending = asyncio.ensure_future(sessions.end(sessions.get("a"), "a test ends it"))
        assert (await asyncio.wait_for(host.asked.get(), BOUND))[1:] == [
            "end",
            {"session": "a", "reason": "a test ends it"},
        ]
        line.close()

        with pytest.raises(SessionHostUnreachable):
            await asyncio.wait_for(ending, BOUND)


async def test_a_refusal_of_a_host_is_raised_as_it_was_and_a_kill_is_passed_on() -> None:
    host = await started()
    async with served(host) as sessions:
        line = await asyncio.wait_for(host.lines.get(), BOUND)
        line.send({"news": {"sessions": [described("a")], "names": ["a"], "host": ABOUT}})
        await asyncio.wait_for(told(sessions, "a"), BOUND)
        driving = asyncio.ensure_future(sessions.drive(sessions.get("a"), "another token"))
        number, *_ = await asyncio.wait_for(host.asked.get(), BOUND)
        line.send({"answer": number, "error": b"".join(unnumbered_frame(refusal(UnknownSession("it is over"))))})
        with pytest.raises(UnknownSession, match="it is over"):
            await driving
        sessions.get("a").driver.signal(signal.SIGKILL)
        assert (await asyncio.wait_for(host.asked.get(), BOUND))[1:] == ["kill", {"session": "a"}]


async def test_a_session_that_no_host_has_told_of_yet_is_asked_for() -> None:
    hosts = [await started(), await started()]
    async with served(*hosts) as sessions:
        lines = [await asyncio.wait_for(host.lines.get(), BOUND) for host in hosts]
        for line in lines:
            line.send({"news": {"names": [], "host": ABOUT}})
        await asyncio.wait_for(all_heard(sessions), BOUND)
        looking = asyncio.ensure_future(sessions.look_up("a"))
        for host, line, found in zip(hosts, lines, (None, described("a")), strict=True):
            number, method, about = await asyncio.wait_for(host.asked.get(), BOUND)
            assert (method, about) == ("find", {"session": "a"})
            line.send({"answer": number, "value": found})
        await asyncio.wait_for(looking, BOUND)

        assert sessions.get("a").name == "a"


async def test_a_session_may_be_on_a_host_that_does_not_say_whether_it_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loom_gateway.session_hosts.hosts.FIND_TIMEOUT", 0.1)
    host = await started()
    async with served(host) as sessions:
        line = await asyncio.wait_for(host.lines.get(), BOUND)
        line.send({"news": {"names": [], "host": ABOUT}})
        await asyncio.wait_for(all_heard(sessions), BOUND)

        with pytest.raises(SessionHostUnreachable, match=r"has not answered to find in 0\.1 s"):
            await sessions.look_up("a")


async def test_a_host_that_has_a_session_no_more_is_as_good_as_silent_to_its_clients() -> None:
    host = await started()
    async with served(host) as sessions:
        line = await asyncio.wait_for(host.lines.get(), BOUND)
        line.send({"news": {"sessions": [described("a")], "names": ["a"], "host": ABOUT}})
        await asyncio.wait_for(told(sessions, "a"), BOUND)
        greeting = asyncio.ensure_future(HostedLines(sessions).greet(sessions.get("a"), Hello(), b"", None))
        attached = await asyncio.wait_for(host.lines.get(), BOUND)
        attached.refuse(UnknownSession("no session named 'a'"))

        with pytest.raises(SessionHostUnreachable, match="'a' is not on its host any more"):
            await asyncio.wait_for(greeting, BOUND)
