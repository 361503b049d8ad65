"""A process that trains as it is told, for tests of runs: ``python -m tests.support.told_training RANK STEPS END``.

Each step takes 10 ms, begins at ``FROM`` if that is in the environment, and reports ``loss``: ``NUMBER`` plus a
thousandth of the step. END is ``completes``, ``returns`` (before its last step), ``raises``, ``is_killed``, or
``waits`` until it is stopped.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from loom.threadlet import Threadlet

MAX_STEP = 40


def main(rank: int, steps: int, end: str) -> None:
    name, number = os.environ["NAME"], float(os.environ["NUMBER"])
    threadlet = Threadlet(f"{name}_{rank}", group=name, config={"number": number})
    assert threadlet._link is not None
    threadlet._link.welcomed.wait(60)  # a training takes longer than a weaver's absence
    for step in range(int(os.environ.get("FROM", "0")), steps if end != "waits" else MAX_STEP * 100):
        if threadlet.should_stop:
            break
        with threadlet.step(step, max_step=MAX_STEP) as about:
            time.sleep(0.01)
            about.metrics["loss"] = number + step / 1000
    if end == "raises":
        raise RuntimeError(f"{name} fails")
    if end == "is_killed":
        os.kill(os.getpid(), signal.SIGKILL)
    threadlet.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
