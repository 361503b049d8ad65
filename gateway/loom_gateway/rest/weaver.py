"""REST under ``/api/v1/weaver/``: replicas and devices, what happened to them, and telling them what to do.

What the weaver answers goes out as it is. The models say what that is, for OpenAPI and its readers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from loom.chaos.faults import MAX_DURATION, Place, check_fault
from loom.errors import WeaverUnavailable, WrongArguments
from loom_gateway.access.control import Doors, Visit
from loom_gateway.access.middleware import DONE
from loom_gateway.rest.exact_json import exact_json
from loom_gateway.rest.faults import Pieces
from loom_gateway.weaver_process import WeaverKeeper

__all__ = ["weaver_routes"]

MAX_WAIT = 300.0
"""Seconds that one request may wait for acknowledgements."""

STACK_WAIT = 30.0
"""Seconds that it may take to get a stack."""

Metric = float | Literal["NaN", "Infinity", "-Infinity"]
"""A value of a metric. JSON has no word for those that are no number."""


class ErrorText(BaseModel):
    """What went wrong."""

    code: str
    """As `loom.errors` has it."""
    message: str


class ErrorAnswer(BaseModel):
    """Why a request was refused."""

    error: ErrorText


class WeaverStatus(BaseModel):
    """The weaver at a glance."""

    weaver: str
    """Id of this process of it; another after a restart."""
    started: float
    """Seconds since the epoch."""
    time: float
    """Now, by the weaver's clock."""
    replicas: dict[str, int]
    """How many are in each state; states with none are left out."""
    devices: int
    commands: int
    """Commands that some replica has not acknowledged."""
    event: int
    """Id of the newest event."""
    reports: int
    """Status reports taken since it started."""


class ReplicaInfo(BaseModel):
    """A training process. Times are seconds since the epoch."""

    id: str
    instance: str
    """Which process of those that have been this replica."""
    state: Literal["registering", "running", "paused", "draining", "stalled", "failed", "recovering", "finished"]
    group: str
    host: str
    pid: int
    session: str | None
    """The session that spawned it; null for one that Loom did not spawn."""
    procs: str | None
    """Its proc mesh."""
    rank: int | None
    """Its rank in that."""
    actors: str | None
    devices: list[str]
    handlers: dict[str, str]
    """Configuration keys that it takes, and the names of their types."""
    config: dict[str, Any]
    step: int | None
    epoch: int | None
    max_step: int | None
    metrics: dict[str, Metric]
    reported: float | None
    """When it made its last status report, by its own clock."""
    injectable: bool
    """Whether failures may be injected into it."""
    phase: str
    """step, between or paused."""
    registered: float
    changed: float
    """When its state changed."""
    died_of: str | None
    """Why it has failed; null unless it has."""
    connected: bool
    step_time: float | None
    """Seconds that one of its steps usually takes."""


class ReplicaList(BaseModel):
    """Replicas, in the order in which they were first seen."""

    replicas: list[ReplicaInfo]


class DeviceInfo(BaseModel):
    """A GPU, or the CPUs of a host."""

    uuid: str
    kind: str
    """gpu or cpu."""
    server: str
    type: str
    """The model."""
    memory: int
    """Bytes."""
    state: Literal["active", "inactive", "failed"]
    reason: str | None
    """Why it is not active."""
    replicas: list[str]
    """Ids of those that use it."""
    status: dict[str, Any] | None
    """The newest that was said of it: utilization (0 to 1), memory_used (bytes), temperature (°C), power (W)."""


class DeviceList(BaseModel):
    """Devices, in the order in which they were first seen."""

    devices: list[DeviceInfo]


class EventInfo(BaseModel, extra="allow"):
    """Something that happened. What more it has depends on its kind."""

    id: int
    """They grow."""
    time: float
    """Seconds since the epoch."""
    kind: str
    replica: str | None
    """The replica that it is about, if it is about one."""


class EventList(BaseModel):
    """Events, the oldest first."""

    events: list[EventInfo]


class MetricList(BaseModel):
    """Names of a replica's metrics."""

    metrics: list[str]


class MetricHistory(BaseModel):
    """The history of one metric."""

    replica: str
    metric: str
    points: list[tuple[float, int | None, Metric]]
    """Time in seconds since the epoch, step, value; the oldest first."""


class FaultInfo(BaseModel):
    """The death of a process. Times are seconds since the epoch; null where it has not come to that."""

    replica: str
    reason: str
    time: float
    """When the process was last heard of."""
    detected: float
    """When the weaver knew."""
    registered: float | None
    """When the process came that has its place now."""
    stepped: float | None
    """When that began its first step."""


class GoodputPoint(BaseModel):
    """What the sums of a job were at a time."""

    time: float
    """Seconds since the epoch."""
    seconds: dict[str, float]


class GoodputInfo(BaseModel):
    """Where the time of a job went. A second of it is a second of one of its replicas."""

    job: str
    """The replicas' group; GROUP@SESSION where a session spawned them."""
    since: float
    """Seconds since the epoch."""
    until: float
    """Now, or when its last replica ended."""
    replicas: int
    """How many live."""
    ratio: float | None
    """The share of compute, from 0 to 1; null before there is anything."""
    seconds: dict[str, float]
    """compute, lost, checkpoint, waiting, detection, respawn, idle, and what the training names besides."""
    faults: list[FaultInfo]
    """The first first."""
    course: list[GoodputPoint]
    """What the sums were since the beginning."""


class GoodputList(BaseModel):
    """Jobs, the one that began last at the end."""

    jobs: list[GoodputInfo]


class Acknowledgement(BaseModel):
    """What a replica made of a command."""

    ok: bool
    step: int | None
    """The step at which it was applied."""
    changes: dict[str, dict[str, Any]]
    """For each key that was changed its old and its new value."""
    refused: dict[str, str]
    """For each key that was not, why."""
    reason: str | None
    """Why it was not applied."""
    waiting: bool = False
    """Whether the replica has not answered yet, and may."""
    evidence: dict[str, Any] = {}
    """Of a fault: what shows that it is there."""


class CommandState(BaseModel):
    """A command that was given."""

    id: str
    replicas: list[str]
    """Whom it is for."""
    done: bool
    """Whether each of them has answered, or cannot any more."""
    outcomes: dict[str, Acknowledgement]


class WeaverAddressInfo(BaseModel):
    """Where training processes find the weaver."""

    address: str
    """The value of ``LOOM_WEAVER`` for them. It has the key that lets them in: keep it as you keep a token."""


class CommandOrder(BaseModel, extra="forbid"):
    """A command to give."""

    kind: Literal["update_config", "pause", "resume", "stop", "drain", "deactivate_device", "reactivate"]
    target: str | list[str] = "*"
    """A replica's id, a group, a glob over both, ``*`` for all, or a list of ids."""
    params: dict[str, Any] = {}
    """For update_config keys and their values; for the last two ``device``, the uuid."""
    wait: Annotated[float, Field(ge=0, le=MAX_WAIT)] = 0.0
    """Seconds to wait for acknowledgements before the answer."""


class FaultOrder(BaseModel, extra="forbid"):
    """A fault to inject."""

    fault: Annotated[str, Field(max_length=200)]
    """Its kind, such as sigkill; `loom inject list` has them all."""
    target: Annotated[str, Field(min_length=1, max_length=500)] | list[str]
    """Whom: as for a command; for dead_driver a session; for dead_gateway and dead_weaver `*`."""
    params: dict[str, Any] = {}
    duration: Annotated[float, Field(gt=0, le=MAX_DURATION)] | None = None
    """Seconds until it is removed; without it, as long as its kind lasts."""
    wait: Annotated[float, Field(ge=0, le=MAX_WAIT)] = 0.0
    """Seconds to wait for acknowledgements before the answer."""


class Injection(CommandState):
    """A fault that was injected. ``outcomes`` have the evidence of each replica."""

    evidence: dict[str, Any] = {}
    """Of a fault of the gateway, the weaver or a driver."""


class DeviceFailure(BaseModel, extra="forbid"):
    """A device that somebody knows to have failed."""

    reason: Annotated[str, Field(max_length=2000)] = ""


class PolicyOrder(BaseModel, extra="forbid"):
    """What is to be done with replicas when a device of theirs fails."""

    group: Annotated[str, Field(min_length=1, max_length=200)]
    """A group, or a glob; ``*`` for all."""
    action: Literal["notify", "pause", "stop", "respawn"]


class PolicyList(BaseModel):
    """The action for each group that has one; others are notified."""

    policies: dict[str, str]


_REFUSALS: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorAnswer, "description": "There is no such replica, device or command."},
    422: {"model": ErrorAnswer, "description": "A parameter makes no sense."},
    503: {"model": ErrorAnswer, "description": "The weaver is away; it is started again by itself."},
}

Count = Annotated[int, Query(ge=0, lt=1 << 53)]
Name = Annotated[str, Query(max_length=200)]


def weaver_routes(keeper: WeaverKeeper, doors: Doors, pieces: Pieces) -> APIRouter:
    """The routes. Reading needs a token of scope view, the rest operate, which the `DoorKeeper` sees to."""
    weaver = keeper.client
    router = APIRouter(prefix="/api/v1/weaver", responses=_REFUSALS, tags=["weaver"])

    @router.get("/status", response_model=WeaverStatus)
    async def status() -> Response:
        """The weaver at a glance."""
        return _answer(await weaver.ask("status"))

    @router.get("/replicas", response_model=ReplicaList)
    async def replicas() -> Response:
        """Every replica that is known, those that have failed or finished too."""
        return _answer({"replicas": await weaver.ask("replicas")})

    @router.get("/devices", response_model=DeviceList)
    async def devices() -> Response:
        """Every device, with the replicas on it and how it is."""
        return _answer({"devices": await weaver.ask("devices")})

    @router.get("/events", response_model=EventList)
    async def events(
        after: Count | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
        kind: Name | None = None,
        replica: Name | None = None,
    ) -> Response:
        """What happened: the first events after one, or else the newest."""
        found = await weaver.ask("events", after=after, limit=limit, kind=kind, replica=replica)
        return _answer({"events": found})

    @router.get("/goodput", response_model=GoodputList)
    async def goodput(job: Name | None = None) -> Response:
        """Where the time of each job went, or of one: how much of it was spent on steps that count."""
        return _answer({"jobs": await weaver.ask("goodput", job=job)})

    @router.get("/replicas/{replica:path}/metrics", response_model=MetricList)
    async def metrics(replica: str) -> Response:
        """The names of the metrics that a replica reports."""
        return _answer({"metrics": await weaver.ask("metrics", replica=replica)})

    @router.get("/replicas/{replica:path}/metrics/{metric:path}", response_model=MetricHistory)
    async def history(
        replica: str,
        metric: str,
        since: float | None = None,
        until: float | None = None,
        points: Annotated[int, Query(ge=1, le=20_000)] = 500,
    ) -> Response:
        """The history of a metric between two times, as means where there are more points than asked for."""
        found = await weaver.ask("history", replica=replica, metric=metric, since=since, until=until, points=points)
        return _answer({"replica": replica, "metric": metric, "points": found})

    @router.get(
        "/replicas/{replica:path}/stacks",
        response_class=PlainTextResponse,
        responses={200: {"content": {"text/plain": {}}, "description": "The stack of each thread, as text."}},
    )
    async def stacks(replica: str) -> Response:
        """Where a replica's threads are in their code."""
        return PlainTextResponse(await weaver.ask("stacks", STACK_WAIT, replica=replica))

    @router.get("/replicas/{replica:path}", response_model=ReplicaInfo)
    async def replica(replica: str) -> Response:
        """A replica."""
        return _answer(await weaver.ask("replica", id=replica))

    @router.get("/address", response_model=WeaverAddressInfo)
    async def address(request: Request) -> Response:
        """Where training processes that Loom did not spawn find the weaver. Needs a token of scope operate."""
        doors.require(request.scope["loom.visit"], "operate", "to add replicas")
        if keeper.address is None:
            raise WeaverUnavailable("the weaver has not come up yet; ask again in a moment")
        return _answer({"address": keeper.address})

    @router.post("/commands", response_model=CommandState)
    async def give_command(order: CommandOrder, request: Request) -> Response:
        """Tell replicas to do something; with ``wait``, answer when they have, or when it is over."""
        visit: Visit = request.scope["loom.visit"]
        about = {"kind": order.kind, "target": order.target, "keys": list(order.params)}
        request.scope[DONE] = ("commanded", about)
        given = await weaver.ask(
            "command", kind=order.kind, params=order.params, target=order.target, by=visit.identity.name
        )
        request.scope[DONE] = ("commanded", {**about, "command": given["id"]})
        return _answer(await _command_state(given["id"], order.wait))

    @router.get("/commands/{command}", response_model=CommandState)
    async def command(command: str, wait: Annotated[float, Query(ge=0, le=MAX_WAIT)] = 0.0) -> Response:
        """What replicas have made of a command; with ``wait``, when they all have, or when it is over."""
        return _answer(await _command_state(command, wait))

    async def _command_state(id: str, wait: float) -> dict[str, Any]:
        outcomes = await weaver.ask("acknowledgements", wait, id=id, timeout=wait)
        done = not any(outcome.get("waiting") for outcome in outcomes.values())
        return {"id": id, "replicas": list(outcomes), "done": done, "outcomes": outcomes}

    @router.post(
        "/inject",
        response_model=Injection,
        responses={
            403: {"model": ErrorAnswer, "description": "What is to be struck is not marked as injectable."},
            409: {"model": ErrorAnswer, "description": "It cannot have this fault."},
        },
    )
    async def inject(order: FaultOrder, request: Request) -> Response:
        """Inject a fault into replicas or pieces of Loom that are marked as injectable.

        Those that last end by themselves, or by DELETE.
        """
        visit: Visit = request.scope["loom.visit"]
        about = {"fault": order.fault, "target": order.target, "duration": order.duration}
        request.scope[DONE] = ("injected", about)
        kind, params, duration = check_fault(order.fault, order.params, order.duration)
        if kind.place is Place.GATEWAY:
            if not isinstance(order.target, str):
                raise WrongArguments(f"{kind.name} strikes one {kind.of}, not {order.target!r:.80}")
            evidence = await pieces.strike(kind.name, order.target)
            struck = {"id": f"{kind.name}-{evidence['pid']}", "replicas": [], "done": True, "outcomes": {}}
            return _answer({**struck, "evidence": evidence})
        given = await weaver.ask(
            "inject",
            fault=kind.name,
            params=params,
            duration=duration,
            target=order.target,
            by=visit.identity.name,
        )
        request.scope[DONE] = ("injected", {**about, "command": given["id"], "replicas": given["replicas"][:100]})
        return _answer({**await _command_state(given["id"], order.wait), "evidence": {}})

    @router.delete("/inject/{injection}", response_model=CommandState)
    async def remove_fault(injection: str, request: Request) -> Response:
        """Remove a fault before its time is over. Those on its host that can are told; one of them does it."""
        visit: Visit = request.scope["loom.visit"]
        request.scope[DONE] = ("injected", {"removed": injection[:200]})
        given = await weaver.ask("remove_fault", injection=injection, by=visit.identity.name)
        return _answer(await _command_state(given["id"], 0.0))

    @router.post("/devices/{device:path}/failure", response_model=EventInfo)
    async def fail_device(device: str, failure: DeviceFailure, request: Request) -> Response:
        """Say that a device has failed. Its replicas are told, and what the policies of their groups say is done.

        The answer is the event that shows it: the device, the replicas, and what was done with each.
        """
        visit: Visit = request.scope["loom.visit"]
        request.scope[DONE] = ("injected", {"device": device[:200], "reason": failure.reason[:200]})
        found = await weaver.ask("fail_device", device=device, reason=failure.reason, by=visit.identity.name)
        return _answer(found)

    @router.get("/policies", response_model=PolicyList)
    async def policies() -> Response:
        """What is done with which group when a device fails."""
        return _answer({"policies": await weaver.ask("policies")})

    @router.post("/policies", response_model=PolicyList)
    async def set_policy(order: PolicyOrder, request: Request) -> Response:
        """Choose what is done with a group when a device fails."""
        visit: Visit = request.scope["loom.visit"]
        request.scope[DONE] = ("commanded", {"group": order.group, "action": order.action})
        found = await weaver.ask("policy", group=order.group, action=order.action, by=visit.identity.name)
        return _answer({"policies": found})

    return router


def _answer(value: Any) -> Response:
    return Response(exact_json(value), media_type="application/json")
