"""A training for the tests of the page: actors in a session, which fit a line by gradient descent and print."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import loom
from loom import Actor, current_rank, endpoint
from loom.devices import own_devices
from loom_proxy.local import LocalCluster
from tests.support.gateways import BOUND, Gateway, await_true, gateway_of

GROUP = "fitters"

RANKS = 2

SHARED_DEVICE = "CPU-of-both"
"""A device of each replica, beside one of its own."""

STEP = 0.02
"""Seconds at least."""

RATE = 0.25

PRINT_EVERY = 10
"""Steps."""


class Fitter(Actor):
    """Fits a line to points around y = 2 x + 1.

    Every tenth step is printed in green, and every hundredth on standard error.
    """

    @endpoint
    def train(self) -> int:
        """Train until told to stop; return the number of steps."""
        rank = current_rank()["gpus"]
        chance = random.Random(rank)
        points = [(place / 50, 2 * place / 50 + 1 + chance.gauss(0, 0.1)) for place in range(50)]
        values = {"slope": 0.0, "offset": 0.0, "rate": RATE}

        def gradient_of_the_squares() -> tuple[float, float, float]:
            until = time.perf_counter() + STEP / 4
            while True:
                errors = [values["slope"] * x + values["offset"] - y for x, y in points]
                if time.perf_counter() >= until:  # so long that a sampling profiler finds it
                    break
            loss = sum(error * error for error in errors) / len(errors)
            slope = sum(2 * error * x for error, (x, _) in zip(errors, points, strict=True)) / len(errors)
            return loss, slope, sum(2 * error for error in errors) / len(errors)

        (own,) = own_devices()
        devices = [own, replace(own, uuid=SHARED_DEVICE)]
        threadlet = loom.Threadlet(devices=devices, config={"learning_rate": RATE})

        @threadlet.handler("learning_rate")
        def set_learning_rate(value: float) -> None:
            values["rate"] = value

        @threadlet.on_device_change
        def note_device(uuid: str, usable: bool) -> None:
            print(f"{uuid} is {'in' if usable else 'out of'} use", flush=True)

        number = 0
        while not threadlet.should_stop:
            with threadlet.step(number) as step:
                loss, slope, offset = gradient_of_the_squares()
                values["slope"] -= values["rate"] * slope
                values["offset"] -= values["rate"] * offset
                step.metrics["loss"] = loss
                step.metrics["slope"] = values["slope"]
                time.sleep(STEP / 2)
            if number % PRINT_EVERY == 0:
                print(f"\x1b[32mstep {number} of rank {rank}\x1b[0m", flush=True)
            if number % 100 == 0:
                print(f"a hundred more of rank {rank}", file=sys.stderr, flush=True)
            number += 1
        threadlet.close()
        return number


@dataclass(frozen=True)
class Fitting:
    """A training that runs, and the gateway that it is seen on."""

    gateway: Gateway
    job: loom.Job
    replicas: tuple[str, ...]


@contextmanager
def fitting(cluster: LocalCluster, *options: str) -> Iterator[Fitting]:
    """A gateway of its own, with a session in which `RANKS` injectable processes of one host train.

    Args:
        cluster: the workers.
        options: of the gateway.
    """
    with gateway_of(cluster, *options) as gateway, gateway.connect() as job:
        hosts = job.hosts.slice(hosts=0).as_injectable()
        procs = hosts.spawn_procs(per_host={"gpus": RANKS}, name=GROUP)
        procs.logging_option(stream_to_client=False)
        fitters = procs.spawn("fitters", Fitter)
        trained = fitters.train.call()
        trained.add_done_callback(lambda done: None)  # so that it leaves at once
        replicas = tuple(f"{GROUP}_{rank}@{job.session}" for rank in range(RANKS))

        def all_train() -> bool:
            known = job.weaver.replicas()
            return all(one in known and (known[one].step or 0) > 0 for one in replicas)

        await_true(all_train, BOUND)
        yield Fitting(gateway, job, replicas)
