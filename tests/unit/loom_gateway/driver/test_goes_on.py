"""What watches and answers in a driver, a gateway and a weaver goes on after an error of any kind."""

from __future__ import annotations

import ast
import asyncio
import errno
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import loom
import loom_gateway
from loom.process import tasks
from loom.process.backoff import Backoff
from loom_gateway.driver.clients.connection import DriverServer
from loom_gateway.driver.handlers.hosts import HostWatcher
from loom_gateway.driver.monarch.mesh_table import MeshTable
from loom_gateway.sessions.logs import LogFeed

BOUND = 30.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tasks, "AGAIN", Backoff(0.001, 0.01))
    before = tasks.died.copy()
    yield
    tasks.died.clear()
    tasks.died.update(before)


class Unlucky:
    """Raises each of some errors once, and then calls a function."""

    def __init__(self, then: Any, *errors: Exception) -> None:
        self._errors = iter(errors)
        self._then = then

    def __call__(self, *args: Any) -> Any:
        error = next(self._errors, None)
        if error is not None:
            raise error
        return self._then(*args)


@pytest.mark.parametrize("where", ["connected", "host_gone", "lose"])
async def test_the_watch_over_a_host_goes_on(where: str) -> None:
    lost = asyncio.Event()
    unlucky = Unlucky(lambda *args: (), ValueError("one"), KeyError("two"))
    given = {name: unlucky if name == where else (lambda *args: ()) for name in ("connected", "host_gone", "lose")}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.close()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    nothing = SimpleNamespace(host_gone=given["host_gone"])
    context = SimpleNamespace(
        hosts=SimpleNamespace(addresses=[address], lose=given["lose"], lost=set(), moved=set()),
        meshes=MeshTable(),
        link_address=SimpleNamespace(patience=10 * BOUND),
        failures=nothing,
        send=lambda message: lost.set(),
    )
    HostWatcher(cast(Any, context), cast(Any, nothing)).start(lambda: None, given["connected"])
    await asyncio.wait_for(lost.wait(), BOUND)
    assert where == "connected" or tasks.died["watch a host"] == 2


class Listener:
    """Stands in for a socket: twice there is no descriptor left, then a client comes, then it is closed."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self._accept = Unlucky(self._once, *(OSError(errno.EMFILE, "Too many open files") for _ in range(2)))
        self.closed = threading.Event()

    def fileno(self) -> int:
        return -1 if self.closed.is_set() else 3

    def accept(self) -> tuple[socket.socket, None]:
        found: tuple[socket.socket, None] = self._accept()
        return found

    def _once(self) -> tuple[socket.socket, None]:
        if self._client.fileno() < 0:
            self.closed.set()
            raise OSError(errno.EBADF, "Bad file descriptor")
        return self._client, None


async def test_a_driver_takes_clients_again_when_it_has_run_out_of_files() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    listener = Listener(one)
    lifetime = SimpleNamespace(start=lambda *args: None)
    DriverServer(cast(Any, listener), cast(Any, lifetime), cast(Any, None), gateway_uid=-1)
    assert await asyncio.to_thread(listener.closed.wait, BOUND)  # the client came, and was sent away
    assert tasks.died["accept clients"] == 2
    other.close()


async def test_a_log_is_followed_further_after_a_failed_read() -> None:
    entries: list[Any] = [["first"], []]
    living = [True]
    ended = asyncio.Event()
    cursor = SimpleNamespace(close=lambda: None)
    read = Unlucky(lambda: entries.pop(0), OSError("bad disk"))
    taken: list[Any] = []
    feed = LogFeed(cast(Any, cursor), lambda *_: asyncio.to_thread(read), lambda: living[0], ended.set)
    feed._followers = cast(Any, [SimpleNamespace(take=taken.extend, end=lambda: None)])
    living[0] = False
    await asyncio.wait_for(ended.wait(), BOUND)
    assert taken == ["first"]


# -- every task of the cluster's side -----------------------------------------------------------------------

SHORT = {
    "answer a request",
    "answer on a line",
    "begin functions of an earlier driver",
    "beat for a trainer",
    "disconnect a client",
    "end a driver",
    "end a session",
    "end the session",
    "follow a command",
    "kill a driver",
    "learn from other gateways",
    "audit the end of a session",
    "read for a trainer",
    "serve a line",
    "start a function again",
    "talk to a debugger",
    "tell a session host",
}
"""The names of tasks that do one thing, for a caller that would not be helped if they did it again, or serve one
connection, whose end the other side sees."""

AWAITED = {
    "access/connections.py": "the connection that is beginning is closed with its task",
    "access/issuer_keys.py": "those who need the keys wait for it",
    "driver/handlers/hosts.py": "the watch over a host waits for it",
    "driver/handlers/meshes.py": "the stop of a mesh waits for it",
    "driver/handlers/sync.py": "the sync waits for it",
    "driver/monarch/endpoint_errors.py": "Monarch waits for it",
    "driver/weaver_link.py": "the processes that start wait for it",
    "chaos/runs.py": "the end of the gateway waits for it",
    "relay/http_tunnel.py": "the tunnel is closed with it",
    "relay/endpoint.py": "the relayed connection waits for it",
    "rest/sessions.py": "the request waits for it",
    "session_hosts/__main__.py": "the end of the session host waits for it",
    "sessions/driver_process.py": "the change of the record waits for it",
    "sessions/manager.py": "the session that needs a driver waits for it",
    "sessions/session.py": "those who ask wait for it",
    "weaver_socket/commands.py": "the socket waits for it",
    "weaver_socket/endpoint.py": "the socket waits for it",
}
"""The modules that make tasks of their own, and who gets their errors."""


def _calls(folder: Path) -> Iterator[tuple[str, str, ast.Call]]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                yield str(path.relative_to(folder)), ast.unparse(node.func), node


def test_every_background_task_of_the_gateway_is_one_that_is_started_again_or_has_somebody_who_waits() -> None:
    gateway = Path(loom_gateway.__file__).parent
    names, own = set(), set()
    for module, function, call in _calls(gateway):
        if function == "tasks.run":
            names.add(ast.literal_eval(call.args[0]))
        elif function.rpartition(".")[2] in ("ensure_future", "create_task"):
            own.add(module)
    assert names <= SHORT
    assert own <= set(AWAITED)


def test_every_background_task_of_the_weaver_is_one_that_is_started_again_or_answers_a_request() -> None:
    weaver = Path(loom.__file__).parent / "weaver"
    own = {
        module for module, function, _ in _calls(weaver) if function.endswith((".ensure_future", ".create_task"))
    }
    assert own == set()
