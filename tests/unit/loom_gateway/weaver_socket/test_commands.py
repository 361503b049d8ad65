"""The answers to one client of the weaver's WebSocket, with a weaver that does what a test says."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import loom
from loom.errors import LoomError
from loom.token_file import TokenFile
from loom_gateway.access.audit import Audit
from loom_gateway.access.control import AccessControl
from loom_gateway.access.rate_limits import Allowances
from loom_gateway.access.sessions import Principal
from loom_gateway.access.token_authority import TokenAuthority
from loom_gateway.rest.weaver_changes import WeaverChanges
from loom_gateway.settings import Limits
from loom_gateway.weaver_socket import commands
from loom_gateway.weaver_socket.commands import SocketCommands
from loom_gateway.weaver_socket.subscribers import PageSubscription

BOUND = 20.0
APPLIED = {"ok": True, "reason": None, "step": 7, "changes": {}, "refused": {}}
WAITING = {**APPLIED, "ok": False, "reason": "it is recovering", "waiting": True}


class Weaver:
    """Stands in for the weaver's client."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.replicas = ["train_0"]
        self.outcomes: dict[str, Any] = {}
        self.refusals: list[LoomError] = []
        """Errors that answer the next questions about the state of a command."""
        self.going: asyncio.Event = asyncio.Event()
        self.going.set()
        self._more = asyncio.Event()

    async def do(self, operation: str, by: str, user: str, **arguments: Any) -> Any:
        self.asked.append((operation, {"by": by, "user": user, **arguments}))
        if operation == "policy":
            return {arguments["group"]: arguments["action"]}
        if operation != "command_state":
            await self.going.wait()
            return self.state(arguments.get("id") or "made-up-1")
        if self.refusals:
            raise self.refusals.pop(0)
        if "after" not in arguments:
            return self.state(arguments["id"])
        while len(self.outcomes) <= arguments["after"] and not self.is_done:
            self._more.clear()
            try:
                await asyncio.wait_for(self._more.wait(), arguments["wait"])
            except asyncio.TimeoutError:
                break
        new = dict(list(self.outcomes.items())[arguments["after"] :])
        return {"id": arguments["id"], "replicas": list(new), "done": self.is_done, "outcomes": new}

    @property
    def is_done(self) -> bool:
        return len(self.outcomes) == len(self.replicas)

    def state(self, id: str) -> dict[str, Any]:
        waiting = {replica: WAITING for replica in self.replicas if replica not in self.outcomes}
        outcomes = {**self.outcomes, **waiting}
        return {"id": id, "replicas": self.replicas, "done": self.is_done, "outcomes": outcomes}

    def acknowledge(self, *replicas: str) -> None:
        self.outcomes |= dict.fromkeys(replicas, APPLIED)
        self._more.set()


class Client:
    """A client, with a token of ann's."""

    def __init__(
        self, folder: Path, scope: str = "operate", audit_required: bool = False, is_page: bool = True
    ) -> None:
        self.file = TokenFile(folder / "tokens.json")
        self.token, text = self.file.create(f"ann {scope}", scope, user="ann")
        self._audit = folder / "audit"
        self.audit = Audit(self._audit, required=audit_required)
        self.access = AccessControl(TokenAuthority("own", self.file), audit=self.audit)
        self.authority = self.access._authority
        headers = [(b"authorization", f"Bearer {text}".encode())]
        self.principal: Principal = self.access.admit({"type": "http", "headers": headers, "client": ("::1", 1)})
        self.weaver = Weaver()
        self.got: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.reads.set()
        fake: Any = self.weaver
        changes = WeaverChanges(fake, SimpleNamespace(kill=self._kill))  # type: ignore[arg-type]
        self.subscribed: list[PageSubscription] = []
        of, subscribe = {"user": "ann"}, self.subscribed.append if is_page else None
        self.commands = SocketCommands(
            changes, fake, self.access, self.principal, of, "/ws/v1/weaver", self._take, subscribe
        )

    async def _take(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        self.got.put_nowait(message)

    async def _kill(self, kind: str, target: str, by: Principal) -> dict[str, Any]:
        return {"pid": 5, "state": "gone"}

    async def send(self, **message: Any) -> None:
        await asyncio.wait_for(self.commands.answer(json.dumps(message)), BOUND)

    async def next(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.got.get(), BOUND)

    def lines(self) -> list[dict[str, Any]]:
        self.audit.last.result(BOUND)
        return [json.loads(line) for line in self._audit.read_text().splitlines()]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    made = Client(tmp_path)
    yield made
    await made.commands.close()
    await made.audit.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so that nothing tells."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never was so")


def pause(number: int = 1) -> dict[str, Any]:
    return {"type": "command", "id": f"command-{number}", "kind": "pause", "target": "train_*"}


async def test_each_acknowledgement_comes_as_it_is_made_and_in_the_end_done(client: Client) -> None:
    client.weaver.replicas = ["train_0", "train_1", "nobody"]
    client.weaver.acknowledge("nobody")
    await client.send(**pause())
    told = {"id": "command-1", "command": "command-1"}

    assert await client.next() == {"type": "accepted", **told, "replicas": ["train_0", "train_1", "nobody"]}
    for replica in ("nobody", "train_1", "train_0"):
        client.weaver.acknowledge(replica)
        acknowledged = {"type": "acknowledgement", **told, "replica": replica, "waiting": False, **APPLIED}
        assert await client.next() == acknowledged
    assert await client.next() == {"type": "done", **told}
    assert client.weaver.asked[0] == (
        "command",
        {"by": "ann operate", "user": "ann", "kind": "pause", "target": "train_*", "params": {}, "id": "command-1"},
    )


async def test_who_has_not_answered_for_long_is_told_with_the_reason(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "SHOW_WAITING", 0.01)
    client.weaver.replicas = ["train_0", "train_1"]
    client.weaver.acknowledge("train_1")
    await client.send(**pause())
    await client.next()
    assert (await client.next())["replica"] == "train_1"

    waiting = await client.next()
    client.weaver.acknowledge("train_0")
    answered = await client.next()

    assert (waiting["replica"], waiting["waiting"], waiting["reason"]) == ("train_0", True, "it is recovering")
    assert (answered["replica"], answered["waiting"], answered["ok"]) == ("train_0", False, True)
    assert (await client.next())["type"] == "done"


async def test_who_never_answers_is_not_waited_for_without_end(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "MAX_FOLLOWED", 0.01)
    await client.send(**pause())
    answers = [await client.next() for _ in range(3)]

    assert [(one["type"], one.get("waiting")) for one in answers] == [
        ("accepted", None), ("acknowledgement", True), ("done", None)
    ]  # fmt: skip
    assert not client.commands._waiting


async def test_a_weaver_that_is_away_meanwhile_is_asked_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "BETWEEN_ATTEMPTS", 0.0)
    client.weaver.refusals = [loom.WeaverUnavailable("killed")] * 3
    await client.send(**pause())
    await client.next()
    client.weaver.acknowledge("train_0")

    assert [(await client.next())["type"] for _ in range(2)] == ["acknowledgement", "done"]


async def test_a_weaver_that_stays_away_and_one_that_forgot_are_errors(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "MAX_FOLLOWED", 0.0)
    monkeypatch.setattr(commands, "SHOW_WAITING", 0.0)
    for error in (loom.WeaverUnavailable("killed"), loom.NotFound("there is no command")):
        client.weaver.refusals = [error]
        await client.send(**pause())
        await client.next()
        assert await client.next() == {
            "type": "error", "id": "command-1", "code": error.code, "message": str(error)
        }  # fmt: skip


@pytest.mark.guarantees(
    "weaver",
    "An acknowledged command is on the disk; a page gets each acknowledgement once, also if the weaver is "
    "killed meanwhile",
)
async def test_acknowledgements_in_another_order_after_a_restart_are_all_sent_once(client: Client) -> None:
    client.weaver.replicas = ["train_0", "train_1", "train_2"]
    await client.send(**pause())
    await client.next()
    client.weaver.acknowledge("train_0")
    first = await client.next()
    # The next weaver has read them in another order.
    client.weaver.outcomes = {}
    client.weaver.acknowledge("train_1", "train_0", "train_2")
    rest = [await client.next() for _ in range(3)]

    assert [one.get("replica") for one in [first, *rest]] == ["train_0", "train_2", "train_1", None]


async def test_a_message_is_answered_after_the_one_before_it_and_not_after_its_acknowledgements(
    client: Client,
) -> None:
    client.weaver.going.clear()
    first = asyncio.ensure_future(client.send(**pause()))
    await until(lambda: bool(client.weaver.asked))
    assert client.got.empty()
    client.weaver.going.set()
    await first
    await client.send(type="ping", id=2)

    assert [(await client.next())["type"] for _ in range(2)] == ["accepted", "pong"]
    assert client.got.empty()


async def test_so_many_changes_wait_and_no_more(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MAX_WAITING", 2)
    for number in range(3):
        await client.send(**pause(number))
    accepted, other, error = [await client.next() for _ in range(3)]

    assert (accepted["type"], other["type"]) == ("accepted", "accepted")
    assert (error["type"], error["id"], error["code"]) == ("error", "command-2", "limit_reached")
    assert len(client.lines()) == 2
    client.weaver.acknowledge("train_0")
    await until(lambda: not client.commands._waiting)
    await client.send(**pause(3))
    assert "accepted" in [one["type"] for one in [client.got.get_nowait() for _ in range(client.got.qsize())]]


async def test_a_client_that_reads_nothing_is_not_read_from(client: Client) -> None:
    client.reads.clear()
    ping = asyncio.ensure_future(client.send(type="ping", id=1))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not ping.done()
    client.reads.set()
    await ping

    assert await client.next() == {"type": "pong", "id": 1}


@pytest.mark.guarantees(
    "weaver",
    "What a session commands is in the audit once, and what a page commands as over REST, also if its "
    "WebSocket drops",
)
async def test_a_change_goes_on_when_its_client_leaves_and_the_audit_says_what_came_of_it(client: Client) -> None:
    client.weaver.going.clear()
    asking = asyncio.ensure_future(client.send(**pause()))
    await until(lambda: bool(client.weaver.asked))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await client.commands.close()
    assert client.lines() == []
    client.weaver.going.set()
    await until(lambda: bool(client.lines()))

    (line,) = client.lines()
    assert (line["event"], line["command"], line["status"]) == ("commanded", "command-1", 200)


@pytest.mark.guarantees(
    "weaver",
    "What a session commands is in the audit once, and what a page commands as over REST, also if its "
    "WebSocket drops",
)
async def test_the_audit_has_the_lines_that_rest_has(client: Client) -> None:
    client.weaver.acknowledge("train_0")
    about = {
        "name": "ann operate",
        "user": "ann",
        "peer": "::1",
        "method": "WS",
        "path": "/ws/v1/weaver",
        "of": "ann",
    }
    fault = {"fault": "slow_rank", "target": "train_0", "duration": 5.0}
    for message, wanted in (
        (
            {"type": "update_config", "replica_id": "train_0", "config_params": {"key": "a secret"}},
            {"event": "commanded", "kind": "update_config", "target": "train_0", "keys": ["key"], "status": 200},
        ),
        (
            {"type": "policy", "group": "g", "action": "stop"},
            {"event": "commanded", "group": "g", "action": "stop", "status": 200},
        ),
        (
            {"type": "inject", "id": "fault-01", **fault},
            {"event": "injected", **fault, "command": "fault-01", "replicas": ["train_0"], "status": 200},
        ),
        ({"type": "remove_fault", "injection": "i"}, {"event": "injected", "removed": "i", "status": 200}),
        ({"type": "inject", "fault": "rain", "target": "*"}, {"event": "injected", "fault": "rain", "status": 422}),
    ):
        await client.send(**message)
        line = client.lines()[-1]
        assert {name: line.get(name) for name in {**about, **wanted}} == {**about, **wanted}
    await client.send(type="policy")
    assert (client.lines()[-1]["event"], client.lines()[-1]["status"]) == ("commanded", 422)
    assert "a secret" not in json.dumps(client.lines())


async def test_a_fault_of_the_gateways_own_is_done_with_its_evidence(client: Client) -> None:
    await client.send(type="inject", id="fault-02", fault="dead_weaver", target="*")

    assert await client.next() == {"type": "accepted", "id": "fault-02", "command": "dead_weaver-5", "replicas": []}
    evidence = {"pid": 5, "state": "gone"}
    assert await client.next() == {
        "type": "done", "id": "fault-02", "command": "dead_weaver-5", "evidence": evidence
    }  # fmt: skip
    await client.send(type="inject", id="fault-03", fault="dead_weaver", target=["a", "b"])
    assert (await client.next())["code"] == "wrong_arguments"


async def test_a_token_of_scope_view_changes_nothing(tmp_path: Path) -> None:
    client = Client(tmp_path, "view")
    await client.send(**pause())
    await client.send(type="ping", id=1)

    assert (await client.next())["code"] == "scope"
    assert (await client.next())["type"] == "pong"
    assert client.weaver.asked == []
    assert [line["event"] for line in client.lines()] == ["refused"]
    await client.audit.close()


async def test_a_revoked_token_ends_the_socket_before_anything_is_given(client: Client) -> None:
    client.file.revoke(client.token.id)
    client.authority.refresh()

    with pytest.raises(loom.TokenRevoked):
        await client.send(**pause())
    assert client.weaver.asked == []


async def test_what_cannot_be_written_down_is_not_done(tmp_path: Path) -> None:
    client = Client(tmp_path, audit_required=True)
    await client.send(**pause())
    assert [line["event"] for line in client.lines()] == ["asked", "commanded"]
    client.audit._file.write_line = fail  # type: ignore[union-attr, method-assign]
    await client.next()
    await client.send(**pause(2))

    assert (await client.next())["code"] == "audit_unavailable"
    assert "command-2" not in [asked.get("id") for operation, asked in client.weaver.asked]
    await client.commands.close()
    await client.audit.close()


def fail(line: str) -> None:
    raise OSError(28, "No space left on device")


async def test_a_client_that_left_is_sent_nothing_more(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    async def gone(message: dict[str, Any]) -> None:
        raise ConnectionResetError

    await client.send(**pause())
    client.commands._send = gone
    client.weaver.acknowledge("train_0")
    await until(lambda: not client.commands._waiting)

    assert caplog.text == ""


async def test_a_page_subscribes_also_with_a_token_that_only_views(tmp_path: Path) -> None:
    viewer = Client(tmp_path, "view")
    await viewer.send(type="subscribe", id="first", columns=["step"])
    await viewer.send(type="subscribe", id=2, columns=["colour"])
    await viewer.send(type="subscribe", rows=["r0"], aggregates=True)

    assert await viewer.next() == {"type": "subscribed", "id": "first"}
    error = await viewer.next()
    assert (error["type"], error["id"], error["code"]) == ("error", 2, "wrong_arguments")
    assert await viewer.next() == {"type": "subscribed", "id": None}
    assert viewer.subscribed == [PageSubscription(columns=["step"]), PageSubscription(rows=["r0"], aggregates=True)]
    await viewer.audit.close()


async def test_another_program_does_not_subscribe(tmp_path: Path) -> None:
    other = Client(tmp_path, is_page=False)
    await other.send(type="subscribe", id=1)

    error = await other.next()
    assert (error["code"], "loom.page" in error["message"]) == ("wrong_arguments", True)
    await other.audit.close()


@pytest.mark.guarantees(
    "page data",
    "A page's subscription, its frames' rate, what is kept for resuming and a feed without pages are bounded",
)
async def test_many_subscriptions_at_once_wait_for_their_turns(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "BETWEEN_SUBSCRIPTIONS", 0.02)
    monkeypatch.setattr(commands, "FEW_SUBSCRIPTIONS", 5)
    began = time.monotonic()
    for id in range(15):
        await client.send(type="subscribe", id=id, columns=["step" if id % 2 else "colour"])

    assert time.monotonic() - began >= 9 * 0.02 - 0.001
    assert client.got.qsize() == 15


@pytest.mark.parametrize("kind", sorted(commands._READERS))
async def test_messages_of_every_kind_that_changes_something_count_as_requests(client: Client, kind: str) -> None:
    client.access.allowances = Allowances(Limits(connection_rate=2.0))  # 10 at once

    for number in range(30):
        await client.send(type=kind, id=number)

    codes = [(await client.next()).get("code") for _ in range(30)]
    assert codes.count("rate_limited") >= 19
    assert "rate_limited" not in codes[:10]
