"""Drivers that the gateway did not start itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from pathlib import Path

import pytest

from loom_gateway.sessions import driver_process
from loom_gateway.sessions.driver_files import DriverFiles, DriverRecord, start_time
from loom_gateway.sessions.driver_process import AdoptedDriver

BOUND = 30.0


async def test_a_driver_that_has_ended_can_be_told_to_end_while_its_files_are_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_clear = threading.Event()
    monkeypatch.setattr(driver_process, "clear_away", lambda files, uid: may_clear.wait(BOUND))
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        record = DriverRecord(process.pid, start_time(process.pid) or 0, uid=os.getuid())
        driver = AdoptedDriver(DriverFiles(str(tmp_path / "driver")), record, os.pidfd_open(process.pid))
        process.kill()
        while driver._clearing is None:
            await asyncio.sleep(0.01)

        ending = asyncio.ensure_future(driver.end("the gateway was stopped", BOUND))
        await asyncio.sleep(0)
        may_clear.set()

        await asyncio.wait_for(ending, BOUND)
        assert driver.exited.is_set()
