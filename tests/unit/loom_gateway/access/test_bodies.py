"""The bodies of requests and answers, on every route of the application: bounded in size, in time and by user."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from starlette.routing import Route

from loom.errors import LimitReached
from loom.token_file import SCOPES, TokenFile
from loom.wire.length_prefix import SLOWEST_BATCH, TUNNELS
from loom_gateway.access import middleware
from loom_gateway.access.budgets import Budget, Budgets
from loom_gateway.access.control import AccessControl
from loom_gateway.access.middleware import MAX_UNKNOWN, SLOWEST, AccessMiddleware, largest_body
from loom_gateway.access.rate_limits import Allowances
from loom_gateway.access.token_authority import TokenAuthority
from loom_gateway.app import create_app
from loom_gateway.relay.driver_lines import DriverLines
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.settings import Limits
from loom_gateway.weaver_process import WeaverSupervisor

PIECE = 64 << 10


class House:
    """A gateway whose routes are called in this process, and the token of a user for each scope."""

    def __init__(self, folder: Path) -> None:
        file = TokenFile(folder / "tokens")
        self.tokens = {scope: file.create(f"one of {scope}", scope, user="ann")[1] for scope in SCOPES}
        self.manager = SessionManager([])
        limits = Limits(connection_rate=0, login_failures=0)
        self.access = AccessControl(TokenAuthority("own", file), limits)
        supervisor = WeaverSupervisor(self.manager.folder.weaver, self.manager.worker_watch.there)
        self.app = create_app(self.manager, DriverLines(self.manager), self.access, supervisor)
        supervisor.client._patience = 0.0  # there is no weaver
        self.middleware = AccessMiddleware(self.app, self.access)

    def routes(self) -> list[tuple[str, str]]:
        """Each method and path of the application, with names in the path."""
        found = []
        for route in self.app.routes:
            for included in getattr(getattr(route, "original_router", None), "routes", [route]):
                if isinstance(included, Route) and included.methods:
                    path = included.path
                    for name in included.param_convertors:
                        path = path.replace("{" + name + "}", "x").replace("{" + name + ":path}", "x")
                    found += [(method, path) for method in included.methods]
        return found

    async def ask(
        self, method: str, path: str, token: str, next_part: Callable[[], Any], **headers: str
    ) -> tuple[int, bytes]:
        """Make a request whose body is what a function returns, part by part; return the answer."""
        given = {
            "host": "gateway",
            "authorization": f"Bearer {token}",
            "content-type": "application/json",
            **headers,
        }
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"n=1",
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "client": ("127.0.0.1", 1),
            "server": ("gateway", 80),
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()],
        }
        sent: list[Any] = []

        async def receive() -> Any:
            part = next_part()
            return await part if asyncio.iscoroutine(part) else part

        async def send(message: Any) -> None:
            sent.append(message)

        await self.middleware(scope, receive, send)
        starts = [message for message in sent if message["type"] == "http.response.start"]
        assert len(starts) == 1, (method, path)
        return starts[0]["status"], b"".join(message.get("body", b"") for message in sent)

    async def tunnel(self) -> str:
        _, answer = await self.ask("POST", TUNNELS, self.tokens["drive"], lambda: part(b"", more=False))
        return str(json.loads(answer)["tunnel"])


def part(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


EACH = [pytest.param(scope, marks=() if scope in ("view", "admin") else pytest.mark.slow) for scope in SCOPES]


@contextlib.asynccontextmanager
async def house(folder: Path) -> AsyncIterator[House]:
    opened = House(folder)
    try:
        yield opened
    finally:
        opened.app.state.tunnels.close()
        await opened.manager.close()


async def every_route(gateway: House) -> list[tuple[str, str]]:
    """Each route, and those of a tunnel with one that is open."""
    routes = gateway.routes()
    assert len(routes) > 50
    tunnel = await gateway.tunnel()
    return [(method, path.replace(f"{TUNNELS}/x", f"{TUNNELS}/{tunnel}")) for method, path in routes]


@pytest.mark.parametrize("scope", EACH)
async def test_a_body_that_never_ends_is_cut_off_on_every_route(tmp_path: Path, scope: str) -> None:
    async with house(tmp_path) as gateway:
        for method, path in await every_route(gateway):
            if path.endswith("/down"):
                continue  # it reads no body, and its answer is held back
            came = 0

            def more() -> Any:
                nonlocal came
                came += PIECE
                return part(bytes(PIECE))

            status, _ = await gateway.ask(method, path, gateway.tokens[scope], more)
            assert came <= max(largest_body(method, path), MAX_UNKNOWN) + 2 * PIECE, (method, path)
            assert came <= MAX_UNKNOWN + 2 * PIECE or status in (413, 422), (method, path, status)
        assert gateway.access.budgets.bodies.taken == gateway.access.budgets.connections.taken == 0


@pytest.mark.parametrize("scope", EACH)
async def test_a_body_that_is_announced_too_large_is_refused_before_it_is_read(tmp_path: Path, scope: str) -> None:
    async with house(tmp_path) as gateway:
        for method, path in await every_route(gateway):

            def never() -> Any:
                raise AssertionError(f"{method} {path} was read")  # noqa: B023

            if path.startswith("/api/v1") and path not in ("/api/v1/proof", "/api/v1/page/sign-in"):
                announced = str(largest_body(method, path) + 1)
                status, _ = await gateway.ask(method, path, gateway.tokens[scope], never, content_length=announced)
                assert status in (413, 403), (method, path, status)
        assert gateway.access.budgets.bodies.taken == 0


async def test_what_the_event_loop_reads_as_json_is_small_on_every_route(tmp_path: Path) -> None:
    async with house(tmp_path) as gateway:
        for method, path in gateway.routes():
            if not path.startswith(f"{TUNNELS}/"):  # a tunnel's batches are frames
                most = 128 << 10 if "/plans" in path else 64 << 10
                assert largest_body(method, path) <= (most if method in ("POST", "PUT") else 4 << 10)


async def test_values_nested_deeper_than_a_command_may_be_are_refused_on_every_route(tmp_path: Path) -> None:
    async with house(tmp_path) as gateway:
        for method, path in gateway.routes():
            if method not in ("POST", "PUT"):
                continue
            for levels in (65, 300, 1500):
                deep = b"[" * levels + b"]" * levels
                common = b'{"kind": "update_config", "params": {"a": %b}}' % deep
                config = b'{"replica_id": "r", "config_params": {"a": %b}}' % deep
                for text in (deep, common, config):
                    parts = iter([part(text, more=False)])
                    status, _ = await gateway.ask(method, path, gateway.tokens["admin"], parts.__next__)
                    assert status < 500 or status == 503, (method, path, levels)


async def test_a_body_that_comes_too_slowly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_TIMEOUT", 0.05)
    async with house(tmp_path) as gateway:
        tunnel = await gateway.tunnel()
        for path in ("/api/v1/page/code", f"{TUNNELS}/{tunnel}/up"):
            slowest = SLOWEST_BATCH if path.endswith("/up") else SLOWEST
            parts = iter([part(b"x" * (slowest // 100))] * 3)

            async def slow() -> Any:
                for one in parts:  # noqa: B023
                    return one
                await asyncio.Event().wait()

            status, answer = await gateway.ask("POST", path, gateway.tokens["drive"], slow)
            assert (status, json.loads(answer)["error"]["code"]) == (429, "rate_limited")
        assert gateway.access.budgets.bodies.taken == 0


async def test_unfinished_bodies_are_bounded_by_user_and_in_all(tmp_path: Path) -> None:
    async with house(tmp_path) as gateway:
        gateway.access.budgets.bodies.of_user, gateway.access.budgets.bodies.in_all = 3 * PIECE, 4 * PIECE
        budget = gateway.access.budgets.bodies
        over = asyncio.Event()

        def unfinished(size: int) -> Callable[[], Any]:
            parts = iter([part(bytes(PIECE))] * size)

            async def more() -> Any:
                for one in parts:
                    return one
                await over.wait()
                return {"type": "http.disconnect"}

            return more

        tunnel = f"{TUNNELS}/{await gateway.tunnel()}/up"
        held = [asyncio.ensure_future(gateway.ask("POST", tunnel, gateway.tokens["drive"], unfinished(3)))]
        for _ in range(100):
            await asyncio.sleep(0)

        assert budget.of("ann") == 3 * PIECE
        status, answer = await gateway.ask("POST", tunnel, gateway.tokens["drive"], unfinished(5))
        assert (status, json.loads(answer)["error"]["code"]) == (429, "limit_reached")
        with pytest.raises(LimitReached, match="of all users"):
            budget.take("bob", 2 * PIECE)
        over.set()
        await asyncio.gather(*held, return_exceptions=True)
        assert budget.taken == 0


async def test_an_answer_counts_until_it_is_read_and_one_too_many_is_refused() -> None:
    budget = Budget("bytes", 300_000, 0, "read")
    read: list[Callable[[], None]] = []
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    def answer() -> middleware.BoundedAnswer:
        scope = {"type": "http", "headers": []}
        return middleware.BoundedAnswer(scope, send, "ann", budget, read.append)

    for _ in range(2):
        one = answer()
        await Response(bytes(200_000))({"type": "http"}, None, one.send)  # type: ignore[arg-type]
        one.end()
    assert [message["status"] for message in sent if "status" in message] == [200, 429]
    assert budget.of("ann") == 200_000
    read.pop()()
    assert budget.of("ann") == 0


def test_a_budget_is_exact_and_tells_when_there_is_room() -> None:
    budget, told = Budget("things", 3, 4, "wait"), []
    budget.take("ann", 3)
    with pytest.raises(LimitReached, match="allows a user 3 things: wait"):
        budget.take("ann")
    budget.take("bob")
    with pytest.raises(LimitReached, match="room for 4 things of all users"):
        budget.take("eve")
    assert budget.is_full("ann")
    budget.when_room("ann", lambda: told.append("ann"))
    budget.give_back("bob")
    assert told == []
    budget.give_back("ann", 2)

    assert (told, budget.of("ann"), budget.taken) == (["ann"], 1, 1)
    with budget.held("ann", 2):
        assert budget.of("ann") == 3
    assert budget.of("ann") == 1


def test_every_budget_has_a_bound_for_a_user() -> None:
    for budget in Budgets.of(Limits().max_connections_per_user).all():
        assert budget.of_user


async def test_large_bodies_count_as_several_requests(tmp_path: Path) -> None:
    async with house(tmp_path) as gateway:
        gateway.access.allowances = Allowances(Limits(connection_rate=2.0))  # 10 at once
        large = [part(bytes(middleware.COUNTED))] * 4 + [part(b"", more=False)]
        refused = 0
        for _ in range(3):
            parts = iter(large)
            status, _ = await gateway.ask(
                "POST", "/api/v1/weaver/commands", gateway.tokens["operate"], parts.__next__
            )
            refused += status == 429
        assert refused == 1
