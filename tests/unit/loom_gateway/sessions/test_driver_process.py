"""Drivers that the gateway did not start itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loom.process.identity import start_time
from loom_gateway.sessions import driver_process
from loom_gateway.sessions.driver_process import AdoptedDriver
from loom_gateway.sessions.state_dir import DriverFiles, DriverRecord

BOUND = 30.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        yield process
        process.kill()


async def test_a_driver_that_has_ended_can_be_told_to_end_while_its_files_are_cleared_away(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, clears, may_clear = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def clear_away(files: DriverFiles, uid: int) -> bool:
        loop.call_soon_threadsafe(clears.set)
        return may_clear.wait(BOUND)

    monkeypatch.setattr(driver_process, "clear_away", clear_away)
    record = DriverRecord(process.pid, start_time(process.pid) or 0, uid=os.getuid())
    driver = AdoptedDriver(DriverFiles(str(tmp_path / "driver")), record, os.pidfd_open(process.pid))
    process.kill()
    await asyncio.wait_for(clears.wait(), BOUND)

    ending = asyncio.ensure_future(driver.end("the gateway was stopped", BOUND))
    await asyncio.sleep(0)
    may_clear.set()

    await asyncio.wait_for(ending, BOUND)
    assert driver.exited.is_set()
