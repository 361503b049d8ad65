"""How soon training goes on at its full size after groups of `loom.train` were lost: three groups on this machine.

Each figure is the time until the last lost group has made its first step again. A killed process is sent SIGKILL. A
host that is cut off has a network of its own, which lets nothing through any more; that takes root.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import loom
from loom_proxy.local import LocalCluster
from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.machine import describe_machine
from tests.benchmarks.report import Ratio
from tests.benchmarks.written import BUDGETS
from tests.support.network.namespaces import FarCluster, missing
from tests.system.train.trainers import Watched, a_job

__all__ = ["RecoveryPlan", "measure"]

GROUPS = 3
ENDLESS = 1_000_000  # steps
WARM_UP = 10  # steps before something is lost


@dataclass(frozen=True)
class RecoveryPlan:
    """How often each loss is measured."""

    rounds: int = 3


def measure(plan: RecoveryPlan, command: str, progress: Callable[[str], object]) -> BudgetReport:
    """Measure each loss in turn, with jobs of their own."""
    seconds: dict[str, list[float]] = {
        "one group killed, one spare": [],
        "two groups killed, one spare": [],
        "all groups killed, a checkpoint": [],
        "successor of a group that was cut off": [],
    }
    left_out: list[float] = []
    why_not = missing()
    for number in range(plan.rounds):
        with LocalCluster(2) as cluster, loom.connect(cluster.url, cluster.token) as job:
            job.print_logs = False
            for name, measured in zip(seconds, (_one_killed, _two_killed, _all_killed), strict=False):
                progress(f"round {number + 1} of {plan.rounds}: {name}")
                seconds[name].append(measured(job))
        if not why_not:
            progress(f"round {number + 1} of {plan.rounds}: one group cut off, one spare")
            waited, joined = _one_cut_off()
            left_out.append(waited)
            seconds["successor of a group that was cut off"].append(joined)
    budgets = [
        Ratio(name, "seconds until all train", BUDGETS[name].bound, BUDGETS[name].value, tuple(values))
        for name, values in seconds.items()
        if values
    ]
    figures = [Figure("a group that is cut off", "s until it is given up", tuple(left_out))] if left_out else []
    notes = (f"no group was cut off: {why_not}",) if why_not else ()
    return BudgetReport(
        "recovery", command, describe_machine(), asdict(plan), tuple(budgets), tuple(figures), notes
    )


@contextlib.contextmanager
def _training(job: loom.Job, **settings: object) -> Iterator[Watched]:
    watched = Watched(job, a_job(ENDLESS, GROUPS, timeouts=loom.train.Timeouts(), **settings))
    try:
        watched.await_steps(WARM_UP)
        yield watched
    finally:
        watched.stop()


def _kill(watched: Watched, replicas: list[str]) -> float:
    """Kill the processes of some groups; return when."""
    groups = watched.pids()
    for replica in replicas:
        for pid in groups[replica]:
            os.kill(pid, signal.SIGKILL)
    return time.time()


def _one_killed(job: loom.Job) -> float:
    with _training(job, spares=1) as watched:
        watched.await_spare()
        killed = _kill(watched, ["train_1"])
        return watched.await_event("group_restored").time - killed


def _two_killed(job: loom.Job) -> float:
    with _training(job, spares=1) as watched:
        watched.await_spare()
        killed = _kill(watched, ["train_1", "train_2"])
        return watched.await_event("group_restored", 2).time - killed


def _all_killed(job: loom.Job) -> float:
    with (
        tempfile.TemporaryDirectory() as folder,
        _training(job, checkpoints=folder, checkpoint_every=10) as watched,
    ):
        watched.await_event("checkpoint_written")
        killed = _kill(watched, list(watched.pids()))
        return watched.await_event("group_restored", GROUPS).time - killed


def _one_cut_off() -> tuple[float, float]:
    """Return the seconds until the group was given up, and from then on until its successor trained."""
    with (
        FarCluster(workers=GROUPS) as far,
        far.connected() as job,
        _training(job, spares=1) as watched,
    ):
        watched.await_spare()
        (spare,) = watched.status().spares
        host = next(number for number in (2, 1) if number != spare.host)
        began = time.time()
        with far.hosts.silence(f"worker{host}"):
            failed = watched.await_event("group_failed").time
            restored = watched.await_event("group_restored").time
        return failed - began, restored - failed
