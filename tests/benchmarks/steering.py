"""How soon a command is applied, and a dead process noticed: from Python through gateway and weaver to a threadlet.

``python -m tests.benchmarks.steering REPLICA`` is the training process that is told: a step each millisecond.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import loom
from loom import Actor, endpoint
from loom.weaver.views import Snapshot, WeaverEvent
from loom_proxy.local import LocalCluster
from tests.benchmarks.caller_process import ROOT, CallerError

__all__ = ["Commands", "Steering", "running"]

STEP = 0.001
"""Seconds."""

BOUND = 60.0
"""Seconds; far over what anything takes."""

WARM_UP = 5
"""Commands before the first that counts."""


@dataclass(frozen=True)
class Commands:
    """Seconds of each command, from the call of ``job.weaver.update_config``."""

    applied: tuple[float, ...]
    """Until the training process' handler was called."""
    known: tuple[float, ...]
    """Until its acknowledgement was there."""


class Mortal(Actor):
    """A training process that Loom has spawned, and that is killed."""

    @endpoint
    def begin(self) -> tuple[str, int]:
        """Become a replica; its id, and the process'."""
        self.threadlet = loom.Threadlet()
        return self.threadlet.replica_id, os.getpid()


class Steering:
    """A job on a cluster of this machine."""

    def __init__(self, job: loom.Job) -> None:
        self._job = job
        self._meshes = 0

    def commands(self, count: int) -> Commands:
        """Tell a training process that Loom did not spawn, ``count`` times, one after the other."""
        weaver, replica = self._job.weaver, "steered"
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.steering", replica],
            cwd=ROOT,
            env={**os.environ, "LOOM_WEAVER": weaver.address()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        applied, known = [], []
        try:
            if process.stdout.readline() != "connected\n":
                raise CallerError("the training process did not find the weaver")
            for _ in range(WARM_UP + count):
                given = time.monotonic()
                outcome = weaver.update_config(replica, given=given).get(BOUND)[replica]
                known.append(time.monotonic() - given)
                assert outcome.ok, outcome.reason
                applied.append(json.loads(process.stdout.readline()))
            weaver.stop(replica).get(BOUND)
            process.wait(BOUND)
        finally:
            process.kill()
            process.communicate()
        return Commands(tuple(applied[WARM_UP:]), tuple(known[WARM_UP:]))

    def kills(self, count: int) -> list[float]:
        """Kill ``count`` processes with SIGKILL; seconds until a watcher has the event that each has failed."""
        return [self._kill() for _ in range(count)]

    def _kill(self) -> float:
        self._meshes += 1
        procs = self._job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 1}, name=f"mortal{self._meshes}")
        replica, pid = procs.spawn("mortal", Mortal).begin.call_one().get()
        updates = self._job.weaver.watch(timeout=BOUND)
        for update in updates:
            there = update.replicas if isinstance(update, Snapshot) else {}
            if replica in there or (isinstance(update, WeaverEvent) and update.replica == replica):
                break
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        for update in updates:
            if isinstance(update, WeaverEvent) and (update.kind, update.replica) == ("failed", replica):
                took = time.monotonic() - killed
                procs.stop().get()
                return took
        raise CallerError(f"nobody noticed in {BOUND:g} s that process {pid} is dead")


@contextmanager
def running() -> Iterator[Steering]:
    """A cluster with one host, and a job on it."""
    with LocalCluster(1) as cluster, loom.connect(cluster.url, cluster.token) as job:
        yield Steering(job)


def train(replica: str) -> None:
    """The training process: it prints how long each command was on its way."""
    threadlet = loom.Threadlet(replica)

    @threadlet.handler("given")
    def take(given: float) -> None:
        print(json.dumps(time.monotonic() - given), flush=True)

    while not threadlet.connected:
        time.sleep(STEP)
    print("connected", flush=True)
    while not threadlet.should_stop:
        time.sleep(STEP)
        threadlet.check_and_apply_updates()


if __name__ == "__main__":
    train(sys.argv[1])
