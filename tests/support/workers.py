"""The workers of a cluster, killed and started again by tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from loom_proxy.local import LocalCluster
from tests.support.processes import read_json, start

BOUND = 60.0
"""Seconds in which a worker that was killed is gone."""


class Workers:
    """The workers of a cluster, which can be killed and started again."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._addresses = cluster.workers
        self._pids = cluster.pids[1:]
        self._started: list[subprocess.Popen[str]] = []

    def kill(self, host: int) -> None:
        worker = psutil.Process(self._pids[host])
        worker.kill()
        psutil.wait_procs([worker], timeout=BOUND)

    def start(self, host: int) -> None:
        again = start("-m", "loom_gateway.workers.host", "--address", self._addresses[host], "--exit-with-parent")
        self._started.append(again)
        self._pids[host] = read_json(again)["pid"]

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@contextmanager
def workers_of(cluster: LocalCluster) -> Iterator[Workers]:
    workers = Workers(cluster)
    try:
        yield workers
    finally:
        workers.close()
