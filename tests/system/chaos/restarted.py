"""Training processes that are started again when they end: what recovers from faults, for tests of plans.

``python -m tests.system.chaos.restarted FOLDER`` trains as the replica that the environment names: it goes on from
the step in its checkpoint in the folder, which it writes every few steps, and knows its parameters by the step.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EVERY = 5
"""Steps between two checkpoints."""

STEP = 0.01
"""Seconds."""


def train(folder: Path) -> None:
    """The training process."""
    from loom.threadlet import Threadlet

    threadlet = Threadlet()
    spoiled = [False]

    @threadlet.on_fault("nan_loss")
    def spoil(params: dict[str, Any]) -> Any:
        spoiled[0] = True
        return lambda: spoiled.__setitem__(0, False)

    checkpoint = folder / threadlet.replica_id
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    while not threadlet.should_stop:
        with threadlet.step(step) as told:
            time.sleep(STEP)
            told.metrics["loss"] = math.nan if spoiled[0] else 2.0 / (1 + step / 50)
            told.metrics["accuracy"] = 1 - 0.5 / (1 + step)
            told.metrics["params_hash"] = float(step * 7919 % 1009)
        step += 1
        if step % EVERY == 0:
            fresh = checkpoint.with_suffix(f".{os.getpid()}")
            fresh.write_text(str(step))
            fresh.replace(checkpoint)
    threadlet.close()


class Restarted:
    """A training process that is started again whenever it ends."""

    def __init__(self, address: str, replica: str, folder: Path) -> None:
        self._environment = {
            **os.environ,
            "LOOM_WEAVER": address,
            "LOOM_REPLICA": replica,
            "LOOM_GROUP": "train",
            "LOOM_INJECTABLE": "1",
            "LOOM_CHAOS_DIR": str(folder / "keepers"),
        }
        self._folder = folder
        self.starts = 0
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._process = self._start()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        command = [sys.executable, "-m", "tests.system.chaos.restarted", str(self._folder)]
        null = subprocess.DEVNULL
        return subprocess.Popen(command, env=self._environment, stdin=null, stdout=null, stderr=null)

    def _keep(self) -> None:
        while True:
            self._process.wait()
            with self._lock:
                if self._closed.is_set():
                    return
                self._process = self._start()

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            self._process.kill()
        self._thread.join()


@contextmanager
def restarted(address: str, folder: Path, *replicas: str) -> Iterator[list[Restarted]]:
    """Training processes that are started again, until the end."""
    found = [Restarted(address, one, folder) for one in replicas]
    try:
        yield found
    finally:
        for one in found:
            one.close()


if __name__ == "__main__":
    train(Path(sys.argv[1]))
