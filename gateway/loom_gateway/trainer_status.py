"""Kubeflow's runtime status: trainings in pods without Loom, which report to the gateway by three variables.

The POST is that of transformers' ``KubeflowCallback``: ``KUBEFLOW_TRAINER_SERVER_URL`` is the address of this
route, ``_TOKEN`` a file with a token of one replica, ``_CA_CERT`` the gateway's authority. The gateway speaks the
threadlets' protocol for the replica, which is one like any other, but takes no command.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import AwareDatetime, BaseModel, Field

from loom.control.address import parse_weaver_address
from loom.control.commands import USER_COMMANDS, Acknowledged, Acknowledgement, Command
from loom.control.frame import MAX_COUNT, MAX_NAME
from loom.control.handshake import Activity, Bye, Offers, ThreadletHello, TrainingEnding
from loom.control.reports import Heartbeat, Phase, StatusReports, Stored
from loom.errors import LoomError, NotFound, ScopeError, Unavailable, WeaverUnavailable, WrongArguments
from loom.process import tasks
from loom.replica_link import ReplicaLink
from loom.token_file import REPORT
from loom.weaver.client import WeaverClient
from loom.weaver.states import ReplicaEnding
from loom_gateway.access.route_scopes import TRAINER_STATUS
from loom_gateway.access.sessions import Principal

SILENT_AFTER = 600.0
"""Seconds without a report after which a replica's process counts as gone: one comes with each step at most."""

CLOCKS_APART = 300.0
"""Seconds between a pod's clock and the gateway's, at most."""

MAX_METRICS = 1000
"""Names of metrics of a replica: the weaver takes no more."""

STORED_WITHIN = 4.0
"""Seconds that the weaver has to store a report: the callback waits for 5."""

_INSTANCE = "trainer-status-"
_NO_COMMANDS = "its process reports by Kubeflow's status alone, and takes no commands: run it under `loom run`"
_NOTHING_OFFERED = Offers({kind.value: _NO_COMMANDS for kind in USER_COMMANDS}, any_key=False)


class TrainerMetric(BaseModel):
    """A metric."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    value: Annotated[str, Field(max_length=64)] | float
    """A number, or its text."""


class TrainerStatus(BaseModel):
    """The progress of a training."""

    progressPercentage: Annotated[int, Field(ge=0, le=100)] | None = None  # noqa: N815 - Kubeflow's names
    estimatedRemainingSeconds: Annotated[int, Field(ge=0)] | None = None  # noqa: N815
    metrics: Annotated[list[TrainerMetric], Field(max_length=500)] = []
    lastUpdatedTime: AwareDatetime  # noqa: N815

    def values(self) -> dict[str, float]:
        """Return the metrics. Raise `WrongArguments` if one is no number."""
        found: dict[str, float] = {}
        for metric in self.metrics:
            try:
                found[metric.name] = float(metric.value)
            except ValueError:
                raise WrongArguments(
                    f"the metric {metric.name!r:.80} is {metric.value!r}, which is no number"
                ) from None
        if self.progressPercentage is not None:
            found["progress_percent"] = float(self.progressPercentage)
        if self.estimatedRemainingSeconds is not None:
            found["eta_seconds"] = float(self.estimatedRemainingSeconds)
        return found


class TrainerStatusReport(BaseModel):
    """What the callback posts."""

    trainerStatus: TrainerStatus  # noqa: N815


def trainer_routes(weaver: WeaverClient) -> APIRouter:
    """Return the route, which needs a token of one replica."""
    router, statuses = APIRouter(tags=["weaver"]), TrainerStatuses(weaver)

    @router.post(TRAINER_STATUS)
    async def trainer_status(report: TrainerStatusReport, request: Request) -> dict[str, str]:
        """Take the status of a training that runs without Loom, and pass it on: the training waits for the answer.

        That to the last report comes when the weaver has stored all. The body and the answer are those of
        Kubeflow Trainer's runtime status.
        """
        principal: Principal = request.scope["loom.principal"]
        if principal.token.scope != REPORT or principal.token.replica is None:
            raise ScopeError("a training reports with a token of one replica: `loom token create --replica NAME`")
        await statuses.take(principal.user, principal.token.replica, principal.peer, report.trainerStatus)
        return {"status": "ok"}

    return router


class TrainerStatuses:
    """The replicas that report so, by user and name."""

    def __init__(self, weaver: WeaverClient) -> None:
        self._weaver = weaver
        self._replicas: dict[tuple[str, str], _Reported] = {}

    async def take(self, user: str, replica: str, host: str, status: TrainerStatus) -> None:
        """Report the status of a user's replica.

        Raises:
            WrongArguments: it makes no sense, comes again, or is from another time than now.
            Unavailable: the weaver has not stored it.
        """
        found = self._replicas.setdefault((user, replica), _Reported(self._weaver, user, replica, host))
        await found.take(status)


class _Reported:
    """One replica, and its connection with the weaver."""

    def __init__(self, weaver: WeaverClient, user: str, replica: str, host: str) -> None:
        self._weaver, self._user, self._id, self._host = weaver, user, replica, host
        self._taking = asyncio.Lock()
        self._link = self._new_link()
        self._reading: asyncio.Task[Any] | None = None
        """Done when the connection of the last process is over."""
        self._seq = 0
        self._step: int | None = None
        self._most: int | None = None
        """The number of steps."""
        self._names: set[str] = set()
        """The metrics so far."""
        self._reported = 0.0
        """The time of the last report, by the pod's clock."""
        self._heard = 0.0
        """When it came, by the monotonic clock."""
        self._stored = asyncio.Event()
        """Set when the last report is stored, or the connection is lost."""
        self._stored_seq = 0

    def _new_link(self) -> ReplicaLink:
        return ReplicaLink(self._refuse, self._note, _NO_COMMANDS)

    async def take(self, status: TrainerStatus) -> None:
        values, at = status.values(), _checked(status.lastUpdatedTime)
        step, epoch, most = (_count(name, values.pop(name, None)) for name in _COUNTS)
        async with self._taking:
            ended, begins = status.progressPercentage == 100, status.progressPercentage == 0
            if not self._link.is_open or (begins and self._step):
                before = await self._before()
                if ended and before.get("ending") == ReplicaEnding.COMPLETED:
                    return  # it is known already
                await self._connect(before, begins)
            if at <= self._reported:
                raise WrongArguments(
                    f"lastUpdatedTime is not after that of the last report of {self._id!r}: it came before"
                )
            self._check_names(values)
            self._most = self._most if most is None else most
            step = self._most if ended and step is None else step  # the callback's last report has no step
            self._seq += 1
            self._step = self._step if step is None else step
            row = [self._seq, at, step, epoch, most, values, None]
            self._stored.clear()
            self._link.send(StatusReports([row]))
            self._reported, self._heard = at, time.monotonic()
            if ended:
                await self._settle()
                self._link.send(Bye("its trainer has reported 100 %", TrainingEnding.FINISHED))
                self._link = self._new_link()  # the weaver ends the one before when it has read the goodbye

    def _check_names(self, values: Mapping[str, float]) -> None:
        names = self._names | values.keys()
        if len(names) > MAX_METRICS:
            raise WrongArguments(
                f"{self._id!r} reports more than {MAX_METRICS} metrics, the most that a replica has"
            )
        self._names = names

    async def _settle(self) -> None:
        """Wait until every report is stored."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stored.wait(), STORED_WITHIN)
        if self._stored_seq < self._seq:
            self._reported = 0.0  # so that the same report may come again
            self._link.abort()
            raise Unavailable(f"the weaver has not stored the last report of {self._id!r}: report again")

    async def _before(self) -> Mapping[str, Any]:
        """Return the replica as the weaver knows it from a process that reported so; nothing if there was none."""
        try:
            before = await self._weaver.ask("replica", user=self._user, id=self._id)
        except NotFound:
            return {}
        return dict(before) if str(before["instance"]).startswith(_INSTANCE) else {}

    async def _connect(self, before: Mapping[str, Any], begins: bool) -> None:
        """Connect as the process that was the replica before, or if a training ``begins`` as a new one."""
        self._reported = before.get("reported") or 0.0
        self._step, self._most = before.get("step"), before.get("max_step")
        instance = before.get("instance")
        anew = instance is None or before["ending"] == ReplicaEnding.COMPLETED or (begins and self._step)
        if anew:
            if self._link.is_open:
                self._link.send(Bye("another training has begun under its name", TrainingEnding.EARLY))
            await self._await_end()
            instance, self._step = f"{_INSTANCE}{uuid.uuid4().hex}", None
        address = parse_weaver_address(await self._weaver.ask("address", user=self._user))
        link = self._new_link()
        try:
            welcome = await link.connect(address, partial(self._hello, instance=str(instance)))
        except (OSError, asyncio.TimeoutError) as error:
            raise WeaverUnavailable(f"the weaver does not answer: {error!r}") from error
        self._link, self._seq, self._heard = link, welcome.seq, time.monotonic()
        self._reading = tasks.run("read for a trainer", self._read(link))
        tasks.run("beat for a trainer", self._beat(link, welcome.beat))

    async def _await_end(self) -> None:
        """Wait until the weaver has read the goodbye of the process before: it refuses a second one till then."""
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=STORED_WITHIN)

    def _hello(self, key: str, instance: str) -> ThreadletHello:
        state = None if self._step is None else Activity.RUNNING
        nothing: dict[str, Any] = {"procs": None, "rank": None, "actors": None, "session": None}
        return ThreadletHello(
            key=key,
            replica=self._id,
            instance=instance,
            group=self._id,
            pid=0,
            host=self._host,
            devices=(),
            handlers={},
            config={},
            state=state,
            step=self._step,
            injectable=False,
            removed={},
            offers=_NOTHING_OFFERED,
            **nothing,
        )

    async def _read(self, link: ReplicaLink) -> None:
        """Answer the weaver until the connection is over."""
        with contextlib.suppress(OSError, LoomError):
            await link.serve()
        if link is self._link:
            self._stored.set()

    def _refuse(self, command: Command) -> Acknowledged:
        return Acknowledged(command.id, Acknowledgement.failed(_NO_COMMANDS))

    def _note(self, frame: list[Any]) -> None:
        if frame[0] == Stored.KIND:
            self._stored_seq = Stored.from_body(frame).seq
            if self._stored_seq >= self._seq:
                self._stored.set()

    async def _beat(self, link: ReplicaLink, every: float) -> None:
        """Say that the process lives, until it has been silent for too long."""
        while self._link is link and link.is_open:
            silent = time.monotonic() - self._heard
            if silent > SILENT_AFTER:
                link.tell_silence(silent)
                self._link = self._new_link()  # a report on the one before, which the weaver ends, would be lost
                return
            link.send(Heartbeat(time.time(), self._step, Phase.STEP))
            await asyncio.sleep(every)


_COUNTS = ("current_step", "current_epoch", "total_steps")
"""The metrics that are a status's step, epoch and number of steps."""


def _count(name: str, value: float | None) -> int | None:
    """Return a count; a part of an epoch counts as the epoch in work. Raise `WrongArguments` if it is none."""
    if value is not None and not 0 <= value < MAX_COUNT:
        raise WrongArguments(f"the metric {name!r} is {value:g}, which is no count: it is 0 or more")
    return None if value is None else int(value)


def _checked(at: datetime) -> float:
    """Return a report's time in seconds since the epoch. Raise `WrongArguments` if it is not from now."""
    apart = at.timestamp() - time.time()
    if abs(apart) > CLOCKS_APART:
        when = "ahead of" if apart > 0 else "behind"
        raise WrongArguments(
            f"lastUpdatedTime is {abs(apart):.0f} s {when} the gateway's clock; {CLOCKS_APART:g} s are the most: "
            "set the pod's clock, or report again"
        )
    return at.timestamp()
