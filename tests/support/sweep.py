"""A sweep of small trainings for the tests of runs: each fits a line by gradient descent, and ends in its own way.

``python -m tests.support.sweep NAME RANK RATE END`` trains `STEPS` steps. ``END`` is ``complete``; ``cut``, which
stops in the middle; ``crash``; or ``stay``, which goes on until it is told to stop.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.processes import start

STEPS = 60

STEP = 0.004
"""Seconds at least."""


def train(name: str, rank: int, rate: float, end: str) -> None:
    """The training process. With a rate above 1 it diverges."""
    from loom.threadlet import Threadlet

    chance = random.Random(rank)
    points = [(place / 10, 2 * place / 10 + chance.gauss(0, 0.05)) for place in range(-10, 11)]
    optimizer = {"rate": rate}
    config = {"learning_rate": rate, "optim/decay": 0.1 if rate < 0.1 else 0.0, "optimizer": "sgd"}
    threadlet = Threadlet(f"{name}_{rank}", group=name, config=config)

    @threadlet.handler("learning_rate")
    def set_learning_rate(value: float) -> None:
        optimizer["rate"] = value

    slope, number = 0.0, 0
    last = STEPS if end == "complete" else 1_000_000 if end == "stay" else STEPS // 2
    while number < last and not threadlet.should_stop:
        with threadlet.step(number, max_step=1_000_000 if end == "stay" else STEPS) as step:
            errors = [slope * x - y for x, y in points]
            gradient = 5 * sum(e * x for e, (x, _) in zip(errors, points, strict=True)) / len(points)
            slope -= optimizer["rate"] * gradient
            step.metrics["train/loss"] = sum(min(e * e, 1e300) for e in errors) / len(points)
            step.metrics["eval/acc"] = 1.0 / (1.0 + abs(slope - 2))
            time.sleep(STEP)
        number += 1
    if end == "crash":
        raise RuntimeError("the loss is lost")
    threadlet.close()


@contextmanager
def started(
    address: str, name: str, rate: float, end: str, ranks: int = 1
) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of one run, which are killed in the end if they have not ended."""
    environment = {**os.environ, "LOOM_WEAVER": address, "LOOM_RUN_ID": f"{name}-{rate:g}-{end}"}
    words = ("-m", "tests.support.sweep", name)
    processes = [start(*words, str(rank), str(rate), end, env=environment) for rank in range(ranks)]
    try:
        yield processes
    finally:
        for one in processes:
            one.kill()
            one.wait()


def ended(address: str, name: str, rate: float, end: str) -> str:
    """Let a training run to its end; return the id of its run."""
    with started(address, name, rate, end) as (process,):
        process.wait(60)
    return f"{name}-{rate:g}-{end}"


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
