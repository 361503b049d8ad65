"""A training in an allocation to which Slurm does whatever it can, at random: it learns the right thing in the end.

It takes LOOM_STORM_SECONDS, by default five minutes, and the number LOOM_STORM_SEED begins the same storm again.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.needs import skipped_if
from tests.support.processes import still_there
from tests.support.slurm import SlurmCluster, SlurmJobRow, missing
from tests.system.slurm.researcher import PROGRAMS, VIA, Researcher, loom, name_of, up

SECONDS = float(os.environ.get("LOOM_STORM_SECONDS", "300"))

SEED = int(os.environ.get("LOOM_STORM_SEED", "1"))

pytestmark = [skipped_if(missing()), pytest.mark.slow, pytest.mark.timeout(6 * SECONDS)]

STEPS = 1200

PAUSE = 5.0, 20.0
"""Seconds between two blows, at least and at most."""

SHARE = 0.35
"""Of the storm's seconds, the share that the training's steps take."""


class Storm:
    """Blows that hit an allocation's job, one after the other, from a seed. A context manager, which ends it."""

    def __init__(self, cluster: SlurmCluster, seed: int) -> None:
        self._cluster = cluster
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._blow, name="storm")
        self.told: list[str] = []
        self.error: BaseException | None = None

    def _blow(self) -> None:
        kinds = [self._drain, self._requeue, self._signal, self._kill_slurmd, self._restart_controller]
        until = time.monotonic() + SECONDS
        try:
            while time.monotonic() < until and not self._over.wait(self._random.uniform(*PAUSE)):
                kind, number = self._random.choice(kinds), self._random.randint(1, len(self._cluster.nodes))
                self.told.append(f"{kind.__name__[1:]} {number}")
                print(self.told[-1], flush=True)
                kind(number)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error

    def _drain(self, number: int) -> None:
        self._cluster.scontrol("update", f"nodename=n{number}", "state=drain", "reason=storm")
        self._over.wait(self._random.uniform(*PAUSE))
        self._cluster.scontrol("update", f"nodename=n{number}", "state=resume")

    def _requeue(self, number: int) -> None:
        for row in self._running():
            self._cluster.hosts["control"].run(["scontrol", "requeue", row.id])  # it may just have ended

    def _signal(self, number: int) -> None:
        name = self._random.choice(["CONT", "USR1", "USR2", "HUP"])
        for row in self._running():  # for one that waits scancel would try again for minutes
            self._cluster.login(["scancel", f"--signal={name}", row.id])

    def _running(self) -> list[SlurmJobRow]:
        return [row for row in self._cluster.jobs() if row.state == "RUNNING"]

    def _kill_slurmd(self, number: int) -> None:
        self._cluster.kill_slurmd(number)
        self._over.wait(self._random.uniform(*PAUSE))
        self._cluster.start_slurmd(number)

    def _restart_controller(self, number: int) -> None:
        self._cluster.stop_controller()
        self._over.wait(self._random.uniform(*PAUSE))
        self._cluster.start_controller()

    def __enter__(self) -> Storm:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def resumed(cluster: SlurmCluster) -> Iterator[None]:
    """Have all nodes take jobs again afterwards."""
    try:
        yield
    finally:
        for node, state in cluster.node_states().items():
            if state.startswith(("drain", "down")):
                # One that was down is refused, if its slurmd has just come back.
                cluster.hosts["control"].run(["scontrol", "update", f"nodename={node}", "state=resume"])


def test_what_is_learnt_is_right_whatever_slurm_does_to_the_allocation(cluster: SlurmCluster) -> None:
    address = up(cluster, "--nodes", "2", "--chain", "1000", *VIA, host="laptop")
    pace = SECONDS * SHARE / STEPS
    training = (address, "/home/ada/storm", "--restarts", "1000", "--steps", str(STEPS), "--pace", str(pace))
    with Researcher(cluster, PROGRAMS / "training.py", *training, host="laptop") as one:
        one.until("step")
        began = time.monotonic()
        with resumed(cluster), Storm(cluster, SEED) as storm:
            finished = one.until("finished")
        seconds = time.monotonic() - began
    print(f"seed {SEED}: {len(storm.told)} blows; goodput {STEPS * pace / seconds:.0%} of {seconds:.0f} s")
    assert storm.error is None
    (run,) = finished["runs"]
    assert (run["name"], run["state"], run["steps"][-1]) == ("train", "completed", STEPS)
    assert loom(cluster, "slurm", "down", name_of(address)).returncode == 0
    assert cluster.jobs() == []
    left = [process for number in range(1, len(cluster.nodes) + 1) for process in cluster.processes(number)]
    assert still_there(left, 10.0) == []
