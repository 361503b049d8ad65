"""The gateway's end of a driver's connection, over real unix sockets and the gateway's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from loom.errors import ConnectionLost
from loom.token_file import Token
from loom.wire.frames import decode_frame
from loom.wire.handshake import Hello
from loom.wire.length_prefix import LENGTH
from loom.wire.stream import unnumbered_frame
from loom_gateway.access.control import AccessControl
from loom_gateway.access.sessions import Principal
from loom_gateway.access.token_authority import TokenAuthority
from loom_gateway.relay import endpoint
from loom_gateway.relay.driver_lines import DriverLines
from loom_gateway.relay.endpoint import Relay
from loom_gateway.relay.links import DriverLink
from loom_gateway.sessions.session import SessionState, Traffic

BOUND = 10.0


class SilentDriver:
    """A driver's socket that takes a hello and never answers, and the manager of its one session."""

    def __init__(self, path: Path, opened: bool, knows_users: bool = True) -> None:
        self.path = str(path)
        self.greeted = asyncio.Event()
        self.left = asyncio.Event()
        self.ended: list[str] = []
        self.opening: list[Any] = []  # the fields of the gateway's first message
        self._tasks: list[asyncio.Task[None]] = []
        self.session = SimpleNamespace(
            name="session-1",
            owner="gateway",
            user="admin",
            shared={},
            state=SessionState.OPEN if opened else SessionState.STARTING,
            traffic=Traffic(),
            greeted=0,
            driver=SimpleNamespace(
                files=SimpleNamespace(socket=self.path),
                check_peer=lambda sock: None,
                record=SimpleNamespace(knows_users=knows_users),
            ),
        )

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        self.opening = list(decode_frame(await reader.readexactly(length)).messages[0].body)
        self.greeted.set()
        await reader.read()
        self.left.set()
        writer.close()

    # the parts of a `SessionManager` that a relay uses

    def sessions(self) -> list[Any]:
        return []

    def find(self, name: str) -> Any:
        return self.session

    async def look_up(self, name: str) -> None:
        """It has one session only."""

    def get(self, name: str) -> Any:
        return self.session

    def opened_by(self, user: str, opening: str) -> Any:
        return None

    async def create(self, *owner: str) -> Any:
        return self.session

    async def settled(self, session: Any) -> None:
        """It never restarts."""

    @staticmethod
    def weaver_key(user: str, session: str) -> str:
        return "a-key"

    async def end(self, session: Any, reason: str) -> None:
        session.state = SessionState.ENDED
        self.ended.append(reason)

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.ensure_future(work))


class Client:
    """A client's connection that says hello and then nothing."""

    def __init__(self, hello: Hello) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.events.put_nowait({"type": "websocket.connect"})
        self.events.put_nowait({"type": "websocket.receive", "bytes": b"".join(unnumbered_frame(hello.message()))})

    async def send(self, event: Any) -> None:
        pass

    def leave(self) -> None:
        self.events.put_nowait({"type": "websocket.disconnect"})
        self.gone.set_result(None)


@pytest.mark.guarantees(
    "strangers",
    "A client that leaves between its hello and the welcome, or a gateway that stops then, leaves no "
    "connection to a driver and no session that nobody knows",
)
@pytest.mark.parametrize("how", ["the client leaves", "the task is cancelled"])
@pytest.mark.parametrize("hello", [Hello(), Hello(session="session-1", stream="resumed")])
def test_a_hello_that_is_never_welcomed_leaves_no_connection_and_no_session(
    tmp_path: Path, how: str, hello: Hello
) -> None:
    async def come_and_go() -> list[str]:
        driver = SilentDriver(tmp_path / "driver", opened=hello.session is not None)
        server = await asyncio.start_unix_server(driver.serve, driver.path)
        access = AccessControl(TokenAuthority("own"))
        access.guard(driver)  # type: ignore[arg-type]
        draining: Any = SimpleNamespace(check_open=lambda: None)
        relay = Relay(driver, DriverLines(driver), access, draining)  # type: ignore[arg-type]
        client = Client(hello)
        principal = Principal(Token("gateway", "gateway", "drive", "", 0.0, user="admin"), "")
        scope = {"type": "websocket", "loom.principal": principal, "loom.socket": client}
        serving = asyncio.ensure_future(relay(scope, client.events.get, client.send))
        await asyncio.wait_for(driver.greeted.wait(), BOUND)

        if how == "the client leaves":
            client.leave()
        else:
            serving.cancel()

        await asyncio.wait_for(driver.left.wait(), BOUND)
        await asyncio.wait([serving], timeout=BOUND)
        assert serving.cancelled() == (how == "the task is cancelled")
        await asyncio.sleep(0)  # what runs in the background begins
        server.close()
        return driver.ended

    ended = asyncio.run(come_and_go())
    assert len(ended) == (hello.session is None)  # a session that is resumed goes on


@pytest.mark.guarantees("users", "A session of before users goes on with a new gateway, and has no guests")
@pytest.mark.parametrize(
    ("knows_users", "user", "opening"),
    [
        (True, "ann", ["session-1", "ann", "a-key"]),
        (True, "bob", ["session-1", "ann", "a-key", "bob"]),
        (False, "ann", ["session-1"]),
        (False, "bob", []),
    ],
)
def test_a_driver_of_before_users_is_told_what_it_knows_and_gets_no_guests(
    tmp_path: Path, knows_users: bool, user: str, opening: list[str]
) -> None:
    async def come() -> list[Any]:
        driver = SilentDriver(tmp_path / "driver", opened=True, knows_users=knows_users)
        driver.session.user, driver.session.shared = "ann", {"bob": "drive"}
        server = await asyncio.start_unix_server(driver.serve, driver.path)
        access = AccessControl(TokenAuthority("own"))
        access.guard(driver)  # type: ignore[arg-type]
        relay = Relay(driver, DriverLines(driver), access, SimpleNamespace())  # type: ignore[arg-type]
        client = Client(Hello(session="session-1"))
        principal = Principal(Token("1", user, "drive", "", 0.0), "")
        scope = {"type": "websocket", "loom.principal": principal, "loom.socket": client}
        serving = asyncio.ensure_future(relay(scope, client.events.get, client.send))
        await asyncio.wait_for(driver.greeted.wait() if opening else serving, BOUND)
        client.leave()
        await asyncio.wait([serving], timeout=BOUND)
        server.close()
        return driver.opening

    assert asyncio.run(come()) == opening


def test_what_comes_for_a_driver_that_is_gone_is_dropped(tmp_path: Path) -> None:
    async def write_late() -> tuple[int, bytes]:
        path = str(tmp_path / "driver")
        came: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def leave_after_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.set_result(await reader.readexactly(7))
            writer.close()

        server = await asyncio.start_unix_server(leave_after_one, path)
        traffic = Traffic()
        _, link = await asyncio.get_running_loop().create_unix_connection(lambda: DriverLink(traffic), path)
        link.write(b"a", b"bc")
        await asyncio.wait_for(link.closed, BOUND)
        await asyncio.sleep(0)  # the transport lets go of its handle in the next turn of the loop
        link.write(b"nobody reads this")
        server.close()
        return traffic.frames, await came

    loop = uvloop.new_event_loop()
    try:
        assert loop.run_until_complete(write_late()) == (1, b"\x00\x00\x00\x03abc")
    finally:
        loop.close()


async def test_a_hello_that_does_not_come_in_time_may_come_on_another_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "HELLO_TIMEOUT", 0.01)
    with pytest.raises(ConnectionLost, match="has not come within"):
        await endpoint._first_frame(asyncio.Event().wait)  # type: ignore[arg-type]
