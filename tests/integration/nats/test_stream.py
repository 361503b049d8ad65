"""Requests that NATS keeps, with JetStream of a real server: each is done once, whenever a bridge is killed."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.js.api import StreamConfig

from loom.nats.jetstream import REPLY_TO
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.integration.nats.bridges import Bridge, counts_of, run_bridge, states, until
from tests.integration.nats.nats_server import BOUND, NatsServer, require_nats_server
from tests.integration.nats.outsiders import Outsider
from tests.support.gateways import TOKEN, gateway_of
from tests.support.network.delay_proxy import DelayProxy, Link, Passed
from tests.support.network.gate import Gate
from tests.support.weaver_training import Training, training
from tests.support.weavers import await_weaver

COMMANDS, FAILURES = "torchLoom.ui.commands", "torchLoom.monitored.failure"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    require_nats_server()
    with NatsServer("--jetstream", "--store_dir", str(tmp_path / "jetstream")) as running:
        yield running


@pytest.fixture
def start_bridge(cluster: LocalCluster, server: NatsServer, tmp_path: Path) -> Callable[..., Bridge]:
    """A function that starts a bridge, always with the same state."""

    def start(url: str = cluster.url, nats_url: str = server.url, token: str = cluster.token) -> Bridge:
        return Bridge(url, token, nats_url, "--jetstream", "--state", str(tmp_path / "state.sqlite"))

    return start


def gateway_port(cluster: LocalCluster) -> int:
    return int(cluster.url.rpartition(":")[2])


async def handled(client: Client, number: int) -> tuple[int, int]:
    """Wait until the bridge has done so many requests, or has seen that they were done; return how many of each."""

    async def count() -> tuple[int, int]:
        while True:
            counts = await counts_of(client)
            if counts["done"] + counts["repeated"] >= number:
                return counts["done"], counts["repeated"]
            await asyncio.sleep(0.05)

    return await asyncio.wait_for(count(), BOUND)


async def keep(client: Client, subject: str, body: dict[str, Any], **headers: str) -> Any:
    """Publish a request, and wait until NATS keeps it."""
    return await client.jetstream().publish(
        subject, json.dumps(body).encode(), headers={name.replace("_", "-"): one for name, one in headers.items()}
    )


@dataclass(frozen=True)
class Requests:
    """Requests of a test to its two training processes, ``GROUP_0`` and ``GROUP_1``, and what became of them."""

    client: Client
    weaver: WeaverProxy
    group: str
    before: int
    """The last event before the test."""

    async def keep(self, order: str, target: str | None = None, **headers: str) -> Any:
        """Publish a command, to the first process if no ``target`` is named, and wait until NATS keeps it."""
        body = {"command_type": order, "target_id": target or f"{self.group}_0"}
        return await keep(self.client, COMMANDS, body, **headers)

    def given(self) -> list[str]:
        """The commands of users."""
        kinds = (event.data["do"] for event in self.weaver.events(self.before, kind="command"))
        return [kind for kind in kinds if kind != "device_failed"]

    def failed(self) -> list[str]:
        """Why devices have failed."""
        return [event.data["reason"] for event in self.weaver.events(self.before, kind="device_failed")]


@pytest.fixture
def requests(client: Client, weaver: WeaverProxy, trainers: list[Training], group: str) -> Requests:
    return Requests(client, weaver, group, weaver.status()["event"])


# -- while no bridge is there -----------------------------------------------------------------------------------


async def test_what_comes_while_the_bridge_is_killed_is_done_once_and_in_order(
    start_bridge: Callable[..., Bridge], weaver: WeaverProxy, requests: Requests
) -> None:
    (uuid,) = weaver.replica(f"{requests.group}_0").devices
    with start_bridge() as bridge:
        bridge.end(signal.SIGKILL)
    orders = ["pause", "resume", "pause", "resume", "pause"]

    for order in orders:
        await requests.keep(order, requests.group)
    await keep(requests.client, FAILURES, {"device_uuid": uuid, "reason": "xid 79"})
    again = {"device_uuid": uuid, "reason": "xid 80"}
    repeated = [await keep(requests.client, FAILURES, again, Nats_Msg_Id="80") for _ in "ab"]

    for done in (7, 0):  # started again once more, it finds nothing left to do
        with start_bridge() as bridge:
            assert await handled(requests.client, done) == (done, 0)
            bridge.end(signal.SIGKILL)
    assert [one.duplicate for one in repeated] == [None, True]
    assert requests.given() == orders
    assert requests.failed() == ["xid 79"]  # the second report changes nothing: the device has failed
    await asyncio.to_thread(weaver.reactivate(uuid).get, BOUND)


async def test_a_registration_is_kept_until_a_bridge_is_there(
    client: Client, start_bridge: Callable[..., Bridge], weaver: WeaverProxy
) -> None:
    with start_bridge() as bridge:
        bridge.end(signal.SIGKILL)
    outsider = Outsider(client, "out_kept", "GPU-kept")
    await keep(client, "torchLoom.DRentry", {"replica_id": "out_kept", "device_uuid": "GPU-kept"})
    outsider.beat()

    with start_bridge():
        await until(lambda: states(weaver).get("out_kept") is not None and weaver.replica("out_kept").connected)
        await outsider.fall_silent()


# -- killed in the middle ---------------------------------------------------------------------------------------


class Unanswered(DelayProxy):
    """Lets commands through to the gateway, but not its answers to them."""

    def _passed(self, link: Link, data: bytes, to_server: bool) -> Passed:
        if to_server and b"/weaver/commands" in data and data.startswith(b"POST"):
            link.answers.clear()
        return data, None


@pytest.mark.slow
async def test_a_bridge_that_is_killed_before_it_hears_that_a_command_was_given_does_not_give_it_again(
    cluster: LocalCluster, start_bridge: Callable[..., Bridge], requests: Requests
) -> None:
    with (
        Unanswered(gateway_port(cluster), delay=0) as proxy,
        start_bridge(f"ws://127.0.0.1:{proxy.port}") as bridge,
    ):
        await requests.keep("pause")
        await until(lambda: requests.given() == ["pause"])
        bridge.end(signal.SIGKILL)

    # The gateway is at the same URL again: bridges of one URL share what they have not done.
    with DelayProxy(gateway_port(cluster), delay=0, listen=proxy.port), start_bridge(bridge.url):
        await requests.keep("resume")
        assert await handled(requests.client, 2) == (2, 0)

    assert requests.given() == ["pause", "resume"]


class Unacknowledged(Gate):
    """Lets everything through to NATS until an acknowledgement comes, and nothing from then on."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.withheld = threading.Event()

    def _passed(self, link: Link, data: bytes, to_server: bool) -> Passed:
        if to_server and b"$JS.ACK" in data:
            self.shut()
            link.reset()
            self.withheld.set()
        return data, None


@pytest.mark.slow
async def test_a_bridge_that_is_killed_between_doing_and_acknowledging_does_nothing_again(
    server: NatsServer, start_bridge: Callable[..., Bridge], requests: Requests
) -> None:
    port = int(server.url.rpartition(":")[2])
    with Unacknowledged(port) as proxy, start_bridge(nats_url=f"nats://127.0.0.1:{proxy.port}") as bridge:
        await requests.keep("pause")
        assert await asyncio.to_thread(proxy.withheld.wait, BOUND)
        bridge.end(signal.SIGKILL)

    with start_bridge():
        assert await handled(requests.client, 1) == (0, 1)

    assert requests.given() == ["pause"]


async def test_a_request_with_an_id_is_done_once_also_when_nats_has_forgotten_it(
    start_bridge: Callable[..., Bridge], requests: Requests
) -> None:
    subjects = [COMMANDS, FAILURES, "torchLoom.config.info", "torchLoom.DRentry"]
    config = StreamConfig("torchLoom", subjects=subjects, duplicate_window=0.1)
    await requests.client.jetstream().add_stream(config)
    with start_bridge():
        await requests.keep("pause", Nats_Msg_Id="mine")
        while (await requests.keep("pause", Nats_Msg_Id="mine")).duplicate:
            pass  # NATS still knows it
        assert await handled(requests.client, 2) == (1, 1)

    assert requests.given() == ["pause"]


# -- otherwise --------------------------------------------------------------------------------------------------


async def test_the_reply_goes_where_the_header_says_and_nonsense_stops_nothing(
    client: Client, start_bridge: Callable[..., Bridge], requests: Requests
) -> None:
    replies = await client.subscribe("my.replies")

    async def reply() -> dict[str, Any]:
        body: dict[str, Any] = json.loads((await replies.next_msg(BOUND)).data)["reply"]
        return body

    with start_bridge():
        headers = {REPLY_TO.replace("-", "_"): "my.replies"}
        await requests.keep("explode", "*", **headers)
        nonsense = await reply()
        kept = await client.request(COMMANDS, b'{"command_type": "pause", "target_id": "nobody"}', timeout=BOUND)
        await requests.keep("pause", requests.group, **headers)
        paused = await reply()

    assert nonsense["error"]["code"] == "wrong_arguments"
    assert json.loads(kept.data)["stream"] == "torchLoom"
    assert set(paused["outcomes"]) == {f"{requests.group}_0", f"{requests.group}_1"}
    assert paused["ok"]


async def test_nats_is_killed_and_comes_back_with_what_it_kept(
    server: NatsServer, start_bridge: Callable[..., Bridge], requests: Requests
) -> None:
    with start_bridge() as bridge:
        server.kill()
        bridge.await_log("is away")
        server.start()
        bridge.await_log("is back")
        again = await nats.connect(server.url)
        await replace(requests, client=again).keep("pause")
        await until(lambda: requests.given() == ["pause"])
        await again.close()


@pytest.mark.slow
async def test_commands_wait_for_a_gateway_that_is_away(
    client: Client, cluster: LocalCluster, start_bridge: Callable[..., Bridge], group: str
) -> None:
    with gateway_of(cluster) as gateway:
        weaver = WeaverProxy(gateway.url, TOKEN)
        with (
            start_bridge(gateway.url, token=TOKEN) as bridge,
            training(await_weaver(weaver), "slow_0", group=group),
        ):
            await until(lambda: states(weaver) == {"slow_0": "running"})
            await asyncio.to_thread(gateway.end, signal.SIGKILL)
            bridge.await_log("the weaver is away")
            requests = Requests(client, weaver, "slow", 0)
            for order in ("pause", "resume", "pause"):
                await requests.keep(order)
            await asyncio.to_thread(gateway.start)

            await handled(client, 3)
            assert requests.given() == ["pause", "resume", "pause"]


def test_without_jetstream_or_a_file_it_says_what_is_missing(
    cluster: LocalCluster, tmp_path: Path, start_bridge: Callable[..., Bridge]
) -> None:
    state = ["--state", str(tmp_path / "other.sqlite")]
    with NatsServer() as plain:
        without = run_bridge(cluster.url, cluster.token, plain.url, "--jetstream", *state)
    no_file = run_bridge(cluster.url, cluster.token, "nats://127.0.0.1:1", "--jetstream")

    assert without.returncode == 5
    assert "has no JetStream for the bridge" in without.stderr
    assert no_file.returncode == 2
    assert "--jetstream needs --state FILE" in no_file.stderr


async def test_a_stream_of_something_else_is_not_touched(
    client: Client, cluster: LocalCluster, server: NatsServer, tmp_path: Path
) -> None:
    await client.jetstream().add_stream(StreamConfig("torchLoom", subjects=["something.else"]))

    ended = await asyncio.to_thread(
        run_bridge, cluster.url, cluster.token, server.url, "--jetstream", "--state", str(tmp_path / "state.sqlite")
    )

    assert ended.returncode == 1
    assert "has the subjects something.else" in ended.stderr
