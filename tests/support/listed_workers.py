"""Workers that a gateway finds in a file, which changes while it runs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from loom.process.listen import free_ports
from tests.support.gateways import Gateway
from tests.support.processes import read_json, start

__all__ = ["Listed", "gateway_on", "listed"]

ENDED_IN_TIME = 60.0

WORKER = "-m", "loom_gateway.workers.host"


class Listed:
    """Workers in a file, which this starts, ends and replaces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._workers: list[tuple[str, subprocess.Popen[str]]] = []

    def add(self, place: int | None = None, *options: str, program: Sequence[str] = WORKER) -> None:
        """Start a worker, at the end or in the place of one."""
        (port,) = free_ports(1)
        address = f"tcp://127.0.0.1:{port}"
        process = start(*program, "--address", address, "--exit-with-parent", *options)
        read_json(process)
        if place is None:
            self._workers.append((address, process))
        else:
            self._workers[place] = address, process

    def terminate(self, place: int) -> None:
        """Send SIGTERM to a worker, and do not wait: it has its grace."""
        self._workers[place][1].terminate()

    def kill(self, place: int) -> None:
        _, process = self._workers[place]
        process.kill()
        process.communicate(timeout=ENDED_IN_TIME)

    def write(self) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text("".join(f"{address}\n" for address, _ in self._workers))
        fresh.replace(self.path)

    def close(self) -> None:
        for _, process in self._workers:
            process.kill()
            process.communicate(timeout=ENDED_IN_TIME)


@pytest.fixture
def listed(tmp_path: Path) -> Iterator[Listed]:
    workers = Listed(tmp_path / "workers")
    try:
        yield workers
    finally:
        workers.close()


@contextmanager
def gateway_on(*options: str) -> Iterator[Gateway]:
    gateway = Gateway([], *options)
    try:
        yield gateway.start()
    finally:
        gateway.close()
