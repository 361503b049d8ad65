"""What an actor mesh that was made, called and stopped leaves in the memory of each process.

Monarch alone and Loom do the same, each with a worker of its own. ``python -m tests.benchmarks.meshes SUBJECT`` is
the program that does it.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.caller import serve
from tests.benchmarks.caller_process import CallerProcess
from tests.benchmarks.counter import counter_class
from tests.benchmarks.machine import describe_machine

__all__ = ["MeshPlan", "measure"]

SUBJECTS = {"native": "Monarch alone", "loom": "Loom"}


@dataclass(frozen=True)
class MeshPlan:
    """How much is measured."""

    rounds: int = 3
    meshes: int = 200
    """Actor meshes of a round."""

    warm_up: int = 150
    """Meshes that are made first: allocators settle, and the names of the last ones are kept."""


def measure(plan: MeshPlan, command: str, say: Callable[[str], object]) -> BudgetReport:
    """Measure both, one after the other.

    Raises:
        CallerError: one of them failed.
    """
    figures = []
    for subject, name in SUBJECTS.items():
        with CallerProcess(name, "tests.benchmarks.meshes", (subject,)) as caller:
            say(f"{name}: starting")
            caller.await_ready()
            caller.ask("remake", meshes=plan.warm_up)
            rounds = []
            for number in range(1, plan.rounds + 1):
                say(f"{name}: round {number} of {plan.rounds}")
                rounds.append(caller.ask("remake", meshes=plan.meshes))
        figures += [
            Figure(f"{name}: {process}", "KiB a mesh", tuple(found[process] for found in rounds))
            for process in rounds[0]
        ]
    return BudgetReport("meshes", command, describe_machine(), asdict(plan), (), tuple(figures))


class Remaker:
    """Makes, calls and stops actor meshes of one actor.

    ``spawn`` makes one, ``pids`` are the processes to look at, by what they are.
    """

    def __init__(self, spawn: Callable[[str], Any], pids: Mapping[str, int], close: Callable[[], object]) -> None:
        self._spawn = spawn
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._made = 0
        self.close = close

    def remake(self, meshes: int) -> dict[str, float]:
        """Return the KiB by which each process has grown for each mesh."""
        before = self._sizes()
        for _ in range(meshes):
            self._made += 1
            actors = self._spawn(f"counters {self._made}")
            actors.add.call(1).get()
            actors.stop().get()
        return {name: (size - before[name]) / meshes / 1024 for name, size in self._sizes().items()}

    def _sizes(self) -> dict[str, int]:
        return {name: process.memory_info().rss for name, process in self._processes.items()}


def make_native() -> Remaker:
    from tests.benchmarks.native_procs import native_procs

    procs, close = native_procs(1)
    from monarch.actor import Actor, endpoint

    counter = counter_class(Actor, endpoint)
    procs.spawn("first", counter).add.call(1).get()
    (worker,) = psutil.Process().children()
    pids = {"root client": os.getpid(), "worker": worker.pid, "process with the actors": _only_child(worker)}
    return Remaker(lambda name: procs.spawn(name, counter), pids, close)


def make_loom() -> Remaker:
    import loom
    from loom_proxy.local import LocalCluster

    cluster = LocalCluster(1)
    cluster.start()
    job = loom.connect(cluster.url, cluster.token)
    procs = job.hosts.spawn_procs(per_host={"gpus": 1})
    counter = counter_class(loom.Actor, loom.endpoint)
    procs.spawn("first", counter).add.call(1).get()
    gateway, worker = cluster.pids
    pids = {
        "driver": job.run(os.getpid),
        "worker": worker,
        "process with the actors": _only_child(psutil.Process(worker)),
        "gateway": gateway,
        "laptop": os.getpid(),
    }

    def close() -> None:
        job.close()
        cluster.close()

    return Remaker(lambda name: procs.spawn(name, counter), pids, close)


def _only_child(process: psutil.Process) -> int:
    """Return the id of the Monarch process that a worker has started, beside which Loom's has a small agent."""
    (pid,) = (child.pid for child in process.children() if "monarch" in " ".join(child.cmdline()))
    return pid


if __name__ == "__main__":
    serve({"native": make_native, "loom": make_loom}[sys.argv[1]])  # type: ignore[arg-type]
