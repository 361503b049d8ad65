"""The link between a driver and the weaver: the weaver's address, and reports about the session's processes.

The driver learns at once of a process that is gone, even if its machine is gone too. The weaver alone would have to
wait for missing heartbeats. Reports go to the place where the gateway asks, too, and wait while the weaver is away.

Limits that hold for all sessions of a user together (`UserLimits`) come this way, too. Each session has a process
of its own, and nothing may be asked for each call. So every driver reports to its user's weaver, with what it
reports anyway every two seconds, what its session uses, and gets in return what the user's other sessions use. It
counts against what is left. Between two reports, sessions may exceed a limit together; none ever does alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from loom.control.latencies import Latencies
from loom.control.operations import GetAddress, GetRunsBegun, NoteReached, ReportCalls, ReportEnded, ReportSpawned
from loom.errors import LoomError, WeaverUnavailable
from loom.process import tasks
from loom.process.backoff import Backoff
from loom.weaver.client import WeaverClient
from loom.weaver.run_views import RunsPlace
from loom.wire.bodies import OpenSession
from loom_gateway.driver.clients.unread_results import StoredResults


class UserLimits:
    """The limits of one session, as far as the user's other sessions leave them.

    Args:
        max_in_flight: unanswered operations of all sessions; 0 is any number.
        results: keeps results, up to its limit for all sessions.
        in_flight: returns the number of this session's unanswered operations.
    """

    def __init__(self, max_in_flight: int, results: StoredResults, in_flight: Callable[[], int]) -> None:
        self.max_in_flight = max_in_flight
        self._results = results
        self._in_flight = in_flight
        self.in_flight_left = max_in_flight
        """The part of `max_in_flight` that the other sessions leave."""

    def used(self) -> tuple[int, int]:
        """Return (unanswered operations of this session, bytes of results that it keeps)."""
        return self._in_flight(), self._results.used

    def take(self, others: Any) -> None:
        """Take what the weaver says that the other sessions use; None if it said nothing, as when it is away."""
        found = others if isinstance(others, dict) else {}
        self.in_flight_left = max(0, self.max_in_flight - int(found.get("in_flight", 0)))
        self._results.kept_elsewhere = int(found.get("kept", 0))


logger = logging.getLogger(__name__)

FIRST_WEAVER = 3.0  # seconds for which the first processes of a session wait for a weaver that is starting
MOST_REPORTS = 10_000  # reports that wait for an absent weaver; beyond it, the oldest are dropped
BACKOFF = Backoff(0.05, 5.0)  # pauses between attempts to reach the weaver
AUDIT_TIMEOUT = 5.0  # seconds that the weaver has to take a line for the audit
CALLS_EVERY = 2.0  # seconds between two reports of the calls' durations


class DriverWeaverLink:
    """Reports one session's processes to the weaver, and asks it. On the driver's event loop."""

    def __init__(self, place: str | None, opening: OpenSession, loop: asyncio.AbstractEventLoop) -> None:
        self._client: WeaverClient | None = None
        if place is not None:
            self._client = WeaverClient(place, lambda: self.key)
            self._client.came()
        self.session = opening.session
        self.key = opening.weaver_key  # the newest that a gateway has sent
        self._loop = loop
        self._finding: asyncio.Task[str] | None = None  # shared by all processes that start
        self._find_until = 0.0  # the loop time until which processes wait
        self._reports: asyncio.Queue[ReportSpawned | ReportEnded] = asyncio.Queue(MOST_REPORTS)
        self._reporting: asyncio.Task[None] | None = None

    async def address(self) -> str:
        """Return the address for threadlets, or an empty string. A starting weaver gets `FIRST_WEAVER` seconds."""
        if self._client is None:
            return ""
        if self._finding is None:
            self._finding = self._loop.create_task(self._find())
            self._find_until = self._loop.time() + FIRST_WEAVER
        await asyncio.wait((self._finding,), timeout=max(0.0, self._find_until - self._loop.time()))
        return self._finding.result() if self._finding.done() else ""

    async def _find(self) -> str:
        for wait in BACKOFF:
            try:
                return str(await self.client.ask_for(GetAddress()))
            except LoomError:
                pass
            except Exception:
                logger.exception("the weaver's address is not known yet")
            await asyncio.sleep(wait)
        raise AssertionError("the attempts do not end")

    def descriptors(self) -> list[int]:
        """Return the descriptors of the connections to the weaver."""
        return [] if self._client is None else self._client.descriptors()

    @property
    def client(self) -> WeaverClient:
        """The client for requests to the weaver. Raises `WeaverUnavailable` if there is none."""
        if self._client is None:
            raise WeaverUnavailable("this gateway has no weaver")
        return self._client

    async def answer(self, operation: str, arguments: Mapping[str, Any], timeout: float) -> Any:
        """Do an operation for the session's user and return its result; the weaver has ``timeout`` seconds."""
        given = {name: value for name, value in arguments.items() if name != "by"}
        try:
            return await asyncio.wait_for(self.client.do(operation, self.session, **given), timeout)
        except asyncio.TimeoutError:
            raise WeaverUnavailable(f"the weaver did not answer within {timeout:g} s") from None

    async def runs_begun(self, places: Collection[str], timeout: float) -> dict[str, list[RunsPlace]] | None:
        """Return, by place, the runs of the session whose processes began there; None if the weaver is away."""
        try:
            asked = GetRunsBegun(self.session, sorted(places))
            found = await asyncio.wait_for(self.client.ask_for(asked), timeout)
        except (LoomError, asyncio.TimeoutError):
            return None
        begun: dict[str, list[RunsPlace]] = {}
        for one in found:
            begun.setdefault(one[0], []).append(RunsPlace(*one))
        return begun

    async def write_down(self, reached: NoteReached) -> None:
        """Have it written into the gateway's audit what a client does in the process of a rank.

        Raises:
            WeaverUnavailable: the weaver, which passes it on, is away. Nothing may be done then.
        """
        if self._client is not None:
            await self._client.ask_for(reached, AUDIT_TIMEOUT)

    def started(self, procs: int, name: str, ranks: list[int]) -> None:
        self._report(ReportSpawned(self.session, procs, name, what=f"{len(ranks)} of {name}"))

    def gone(self, procs: int, name: str, rank: int, what: str, reason: str, **seen: Any) -> None:
        """Report a process that is gone, of a proc mesh with a name.

        Args:
            what: ``stopped`` if it was meant to end, else ``died``.
            seen: further fields of a `ReportEnded`.
        """
        self._report(ReportEnded(self.session, procs, name, rank, what=what, reason=reason, **seen))

    def _report(self, report: ReportSpawned | ReportEnded) -> None:
        if self._client is None:
            return
        if self._reports.full():
            self._reports.get_nowait()
            self._reports.task_done()
        self._reports.put_nowait(report)
        if self._reporting is None:
            client = self._client
            self._reporting = tasks.keep_running("report to the weaver", lambda: self._keep_reporting(client))

    async def report_calls(
        self,
        latencies: Latencies,
        workers: Callable[[], list[str]],
        limits: UserLimits,
        replicas: Callable[[float | None], None],
    ) -> None:
        """Report periodically, for as long as the session lives, its workers, its calls, and what it uses.

        ``replicas`` is called after each report with the seconds for which no replica of the session has made a
        step: infinity if there is none, None if the weaver does not answer.
        """
        if self._client is None:
            await asyncio.Event().wait()  # there is nothing to report to
        while self._client is not None:
            others = None
            with contextlib.suppress(LoomError):  # the weaver is away: the next report includes these calls
                calls, died = latencies.to_dict(), sum(tasks.died.values())
                report = ReportCalls(self.session, calls["counts"], calls["sum"], workers(), *limits.used(), died)
                others = await self._client.ask_for(report)
            limits.take(others)
            replicas(_idle(others))
            await asyncio.sleep(CALLS_EVERY)

    async def flush(self, timeout: float) -> None:
        """Wait until the weaver has every report, for at most ``timeout`` seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._reports.join(), timeout)

    async def _keep_reporting(self, client: WeaverClient) -> None:
        while True:
            report = await self._reports.get()
            for wait in BACKOFF:
                try:
                    await client.ask_for(report)
                except WeaverUnavailable as error:
                    logger.info("%s", error)
                    await asyncio.sleep(wait)
                    continue
                except LoomError as error:
                    logger.warning("the weaver does not take %s: %s", report.name, error)
                break
            self._reports.task_done()


def _idle(answer: Any) -> float | None:
    """Return the seconds without a step of a replica, from the weaver's answer to a report."""
    if not isinstance(answer, dict):
        return None
    idle = answer.get("idle")
    return float(idle) if isinstance(idle, (int, float)) else math.inf
