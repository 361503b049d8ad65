"""A laptop whose session counts, until it is told to stop: ``python -m tests.support.counting_laptop URL KIND``.

The counter is a replica, which reports each number as a step. A line of JSON is printed when the first answer has
come, another with all answers when a line comes on standard input, and the session ends with standard input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import loom
from loom import Actor, endpoint
from tests.support.gateways import BOUND, TOKEN
from tests.support.processes import read_json, start


class CountingReplica(Actor):
    """Counts in steps, and reports each."""

    def __init__(self) -> None:
        self.n = 0
        self.threadlet: loom.Threadlet | None = None

    @endpoint
    def add(self, k: int) -> int:
        if self.threadlet is None:
            self.threadlet = loom.Threadlet(config={})
        with self.threadlet.step(self.n) as step:
            self.n += k
            step.metrics["n"] = float(self.n)
        return self.n

    @endpoint
    def replica(self) -> str:
        assert self.threadlet is not None
        return self.threadlet.replica_id


def call(job: loom.Job, counter: loom.ActorMesh) -> Iterator[int]:
    while True:
        yield counter.add.call_one(1).get(timeout=BOUND)


def stream(job: loom.Job, counter: loom.ActorMesh) -> Iterator[int]:
    while True:
        for answer in counter.add.stream(1):
            yield answer.get(timeout=BOUND)


def run(job: loom.Job, counter: loom.ActorMesh) -> Iterator[int]:
    while True:
        yield job.run(lambda: counter.add.call_one(1).get(timeout=40.0))


KINDS: Mapping[str, Callable[[loom.Job, loom.ActorMesh], Iterator[int]]] = {
    "call": call,
    "stream": stream,
    "run": run,
}


def version() -> str:
    """The version of Loom in the driver, which is not that of the installed package."""
    import loom

    return loom.__version__


def main(url: str, kind: str) -> None:
    told = threading.Event()

    def wait() -> None:
        sys.stdin.readline()
        told.set()

    threading.Thread(target=wait, daemon=True).start()
    with loom.connect(url, TOKEN) as job:
        procs = job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 1})
        counter = procs.spawn("counter", CountingReplica)
        answers: list[int] = []
        longest = 0.0
        counts = KINDS[kind](job, counter)
        while not told.wait(0.05):
            began = time.monotonic()
            answers.append(next(counts))
            if len(answers) > 1:  # the first one waits for imports
                longest = max(longest, time.monotonic() - began)
            else:
                about = {"session": job.session, "here": loom.__version__, "there": job.run(version)}
                print(json.dumps({**about, "replica": counter.replica.call_one().get(timeout=BOUND)}), flush=True)
        print(json.dumps({"answers": answers, "longest": longest}), flush=True)
        sys.stdin.read()


class CountingLaptop:
    """The process of such a laptop, with variables in its environment."""

    def __init__(self, url: str, kind: str, variables: Mapping[str, str], output: Path) -> None:
        self.kind = kind
        self._output = output
        with output.open("a") as file:
            self._process: subprocess.Popen[str] = start(
                "-m", __name__, url, kind, stderr=file, env={**os.environ, **variables}
            )
        self.about: dict[str, Any] = {}
        self.answers: list[int] = []
        self.longest = 0.0

    def _read(self) -> Any:
        try:
            return read_json(self._process)
        except AssertionError as error:
            raise AssertionError(f"{error}; its output:\n{self._output.read_text()}") from None

    def await_begun(self) -> None:
        """Wait for the first answer."""
        self.about = self._read()

    def stop(self) -> None:
        """Have it call no more, and read its answers. Its session goes on."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        told = self._read()
        self.answers, self.longest = told["answers"], told["longest"]

    def end(self) -> None:
        """End its session, and it."""
        self._process.communicate(timeout=BOUND)
        assert self._process.returncode == 0, self._output.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
