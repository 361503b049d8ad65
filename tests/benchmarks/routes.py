"""How long each route of a gateway with a large state holds the event loop that relays.

``python -m tests.benchmarks.routes [SESSIONS REPLICAS]`` prints it. Every route that reads is asked by an admin, in
an application with many sessions, whose weaver has many replicas. Of each round of the event loop, the CPU time of
its thread counts, and the number of calls in it, which does not depend on the machine. The weaver's answers are
made up; how they are decoded is in `tests/unit/loom/weaver/test_client.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loom.control.operations import GetStatus, GetUsers, Operation
from loom.errors import WeaverUnavailable
from loom_gateway.sessions.ended_sessions import EndedSession
from loom_gateway.sessions.session import SessionState, UserSession
from loom_gateway.sessions.state_dir import DriverFiles, DriverRecord
from loom_gateway.weaver_socket import page_feed
from tests.unit.loom_gateway.access.test_routes import GUARDED, Driver, House, path_of
from tests.unit.loom_gateway.weaver_socket.replicas import info

__all__ = ["READS", "SNAPSHOT", "Held", "LargeWeaver", "large_house", "longest", "most_calls"]

READS = [name for name in GUARDED if name.startswith("GET ") and "/down" not in name]
"""The routes that read, as in `RULES`."""

USERS = 50
SNAPSHOT = "WS /ws/v1/weaver"


@dataclass(frozen=True)
class Held:
    """The longest round of the event loop during a request."""

    seconds: float
    """Of CPU time of the loop's thread."""
    calls: int
    """Of functions, Python's and others."""


class LargeWeaver:
    """A client of a weaver with many replicas: what it answers is there already."""

    def __init__(self, replicas: int) -> None:
        self._replicas = [info(f"train_{number}") for number in range(replicas)]
        self._json = json.dumps(self._replicas).encode()

    async def ask_for(self, asked: Operation, *_: object, **__: object) -> Any:
        if isinstance(asked, GetUsers):
            return [f"user {number}" for number in range(USERS)]
        if isinstance(asked, GetStatus):
            return {"replicas": {"running": 1}}
        raise WeaverUnavailable("it has no such answer")

    async def do(self, operation: str, by: str, /, **_: object) -> Any:
        raise WeaverUnavailable("it has no such answer")

    async def ask_json(self, *_: object, **__: object) -> bytes:
        return self._json

    do_json = ask_json

    async def available(self) -> None:
        await asyncio.Event().wait()

    @contextlib.asynccontextmanager
    async def watch(self, *_: object, **__: object) -> AsyncIterator[LargeWeaver]:
        self._asked = asyncio.Semaphore(1)
        yield self

    def refresh(self, _: bool) -> None:
        self._asked.release()

    async def next(self) -> tuple[str, dict[str, Any]]:
        await self._asked.acquire()
        more = {"replicas": {one["id"]: {"handlers": {}, "config": {}} for one in self._replicas}, "events": []}
        return "snapshot", {"replicas": list(self._replicas), "devices": [], "status": {}, "more": more}


@contextlib.asynccontextmanager
async def large_house(sessions: int, replicas: int) -> AsyncIterator[House]:
    """Run an application with sessions of many users, as many that have ended, and a log of a few megabytes."""
    with tempfile.TemporaryDirectory(prefix="loom-routes-") as name:
        folder = Path(name)
        house = House(folder)
        weaver: Any = LargeWeaver(replicas)
        house.supervisor.client.__dict__.update(
            {one: getattr(weaver, one) for one in ("ask_for", "do", "ask_json", "do_json", "available", "watch")}
        )
        shared = {f"user {number}": "view" for number in range(10)}
        for number in range(sessions):
            files = DriverFiles(str(folder / f"driver-{number}"))
            user = f"user {number % USERS}"
            record = DriverRecord(1, 0, f"session-{number}", user=user, shared=shared)
            house.manager._sessions[record.session] = UserSession(Driver(files, record), SessionState.OPEN)
            house.manager.ended.add(EndedSession(f"ended-{number}", "it ended", 0, 1.0, 2.0, user, False, "", ""))
        line = {"time": 0.0, "mesh": "trainers", "rank": 0, "place": "", "stream": "stdout", "text": "x" * 80}
        (folder / "driver.log").write_text(f"{json.dumps(line)}\n" * (30 * sessions))
        try:
            yield house
        finally:
            for number in range(sessions):
                house.manager._sessions.pop(f"session-{number}").questions.close()
            await house.close()


async def longest(house: House, name: str) -> Held:
    """Ask a route, or the page's WebSocket, and return the longest round of the event loop meanwhile."""
    with _watched(counting=False) as times:
        await _ask(house, name)
    return Held(max(times), await most_calls(house, name))


async def most_calls(house: House, name: str) -> int:
    """Ask a route, and return the calls in the round with the most of them."""
    with _watched(counting=True) as counts:
        await _ask(house, name)
    return int(max(counts))


async def _ask(house: House, name: str) -> None:
    if name == SNAPSHOT:
        return await _look_at_the_page(house)
    path = path_of(name)
    if path.endswith("/spans"):
        path += "?seconds=0.01"
    elif path.endswith("/sessions"):
        path += "?ended=true"
    await house.ask("GET", path, house.tokens["admin"])


async def _look_at_the_page(house: House) -> None:
    """Open the page's WebSocket until its snapshot has come, and two comparisons of the sessions are over."""
    came = asyncio.Event()
    connects: list[Mapping[str, Any]] = [{"type": "websocket.connect"}]

    async def receive() -> Any:
        if connects:
            return connects.pop()
        await came.wait()
        return {"type": "websocket.disconnect", "code": 1000}

    async def send(message: Any) -> None:
        if '"type": "snapshot"' in message.get("text", "")[:100]:
            asyncio.get_running_loop().call_later(3 * page_feed.SESSIONS_EVERY, came.set)

    headers = [(b"authorization", f"Bearer {house.tokens['admin']}".encode()), (b"host", b"gateway")]
    scope = {
        "type": "websocket", "path": "/ws/v1/weaver", "headers": headers, "query_string": b"",
        "subprotocols": ["loom.page"], "client": ("127.0.0.1", 1), "loom.socket": _Socket(),
    }  # fmt: skip
    await asyncio.wait_for(house.guarded(scope, receive, send), 60.0)


class _Socket:
    def limit_messages(self, _: int) -> None:
        """Nobody sends any."""


@contextlib.contextmanager
def _watched(counting: bool) -> Iterator[list[float]]:
    """Measure each round of the running event loop: its CPU time in seconds, or the calls in it."""
    loop: Any = asyncio.get_running_loop()
    rounds: list[float] = [0.0]
    run_once = loop._run_once
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def timed() -> None:
        nonlocal calls
        calls, began = 0, time.thread_time()
        run_once()
        rounds.append(calls if counting else time.thread_time() - began)

    loop._run_once = timed
    if counting:
        sys.setprofile(count)
    try:
        yield rounds
    finally:
        sys.setprofile(None)
        del loop._run_once


async def _main(sessions: int, replicas: int) -> None:
    print(f"{sessions} sessions, {replicas} replicas; the longest round of the event loop:")
    async with large_house(sessions, replicas) as house:
        await longest(house, READS[0])  # what happens once in a process
        for name in (*READS, SNAPSHOT):
            held = await longest(house, name)
            print(f"{held.seconds * 1e3:8.1f} ms {held.calls:8d} calls  {name}", flush=True)


if __name__ == "__main__":
    given = [int(one) for one in sys.argv[1:]] or [1000, 10_000]
    asyncio.run(_main(*given))
