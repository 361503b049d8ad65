"""REST under ``/api/v1/weaver/plans``: plans of faults that the gateway carries out."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, Field

from loom.chaos.runs.progress import RunProgress
from loom.weaver.client import WeaverClient
from loom_gateway.access.control import AccessControl
from loom_gateway.chaos.runs import PlanRun, PlanRuns, PlanState
from loom_gateway.rest.sessions import Sender
from loom_gateway.rest.weaver import REFUSALS, ErrorAnswer, Noted, Of
from loom_gateway.rest.weaver_changes import WeaverChanges, about_whose

MAX_TEXT = 1 << 16  # characters of a plan


class PlanRequest(BaseModel, extra="forbid"):
    """A plan to check or to carry out."""

    text: Annotated[str, Field(max_length=MAX_TEXT)]
    """The plan, in YAML."""
    seed: Annotated[int, Field(ge=0, lt=1 << 53)] | None = None
    """A seed in place of the plan's own."""


class PlanChecked(BaseModel):
    """A plan that makes sense, and whose faults have targets."""

    name: str
    faults: int
    """The number of faults in it."""
    expectations: int
    """The number of expectations, of faults and of the whole run."""
    seed: int


class PlanSummary(BaseModel):
    """A run of a plan. Times are in seconds since the epoch."""

    id: str
    name: str
    seed: int
    user: str
    """The user whose replicas it strikes."""
    by: str
    """The name of the token with which it was begun."""
    began: float
    state: PlanState
    why: str | None
    """Why it was cancelled or has failed."""


class PlanLine(BaseModel):
    """Something that happened in a run."""

    time: float
    text: str


class PlanInfo(PlanSummary):
    """A run of a plan, with what became of its faults and expectations so far."""

    text: str
    """The plan."""
    progress: RunProgress
    lines: list[PlanLine]
    """The events, the oldest first."""


class PlanList(BaseModel):
    """Runs of plans, the newest first."""

    plans: list[PlanSummary]


def add_plans(app: FastAPI, weaver: WeaverClient, changes: WeaverChanges, access: AccessControl) -> PlanRuns:
    """Give a gateway's application the runs of plans and their routes; return the runs."""
    runs = PlanRuns(weaver, changes, access)
    app.include_router(_routes(runs))
    return runs


def _routes(runs: PlanRuns) -> APIRouter:
    """Return the routes. The `AccessMiddleware` requires scope view for reading, and scope operate for the rest."""
    router = APIRouter(prefix="/api/v1/weaver/plans", responses=REFUSALS, tags=["weaver"])

    @router.post("/check")
    async def check(asked: PlanRequest, principal: Sender, of: Of) -> PlanChecked:
        """Check that a plan makes sense, and that each of its faults has an injectable target; change nothing."""
        plan = await runs.check(asked.text, asked.seed, principal, of)
        expectations = len(plan.expect) + sum(len(one.expect) for one in plan.faults)
        return PlanChecked(name=plan.name, faults=len(plan.faults), expectations=expectations, seed=plan.seed)

    @router.post(
        "", status_code=201, responses={409: {"model": ErrorAnswer, "description": "A plan of the user's goes on."}}
    )
    async def begin(asked: PlanRequest, principal: Sender, of: Of, note: Noted) -> PlanInfo:
        """Begin to carry out a plan: one at a time for each user. Its faults end with the gateway."""
        note("injected", {"plan": "checked", **about_whose(of)})
        run = await runs.begin(asked.text, asked.seed, principal, of)
        faults = [one.fault for one in run.plan.faults[:100]]
        note("injected", {"plan": run.plan.name[:100], "run": run.id, "faults": faults, **about_whose(of)})
        return _info(run)

    @router.get("")
    async def plans(of: Of) -> PlanList:
        """The caller's runs of plans: the one that goes on, and the last ones."""
        return PlanList(plans=[_summary(one) for one in runs.of_user(of)])

    @router.get("/{plan}")
    async def plan(plan: str, of: Of) -> PlanInfo:
        """A run: what became of each fault, and which expectations hold so far."""
        return _info(runs.find(plan, of))

    @router.delete("/{plan}")
    async def cancel(plan: str, of: Of, note: Noted) -> PlanInfo:
        """Cancel a run. Its faults are removed, which may take some seconds; nothing happens if it has ended."""
        note("injected", {"cancelled": plan[:100], **about_whose(of)})
        run = runs.find(plan, of)
        run.cancel("it was cancelled")
        return _info(run)

    return router


def _summary(run: PlanRun) -> PlanSummary:
    return PlanSummary(
        id=run.id,
        name=run.plan.name,
        seed=run.plan.seed,
        user=run.user,
        by=run.by,
        began=run.began,
        state=run.state,
        why=run.why,
    )


def _info(run: PlanRun) -> PlanInfo:
    lines = [PlanLine(time=time, text=text) for time, text in run.lines]
    summary = _summary(run).model_dump()
    return PlanInfo(**summary, text=run.plan.text, progress=run.progress.now, lines=lines)
