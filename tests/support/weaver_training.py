"""Training for the tests of the weaver: processes with a threadlet each, which Loom did not spawn.

``python -m tests.support.weaver_training REPLICA GROUP`` trains on nothing, a step each 10 ms, and prints a line of
JSON when it begins and whenever its learning rate changes, with the step at which it did.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from loom.token_file import ADMIN
from loom.weaver.keys import Keys, read_secret
from tests.support.gateways import await_true
from tests.support.processes import read_json, start, still_there

STEP = 0.01
"""Seconds."""


def train(replica: str, group: str) -> None:
    """The training process."""
    from loom.threadlet import Threadlet

    optimizer: dict[str, Any] = {"lr": 0.1}
    now = {"step": 0}
    threadlet = Threadlet(replica, group=group, config={"learning_rate": 0.1})

    @threadlet.handler("learning_rate")
    def set_learning_rate(value: float) -> None:
        if value <= 0:
            raise ValueError("a learning rate is larger than 0")
        optimizer["lr"] = value
        print(json.dumps({"lr": optimizer["lr"], "step": now["step"]}), flush=True)

    @threadlet.on_save
    def save() -> None:
        print(json.dumps({"saved": now["step"]}), flush=True)

    print(json.dumps({"pid": os.getpid()}), flush=True)
    loss = 1.0
    while not threadlet.should_stop:
        with threadlet.step(now["step"]) as step:
            time.sleep(STEP)
            loss -= optimizer["lr"] * loss * 0.01
            step.metrics["loss"] = loss
            step.metrics["grad/norm"] = float("nan")
        now["step"] += 1
    threadlet.close()


class Training:
    """A training process, seen from a test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid: int = read_json(process)["pid"]

    def learning_rate(self) -> tuple[float, int]:
        """The next learning rate that it took, and the step at which it did."""
        line = read_json(self.process)
        return line["lr"], line["step"]

    def saved(self) -> int:
        """The step at which it saved next."""
        step: int = read_json(self.process)["saved"]
        return step


@contextmanager
def training(address: str, *replicas: str, group: str = "trainers") -> Iterator[list[Training]]:
    """Training processes, which are killed in the end if they have not ended.

    Args:
        address: of the weaver.
        replicas: the replica that each is.
        group: of all of them.
    """
    environment: Mapping[str, str] = {**os.environ, "LOOM_WEAVER": address}
    processes = [start("-m", "tests.support.weaver_training", one, group, env=environment) for one in replicas]
    try:
        yield [Training(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def weavers(gateway: int) -> list[psutil.Process]:
    """The weavers that are children of a gateway."""
    found = []
    for process in psutil.Process(gateway).children():
        try:
            if "loom.weaver" in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def weaver_address(gateway: int) -> str:
    """Where threadlets find the weaver of a gateway; waits until it is up."""
    address = ""

    def is_there() -> bool:
        nonlocal address
        for process in weavers(gateway):
            command = process.cmdline()
            folder = Path(command[command.index("--state") + 1])
            record = folder / "weaver.json"
            place = json.loads(record.read_text())["address"] if record.exists() else ""
            address = place and f"{place}/{Keys(read_secret(folder)).of(ADMIN)}"
        return bool(address)

    await_true(is_there)
    return address


__all__ = ["Training", "still_there", "training", "weaver_address", "weavers"]

if __name__ == "__main__":
    train(*sys.argv[1:])
