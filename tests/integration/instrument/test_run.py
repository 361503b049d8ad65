"""``loom run`` around real programs: they are watched and changed, and nothing else about them differs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loom.weaver.views import ReplicaInfo
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import await_true

LOOP = """
import sys, time
import torch

print("argv", sys.argv[1:], __name__, flush=True)
steps = int(sys.argv[1])
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10**6)
for n in range(steps):
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    time.sleep(0.005)
print("lr", optimizer.param_groups[0]["lr"], scheduler.get_last_lr()[0], flush=True)
"""


@pytest.fixture
def weaver(cluster: LocalCluster) -> WeaverProxy:
    return WeaverProxy(cluster.url, cluster.token)


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a command under ``loom run``, and kills it after the test."""
    for name in ("RANK", "LOOM_WEAVER", "LOOM_RUN"):
        monkeypatch.delenv(name, raising=False)
    started: list[subprocess.Popen[str]] = []

    def run(name: str, *command: str, **options: Any) -> subprocess.Popen[str]:
        loom = str(Path(sys.executable).with_name("loom"))
        environment = {**os.environ, "LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE, "text": True}
        arguments = [loom, "run", "--name", name, "--", *command]
        process = subprocess.Popen(
            arguments, env=environment, cwd=tmp_path, start_new_session=True, **{**pipes, **options}
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "loop.py").write_text(LOOP)
    return str(tmp_path / "loop.py")


def find(weaver: WeaverProxy, id: str) -> ReplicaInfo | None:
    return weaver.replicas().get(id)


def await_step(weaver: WeaverProxy, id: str, step: int = 1) -> ReplicaInfo:
    def is_there() -> bool:
        found = find(weaver, id)
        return found is not None and (found.step or 0) >= step

    await_true(is_there)
    found = find(weaver, id)
    assert found is not None
    return found


def test_a_plain_loop_is_watched_changed_paused_and_stopped(weaver: WeaverProxy, start: Start, script: str) -> None:
    process = start("plain", sys.executable, script, "1000000")

    found = await_step(weaver, "plain_0", 5)
    assert (found.group, found.config["learning_rate"]) == ("plain", 0.1)
    refused = start("plain", "echo", "started")
    assert refused.wait(60) == 1
    out, err = refused.communicate()
    assert (out, err[:51]) == ("", "error: a training named 'plain' lives ('plain_0' is")

    answer = weaver.command("update_config", {"learning_rate": 0.05}, "plain").get(30)["plain_0"]
    assert (answer.ok, answer.changes["learning_rate"].new) == (True, 0.05)
    assert weaver.command("pause", target="plain").get(30)["plain_0"].ok
    before = find(weaver, "plain_0")
    assert before is not None
    assert before.state == "paused"
    assert weaver.command("resume", target="plain").get(30)["plain_0"].ok
    await_step(weaver, "plain_0", (before.step or 0) + 5)
    assert weaver.command("stop", target="plain").get(30)["plain_0"].ok

    assert process.wait(60) == 0
    out, err = process.communicate()
    assert (out, err) == ("argv ['1000000'] __main__\n", "")
    await_true(lambda: str(getattr(find(weaver, "plain_0"), "ending", "")) == "stopped")
