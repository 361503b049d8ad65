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
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import AwareDatetime, BaseModel, Field

from loom.control.address import parse_weaver_address
from loom.control.commands import Acknowledged, Acknowledgement, Command
from loom.control.frame import MAX_COUNT, MAX_NAME, Frame, pack, unpack_all
from loom.control.introduction import (
    Activity,
    Bye,
    Refusal,
    Silent,
    ThreadletHello,
    ThreadletWelcome,
    TrainingEnding,
)
from loom.control.profiles import Profile, ProfileRequest
from loom.control.reports import Heartbeat, Phase, Stack, StackRequest, StatusReports, Stored
from loom.errors import (
    LoomError,
    NotFound,
    ScopeError,
    Unavailable,
    WeaverUnavailable,
    WrongArguments,
    error_for_code,
)
from loom.process import tasks
from loom.token_file import REPORT
from loom.weaver.client import WeaverClient
from loom.wire.framing import FrameSplitter
from loom_gateway.access.route_scopes import TRAINER_STATUS
from loom_gateway.access.sessions import Principal

SILENT_AFTER = 600.0
"""Seconds without a report after which a replica's process counts as gone: one comes with each step at most."""

CLOCKS_APART = 300.0
"""Seconds between a pod's clock and the gateway's, at most."""

STORED_WITHIN = 4.0
"""Seconds that the weaver has to store a report: the callback waits for 5."""

_INSTANCE = "trainer-status-"
_NO_COMMANDS = "its process reports by Kubeflow's status alone, and takes no commands: run it under `loom run`"


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
        self._writer: asyncio.StreamWriter | None = None
        self._seq = 0
        self._step: int | None = None
        self._reported = 0.0
        """The time of the last report, by the pod's clock."""
        self._heard = 0.0
        """When it came, by the monotonic clock."""
        self._stored: asyncio.Future[int] | None = None
        """Done when the last report is stored, with its number, or when the connection is lost, with 0."""

    async def take(self, status: TrainerStatus) -> None:
        values, at = status.values(), _checked(status.lastUpdatedTime)
        async with self._taking:
            ended, begins = status.progressPercentage == 100, status.progressPercentage == 0
            if self._writer is None or (begins and self._step):
                await self._connect(begins)
            if at <= self._reported:
                raise WrongArguments(
                    f"lastUpdatedTime is not after that of the last report of {self._id!r}: it came before"
                )
            step, epoch, most = (_count(values.pop(name, None)) for name in _COUNTS)
            step = most if ended and step is None else step
            self._seq += 1
            self._step = self._step if step is None else step
            row = [self._seq, at, step, epoch, most, values, None]
            self._write(StatusReports([row]))
            self._reported, self._heard = at, time.monotonic()
            if ended:
                await self._settle()
                self._write(Bye("its trainer has reported 100 %", TrainingEnding.FINISHED))
                self._writer = None

    async def _settle(self) -> None:
        """Wait until every report is stored."""
        self._stored = asyncio.get_running_loop().create_future()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stored, STORED_WITHIN)
        if not self._stored.done() or self._stored.cancelled() or self._stored.result() < self._seq:
            self._reported = 0.0  # so that the same report may come again
            self._close()
            raise Unavailable(f"the weaver has not stored the last report of {self._id!r}: report again")

    async def _connect(self, begins: bool) -> None:
        """Connect as the process that was the replica before, or if a training ``begins`` as a new one."""
        self._close()
        try:
            before = await self._weaver.ask("replica", user=self._user, id=self._id)
        except NotFound:
            before = {}
        instance = str(before.get("instance", ""))
        ours = instance.startswith(_INSTANCE)
        self._reported = (before["reported"] or 0.0) if ours else 0.0
        self._step = before["step"] if ours else None
        if not ours or before["ending"] == "completed" or (begins and self._step):
            instance, self._step = f"{_INSTANCE}{uuid.uuid4().hex}", None
        address = parse_weaver_address(await self._weaver.ask("address", user=self._user))
        try:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(pack(self._hello(address.key, instance).to_body()))
            splitter = FrameSplitter(1 << 20)
            frames = unpack_all(splitter.feed(await asyncio.wait_for(reader.read(1 << 16), STORED_WITHIN)))
        except (OSError, asyncio.TimeoutError) as error:
            raise WeaverUnavailable(f"the weaver does not answer: {error!r}") from error
        if not frames or frames[0][0] == Refusal.KIND:
            writer.transport.abort()
            refusal = Refusal.from_body(frames[0]) if frames else Refusal("unavailable", "the weaver went away")
            raise error_for_code(refusal.code, refusal.text)
        welcome = ThreadletWelcome.from_body(frames[0])
        self._writer, self._seq, self._heard = writer, welcome.seq, time.monotonic()
        tasks.run("read for a trainer", self._read(reader, writer, splitter, frames[1:]))
        tasks.run("beat for a trainer", self._beat(writer, welcome.beat))

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
            **nothing,
        )

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, splitter: FrameSplitter, first: list[Any]
    ) -> None:
        """Answer the weaver until the connection is over."""
        try:
            with contextlib.suppress(OSError, LoomError):
                for frame in first:
                    self._receive(frame, writer)
                while data := await reader.read(1 << 16):
                    for frame in unpack_all(splitter.feed(data)):
                        self._receive(frame, writer)
        finally:
            writer.transport.abort()
            if self._writer is writer:
                self._close()

    def _receive(self, frame: list[Any], writer: asyncio.StreamWriter) -> None:
        match frame[0]:
            case Stored.KIND if self._stored is not None and not self._stored.done():
                if (stored := Stored.from_body(frame).seq) >= self._seq:
                    self._stored.set_result(stored)
            case Command.KIND:
                refused = Acknowledged(str(frame[1]), Acknowledgement.failed(_NO_COMMANDS))
                writer.write(pack(refused.to_body()))
            case StackRequest.KIND:
                writer.write(pack(Stack(StackRequest.from_body(frame).id, f"{_NO_COMMANDS}\n").to_body()))
            case ProfileRequest.KIND:
                asked = ProfileRequest.from_body(frame)
                writer.write(pack(Profile(asked.id, "", 0, 0, _NO_COMMANDS).to_body()))

    async def _beat(self, writer: asyncio.StreamWriter, every: float) -> None:
        """Say that the process lives, until it has been silent for too long."""
        while self._writer is writer:
            silent = time.monotonic() - self._heard
            if silent > SILENT_AFTER:
                self._write(Silent(silent))
                self._close()
                return
            self._write(Heartbeat(time.time(), self._step, Phase.STEP))
            await asyncio.sleep(every)

    def _write(self, frame: Frame) -> None:
        if self._writer is not None:
            self._writer.write(pack(frame.to_body()))

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._stored is not None and not self._stored.done():
            self._stored.set_result(0)


_COUNTS = ("current_step", "current_epoch", "total_steps")
"""The metrics that are a status's step, epoch and number of steps."""


def _count(value: float | None) -> int | None:
    return int(value) if value is not None and 0 <= value < MAX_COUNT else None


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
