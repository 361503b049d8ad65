"""The weaver's host dies, again and again. The next weaver runs elsewhere, with its volume and its name."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loom.token_file import ADMIN
from loom.weaver.client import WeaverClient
from loom.weaver.keys import Keys, secret_in
from tests.support.gateways import await_true
from tests.support.needs import skipped_if
from tests.support.network.namespaces import Hosts, missing
from tests.support.processes import read_json, start
from tests.support.weaver_commander import value_of

KILLS = int(os.environ.get("LOOM_WEAVER_KILLS", "5"))
"""How often the weaver is killed: 50 for the whole promise."""

SEED = int(os.environ.get("LOOM_SEED", "20"))

BOUND = 300.0
"""Seconds; far over what anything here takes, so that only a hang fails."""

REPLICAS = ("train_0", "train_1", "train_2")

NAME, PORT = "weaver.test", 8471

WINDOW = 60.0
"""Seconds of history in one question: the points of no more come one by one."""

pytestmark = [skipped_if(missing()), pytest.mark.slow, pytest.mark.timeout(3600)]


class MovingWeaver:
    """A weaver on one of two hosts, with a volume. A third has the replicas, which find the weaver by its name."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts = hosts
        self._folder = folder
        self.secret = folder / "secret"
        self.secret.write_text(os.urandom(32).hex())
        self.secret.chmod(0o600)
        self.keys = Keys(secret_in(self.secret))
        self._names = Path(
            "/etc/netns", hosts.name("gateway"), "hosts"
        )  # which `ip netns exec` shows as /etc/hosts
        self._names.parent.mkdir(parents=True)
        self.host = "worker1"
        self._process: subprocess.Popen[str] | None = None

    def move(self) -> None:
        """Start on the other host. Nobody else is told but the service of names."""
        self.host = "worker1" if self.host == "worker0" else "worker0"
        address = Hosts.address(self.host)
        self._names.write_text(f"127.0.0.1 localhost\n{address} {NAME}\n")  # in place, as it is mounted
        options = ["--state", f"{self._folder}/state", "--listen", f"{address}:{PORT}", "--advertise", NAME]
        options += ["--secret-file", str(self.secret), "--exit-with-parent"]
        with (self._folder / "output").open("a") as output:
            self._process = start("-m", "loom.weaver", *options, before=self._on(self.host), stderr=output)
        assert read_json(self._process)["address"] == f"tcp://{NAME}:{PORT}"

    def kill(self) -> None:
        """Kill it as its host's death would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()
        self._process = None

    def beside(self, output: Path, module: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start a program on the third host."""
        command = [*self._on("gateway"), sys.executable, "-m", module, *arguments]
        with output.open("w") as file:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=file, text=True, env={**os.environ, **environment}
            )

    def ask(self, operation: str, **arguments: Any) -> Any:
        """Ask it as a gateway would, from a fourth host."""

        async def answer() -> Any:
            client = WeaverClient(f"{Hosts.address(self.host)}:{PORT}", self.keys.gateway, BOUND)
            client.came()
            try:
                return await client.ask(operation, BOUND, user=ADMIN, **arguments)
            finally:
                client.close()

        with self._hosts.on("laptop"):
            return asyncio.run(answer())

    def _on(self, host: str) -> list[str]:
        return ["ip", "netns", "exec", self._hosts.name(host)]

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self._names.parent)


@contextmanager
def moving_weaver() -> Iterator[tuple[MovingWeaver, Hosts, Path]]:
    folder = Path(tempfile.mkdtemp(prefix="loom-test-"))
    with Hosts(workers=2) as hosts:
        weaver = MovingWeaver(hosts, folder)
        try:
            yield weaver, hosts, folder
        finally:
            weaver.close()
            print((folder / "output").read_text())
            shutil.rmtree(folder)


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines that a program has printed by now."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.guarantees(
    "weaver",
    "A weaver that is killed and started elsewhere with its volume and its name has lost nothing acknowledged: "
    "replicas and callers find it by themselves, each command is applied once, and each point is there once",
)
def test_nothing_acknowledged_is_lost_however_often_the_weavers_host_dies() -> None:
    chance = random.Random(SEED)
    with moving_weaver() as (weaver, hosts, folder):
        weaver.move()
        address = f"tcp://{NAME}:{PORT}/{weaver.keys.of(ADMIN)}"
        trainings = [
            weaver.beside(folder / one, "tests.support.weaver_training", one, "trainers", LOOM_WEAVER=address)
            for one in REPLICAS
        ]
        given = folder / "given"
        await_true(lambda: len(weaver.ask("replicas")) == len(REPLICAS), BOUND)
        arguments = (f"{NAME}:{PORT}", str(weaver.secret), str(len(REPLICAS)))
        commander = weaver.beside(given, "tests.support.weaver_commander", *arguments)

        def await_further() -> None:
            before = len(lines(given))
            await_true(lambda: len(lines(given)) > before + 1, BOUND)

        for _ in range(KILLS - 1):
            if chance.random() < 0.7:  # else also while replicas come back
                await_further()
            time.sleep(chance.uniform(0.0, 1.0))
            weaver.kill()
            weaver.move()
        await_further()
        with hosts.silence(weaver.host):  # a host that is gone, and says nothing to those who were connected
            weaver.kill()
            weaver.move()
            await_further()
        commander.communicate("", timeout=BOUND)
        weaver.ask("command", kind="stop", target="trainers", by="test")
        for one in trainings:
            one.communicate(timeout=BOUND)
        await_true(lambda: {one["state"] for one in weaver.ask("replicas")} == {"finished"}, BOUND)

        acknowledged = lines(given)
        values = [value_of(number) for number in range(1, len(acknowledged) + 1)]
        assert [one["value"] for one in acknowledged] == values
        applied = events(weaver, "applied")
        for name in REPLICAS:
            assert [line["lr"] for line in lines(folder / name)[1:]] == values
            ids = [one["command"] for one in applied if one["replica"] == name]
            assert [id for id in ids if id.startswith("command-")] == [one["id"] for one in acknowledged]
            steps = [step for _, step, _ in points(weaver, name)]
            assert steps == list(range(len(steps)))
            assert steps[-1] == weaver.ask("replica", id=name)["step"]
        assert not events(weaver, "failed")
        assert len(events(weaver, "weaver_started")) == KILLS + 1
        print(f"{KILLS} kills, {len(acknowledged)} commands, {len(steps)} points of each replica")


def events(weaver: MovingWeaver, kind: str) -> list[dict[str, Any]]:
    """All events of a kind."""
    found: list[dict[str, Any]] = []
    while more := weaver.ask("events", kind=kind, after=found[-1]["id"] if found else 0, limit=1000):
        found += more
    return found


def points(weaver: MovingWeaver, replica: str) -> list[Any]:
    """All points of a replica's loss."""
    since, now = weaver.ask("replica", id=replica)["registered"] - WINDOW, time.time()
    found: list[Any] = []
    while since < now:
        some = weaver.ask(
            "history", replica=replica, metric="loss", since=since, until=since + WINDOW, points=20_000
        )
        found += [point for point in some if not found or point[0] > found[-1][0]]
        since += WINDOW
    return found
