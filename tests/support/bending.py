"""A training whose loss bends when its learning rate changes, for the tests of the page's view of a run.

``python -m tests.support.bending RANK`` fits a plane by stochastic gradient descent on small batches. Its loss has
a floor, which is as high as the learning rate is large.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from tests.support.processes import start

RATE = 0.5
"""So large that the loss stays at a floor far above the noise of the points."""

FEATURES = 20

BATCH = 8

NOISE = 0.5

STEP = 0.02
"""Seconds at least."""

TOKENS = BATCH * 512
"""That a step of one rank sees."""


LATER = 0.06
"""The learning rate at which the loss bends down."""


@contextmanager
def bending(
    address: str, run: str, ranks: int, *options: str, again: bool = False
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of one run that train, which are killed in the end if they have not ended.

    Args:
        address: of the weaver.
        run: the id of the run.
        ranks: how many there are, named ``bend_0``, ``bend_1``, …
        options: of this program.
        again: whether a launcher started them again.
    """
    environment = {**os.environ, "LOOM_WEAVER": address, "LOOM_RUN_ID": run}
    if again:
        environment["TORCHELASTIC_RESTART_COUNT"] = "1"
    processes = [
        start("-m", "tests.support.bending", str(rank), *options, env={**environment, "LOOM_RANK": str(rank)})
        for rank in range(ranks)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def train(rank: int, begin: int, crash_at: int, steps: int) -> None:
    """Train from one step to another, until told to stop, or until the step at which the process dies."""
    from loom.threadlet import Threadlet

    chance = random.Random(rank + begin)
    scales = [0.85**place for place in range(FEATURES)]  # directions of the plane that are learned later and later
    truth = [chance.choice((-1, 1)) * 0.45 / scale**0.7 for scale in scales]
    weights = [one * min(1.0, begin / 200) for one in truth]  # as if it came from a checkpoint
    now: dict[str, float] = {"learning_rate": RATE}
    others: dict[str, object] = {"warm": True, "schedule": "constant", "betas": [0.9, 0.95], "note": ""}
    config = {"learning_rate": RATE, "accumulation": 1, **others}
    threadlet = Threadlet(f"bend_{rank}", group="bend", config=config)

    @threadlet.handler("learning_rate")
    def set_learning_rate(value: float) -> None:
        if value <= 0:
            raise ValueError("a learning rate is larger than 0")
        now["learning_rate"] = value

    @threadlet.handler("accumulation")
    def set_accumulation(value: int) -> None:
        """Take it."""

    @threadlet.handler("warm")
    def set_warm(value: bool) -> None:
        """Take it."""

    @threadlet.handler("schedule")
    def set_schedule(value: Literal["constant", "cosine"]) -> None:
        """Take it."""

    @threadlet.handler("betas")
    def set_betas(value: list[float]) -> None:
        """Take them."""

    @threadlet.handler("note")
    def set_note(value: str) -> None:
        """Take it."""

    @threadlet.on_save
    def save() -> None:
        """There is nothing to save."""

    number = begin
    threadlet.publish_status(step=number, max_step=steps)
    while not threadlet.should_stop and number < steps:
        with threadlet.step(number) as step:
            loss, gradient = 0.0, [0.0] * FEATURES
            for _ in range(BATCH):
                point = [scale * chance.gauss(0, 1) for scale in scales]
                error = chance.gauss(0, NOISE)
                error += sum((one - other) * x for one, other, x in zip(weights, truth, point, strict=True))
                loss += error * error / BATCH
                gradient = [known + 2 * error * x / BATCH for known, x in zip(gradient, point, strict=True)]
            weights = [one - now["learning_rate"] * part for one, part in zip(weights, gradient, strict=True)]
            step.metrics["loss"] = loss
            step.metrics["grad_norm"] = sum(part * part for part in gradient) ** 0.5
            step.metrics["num_input_tokens_seen"] = (number + 1) * TOKENS
            step.metrics["tokens_per_second"] = TOKENS / STEP * chance.uniform(0.95, 1.0)
            step.metrics["mfu"] = chance.uniform(0.41, 0.43)
            step.metrics["memory/max_reserved_gib"] = 61.5 + chance.uniform(0, 0.3)
            if number % 50 == 0:
                step.metrics["eval/loss"] = loss * 1.1
            time.sleep(STEP)
        if number == crash_at:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        number += 1
    threadlet.close()


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("--begin", type=int, default=0)
    parser.add_argument("--crash-at", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=20_000)
    given = parser.parse_args()
    train(given.rank, given.begin, given.crash_at, given.steps)


if __name__ == "__main__":
    main()
