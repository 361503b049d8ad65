"""REST under ``/api/v1/weaver/``: replicas, devices, their events, and commands to them.

The weaver's answers are passed on unchanged. The response models of `loom.weaver.views` describe them for OpenAPI
and its readers.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from loom.control.operations import MAX_WAIT
from loom.control.profiles import DEFAULT_SECONDS, LEAST_SECONDS, MOST_SECONDS
from loom.weaver.keys import EVERYONE
from loom.weaver.policy import Action
from loom.weaver.views import (
    CommandState,
    DeviceInfo,
    GoodputRecord,
    InjectionState,
    MetricPoint,
    ProfileInfo,
    ReplicaInfo,
    WeaverEvent,
    WeaverStatus,
)
from loom_gateway.access.control import AccessControl
from loom_gateway.access.middleware import DONE
from loom_gateway.rest.exact_json import ExactJson, written_json
from loom_gateway.rest.sessions import Sender
from loom_gateway.rest.weaver_changes import (
    CommandRequest,
    FaultRequest,
    Identity,
    Note,
    PolicyRequest,
    WeaverChanges,
    about_whose,
)
from loom_gateway.rest.whose import whose
from loom_gateway.weaver_process import WeaverSupervisor


class ErrorText(BaseModel):
    """The code and text of an error."""

    code: str
    """The code of the error in `loom.errors`."""
    message: str


class ErrorAnswer(BaseModel):
    """The reason why a request was refused."""

    error: ErrorText


class ReplicaList(BaseModel):
    """Replicas, in the order in which they were first seen."""

    replicas: list[ReplicaInfo]


class DeviceList(BaseModel):
    """Devices, in the order in which they were first seen."""

    devices: list[DeviceInfo]


class EventList(BaseModel):
    """Events, the oldest first."""

    events: list[WeaverEvent]


class MetricList(BaseModel):
    """Names of a replica's metrics."""

    metrics: list[str]


class MetricHistory(BaseModel):
    """The history of one metric."""

    replica: str
    metric: str
    points: list[MetricPoint]
    """Time in seconds since the epoch, step, value; the oldest first."""


class GoodputList(BaseModel):
    """Jobs, the one that began last at the end."""

    jobs: list[GoodputRecord]


class WeaverAddressInfo(BaseModel):
    """The address at which training processes find the weaver."""

    address: str
    """The value of ``LOOM_WEAVER`` for training processes. It contains the key that admits them: keep it like a
    token."""


class DeviceFailure(BaseModel, extra="forbid"):
    """A report that a device has failed."""

    reason: Annotated[str, Field(max_length=2000)] = ""
    report: Identity | None = None
    """An id for the report, of the caller's choice: a second request with the same id changes nothing."""


class PolicyList(BaseModel):
    """The action for each group that has one. The other groups are notified."""

    policies: dict[str, Action]


REFUSALS: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorAnswer, "description": "There is no such replica, device or command."},
    422: {"model": ErrorAnswer, "description": "A parameter makes no sense."},
    503: {"model": ErrorAnswer, "description": "The weaver is away; it is started again by itself."},
}
"""The errors of each route, for OpenAPI."""


Count = Annotated[int, Query(ge=0, lt=1 << 53)]
Name = Annotated[str, Query(max_length=200)]
User = Annotated[str, Query(max_length=400, min_length=1)]
Session = Annotated[str, Query(max_length=200, min_length=1)]


def _who(request: Request) -> str:
    return str(request.scope["loom.principal"].token.name)


By = Annotated[str, Depends(_who)]
"""The name of the token that sent a request, for the weaver's events."""


async def _asked_of(request: Request, user: User | None = None, session: Session | None = None) -> dict[str, str]:
    """Return whose replicas a request is about, as `whose` does.

    Args:
        user: another user, if the caller is an admin.
        session: the only session whose replicas it is about: the caller's own, or one shared with the caller.
    """
    state = request.app.state
    needs = "view" if request.method == "GET" else "operate"
    return await whose(request.scope["loom.principal"], user, session, needs, state.access, state.weaver)


Of = Annotated[dict[str, str], Depends(_asked_of)]
"""Whose replicas a request is about, as arguments for `WeaverClient.ask`."""


def _noting(request: Request) -> Note:
    def note(event: str, details: dict[str, Any]) -> None:
        request.scope[DONE] = (event, details)

    return note


Noted = Annotated[Note, Depends(_noting)]
"""Takes an event and its details for the audit, which the `AccessMiddleware` writes with the answer."""


def weaver_routes(supervisor: WeaverSupervisor, access: AccessControl, changes: WeaverChanges) -> APIRouter:  # noqa: C901 - many routes, each simple
    """Return the routes. The `AccessMiddleware` requires scope view for reading, and scope operate for the rest."""
    weaver = supervisor.client
    router = APIRouter(prefix="/api/v1/weaver", responses=REFUSALS, tags=["weaver"])

    @router.get("/status", response_model=WeaverStatus)
    async def status(of: Of) -> Response:
        """The weaver at a glance, as far as the caller's replicas go; for an admin, ``user=*`` is everyone's."""
        return written_json(await weaver.ask_json("status", **of))

    @router.get("/replicas", response_model=ReplicaList)
    async def replicas(of: Of) -> Response:
        """All known replicas of the caller, including failed and finished ones."""
        return written_json(await weaver.ask_json("replicas", **of), replicas=...)

    @router.get("/devices", response_model=DeviceList)
    async def devices(of: Of) -> Response:
        """Every device that the caller's replicas use, with those replicas and its state."""
        return written_json(await weaver.ask_json("devices", **of), devices=...)

    @router.get("/events", response_model=EventList)
    async def events(
        of: Of,
        after: Count | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
        kind: Name | None = None,
        replica: Name | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> Response:
        """Past events, at times since the epoch if wanted: the first ones after an event, or else the newest."""
        span: dict[str, Any] = {"since": since, "until": until}
        found = await weaver.ask_json("events", after=after, limit=limit, kind=kind, replica=replica, **span, **of)
        return written_json(found, events=...)

    @router.get("/goodput", response_model=GoodputList)
    async def goodput(of: Of, job: Name | None = None) -> Response:
        """The time accounting of each job, or of one: how much of its time went to steps that count."""
        return written_json(await weaver.ask_json("goodput", job=job, **of), jobs=...)

    @router.get("/replicas/{replica:path}/metrics", response_model=MetricList)
    async def metrics(replica: str, of: Of) -> Response:
        """The names of the metrics that a replica reports."""
        return written_json(await weaver.ask_json("metrics", replica=replica, **of), metrics=...)

    @router.get("/replicas/{replica:path}/metrics/{metric:path}", response_model=MetricHistory)
    async def history(
        replica: str,
        metric: str,
        of: Of,
        since: float | None = None,
        until: float | None = None,
        points: Annotated[int, Query(ge=1, le=20_000)] = 500,
    ) -> Response:
        """The history of a metric between two times. If it has more points than requested, it is averaged."""
        wanted: dict[str, Any] = {"replica": replica, "metric": metric, "since": since, "until": until}
        found = await weaver.ask_json("history", points=points, **of, **wanted)
        return written_json(found, replica=replica, metric=metric, points=...)

    @router.get(
        "/replicas/{replica:path}/stacks",
        response_class=PlainTextResponse,
        responses={200: {"content": {"text/plain": {}}, "description": "The stack of each thread, as text."}},
    )
    async def stacks(replica: str, of: Of) -> Response:
        """The stack of each of a replica's threads, as text."""
        return PlainTextResponse(await weaver.do("stacks", "", **of, replica=replica))

    @router.get(
        "/replicas/{replica:path}/profile",
        response_model=ProfileInfo,
        responses={409: {"model": ErrorAnswer, "description": "There is no profile of it; the text says why."}},
    )
    async def profile(
        replica: str,
        of: Of,
        seconds: Annotated[float, Query(ge=LEAST_SECONDS, le=MOST_SECONDS)] = DEFAULT_SECONDS,
    ) -> Response:
        """Where the time of a replica's process goes: how often each stack is seen within some seconds.

        One profile of a replica is taken at a time, two of a user's replicas, and four in all.
        """
        return written_json(await weaver.do_json("profile", "", **of, replica=replica, seconds=seconds))

    @router.get("/replicas/{replica:path}", response_model=ReplicaInfo)
    async def replica(replica: str, of: Of) -> Response:
        """A replica."""
        return written_json(await weaver.ask_json("replica", id=replica, **of))

    @router.get("/address", response_model=WeaverAddressInfo)
    async def address(request: Request, of: Of) -> Response:
        """The address for training processes that Loom did not spawn. Needs a token of scope operate.

        It contains a key of the caller's: a process that registers with it is a replica of the caller.
        """
        access.require(request.scope["loom.principal"], "operate", "to add replicas")
        return ExactJson({"address": await weaver.ask("address", **of)})

    @router.post("/commands", response_model=CommandState)
    async def give_command(asked: CommandRequest, principal: Sender, of: Of, note: Noted) -> Response:
        """Give a command to replicas. With ``wait``, answer once all have acknowledged it or it has expired."""
        return ExactJson(await changes.give_command(asked, principal, of, note))

    @router.get("/commands/{command}", response_model=CommandState)
    async def command(command: str, of: Of, wait: Annotated[float, Query(ge=0, le=MAX_WAIT)] = 0.0) -> Response:
        """The acknowledgements of a command; with ``wait``, once all replicas have answered or it has expired."""
        return written_json(await weaver.do_json("command_state", "", **of, id=command, wait=wait))

    @router.post(
        "/inject",
        response_model=InjectionState,
        responses={
            403: {"model": ErrorAnswer, "description": "The target is not marked as injectable."},
            409: {"model": ErrorAnswer, "description": "It cannot have this fault."},
        },
    )
    async def inject(asked: FaultRequest, principal: Sender, of: Of, note: Noted) -> Response:
        """Inject a fault into replicas or components of Loom that are marked as injectable.

        A fault that lasts ends by itself, or by DELETE. One that strikes the gateway, the weaver or a
        host on which another user has processes needs scope admin.
        """
        return ExactJson(await changes.inject(asked, principal, of, note))

    @router.delete("/inject/{injection}", response_model=CommandState)
    async def remove_fault(injection: str, principal: Sender, of: Of, note: Noted) -> Response:
        """Remove a fault before its time is over. The replicas on its host are asked; one of them removes it."""
        return ExactJson(await changes.remove_fault(injection, principal, of, note))

    @router.post("/devices/{device:path}/failure", response_model=WeaverEvent)
    async def fail_device(
        device: str, failure: DeviceFailure, request: Request, by: By, of: Of, user: User | None = None
    ) -> Response:
        """Report a failed device. Its replicas are notified, and the policies of their groups are applied.

        An admin who names no user reports it for every user whose replicas use the device. The answer is the
        resulting event: the device, the replicas, and the action for each.
        """
        if user is None and "in_session" not in of and request.scope["loom.principal"].is_admin:
            of = {"user": EVERYONE}
        request.scope[DONE] = (
            "injected",
            {"device": device[:200], "reason": failure.reason[:200], **about_whose(of)},
        )
        reported = failure.model_dump(exclude_none=True)
        return ExactJson(await weaver.do("fail_device", by, **of, device=device, **reported))

    @router.get("/policies", response_model=PolicyList)
    async def policies(of: Of) -> Response:
        """The action for each group when a device fails."""
        return written_json(await weaver.ask_json("policies", **of), policies=...)

    @router.post("/policies", response_model=PolicyList)
    async def set_policy(asked: PolicyRequest, principal: Sender, of: Of, note: Noted) -> Response:
        """Set the action for a group when a device fails."""
        return ExactJson({"policies": await changes.set_policy(asked, principal, of, note)})

    return router
