"""`PlanRuns`: the plans that the gateway carries out, one at a time for each user, and the last ones of each.

A run of a plan asks a `PlanWeaver` for the weaver, from a thread beside the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, TypeVar

from loom.chaos.plans import Plan, parse_plan
from loom.chaos.runs.progress import PlanProgress
from loom.chaos.runs.run import PlanExecution
from loom.control.commands import Acknowledgement
from loom.control.fault_kinds import Place
from loom.control.operations import InjectFault, RemoveFault
from loom.errors import (
    Denied,
    LimitReached,
    LoomError,
    NotFound,
    PlanGoesOn,
    TokenRevoked,
    WrongArguments,
    describe_error,
)
from loom.process import tasks
from loom.token_file import ADMIN
from loom.weaver.client import WeaverClient
from loom.weaver.keys import EVERYONE
from loom.weaver.views import CommandState, GoodputRecord, MetricPoint, ReplicaInfo, WeaverEvent
from loom_gateway.access.control import AccessControl
from loom_gateway.access.sessions import Principal
from loom_gateway.access.token_authority import SteadyDay
from loom_gateway.rest.weaver_changes import Note, WeaverChanges, checked_change

EVENTS = 1000
"""Events that are read at once."""

REMOVED_WITHIN = 5.0
"""Seconds to wait until a replica has removed a fault."""

R = TypeVar("R")


class PlanInjection:
    """A fault that a plan has injected."""

    def __init__(self, weaver: PlanWeaver, answer: Mapping[str, Any]) -> None:
        self._weaver = weaver
        self._state = CommandState.from_body(answer)
        self._piece: Mapping[str, Any] = answer.get("evidence") or {}
        self.id = self._state.id

    def done(self) -> bool:
        return self._state.done

    def outcomes(self) -> Mapping[str, Acknowledgement]:
        if not self._state.done:
            self._state = CommandState.from_body(self._weaver.ask("command_state", id=self.id, wait=0.0))
        return self._state.outcomes

    @property
    def evidence(self) -> Mapping[str, Mapping[str, Any]]:
        found = {id: one.evidence for id, one in self._state.outcomes.items() if one.ok}
        return {"": self._piece, **found} if self._piece else found


class PlanWeaver:
    """Asks the weaver for a principal, and injects faults as REST does: with its checks and into its audit.

    Args:
        loop: the gateway's event loop. Methods are called from another thread.
        of: the user whose replicas the plan strikes, as `whose` returns.
        about: what the audit has of the plan.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        weaver: WeaverClient,
        changes: WeaverChanges,
        access: AccessControl,
        principal: Principal,
        of: dict[str, str],
        about: dict[str, str],
    ) -> None:
        self._loop = loop
        self._client = weaver
        self._changes = changes
        self._access = access
        self._principal = principal
        self._of = of
        self._about = about
        self._day = SteadyDay()

    def confirm(self) -> None:
        """Raise `TokenRevoked` if the principal's token was revoked or has expired since the plan was begun."""
        self._access.confirm(self._principal, self._day.now())

    def ask(self, operation: str, **arguments: Any) -> Any:
        """Do an operation of `OPERATIONS`."""
        return self._wait(self._client.do(operation, self._principal.token.name, **self._of, **arguments))

    def status(self) -> Mapping[str, Any]:
        return dict(self.ask("status"))

    def replicas(self) -> Mapping[str, ReplicaInfo]:
        return {one["id"]: ReplicaInfo.from_body(one) for one in self.ask("replicas")}

    def events(self, after: int) -> list[WeaverEvent]:
        found: list[WeaverEvent] = []
        while True:
            new = [WeaverEvent.from_body(one) for one in self.ask("events", after=after, limit=EVENTS)]
            found += new
            if len(new) < EVENTS:
                return found
            after = new[-1].id

    def history(self, replica: str, metric: str, *, since: float, points: int) -> list[MetricPoint]:
        found = self.ask("history", replica=replica, metric=metric, since=since, points=points)
        return [MetricPoint(at, step, float(value)) for at, step, value in found]

    def goodput(self) -> Mapping[str, GoodputRecord]:
        return {one["job"]: GoodputRecord.from_body(one) for one in self.ask("goodput")}

    def inject(
        self,
        fault: str,
        target: str | list[str],
        duration: float | None,
        params: Mapping[str, Any],
        id: str | None = None,
    ) -> PlanInjection:
        """Inject a fault, if the principal still may."""
        wanted = {"fault": fault, "target": target, "duration": duration, "params": params, "id": id}
        asked = checked_change(InjectFault, wanted)
        return PlanInjection(self, self._wait(self._inject(asked)))

    def remove_injection(self, id: str) -> CommandState:
        """Remove a fault, and wait a little until that is done."""
        removing = self._audited(lambda note: self._changes.make(RemoveFault(id), self._principal, self._of, note))
        given = self._wait(removing)
        return CommandState.from_body(self.ask("command_state", id=given["id"], wait=REMOVED_WITHIN))

    async def _inject(self, asked: InjectFault) -> Any:
        self.confirm()
        await self._access.audit.ask(self._principal.token, self._principal.peer, **self._about)
        return await self._audited(lambda note: self._changes.make(asked, self._principal, self._of, note))

    async def _audited(self, change: Callable[[Note], Awaitable[Any]]) -> Any:
        """Make a change, and write into the audit what was noted of it."""
        noted: dict[str, object] = {}
        try:
            return await change(lambda event, details: noted.update(details))
        except LoomError as error:
            noted["error"] = str(error)[:500]
            raise
        finally:
            who = self._principal
            await self._access.audit.write("injected", who.token, who.peer, **{**noted, **self._about})

    def _wait(self, asked: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()


logger = logging.getLogger(__name__)

MAX_RUNNING = 4
"""Runs of all users at a time."""

KEPT = 5
"""Runs of a user that are kept after their end, the newest ones."""

LINES = 500
"""Lines of a run that are kept, the newest ones."""

MAX_WITHIN = 4 * 3600.0
"""Seconds that a plan may take at most."""

CLOSE_WITHIN = 15.0
"""Seconds that the runs have to remove their faults when the gateway ends."""

CONFIRM_EVERY = 1.0
"""Seconds between two checks whether who began a run still may."""


class PlanState(str, Enum):
    """The state of a run."""

    RUNNING = "running"
    HELD = "held"
    """It has ended, and all expectations hold."""
    BROKEN = "broken"
    """It has ended, and an expectation does not hold."""
    CANCELLED = "cancelled"
    FAILED = "failed"
    """It could not be carried out."""


class PlanRun:
    """A run of a plan, in a thread of its own."""

    def __init__(self, plan: Plan, user: str, by: str, weaver: PlanWeaver) -> None:
        self.id = uuid.uuid4().hex[:16]
        self.plan = plan
        self.user = user
        self.by = by
        """The name of the token with which it was begun."""
        self.began = time.time()
        self.state = PlanState.RUNNING
        self.why: str | None = None
        """Why it was cancelled or has failed."""
        self.progress = PlanProgress()
        self.lines: list[tuple[float, str]] = []
        """The events: seconds since the epoch, and a text."""
        self.over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._cancelled: str | None = None
        self.confirm = weaver.confirm
        """Raises `TokenRevoked` if the one who began it may not any more."""
        self._run = PlanExecution(plan, weaver, self._say, lambda: self.progress.look(self._run))
        self.progress.begin(self._run)

    async def check(self) -> None:
        """Raise `BadPlan` if a fault has no target, or one that is not marked as injectable; change nothing."""
        await asyncio.to_thread(self._run.check)

    def start(self) -> None:
        threading.Thread(target=self._carry_out, name="loom-plan", daemon=True).start()

    def cancel(self, why: str) -> None:
        """Have the run remove its faults and end soon."""
        if self.state is PlanState.RUNNING:
            self._cancelled = self._cancelled or why
            self._run.cancel(why)

    def _carry_out(self) -> None:
        state, why = PlanState.FAILED, None
        try:
            self._run.run()
            held = self.progress.end(self._run)
            state = PlanState.HELD if held else PlanState.BROKEN
            if self._cancelled is not None:
                state, why = PlanState.CANCELLED, self._cancelled
        except LoomError as error:
            why = str(error)
        except Exception as error:
            logger.exception("the run %s of a plan broke of itself", self.id)
            why = describe_error(error)
        self._loop.call_soon_threadsafe(self._end, state, why)

    def _end(self, state: PlanState, why: str | None) -> None:
        self.state, self.why = state, why
        self.over.set()

    def _say(self, line: str) -> None:
        self.lines = [*self.lines[-LINES + 1 :], (time.time(), line)]


class PlanRuns:
    """Begins runs, finds them and ends them. On the gateway's event loop."""

    def __init__(self, weaver: WeaverClient, changes: WeaverChanges, access: AccessControl) -> None:
        self._weaver = weaver
        self._changes = changes
        self._access = access
        self._runs: dict[str, PlanRun] = {}
        self._parsing: set[str] = set()
        """Users whose plan is being read."""
        self._thread = ThreadPoolExecutor(1, "plans")
        self._beginning: set[str] = set()
        """Users whose run is being checked."""
        self._closing = False

    async def check(self, text: str, seed: int | None, by: Principal, of: dict[str, str]) -> Plan:
        """Check that a plan makes sense and that each fault has a target; change nothing.

        Raises:
            BadPlan: it makes no sense, or a fault has no injectable target; the text begins with line and column.
            ScopeError: it strikes what all users share, and the principal is no admin.
        """
        made = await self._make(text, seed, by, of)
        await made.check()
        return made.plan

    async def begin(self, text: str, seed: int | None, by: Principal, of: dict[str, str]) -> PlanRun:
        """Begin a run of a plan. Raise as `check`.

        Raises:
            PlanGoesOn: a run of the user's goes on.
            LimitReached: as many runs go on as may.
        """
        _check_whole(of)
        user = of["user"]
        if user in self._beginning or any(one.user == user for one in self._running()):
            raise PlanGoesOn(f"a plan of {user!r} is carried out already: wait for its end, or cancel it")
        if self._closing or len(self._running()) + len(self._beginning) >= MAX_RUNNING:
            raise LimitReached(
                f"the gateway carries out {MAX_RUNNING} plans at a time, of all users: try again later"
            )
        self._beginning.add(user)
        try:
            made = await self._make(text, seed, by, of)
            await made.check()
        finally:
            self._beginning.discard(user)
        self._runs[made.id] = made
        self._forget(user)
        made.start()
        tasks.run_to_end("watch a plan", lambda: self._watch(made))
        return made

    def find(self, id: str, of: dict[str, str]) -> PlanRun:
        """Return a run of a user's by its id."""
        _check_whole(of)
        run = self._runs.get(id)
        if run is None or of["user"] not in (run.user, EVERYONE):
            raise NotFound(f"there is no run {id!r:.80} of a plan of {of['user']!r}")
        return run

    def of_user(self, of: dict[str, str]) -> list[PlanRun]:
        """Return the runs of a user, the newest first."""
        _check_whole(of)
        return [one for one in reversed(self._runs.values()) if of["user"] in (one.user, EVERYONE)]

    async def close(self) -> None:
        """Cancel all runs, and wait until their faults are removed."""
        self._closing = True
        going = self._running()
        for run in going:
            run.cancel("the gateway ends")
        waits = [asyncio.ensure_future(run.over.wait()) for run in going]
        if waits:
            _, late = await asyncio.wait(waits, timeout=CLOSE_WITHIN)
            for one in late:
                one.cancel()

    async def _make(self, text: str, seed: int | None, by: Principal, of: dict[str, str]) -> PlanRun:
        _check_whole(of)
        if of["user"] == EVERYONE:
            raise WrongArguments("a plan is about the replicas of one user: name the user")
        plan = await self._parsed(text, by.user)
        if seed is not None:
            plan = dataclasses.replace(plan, seed=seed)
        self._check_faults(plan, by)
        about = {"plan": plan.name[:100], "of": of["user"]}
        loop = asyncio.get_running_loop()
        weaver = PlanWeaver(loop, self._weaver, self._changes, self._access, by, of, about)
        return PlanRun(plan, of["user"], by.token.name, weaver)

    async def _parsed(self, text: str, user: str) -> Plan:
        """Read a plan, one at a time, and one of each user: it may take seconds."""
        if user in self._parsing:
            raise LimitReached(f"a plan of {user!r} is being read already: wait for it")
        self._parsing.add(user)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, parse_plan, text)
        finally:
            self._parsing.discard(user)

    def _check_faults(self, plan: Plan, by: Principal) -> None:
        if plan.within > MAX_WITHIN:
            raise WrongArguments(f"a plan takes at most {MAX_WITHIN:g} s here (`within`), not {plan.within:g}")
        for fault in plan.faults:
            if fault.kind.place is not Place.GATEWAY:
                continue
            if fault.kind.of == "gateway":
                text = "the gateway carries the plan out, and would end with it: use `loom inject run`"
                raise plan.problem(fault, text)
            if fault.kind.of == "weaver":
                self._access.require(by, ADMIN, f"to inject {fault.fault}, which strikes all users,")

    async def _watch(self, run: PlanRun) -> None:
        """Cancel a run when the token with which it was begun is revoked or expires."""
        while not run.over.is_set():
            try:
                run.confirm()
            except TokenRevoked as error:
                run.cancel(str(error))
            try:
                await asyncio.wait_for(run.over.wait(), CONFIRM_EVERY)
            except asyncio.TimeoutError:
                continue

    def _running(self) -> list[PlanRun]:
        return [one for one in self._runs.values() if one.state is PlanState.RUNNING]

    def _forget(self, user: str) -> None:
        ended = [one for one in self._runs.values() if one.user == user and one.state is not PlanState.RUNNING]
        for one in ended[:-KEPT]:
            del self._runs[one.id]


def _check_whole(of: dict[str, str]) -> None:
    """Refuse a guest of a session: a plan is about all that the session's user has."""
    if "in_session" in of:
        raise Denied("a plan reaches beyond a session: only the session's user has it carried out")
