"""Training processes on the weaver's own host: whether they live, and where they are in their code."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

__all__ = ["LocalProcess", "py_spy"]

_PY_SPY_WITHIN = 10.0


class LocalProcess:
    """A process of this host, which is told from a later one with the same number by when it started."""

    def __init__(self, pid: int, started: str) -> None:
        self.pid = pid
        self._started = started

    @classmethod
    def find(cls, pid: int) -> LocalProcess | None:
        """The process with a number; None where there is none, or this system does not tell."""
        started = _started(pid)
        return None if started is None else cls(pid, started)

    def alive(self) -> bool:
        """Whether it runs."""
        return _started(self.pid) == self._started


def _started(pid: int) -> str | None:
    try:
        # What follows the name, which is in brackets and may have any characters, brackets too.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


async def py_spy(pid: int) -> str | None:
    """The stacks of a process' threads; None where py-spy is not installed or may not look."""
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        return None
    running = await asyncio.create_subprocess_exec(
        program,
        "dump",
        "--pid",
        str(pid),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        text, _ = await asyncio.wait_for(running.communicate(), _PY_SPY_WITHIN)
    except asyncio.TimeoutError:
        return None
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
    return text.decode(errors="replace") if running.returncode == 0 else None
