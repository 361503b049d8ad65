"""Training processes on the weaver's own host: whether they live, and their stacks."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from loom.control.profiles import RATE, FoldedStacks

_log = logging.getLogger(__name__)

_PY_SPY_WITHIN = 10.0
"""Seconds that py-spy has, in addition to those for which it looks at a process."""

_SPARE = 0.5
"""Seconds after which py-spy is told to stop if it is late."""

_ABOUT = b"py-spy> "
"""The beginnings of lines about py-spy itself."""

_READ = 1 << 16

_KEPT = 2000
"""Bytes of what py-spy says of an error."""


def find_process(pid: int) -> psutil.Process | None:
    """Return a process, with its start time: a later process with the same pid is a different one."""
    try:
        return psutil.Process(pid)
    except (psutil.Error, OverflowError):
        return None


def process_descriptor(process: psutil.Process | None) -> int | None:
    """Return a descriptor of a process, which the caller closes; None if it is gone, or the machine has none."""
    try:
        return None if process is None else os.pidfd_open(process.pid)
    except (OSError, AttributeError):
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
    done = await _run_py_spy(("dump", "--pid", str(pid)), parts.append)
    return b"".join(parts).decode(errors="replace") if done else None


async def py_spy_profile(pid: int, seconds: float) -> FoldedStacks | None:
    """Return the stacks of a process's busy threads within so many seconds, or None as `py_spy` does."""
    stacks, rest = FoldedStacks(), b""

    def take(data: bytes) -> None:
        nonlocal rest
        *lines, rest = (rest + data).split(b"\n")
        stacks.add_lines(line.decode(errors="replace") for line in lines if not line.startswith(_ABOUT))

    how = ("--format", "raw", "--function", "--rate", str(RATE), "--output", "/dev/stdout")
    wanted = ("record", "--pid", str(pid), "--duration", str(math.ceil(seconds)), *how)
    return stacks if await _run_py_spy(wanted, take, seconds) else None


async def _run_py_spy(arguments: tuple[str, ...], take: Callable[[bytes], None], seconds: float = 0.0) -> bool:
    """Run py-spy and take what it prints; return whether it is there and did what it was asked.

    With ``seconds`` it is told to stop so long after its first words, and prints what it has seen. By itself it
    counts looks and not time: on a busy machine, where a look waits for each thread to stop, it goes on for longer.
    """
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        return False
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = await asyncio.create_subprocess_exec(program, *arguments, **streams)  # type: ignore[arg-type]
    stop: asyncio.TimerHandle | None = None
    errors = bytearray()

    def heed(data: bytes) -> None:
        nonlocal stop
        if seconds and stop is None:
            stop = asyncio.get_running_loop().call_later(seconds + _SPARE, _interrupt, running)
        take(data)

    def keep(data: bytes) -> None:
        errors.extend(data[: _KEPT - len(errors)])

    try:
        await asyncio.wait_for(_read(running, heed, keep), seconds + _PY_SPY_WITHIN)
    except asyncio.TimeoutError:
        _log.warning("py-spy %s did not end in time", " ".join(arguments))
        return False
    finally:
        if stop is not None:
            stop.cancel()
        if running.returncode is None:
            running.kill()
            await running.wait()
    if running.returncode:
        why = errors.decode(errors="replace").strip()
        level = logging.WARNING if seconds else logging.INFO  # thousands of stacks may be wanted
        _log.log(level, "py-spy %s ended with %d: %s", " ".join(arguments), running.returncode, why)
    return running.returncode == 0


def _interrupt(running: asyncio.subprocess.Process) -> None:
    if running.returncode is None:
        running.send_signal(signal.SIGINT)


async def _read(
    running: asyncio.subprocess.Process, take: Callable[[bytes], None], take_error: Callable[[bytes], None]
) -> None:
    async def read(stream: asyncio.StreamReader | None, take: Callable[[bytes], None]) -> None:
        assert stream is not None
        while data := await stream.read(_READ):
            take(data)

    await asyncio.gather(read(running.stdout, take), read(running.stderr, take_error))
    await running.wait()
