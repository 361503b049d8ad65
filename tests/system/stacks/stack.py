"""Stock training scripts under ``loom run``, seen and steered from outside."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from loom.weaver.views import Delta, ReplicaInfo, Snapshot
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import TOKEN, Gateway, await_true
from tests.support.paths import ROOT
from tests.support.weavers import await_weaver

__all__ = [
    *("BOUND", "FOREVER", "LOOM", "SCRIPTS", "Command", "Observed", "Page", "Run", "Stack"),
    *("await_observed", "end_observed", "environment", "observed", "running"),
]

SCRIPTS = Path(__file__).with_name("scripts")

OBSERVER = Path(__file__).with_name("observer")

LOOM = [sys.executable, "-c", "import sys; from loom.cli import main; main()"]

BOUND = 600.0
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
    begins_together: bool = True
    """Whether its ranks make their first step together, so that the same step has the same number in each."""

    def __str__(self) -> str:
        return self.name

    @property
    def replicas(self) -> list[str]:
        return [f"{self.name}_{rank}" for rank in range(self.ranks)]


def environment(gateway: Gateway, folder: Path) -> dict[str, str]:
    """What scripts and commands run in: nothing is downloaded, a process takes one core, and is observed."""
    seen = folder / "observed"
    shutil.rmtree(seen, ignore_errors=True)
    seen.mkdir(parents=True)
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    quiet |= {"PYTHONPATH": str(OBSERVER), "LOOM_OBSERVED": str(seen)}
    mine = {"LOOM_URL": gateway.url, "LOOM_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **quiet}
    left_out = ("LOOM_WEAVER", "LOOM_RUN", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    return {**{name: value for name, value in os.environ.items() if name not in left_out}, **mine}


@dataclass
class Observed:
    """What a rank has written down of itself, without Loom: see ``observer/sitecustomize.py``."""

    made: list[float] = field(default_factory=list)
    """When it had made its first and its second step, in seconds since the epoch."""
    times: list[float] = field(default_factory=list)
    """When it began each of its steps, in seconds since the epoch."""
    rates: list[float] = field(default_factory=list)
    """The learning rate of each step."""
    heard: dict[str, int] = field(default_factory=dict)
    """The steps that it had begun when a command came, by the command's id."""

    def begun(self, moment: float) -> int:
        """Return the steps that it had begun at a time."""
        return bisect_right(self.times, moment)

    def first_with(self, rate: float) -> int:
        """Return the number of the first step with a learning rate."""
        return self.rates.index(rate) + 1


def observed(folder: Path) -> dict[int, Observed]:
    """Return what each rank of the last run in a folder has written down."""
    found: dict[int, Observed] = {}
    for file in sorted((folder / "observed").glob("*"), key=lambda file: file.stat().st_mtime):
        made = Observed()
        for line in file.read_text().splitlines():
            moment, rank, *what = json.loads(line)
            if what == ["made"]:
                made.made.append(moment)
            elif len(what) == 1:
                made.heard[what[0]] = len(made.times)
            else:
                made.times.append(moment)
                made.rates.append(what[1])
        if made.times:
            found[rank] = made
    return found


def await_observed(folder: Path, ranks: int, steps: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until all ranks have begun some steps."""

    def hold() -> bool:
        assert process.poll() is None, "it ended"
        found = observed(folder)
        return len(found) == ranks and all(len(one.times) >= steps for one in found.values())

    await_true(hold, BOUND)


def end_observed(folder: Path) -> None:
    """Kill the processes of the last run in a folder. Ranks have sessions of their own, and outlive a launcher."""
    left = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.environ().get("LOOM_OBSERVED") == str(folder / "observed"):
                one.kill()
                left.append(one)
    psutil.wait_procs(left, BOUND)


class Page:
    """A watcher of the weaver, as the page is one: when it first had each thing to show of each replica."""

    def __init__(self, weaver: WeaverProxy) -> None:
        self.first: dict[tuple[str, str], float] = {}
        """Seconds since the epoch, by replica and by ``step``, ``rate``, or the name of a metric."""
        self.ended = False
        self._weaver = weaver
        self._steps: dict[str, int] = {}
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        for update in self._weaver.watch(BOUND):
            if self.ended:
                return
            now = time.time()
            if isinstance(update, Delta):
                for id, changes in update.replicas.items():
                    self._see(now, id, changes["step"], changes["metrics"])
            elif isinstance(update, Snapshot):
                for one in update.replicas.values():
                    self._see(now, one.id, one.step, one.metrics)

    def _see(self, now: float, id: str, step: int | None, metrics: Mapping[str, float]) -> None:
        seen = list(metrics)
        if step is not None:
            seen.append("step")
            if self._steps.setdefault(id, step) != step:
                seen.append("rate")  # the time between the two
        for what in seen:
            self.first.setdefault((id, what), now)


class Run:
    """A script under ``loom run``."""

    def __init__(self, stack: Stack, gateway: Gateway, folder: Path) -> None:
        self.stack = stack
        self.gateway = gateway
        self._folder = folder
        self.weaver = WeaverProxy(gateway.url, TOKEN)
        await_weaver(self.weaver)  # else the script runs without
        self.page = Page(self.weaver)
        self.environment = environment(gateway, folder)
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
        code, answer = self.answer(*words)
        return code, answer["outcomes"]

    def answer(self, *words: str) -> tuple[int, dict[str, Any]]:
        """Give a command as `loom`; return its exit code, and the answer, which has the command's id, too."""
        command = [*LOOM, *words, "--replica", self.stack.name, "--timeout", "60", "--json"]
        ended = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=BOUND)
        assert ended.stdout, ended.stderr
        return ended.returncode, json.loads(ended.stdout)

    def end(self) -> None:
        self.page.ended = True
        end_observed(self._folder)
        self.process.wait()


@contextmanager
def running(stack: Stack, gateway: Gateway, folder: Path) -> Iterator[Run]:
    run = Run(stack, gateway, folder)
    try:
        yield run
    finally:
        run.end()
