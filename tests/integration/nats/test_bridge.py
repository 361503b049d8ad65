"""The bridge to NATS, with a real server, a real gateway, the real weaver and processes that train."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
import trustme
from nats.aio.client import Client

from loom.nats.nats_link import flush
from loom.nats.subjects import HEADER, SOURCE, Envelope, EnvelopeKind, Format, decode
from loom.process.listen import free_ports
from loom.token_file import TokenFile
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.integration.nats.bridges import LOOM, Bridge, run_bridge, states
from tests.integration.nats.nats_server import BOUND, NatsServer, Said, with_password
from tests.support.docs import Page
from tests.support.gateways import TOKEN, await_true, gateway_of
from tests.support.processes import HIDDEN, run
from tests.support.weaver_training import Training, training
from tests.support.weavers import await_weaver

COMMANDS = "torchLoom.ui.commands"
CONFIG = "torchLoom.config.info"
FAILURES = "torchLoom.monitored.failure"


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    """One for those tests of the module that leave it and its bridge as they are."""
    with NatsServer() as running:
        yield running


@pytest.fixture(scope="module")
def bridge(cluster: LocalCluster, server: NatsServer) -> Iterator[Bridge]:
    with Bridge(cluster.url, cluster.token, server.url) as running:
        yield running


@pytest.fixture
def own_server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


@pytest.fixture
def own_bridge(cluster: LocalCluster, own_server: NatsServer) -> Iterator[Bridge]:
    with Bridge(cluster.url, cluster.token, own_server.url) as running:
        yield running


@pytest.fixture
async def own_client(own_server: NatsServer) -> AsyncIterator[Client]:
    connected = await nats.connect(own_server.url, reconnect_time_wait=0, max_reconnect_attempts=-1)
    yield connected
    await connected.close()


async def ask(client: Client, subject: str, body: Any, **headers: str) -> dict[str, Any]:
    """Ask the bridge something; the body of its reply."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    message = await client.request(subject, data, timeout=BOUND, headers=headers or None)
    reply: dict[str, Any] = json.loads(message.data)["reply"]
    return reply


def commands_given(weaver: WeaverProxy, after: int) -> list[str]:
    """What was commanded after an event."""
    return [event.data["do"] for event in weaver.events(after, kind="command")]


# -- what happens -----------------------------------------------------------------------------------------------


async def test_what_replicas_report_is_said(
    client: Client, bridge: Bridge, trainers: list[Training], group: str
) -> None:
    said = await Said.on(client, EnvelopeKind.TRAINING_STATUS)

    while "loss" not in (first := await said.next(replica_id=f"{group}_0"))["metrics"]:
        pass  # it has not trained yet
    second = await said.next(replica_id=f"{group}_0")

    assert first["group"] == group
    assert first["state"] == "running"
    assert second["current_step"] > first["current_step"]
    assert 0 < second["metrics"]["loss"] < first["metrics"]["loss"] < 1
    assert second["metrics"]["grad/norm"] == "NaN"
    assert second["time"] > first["time"]


async def test_heartbeats_and_devices_are_said(
    client: Client, bridge: Bridge, trainers: list[Training], group: str
) -> None:
    beats, devices = (
        await Said.on(client, EnvelopeKind.HEARTBEAT),
        await Said.on(client, EnvelopeKind.DEVICE_STATUS),
    )

    first = await beats.next(replica_id=f"{group}_1")
    second = await beats.next(replica_id=f"{group}_1")
    device = await devices.next()

    assert first.get("current_step", 0) < second["current_step"]
    assert second["phase"] in ("step", "between")
    assert device["state"] == "active"
    assert device["memory"] > 0
    assert {f"{group}_0", f"{group}_1"} <= set(device["replica_ids"])


async def test_a_replica_that_dies_is_said(
    client: Client, bridge: Bridge, trainers: list[Training], group: str
) -> None:
    failures, updates = (
        await Said.on(client, EnvelopeKind.REPLICA_FAIL),
        await Said.on(client, EnvelopeKind.UI_UPDATE),
    )

    os.kill(trainers[0].pid, signal.SIGKILL)

    failure = await failures.next(replica_id=f"{group}_0")
    assert failure["reason"] == "killed by SIGKILL" or "is gone" in failure["reason"]  # Linux tells from 6.15 on
    assert failure["action"] == "notify"
    assert failure["device_uuids"]
    while (await updates.next_event("failed"))["id"] != failure["event_id"]:
        pass  # one of another test's processes


# -- what is asked ----------------------------------------------------------------------------------------------


async def test_a_learning_rate_is_changed_from_nats(
    client: Client, bridge: Bridge, trainers: list[Training], group: str
) -> None:
    commands, configs = (
        await Said.on(client, EnvelopeKind.WEAVER_COMMAND),
        await Said.on(client, EnvelopeKind.CONFIG_INFO),
    )
    order = {"command_type": "update_config", "target_id": group, "params": {"learning_rate": "0.002"}}

    reply = await ask(client, COMMANDS, {"ui_command": order})

    assert reply["ok"]
    assert set(reply["outcomes"]) == {f"{group}_0", f"{group}_1"}
    applied = reply["outcomes"][f"{group}_0"]
    assert applied["changes"] == {"learning_rate": {"old": 0.1, "new": 0.002}}
    assert trainers[0].learning_rate() == (0.002, applied["step"])
    command = await commands.next(command_id=reply["command_id"])
    assert command["command_type"] == "update_config"
    assert command["target_replica_ids"] == [group]
    assert command["params"] == {"learning_rate": "0.002"}
    config = await configs.next(replica_id=f"{group}_0")
    assert config["config_params"] == {"learning_rate": 0.002}
    assert config["old_params"] == {"learning_rate": 0.1}
    assert config["current_step"] == applied["step"]
    assert config["command_id"] == reply["command_id"]


async def test_a_config_from_outside_is_for_one_replica_or_for_all(
    client: Client, bridge: Bridge, trainers: list[Training], group: str
) -> None:
    one = await ask(client, CONFIG, {"replica_id": f"{group}_1", "config_params": {"learning_rate": 0.5}})
    everybody = await ask(client, CONFIG, {"config_params": {"learning_rate": 0.25}})

    assert one["ok"]
    assert list(one["outcomes"]) == [f"{group}_1"]
    assert everybody["ok"]
    assert {f"{group}_0", f"{group}_1"} <= set(everybody["outcomes"])
    assert [trainers[1].learning_rate()[0] for _ in range(2)] == [0.5, 0.25]


async def test_a_checkpoint_is_asked_for_from_nats(
    client: Client, bridge: Bridge, trainers: list[Training], group: str
) -> None:
    reply = await ask(client, COMMANDS, {"command_type": "save", "target_id": f"{group}_0"})

    assert reply["ok"]
    assert reply["outcomes"][f"{group}_0"]["step"] == trainers[0].saved()


async def test_commands_are_done_in_the_order_in_which_they_come(
    client: Client, bridge: Bridge, weaver: WeaverProxy, trainers: list[Training], group: str
) -> None:
    before = weaver.status()["event"]
    orders = ["pause", "resume", "pause", "resume", "pause", "resume", "pause", "stop"]

    for order in orders:
        await client.publish(COMMANDS, json.dumps({"command_type": order, "target_id": f"{group}_0"}).encode())
    await flush(client, 10)

    await_true(lambda: states(weaver)[f"{group}_0"] == "finished")
    assert commands_given(weaver, before) == orders


async def test_a_value_that_is_refused_says_why(
    client: Client, bridge: Bridge, trainers: list[Training], group: str
) -> None:
    configs = await Said.on(client, EnvelopeKind.CONFIG_INFO)
    body = {"replica_id": f"{group}_0", "config_params": {"learning_rate": -1, "momentum": 0.9}}

    reply = await ask(client, CONFIG, body)

    assert not reply["ok"]
    refused = reply["outcomes"][f"{group}_0"]["refused"]
    assert "larger than 0" in refused["learning_rate"]
    assert "momentum" in refused
    assert (await configs.next(replica_id=f"{group}_0"))["refused"] == refused


async def test_a_reply_comes_in_the_time_that_was_asked_for(
    client: Client, bridge: Bridge, trainers: list[Training], group: str
) -> None:
    await asyncio.to_thread(os.kill, trainers[0].pid, signal.SIGSTOP)
    try:
        order = {"command_type": "pause", "target_id": f"{group}_0", "wait": 0.2}
        reply = await ask(client, COMMANDS, order)
    finally:
        os.kill(trainers[0].pid, signal.SIGCONT)

    assert not reply["ok"]
    assert not reply["done"]
    assert reply["outcomes"][f"{group}_0"]["waiting"]


async def test_a_failed_device_is_reported_and_acted_on(
    client: Client, bridge: Bridge, weaver: WeaverProxy, trainers: list[Training], group: str
) -> None:
    devices = await Said.on(client, EnvelopeKind.DEVICE_STATUS)
    (uuid,) = weaver.replica(f"{group}_0").devices
    weaver.set_policy(group, "pause")

    reply = await ask(client, FAILURES, {"device_uuid": uuid, "reason": "xid 79"})

    assert reply["ok"]
    affected = {one["replica_id"]: one["action"] for one in reply["affected"] if one["group"] == group}
    assert affected == {f"{group}_0": "pause", f"{group}_1": "pause"}
    (event,) = weaver.events(reply["event_id"] - 1, limit=1, kind="device_failed")
    assert event.data["reason"] == "xid 79"
    await_true(lambda: states(weaver)[f"{group}_0"] == "paused")
    assert (await devices.next(device_uuid=uuid, state="failed"))["reason"] == "xid 79"

    again = await ask(client, COMMANDS, {"command_type": "reactivate", "params": {"device_uuid": uuid}})

    assert {f"{group}_0", f"{group}_1"} <= set(again["outcomes"])
    assert weaver.devices()[uuid].state == "active"


async def test_the_devices_of_a_group_are_taken_out_of_use_and_put_back(
    client: Client, bridge: Bridge, weaver: WeaverProxy, trainers: list[Training], group: str
) -> None:
    (uuid,) = weaver.replica(f"{group}_0").devices
    before = weaver.status()["event"]

    off = await ask(client, COMMANDS, {"command_type": "deactivate_device", "params": {"group": group}})
    inactive = weaver.devices()[uuid].state
    on = await ask(client, COMMANDS, {"command_type": "reactivate", "params": {"group": group}})

    assert {f"{group}_0", f"{group}_1"} <= set(off["outcomes"]) == set(on["outcomes"])
    assert inactive == "inactive"
    assert weaver.devices()[uuid].state == "active"
    assert commands_given(weaver, before) == ["deactivate_device", "reactivate"]


async def test_the_program_of_the_page_asks_it(
    server: NatsServer, weaver: WeaverProxy, bridge: Bridge, trainers: list[Training], group: str
) -> None:
    (uuid,) = weaver.replica(f"{group}_0").devices
    weaver.set_policy(group, "notify")
    block, _ = Page.of("docs/guide/nats.md").blocks("python")
    program = "\n".join(block.lines).replace("nats://HOST:4222", server.url)
    program = program.replace("train_*", f"{group}_*").replace("GPU-8a1c", uuid)

    command = [sys.executable, "-c", program]
    ended = await asyncio.to_thread(
        subprocess.run, command, stdout=subprocess.PIPE, text=True, timeout=BOUND, check=True
    )

    applied, failure = [json.loads(line)["reply"] for line in ended.stdout.splitlines()]
    assert set(applied["outcomes"]) == {f"{group}_0", f"{group}_1"}
    assert trainers[0].learning_rate() == (0.002, applied["outcomes"][f"{group}_0"]["step"])
    assert {f"{group}_0", f"{group}_1"} <= {one["replica_id"] for one in failure["affected"]}
    await asyncio.to_thread(weaver.reactivate(uuid).get, BOUND)


async def test_a_replica_that_is_not_there_is_an_answer(client: Client, bridge: Bridge) -> None:
    one = await ask(client, COMMANDS, {"command_type": "pause", "target_id": "nobody"})
    glob = await ask(client, COMMANDS, {"command_type": "pause", "target_id": "nobody_*"})

    assert 'no replica named "nobody"' in one["outcomes"]["nobody"]["reason"]
    assert not one["ok"]
    assert glob["error"]["code"] == "unknown_replica"


# -- what makes no sense ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "data", "code", "text"),
    [
        (FAILURES, b"", "wrong_arguments", "envelope is empty"),
        (FAILURES, b"\xff\xfe nonsense", "wrong_arguments", "neither an object of JSON nor"),
        (FAILURES, b"[1, 2]", "wrong_arguments", "neither an object of JSON nor"),
        (FAILURES, b'{"device_uuid": ', "wrong_arguments", "no JSON"),
        (FAILURES, b'{"a": ' + b"[" * 100_000, "wrong_arguments", "no JSON"),
        (FAILURES, b'{"device": "GPU-1"}', "wrong_arguments", "device_uuid is missing; there is 'device'"),
        (FAILURES, b'{"device_uuid": 7}', "wrong_arguments", "device_uuid is a text, not 7"),
        (FAILURES, b'{"device_uuid": "\\ud800"}', "wrong_arguments", "half a character"),
        (FAILURES, b'{"device_uuid": "' + b"x" * 1000 + b'"}', "wrong_arguments", "at most 200"),
        (FAILURES, b'{"device_uuid": "GPU-of-nobody"}', "unknown_device", "GPU-of-nobody"),
        (FAILURES, b'{"ui_command": {"command_type": "stop"}}', "wrong_arguments", "of another subject"),
        (COMMANDS, b'{"command_type": "explode", "target_id": "*"}', "wrong_arguments", "one of update_config"),
        (COMMANDS, b'{"command_type": "stop"}', "wrong_arguments", "target_id is missing"),
        (COMMANDS, b'{"command_type": "update_config", "target_id": "*"}', "wrong_arguments", "params is missing"),
        (COMMANDS, b'{"command_type": "pause", "target_id": "a", "wait": -1}', "wrong_arguments", "wait is from 0"),
        (COMMANDS, b'{"command_type": "reactivate", "params": {}}', "wrong_arguments", "either device_uuid"),
        (
            COMMANDS,
            b'{"command_type": "deactivate_device", "params": {"group": "nobody"}}',
            "unknown_replica",
            "no replica of a group 'nobody'",
        ),
        (CONFIG, b'{"learning_rate": 0.1}', "wrong_arguments", "config_params is missing"),
        (CONFIG, b'{"config_params": [1]}', "wrong_arguments", "config_params has keys and values"),
        (CONFIG, b'{"config_params": {"a": NaN}}', "wrong_arguments", "nan cannot be sent in JSON"),
    ],
)
async def test_what_makes_no_sense_is_answered(
    client: Client, bridge: Bridge, subject: str, data: bytes, code: str, text: str
) -> None:
    message = await client.request(subject, data, timeout=BOUND)
    reply = decode(EnvelopeKind.REPLY, message.data).body

    assert not reply.get("ok")
    assert reply["error"]["code"] == code
    assert text in reply["error"]["message"]
    # It goes on, and where nobody is to be told it says so itself.
    before = len(bridge.log())
    await client.publish(subject, data)
    await flush(client, 10)
    await_true(lambda: f"not done, as {subject} asks" in bridge.log()[before:])
    assert bridge.process.poll() is None


async def test_nobody_makes_the_bridge_publish_where_they_may_not(own_client: Client, own_bridge: Bridge) -> None:
    purge = "$JS.API.STREAM.PURGE.torchLoom"
    spies = [await own_client.subscribe(subject) for subject in (purge, "torchLoom.replica.fail")]
    for reply in (purge, "torchLoom.replica.fail"):
        for subject in (COMMANDS, "torchLoom.heartbeat", "torchLoom.bridge.metrics"):
            await own_client.publish(subject, b'{"command_type": "explode"}', reply=reply)

    for subject in (COMMANDS, "torchLoom.heartbeat"):
        assert not (await ask(own_client, subject, {"command_type": "explode"})).get("ok")
    await own_client.request("torchLoom.bridge.metrics", timeout=BOUND)

    own_bridge.await_log(f"no reply is published on '{purge}'")
    assert [spy.pending_msgs for spy in spies] == [0, 0]


# -- protobuf ---------------------------------------------------------------------------------------------------


async def test_protobuf_goes_both_ways(
    client: Client, cluster: LocalCluster, server: NatsServer, trainers: list[Training], group: str
) -> None:
    with Bridge(cluster.url, cluster.token, server.url, "--format", "protobuf", "--prefix", "ours"):
        statuses = await Said.on(client, EnvelopeKind.TRAINING_STATUS, "ours", Format.PROTOBUF)
        configs = await Said.on(client, EnvelopeKind.CONFIG_INFO, "ours", Format.PROTOBUF)

        while "loss" not in (status := await statuses.next(replica_id=f"{group}_0")).get("metrics", {}):
            pass  # it has not trained yet
        body = {"command_type": "update_config", "target_id": f"{group}_0", "params": {"learning_rate": 0.002}}
        data = Envelope(EnvelopeKind.UI_COMMAND, body).encode(Format.PROTOBUF)
        message = await client.request("ours.ui.commands", data, timeout=BOUND)
        config = await configs.next(replica_id=f"{group}_0")
        in_json = await ask(client, "ours.ui.commands", body)

    assert status["group"] == group
    assert 0 < status["metrics"]["loss"] < 1
    assert math.isnan(float(status["metrics"]["grad/norm"]))
    assert Format.of(message.data) is Format.PROTOBUF
    outcome = decode(EnvelopeKind.REPLY, message.data).body["outcomes"][f"{group}_0"]
    assert outcome["changes"] == {"learning_rate": {"old": 0.1, "new": 0.002}}
    assert trainers[0].learning_rate()[0] == 0.002
    assert config["config_params"] == {"learning_rate": 0.002}
    assert in_json["ok"]


# -- no loops ---------------------------------------------------------------------------------------------------


async def test_no_bridge_acts_on_what_a_bridge_has_said(
    client: Client,
    cluster: LocalCluster,
    server: NatsServer,
    bridge: Bridge,
    weaver: WeaverProxy,
    trainers: list[Training],
    group: str,
) -> None:
    before = weaver.status()["event"]
    configs = await Said.on(client, EnvelopeKind.CONFIG_INFO)
    body = {"replica_id": f"{group}_0", "config_params": {"learning_rate": 0.3}}
    with Bridge(cluster.url, cluster.token, server.url):
        # Two bridges hear this; one does it, both say so, and each hears that of the other.
        await client.publish(CONFIG, json.dumps(body).encode())
        for _ in range(2):
            await configs.next(replica_id=f"{group}_0")
        # What is marked as a bridge's is left alone, by its header or by its source.
        marked = {**body, "config_params": {"learning_rate": 0.4}}
        await client.publish(CONFIG, json.dumps(marked).encode(), headers={HEADER: "another"})
        await client.publish(CONFIG, json.dumps({"source": f"{SOURCE}another", "config_info": marked}).encode())
        last = await ask(client, CONFIG, {**body, "config_params": {"learning_rate": 0.5}})

    assert last["outcomes"][f"{group}_0"]["changes"] == {"learning_rate": {"old": 0.3, "new": 0.5}}
    assert commands_given(weaver, before) == ["update_config", "update_config"]


# -- either side away -------------------------------------------------------------------------------------------


async def test_nats_is_killed_and_comes_back(
    own_client: Client, own_server: NatsServer, own_bridge: Bridge, trainers: list[Training], group: str
) -> None:
    statuses = await Said.on(own_client, EnvelopeKind.TRAINING_STATUS)

    own_server.kill()
    own_bridge.await_log("is away")
    own_server.start()

    own_bridge.await_log("is back")
    await asyncio.to_thread(await_true, lambda: own_client.is_connected)
    while not (await statuses.next(replica_id=f"{group}_1", state="running"))["metrics"]:
        pass  # one that says of another change only
    reply = await ask(own_client, CONFIG, {"replica_id": f"{group}_1", "config_params": {"learning_rate": 0.7}})
    assert reply["ok"]


@pytest.mark.slow
async def test_what_happened_while_nats_was_away_is_said_afterwards(
    own_client: Client,
    own_server: NatsServer,
    cluster: LocalCluster,
    own_bridge: Bridge,
    trainers: list[Training],
    group: str,
    weaver: WeaverProxy,
) -> None:
    await (await Said.on(own_client, EnvelopeKind.TRAINING_STATUS)).next(replica_id=f"{group}_0")
    os.kill(own_bridge.process.pid, signal.SIGSTOP)
    own_server.kill()
    own_server.start()
    monitor = await nats.connect(own_server.url)
    failures = await Said.on(monitor, EnvelopeKind.REPLICA_FAIL)
    os.kill(trainers[0].pid, signal.SIGKILL)
    await_true(lambda: states(weaver)[f"{group}_0"] == "failed")
    os.kill(own_bridge.process.pid, signal.SIGCONT)

    # The connection that it had is gone when it says so, and it says so again on the next.
    assert (await failures.next(replica_id=f"{group}_0"))["reason"]
    await monitor.close()


@pytest.mark.slow
async def test_a_failure_that_comes_while_the_gateway_is_away_is_reported_when_it_is_back(
    own_client: Client, own_server: NatsServer, cluster: LocalCluster, group: str
) -> None:
    with gateway_of(cluster) as gateway:
        weaver = WeaverProxy(gateway.url, TOKEN)
        with (
            Bridge(gateway.url, TOKEN, own_server.url) as bridge,
            training(await_weaver(weaver), f"{group}_0", group=group) as (trainer,),
        ):
            await_true(lambda: states(weaver) == {f"{group}_0": "running"})
            (uuid,) = weaver.replica(f"{group}_0").devices
            gateway.end(signal.SIGKILL)
            bridge.await_log("the weaver is away")
            refused = await ask(own_client, COMMANDS, {"command_type": "pause", "target_id": "*"})
            await own_client.publish(FAILURES, json.dumps({"device_uuid": uuid, "reason": "xid 48"}).encode())
            await flush(own_client, 10)
            bridge.await_log(f"the failure of device {uuid} is reported when the weaver is back")
            gateway.start()

            await_true(lambda: any(event.data["reason"] == "xid 48" for event in failures_of(weaver)))
            bridge.await_log("the weaver is back")
            assert refused["error"]["code"] == "gateway_unreachable"
            assert trainer.process.poll() is None
            assert (await ask(own_client, COMMANDS, {"command_type": "stop", "target_id": "*"}))["ok"]


def failures_of(weaver: WeaverProxy) -> list[Any]:
    """The failures of devices that the weaver knows of."""
    return list(weaver.events(0, kind="device_failed"))


# -- who may what -----------------------------------------------------------------------------------------------


async def test_with_a_token_of_scope_view_it_says_and_does_nothing(
    own_client: Client,
    cluster: LocalCluster,
    own_server: NatsServer,
    tokens: TokenFile,
    trainers: list[Training],
    group: str,
) -> None:
    made, token = tokens.create("a view", "view", user="admin")
    statuses = await Said.on(own_client, EnvelopeKind.TRAINING_STATUS)
    with Bridge(cluster.url, token, own_server.url) as bridge:
        assert (await statuses.next(replica_id=f"{group}_0"))["state"] == "running"
        command = await ask(own_client, COMMANDS, {"command_type": "stop", "target_id": "*"})
        failure = await ask(own_client, FAILURES, {"device_uuid": "GPU-1"})

        tokens.revoke(made.id)

        assert bridge.process.wait(BOUND) == 6
        assert "Traceback" not in bridge.log()
    assert command["error"]["code"] == failure["error"]["code"] == "scope"


def test_without_the_extra_it_says_what_to_install() -> None:
    ended = run("-c", HIDDEN.format(module="nats") + LOOM, "bridge", "nats://here", "--url", "ws://here")

    assert ended.returncode == 4
    assert "needs nats-py, not installed here: pip install 'monarch-loom[nats]'" in ended.stderr


# -- starts and ends --------------------------------------------------------------------------------------------


def test_a_wrong_token_ends_it_at_once(cluster: LocalCluster, server: NatsServer) -> None:
    ended = run_bridge(cluster.url, "wrong", server.url)

    assert ended.returncode == 6
    assert ended.stderr.startswith("error: ")


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("nobody.invalid", marks=pytest.mark.slow)])
def test_a_gateway_that_is_not_there_ends_it_at_once(server: NatsServer, host: str) -> None:
    ended = run_bridge(f"ws://{host}:{free_ports(1)[0]}", "a token", server.url, "--insecure")

    assert ended.returncode == 5
    assert host in ended.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("nobody.invalid", marks=pytest.mark.slow)])
def test_a_nats_that_is_not_there_ends_it_at_once(cluster: LocalCluster, host: str) -> None:
    ended = run_bridge(cluster.url, cluster.token, f"nats://{host}:{free_ports(1)[0]}")

    assert ended.returncode == 5
    assert f"no NATS at nats://{host}" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_what_is_no_nats_ends_it_at_once(cluster: LocalCluster) -> None:
    ended = run_bridge(cluster.url, cluster.token, cluster.url.replace("ws://", "nats://"))

    assert ended.returncode == 5
    assert "no NATS at nats://127.0.0.1" in ended.stderr


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("http://here", (), "is not a URL of NATS"),
        ("nats://127.0.0.1:1", ("--prefix", "a b"), "'a b' cannot begin"),
    ],
)
def test_what_is_asked_for_in_a_wrong_way_is_said(
    cluster: LocalCluster, url: str, options: tuple[str, ...], text: str
) -> None:
    ended = run_bridge(cluster.url, cluster.token, url, *options)

    assert ended.returncode == 2
    assert text in ended.stderr


def test_nats_wants_to_know_who_comes(cluster: LocalCluster, tmp_path: Path) -> None:
    with with_password(tmp_path, "loom", "a secret") as server:
        refused = run_bridge(cluster.url, cluster.token, server.url, "--nats-user", "loom")
        with Bridge(cluster.url, cluster.token, server.url, "--nats-user", "loom", "--nats-password", "a secret"):
            pass

    assert refused.returncode == 6
    assert "does not let the bridge in" in refused.stderr
    assert "a secret" not in refused.stderr


@pytest.mark.slow
def test_nats_speaks_tls(cluster: LocalCluster, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    files = ["--tlscert", str(tmp_path / "server.pem"), "--tlskey", str(tmp_path / "server.pem")]

    with NatsServer("--tls", *files) as server:
        url = server.url.replace("nats://", "tls://")
        refused = run_bridge(cluster.url, cluster.token, url)
        with Bridge(cluster.url, cluster.token, url, "--nats-ca", str(tmp_path / "ca.pem")):
            pass

    assert refused.returncode == 5
    assert "certificate verify failed" in refused.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_well(own_bridge: Bridge, number: int) -> None:
    assert own_bridge.end(number) == 0
    assert "Traceback" not in own_bridge.log()


def test_it_ends_with_its_parent(own_bridge: Bridge) -> None:
    own_bridge.process.communicate(timeout=BOUND)  # closes its standard input

    assert own_bridge.process.returncode == 0
