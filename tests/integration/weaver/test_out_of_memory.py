"""A process that the kernel kills for memory, in a cgroup of its own: what the laptop, events and REST say."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

import loom
from loom.cli.app import app
from loom_proxy.local import LocalCluster

BOUND = 60.0
ROOM = 160 << 20
"""Bytes that the process may have more than when it began."""

_MEMORY = Path("/sys/fs/cgroup/memory")


class Glutton(loom.Actor):
    """Takes memory until it is stopped."""

    def __init__(self) -> None:
        self.threadlet = loom.Threadlet()
        self.taken: list[bytes] = []
        with self.threadlet.step(0, max_step=100):
            pass

    @loom.endpoint
    def pid(self) -> int:
        return os.getpid() if self.threadlet.connected else 0

    @loom.endpoint
    def take(self) -> None:
        while True:
            self.taken.append(b"x" * (8 << 20))


class Cgroup:
    """A cgroup below that of this process, with limits of memory; of version 1 or 2."""

    def __init__(self, folder: Path, limit: str, usage: str) -> None:
        self.folder, self._limit, self._usage = folder, folder / limit, folder / usage
        self.procs = folder / "cgroup.procs"

    def add(self, pid: int) -> None:
        self.procs.write_text(str(pid))

    def leave(self, room: int) -> None:
        """Limit the memory to what is used now, and some room."""
        for name in ("memory.swap.max", "memory.swappiness"):
            if (self.folder / name).exists():
                (self.folder / name).write_text("0")
        self._limit.write_text(str(int(self._usage.read_text()) + room))


@contextmanager
def cgroup() -> Iterator[Cgroup]:
    """A new cgroup; skip the test where this process may make none."""
    found = _new()
    if found is None:
        pytest.skip("this machine allows no cgroup of one's own with a limit of memory")
    try:
        yield found
    finally:
        until = time.monotonic() + BOUND
        while found.folder.exists():
            for pid in found.procs.read_text().split():
                (found.folder.parent / "cgroup.procs").write_text(pid)
            try:
                found.folder.rmdir()
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.05)


def _new() -> Cgroup | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        name = f"loom-test-{uuid.uuid4().hex[:8]}"
        try:
            if "memory" in controllers.split(","):
                folder = _MEMORY / path.lstrip("/") / name
                folder.mkdir()
                return Cgroup(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")
            folder = Path("/sys/fs/cgroup") / path.lstrip("/") / name
            if number == "0":
                folder.mkdir()
                if (folder / "memory.max").exists():
                    return Cgroup(folder, "memory.max", "memory.current")
                folder.rmdir()
        except OSError:
            continue
    return None


def workers_of_tests() -> list[int]:
    """The processes of the cluster's workers, whose children are the processes of meshes."""
    return [one.pid for one in psutil.Process().children(recursive=True) if "worker" in " ".join(one.cmdline())]


@pytest.mark.slow
def test_an_out_of_memory_kill_is_told_on_the_laptop_in_events_and_by_rest(
    cluster: LocalCluster, shared: loom.Job
) -> None:
    with cgroup() as limited:
        workers = workers_of_tests()
        for pid in workers:
            limited.add(pid)
        try:
            procs = shared.hosts.slice(hosts=0).spawn_procs(name="glutton")
            glutton = procs.spawn("glutton", Glutton)
            until = time.monotonic() + BOUND
            while not (taken := glutton.pid.call_one().get(timeout=BOUND)):
                assert time.monotonic() < until
        finally:
            for pid in workers:
                (limited.folder.parent / "cgroup.procs").write_text(str(pid))
        assert str(taken) in limited.procs.read_text().split()
        limited.leave(ROOM)

        with pytest.raises(loom.SupervisionError, match="SIGKILL, probably out of memory"):
            glutton.take.call_one().get(timeout=BOUND)

        (replica,) = [one for one in shared.weaver.replicas().values() if one.group == "glutton"]
        until = time.monotonic() + BOUND
        while replica.exit is None:
            assert time.monotonic() < until
            time.sleep(0.05)
            replica = shared.weaver.replica(replica.id)

    assert replica.ending == "crashed"
    assert replica.exit["out_of_memory"] is True
    assert "out of memory" in str(replica.end_reason)
    lost = [one for one in shared.events(timeout=BOUND) if one.name == "process_lost"]
    assert "out of memory" in [one for one in lost if one.details["mesh"] == "glutton"][-1].details["reason"]
    (failed,) = [one for one in shared.weaver.events(kind="failed") if one.replica == replica.id]
    assert "out of memory" in failed.data["reason"]
    headers = {"Authorization": f"Bearer {cluster.token}"}
    shown = httpx.get(f"{cluster.url}/api/v1/weaver/replicas/{replica.id}", headers=headers, timeout=BOUND).json()
    assert shown["exit"]["out_of_memory"] is True
    status = CliRunner().invoke(app, ["status", "--url", cluster.url], env={"LOOM_TOKEN": cluster.token})
    assert "out of memory" in status.output.replace("\n", " ")
