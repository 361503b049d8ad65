"""Somebody with a good token attacks a real gateway, and another user's calls go on being answered."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

import loom
from loom import Actor, endpoint
from loom.token_file import TokenFile
from loom_proxy.local import LocalCluster
from tests.support.token_attacks import ATTACKS

BOUND = 30.0
SECONDS = 3.0
"""How long each attack goes on."""

MOST_GROWTH = 160 << 20
"""Bytes that the gateway and its weaver may grow by during one attack."""


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value

    @endpoint
    def say(self, lines: int) -> None:
        print("\n".join(["x" * 100] * lines), flush=True)


@dataclass
class Scene:
    """A gateway, the attacker's tokens and session, and the actor of another user."""

    cluster: LocalCluster
    tokens: dict[str, str]
    echo: Echo

    def processes(self) -> list[psutil.Process]:
        gateway = psutil.Process(self.cluster.pids[0])
        weavers = [one for one in gateway.children() if "loom.weaver" in one.cmdline()]
        return [gateway, *weavers]

    def memory(self) -> int:
        return sum(one.memory_info().rss for one in self.processes())


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("t")
    file = TokenFile(folder / "tokens.json")
    tokens = {
        scope: file.create(f"mallory {scope}", scope, user="mallory")[1] for scope in ("view", "operate", "drive")
    }
    ann = file.create("ann", "drive", user="ann")[1]
    options = ["--tokens", str(file.path), "--audit", str(folder / "audit")]
    with (
        LocalCluster(1, gateway_options=options) as cluster,
        loom.connect(cluster.url, tokens["drive"]) as own,
        loom.connect(cluster.url, ann) as job,
    ):
        talker = own.hosts.spawn_procs(per_host={"gpus": 1}).spawn("talker", Echo)
        talker.say.call_one(20_000).get(BOUND)
        echo = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("echo", Echo)
        assert echo.echo.call_one(1).get(BOUND) == 1
        assert own.session is not None
        yield Scene(cluster, {**tokens, "session": own.session}, echo)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_another_users_calls_are_answered_and_memory_is_bounded(scene: Scene, name: str) -> None:
    given = json.dumps({"url": scene.cluster.url, **scene.tokens})
    before = scene.memory()
    attacker = subprocess.Popen([sys.executable, "-m", "tests.support.token_attacks", name, given])
    waits, most = [0.0], before
    try:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            began = time.monotonic()
            assert scene.echo.echo.call_one(len(waits)).get(BOUND) == len(waits)
            waits.append(time.monotonic() - began)
            most = max(most, scene.memory())
        assert attacker.poll() is None, "the attack ended by itself"
    finally:
        attacker.kill()
        attacker.wait()
    waits.sort()
    print(
        f"{name}: {len(waits)} calls, median {1e3 * waits[len(waits) // 2]:.1f} ms, "
        f"longest {1e3 * waits[-1]:.0f} ms, {(most - before) >> 20} MiB more"
    )
    assert len(waits) > 5
    assert most - before < MOST_GROWTH
    with urllib.request.urlopen(f"{scene.cluster.url.replace('ws:', 'http:')}/healthz", timeout=BOUND) as health:
        assert health.status == 200
