"""Threadlets and a real weaver's process: devices that come and go, drains, and the failures of peers."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from loom.control.handshake import MAX_DEVICES
from loom.devices import LocalDevice
from loom.errors import WrongArguments
from loom.threadlet import Threadlet
from tests.support.logged import messages
from tests.unit.loom.threadlet.fake_weaver import BOUND, FakeWeaver, eventually
from tests.unit.loom.weaver.raw_threadlet import WeaverProcess, running_weaver

FIRST, SECOND = (LocalDevice(f"GPU-{name}", "cpu", "host", "Model", 1 << 30) for name in "ab")

Train = Callable[..., Threadlet]


@pytest.fixture
def real() -> Iterator[WeaverProcess]:
    with running_weaver() as running:
        yield running


@pytest.fixture
def train(real: WeaverProcess) -> Iterator[Train]:
    """Makes connected threadlets of the real weaver."""
    made: list[Threadlet] = []

    def make(replica: str, **options: Any) -> Threadlet:
        made.append(Threadlet(replica, **{"group": "train", "weaver": real.address, "devices": [FIRST], **options}))
        eventually(lambda: made[-1].connected)
        return made[-1]

    yield make
    for one in made:
        one.close()


def process(address: str, replica: str, *, group: str = "train", then: str = "") -> subprocess.Popen[str]:
    """A training process that is connected."""
    code = (
        "import loom, time\n"
        f"t = loom.Threadlet({replica!r}, group={group!r}, devices=[])\n"
        "while not t.connected: time.sleep(0.01)\n"
        f"print('up', flush=True)\n{then}\ninput()\n"
    )
    environment = {**os.environ, "LOOM_WEAVER": address}
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    running = subprocess.Popen([sys.executable, "-c", code], text=True, env=environment, **streams)
    assert running.stdout is not None
    assert running.stdout.readline() == "up\n"
    return running


def kill(running: subprocess.Popen[str]) -> None:
    with running:
        running.send_signal(signal.SIGKILL)


def failures(threadlet: Threadlet) -> queue.Queue[tuple[str, str]]:
    """The failures of peers that a threadlet is told."""
    told: queue.Queue[tuple[str, str]] = queue.Queue()

    @threadlet.on_peer_failure
    def on_peer_failure(replica: str, reason: str) -> None:
        told.put((replica, reason))

    return told


# -- devices ------------------------------------------------------------------------------------------------


def test_a_running_process_adds_and_removes_devices(real: WeaverProcess, train: Train) -> None:
    gateway = real.gateway()
    made = train("train_0")
    gateway.watch()

    made.add_device(SECOND)
    added = gateway.event("devices_changed", "train_0")
    both = gateway.ask("replica", id="train_0")["devices"]
    made.remove_device("GPU-a")
    removed = gateway.event("devices_changed", "train_0")

    assert (added["added"], added["removed"]) == (["GPU-b"], [])
    assert both == ["GPU-a", "GPU-b"]
    assert (removed["added"], removed["removed"]) == ([], ["GPU-a"])
    assert [device["uuid"] for device in gateway.ask("devices")] == ["GPU-b"]
    assert made.devices == [SECOND]


def test_a_process_hears_of_the_failure_of_a_device_that_it_added(real: WeaverProcess, train: Train) -> None:
    gateway = real.gateway()
    made = train("train_0")
    told: list[tuple[str, str]] = []
    made.on_device_failure(lambda device, reason: told.append((device, reason)))
    gateway.watch()
    made.add_device(SECOND)
    gateway.event("devices_changed")

    failed = gateway.ask("fail_device", device="GPU-b", reason="Xid 79")
    eventually(lambda: made._pending)
    made.check_and_apply_updates()

    assert [one["replica"] for one in failed["replicas"]] == ["train_0"]
    assert told == [("GPU-b", "Xid 79")]


def test_devices_that_change_while_the_weaver_is_away_are_there_when_it_is_back(
    real: WeaverProcess, train: Train
) -> None:
    made = train("train_0")
    real.end()
    eventually(lambda: not made.connected)

    made.add_device(SECOND)
    made.drain("the data has ended")
    real.start()
    eventually(lambda: made.connected)

    replica = real.gateway().ask("replica", id="train_0")
    assert replica["devices"] == ["GPU-a", "GPU-b"]
    assert replica["state"] == "draining"


def test_a_device_described_anew_is_no_change_of_devices(real: WeaverProcess, train: Train) -> None:
    gateway = real.gateway()
    made = train("train_0")
    gateway.watch()

    made.add_device(LocalDevice("GPU-a", "cpu", "host", "Other", 1))
    made.add_device(SECOND)
    gateway.event("devices_changed")

    assert {one["uuid"]: one["type"] for one in gateway.ask("devices")} == {"GPU-a": "Other", "GPU-b": "Model"}
    assert len(gateway.ask("events", kind="devices_changed")) == 1


def test_a_device_that_is_not_there_cannot_be_removed() -> None:
    made = Threadlet("train_0", devices=[FIRST])

    with pytest.raises(WrongArguments, match="this process has no device 'GPU-x'; it has: GPU-a"):
        made.remove_device("GPU-x")


def test_a_process_has_no_more_devices_than_the_weaver_takes() -> None:
    made = Threadlet("train_0", devices=[LocalDevice(f"GPU-{n}", "cpu", "host", "", 0) for n in range(MAX_DEVICES)])

    made.add_device(LocalDevice("GPU-5", "cpu", "host", "Other", 0))
    with pytest.raises(WrongArguments, match="1024 devices at most"):
        made.add_device(FIRST)


# -- drains -------------------------------------------------------------------------------------------------


def test_the_weaver_shows_a_process_that_drains_by_its_own_choice(real: WeaverProcess, train: Train) -> None:
    gateway = real.gateway()
    made = train("train_0")
    gateway.watch()

    made.drain("the data has ended")

    event = gateway.event("draining", "train_0")
    assert (event["by"], event["reason"]) == ("train_0", "the data has ended")
    assert gateway.ask("replica", id="train_0")["state"] == "draining"
    made.check_and_apply_updates()
    made.close()
    assert gateway.event("finished", "train_0")["reason"] == "it was told to stop"


# -- failures of peers --------------------------------------------------------------------------------------


def test_every_replica_of_a_job_is_told_when_one_is_killed(real: WeaverProcess, train: Train) -> None:
    told = [failures(train(name)) for name in ("train_0", "train_1")]
    others = failures(train("other_0", group="others"))
    other = process(real.address, "other_1", group="others")

    kill(process(real.address, "train_2"))

    for one in told:
        replica, reason = one.get(timeout=BOUND)
        assert replica == "train_2"
        assert reason
    kill(other)
    assert others.get(timeout=BOUND)[0] == "other_1"
    assert all(one.empty() for one in [*told, others])


def test_a_replica_that_raises_has_failed_for_its_peers_and_one_that_finishes_has_not(
    real: WeaverProcess, train: Train
) -> None:
    told = failures(train("train_0"))
    with process(real.address, "train_1", then="raise SystemExit(0)") as finishing:
        finishing.wait(BOUND)
    with process(real.address, "train_2", then="t.close(ValueError('loss is NaN')); raise SystemExit"):
        assert told.get(timeout=BOUND) == ("train_2", "ValueError: loss is NaN")

    assert told.empty()


def test_a_failure_while_a_replica_is_not_connected_is_told_when_it_is_back_and_once(
    real: WeaverProcess, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = real.gateway()
    made = train("train_0")
    told = failures(made)
    gateway.watch()
    kill(process(real.address, "train_1"))
    assert told.get(timeout=BOUND)[0] == "train_1"
    dying = process(real.address, "train_2")
    with held_up(made, monkeypatch):
        gateway.event("recovering", "train_0")
        kill(dying)
        gateway.event("failed", "train_2")

    assert told.get(timeout=BOUND)[0] == "train_2"
    kill(process(real.address, "train_3"))
    assert told.get(timeout=BOUND)[0] == "train_3"
    assert told.empty()


@contextmanager
def held_up(threadlet: Threadlet, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A block in which a threadlet has lost its connection, and does not make another."""
    link = threadlet._link
    assert link is not None
    assert link._connection is not None
    introduce, go_on = link._hello, threading.Event()

    def later(key: str) -> Any:
        go_on.wait(BOUND)
        return introduce(key)

    monkeypatch.setattr(link, "_hello", later)
    link._connection.end_sending()
    yield
    go_on.set()


def test_a_function_that_raises_does_not_keep_the_others_from_being_called(
    real: WeaverProcess, train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    made = train("train_0")

    @made.on_peer_failure
    def fail(replica: str, reason: str) -> None:
        raise ValueError(replica)

    told = failures(made)
    for name in ("train_1", "train_2"):
        kill(process(real.address, name))
        assert told.get(timeout=BOUND)[0] == name

    assert messages(caplog) == [
        "a function for the failure of train_1 raised",
        "a function for the failure of train_2 raised",
    ]


def test_a_training_that_hangs_is_told_all_the_same(real: WeaverProcess, train: Train) -> None:
    made = train("train_0")
    aborted = threading.Event()
    made.on_peer_failure(lambda replica, reason: aborted.set())
    peer = process(real.address, "train_1")

    with made.step(0):
        kill(peer)

        assert aborted.wait(BOUND)


def test_failures_before_there_is_a_function_are_not_kept(weaver: FakeWeaver, threadlet: Train) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    connection.send("peers", [["train_1", "abc", "dead"]])
    weaver.command(connection, "pause")
    eventually(lambda: made._pending, "the frame behind it")
    told = failures(made)

    connection.send("peers", [["train_2", "def", "dead"]])

    assert told.get(timeout=BOUND) == ("train_2", "dead")


def test_only_so_many_failures_are_remembered(
    weaver: FakeWeaver, threadlet: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loom.threadlet.threadlet.MAX_HEARD", 2)
    made = threadlet()
    told = failures(made)
    connection, _ = weaver.welcome()

    connection.send("peers", [[f"train_{n}", f"instance-{n}", "dead"] for n in range(4)])
    connection.send("peers", [["train_3", "instance-3", "dead"], ["train_0", "instance-0", "dead"]])

    assert [told.get(timeout=BOUND)[0] for _ in range(5)] == ["train_0", "train_1", "train_2", "train_3", "train_0"]
