"""`loom.unhandled_fault_hook`: what assigning it does on the laptop and in the driver."""

from __future__ import annotations

import queue
import subprocess
import sys
from typing import Any

import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter

BOUND = 30.0
"""Seconds; far over what detection takes, so that only a hang fails."""


def fail_unheard(job: loom.Job, name: str) -> None:
    job.hosts.spawn_procs().spawn(name, Counter).fail.broadcast(f"nobody listens to {name}")


def test_a_hook_on_the_laptop_gets_the_failures_from_then_on(
    job: loom.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    early: queue.Queue[Any] = queue.Queue()
    remove = job.on_failure(early.put)
    fail_unheard(job, "before")
    assert "nobody listens to before" in early.get(timeout=BOUND).report()
    remove()
    told: queue.Queue[Any] = queue.Queue()

    monkeypatch.setattr(loom, "unhandled_fault_hook", told.put)
    fail_unheard(job, "after")

    failure = told.get(timeout=BOUND)
    while not failure.mesh_name.startswith("after"):  # a second actor of the first mesh
        failure = told.get(timeout=BOUND)
    assert "nobody listens to after" in failure.report()
    assert list(job.hosts.spawn_procs().spawn("more", Counter).add.call(1).get(timeout=BOUND).values()) == [1, 1]


PROGRAM = """
import sys, threading
import loom
from tests.support.actors import Counter

def stop(failure):
    sys.exit(3)

job = loom.connect(sys.argv[1], sys.argv[2])
loom.unhandled_fault_hook = stop
job.hosts.slice(hosts=0).spawn_procs().spawn("fragile", Counter).fail.broadcast("nobody listens")
try:
    threading.Event().wait()
except KeyboardInterrupt:
    job.close()
    sys.exit(7)
"""


def test_a_hook_on_the_laptop_that_raises_interrupts_the_program_as_monarchs(cluster: LocalCluster) -> None:
    command = [sys.executable, "-c", PROGRAM, cluster.url, cluster.token]

    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)

    assert done.returncode == 7, done.stderr
    assert "Unhandled monarch error on the root actor, hostname=" in done.stderr
    assert "nobody listens" in done.stderr
    assert "SystemExit: 3" in done.stderr


def fail_with_hook(hosts: Any, which: str) -> tuple[str, bool, bool]:
    """Assign a hook in the driver that raises; return what it got, and whether its type is Monarch's."""
    import monarch.actor

    told: queue.Queue[Any] = queue.Queue()
    at_first = loom.unhandled_fault_hook, monarch.actor.unhandled_fault_hook

    def hook(failure: Any) -> None:
        told.put(failure)
        sys.exit(3)

    home = loom if which == "loom" else monarch.actor
    home.unhandled_fault_hook = hook
    hosts.spawn_procs().spawn("fragile", Counter).fail.broadcast("nobody listens")
    failure = told.get(timeout=BOUND)
    loom.unhandled_fault_hook, monarch.actor.unhandled_fault_hook = at_first
    return failure.mesh_name, type(failure) is monarch.actor.MeshFailure, isinstance(failure, loom.MeshFailure)


@pytest.mark.parametrize("which", ["loom", "monarch"])
def test_a_hook_in_the_driver_gets_monarchs_failure_besides_the_laptop(job: loom.Job, which: str) -> None:
    told: queue.Queue[Any] = queue.Queue()
    job.on_failure(told.put)

    name, *are_monarchs = job.run(fail_with_hook, job.hosts, which)

    assert name.startswith("fragile")
    assert are_monarchs == [True, True]
    assert "nobody listens" in told.get(timeout=BOUND).report()
    fail_unheard(job, "later")  # the hook that raises is not assigned any more, and Loom's is in its place
    while not told.get(timeout=BOUND).mesh_name.startswith("later"):
        pass
    assert not job.closed
