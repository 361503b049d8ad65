"""The report of a run: JSON for programs, Markdown for readers, and a plot."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from loom._version import __version__
from loom.chaos.durations import spoken
from loom.chaos.plans import Plan, read_plan
from loom.chaos.runs.run import PlanExecution
from loom.chaos.runs.tracker import Struck
from loom.chaos.runs.verdicts import Verdict, goodput, judge
from loom.errors import ExpectationsFailed

if TYPE_CHECKING:
    from loom.chaos.runs.observer import RunWeaver


PLOTTED = "loss"  # the metric of the plot
FEW = 5  # replicas of a fault that the text of a report names


class Report:
    """The summary of a run that has ended. As text, it has a line for each expectation."""

    def __init__(self, run: PlanExecution) -> None:
        self.run = run
        self.verdicts: list[Verdict] = judge(run)
        """The verdict on each expectation: whether it held, and the finding."""
        self.goodput = goodput(run.goodput)

    @property
    def ok(self) -> bool:
        """True if all expectations held."""
        return not self.failures

    @property
    def failures(self) -> list[Verdict]:
        """The expectations that did not hold."""
        return [verdict for verdict in self.verdicts if not verdict.held]

    @property
    def seed(self) -> int:
        """The seed of the run, with which it is repeated."""
        return self.run.plan.seed

    def raise_for_failures(self) -> None:
        """Raise `ExpectationsFailed`, with this report as its text, unless all expectations held."""
        __tracebackhide__ = True  # pytest then shows the line of the test
        if not self.ok:
            raise ExpectationsFailed(str(self))

    def __str__(self) -> str:
        run, count = self.run, len(self.verdicts)
        took, held = spoken(run.ended - run.began), count - len(self.failures)
        lines = [f"{run.plan.name}: {held} of {count} expectations held in {took}, with seed {self.seed}"]
        lines += (
            f"  {'yes' if one.held else 'NO '}  {one.expected}: {one.found}{self._of(one)}" for one in self.verdicts
        )
        return "\n".join(lines)

    def _of(self, verdict: Verdict) -> str:
        """Return which fault an expectation is about, and when it was injected."""
        if verdict.fault is None:
            return ""
        struck = self.run.struck[verdict.fault]
        at = spoken(struck.at - self.run.began)
        return f" ({struck.planned.fault} of {', '.join(struck.targets[:FEW])} at {at})"

    def to_dict(self) -> Mapping[str, object]:
        """Return the report for JSON."""
        run = self.run
        return {
            "plan": run.plan.name,
            "seed": run.plan.seed,
            "held": self.ok,
            "loom": __version__,
            "began": run.began,
            "seconds": run.ended - run.began,
            "cut_short": run.cut_short,
            "goodput": self.goodput,
            "spent": run.goodput or None,
            "faults": [self._fault(one) for one in run.struck],
            "expectations": [asdict(one) for one in self.verdicts],
            "replicas": {id: [asdict(life) for life in lives] for id, lives in run.observer.lives.items()},
            "away": [asdict(one) for one in run.observer.away],
            "weavers": run.observer.weavers,
            "text": run.plan.text,
        }

    def _fault(self, struck: Struck) -> Mapping[str, object]:
        planned = struck.planned
        same = ("failed", "evidence", "removal", "detected", "recovered", "steps_lost", "spent")
        return {
            "fault": planned.fault,
            "at": struck.at - self.run.began,
            "when": str(planned.when),
            "target": str(planned.target),
            "struck": struck.targets,
            "params": dict(planned.params),
            "duration": planned.duration,
            "injection": struck.id,
            **{name: getattr(struck, name) for name in same},
            "goodput": goodput(struck.spent),
            "victims": [asdict(victim) for victim in struck.victims],
            "mark": str(planned.mark),
        }

    def markdown(self, picture: str | None = None) -> str:
        """Return the report as Markdown, with the plot in the file ``picture``."""
        run = self.run
        began = datetime.fromtimestamp(run.began, timezone.utc).isoformat(" ", "seconds")
        share = "not known" if self.goodput is None else f"{self.goodput:.1%}"
        held = sum(one.held for one in self.verdicts)
        lines = [
            f"# {run.plan.name}: {'held' if self.ok else 'did not hold'}",
            "",
            f"Seed {run.plan.seed}; began {began}; took {spoken(run.ended - run.began)}; "
            f"{len(run.struck)} faults of {len({one.planned.fault for one in run.struck})} kinds; goodput {share}; "
            f"{held} of {len(self.verdicts)} expectations held.",
            "",
        ]
        if picture is not None:
            lines += [f"![The run]({picture})", ""]
        lines += ["## Faults", "", *self._faults(), ""]
        lines += ["Goodput is that of all replicas from a fault to the next one, or to the end.", ""]
        lines += ["## Expectations", "", *self._expectations(), ""]
        if run.goodput:
            whole = sum(run.goodput.values()) or math.nan
            rows = [[one, f"{took:.1f}", f"{took / whole:.1%}"] for one, took in run.goodput.items() if took > 0]
            lines += ["## Where the time went", "", *_table(["reason", "seconds", "share"], rows), ""]
        lines += ["## The plan", "", "```", run.plan.text.rstrip(), "```", ""]
        return "\n".join(lines)

    def _faults(self) -> list[str]:
        became = ["detected", "recovered", "steps lost", "goodput", "evidence"]
        rows = []
        for number, one in enumerate(self.run.struck, 1):
            share = goodput(one.spent)
            recovered = "never" if one.given_up else spoken(one.recovered)
            rows.append(
                [
                    str(number),
                    f"{one.at - self.run.began:.1f} s",
                    one.planned.fault,
                    ", ".join(one.targets),
                    spoken(one.planned.duration),
                    spoken(one.detected),
                    f"not injected: {one.failed}" if one.failed else recovered,
                    "-" if one.steps_lost is None else str(one.steps_lost),
                    "-" if share is None else f"{share:.0%}",
                    _short(one.evidence),
                ]
            )
        return _table(["#", "at", "fault", "struck", "lasts", *became], rows)

    def _expectations(self) -> list[str]:
        struck = self.run.struck
        rows = []
        for one in self.verdicts:
            of = "all of it" if one.fault is None else f"{one.fault + 1}: {struck[one.fault].planned.fault}"
            rows.append(["yes" if one.held else "**no**", one.expected, of, one.found])
        return _table(["held", "expected", "of", "found"], rows)

    def write(self, folder: str | Path) -> list[Path]:
        """Write ``report.json``, ``report.md`` and, if matplotlib is installed, ``report.png`` into a folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / "report.json", folder / "report.md"]
        picture = None
        if find_spec("matplotlib") is not None:
            picture = folder / "report.png"
            _draw(self.run, picture)
            written.append(picture)
        written[0].write_text(json.dumps(_plain(self.to_dict()), indent=2) + "\n")
        written[1].write_text(self.markdown(None if picture is None else picture.name))
        return written


def _draw(run: PlanExecution, path: Path) -> None:
    """Draw the loss and the steps of each replica over time, with the faults, into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    loss, steps = figure.subplots(2, 1, sharex=True)
    for replica in run.watched():
        points = run.observer.history(replica.id, PLOTTED, run.began)
        times = [point.time - run.began for point in points]
        loss.plot(times, [point.value for point in points], linewidth=0.9, label=replica.id)
        steps.plot(times, [point.step for point in points], linewidth=0.9, label=replica.id)
    for axes in (loss, steps):
        _draw_faults(run, axes)
    loss.set_ylabel(PLOTTED)
    loss.set_title(f"{run.plan.name}, seed {run.plan.seed}", loc="left")
    loss.legend(loc="upper right", fontsize="small")
    steps.set_ylabel("step")
    steps.set_xlabel("seconds")
    figure.savefig(path, dpi=110)


def _draw_faults(run: PlanExecution, axes: Any) -> None:
    for struck in run.struck:
        at = struck.at - run.began
        until = (struck.over or struck.at) + (struck.recovered or 0.0) - run.began
        axes.axvspan(at, max(until, at), color="tab:red", alpha=0.12, linewidth=0)
        axes.axvline(at, color="tab:red", linewidth=0.8)
        axes.annotate(
            struck.planned.fault, (at, 1.0), xycoords=("data", "axes fraction"), rotation=90, fontsize=7, va="top"
        )


def _short(evidence: Mapping[str, Mapping[str, object]]) -> str:
    parts = []
    for values in evidence.values():
        simple = {name: value for name, value in values.items() if isinstance(value, (int, float, str))}
        parts.append(", ".join(f"{name} {value}" for name, value in list(simple.items())[:3]))
    return "; ".join(parts)[:120]


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *cells)]


def _plain(value: Any) -> Any:
    """Return a value in a form for JSON, which has no NaN."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


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
