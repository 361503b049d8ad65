"""Processes of this host: whether they live, and where they are in their code."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from loom.control.latencies import BOUNDS, Latencies
from loom.control.profiles import FoldedStacks
from loom.weaver.server import local_processes
from loom.weaver.server.local_processes import find_process, is_alive, py_spy, py_spy_profile

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells for sure")


def test_a_process_is_alive_until_it_is_gone_even_while_nobody_has_waited_for_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process = find_process(child.pid)
    assert process is not None
    alive = is_alive(process)

    child.kill()
    assert child.stdout is not None
    child.stdout.read()  # ends when the process does
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert alive
    assert not is_alive(process)
    child.communicate()
    assert not is_alive(process)


def test_a_later_process_of_the_same_number_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = find_process(os.getpid())
    assert ours is not None
    alive = is_alive(ours)

    monkeypatch.setattr(ours, "_ident", (os.getpid(), 1.0))  # as if it had started long ago

    assert alive
    assert not is_alive(ours)


@pytest.mark.parametrize("pid", [0, 1 << 40])
def test_there_is_no_process_of_that_number(pid: int) -> None:
    assert find_process(pid) is None


async def test_there_is_no_stack_of_a_process_that_is_not_there() -> None:
    assert await py_spy(1 << 22) is None


async def test_there_is_no_stack_without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")

    assert await py_spy(os.getpid()) is None


async def test_a_py_spy_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_processes, "_PY_SPY_WITHIN", 0.05)
    hanging = tmp_path / "py-spy"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    before = psutil.Process().children()

    assert await py_spy(os.getpid()) is None
    assert psutil.Process().children() == before


BUSY = """
import sys
def work_hard():
    while True:
        sum(range(1000))
print(1, flush=True)
work_hard()
"""


def profile_of_a_busy_process() -> FoldedStacks:
    child = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        child.stdout.readline()
        found = asyncio.run(py_spy_profile(child.pid, 1.0))
    finally:
        child.kill()
        child.communicate()
    if found is None:
        pytest.skip("py-spy is not installed, or not permitted")
    return found


def test_a_profile_shows_where_the_time_of_a_process_goes() -> None:
    found = profile_of_a_busy_process()

    assert "work_hard" in found.text.splitlines()[0]
    assert found.samples > 0


def test_a_profile_ends_in_time_though_its_looks_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_processes, "RATE", 1_000_000)  # more looks a second than any machine can take
    monkeypatch.setattr(local_processes, "_PY_SPY_WITHIN", 30.0)
    found = profile_of_a_busy_process()

    assert "work_hard" in found.text.splitlines()[0]
    assert 0 < found.samples < 1_000_000
    assert "py-spy" not in found.text


async def test_why_py_spy_failed_is_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = tmp_path / "py-spy"
    failing.write_text("#!/bin/sh\necho Permission Denied >&2\nexit 1\n")
    failing.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    assert await py_spy_profile(os.getpid(), 1.0) is None
    assert "ended with 1: Permission Denied" in caplog.text


async def test_there_is_no_profile_of_a_process_that_is_not_there() -> None:
    assert await py_spy_profile(1 << 22, 1.0) is None


def test_latencies_are_counted_in_their_buckets() -> None:
    latencies = Latencies()
    for seconds in (0.001, 0.005, 0.3, 100.0):
        latencies.add(seconds)

    counted = latencies.to_dict()
    assert counted["bounds"] == list(BOUNDS)
    assert counted["counts"] == [0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert counted["sum"] == pytest.approx(100.306)
