"""A worker that gets SIGTERM, as Kubernetes evicts its pod: what trains saves its state before it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import loom
from loom import Actor, Threadlet, endpoint
from loom.process.listen import free_ports
from loom_proxy.local import LocalCluster
from tests.support.gateways import Gateway
from tests.support.processes import read_json, start, still_there, tree

pytestmark = pytest.mark.timeout(120)

IN_TIME = 60.0

SCRIPT = """
import pathlib, sys, time
import loom

with loom.Threadlet("script") as threadlet:
    number = 0
    while not threadlet.should_stop:
        number += 1
        with threadlet.step(number):
            time.sleep(0.01)
        pathlib.Path(sys.argv[1]).write_text(str(number))
pathlib.Path(sys.argv[2]).write_text(str(number))
"""


class Trainer(Actor):
    """An actor that trains until it should stop, and then writes how far it came."""

    @endpoint
    def train(self, begun: str, saved: str, deaf: bool = False) -> int:
        number = 0
        with Threadlet("trained") as threadlet:
            while deaf or not threadlet.should_stop:
                number += 1
                with threadlet.step(number):
                    time.sleep(0.01)
                Path(begun).write_text(f"{number} {threadlet.evicted}")
        Path(saved).write_text(f"{number} {threadlet.evicted}")
        return number

    @endpoint
    def start(self, begun: str, saved: str) -> int:
        return subprocess.Popen([sys.executable, "-c", SCRIPT, begun, saved]).pid

    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1) as cluster:
        yield cluster


@pytest.fixture
def job(cluster: LocalCluster) -> Iterator[loom.Job]:
    with loom.connect(cluster.url, token=cluster.token) as job:
        yield job


def await_file(path: Path) -> None:
    until = time.monotonic() + IN_TIME
    while not path.exists():
        assert time.monotonic() < until, f"{path} was not written"
        time.sleep(0.02)


def worker_of(cluster: LocalCluster) -> psutil.Process:
    return psutil.Process(cluster.pids[1])


@pytest.mark.guarantees(
    "workers", "What trains on a worker that gets SIGTERM is told, and saves its state before it ends"
)
def test_what_trains_saves_its_state_when_its_worker_is_evicted(
    cluster: LocalCluster, job: loom.Job, tmp_path: Path
) -> None:
    begun, saved = tmp_path / "begun", tmp_path / "saved"
    trainer = job.hosts.spawn_procs(name="trained").spawn("trainer", Trainer)
    idle = job.hosts.spawn_procs(name="idle").spawn("idle", Trainer)
    pid = idle.pid.call_one().get()
    training = trainer.train.call_one(str(begun), str(saved))
    await_file(begun)
    processes = tree(worker_of(cluster).pid)

    worker_of(cluster).send_signal(signal.SIGTERM)

    await_file(saved)
    assert saved.read_text() == f"{training.get(IN_TIME)} True"
    assert still_there([psutil.Process(pid)] if psutil.pid_exists(pid) else []) == []
    trainer.stop().get()
    job.close()
    assert still_there(processes, IN_TIME) == []


@pytest.mark.guarantees("workers", "So it is when the laptop has gone")
def test_an_evicted_worker_saves_what_trains_after_the_laptop_has_gone(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    begun, saved = tmp_path / "begun", tmp_path / "saved"
    job = loom.connect(cluster.url, token=cluster.token)
    trainer = job.hosts.spawn_procs(name="trained").spawn("trainer", Trainer)
    trainer.train.call_one(str(begun), str(saved))
    await_file(begun)
    job.detach()

    worker_of(cluster).send_signal(signal.SIGTERM)

    await_file(saved)
    assert saved.read_text().endswith("True")


@pytest.mark.guarantees("workers", "A program that an actor has started is told too")
@pytest.mark.slow
def test_a_program_that_an_actor_has_started_is_evicted_too(
    cluster: LocalCluster, job: loom.Job, tmp_path: Path
) -> None:
    begun, saved = tmp_path / "begun", tmp_path / "saved"
    starter = job.hosts.spawn_procs(name="starter").spawn("starter", Trainer)
    script = psutil.Process(starter.start.call_one(str(begun), str(saved)).get())
    await_file(begun)

    worker_of(cluster).send_signal(signal.SIGTERM)

    await_file(saved)
    assert still_there([script, worker_of(cluster)], IN_TIME) == []


@pytest.mark.guarantees("workers", "A second signal ends everything on a worker at once")
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once_what_does_not_stop(
    cluster: LocalCluster, job: loom.Job, tmp_path: Path, second: signal.Signals
) -> None:
    begun, saved = tmp_path / "begun", tmp_path / "saved"
    trainer = job.hosts.spawn_procs(name="trained").spawn("trainer", Trainer)
    pid = trainer.pid.call_one().get()
    trainer.train.call_one(str(begun), str(saved), deaf=True)
    await_file(begun)
    processes = tree(worker_of(cluster).pid)
    worker_of(cluster).send_signal(signal.SIGTERM)
    until = time.monotonic() + IN_TIME
    while not begun.read_text().endswith("True"):  # an earlier second signal could not be told from the first
        assert time.monotonic() < until
    assert psutil.pid_exists(pid)

    worker_of(cluster).send_signal(second)

    assert still_there(processes) == []


@pytest.mark.slow
def test_what_does_not_stop_is_killed_after_the_grace(tmp_path: Path) -> None:
    begun, saved = tmp_path / "begun", tmp_path / "saved"
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    worker = start("-m", "loom_gateway.workers.host", "--address", address, "--exit-with-parent", "--grace", "1")
    read_json(worker)
    gateway = Gateway([address]).start()
    try:
        with gateway.connect() as job:
            trainer = job.hosts.spawn_procs(name="trained").spawn("trainer", Trainer)
            trainer.train.call_one(str(begun), str(saved), deaf=True)
            await_file(begun)
            processes = tree(worker.pid)

            worker.terminate()

            assert worker.wait(IN_TIME) == 0
            assert still_there(processes) == []
        assert not saved.exists()
    finally:
        gateway.close()
        worker.kill()
        worker.communicate()
