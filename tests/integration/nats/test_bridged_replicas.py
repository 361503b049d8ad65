"""Replicas without threadlets: processes that only speak NATS, with a real server and the real weaver."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from loom.nats.nats_link import flush
from loom.nats.outside_replica import MISSED
from loom.nats.subjects import Envelope, EnvelopeKind, Format, decode
from loom.token_file import TokenFile
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.integration.nats.bridges import Bridge, counts_of, run_bridge, states, until
from tests.integration.nats.nats_server import BOUND, NatsServer, with_configuration
from tests.integration.nats.outsiders import PROMISED, Outsider
from tests.support.docs import Page
from tests.support.gateways import TOKEN, gateway_of
from tests.support.processes import read_json, start
from tests.support.weaver_training import Training
from tests.support.weavers import await_weaver

# -- a replica like any other -----------------------------------------------------------------------------------


async def test_a_process_that_registers_is_a_replica_with_its_status(
    client: Client, bridge: Bridge, weaver: WeaverProxy
) -> None:
    async with Outsider(client, "out_a", "GPU-a", group="outside", server="node-7", type="H200") as outsider:
        assert weaver.replica("out_a").group == "outside"
        await outsider.report(metrics={"loss": 0.5, "grad/norm": "NaN"}, epoch=2, config={"lr": 0.1})
        await until(lambda: weaver.replica("out_a").state == "running")
        use = {"device_uuid": "GPU-a", "utilization": 0.75, "temperature": 70, "throttled": ["thermal"]}
        assert (await outsider.ask("device.status", use))["ok"]
        await until(lambda: weaver.devices()["GPU-a"].status is not None)

        info, device = weaver.replica("out_a"), weaver.devices()["GPU-a"]

    assert (info.step, info.epoch, info.metrics["loss"], info.connected) == (1, 2, 0.5, True)
    assert info.status_type == "batch_update"
    assert (info.devices, info.host, info.config) == (("GPU-a",), "node-7", {"lr": 0.1})
    assert (device.type, device.replicas) == ("H200", ("out_a",))
    assert device.status is not None
    assert (device.status["utilization"], device.status["throttled"]) == (0.75, ["thermal"])
    registered = [event for event in weaver.events(0, kind="registered") if event.replica == "out_a"]
    assert len(registered) == 1


@pytest.mark.slow
async def test_a_replica_whose_heartbeats_end_is_lost_and_runs_again_when_they_go_on(
    client: Client, bridge: Bridge, weaver: WeaverProxy
) -> None:
    async with Outsider(client, "out_b", "GPU-b") as outsider:
        await outsider.report()
        await until(lambda: states(weaver)["out_b"] == "running")

        await outsider.fall_silent()
        await until(lambda: states(weaver)["out_b"] == "failed")
        outsider.beat()

        await until(lambda: states(weaver)["out_b"] == "running")
    kinds = [event.kind for event in weaver.events(0, replica="out_b")]
    assert kinds.index("recovering") < kinds.index("failed") < kinds.index("reconnected")
    (failed,) = [event for event in weaver.events(0, replica="out_b") if event.kind == "failed"]
    assert (found := re.fullmatch(r"nothing heard for (\d+\.\d) s", failed.data["reason"]))
    assert float(found[1]) > 3.0 + 0.9 * MISSED * PROMISED


async def test_a_replica_says_that_it_has_finished(client: Client, bridge: Bridge, weaver: WeaverProxy) -> None:
    async with Outsider(client, "out_c", "GPU-c") as outsider:
        await outsider.report(state="finished", metrics={"loss": 0.1})
        await until(lambda: states(weaver)["out_c"] == "finished")
    assert weaver.replica("out_c").metrics["loss"] == 0.1


async def test_a_drained_replica_is_draining_and_has_finished_when_it_falls_silent(
    client: Client, bridge: Bridge, weaver: WeaverProxy
) -> None:
    async with Outsider(client, "out_d", "GPU-d") as outsider:
        await outsider.report()
        body = {"drain": {"replica_id": "out_d", "reason": "spot instance"}}
        assert (await outsider.ask("weaver.events", body))["ok"]
        await until(lambda: states(weaver)["out_d"] == "draining")
    await until(lambda: states(weaver)["out_d"] == "finished")
    (drained,) = [event for event in weaver.events(0, replica="out_d") if event.kind == "draining"]
    assert drained.data["reason"] == "spot instance"


async def test_a_replica_takes_more_devices_and_leaves_one(
    client: Client, bridge: Bridge, weaver: WeaverProxy
) -> None:
    async with Outsider(client, "out_e", "GPU-e0") as outsider:
        await outsider.register(device_uuid="GPU-e1")
        await until(lambda: weaver.replica("out_e").devices == ("GPU-e0", "GPU-e1"))
        body = {"drain": {"replica_id": "out_e", "device_uuid": "GPU-e0"}}
        assert (await outsider.ask("DRentry", body))["ok"]
        await until(lambda: weaver.replica("out_e").devices == ("GPU-e1",))


async def test_the_failure_of_a_device_is_reported_by_its_own_process(
    client: Client, bridge: Bridge, weaver: WeaverProxy
) -> None:
    async with Outsider(client, "out_f", "GPU-f") as outsider:
        status = {"device_uuid": "GPU-f", "state": "failed", "reason": "xid 79", "xid": 79}
        for _ in range(3):
            await outsider.say("device.status", status)

        command, _ = await outsider.command()

        assert command["command_type"] == "device_failed"
        assert command["params"] == {"device": "GPU-f", "reason": "xid 79"}
        assert weaver.devices()["GPU-f"].state == "failed"
        assert len([one for one in weaver.events(0, kind="device_failed") if one.data["reason"] == "xid 79"]) == 1


# -- commands ---------------------------------------------------------------------------------------------------


async def test_a_command_is_published_for_the_process_which_obeys_and_acknowledges(
    client: Client, bridge: Bridge, weaver: WeaverProxy
) -> None:
    async with Outsider(client, "out_g", "GPU-g", group="obedient", config={"lr": 0.1}) as outsider:
        giving = weaver.update_config("obedient", lr=0.002)
        command, subject = await outsider.command()
        assert (command["command_type"], command["params"]) == ("update_config", {"lr": 0.002})
        await outsider.answer(command, subject, current_step=7)
        given = await asyncio.to_thread(giving.get, BOUND)

        pausing = weaver.pause("out_g")
        command, subject = await outsider.command()
        await outsider.answer(command, subject)
        await asyncio.to_thread(pausing.get, BOUND)
        state = states(weaver)["out_g"]

        stopping = weaver.stop("out_g")
        await outsider.answer(*await outsider.command())
        await asyncio.to_thread(stopping.get, BOUND)

    outcome = given["out_g"]
    assert (outcome.ok, outcome.step, outcome.changes["lr"]) == (True, 7, (0.1, 0.002))
    assert weaver.replica("out_g").config == {"lr": 0.002}
    assert state == "paused"
    await until(lambda: states(weaver)["out_g"] == "finished")


async def test_a_command_that_is_refused_says_why(client: Client, bridge: Bridge, weaver: WeaverProxy) -> None:
    async with Outsider(client, "out_h", "GPU-h") as outsider:
        giving = weaver.update_config("out_h", lr=-1)
        command, subject = await outsider.command()
        await outsider.answer(command, subject, ok=False, refused={"lr": "larger than 0"}, reason="not all")

        outcome = (await asyncio.to_thread(giving.get, BOUND))["out_h"]

    assert (outcome.ok, outcome.reason) == (False, "not all")
    assert outcome.refused == {"lr": "larger than 0"}


@pytest.mark.slow
async def test_a_command_is_published_again_until_it_is_acknowledged(
    client: Client, bridge: Bridge, weaver: WeaverProxy
) -> None:
    async with Outsider(client, "out_i", "GPU-i") as outsider:
        giving = weaver.pause("out_i")
        first, _ = await outsider.command()
        again, subject = await outsider.command()
        await outsider.answer(again, subject)

        assert first["command_id"] == again["command_id"]
        assert (await asyncio.to_thread(giving.get, BOUND))["out_i"].ok


async def test_what_is_said_in_protobuf_is_the_same(
    client: Client, cluster: LocalCluster, server: NatsServer, weaver: WeaverProxy
) -> None:
    async def ask(subject: str, kind: EnvelopeKind, body: dict[str, Any]) -> dict[str, Any]:
        data = Envelope(kind, body).encode(Format.PROTOBUF)
        message = await client.request(f"torchLoom.{subject}", data, timeout=BOUND)
        return decode(EnvelopeKind.REPLY, message.data).body

    about = {"replica_id": "out_p", "device_uuid": "GPU-p", "memory": 1024, "handlers": {"lr": "float"}}
    with Bridge(cluster.url, cluster.token, server.url, "--format", "protobuf"):
        commands = await client.subscribe("torchLoom.weaver.commands")
        assert (await ask("DRentry", EnvelopeKind.REGISTER_DEVICE, about))["ok"]
        status = {"replica_id": "out_p", "current_step": 7, "max_step": 9, "metrics": {"loss": "Infinity"}}
        assert (await ask("training.status", EnvelopeKind.TRAINING_STATUS, status))["ok"]
        await until(lambda: weaver.replica("out_p").step == 7)
        giving = weaver.update_config("out_p", lr=0.5)
        message = await commands.next_msg(BOUND)
        while "target_replica_id" not in (command := decode(EnvelopeKind.WEAVER_COMMAND, message.data).body):
            message = await commands.next_msg(BOUND)
        answer = {"replica_id": "out_p", "command_id": command["command_id"], "ok": True, "current_step": 8}
        assert (await ask("weaver.events", EnvelopeKind.ACKNOWLEDGEMENT, answer))["ok"]
        outcome = (await asyncio.to_thread(giving.get, BOUND))["out_p"]

    assert weaver.devices()["GPU-p"].memory == 1024
    assert weaver.replica("out_p").handlers == {"lr": "float"}
    assert (outcome.step, outcome.changes["lr"].new) == (8, 0.5)


# -- who is believed --------------------------------------------------------------------------------------------


async def test_nobody_takes_the_name_of_a_replica_that_lives(
    client: Client, bridge: Bridge, weaver: WeaverProxy, trainers: list[Training], group: str
) -> None:
    reply = await Outsider(client, f"{group}_0", "GPU-x").register()

    assert not reply["ok"]
    assert reply["error"]["code"] == "replica_taken"
    assert weaver.replica(f"{group}_0").connected


async def test_with_a_token_of_scope_view_nobody_is_registered(
    client: Client, cluster: LocalCluster, server: NatsServer, tokens: TokenFile, weaver: WeaverProxy
) -> None:
    _, token = tokens.create("a view of the outside", "view", user="admin")
    with Bridge(cluster.url, token, server.url):
        reply = await Outsider(client, "out_v", "GPU-v").register()

    assert reply["error"]["code"] == "scope"
    assert "out_v" not in states(weaver)


UNKNOWN = ("unknown_replica", "unknown_device", "unknown_command")

NONSENSE = [
    ("heartbeat", b"", "malformed"),
    ("heartbeat", b"\xff\xfe nonsense", "malformed"),
    ("heartbeat", b'{"replica_id": ' + b"[" * 50_000, "malformed"),
    ("heartbeat", b'{"replica_id": "nobody"}', "unknown"),
    ("heartbeat", b'{"replica_id": 7}', "malformed"),
    ("heartbeat", b'{"replica_id": "out_z", "current_step": -1}', "malformed"),
    ("heartbeat", b'{"replica_id": "out_z", "phase": "asleep"}', "malformed"),
    ("heartbeat", b'{"register_device": {"replica_id": "out_y", "device_uuid": "GPU-y"}}', "malformed"),
    ("training.status", b'{"replica_id": "nobody", "metrics": {}}', "unknown"),
    ("training.status", b'{"replica_id": "out_z", "metrics": {"loss": "low"}}', "malformed"),
    ("training.status", b'{"replica_id": "out_z", "metrics": [1]}', "malformed"),
    ("training.status", b'{"replica_id": "out_z", "state": "well"}', "malformed"),
    ("training.status", b'{"replica_id": "out_z", "config": {"a": 18446744073709551616}}', "malformed"),
    ("device.status", b'{"device_uuid": "GPU-of-nobody"}', "unknown"),
    ("device.status", b'{"device_uuid": "GPU-z", "utilization": "much"}', "malformed"),
    ("DRentry", b'{"replica_id": "out_y"}', "malformed"),
    ("DRentry", b'{"replica_id": "out\\n", "device_uuid": "GPU-y"}', "malformed"),
    ("DRentry", b'{"replica_id": "out_y", "device_uuid": "GPU-y", "heartbeat_interval": 1e9}', "malformed"),
    ("DRentry", b'{"replica_id": "' + b"x" * 201 + b'", "device_uuid": "GPU-y"}', "malformed"),
    ("DRentry", b'{"drain": {"replica_id": "nobody"}}', "unknown"),
    ("weaver.events", b'{"drain": {"replica_id": "out_z", "device_uuid": "GPU-other"}}', "unknown"),
    ("weaver.events", b'{"acknowledgement": {"replica_id": "out_z", "command_id": "none"}}', "malformed"),
    ("weaver.events", b'{"acknowledgement": {"replica_id": "out_z", "command_id": "no", "ok": true}}', "unknown"),
    ("weaver.events", b'{"acknowledgement": {"replica_id": "out_z", "command_id": "no", "ok": 1}}', "malformed"),
]


async def test_what_makes_no_sense_is_counted_and_answered_and_logged_once(
    client: Client, bridge: Bridge, weaver: WeaverProxy
) -> None:
    wanted: Counter[str] = Counter()
    async with Outsider(client, "out_z", "GPU-z") as outsider:
        for subject, data, trouble in NONSENSE:
            message = await client.request(f"torchLoom.{subject}", data, timeout=BOUND)
            await client.publish(f"torchLoom.{subject}", data)
            reply = decode(EnvelopeKind.REPLY, message.data).body
            assert not reply.get("ok"), data
            assert reply["error"]["code"] in ("wrong_arguments", *UNKNOWN), data
            assert (reply["error"]["code"] in UNKNOWN) == (trouble == "unknown"), data
            wanted[f"torchLoom.{subject} {trouble}"] += 2
        await client.publish("torchLoom.training.status", b'{"replica_id": "' + b"x" * (64 << 10) + b'"}')
        wanted["torchLoom.training.status too_large"] = 1
        await flush(client, 10)
        await outsider.report()
        await until(lambda: weaver.replica("out_z").step == 1)
        counted = (await counts_of(client))["refused"]

    assert counted == wanted
    for key in wanted:
        subject, _, trouble = key.partition(" ")
        assert bridge.log().count(f"not taken on {subject} ({trouble})") == 1
    assert "Traceback" not in bridge.log()


async def test_a_flood_is_counted_and_stops_neither_commands_nor_replicas(
    client: Client, bridge: Bridge, weaver: WeaverProxy
) -> None:
    flood, status = 30_000, "torchLoom.training.status"

    async def count() -> dict[str, int]:
        """What became of each message, once the bridge has seen all."""
        counted: dict[str, int] = {}
        while sum(counted.values()) < flood:
            refused = (await counts_of(client))["refused"]
            counted = {key: count for key, count in refused.items() if key.startswith(status)}
        return counted

    async with Outsider(client, "out_flood", "GPU-flood", heartbeat_interval=BOUND) as outsider:
        for number in range(flood):
            await client.publish(status, b'{"replica_id": "stranger_%d"}' % number)
            if number % 1000 == 0:
                await asyncio.sleep(0)  # the heartbeats
        await flush(client, 10)
        giving = weaver.pause("out_flood")
        await outsider.answer(*await outsider.command())
        outcome = (await asyncio.to_thread(giving.get, BOUND))["out_flood"]
        counted = await asyncio.wait_for(count(), BOUND)

    assert outcome.ok
    assert sum(counted.values()) == flood
    assert counted[f"{status} too_many"] + counted.get(f"{status} behind", 0) > flood / 3
    assert bridge.log().count("not taken") <= 6
    kinds = [event.kind for event in weaver.events(0, replica="out_flood")]
    assert "recovering" not in kinds[: kinds.index("paused")]


async def test_users_who_distrust_each_other_have_accounts_and_roles_as_the_page_shows(
    cluster: LocalCluster, tokens: TokenFile, weaver: WeaverProxy, tmp_path: Path
) -> None:
    (block,) = Page.of("docs/guide/nats.md").blocks("conf")
    both = {user: tokens.create(f"{user}'s bridge", "operate", user=user)[1] for user in ("anna", "boris")}
    weavers = {user: WeaverProxy(cluster.url, token) for user, token in both.items()}

    async def connect(user: str) -> Client:
        return await nats.connect(server.url, user=user, password="…", error_cb=note)

    refused: asyncio.Queue[str] = asyncio.Queue()

    async def note(error: Exception) -> None:
        await refused.put(str(error))

    def bridge_of(user: str) -> Bridge:
        return Bridge(cluster.url, both[user], server.url, "--nats-user", f"{user}-bridge", "--nats-password", "…")

    with with_configuration(tmp_path, "\n".join(block.lines)) as server, bridge_of("anna"), bridge_of("boris"):
        training, monitor, boris = [
            await connect(f"{who}") for who in ("anna-training", "anna-monitor", "boris-bridge")
        ]
        async with Outsider(training, "shared", "GPU-shared") as outsider:
            # Boris says the same in his account: it is about his replicas only.
            drain = {"drain": {"replica_id": "shared"}}
            unknown = await Outsider(boris, "shared", "GPU-shared").ask("DRentry", drain)
            assert unknown["error"]["code"] == "unknown_replica"
            async with Outsider(boris, "shared", "GPU-shared") as namesake:
                assert (await namesake.ask("DRentry", drain))["ok"]
                await until(lambda: states(weavers["boris"])["shared"] == "draining")
                await outsider.report()
                await until(lambda: states(weavers["anna"])["shared"] == "running")
                giving = weavers["anna"].pause("shared")
                await outsider.answer(*await outsider.command())
                assert (await asyncio.to_thread(giving.get, BOUND))["shared"].ok

            # Training commands nothing, and the monitor registers and drains nothing.
            await training.publish("torchLoom.ui.commands", b'{"command_type": "stop", "target_id": "*"}')
            await monitor.publish("torchLoom.DRentry", json.dumps(drain).encode())
            denied = [await asyncio.wait_for(refused.get(), BOUND) for _ in range(2)]
            failure = await monitor.request(
                "torchLoom.monitored.failure", b'{"device_uuid": "GPU-1"}', timeout=BOUND
            )
        for client in (training, monitor, boris):
            await client.close()

    assert sorted("torchloom.drentry" in one.lower() for one in denied) == [False, True]
    assert all("permissions violation" in one.lower() for one in denied)
    assert json.loads(failure.data)["reply"]["error"]["code"] == "unknown_device"
    assert "shared" not in states(weaver)


async def test_the_program_of_the_page_is_a_replica(
    server: NatsServer, bridge: Bridge, weaver: WeaverProxy
) -> None:
    _, block = Page.of("docs/guide/nats.md").blocks("python")
    program = "\n".join(block.lines).replace("nats://HOST:4222", server.url).replace("range(1000)", "range(50)")
    running = start("-u", "-c", program)
    try:
        assert read_json(running)["reply"]["ok"]
        giving = weaver.pause("solver_0")
        outcome = (await asyncio.to_thread(giving.get, BOUND))["solver_0"]
        await until(lambda: states(weaver)["solver_0"] == "finished")
        assert await asyncio.to_thread(running.wait, BOUND) == 0
    finally:
        running.kill()
        running.communicate()

    assert outcome.ok
    assert weaver.replica("solver_0").metrics["loss"] == 1 / 50


# -- bridges that come and go -----------------------------------------------------------------------------------


async def test_a_bridge_that_is_killed_and_started_again_has_the_replica_as_before(
    client: Client, cluster: LocalCluster, server: NatsServer, weaver: WeaverProxy, tmp_path: Path
) -> None:
    options = ["--state", str(tmp_path / "bridge.sqlite")]
    with Bridge(cluster.url, cluster.token, server.url, *options) as first:
        async with Outsider(client, "out_r", "GPU-r") as outsider:
            await outsider.report()
            await until(lambda: states(weaver)["out_r"] == "running")
            instance = weaver.replica("out_r").instance
            first.end(signal.SIGKILL)
            await until(lambda: not weaver.replica("out_r").connected)
            with Bridge(cluster.url, cluster.token, server.url, *options):
                await until(lambda: weaver.replica("out_r").connected)
                giving = weaver.pause("out_r")
                await outsider.answer(*await outsider.command())
                outcome = (await asyncio.to_thread(giving.get, BOUND))["out_r"]

    assert outcome.ok
    assert weaver.replica("out_r").instance == instance
    assert [event.kind for event in weaver.events(0, replica="out_r")].count("registered") == 1


async def test_of_two_bridges_the_second_speaks_for_a_replica_when_the_first_is_killed(
    client: Client, cluster: LocalCluster, server: NatsServer, weaver: WeaverProxy
) -> None:
    with (
        Bridge(cluster.url, cluster.token, server.url) as one,
        Bridge(cluster.url, cluster.token, server.url) as other,
    ):
        async with Outsider(client, "out_2", "GPU-2") as outsider:
            await outsider.report()
            await until(lambda: states(weaver)["out_2"] == "running")
            instance = weaver.replica("out_2").instance
            bridges = {bridge: bridge.id for bridge in (one, other)}
            owner = next(bridge for bridge, id in bridges.items() if instance.endswith(id))
            owner.end(signal.SIGKILL)

            await until(lambda: weaver.replica("out_2").instance not in ("", instance))
            await until(lambda: weaver.replica("out_2").connected)

    (standby,) = [id for bridge, id in bridges.items() if bridge is not owner]
    assert weaver.replica("out_2").instance.endswith(standby)


def test_two_bridges_cannot_have_one_file(cluster: LocalCluster, server: NatsServer, tmp_path: Path) -> None:
    options = ["--state", str(tmp_path / "bridge.sqlite")]
    with Bridge(cluster.url, cluster.token, server.url, *options):
        second = run_bridge(cluster.url, cluster.token, server.url, *options)
    (tmp_path / "text").write_text("this is no state of a bridge" * 100)
    text = run_bridge(cluster.url, cluster.token, server.url, "--state", str(tmp_path / "text"))

    assert "another bridge uses this file" in second.stderr
    assert text.returncode == 2
    assert "no file for the state of a bridge" in text.stderr


@pytest.mark.slow
async def test_a_replica_is_there_again_when_the_gateway_was_killed_and_is_back(
    client: Client, server: NatsServer, cluster: LocalCluster
) -> None:
    with gateway_of(cluster) as gateway:
        weaver = WeaverProxy(gateway.url, TOKEN)
        await_weaver(weaver)
        with Bridge(gateway.url, TOKEN, server.url) as bridge:
            async with Outsider(client, "out_w", "GPU-w") as outsider:
                await outsider.report()
                await until(lambda: states(weaver) == {"out_w": "running"})
                await asyncio.to_thread(gateway.end, signal.SIGKILL)
                bridge.await_log("the weaver is away")
                await asyncio.to_thread(gateway.start)

                await until(lambda: weaver.replica("out_w").connected)
                assert "Traceback" not in bridge.log()
