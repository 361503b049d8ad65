"""What a session's processes are told of the weaver, and what the weaver is told of them.

The driver knows at once of a process that is gone, also where its machine is; the weaver would have to wait for
heartbeats. It is told over the socket that the gateway asks it by. What it is to be told waits while it is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections import deque
from typing import Any

from loom.control.framing import Splitter, pack
from loom.errors import LoomError, ProtocolMismatch, WeaverUnavailable, error_for_code
from loom.latencies import Latencies
from loom_gateway.sessions.driver_files import DriverFiles

__all__ = ["WeaverLink"]

logger = logging.getLogger(__name__)

FIRST_WEAVER = 3.0
"""Seconds for which the first processes of a session wait for a weaver that is just being started."""

MOST_REPORTS = 10_000
"""Reports that wait for a weaver that is away; of more, the oldest are dropped."""

FIRST_DELAY, LONGEST_DELAY = 0.05, 5.0
"""Seconds before the weaver is looked for again."""

CALLS_EVERY = 2.0
"""Seconds between two reports of how long calls took."""

_RECEIVE = 64 << 10


class WeaverLink:
    """Tells the weaver of one session's processes, and asks it. For the driver's event loop.

    Args:
        folder: the weaver's; None where there is no weaver.
        session: the session's name.
        loop: the driver's event loop.
    """

    def __init__(self, folder: str | None, session: str, loop: asyncio.AbstractEventLoop) -> None:
        self._files = None if folder is None else DriverFiles(os.path.join(folder, "weaver"))
        self.session = session
        self._loop = loop
        self._finding: asyncio.Task[str] | None = None
        self._find_until = 0.0
        self._numbers = itertools.count(1)
        self._reports: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MOST_REPORTS)
        self._has_reports = asyncio.Event()
        self._all_reported = asyncio.Event()
        self._all_reported.set()
        self._reporting: asyncio.Task[None] | None = None

    # -- for the processes ----------------------------------------------------------------------------------

    async def address(self) -> str:
        """Return what threadlets find the weaver by; an empty text if there is no weaver.

        A weaver that is just being started is waited for, until `FIRST_WEAVER` seconds after the first call.
        """
        if self._files is None:
            return ""
        if self._finding is None:
            self._finding = self._loop.create_task(self._find())
            self._find_until = self._loop.time() + FIRST_WEAVER
        await asyncio.wait((self._finding,), timeout=max(0.0, self._find_until - self._loop.time()))
        return self._finding.result() if self._finding.done() else ""

    async def _find(self) -> str:
        delay = FIRST_DELAY
        while True:
            try:
                return str(await self.ask("address", {}))
            except LoomError:
                await asyncio.sleep(delay)
                delay = min(2 * delay, LONGEST_DELAY)

    # -- for the weaver -------------------------------------------------------------------------------------

    def started(self, procs: int, name: str, ranks: list[int]) -> None:
        """Tell of processes that have started."""
        self._report("spawned", procs, None, f"{len(ranks)} of {name}")

    def gone(self, procs: int, rank: int, stopped: bool, reason: str) -> None:
        """Tell of a process that is gone.

        Args:
            stopped: whether it was meant to end.
        """
        self._report("supervision", procs, rank, "stopped" if stopped else "died", reason=reason)

    def _report(self, operation: str, procs: int, rank: int | None, what: str, **more: Any) -> None:
        if self._files is None:
            return
        self._reports.append(
            (operation, {"session": self.session, "procs": procs, "rank": rank, "what": what, **more})
        )
        self._all_reported.clear()
        self._has_reports.set()
        if self._reporting is None:
            self._reporting = self._loop.create_task(self._keep_reporting(self._files.socket))

    async def ask(self, operation: str, arguments: dict[str, Any], timeout: float | None = None) -> Any:
        """Ask the weaver something.

        Args:
            operation: one that `loom.weaver` knows.
            arguments: of the operation.
            timeout: seconds that it has to answer; None: any number.

        Raises:
            WeaverUnavailable: it is away, there is none, or it does not answer in time.
            LoomError: what it answers.
        """
        if self._files is None:
            raise WeaverUnavailable("this gateway has no weaver")
        try:
            return await asyncio.wait_for(self._ask(self._files.socket, operation, arguments), timeout)
        except asyncio.TimeoutError:
            raise WeaverUnavailable(f"the weaver did not answer within {timeout:g} s") from None

    async def _ask(self, path: str, operation: str, arguments: dict[str, Any]) -> Any:
        try:
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(pack(["ask", 1, operation, arguments]))
                answer = await _answer(reader, Splitter())
            finally:
                writer.close()
        except (OSError, EOFError) as error:
            raise WeaverUnavailable(f"the weaver is away: {error}") from error
        if answer[0] == "error":
            raise error_for_code(answer[2], answer[3])
        return answer[2]

    async def report_calls(self, latencies: Latencies) -> None:
        """Tell how long calls took, again and again, for as long as the session lives."""
        while self._files is not None:
            await asyncio.sleep(CALLS_EVERY)
            with contextlib.suppress(LoomError):  # it is away: the next report has these, too
                await self.ask("calls", {"session": self.session, **latencies.to_dict()})

    async def flush(self, timeout: float) -> None:
        """Wait until the weaver has been told everything, for so many seconds at most."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._all_reported.wait(), timeout)

    async def _keep_reporting(self, path: str) -> None:
        delay = FIRST_DELAY
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(path)
            except OSError:
                await asyncio.sleep(delay)
                delay = min(2 * delay, LONGEST_DELAY)
                continue
            delay = FIRST_DELAY
            try:
                await self._send_reports(reader, writer)
            except (OSError, EOFError, ProtocolMismatch) as error:
                logger.info("the weaver went away: %s", error)
                await asyncio.sleep(delay)
            finally:
                writer.close()

    async def _send_reports(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        splitter = Splitter()
        while True:
            if not self._reports:
                self._all_reported.set()
                self._has_reports.clear()
                await self._has_reports.wait()
                continue
            operation, arguments = self._reports[0]
            writer.write(pack(["ask", next(self._numbers), operation, arguments]))
            await writer.drain()
            answer = await _answer(reader, splitter)
            if answer[0] == "error":
                logger.warning("the weaver does not take %s: %s", operation, answer[3:])
            with contextlib.suppress(IndexError):  # there were so many that it was dropped meanwhile
                if self._reports[0][1] is arguments:
                    self._reports.popleft()


async def _answer(reader: asyncio.StreamReader, splitter: Splitter) -> list[Any]:
    while True:
        data = await reader.read(_RECEIVE)
        if not data:
            raise EOFError("it closed the connection")
        frames = splitter.feed(data)
        if frames:
            return frames[0]
