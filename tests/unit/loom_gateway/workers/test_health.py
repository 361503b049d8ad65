"""Whether a worker answers, by what its port does."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from loom.process.listen import free_ports
from loom_gateway.workers.watcher import answers
from tests.support.paths import ROOT
from tests.support.processes import read_json, start

Asked = Callable[[int], bool]


def by_the_gateway(port: int) -> bool:
    return asyncio.run(answers(f"tcp://127.0.0.1:{port}"))


def by_the_probe(port: int) -> bool:
    """What the manifests' probes and the images' health check run."""
    env = {**os.environ, "LOOM_WORKER_PORT": str(port), "LOOM_GATEWAY_PORT": "1"}
    return subprocess.run([sys.executable, str(ROOT / "images" / "healthy")], env=env).returncode == 0


both = pytest.mark.parametrize("asked", [by_the_gateway, by_the_probe])


@both
def test_a_port_that_accepts_and_does_not_read_does_not_answer(asked: Asked) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not asked(server.getsockname()[1])


@both
def test_a_port_on_which_nothing_listens_does_not_answer(asked: Asked) -> None:
    (port,) = free_ports(1)

    assert not asked(port)


@contextmanager
def worker() -> Iterator[tuple[int, int]]:
    """A worker: its port and its process id."""
    (port,) = free_ports(1)
    process = start("-m", "loom_gateway.workers.host", "--address", f"tcp://127.0.0.1:{port}", "--exit-with-parent")
    try:
        yield port, read_json(process)["pid"]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.guarantees(
    "workers",
    "A worker that is stopped or stuck does not answer the manifests' probes, though its port accepts connections",
)
@pytest.mark.slow  # two questions that are not answered take 4 s
def test_a_worker_answers_until_it_is_stopped_and_goes_on_when_it_is_continued() -> None:
    with worker() as (port, pid):
        assert by_the_gateway(port)
        assert by_the_probe(port)
        os.kill(pid, signal.SIGSTOP)
        assert not by_the_gateway(port)
        assert not by_the_probe(port)
        os.kill(pid, signal.SIGCONT)
        assert by_the_gateway(port)
        assert by_the_probe(port)
