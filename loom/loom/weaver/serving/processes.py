"""Training processes on the weaver's own host: whether they live, and their stacks."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from loom.control.profiles import RATE, FoldedStacks

_PY_SPY_WITHIN = 10.0
"""Seconds that py-spy has, in addition to those for which it looks at a process."""

_READ = 1 << 16


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
    parts: list[bytes] = []
    done = await _run_py_spy(("dump", "--pid", str(pid)), _PY_SPY_WITHIN, parts.append)
    return b"".join(parts).decode(errors="replace") if done else None


async def py_spy_profile(pid: int, seconds: float) -> FoldedStacks | None:
    """Return the stacks of a process's busy threads within so many seconds, or None as `py_spy` does."""
    stacks, rest = FoldedStacks(), b""

    def take(data: bytes) -> None:
        nonlocal rest
        *lines, rest = (rest + data).split(b"\n")
        stacks.add_lines(line.decode(errors="replace") for line in lines)

    how = ("--format", "raw", "--function", "--rate", str(RATE), "--output", "/dev/stdout")
    wanted = ("record", "--pid", str(pid), "--duration", str(math.ceil(seconds)), *how)
    return stacks if await _run_py_spy(wanted, seconds + _PY_SPY_WITHIN, take) else None


async def _run_py_spy(arguments: tuple[str, ...], within: float, take: Callable[[bytes], None]) -> bool:
    """Run py-spy and take what it prints; return whether it is there and did what it was asked."""
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        return False
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    running = await asyncio.create_subprocess_exec(program, *arguments, **streams)  # type: ignore[arg-type]
    try:
        await asyncio.wait_for(_read(running, take), within)
    except asyncio.TimeoutError:
        return False
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
    return running.returncode == 0


async def _read(running: asyncio.subprocess.Process, take: Callable[[bytes], None]) -> None:
    assert running.stdout is not None
    while data := await running.stdout.read(_READ):
        take(data)
    await running.wait()
