"""Stock training scripts under ``loom run``, seen and steered from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loom.weaver.views import ReplicaInfo
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import TOKEN, Gateway, await_true
from tests.support.paths import ROOT

__all__ = ["BOUND", "FOREVER", "LOOM", "SCRIPTS", "Command", "Run", "Stack", "running"]

SCRIPTS = Path(__file__).with_name("scripts")

LOOM = [sys.executable, "-c", "import sys; from loom.cli import main; main()"]

BOUND = 240.0
"""Seconds in which a script has imported its libraries and made a step, on a busy machine."""

FOREVER = 10_000_000
"""Steps of a script that is told to stop."""

Command = Callable[[Path, int], Sequence[str]]
"""The command of a script, for a folder of its own and a number of steps."""


@dataclass(frozen=True)
class Stack:
    """A stock script, and what Loom makes of it."""

    name: str
    command: Command
    ranks: int = 1
    metric: str = "loss"
    """One that it logs at each step."""
    saves: str = ""
    """A pattern of paths in its folder that a checkpoint leaves; empty if it refuses to save."""
    evaluates: bool = False
    config: tuple[str, ...] = ()
    """Further keys that it takes, each with a value."""
    needs: tuple[str, ...] = ()
    """Modules without which it cannot run."""

    def __str__(self) -> str:
        return self.name

    @property
    def replicas(self) -> list[str]:
        return [f"{self.name}_{rank}" for rank in range(self.ranks)]


def environment(gateway: Gateway) -> dict[str, str]:
    """What scripts and commands run in: nothing is downloaded, and a process takes one core."""
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    mine = {"LOOM_URL": gateway.url, "LOOM_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **quiet}
    left_out = ("LOOM_WEAVER", "LOOM_RUN", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    return {**{name: value for name, value in os.environ.items() if name not in left_out}, **mine}


class Run:
    """A script under ``loom run``."""

    def __init__(self, stack: Stack, gateway: Gateway, folder: Path) -> None:
        self.stack = stack
        self.gateway = gateway
        self.weaver = WeaverProxy(gateway.url, TOKEN)
        self.environment = environment(gateway)
        self.output = folder / "output"
        command = [*LOOM, "run", "--name", stack.name, "--", *stack.command(folder, FOREVER)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
            )

    def replicas(self) -> list[ReplicaInfo]:
        """The ranks that the weaver knows, in their order."""
        known = self.weaver.replicas()
        return [known[id] for id in self.stack.replicas if id in known]

    def await_ranks(self, condition: Callable[[ReplicaInfo], Any], bound: float = BOUND) -> list[ReplicaInfo]:
        """Wait until a condition holds for all ranks."""
        found: list[ReplicaInfo] = []

        def hold() -> bool:
            assert self.process.poll() is None, f"it ended:\n{self.output.read_text()[-3000:]}"
            found[:] = self.replicas()
            return len(found) == self.stack.ranks and all(map(condition, found))

        try:
            await_true(hold, bound)
        except AssertionError:
            raise AssertionError(f"{found}\n{self.output.read_text()[-3000:]}") from None
        return found

    def await_steps(self, more: int = 3) -> None:
        """Wait until all ranks have made some more steps."""
        before = {one.id: one.step or 0 for one in self.replicas()}
        self.await_ranks(lambda one: one.connected and (one.step or 0) >= before[one.id] + more)

    def loom(self, *words: str) -> tuple[int, dict[str, Any]]:
        """Give a command of the command line to all ranks; return its exit code, and what each rank made of it."""
        command = [*LOOM, *words, "--replica", self.stack.name, "--timeout", "60", "--json"]
        ended = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=BOUND)
        assert ended.stdout, ended.stderr
        return ended.returncode, json.loads(ended.stdout)["outcomes"]

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.wait()


@contextmanager
def running(stack: Stack, gateway: Gateway, folder: Path) -> Iterator[Run]:
    run = Run(stack, gateway, folder)
    try:
        yield run
    finally:
        run.end()
