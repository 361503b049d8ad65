"""What a session host answers to requests that make no sense to it, or that it cannot answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import pytest

from loom.errors import ConnectionLost, LoomError, ProtocolMismatch
from loom_gateway.session_hosts.host import SessionHost
from loom_gateway.session_hosts.line import Line, Request, open_line, read_frame
from loom_gateway.sessions.ended_sessions import EndedSession
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.workers.sources import WorkerHosts, parse_source

KEY = "k" * 32

BOUND = 20.0


@contextlib.asynccontextmanager
async def hosted() -> AsyncIterator[tuple[SessionHost, SessionManager, str]]:
    """A session host without a session, its manager, and its address."""
    manager = SessionManager(WorkerHosts([parse_source("tcp://127.0.0.1:1")]), 1.0, None, True)
    host = SessionHost(manager, KEY)
    listener = socket.create_server(("127.0.0.1", 0))
    await host.server.start(listener)
    try:
        yield host, manager, f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        host.server.close()


async def answer_to(line: Line, request: Any) -> Any:
    """The value with which a control line answers, or the error."""
    line.send(request)
    while "answer" not in (said := await line.take(BOUND)):
        pass
    if "error" in said:
        read_frame(said["error"])
    return said["value"]


@pytest.mark.parametrize(
    ("method", "about", "why"),
    [
        ("end", {}, "its field 'session' is missing"),
        ("create", {"owner": "1", "user": 7, "opening": ""}, "its field 'user' is 7"),
        ("share", [], "its field 'session' is missing"),
        ("of the future", {}, "knows no 'of the future'"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_by_name(method: str, about: Any, why: str) -> None:
    async with hosted() as (_, _, address):
        line = await open_line(address, KEY, Request("control", {}))
        with pytest.raises(ProtocolMismatch, match=why):
            await answer_to(line, [1, method, about])
        with pytest.raises(ProtocolMismatch, match="no 'neither'"):  # the line goes on
            await answer_to(line, [2, "neither", {}])
        line.close()


@pytest.mark.parametrize(
    ("line", "about", "why"),
    [("attach", {"hello": 10**9, "guest": None}, "its field 'hello' is 1000000000"), ("logs", {}, "'follow'")],
)
async def test_a_line_that_makes_no_sense_is_refused_by_name(line: str, about: Any, why: str) -> None:
    async with hosted() as (_, _, address):
        opened = await open_line(address, KEY, Request(line, about))
        with pytest.raises(ProtocolMismatch, match=why):
            await opened.take(BOUND)


async def test_an_error_that_nobody_expects_is_logged_and_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(user: str, opening: str) -> None:
        raise RuntimeError("nobody expects this")

    async with hosted() as (_, manager, address):
        monkeypatch.setattr(manager, "opened_by", fail)
        line = await open_line(address, KEY, Request("control", {}))
        with caplog.at_level(logging.ERROR), pytest.raises(LoomError, match="internal error"):
            await answer_to(line, [1, "create", {"owner": "1", "user": "ann", "opening": ""}])
        line.close()

    assert "nobody expects this" in caplog.text


async def test_what_only_a_newer_gateway_asks_of_a_log_is_left_out() -> None:
    async with hosted() as (_, _, address):
        about = {"session": "a", "user": "ann", "follow": False, "query": {"tail": 1, "of_the_future": 1}}
        line = await open_line(address, KEY, Request("logs", about))
        with pytest.raises(LoomError, match="no log of a session named 'a'"):
            await line.take(BOUND)
        await asyncio.wait_for(asyncio.shield(line.closed), BOUND)


async def test_a_host_that_ends_tells_how_its_last_session_has_ended() -> None:
    heard: list[Any] = []

    async def listen(line: Line) -> None:
        while True:
            heard.append(await line.take(BOUND))

    async with hosted() as (host, manager, address):
        line = await open_line(address, KEY, Request("control", {}))
        heard.append(await line.take(BOUND))  # what there was
        listening = asyncio.ensure_future(listen(line))
        ended = EndedSession("a", "a user ended it", 0, 1.0, 2.0, "ann", False, "", "log")
        manager.ended.add(ended)
        await asyncio.wait_for(host.close(), BOUND)

        with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1 has closed the line"):
            await listening
    assert heard[-1]["news"] == {"ended": [asdict(ended)]}
