"""The driver of a training dies, alone or with its gateway: the training goes on by itself, as one run."""

from __future__ import annotations

import contextlib
import os
import signal
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from loom.weaver.run_views import RunDetails
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import Gateway, await_true, gateway_of
from tests.support.processes import still_there
from tests.system.train.test_recovery import assert_exact
from tests.system.train.trainers import BOUND, a_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 300
CHECKPOINT_EVERY = 20


def await_step(weaver: WeaverProxy, step: int) -> None:
    def there() -> bool:
        group = weaver.replicas().get("train_0")
        return group is not None and (group.step or 0) >= step

    await_true(there, BOUND)


def kill_driver(gateway: Gateway, session: str) -> None:
    os.kill(gateway.session(session)["pid"], signal.SIGKILL)


def kill_driver_and_gateway(gateway: Gateway, session: str) -> None:
    """As when the machine of both is lost."""
    drivers = gateway.drivers()
    gateway.end(signal.SIGKILL)
    for driver in drivers:
        with contextlib.suppress(psutil.NoSuchProcess):  # a spare ends with its gateway
            driver.kill()
    assert still_there(drivers, timeout=BOUND) == []
    gateway.start()


@pytest.mark.guarantees(
    "training", "A training with restarts goes on from its last checkpoint, as one run, when its driver dies"
)
def test_a_training_whose_driver_dies_goes_on_as_one_run(cluster: LocalCluster, tmp_path: Path) -> None:
    with gateway_of(cluster) as gateway:
        job = gateway.connect()
        training = a_job(steps=STEPS, checkpoints=str(tmp_path), checkpoint_every=CHECKPOINT_EVERY)
        training.start(job, restarts=2)
        job.detach()

        for number, kill in enumerate((kill_driver, kill_driver_and_gateway), start=1):
            with gateway.connect(job.session) as found:
                await_step(found.weaver, number * 4 * CHECKPOINT_EVERY)
                found.detach()
            kill(gateway, job.session)

        with gateway.connect(job.session) as found:
            summary = found.runs()["train"].result(BOUND)
            runs = found.weaver.runs("train")
            (run,) = runs
            details: RunDetails = run.info
            points = run.history("loss")

    assert_exact(summary, groups=2)
    assert (details.state, details.step, details.max_step) == ("completed", STEPS, STEPS)
    assert details.restarts >= 2
    # One curve to the last step. What was done behind a checkpoint before the driver died was done again.
    assert points[-1].step >= STEPS - 1
    back = [before.step - after.step for before, after in pairwise(points) if after.step < before.step]
    assert len(back) <= 2
    assert all(steps <= 2 * CHECKPOINT_EVERY for steps in back)
