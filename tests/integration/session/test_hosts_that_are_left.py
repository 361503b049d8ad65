"""Hosts that are about to be left: a session is told before, and its next mesh is without them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.threadlet import evictions
from tests.support.actors import Counter
from tests.support.listed_workers import Listed, gateway_on, listed

__all__ = ["listed"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

BOUND = 60.0


class Trainer(loom.Actor):
    """Goes on when its worker was told to end, as a training does."""

    def __init__(self) -> None:
        self._saves = 0
        evictions.add(self)

    def evict(self) -> None:
        self._saves += 1

    @loom.endpoint
    def saves(self) -> int:
        return self._saves

    @loom.endpoint
    def leave(self) -> None:
        os._exit(0)


def details_of(job: loom.Job, name: str) -> dict[str, Any]:
    found = next((event for event in job.events(BOUND) if event.name == name), None)
    assert found is not None, f"no event {name}"
    return dict(found.details)


def test_a_worker_that_gets_sigterm_tells_the_session_before_it_is_gone(listed: Listed) -> None:
    listed.add()
    listed.add(None, "--grace", "50")
    listed.write()
    with gateway_on("--workers", f"file:{listed.path}") as gateway, gateway.connect() as job:
        trainers = job.hosts.spawn_procs().spawn("trainers", Trainer)
        assert list(trainers.saves.call().get(BOUND).values()) == [0, 0]

        listed.terminate(1)
        told = details_of(job, "host_draining")
        living = len(job.living_hosts())
        saves = list(trainers.saves.call().get(BOUND).values())
        trainers.slice(hosts=1).leave.broadcast()
        lost = details_of(job, "host_lost")

        assert told["reason"] == "its worker was told to end: SIGTERM; what trains may go on for 50 s"
        assert told["host"] == lost["host"] == 1
        assert living == len(job.living_hosts()) == 1
        assert saves == [0, 1]
        assert trainers.slice(hosts=0).saves.call_one().get(BOUND) == 0


def test_a_host_that_is_drained_is_in_no_mesh_of_living_hosts_until_it_is_not(
    listed: Listed, tmp_path: Path
) -> None:
    draining = tmp_path / "draining"
    listed.add()
    listed.add(None, "--draining-file", str(draining))
    listed.write()
    with gateway_on("--workers", f"file:{listed.path}") as gateway, gateway.connect() as job:
        counters = job.hosts.spawn_procs().spawn("counters", Counter)
        assert list(counters.add.call(1).get(BOUND).values()) == [1, 1]

        draining.write_text("its fan is broken\n")
        told = details_of(job, "host_draining")
        alone = job.living_hosts().spawn_procs().spawn("alone", Counter)

        assert (told["host"], told["reason"]) == (1, "its fan is broken")
        assert alone.add.call_one(1).get(BOUND) == 1
        assert list(counters.add.call(1).get(BOUND).values()) == [2, 2], "nothing ends by it"
        draining.unlink()
        until = time.monotonic() + BOUND
        while len(job.living_hosts()) < 2:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert list(job.living_hosts().spawn_procs().spawn("both", Counter).add.call(1).get(BOUND).values()) == [
            1,
            1,
        ]
