"""``images/keep-gateway``: what runs a gateway again in its container."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter
from tests.support.gateways import BOUND, TOKEN, Gateway
from tests.support.paths import ROOT
from tests.support.processes import still_there

KEEP_GATEWAY = ROOT / "images" / "keep-gateway"


@pytest.fixture
def kept(cluster: LocalCluster) -> Iterator[tuple[Gateway, subprocess.Popen[str]]]:
    """A gateway that is kept."""
    gateway = Gateway(cluster.workers)
    process = keep(*gateway.command()[2:])
    try:
        yield gateway, process
    finally:
        process.terminate()
        process.communicate(timeout=BOUND)
        gateway.close()


def keep(*options: str) -> subprocess.Popen[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        [str(KEEP_GATEWAY), *options],
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def announced(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_gateway_that_dies_is_started_again_and_has_its_sessions(
    kept: tuple[Gateway, subprocess.Popen[str]],
) -> None:
    gateway, process = kept
    gateway.url = announced(process)["url"]
    job = gateway.connect()
    job.hosts.spawn_procs().spawn("counters", Counter).add.call(1).get(BOUND)
    job.detach()

    os.kill(psutil.Process(process.pid).children()[0].pid, signal.SIGKILL)

    gateway.url = announced(process)["url"]
    again = loom.connect(gateway.url, TOKEN, job.session)
    assert list(again.meshes["counters"].add.call(1).get(BOUND).values()) == [2, 2]
    again.detach()
    left = psutil.Process(process.pid).children(recursive=True) + gateway.drivers()
    process.terminate()
    assert process.wait(BOUND) == 0
    assert still_there(left) == []


def test_a_gateway_that_cannot_start_is_not_started_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = keep("--worker", "tcp://127.0.0.1:1", "--port", str(taken.getsockname()[1]))
        process.communicate(timeout=BOUND)
    assert process.returncode == 3
