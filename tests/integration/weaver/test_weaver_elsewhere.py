"""A gateway whose weaver is a process elsewhere, which `loom serve weaver` runs and nobody starts again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import loom
from loom.process.listen import free_ports
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND, TOKEN, Gateway, gateway_of
from tests.support.processes import LOOM, read_json, start
from tests.support.weaver_actors import Trainers
from tests.support.weavers import await_weaver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Elsewhere:
    """A weaver that a test starts and kills."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.secret = folder / "secret"
        self.secret.write_text(f"{os.urandom(32).hex()}\n")
        self.secret.chmod(0o600)
        (self.port,) = free_ports(1)
        self.place = f"127.0.0.1:{self.port}"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        options = [
            "--state",
            str(self._folder / "state"),
            "--listen",
            self.place,
            "--secret-file",
            str(self.secret),
        ]
        self.process = start("-c", LOOM, "serve", "weaver", *options)
        announced = read_json(self.process)
        assert announced["address"] == f"tcp://{self.place}"

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        process, self.process = self.process, None
        with process:
            return process.wait(BOUND)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Elsewhere]:
    weaver = Elsewhere(tmp_path)
    weaver.start()
    yield weaver
    if weaver.process is not None:
        weaver.end(signal.SIGKILL)


@pytest.fixture
def gateway(cluster: LocalCluster, elsewhere: Elsewhere) -> Iterator[Gateway]:
    with gateway_of(cluster, "--weaver", elsewhere.place, "--weaver-secret", str(elsewhere.secret)) as running:
        yield running


def connections_in_child(port: int) -> tuple[int, int]:
    """How many connections to a port of this machine this process has, and a forked child of it."""

    def count() -> int:
        found = 0
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            try:
                sock = socket.socket(fileno=os.dup(descriptor))
            except OSError:
                continue
            with sock:
                with contextlib.suppress(OSError):
                    found += sock.family == socket.AF_INET and sock.getpeername()[1] == port
        return found

    here = count()
    if (pid := os.fork()) == 0:
        os._exit(count())
    return here, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_sessions_and_replicas_have_it_while_it_is_there_and_again_when_it_is_back(
    gateway: Gateway, elsewhere: Elsewhere
) -> None:
    weaver = WeaverProxy(gateway.url, TOKEN)
    await_weaver(weaver)
    with gateway.connect() as job:
        trainers = Trainers(job, "moved")
        first = job.weaver.update_config(trainers.glob, learning_rate=0.25).get(BOUND)
        assert gateway.weavers() == []
        assert job.run(connections_in_child, elsewhere.port) == (1, 0)

        elsewhere.end(signal.SIGKILL)

        said = f"the weaver at {elsewhere.place} does not answer since .*; replicas go on meanwhile"
        with pytest.raises(loom.WeaverUnavailable, match=said):
            weaver.update_config(trainers.glob, learning_rate=1.0)
        with pytest.raises(loom.WeaverUnavailable, match=r"the weaver is away: .*; replicas go on meanwhile"):
            job.weaver.update_config(trainers.glob, learning_rate=1.0)
        elsewhere.start()
        await_weaver(weaver)
        second = job.weaver.update_config(trainers.glob, learning_rate=0.125).get(BOUND)
        trained = trainers.stop()

        for id in trainers.replicas:
            assert trained[id].calls == [(first[id].step, 0.25), (second[id].step, 0.125)]
            points = weaver.history(id, "weight", points=20_000)
            assert [point.step for point in points] == list(range(trained[id].steps))

    gateway.end(signal.SIGINT)
    assert elsewhere.process is not None
    assert elsewhere.process.poll() is None
    assert elsewhere.end(signal.SIGTERM) == 0
