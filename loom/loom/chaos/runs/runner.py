"""`run`: a plan that a program carries out, such as a test."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast

from loom.chaos.plans.files import read_plan
from loom.chaos.plans.plan import Plan
from loom.chaos.runs.reports import Report
from loom.chaos.runs.run import PlanExecution

if TYPE_CHECKING:
    from loom.chaos.runs.observer import RunWeaver


class HasWeaver(Protocol):
    """A job, or whatever else has a weaver."""

    @property
    def weaver(self) -> RunWeaver:
        """The weaver of the replicas that a plan strikes."""


def run(plan: Plan | str | os.PathLike[str], weaver: RunWeaver | HasWeaver, *, seed: int | None = None) -> Report:
    """Carry a plan out, and return the report; `Report.ok` says whether all held that the plan expects.

    The faults of the plan are removed when the run ends, whatever ends it.

    Args:
        plan: a plan, or the path of its file: YAML, or Python if the name ends with ``.py``.
        weaver: ``job.weaver``, or the job.
        seed: a seed in place of the plan's own.

    Raises:
        BadPlan: the plan makes no sense, or a fault has no target that lives and is marked as injectable. Nothing
            was touched.
        GatewayUnreachable, WeaverUnavailable: nobody answers.
    """
    running = prepare(plan, weaver, seed)
    running.run()
    return Report(running)


def prepare(
    plan: Plan | str | os.PathLike[str],
    weaver: RunWeaver | HasWeaver,
    seed: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> PlanExecution:
    """Return a run of a plan that has not begun; ``report`` is called with a line for each thing that happens."""
    read = plan if isinstance(plan, Plan) else read_plan(os.fspath(plan))
    if seed is not None:
        read = replace(read, seed=seed)
    return PlanExecution(read, cast("RunWeaver", getattr(weaver, "weaver", weaver)), report)
