"""Who may look at replicas and who may change them, what the audit says, and who is put out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

import loom
from loom.rest_client import Gateway
from loom.token_file import TokenFile
from loom_gateway.access.control import AccessControl
from loom_gateway.access.token_authority import TokenAuthority
from loom_gateway.weaver_socket import endpoint as weaver_socket
from loom_gateway.weaver_socket import subscribers
from loom_gateway.weaver_socket.endpoint import WeaverSocket
from loom_proxy.local import LocalCluster
from loom_proxy.notebook.live_runs import LiveRuns
from loom_proxy.weaver.client import WeaverProxy
from tests.support.actors import Counter
from tests.support.gateways import BOUND, await_true
from tests.support.weaver_training import training
from tests.support.weavers import await_weaver


class Guarded:
    """A gateway with a file of tokens and an audit."""

    def __init__(self, cluster: LocalCluster, file: TokenFile, audit: Path) -> None:
        self.cluster = cluster
        self.file = file
        self._audit = audit

    def token(self, scope: str) -> tuple[str, str]:
        """A new token's id, and the token."""
        token, text = self.file.create(f"a {scope}", scope, user="admin")
        return token.id, text

    def weaver(self, scope: str) -> WeaverProxy:
        """The weaver, for somebody with a new token."""
        return WeaverProxy(self.cluster.url, self.token(scope)[1])

    def audit(self, **wanted: Any) -> list[dict[str, Any]]:
        """The audit's lines that have these values."""
        lines = [json.loads(line) for line in self._audit.read_text().splitlines()]
        return [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]

    def watch(self, token: str, **headers: str) -> ClientConnection:
        """A WebSocket of pushes."""
        headers = {"Authorization": f"Bearer {token}", **headers}
        return connect(f"{self.cluster.url}/ws/v1/weaver", additional_headers=headers, proxy=None)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("weaver-access")
    options = ["--tokens", str(folder / "tokens.json"), "--audit", str(folder / "audit")]
    with LocalCluster(1, gateway_options=options) as cluster:
        found = Guarded(cluster, TokenFile(folder / "tokens.json"), folder / "audit")
        await_weaver(WeaverProxy(cluster.url, cluster.token))
        yield found


def test_who_views_reads_and_watches_and_changes_nothing(guarded: Guarded) -> None:
    weaver = guarded.weaver("view")

    assert weaver.status()["replicas"] == {}
    assert weaver.replicas() == {}
    assert weaver.devices() == {}
    assert next(weaver.watch()) is not None
    for change in (
        weaver.pause,
        lambda: weaver.report_device_failure("a device"),
        lambda: weaver.set_policy("*", "stop"),
        weaver.address,
    ):
        with pytest.raises(loom.ScopeError, match="operate"):
            change()


def test_who_operates_changes(guarded: Guarded) -> None:
    weaver = guarded.weaver("operate")

    assert weaver.pause("nobody-*").done()
    assert weaver.set_policy("g", "pause")["g"] == "pause"
    with training(weaver.address(), "train_0"):
        await_true(lambda: "train_0" in weaver.replicas())


def test_without_a_token_there_is_nothing(guarded: Guarded) -> None:
    with pytest.raises(loom.AuthenticationError):
        WeaverProxy(guarded.cluster.url, "wrong").status()
    with pytest.raises(loom.AuthenticationError):
        next(WeaverProxy(guarded.cluster.url, "wrong").watch())


def test_a_page_of_elsewhere_cannot_watch(guarded: Guarded) -> None:
    with pytest.raises(InvalidStatus) as refused:
        guarded.watch(guarded.cluster.token, Origin="https://evil.example")
    assert refused.value.response.status_code == 403


def test_the_audit_says_who_commanded_what(guarded: Guarded) -> None:
    ident, token = guarded.token("operate")

    command = WeaverProxy(guarded.cluster.url, token).update_config("nobody-*", secret="a secret value")

    (line,) = guarded.audit(event="commanded", token=ident)
    assert (line["kind"], line["target"], line["keys"], line["status"]) == (
        "update_config", "nobody-*", ["secret"], 200
    )  # fmt: skip
    assert line["command"] == command.id
    assert "a secret value" not in json.dumps(line)
    events = WeaverProxy(guarded.cluster.url, token).events(limit=20)
    (event,) = (event for event in events if event.data.get("command") == command.id)
    assert event.data["by"] == "a operate"


def test_the_audit_says_who_injected_a_failure(guarded: Guarded) -> None:
    ident, token = guarded.token("operate")

    with pytest.raises(loom.UnknownDevice):
        WeaverProxy(guarded.cluster.url, token).report_device_failure("GPU-none", "to see what happens")

    (line,) = guarded.audit(event="injected", token=ident)
    assert (line["device"], line["reason"], line["status"]) == ("GPU-none", "to see what happens", 404)


def test_a_watcher_whose_token_is_revoked_is_put_out(guarded: Guarded) -> None:
    ident, token = guarded.token("view")
    with guarded.watch(token) as socket:
        socket.recv(BOUND)
        guarded.file.revoke(ident)

        with pytest.raises(ConnectionClosed) as closed:
            read_all(socket)
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4000, "token_revoked")


def read_all(socket: ClientConnection) -> None:
    while True:
        socket.recv(BOUND)


def test_a_program_is_told_that_its_token_was_revoked(guarded: Guarded) -> None:
    ident, token = guarded.token("view")
    updates = WeaverProxy(guarded.cluster.url, token).watch(BOUND)
    next(updates)
    guarded.file.revoke(ident)

    with pytest.raises(loom.TokenRevoked):
        for _ in updates:
            pass


def test_metrics_need_a_token_and_show_replicas(guarded: Guarded) -> None:
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    url = guarded.cluster.url.replace("ws:", "http:") + "/metrics"
    with pytest.raises(HTTPError, match="401"):
        urlopen(url, timeout=BOUND)
    weaver = WeaverProxy(guarded.cluster.url, guarded.cluster.token)

    def page() -> str:
        request = Request(url, headers={"Authorization": f"Bearer {guarded.token('view')[1]}"})
        with urlopen(request, timeout=BOUND) as response:
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            return str(response.read().decode())

    with (
        training(weaver.address(), "train_5", group="measured"),
        loom.connect(guarded.cluster.url, guarded.cluster.token) as job,
    ):
        await_true(lambda: weaver.replicas().get("train_5") is not None)
        weaver.update_config("train_5", learning_rate=0.5).get(BOUND)
        await_true(lambda: 'metric="loss"' in page())
        job.hosts.spawn_procs().spawn("counters", Counter).add.call(1).get(BOUND)
        calls = f'loom_call_latency_seconds_count{{session="{job.session}",user="admin"}}'
        await_true(lambda: samples(page()).get(calls, 0) >= 1)
        shown = samples(page())

        assert shown["loom_weaver_up"] == 1
        assert shown['loom_replicas{state="running",user="admin"}'] == 1
        assert shown['loom_replicas{state="stalled",user="admin"}'] == 0
        assert shown['loom_goodput_ratio{job="measured",user="admin"}'] > 0
        assert shown['loom_goodput_seconds_total{job="measured",reason="compute",user="admin"}'] > 0
        assert shown['loom_replica_step{group="measured",replica="train_5",user="admin"}'] > 0
        assert 0 < shown['loom_replica_metric{group="measured",metric="loss",replica="train_5",user="admin"}'] <= 1
        assert shown['loom_command_latency_seconds_count{user="admin"}'] >= 1
        assert shown['loom_command_latency_seconds_bucket{le="+Inf",user="admin"}'] >= 1
        assert (
            shown[f'loom_call_latency_seconds_bucket{{le="+Inf",session="{job.session}",user="admin"}}']
            == shown[calls]
        )
        assert 0 < shown[f'loom_call_latency_seconds_sum{{session="{job.session}",user="admin"}}'] < BOUND
        assert shown[f'loom_session_clients{{session="{job.session}",user="admin"}}'] == 1
        assert shown[f'loom_session_sent_bytes_total{{session="{job.session}",user="admin"}}'] > 0
        assert shown[f'loom_session_received_bytes_total{{session="{job.session}",user="admin"}}'] > 0


def samples(page: str) -> dict[str, float]:
    """The samples of a page, by name and labels; each is there once, behind the line that says what it is."""
    found: dict[str, float] = {}
    family = ""
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            family = line.split()[2]
        elif not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            assert name.startswith(family)
            assert name not in found
            found[name] = float(value)
    return found


def test_the_openapi_document_describes_it(guarded: Guarded) -> None:
    from urllib.request import Request, urlopen

    request = Request(guarded.cluster.url.replace("ws:", "http:") + "/api/v1/openapi.json")
    request.add_header("Authorization", f"Bearer {guarded.cluster.token}")
    with urlopen(request, timeout=BOUND) as response:
        document = json.load(response)

    paths = {path: list(found) for path, found in document["paths"].items() if "weaver" in path}
    assert paths == {
        "/api/v1/weaver/status": ["get"],
        "/api/v1/weaver/replicas": ["get"],
        "/api/v1/weaver/devices": ["get"],
        "/api/v1/weaver/events": ["get"],
        "/api/v1/weaver/goodput": ["get"],
        "/api/v1/weaver/replicas/{replica}": ["get"],
        "/api/v1/weaver/replicas/{replica}/metrics": ["get"],
        "/api/v1/weaver/replicas/{replica}/metrics/{metric}": ["get"],
        "/api/v1/weaver/replicas/{replica}/points": ["get"],
        "/api/v1/weaver/query": ["get"],
        "/api/v1/weaver/links/{replica}": ["post"],
        "/api/v1/weaver/trainer-status": ["post"],
        "/api/v1/weaver/replicas/{replica}/stacks": ["get"],
        "/api/v1/weaver/replicas/{replica}/profile": ["get"],
        "/api/v1/weaver/address": ["get"],
        "/api/v1/weaver/commands": ["post"],
        "/api/v1/weaver/commands/{command}": ["get"],
        "/api/v1/weaver/devices/{device}/failure": ["post"],
        "/api/v1/weaver/policies": ["get", "post"],
        "/api/v1/weaver/inject": ["post"],
        "/api/v1/weaver/inject/{injection}": ["delete"],
        "/api/v1/weaver/plans": ["post", "get"],
        "/api/v1/weaver/plans/check": ["post"],
        "/api/v1/weaver/plans/{plan}": ["get", "delete"],
    }
    for found in document["paths"].values():
        assert all(operation["description"] for operation in found.values())


# -- readers who are too slow -----------------------------------------------------------------------------------


class Pushing:
    """Stands in for a weaver, and for its watch, that pushes without end."""

    def __init__(self) -> None:
        self.watches = self.snapshots = 0

    @asynccontextmanager
    async def watch(self, user: str, full: bool) -> AsyncIterator[Pushing]:
        assert (user, full) == ("admin", False)
        self.watches += 1
        self.refresh()
        yield self

    def refresh(self, full: bool = False) -> None:
        self.snapshots += 1
        self._next = "snapshot"

    async def next(self) -> tuple[str, dict[str, Any]]:
        await asyncio.sleep(0)
        kind, self._next = self._next, "event"
        return kind, {"replicas": []} if kind == "snapshot" else {"event": {"text": "x" * 1000}}


class Reader:
    """Stands in for a WebSocket whose reader takes the first message and no more."""

    def __init__(self, takes_goodbye: bool) -> None:
        self.sent: list[dict[str, Any]] = []
        self.aborted = False
        self._takes_goodbye = takes_goodbye
        self._never = asyncio.Event()
        self._connected = False

    async def receive(self) -> dict[str, Any]:
        if not self._connected:
            self._connected = True
            return {"type": "websocket.connect"}
        await self._never.wait()
        raise AssertionError

    async def send(self, message: Any) -> None:
        kind = message["type"]
        if len(self.sent) >= 2 and not (kind == "websocket.close" and self._takes_goodbye):
            await self._never.wait()
        self.sent.append(dict(message))

    def abort(self) -> None:
        self.aborted = True

    def limit_messages(self, most: int) -> None:
        """It sends nothing."""


@pytest.mark.parametrize("takes_goodbye", [True, False])
async def test_a_reader_who_is_too_slow_is_put_out(monkeypatch: pytest.MonkeyPatch, takes_goodbye: bool) -> None:
    monkeypatch.setattr(subscribers, "MAX_WAITING", 100_000)
    monkeypatch.setattr(weaver_socket, "DISCONNECT_TIMEOUT", 0.1)
    access = AccessControl(TokenAuthority("a token"))
    headers = [(b"authorization", b"Bearer a token")]
    scope: dict[str, Any] = {"type": "websocket", "headers": headers, "client": ("127.0.0.1", 1), "path": "/"}
    scope["loom.principal"] = access.admit(scope)
    reader = scope["loom.socket"] = Reader(takes_goodbye)
    began = time.monotonic()

    weaver: Any = Pushing()
    none: Any = None
    await asyncio.wait_for(WeaverSocket(weaver, access, none, none)(scope, reader.receive, reader.send), BOUND)

    assert time.monotonic() - began < BOUND / 2
    if takes_goodbye:
        assert reader.sent[-1] == {"type": "websocket.close", "code": 4000, "reason": "watcher_too_slow"}
    assert reader.aborted is not takes_goodbye


async def text_of(reader: subscribers.FeedReader) -> str:
    got: asyncio.Queue[str] = asyncio.Queue()

    async def send(message: Any) -> None:
        got.put_nowait(message["text"])
        await asyncio.Event().wait()  # takes one message and no more

    sending = asyncio.ensure_future(reader.send_to(send))
    try:
        return await got.get()
    finally:
        sending.cancel()


@pytest.mark.guarantees(
    "weaver",
    "Readers of the weaver's feed share a watch, each user has at most 64, and what pages get in addition "
    "does not reach the others",
)
async def test_readers_share_a_watch_and_each_begins_with_a_snapshot() -> None:
    weaver: Any = Pushing()
    watches = weaver_socket.WeaverWatches(weaver)
    first, second = subscribers.FeedReader(), subscribers.FeedReader()

    with watches.reading("admin", "admin", first):
        assert '"snapshot"' in await asyncio.wait_for(text_of(first), BOUND)
        assert '"event"' in await asyncio.wait_for(text_of(first), BOUND)
        with watches.reading("admin", "admin", second):
            assert '"snapshot"' in await asyncio.wait_for(text_of(second), BOUND)
            assert '"event"' in await asyncio.wait_for(text_of(second), BOUND)
            assert (weaver.watches, weaver.snapshots) == (1, 2)
    assert not watches._watches


@pytest.mark.guarantees(
    "weaver",
    "Readers of the weaver's feed share a watch, each user has at most 64, and what pages get in addition "
    "does not reach the others",
)
async def test_a_user_has_so_many_readers_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weaver_socket, "MAX_READERS", 1)
    weaver: Any = Pushing()
    watches = weaver_socket.WeaverWatches(weaver)
    one, two = subscribers.FeedReader(), subscribers.FeedReader()

    with watches.reading("anna", "admin", one):
        with pytest.raises(loom.LimitReached, match="1 programs watch the weaver as 'anna' already"):
            watches.reading("anna", "admin", two).__enter__()
        with watches.reading("bert", "admin", two):
            pass
    with watches.reading("anna", "admin", one):
        pass


def test_the_live_cell_of_who_views_shows_a_run_and_refuses_to_change_it(guarded: Guarded) -> None:
    address = Gateway(guarded.cluster.url, guarded.cluster.token).ask("address")
    weaver = guarded.weaver("view")
    cell = LiveRuns(lambda: [one.info for one in weaver.runs("seen")], weaver._ask)
    with training(address, "seen_0", group="seen"):
        await_true(lambda: bool((cell.state()["run"] or {}).get("points")))
        for content in ({"command": "stop"}, {"command": "learning_rate", "value": "0.5"}):
            cell.message(content)
            assert cell.state()["may"] is False
            assert cell.state()["said"].startswith("ScopeError: ")
        assert weaver.replica("seen_0").config["learning_rate"] == 0.1
