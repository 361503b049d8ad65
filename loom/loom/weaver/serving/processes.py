"""Training processes on the weaver's own host: whether they live, and their stacks."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

_PY_SPY_WITHIN = 10.0


def find_process(pid: int) -> psutil.Process | None:
    """Return a process, with its start time: a later process with the same pid is a different one."""
    try:
        return psutil.Process(pid)
    except (psutil.Error, OverflowError):
        return None


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def py_spy(pid: int) -> str | None:
    """Return the stacks of a process' threads, or None if py-spy is not installed or not permitted."""
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        return None
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    running = await asyncio.create_subprocess_exec(program, "dump", "--pid", str(pid), **streams)  # type: ignore[arg-type]
    try:
        text, _ = await asyncio.wait_for(running.communicate(), _PY_SPY_WITHIN)
    except asyncio.TimeoutError:
        return None
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
    return text.decode(errors="replace") if running.returncode == 0 else None
