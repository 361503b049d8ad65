"""Every route and every WebSocket of a gateway, with no token, a wrong one, each scope, and another user's.

`RULES` has a rule for each route. A route that is added without one fails `test_every_route_has_a_rule`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.routing import BaseRoute, Route, WebSocketRoute

from loom.errors import LoomError, ScopeError, WeaverUnavailable
from loom.token_file import SCOPES, TokenFile
from loom_gateway.access.control import AccessControl
from loom_gateway.access.middleware import AccessMiddleware
from loom_gateway.access.token_authority import TokenAuthority
from loom_gateway.app import create_app
from loom_gateway.relay.driver_lines import DriverLines
from loom_gateway.sessions import logs as session_logs
from loom_gateway.sessions.driver_process import DriverProcess
from loom_gateway.sessions.logs import SessionLogs
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.sessions.session import UserSession
from loom_gateway.sessions.state_dir import DriverFiles, DriverRecord
from loom_gateway.settings import Limits
from loom_gateway.weaver_process import WeaverSupervisor

pytestmark = pytest.mark.asyncio(loop_scope="module")

METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE")
SESSION = "session-of-ann"
BOUND = 20.0
PLAN = "faults: {fault: sigkill, when: {time: 1 s}}"


@dataclass(frozen=True)
class Rule:
    """Who may use a route."""

    scope: str | None
    """The scope of token that it needs; None: it needs no token."""
    body: object = None
    """A body that makes sense."""
    whose: str = ""
    """``session``: the path names a session, which for another user does not exist. ``tunnel``: it names a tunnel.
    ``weaver``: it is about the caller's own replicas. Empty: the path names nothing of any user."""


RULES: dict[str, Rule] = {
    "GET /healthz": Rule(None),
    "GET /readyz": Rule(None),
    "GET /api/v1/proof": Rule(None),
    "GET /": Rule(None),
    "GET /assets/{name}": Rule(None),
    "POST /api/v1/page/sign-in": Rule(None, {}),
    "GET /api/v1/page/me": Rule("view"),
    "POST /api/v1/page/code": Rule("view", {}),
    "POST /api/v1/page/sign-out": Rule("view"),
    "GET /metrics": Rule("view"),
    "GET /api/v1/openapi.json": Rule("view"),
    "GET /api/v1/status": Rule("view"),
    "GET /api/v1/sessions": Rule("view"),
    "DELETE /api/v1/sessions/{name}": Rule("operate", whose="session"),
    "GET /api/v1/sessions/{name}/logs": Rule("view", whose="session"),
    "GET /api/v1/sessions/{name}/meshes": Rule("view", whose="session"),
    "GET /api/v1/sessions/{name}/runs": Rule("view", whose="session"),
    "GET /api/v1/sessions/{name}/spans": Rule("view", whose="session"),
    "GET /api/v1/sessions/{name}/tensors": Rule("view", whose="session"),
    "PUT /api/v1/sessions/{name}/shares/{user}": Rule("operate", {"scope": "view"}, whose="session"),
    "DELETE /api/v1/sessions/{name}/shares/{user}": Rule("operate", whose="session"),
    "GET /api/v1/sessions/{name}/replicas": Rule("view", whose="session"),
    "POST /api/v1/sessions/{name}/commands": Rule("operate", {"kind": "pause"}, whose="session"),
    "POST /api/v1/tunnel": Rule("view"),
    "DELETE /api/v1/tunnel/{tunnel}": Rule("view", whose="tunnel"),
    "POST /api/v1/tunnel/{tunnel}/up": Rule("view", whose="tunnel"),
    "GET /api/v1/tunnel/{tunnel}/down": Rule("view", whose="tunnel"),
    "GET /api/v1/weaver/status": Rule("view", whose="weaver"),
    "GET /api/v1/weaver/replicas": Rule("view", whose="weaver"),
    "GET /api/v1/weaver/devices": Rule("view", whose="weaver"),
    "GET /api/v1/weaver/events": Rule("view", whose="weaver"),
    "GET /api/v1/weaver/goodput": Rule("view", whose="weaver"),
    "GET /api/v1/weaver/replicas/{replica}": Rule("view", whose="weaver"),
    "GET /api/v1/weaver/replicas/{replica}/metrics": Rule("view", whose="weaver"),
    "GET /api/v1/weaver/replicas/{replica}/metrics/{metric}": Rule("view", whose="weaver"),
    "GET /api/v1/weaver/replicas/{replica}/stacks": Rule("view", whose="weaver"),
    "GET /api/v1/weaver/replicas/{replica}/profile": Rule("view", whose="weaver"),
    "GET /api/v1/weaver/replicas/{replica}/points": Rule("view", whose="weaver"),
    "GET /api/v1/alerts": Rule("view", whose="weaver"),
    "GET /api/v1/alerts/log": Rule("view", whose="weaver"),
    "POST /api/v1/alerts": Rule("operate", {"rule": "crashed"}, whose="weaver"),
    "DELETE /api/v1/alerts/{alert}": Rule("operate", whose="weaver"),
    "POST /api/v1/alerts/{alert}/test": Rule("operate", {}, whose="weaver"),
    "GET /api/v1/runs": Rule("view", whose="weaver"),
    "GET /api/v1/runs/{run}": Rule("view", whose="weaver"),
    "GET /api/v1/runs/{run}/metrics/{metric}": Rule("view", whose="weaver"),
    "GET /api/v1/runs/{run}/curves/{metric}": Rule("view", whose="weaver"),
    "GET /api/v1/runs/{run}/compare/{other}": Rule("view", whose="weaver"),
    "POST /api/v1/runs/{run}/branch": Rule("operate", {"step": 1}, whose="weaver"),
    "POST /api/v1/runs/{run}/note": Rule("operate", {"text": "good"}, whose="weaver"),
    "POST /api/v1/runs/{run}/tags": Rule("operate", {"add": ["best"]}, whose="weaver"),
    "POST /api/v1/runs/{run}/archive": Rule("operate", {}, whose="weaver"),
    "DELETE /api/v1/runs/{run}": Rule("operate", whose="weaver"),
    "POST /api/v1/weaver/links/{replica}": Rule("operate", {"tracker": "mlflow"}, whose="weaver"),
    "GET /api/v1/weaver/query": Rule("view", whose="weaver"),
    "POST /api/v1/weaver/trainer-status": Rule("operate"),  # and a token of one replica, which has no other use
    "GET /api/v1/weaver/address": Rule("operate", whose="weaver"),
    "POST /api/v1/weaver/commands": Rule("operate", {"kind": "pause"}, whose="weaver"),
    "GET /api/v1/weaver/commands/{command}": Rule("view", whose="weaver"),
    "POST /api/v1/weaver/inject": Rule("operate", {"fault": "sigkill", "target": "*"}, whose="weaver"),
    "DELETE /api/v1/weaver/inject/{injection}": Rule("operate", whose="weaver"),
    "POST /api/v1/weaver/devices/{device}/failure": Rule("operate", {}, whose="weaver"),
    "GET /api/v1/users": Rule("admin"),
    "GET /api/v1/weaver/plans": Rule("view", whose="weaver"),
    "POST /api/v1/weaver/plans": Rule("operate", {"text": PLAN}, whose="weaver"),
    "POST /api/v1/weaver/plans/check": Rule("operate", {"text": PLAN}, whose="weaver"),
    "GET /api/v1/weaver/plans/{plan}": Rule("view", whose="weaver"),
    "DELETE /api/v1/weaver/plans/{plan}": Rule("operate", whose="weaver"),
    "GET /api/v1/weaver/policies": Rule("view", whose="weaver"),
    "POST /api/v1/weaver/policies": Rule("operate", {"group": "a", "action": "notify"}, whose="weaver"),
    "POST /api/commands/update-config": Rule(
        "operate", {"replica_id": "train_0", "config_params": {"lr": 0.1}}, whose="weaver"
    ),
    "WS /ws/v1": Rule("view"),  # the hello says what for; `tests/integration/gateway/test_users.py` tries each
    "WS /ws/v1/weaver": Rule("view", whose="weaver"),
}

HTTP = [name for name in RULES if not name.startswith("WS ")]
GUARDED = [name for name in HTTP if RULES[name].scope is not None]
SOCKETS = [name for name in RULES if name.startswith("WS ")]


class Driver(DriverProcess):
    """A driver that is no process."""

    async def end(self, reason: str, timeout: float = 0.0) -> None:
        self.reason = reason
        self.exited.set()

    def signal(self, number: int) -> None:
        """Nobody is there."""

    def abandon(self) -> None:
        """Nobody is there."""


class AwayWeaver:
    """A weaver's client whose weaver is away."""

    async def _refuse(self, *args: object, **given: object) -> Any:
        raise WeaverUnavailable("the weaver is away")

    async def watch(self, *args: object, **given: object) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        yield await self._refuse()

    async def available(self) -> None:
        await asyncio.Event().wait()

    def __getattr__(self, name: str) -> Any:
        return self._refuse


class House:
    """An application with a session of ann's."""

    def __init__(self, folder: Path) -> None:
        file = TokenFile(folder / "tokens.json")
        self.tokens = {scope: file.create(f"ann {scope}", scope, user="ann")[1] for scope in SCOPES}
        self.bob = file.create("bob", "drive")[1]
        self.manager = SessionManager([])
        self.access = AccessControl(TokenAuthority("own", file), Limits(login_failures=0, connection_rate=0))
        self.supervisor = WeaverSupervisor(self.manager.folder.weaver, self.manager.worker_watch.there)
        self.supervisor.client = AwayWeaver()  # type: ignore[assignment]
        self.app = create_app(self.manager, DriverLines(self.manager), self.access, self.supervisor)
        self.guarded = AccessMiddleware(self.app, self.access)
        self._files = DriverFiles(str(folder / "driver"))
        self.begin_session()

    def begin_session(self) -> None:
        """Let ann have her session, also after a request has ended it."""
        files = self._files
        files.write_record(DriverRecord(1, 0, SESSION, user="ann"))
        Path(files.log).touch()
        self.manager._add(UserSession(Driver(files, files.read_record())))

    async def ask(self, method: str, path: str, token: str | None, body: object = None) -> httpx.Response:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        transport = httpx.ASGITransport(self.guarded, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
            if isinstance(body, bytes):
                content = {"content-type": "application/json"}
                return await asyncio.wait_for(client.request(method, path, content=body, headers=content), BOUND)
            return await asyncio.wait_for(client.request(method, path, json=body), BOUND)

    async def close(self) -> None:
        self.app.state.tunnels.close()
        await self.manager.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def only_house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    made = House(tmp_path_factory.mktemp("house"))
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def house(only_house: House) -> House:
    """The application, which takes long to make, with a session as new."""
    only_house.begin_session()
    return only_house


def listed(routes: Iterable[BaseRoute]) -> Iterator[str]:
    """The method and path of each route, as in `RULES`."""
    for route in routes:
        if (inner := getattr(route, "original_router", None)) is not None:  # what FastAPI has included
            yield from listed(inner.routes)
        elif isinstance(route, WebSocketRoute):
            yield f"WS {route.path}"
        elif isinstance(route, Route):
            path = route.path.replace(":path}", "}")
            yield from (f"{method} {path}" for method in sorted(route.methods or METHODS) if method != "HEAD")
        else:
            yield f"no rule is possible for {route!r}"


def path_of(rule: str, **given: str) -> str:
    """The path of a rule, with values for the parts that it leaves open."""
    path = rule.partition(" ")[2]
    values = {"name": SESSION, "user": "carol", "tunnel": "nothing", "replica": "train_0", "metric": "loss"}
    values |= {"command": "c-1", "injection": "i-1", "device": "GPU-0", "plan": "p-1", **given}
    values = {"alert": "a-1", "run": "r-1", "other": "r-2", **values}
    return path.format_map(values)


def code_of(answer: httpx.Response) -> str:
    """The code of an error; empty for another answer."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(answer.json()["error"]["code"])
    return ""


@pytest.mark.guarantees(
    "users",
    "Every route and every WebSocket has a rule: no token, a wrong one, each scope and another user's are "
    "tried on it",
)
async def test_every_route_has_a_rule(house: House) -> None:
    assert sorted(listed(house.app.routes)) == sorted(RULES)


@pytest.mark.parametrize("name", HTTP)
async def test_a_route_without_a_token_or_with_a_wrong_one(house: House, name: str) -> None:
    rule = RULES[name]
    for token in (None, "wrong", ""):
        answer = await house.ask(name.partition(" ")[0], path_of(name), token, rule.body)
        if rule.scope is None:
            assert answer.status_code in (
                200,
                404,
                422,
                503,
            )  # a proof needs a challenge, the page's files are built
        else:
            assert (answer.status_code, code_of(answer)) == (401, "authentication")


@pytest.mark.parametrize("name", GUARDED)
async def test_a_route_with_a_token_of_each_scope(house: House, name: str) -> None:
    rule = RULES[name]
    assert rule.scope is not None
    path = path_of(name) + ("?seconds=0.01" if name.endswith("/spans") else "")
    for scope in SCOPES:
        answer = await house.ask(name.partition(" ")[0], path, house.tokens[scope], rule.body)

        if SCOPES.index(scope) < SCOPES.index(rule.scope):
            assert (answer.status_code, code_of(answer)) == (403, "scope"), scope
        else:
            assert answer.status_code not in (401, 403, 405, 500), scope
            assert code_of(answer) != "unknown_session", scope
            house.begin_session()


@pytest.mark.parametrize("method", METHODS)
async def test_another_method_of_a_path_needs_a_token_too(house: House, method: str) -> None:
    paths = {path_of(name) for name in GUARDED}
    of_route = {f"{name.partition(' ')[0]} {path_of(name)}" for name in GUARDED}
    for path in sorted(paths | {"/nothing", "/api/v1", "/api/v1/../v1/status", "/ws/v1"}):
        if f"{method} {path}" in of_route or f"{method} {path}" == "DELETE /api/v1/alerts/log":  # a rule's id
            continue
        assert (await house.ask(method, path, None)).status_code == 401, path
        answer = await house.ask(method, path, house.tokens["admin"])
        assert answer.status_code in (200, 204, 404, 405), path
        if answer.status_code == 405:
            assert answer.headers["allow"]
            assert method == "HEAD" or code_of(answer) == "wrong_arguments"
        elif method != "HEAD" and path in ("/nothing", "/api/v1"):
            assert (answer.status_code, code_of(answer)) == (404, "not_found")
        if method not in ("GET", "HEAD", "OPTIONS") and "/tunnel" not in path:
            assert (await house.ask(method, path, house.tokens["view"])).status_code == 403, path


@pytest.mark.parametrize("path", ["/assets/none.js", "/assets/" + "x" * 1000, "/assets/%00", "/assets/%ff"])
async def test_a_file_of_the_page_that_is_none_is_an_error(house: House, path: str) -> None:
    answer = await house.ask("GET", path, None)

    assert (answer.status_code, code_of(answer)) == (404, "not_found")
    assert len(answer.content) < 500


@pytest.mark.parametrize("body", [b'{"kind": "\xff"}', b"[" * 50_000, b"{", b""])
async def test_a_body_that_is_no_json_is_an_error(house: House, body: bytes) -> None:
    answer = await house.ask("POST", "/api/v1/weaver/commands", house.tokens["admin"], body)

    assert (answer.status_code, code_of(answer)) == (422, "wrong_arguments")


@pytest.mark.parametrize("name", [name for name in GUARDED if RULES[name].whose == "session"])
async def test_a_session_of_another_user_is_none(house: House, name: str) -> None:
    method, body = name.partition(" ")[0], RULES[name].body
    there, nowhere = [
        await house.ask(method, path_of(name, name=session), house.bob, body) for session in (SESSION, "x")
    ]

    assert (there.status_code, code_of(there)) == (404, "unknown_session")
    assert (nowhere.status_code, nowhere.text.replace("'x'", f"'{SESSION}'")) == (404, there.text)
    assert SESSION in [session.name for session in house.manager.sessions()]


@pytest.mark.parametrize("name", [name for name in GUARDED if RULES[name].whose == "tunnel"])
async def test_a_tunnel_of_another_user_is_none(house: House, name: str) -> None:
    opened = await house.ask("POST", "/api/v1/tunnel", house.tokens["drive"])
    method, number = name.partition(" ")[0], "?n=1"
    there, nowhere = [
        await house.ask(method, path_of(name, tunnel=tunnel) + number, house.bob)
        for tunnel in (opened.json()["tunnel"], "nothing")
    ]

    assert (there.status_code, code_of(there)) == (404, "connection_lost")
    assert (nowhere.status_code, nowhere.text) == (404, there.text)


@pytest.mark.parametrize("name", [name for name in GUARDED if RULES[name].whose == "weaver"])
async def test_the_weaver_of_another_users_session_is_none(house: House, name: str) -> None:
    method, body = name.partition(" ")[0], RULES[name].body
    there, nowhere = [
        await house.ask(method, f"{path_of(name)}?session={session}", house.bob, body) for session in (SESSION, "x")
    ]

    assert (there.status_code, code_of(there)) == (404, "unknown_session")
    assert (nowhere.status_code, nowhere.text.replace("'x'", f"'{SESSION}'")) == (404, there.text)


@pytest.mark.guarantees("users", "That happens at once, also to a follower of logs of a silent session")
@pytest.mark.parametrize("take_back", ["DELETE", "PUT"])
async def test_taking_a_share_back_or_making_it_smaller_disconnects_at_once(house: House, take_back: str) -> None:
    path = f"/api/v1/sessions/{SESSION}/shares/bob"
    assert (await house.ask("PUT", path, house.tokens["drive"], {"scope": "drive"})).status_code == 200
    (session,) = house.manager.sessions()
    headers = [(b"authorization", f"Bearer {house.bob}".encode())]
    guest = house.access.admit({"type": "http", "headers": headers, "client": ("127.0.0.1", 1)})
    why: asyncio.Future[LoomError] = asyncio.get_running_loop().create_future()

    async def disconnect(error: LoomError) -> None:
        why.set_result(error)

    with house.access.connected(guest, disconnect, session, "drive"):
        await house.ask(take_back, path, house.tokens["drive"], {"scope": "view"})
        error = await asyncio.wait_for(why, BOUND)  # though nobody looks every second here

    assert type(error) is ScopeError


@pytest.mark.guarantees("users", "That happens at once, also to a follower of logs of a silent session")
async def test_a_follower_of_a_silent_log_is_ended_when_the_share_is_taken_back(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, start_feed = asyncio.Event(), SessionLogs._start_feed

    def begin(logs: SessionLogs, *given: Any) -> None:
        start_feed(logs, *given)
        begun.set()

    monkeypatch.setattr(SessionLogs, "_start_feed", begin)
    monkeypatch.setattr(session_logs, "SIGN_OF_LIFE", 10 * BOUND)
    path = f"/api/v1/sessions/{SESSION}"
    await house.ask("PUT", f"{path}/shares/bob", house.tokens["drive"], {"scope": "view"})
    following = asyncio.ensure_future(house.ask("GET", f"{path}/logs?follow=1", house.bob))
    await asyncio.wait_for(begun.wait(), BOUND)

    await house.ask("DELETE", f"{path}/shares/bob", house.tokens["drive"])

    assert (await following).status_code == 200
    assert not house.manager.logs._readers["bob"]


async def test_lists_and_counts_have_nothing_of_another_user(house: House) -> None:
    for name in GUARDED:
        if name.startswith("GET ") and not RULES[name].whose:
            answer = await house.ask("GET", path_of(name) + "?ended=true", house.bob)
            assert SESSION not in answer.text, name
    assert (await house.ask("GET", "/api/v1/status", house.bob)).json()["sessions"] == 0
    assert (await house.ask("GET", "/api/v1/status", house.tokens["view"])).json()["sessions"] == 1


# -- WebSockets ---------------------------------------------------------------------------------------------


class Refusals:
    """What a WebSocket's server is told to refuse."""

    def __init__(self) -> None:
        self.said: list[tuple[int, str]] = []
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def refuse(self, status: int, headers: Mapping[str, str], text: str) -> None:
        self.said.append((status, json.loads(text)["error"]["code"]))

    def limit_messages(self, most: int) -> None:
        """Nobody sends any."""


async def upgrade(house: House, path: str, token: str | None) -> tuple[list[tuple[int, str]], list[str]]:
    """Return the refusals of a WebSocket, and the types of what the application sends, until its client leaves."""
    socket, sent = Refusals(), []
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    for event in ("websocket.connect", "websocket.disconnect"):
        events.put_nowait({"type": event})
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    scope = {
        "type": "websocket",
        "path": path,
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "loom.socket": socket,
    }
    scope |= {"root_path": "", "query_string": b"", "scheme": "ws", "subprotocols": []}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await asyncio.wait_for(house.guarded(scope, events.get, send), BOUND)
    return socket.said, sent


@pytest.mark.parametrize("name", SOCKETS)
async def test_a_websocket_without_a_token_or_with_a_wrong_one(house: House, name: str) -> None:
    for token in (None, "wrong", ""):
        refused, sent = await upgrade(house, path_of(name), token)
        assert (refused, sent) == ([(401, "authentication")], [])


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", SOCKETS)
async def test_a_websocket_with_a_token_of_each_scope(house: House, name: str, scope: str) -> None:
    refused, sent = await upgrade(house, path_of(name), house.tokens[scope])
    assert refused == []
    assert sent[0] == "websocket.accept"
