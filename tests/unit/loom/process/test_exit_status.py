"""What a child can learn of the end of its parent: here this test is the parent's parent, and reaps it or waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loom.process.exit_status import MemoryKills, exit_status

ENDS = [(None, code) for code in (0, 1, 7, 255)] + [
    (int(number), None)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGXCPU)
]


def ended(number: int | None, code: int | None) -> subprocess.Popen[bytes]:
    """A process that has ended and that nobody has reaped."""
    how = f"exit {code}" if number is None else f"ulimit -c 0; kill -{number} $$"
    process = subprocess.Popen(["sh", "-c", how])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
@pytest.mark.parametrize(("number", "code"), ENDS)
def test_the_status_of_a_process_is_known_until_it_is_reaped(number: int | None, code: int | None) -> None:
    process = ended(number, code)

    assert exit_status(process.pid, None) == (number, code)

    process.wait()
    assert exit_status(process.pid, None) == (None, None)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="there are no descriptors of processes")
@pytest.mark.parametrize(("number", "code"), ENDS)
def test_its_descriptor_knows_the_status_also_afterwards(number: int | None, code: int | None) -> None:
    process = ended(number, code)
    descriptor = os.pidfd_open(process.pid)
    process.wait()
    try:
        found = exit_status(process.pid, descriptor)
    finally:
        os.close(descriptor)

    # Linux keeps it from 6.15 on. An older one says that it does not know.
    assert found in ((number, code), (None, None))
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15):
        assert found == (number, code)


def cgroups(tmp_path: Path, membership: str, files: dict[str, str]) -> MemoryKills:
    (tmp_path / "cgroup").write_text(membership)
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 0\n")
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return MemoryKills(str(tmp_path / "fs"), str(tmp_path / "cgroup"), str(tmp_path / "vmstat"))


PLACES = {
    "a cgroup": ("0::/pod/main\n", "pod/main/memory.events.local"),
    "a cgroup of an older kernel": ("0::/pod/main\n", "pod/main/memory.events"),
    "a container's own cgroup": ("0::/\n", "memory.events.local"),
    "a container without a namespace of cgroups": ("0::/kubepods/pod7/main\n", "memory.events.local"),
    "version 1": ("4:memory:/pod/main\n0::/\n", "memory/pod/main/memory.oom_control"),
    "a container of version 1": ("4:cpu,memory:/docker/7\n", "memory/memory.oom_control"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_kill_for_memory_is_counted(tmp_path: Path, place: str) -> None:
    membership, name = PLACES[place]
    kills = cgroups(tmp_path, membership, {name: "oom 3\noom_kill 2\noom_group_kill 0\n"})

    before = kills.more()
    (tmp_path / "fs" / name).write_text("oom 4\noom_kill 3\noom_group_kill 0\n")

    assert (before, kills.more()) == (False, True)


def test_without_a_cgroup_the_machines_count_is_taken(tmp_path: Path) -> None:
    kills = cgroups(tmp_path, "0::/\n", {})
    before = kills.more()
    (tmp_path / "vmstat").write_text("oom_kill 1\n")

    assert (before, kills.more()) == (False, True)


def test_an_earlier_kill_was_of_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = cgroups(tmp_path, "0::/\n", {})
    (tmp_path / "vmstat").write_text("oom_kill 1\n")
    monkeypatch.setattr("loom.process.exit_status.MEMORY_EVERY", 0.0)

    kills.look()
    just_counted = kills.more()
    kills.look()

    assert (just_counted, kills.more()) == (True, False)


def test_a_machine_that_tells_nothing_counts_nothing(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none")

    assert not MemoryKills(nowhere, nowhere, nowhere).more()
