"""`LiveRuns`: runs in a live cell, with their curve, their progress and controls."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loom.control.commands import Acknowledgement
from loom.control.operations import Ask
from loom.errors import LoomError, ScopeError, WaitTimeout, describe_error
from loom.weaver.run_views import RunRecord
from loom_proxy.notebook.live import State
from loom_proxy.weaver.command import CommandProxy

POINTS = 400
"""Points of a curve."""

ACKNOWLEDGED_WITHIN = 10.0
"""Seconds to wait for the ranks' acknowledgements of a command."""


class LiveRuns:
    """Runs, of which one is shown with its curve and controls.

    Args:
        runs: returns those to choose from, the first one to show first.
        ask: asks the weaver.
        html: returns the HTML above it.
        over: returns whether no further run comes.
    """

    def __init__(
        self,
        runs: Callable[[], Sequence[RunRecord]],
        ask: Ask,
        html: Callable[[], str] = str,
        over: Callable[[], bool] = lambda: True,
    ) -> None:
        self._runs = runs
        self._ask = ask
        self._html = html
        self._over = over
        self._run: str | None = None  # chosen by the user
        self._metric: str | None = None
        self._said = ""
        self._may = True
        self._living = True
        self._first: dict[str, str] = {}  # the lowest living rank of the run that is shown

    def state(self) -> State:
        state: State = {"html": self._html(), "run": None, "runs": [], "said": self._said, "may": self._may}
        try:
            found = list(self._runs())
            if found:
                chosen = next((one for one in found if one.id == self._run), found[0])
                state["runs"] = [[one.id, f"{one.name} {one.id[:6]}, {one.state}"] for one in found]
                state["run"] = self._shown(chosen)
            self._living = any(one.state == "running" for one in found)
        except LoomError as error:
            state["said"] = describe_error(error)
        return state

    def ended(self) -> bool:
        return not self._living and self._over()

    def _shown(self, run: RunRecord) -> State:
        # `metrics` are those of the run's details; a list of runs has those with a summary.
        metrics = sorted(run.summary, key=lambda name: ("loss" not in name, name in _OF_THE_MACHINE, name))
        metric = self._metric if self._metric in metrics else next(iter(metrics), "")
        points = self._ask("run_history", run=run.id, metric=metric, points=POINTS) if metric else []
        paused = run.replicas.get("paused", 0)
        living = run.state == "running"
        return {
            "id": run.id,
            "name": run.name,
            "state": "paused" if living and paused and paused == sum(run.replicas.values()) else run.state,
            "living": living,
            "detail": f"{run.ranks} rank{'s' * (run.ranks != 1)}{f', {run.reason}' if run.reason else ''}",
            "step": run.step,
            "max_step": run.max_step,
            "metric": metric,
            "metrics": metrics,
            "points": [
                [at, number if math.isfinite(number := float(value)) else None]
                for _, at, value in points
                if at is not None
            ],
            "rate": self._rate(run) if living else None,
        }

    def _rate(self, run: RunRecord) -> float | None:
        """Return the learning rate, which is a metric, or a key of the configuration; None if it is neither."""
        if "learning_rate" in run.summary:
            return run.summary["learning_rate"].last
        if "learning_rate" not in run.config:
            return None
        if run.id not in self._first:
            self._first = {run.id: next(iter(self._living_ranks(run)), "")}
        if not (first := self._first[run.id]):
            return None
        rate = self._ask("replica", id=first)["config"].get("learning_rate")
        return float(rate) if isinstance(rate, int | float) else None

    def _living_ranks(self, run: RunRecord) -> list[str]:
        members = self._ask("run", id=run.id)["members"]
        return [str(one["replica"]) for one in members if one.get("ending") is None]

    def message(self, content: Mapping[str, Any]) -> None:
        match content:
            case {"metric": str(name)}:
                self._metric = name
            case {"run": str(id)}:
                self._run = id
            case {"command": "pause" | "resume" | "stop" as kind}:
                self._command(kind, {})
            case {"command": "learning_rate", "value": str(text)}:
                try:
                    self._command("update_config", {"learning_rate": float(text)})
                except ValueError:
                    self._said = f"{text!r:.40} is no learning rate: write a number"

    def _command(self, kind: str, params: Mapping[str, Any]) -> None:
        found = list(self._runs())
        run = next((one for one in found if one.id == self._run), found[0])
        target = self._living_ranks(run)
        what = "learning rate" if params else kind
        try:
            if not target:
                raise LoomError("no rank of this run lives")
            command = CommandProxy(self._ask, self._ask("command", kind=kind, params=dict(params), target=target))
            with contextlib.suppress(WaitTimeout):
                command.get(ACKNOWLEDGED_WITHIN)
            self._said = f"{what}: {_acknowledged(command.outcomes())}"
        except ScopeError as error:
            self._may, self._said = False, describe_error(error)
        except LoomError as error:
            self._said = f"{what}: {describe_error(error)}"


_OF_THE_MACHINE = ("memory_bytes", "samples_per_second", "learning_rate")


def _acknowledged(outcomes: Mapping[str, Acknowledgement]) -> str:
    """Return what the ranks said: all that have applied a command, and the first reason of those that have not."""
    applied = [one for one in outcomes.values() if one.ok]
    refused = [one for one in outcomes.values() if not one.ok and not one.waiting]
    waiting = len(outcomes) - len(applied) - len(refused)
    steps = sorted({one.step for one in applied if one.step is not None})
    at = f" at step {steps[0]:,}{f' to {steps[-1]:,}' if len(steps) > 1 else ''}" if steps else ""
    parts = [f"applied by {len(applied)} of {len(outcomes)} ranks{at}"] if applied else []
    if refused:
        parts.append(f"refused by {len(refused)}: {refused[0].reason}")
    if waiting:
        parts.append(f"{waiting} have not answered")
    return ", ".join(parts)
