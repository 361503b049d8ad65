"""Agents of faults that are killed at the worst moment: what they leave is repaired."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from loom.chaos.host import agent, records
from loom.chaos.host.sweep import sweep
from tests.integration.chaos.test_network import OTHER, Pair, here, hosts, pair, state  # noqa: F401
from tests.support.needs import skipped_if
from tests.support.network.namespaces import missing
from tests.unit.loom.threadlet.fake_weaver import BOUND, eventually

KILLED = """
import os, signal, sys
from pathlib import Path
from loom.chaos.host import disks, network, processes, records

mine = tuple(processes.ProcessId.find(os.getpid()))
records.begin(records.HostFaultRecord(records.folder() / "f1.json", mine, []))

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def half(file, places, values, whole=disks._write):
    whole(file, places[: len(places) // 2], values[: len(places) // 2])
    die()

def full(ballast, write=disks._write_all_room):
    write(ballast)
    die()

{}
"""
"""A program that injects a fault as an agent does, and is killed while it does so."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(records.FOLDER_VARIABLE, str(tmp_path / "agents"))
    return tmp_path / "agents"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def route(pair: Pair) -> Iterator[None]:  # noqa: F811
    """A route that the kernel forgets when its device goes down."""
    subprocess.run(["ip", "route", "add", "10.99.0.0/16", "via", OTHER], check=True)
    yield
    subprocess.run(["ip", "route", "del", "10.99.0.0/16"])


def be_killed(code: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED.format(code)], capture_output=True, text=True, timeout=BOUND
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr


@pytest.mark.guarantees("chaos", "The network is as before, however an agent is killed with its shell")
@skipped_if(missing())
@pytest.mark.parametrize(
    "code",
    [
        "network.run_at_end = die; network.partition()",
        "network.run_at_end = die; network.lose(50)",
        "network.run_at_end = die; network.link_down('eth0')",
        "network.run_at_end = die; network.narrow(1.0, 'eth0')",
        "network.run_at_end = die; network.delay_without_netem(1000.0, 'eth0')",
    ],
)
def test_a_network_is_as_before(pair: Pair, route: None, folder: Path, code: str) -> None:  # noqa: F811
    before = state()
    be_killed(code)
    assert state() != before

    assert sweep()

    assert state() == before
    assert pair.there_and_back() == (1, 1)
    assert os.listdir(folder) == []


@pytest.mark.guarantees("chaos", "A table goes without a record too")
@skipped_if(missing())
@pytest.mark.parametrize(
    "code",
    [
        "network.run_at_end = die; network.partition()",
        "network.run_at_end = die; network.delay_without_netem(1000.0, 'eth0')",
    ],
)
def test_a_table_goes_without_a_record_too(pair: Pair, folder: Path, code: str) -> None:  # noqa: F811
    before = state()
    be_killed(code)
    (folder / "f1.json").unlink()  # as with the file system of a container that is started again

    assert sweep()

    assert state() == before


@pytest.mark.guarantees("chaos", "The fault of a living agent is left alone")
@skipped_if(missing())
def test_the_fault_of_a_living_agent_is_left_alone(pair: Pair, folder: Path) -> None:  # noqa: F811
    before = state()
    _, strike = agent.keep("f1", "partition", {"peers": []}, None, os.getpid(), lambda _: None)
    assert strike is not None
    strike()
    eventually(lambda: state() != before)

    assert sweep() == []

    assert state() != before
    agent.remove("f1")


@pytest.mark.guarantees("chaos", "A stopped process goes on")
def test_a_stopped_process_goes_on(sleeper: subprocess.Popen[bytes], folder: Path) -> None:
    be_killed(
        f"processes.run_at_end = lambda *_: None; processes._await_state = die; processes.stop({sleeper.pid})"
    )
    eventually(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_STOPPED)  # also on a busy machine

    assert sweep() == [f"process {sleeper.pid} goes on"]

    eventually(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_SLEEPING)
    assert os.listdir(folder) == []


@pytest.mark.guarantees("chaos", "A stopped process goes on")
def test_a_stopped_process_goes_on_at_once_if_only_its_agent_is_killed(
    sleeper: subprocess.Popen[bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_repair", lambda _: [])  # in a training process, which is the one that is stopped
    _, strike = agent.keep("f1", "sigstop", {}, None, sleeper.pid, lambda _: None)
    assert strike is not None
    strike()
    eventually(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_STOPPED)

    os.kill(records.HostFaultRecord.read(folder / "f1.json").agent[0], signal.SIGKILL)

    eventually(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_SLEEPING)


@pytest.mark.guarantees("chaos", "The file that filled a disk goes")
def test_the_file_that_filled_a_disk_goes(tmp_path: Path, folder: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    be_killed(
        "disks.run_at_end = lambda *_: None; disks._write_all_room = full\n"
        "disks._PIECE = 0; disks.shutil.disk_usage = lambda _: type('', (), {'free': 1})\n"
        f"disks.fill({str(disk)!r})"
    )
    assert len(os.listdir(disk)) == 1

    assert sweep()

    assert os.listdir(disk) == []


def make_checkpoint(folder: Path) -> dict[Path, bytes]:
    made = folder / "checkpoints" / "step-7"
    made.mkdir(parents=True)
    contents = {made / "a": bytes(range(256)), made / "b": bytes(4096)}
    for path, content in contents.items():
        path.write_bytes(content)
    return contents


@pytest.mark.guarantees(
    "chaos",
    "A corrupted checkpoint is whole again, also one that was changed in part, and its successor is left alone",
)
@pytest.mark.parametrize("code", ["disks._write = half;", "disks.Injected = die;"])
def test_a_corrupted_checkpoint_is_whole_again(tmp_path: Path, folder: Path, code: str) -> None:
    contents = make_checkpoint(tmp_path)
    be_killed(f"{code} disks.corrupt({str(tmp_path / 'checkpoints')!r})")
    assert {path: path.read_bytes() for path in contents} != contents

    assert sweep()

    assert {path: path.read_bytes() for path in contents} == contents
    assert os.listdir(folder) == []


@pytest.mark.guarantees(
    "chaos",
    "A corrupted checkpoint is whole again, also one that was changed in part, and its successor is left alone",
)
def test_a_checkpoint_that_has_replaced_the_corrupted_one_is_left_alone(tmp_path: Path) -> None:
    contents = make_checkpoint(tmp_path)
    be_killed(f"disks.Injected = die; disks.corrupt({str(tmp_path / 'checkpoints')!r})")
    for path in contents:
        path.write_bytes(b"another" * 1000)

    assert sweep() == []

    assert {path.read_bytes() for path in contents} == {b"another" * 1000}


@pytest.mark.guarantees("chaos", "A killed agent is noticed by the training that asked for it")
def test_the_training_notices_that_the_agent_of_its_fault_was_killed(tmp_path: Path, folder: Path) -> None:
    contents = make_checkpoint(tmp_path)
    removals: queue.Queue[dict[str, Any]] = queue.Queue()
    params = {"folder": str(tmp_path / "checkpoints"), "bytes": 64, "seed": 0}
    agent.keep("f1", "corrupt_checkpoint", params, None, os.getpid(), removals.put)
    assert {path: path.read_bytes() for path in contents} != contents

    os.kill(records.HostFaultRecord.read(folder / "f1.json").agent[0], signal.SIGKILL)

    removed = removals.get(timeout=BOUND)
    assert len(removed["repaired"]) == 2
    assert {path: path.read_bytes() for path in contents} == contents


@pytest.mark.guarantees("chaos", "The next start of a worker or an agent sweeps")
@pytest.mark.parametrize("by", ["an agent", "a worker"])
def test_the_next_start_of_anything_sweeps(tmp_path: Path, folder: Path, by: str) -> None:
    contents = make_checkpoint(tmp_path)
    be_killed(f"disks.Injected = die; disks.corrupt({str(tmp_path / 'checkpoints')!r})")

    if by == "an agent":
        disk = tmp_path / "other"
        make_checkpoint(disk)
        params = {"folder": str(disk / "checkpoints"), "bytes": 64, "seed": 0}
        agent.keep("f2", "corrupt_checkpoint", params, None, os.getpid(), lambda _: None)
        agent.remove("f2")
    else:
        worker = [sys.executable, "-m", "loom_gateway.workers.host", "--address", "tcp://192.0.2.1:26600"]
        ended = subprocess.run(worker, capture_output=True, text=True, timeout=BOUND)
        assert "an injected fault was left: restored" in ended.stderr

    assert {path: path.read_bytes() for path in contents} == contents
    assert os.listdir(folder) == []


@pytest.mark.guarantees("chaos", "A fault whose agent was killed can be removed")
def test_a_fault_whose_agent_was_killed_can_be_removed(tmp_path: Path, folder: Path) -> None:
    contents = make_checkpoint(tmp_path)
    be_killed(f"disks.Injected = die; disks.corrupt({str(tmp_path / 'checkpoints')!r})")

    agent.remove("f1")

    assert {path: path.read_bytes() for path in contents} == contents
