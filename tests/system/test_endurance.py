"""Whatever is killed, at whatever moment: no wrong result, and nothing is left behind."""

from __future__ import annotations

import json
import queue
import random
import subprocess
import threading
import time
from typing import Any

import psutil
import pytest

from loom_proxy.local import LocalCluster
from tests.support.gateways import TOKEN, Gateway, await_end, gateway_of
from tests.support.processes import start
from tests.support.workers import workers_of

ROUNDS = 50

SEED = 20_26

COUNTS = 5
"""Counts between two kills, at least."""

BOUND = 90.0
"""Seconds between two lines of the program, whatever was killed."""


class Client:
    """The user's program, and what it has said."""

    def __init__(self, gateway: Gateway, session: str | None = None) -> None:
        arguments = [gateway.url, TOKEN, *([] if session is None else [session])]
        self._errors = (gateway.folder / "client").open("a+")
        self._process = start("-m", "tests.support.endurance_client", *arguments, stderr=self._errors)
        self._gateway = gateway
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.pids: list[int] = []
        self.session = session
        self.count = 0
        self.beginnings = 0
        self.attached: int | None = None
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def take(self, counts: int) -> None:
        """Take in what the program says until it has confirmed so many counts."""
        while counts:
            counts -= self._take_next(BOUND)

    def await_beginning(self) -> None:
        """Take in what the program says until it has begun again."""
        begun = self.beginnings
        while self.beginnings == begun:
            self._take_next(BOUND)

    def _take_next(self, timeout: float) -> bool:
        line = self._lines.get(timeout=timeout)
        assert line is not None, f"the client ended: {self._output()}"
        return self._take(line)

    def _output(self) -> str:
        self._errors.seek(0)
        outputs = sorted(self._gateway.state.glob("driver-*.out"), key=lambda path: path.stat().st_mtime)
        drivers = [path.read_text(errors="replace")[-8000:] for path in outputs[-2:]]
        return "\n".join([self._errors.read()[-4000:], "the drivers' output:", *drivers])

    def _take(self, line: dict[str, Any]) -> bool:
        self.session = line.get("session", self.session)
        self.pids += line.get("pids", [])
        if "begun" in line:
            self.count = 0
            self.beginnings += 1
        elif "attached" in line:
            self.attached = self.count = line["attached"]
        else:
            assert line["count"] == self.count + 1
            self.count += 1
        return "count" in line

    def kill(self) -> None:
        """Kill the program and take in its last words."""
        self._process.kill()
        self._process.wait()
        while (line := self._lines.get(timeout=BOUND)) is not None:
            self._take(line)
        self._process.communicate()
        self._errors.close()


@pytest.mark.guarantees(
    "nothing lost",
    "Whatever is killed, 50 times, no result is wrong and nothing is left behind; calls, runs and "
    "commands beside each other, on a line that is cut, are done once",
)
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whatever_is_killed_nothing_is_lost_doubled_or_left_behind(own_cluster: LocalCluster) -> None:
    choose = random.Random(SEED)
    victims = [choose.choice(["gateway", "driver", "worker", "client"]) for _ in range(ROUNDS)]
    pids: list[int] = []
    with gateway_of(own_cluster) as gateway, workers_of(own_cluster) as workers:
        client = Client(gateway)
        for victim in victims:
            client.take(COUNTS)
            time.sleep(choose.uniform(0, 0.3))  # somewhere in a later one
            if victim == "gateway":
                gateway.end()
                time.sleep(choose.uniform(0, 1))
                gateway.start()
            elif victim == "driver":
                assert client.session is not None
                psutil.Process(gateway.session(client.session)["pid"]).kill()
                client.await_beginning()
            elif victim == "worker":
                host = choose.randrange(2)
                workers.kill(host)
                time.sleep(choose.uniform(0, 1))
                workers.start(host)
                client.await_beginning()
            else:
                client.kill()
                killed, client = client, Client(gateway, client.session)
                pids += killed.pids
                client.take(1)
                # The count under way was done once or not at all.
                assert client.attached in (killed.count, killed.count + 1)
        client.take(COUNTS)
        client.kill()
        pids += client.pids
    for pid in pids:
        await_end(pid)
    assert not gateway.folder.exists()
