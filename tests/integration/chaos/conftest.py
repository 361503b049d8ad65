"""A fake weaver for each test, and training processes that take faults from it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.loom.threadlet.fake_weaver import BOUND, Connection, FakeWeaver

ENDLESS = """
import itertools, time
import loom
t = loom.Threadlet("train_0", group="train")
for n in itertools.count():
    with t.step(n) as step:
        time.sleep(0.005)
        step.metrics["loss"] = 1.0 / (n + 1)
"""
"""A training that goes on until it is struck."""


class Struck:
    """A training process, and the weaver's connection with it."""

    def __init__(self, weaver: FakeWeaver, process: subprocess.Popen[str], agents: Path) -> None:
        self.weaver = weaver
        self.process = process
        self.agents = agents
        """The folder of the faults that are held on this host."""
        self.connection: Connection = weaver.welcome()[0]

    @property
    def pid(self) -> int:
        return self.process.pid

    def inject(self, fault: str, /, duration: float | None = None, **params: Any) -> str:
        """Tell it to suffer a fault; the command's id."""
        more = {} if duration is None else {"duration": duration}
        return self.weaver.command(self.connection, "inject", fault=fault, params=params, **more)

    def injected(self, fault: str, /, duration: float | None = None, **params: Any) -> dict[str, Any]:
        """As `inject`; what it acknowledged."""
        ident = self.inject(fault, duration, **params)
        _, outcome = self.connection.ack(ident)
        assert outcome["ok"], outcome["reason"]
        return dict(outcome["evidence"])

    def goodbye(self) -> list[Any] | None:
        """The last words before the end of the connection; None where there were none."""
        while (frame := self.connection.receive()) is not None:
            if frame[0] == "status":
                self.connection.send("stored", frame[1][-1][0])
            if frame[0] == "bye":
                self.connection.close()
                return frame[1:]
        return None

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(BOUND)


@pytest.fixture
def weaver() -> Iterator[FakeWeaver]:
    running = FakeWeaver()
    yield running
    running.stop()


@pytest.fixture
def struck(weaver: FakeWeaver, tmp_path: Path) -> Iterator[Callable[..., Struck]]:
    """Starts training processes that are marked as injectable."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str = ENDLESS, injectable: str = "1") -> Struck:
        path = tmp_path / f"train{len(started)}.py"
        path.write_text(program)
        environment = {
            **os.environ,
            "LOOM_WEAVER": weaver.address,
            "LOOM_INJECTABLE": injectable,
            "LOOM_CHAOS_DIR": str(tmp_path / "agents"),
        }
        command, null = [sys.executable, str(path)], subprocess.DEVNULL
        started.append(subprocess.Popen(command, env=environment, stdout=null, stderr=null, text=True))
        return Struck(weaver, started[-1], tmp_path / "agents")

    yield start
    for process in started:
        process.kill()
        process.wait(BOUND)
