"""`SupervisedProcess`, a process that listens on a port and is started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import psutil

from loom.process import tasks
from loom.process.backoff import Backoff
from loom.process.child import Child, ProcessState, python, run_again

logger = logging.getLogger(__name__)

BACKOFF = Backoff(0.5, 15.0)  # seconds before the process is started again
STEADY = 15.0  # seconds after which an end of the process does not count as early, so that the pauses start anew
GRACE = 28.0  # seconds that the process has to end: more than a worker gives what trains, less than a pod has


def who_listens(port: int) -> psutil.Process | None:
    """Return the process that listens on a port of this pod; None if none is visible."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.pid and connection.laddr:
            with contextlib.suppress(psutil.Error):
                if connection.laddr.port == port:
                    return psutil.Process(connection.pid)
    return None


class SupervisedProcess:
    """A process of a module of Loom that is kept running. If one already listens on the port, it is taken over.

    Args:
        name: the process's name in messages.
        module: the module to run.
        port: the port on which the process listens.
        arguments: returns the module's command line arguments, for each start.
    """

    def __init__(self, name: str, module: str, port: int, arguments: Callable[[], Sequence[str]]) -> None:
        self.name = name
        self._module = module
        self._port = port
        self._arguments = arguments
        self._task: asyncio.Task[NoReturn] | None = None  # restarts the process until `end`
        self._child: Child | None = None  # the process, if this supervisor started it
        self._found: psutil.Process | None = None  # the process, if it was running before
        self._changed = asyncio.Event()  # set on each change of the state
        self.starts = 0  # by this supervisor
        self.state = ProcessState.STARTING
        self.problem = ""  # why the process does not run

    @property
    def listening(self) -> bool:
        return self.state is ProcessState.LISTENING

    @property
    def kept(self) -> bool:
        return self._task is not None

    @property
    def pid(self) -> int | None:
        if self._child is not None and not self._child.ended.done():
            return self._child.pid
        return None if self._found is None else self._found.pid

    def keep(self) -> None:
        """Start the process, and start it again whenever it ends."""
        if self._task is None:
            self._task = tasks.keep_running("keep a process", lambda: run_again(self._run, BACKOFF, STEADY))

    async def restart(self) -> None:
        """End the process, and wait until it has been started again."""
        before = self.starts
        await self._end(signal.SIGTERM, self._found)
        while self.kept and self.starts == before:
            self._changed.clear()
            await self._changed.wait()

    async def end(self, number: int = signal.SIGTERM) -> None:
        """Stop the process and its children."""
        task, self._task = self._task, None
        found = self._found  # read before the cancelled task resets it
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._end(number, found)
        self._become(ProcessState.ENDED)

    async def _run(self) -> None:
        found = await asyncio.to_thread(who_listens, self._port)
        if found is None:
            await self._run_once()
        elif self._module in _command(found).split():  # started by an earlier supervisor, or by the image
            await self._watch(found)
        else:
            problem = f"port {self._port} is in use, by process {found.pid} ({_command(found)}): end it"
            self._fail(ProcessState.PORT_TAKEN, problem)

    async def _watch(self, found: psutil.Process) -> None:
        logger.info("the %s runs already, as process %d", self.name, found.pid)
        self._found, self.problem = found, ""
        self._become(ProcessState.LISTENING)
        try:
            with contextlib.suppress(psutil.NoSuchProcess):
                await asyncio.to_thread(found.wait)
        finally:
            self._found = None
            self._become(ProcessState.ENDED)
        self.problem = f"process {found.pid} has ended"

    async def _run_once(self) -> None:
        loop = asyncio.get_running_loop()
        child = self._child = Child(
            self.name,
            python(self._module, *self._arguments()),
            parent_pipe=False,  # the process outlives this one, and the next supervisor finds it
            on_line=lambda line: logger.info("%s: %s", self.name, line),
        )
        logger.info("the %s is process %d", self.name, child.pid)
        self.starts += 1
        self.problem = "it is starting"
        self._become(ProcessState.STARTING)
        child.ready.add_done_callback(lambda ready: loop.call_soon_threadsafe(self._take_ready, ready))
        code = await asyncio.shield(asyncio.wrap_future(child.ended))
        last = child.output.rpartition("\n")[2] or "it said nothing"
        self._fail(ProcessState.ENDED, f"it ended with code {code}: {last.removeprefix('error: ')}")

    def _take_ready(self, ready: Future[Mapping[str, Any]]) -> None:
        if ready.exception() is None:
            self.problem = ""
            self._become(ProcessState.LISTENING)

    def _become(self, state: ProcessState) -> None:
        self.state = state
        self._changed.set()

    def _fail(self, state: ProcessState, problem: str) -> None:
        logger.warning("the %s does not run: %s", self.name, problem)
        self.problem = problem
        self._become(state)

    async def _end(self, number: int, found: psutil.Process | None) -> None:
        if self._child is not None and not self._child.ended.done():
            self._child.signal(number)
            await asyncio.to_thread(self._child.end, GRACE)
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
