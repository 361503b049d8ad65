"""The weaver's process, over real sockets: what it answers and what it refuses."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import sys
import time
from pathlib import Path

import pytest

from loom.control.address import parse_weaver_address
from loom.token_file import ADMIN
from tests.support.processes import start
from tests.unit.loom.weaver.raw_threadlet import (
    BOUND,
    GPU,
    Line,
    RawThreadlet,
    Refused,
    WeaverProcess,
)


def test_a_replica_that_registers_is_there_with_its_devices(weaver: WeaverProcess) -> None:
    threadlet = RawThreadlet(weaver.address)
    welcome = threadlet.welcome()
    gateway = weaver.gateway()

    replica = gateway.ask("replica", id="train_0")
    (device,) = gateway.ask("devices")

    assert welcome["protocol"] == 1
    assert welcome["seq"] == 0
    assert replica["state"] == "running"
    assert replica["connected"] is True
    assert replica["devices"] == ["GPU-0"]
    assert device == {
        **GPU,
        "state": "active",
        "reason": None,
        "replicas": ["train_0"],
        "status": None,
        "user": ADMIN,
    }
    assert gateway.ask("status")["replicas"] == {"running": 1}


def test_what_a_replica_reports_is_in_its_history(weaver: WeaverProcess, began: float) -> None:
    threadlet = RawThreadlet(weaver.address)
    for step in range(1, 6):
        last = threadlet.report(step, at=began + step, loss=1.0 / step)
    threadlet.await_stored(last)
    gateway = weaver.gateway()

    assert gateway.ask("metrics", replica="train_0") == ["loss"]
    assert gateway.ask("history", replica="train_0", metric="loss") == [
        [began + step, step, 1.0 / step] for step in range(1, 6)
    ]
    assert gateway.ask("history", replica="train_0", metric="loss", since=began + 3, until=began + 4) == [
        [began + 3, 3, 1 / 3],
        [began + 4, 4, 0.25],
    ]
    assert gateway.ask("replica", id="train_0")["metrics"] == {"loss": 0.2}


def test_a_command_is_delivered_and_its_acknowledgement_awaited(weaver: WeaverProcess) -> None:
    threadlet = RawThreadlet(weaver.address)
    threadlet.welcome()
    gateway = weaver.gateway()

    given = gateway.ask("command", kind="update_config", params={"learning_rate": 0.002}, target="train_*", by="me")
    id, kind, params = threadlet.command()
    threadlet.ack(id, step=7, changes={"learning_rate": {"old": 0.001, "new": 0.002}})
    outcome = gateway.ask("command_state", id=given["id"], timeout=BOUND)["outcomes"]

    assert (id, kind, params) == (given["id"], "update_config", {"learning_rate": 0.002})
    assert given["replicas"] == ["train_0"]
    assert outcome == {
        "train_0": {
            "ok": True,
            "reason": None,
            "step": 7,
            "changes": {"learning_rate": {"old": 0.001, "new": 0.002}},
            "refused": {},
        }
    }
    assert gateway.ask("replica", id="train_0")["config"] == {"learning_rate": 0.002}
    assert [event["kind"] for event in gateway.ask("events")] == [
        "weaver_started",
        "run_began",
        "registered",
        "running",
        "command",
        "applied",
    ]


def test_replicas_of_a_mesh_are_awaited_until_all_have_registered(weaver: WeaverProcess) -> None:
    asking, gateway = weaver.gateway(), weaver.gateway()
    RawThreadlet(weaver.address, "first", session="s", procs="7", rank=0).welcome()
    wanted = {"session": "s", "procs": 7, "ranks": [0, 1]}
    asking.send("ask", 1, ADMIN, "replicas_in", {**wanted, "timeout": BOUND})

    early = gateway.ask("replicas_in", **wanted)
    second = RawThreadlet(weaver.address, "second", session="s", procs="7", rank=1)

    assert early == [[0, "first"]]
    assert asking.receive() == ["answer", 1, [[0, "first"], [1, "second"]]]
    assert second.welcome()
    late = gateway.ask("replicas_in", **{**wanted, "ranks": [2]}, timeout=0.05)
    assert [rank for rank, _ in late] == [0, 1]
    assert gateway.ask("address") == weaver.address


def test_a_device_that_failed_and_a_process_that_died_are_told_by_the_gateway(weaver: WeaverProcess) -> None:
    threadlet = RawThreadlet(weaver.address, session="s", procs="trainers", rank=0)
    threadlet.welcome()
    gateway = weaver.gateway()
    gateway.ask("spawned", session="s", procs="trainers", rank=0, host="node-1")

    failure = gateway.ask("fail_device", device="GPU-0", reason="ECC errors", by="dcgm")
    told = threadlet.command()
    ended = gateway.ask("supervision", session="s", procs="trainers", rank=0, what="dead", reason="signal 9")

    assert told[1:] == ["device_failed", {"device": "GPU-0", "reason": "ECC errors"}]
    assert failure["replicas"][0]["replica"] == "train_0"
    assert ended == ["train_0"]
    assert gateway.ask("replica", id="train_0")["died_of"] == "signal 9"
    assert [event["kind"] for event in gateway.ask("events", after=4)] == [
        "spawned",
        "device_failed",
        "command",
        "supervision",
        "failed",
        "unanswered",
        "run_ended",
    ]


def test_the_numbers_for_prometheus(weaver: WeaverProcess) -> None:
    threadlet = RawThreadlet(weaver.address)
    threadlet.report(7, loss=0.5)
    threadlet.await_stored(1)
    gateway = weaver.gateway()
    given = gateway.ask("command", kind="pause")
    threadlet.ack(threadlet.command()[0])
    gateway.ask("command_state", id=given["id"], timeout=BOUND)

    numbers = gateway.ask("numbers")

    assert numbers["replicas"] == {"paused": 1}
    assert numbers["reports"] == 1
    assert numbers["of_replicas"] == {"train_0": {"step": 7, "metrics": {"loss": 0.5}, "group": "train"}}
    assert sum(numbers["command_latency"]["counts"]) == 1
    assert numbers["of_devices"] == {}


def test_a_replica_that_is_not_there_is_named_in_the_outcome(weaver: WeaverProcess) -> None:
    RawThreadlet(weaver.address).welcome()
    gateway = weaver.gateway()

    given = gateway.ask("command", kind="pause", target="train_7")
    outcome = gateway.ask("command_state", id=given["id"], timeout=0)["outcomes"]

    assert outcome["train_7"]["ok"] is False
    assert outcome["train_7"]["reason"] == 'no replica named "train_7"; registered: train_0'


def test_who_does_not_answer_in_time_is_named_as_waited_for(weaver: WeaverProcess) -> None:
    RawThreadlet(weaver.address).welcome()
    gateway = weaver.gateway()

    given = gateway.ask("command", kind="pause", target="*")
    outcome = gateway.ask("command_state", id=given["id"], timeout=0.05)["outcomes"]

    assert outcome["train_0"]["ok"] is False
    assert outcome["train_0"]["waiting"] is True
    assert "has not applied it in" in outcome["train_0"]["reason"]


def test_a_dead_process_on_this_host_has_failed_within_a_second(weaver: WeaverProcess) -> None:
    gateway = weaver.gateway()
    gateway.watch()
    program = (
        "import sys, time; from tests.unit.loom.weaver.raw_threadlet import RawThreadlet; "
        f"t = RawThreadlet({weaver.address!r}); t.welcome(); print('{{}}', flush=True); time.sleep(60)"
    )
    process = start("-c", program, cwd=os.getcwd())
    gateway.event("registered")

    process.kill()
    killed = time.time()
    process.communicate(timeout=BOUND)
    event = gateway.event("failed")

    assert event["time"] - killed < 1.0
    assert event["why"] == "died"
    # Linux before 6.15 does not tell how it ended.
    assert event["reason"] in ("killed by SIGKILL", f"its process {process.pid} is gone")


def test_a_wrong_key_is_refused(weaver: WeaverProcess) -> None:
    address = parse_weaver_address(weaver.address)

    threadlet = RawThreadlet(str(address._replace(key="wrong")))

    assert threadlet.receive()[:2] == ["refuse", "authentication"]
    assert threadlet.receive() == []


@pytest.mark.parametrize(
    "hello",
    [
        {"protocol": 2},
        {"replica": ""},
        {"replica": "x" * 1000},
        {"devices": [{"uuid": 1}]},
        {"pid": "one"},
        {"handlers": [1]},
    ],
)
def test_a_hello_that_makes_no_sense_is_refused(weaver: WeaverProcess, hello: dict[str, object]) -> None:
    threadlet = RawThreadlet(weaver.address, **hello)  # type: ignore[arg-type]

    assert threadlet.receive()[:2] == ["refuse", "protocol_mismatch"]
    assert threadlet.receive() == []


def test_bytes_that_are_no_frames_are_refused(weaver: WeaverProcess) -> None:
    address = parse_weaver_address(weaver.address)
    line = Line(socket.create_connection((address.host, address.port)))

    line.socket.sendall(struct.pack(">I", 1 << 30))

    assert line.receive()[:2] == ["refuse", "protocol_mismatch"]
    assert line.receive() == []


@pytest.mark.parametrize(
    "report",
    [[1], [1, 2, 3, 4, 5, 6, 7], [1, 1.0, -1, None, None, {}, None], [1, 1.0, 1, None, None, {"x": "y"}, None]],
)
def test_a_report_that_makes_no_sense_is_refused(weaver: WeaverProcess, report: list[object]) -> None:
    threadlet = RawThreadlet(weaver.address)
    threadlet.welcome()

    threadlet.send("status", [report])

    assert threadlet.receive()[:2] == ["refuse", "protocol_mismatch"]


def test_a_second_process_cannot_be_a_replica_that_lives(weaver: WeaverProcess) -> None:
    first = RawThreadlet(weaver.address)
    first.welcome()

    second = RawThreadlet(weaver.address)

    kind, code, text = second.receive()
    assert (kind, code) == ("refuse", "replica_taken")
    assert "give each process a replica_id of its own" in text


@pytest.mark.parametrize(
    ("operation", "arguments", "code"),
    [
        ("nonsense", {}, "wrong_arguments"),
        ("replica", {"id": "train_9"}, "unknown_replica"),
        ("replica", {}, "wrong_arguments"),
        ("fail_device", {"device": "GPU-9"}, "unknown_device"),
        ("policy", {"group": "train", "action": "dance"}, "wrong_arguments"),
        ("command", {"kind": "dance"}, "wrong_arguments"),
        ("command", {"kind": "pause", "target": 5}, "wrong_arguments"),
        ("command_state", {"id": "none"}, "unknown_command"),
        ("command_state", {"id": "none", "timeout": -1}, "wrong_arguments"),
        ("history", {"replica": "train_0", "metric": "loss"}, "wrong_arguments"),
        ("events", {"after": "x"}, "wrong_arguments"),
        ("stacks", {"replica": "train_9"}, "unknown_replica"),
    ],
)
def test_what_cannot_be_done_is_answered_with_an_error(
    weaver: WeaverProcess, operation: str, arguments: dict[str, object], code: str
) -> None:
    RawThreadlet(weaver.address).welcome()

    with pytest.raises(Refused) as caught:
        weaver.gateway().ask(operation, **arguments)

    assert caught.value.code == code


def test_a_watcher_sees_a_snapshot_and_then_what_happens(weaver: WeaverProcess, began: float) -> None:
    first = RawThreadlet(weaver.address)
    first.welcome()
    watcher = weaver.gateway()

    snapshot = watcher.watch()
    second = RawThreadlet(weaver.address, "train_1")
    registered = watcher.event("registered")
    second.report(3, loss=0.5)
    second.send("devices", began, {"GPU-0": {"utilization": 0.5}})
    changes = watcher.until(lambda frame: frame[2].get("changes", {}).get("replicas", {}).get("train_1"))
    while not changes[2]["changes"]["replicas"]["train_1"]["step"] or not changes[2]["changes"]["devices"]:
        second.report(second.seq + 3, loss=0.5)
        second.send("devices", began, {"GPU-0": {"utilization": 0.5}})
        changes = watcher.until(lambda frame: frame[2].get("changes", {}).get("replicas", {}).get("train_1"))

    assert [replica["id"] for replica in snapshot["replicas"]] == ["train_0"]
    assert registered["replica"] == "train_1"
    assert registered["id"] > snapshot["status"]["event"]
    assert changes[2]["changes"]["replicas"]["train_1"]["metrics"] == {"loss": 0.5}
    assert changes[2]["changes"]["devices"]["GPU-0"]["utilization"] == 0.5


def test_a_watcher_that_does_not_read_is_disconnected(weaver: WeaverProcess) -> None:
    threadlet = RawThreadlet(weaver.address)
    threadlet.welcome()
    slow = weaver.gateway()
    slow.watch()
    gateway = weaver.gateway()

    sent = 0
    while "a watcher is disconnected" not in weaver.output():
        gateway.ask("command", kind="update_config", params={"text": "x" * 1_000_000}, target="nobody")
        sent += 1
        assert sent < 200

    assert gateway.ask("status")["replicas"] == {"running": 1}


def test_the_stack_of_a_replica_can_be_seen(weaver: WeaverProcess) -> None:
    threadlet = RawThreadlet(weaver.address, pid=0)  # as one on another host, whose threadlet is asked
    threadlet.welcome()
    gateway = weaver.gateway()
    gateway.send("ask", 99, ADMIN, "stacks", {"replica": "train_0"})

    kind, id = threadlet.receive()
    threadlet.send("stack", id, "in train()")

    assert kind == "stack"
    assert gateway.receive() == ["answer", 99, "in train()"]


STALLS = """
import sys, threading, time
from tests.unit.loom.weaver.raw_threadlet import RawThreadlet

threadlet = RawThreadlet(sys.argv[1])
for step in range(20):
    threadlet.report(step)
    time.sleep(0.02)

def hang_in_this_function():
    while True:
        threadlet.send("beat", time.time(), 19, "step")
        time.sleep(0.2)

hang_in_this_function()
"""


@pytest.mark.skipif(shutil.which("py-spy", path=str(Path(sys.executable).parent)) is None, reason="needs py-spy")
def test_a_process_that_stalls_has_its_stack_in_the_event(weaver: WeaverProcess) -> None:
    gateway = weaver.gateway()
    gateway.watch()
    process = start("-c", STALLS, weaver.address, cwd=os.getcwd())
    try:
        stalled = gateway.event("stalled")
        with_stack = gateway.event("stalled")
    finally:
        process.kill()
        process.communicate(timeout=BOUND)

    assert stalled["id"] == with_stack["id"]
    assert stalled["seconds"] >= 2.0
    assert "hang_in_this_function" in with_stack["stack"]
    (kept,) = gateway.ask("events", kind="stalled", after=0)
    assert kept["stack"] == with_stack["stack"]
