"""`SupervisedProcess`: a process that listens on a port, started again when it ends."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from loom.process.state import ProcessState

__all__ = ["SupervisedProcess", "who_listens"]

logger = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 0.5, 15.0
"""Seconds before it is started again; doubled each time, until it has run for `LONGEST_WAIT`."""

GRACE = 10.0
"""Seconds that it has to end."""

KEPT_LINES = 20


def who_listens(port: int) -> psutil.Process | None:
    """The process of this pod that listens on a port; None: nobody, or somebody who cannot be seen."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.pid and _port(connection.laddr) == port:
            with contextlib.suppress(psutil.Error):
                return psutil.Process(connection.pid)
    return None


def _port(address: Any) -> int | None:
    return address.port if address else None


class SupervisedProcess:
    """A module of Loom that is to run, with what listens on its port already where that is such a module.

    Args:
        name: for logs and for people.
        module: run as ``python -m module``.
        port: where it listens.
        arguments: gives those of its command line, each time that it is started.
        environment: what its environment has besides this process's own.
    """

    def __init__(
        self,
        name: str,
        module: str,
        port: int,
        arguments: Callable[[], Sequence[str]],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._module = module
        self._port = port
        self._arguments = arguments
        self._environment = environment or {}
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._found: psutil.Process | None = None
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._changed = asyncio.Event()
        self.starts = 0
        """How often it was started by this keeper."""
        self.state = ProcessState.STARTING
        self.problem = ""
        """Why the process does not run; empty while it does."""

    @property
    def listening(self) -> bool:
        """Whether the process has reported that it listens, or was found to."""
        return self.state is ProcessState.LISTENING

    @property
    def kept(self) -> bool:
        """Whether it is to run."""
        return self._task is not None

    @property
    def pid(self) -> int | None:
        if self._process is not None:
            return self._process.pid
        return None if self._found is None else self._found.pid

    def keep(self) -> None:
        """Have it run from now on."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def restart(self) -> None:
        """End it; it is started again at once."""
        before = self.starts
        await self._end(signal.SIGTERM)
        while self.kept and self.starts == before:
            self._changed.clear()
            await self._changed.wait()

    async def end(self, number: int = signal.SIGTERM) -> None:
        """Have it not run any more, nor what it started."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._end(number)

    # -- inside -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        wait = FIRST_WAIT
        while True:
            began = time.monotonic()
            found = await asyncio.to_thread(who_listens, self._port)
            if found is None:
                await self._run_once()
            elif self._is_ours(found):
                await self._watch(found)
            else:
                problem = f"port {self._port} is in use, by process {found.pid} ({_command(found)}): end it"
                self._fail(ProcessState.PORT_TAKEN, problem)
            if time.monotonic() - began > LONGEST_WAIT:
                wait = FIRST_WAIT
            await asyncio.sleep(wait)
            wait = min(wait * 2, LONGEST_WAIT)

    def _is_ours(self, process: psutil.Process) -> bool:
        """Whether it is what would be started: of a keeper before this one, or of the image."""
        return self._module in _command(process).split()

    async def _watch(self, found: psutil.Process) -> None:
        logger.info("the %s runs already, as process %d", self.name, found.pid)
        self._found, self.problem = found, ""
        self._become(ProcessState.LISTENING)
        try:
            await asyncio.to_thread(_await_end, found)
        finally:
            self._found = None
            self._become(ProcessState.ENDED)
        self.problem = f"process {found.pid} has ended"

    async def _run_once(self) -> None:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            *self._arguments(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **self._environment},
            start_new_session=True,
        )
        logger.info("the %s is process %d", self.name, process.pid)
        self.starts += 1
        self.problem = "it is starting"
        self._become(ProcessState.STARTING)
        reading = asyncio.create_task(self._read(process))
        try:
            code = await process.wait()
            with contextlib.suppress(asyncio.TimeoutError):  # what it started may have its output
                await asyncio.wait_for(asyncio.shield(reading), 1.0)
            last = self._lines[-1] if self._lines else "it said nothing"
            self._fail(ProcessState.ENDED, f"it ended with code {code}: {last.removeprefix('error: ')}")
        finally:
            self._become(ProcessState.ENDED)
            if process.returncode is not None:
                self._process = None

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = (await process.stdout.readline()).decode(errors="replace")
            except ValueError:  # longer than the buffer: the rest comes as the next one
                continue
            if not line:
                return
            if line.startswith('{"event": "listening"'):
                self.problem = ""  # the line itself may have a token in it
                self._become(ProcessState.LISTENING)
                continue
            self._lines.append(line.rstrip())
            logger.info("%s: %s", self.name, line.rstrip())

    def _become(self, state: ProcessState) -> None:
        self.state = state
        self._changed.set()

    def _fail(self, state: ProcessState, problem: str) -> None:
        logger.warning("the %s does not run: %s", self.name, problem)
        self.problem = problem
        self._become(state)

    async def _end(self, number: int) -> None:
        process, found = self._process, self._found
        if process is not None and process.returncode is None:
            process.send_signal(number)
            try:
                await asyncio.wait_for(process.wait(), GRACE)
            except asyncio.TimeoutError:
                process.kill()
                await process.wait()
        elif found is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.send_signal(number)
                try:
                    await asyncio.to_thread(found.wait, GRACE)
                except psutil.TimeoutExpired:
                    found.kill()


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "unknown"


def _await_end(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.wait()
