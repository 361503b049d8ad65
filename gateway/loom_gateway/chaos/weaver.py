"""`PlanWeaver`: the weaver as a run of a plan asks it, from a thread beside the gateway's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from loom.control.commands import Acknowledgement
from loom.control.operations import InjectFault, RemoveFault
from loom.errors import LoomError
from loom.weaver.client import WeaverClient
from loom.weaver.views import CommandState, GoodputRecord, MetricPoint, ReplicaInfo, WeaverEvent
from loom_gateway.access.control import AccessControl
from loom_gateway.access.sessions import Principal
from loom_gateway.access.tokens import SteadyDay
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
