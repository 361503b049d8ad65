"""A driver's end of process links, and real processes that are tied to it, without Monarch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from loom.wire.bodies import OutputSkipped, ProcessOutput
from loom.wire.messages import Kind, Message
from loom_gateway.driver.process_link.deaths import Watchers
from loom_gateway.driver.process_link.link import ProcessLinkAddress
from loom_gateway.driver.process_link.server import ProcessLink, ProcessLinkServer

BOUND = 30.0
"""Seconds; far over what anything here takes, so that only a hang fails."""

_PROGRAM = """
import json, os, socket, sys
from loom_gateway.driver.process_link.link import ProcessLinkAddress
from loom_gateway.driver.process_link.join import DriverTie
from loom_gateway.driver.process_link.deaths import DriverWatch
address, procs, rank, meets, output = json.loads(sys.argv[1])
tied = DriverTie(ProcessLinkAddress(*address), procs, rank, output=output, meets=meets)
watch = DriverWatch(ProcessLinkAddress(*address), lambda procs, rank: print("gone", procs, rank))
for line in sys.stdin:
    what, _, argument = line.strip().partition(" ")
    if what == "print":
        print(argument)
    elif what == "watch":
        watch.watch(int(argument))
    elif what == "master":
        print(tied.master)
    elif what == "listen":
        with socket.create_server(("127.0.0.1", int(tied.master[1]))):
            print("listening")
    elif what == "count":
        for number in range(int(argument)):
            os.write(1, b"%d\\n" % number)
    elif what == "flood":
        for number in range(int(argument)):
            os.write(1, b"z" * 1023 + b"\\n")
    elif what == "end":
        os._exit(int(argument))
"""


class Driver:
    """A driver's end, which notes what it hears. An asynchronous context manager."""

    def __init__(self, patience: float = 60.0) -> None:
        self.watchers = Watchers()
        self.server = ProcessLinkServer("127.0.0.1", patience, self.watchers)
        self.lines: list[ProcessLink] = []
        self.printed: dict[tuple[int, int], bytes] = {}
        """What each process has printed on standard output."""
        self.skipped: list[OutputSkipped] = []
        self.closed = 0
        self.started: list[tuple[int, int]] = []
        self.gone: list[tuple[int, int]] = []
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Driver:
        await self.server.start(self._note(self.gone), self._note(self.started), self._printer, _weaver)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.sleep(0)  # a connection that has just come gets its task
        self.server.close()
        while serving := asyncio.all_tasks() - {asyncio.current_task()}:
            done, _ = await asyncio.wait(serving, timeout=BOUND, return_when=asyncio.FIRST_COMPLETED)
            assert done, serving
            self.server.close()  # also what came meanwhile
            await asyncio.sleep(0)  # a transport is closed one round of the loop after its task

    def _note(self, where: list[tuple[int, int]]) -> Callable[[int, int], None]:
        def note(procs: int, rank: int) -> None:
            where.append((procs, rank))
            self._changed.set()

        return note

    def _printer(self, line: ProcessLink) -> Any:
        self.lines.append(line)
        self._changed.set()
        return _Printer(self, line)

    async def until_printed(self, text: str, procs: int = 7) -> None:
        """Wait until the first process of a mesh has printed this and nothing else."""
        await self.until(lambda: len(self.printed.get((procs, 0), b"")) >= len(text))
        assert self.printed[procs, 0].decode() == text

    def take(self, line: ProcessLink, message: Message) -> None:
        if message.kind == Kind.OUTPUT_SKIPPED:
            self.skipped.append(OutputSkipped.from_body(message.body))
        elif message.kind == Kind.PROCESS_OUTPUT and ProcessOutput.from_body(message.body).stream == 1:
            key = (line.procs, line.rank)
            self.printed[key] = self.printed.get(key, b"") + b"".join(message.parts)
        self._changed.set()

    def close(self) -> None:
        self.closed += 1
        self._changed.set()

    async def next_change(self, most: float) -> None:
        """Wait until the driver hears something, but at most for so many seconds."""
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), most)

    async def until(self, true: Callable[[], Any]) -> None:
        """Wait until something that the driver hears makes a condition true."""

        async def wait() -> None:
            while not true():
                self._changed.clear()
                await self._changed.wait()

        await asyncio.wait_for(wait(), BOUND)


class _Printer:
    def __init__(self, driver: Driver, line: ProcessLink) -> None:
        self._driver, self._line = driver, line

    def take(self, message: Message) -> None:
        self._driver.take(self._line, message)

    def close(self) -> None:
        self._driver.close()


async def _weaver() -> str:
    return "tcp://weaver"


class Process:
    """A process that does what it is told by lines on its standard input. A context manager."""

    def __init__(
        self, address: ProcessLinkAddress, procs: int = 7, rank: int = 0, meets: bool = False, output: bool = True
    ) -> None:
        told = json.dumps([list(address), procs, rank, meets, output])
        self.popen = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, told],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def tell(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    async def ended(self) -> int:
        """Wait for the end of the process; return its exit code."""
        return await asyncio.to_thread(self.popen.wait, BOUND)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdin is not None
        self.popen.stdin.close()
