"""`loom.runs`: the runs of trainings, as objects and as data frames.

::

    for run in loom.runs(sort="summary.loss", limit=10):
        print(run.name, run.state, run.config, run.summary["loss"].last)
    loom.runs("train*").to_pandas()
    curve = loom.runs(limit=1)[0].history("loss")

`Job.runs` is another list: that of the functions which a session has run.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from loom.control.operations import Ask
from loom.errors import BranchRefused
from loom.extras import require
from loom.process.child import python
from loom.weaver.run_views import RunComparison, RunCurves, RunDetails, RunRecord
from loom.weaver.views import MetricPoint
from loom_proxy.notebook.html import runs_html
from loom_proxy.notebook.live import LiveHtml, LiveSource, Shown
from loom_proxy.notebook.live_runs import LiveRuns

if TYPE_CHECKING:
    import pandas


LATEST = 100
"""Runs, the latest ones, that a live cell of a list keeps up to date."""


class TrainingRun(Shown):
    """A run, with the fields of `loom.weaver.run_views.RunRecord` as they were when it was read.

    Those of `loom.weaver.run_views.RunDetails`, such as ``timeline`` and ``members``, are read when needed.
    """

    def __init__(self, ask: Ask, info: RunRecord, environment: Callable[[], Mapping[str, str]] = dict) -> None:
        self._ask = ask
        self._environment = environment
        self.info: RunRecord = info
        """The fields, as one object."""
        self._details: RunDetails | None = info if isinstance(info, RunDetails) else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in RunRecord.__dataclass_fields__ and name not in self.info.left_out:
            return getattr(self.info, name)
        if name in RunDetails.__dataclass_fields__:
            return getattr(self.details(), name)
        raise AttributeError(f"a run has no {name!r}; it has {', '.join(RunDetails.__dataclass_fields__)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *RunDetails.__dataclass_fields__]

    def __repr__(self) -> str:
        at = "" if self.info.step is None else f" at step {self.info.step:,}"
        return f"<run {self.info.id} {self.info.name!r}: {self.info.state}{at}>"

    def _live(self) -> LiveRuns:
        return LiveRuns(lambda: [RunRecord.from_body(self._ask("run", id=self.info.id))], self._ask)

    def _repr_html_(self) -> str:
        return runs_html([self.info])

    def details(self) -> RunDetails:
        """Return everything that is kept of the run, as it was at the first call since `refresh`."""
        found = self._details or RunDetails.from_body(self._ask("run", id=self.info.id))
        self._details = found
        return found

    def refresh(self) -> TrainingRun:
        """Read the run again, and return it."""
        self._details = None
        self.info = self.details()
        return self

    def history(self, metric: str, replica: str | None = None, points: int = 20_000) -> list[MetricPoint]:
        """Return the points of a metric in this run alone, in the order of time.

        Args:
            metric: the metric's name.
            replica: one of the run's replicas; by default the one with the lowest rank that has the metric.
            points: number of points, at most; if there are more, they are averaged.

        Raises:
            WrongArguments: the run has no such metric.
        """
        found = self._ask("run_history", run=self.info.id, metric=metric, replica=replica, points=points)
        return [MetricPoint(at, step, float(value)) for at, step, value in found]

    def curves(
        self,
        metric: str,
        by: str = "step",
        ranks: str = "one",
        since: float | None = None,
        until: float | None = None,
        points: int = 500,
    ) -> RunCurves:
        """Return a metric as curves over steps or time, in sections that begin where a process began again.

        Args:
            by: ``step`` or ``time``, the unit of ``since`` and ``until``.
            ranks: ``one``, the lowest; ``band``, one curve with the mean and extremes of all; or ``each``.
            points: of each curve, at most; if there are more, they are averaged.

        Raises:
            WrongArguments: the run has no such metric.
        """
        wanted = {"by": by, "ranks": ranks, "since": since, "until": until, "points": points}
        return RunCurves.from_body(self._ask("run_curves", run=self.info.id, metric=metric, **wanted))

    def to_pandas(self, *metrics: str) -> pandas.DataFrame:
        """Return the curves of metrics as a data frame by step, a column for each; by default of all metrics.

        Of a step that was made several times, as after a restart from a checkpoint, the last value counts. Needs
        pandas.
        """
        require({"pandas": "pandas"}, "to_pandas")
        import pandas

        curves = {
            name: {at: value for _, at, value in self.history(name) if at is not None}
            for name in metrics or self.details().metrics
        }
        return pandas.DataFrame(curves).sort_index().rename_axis("step")

    def compare(self, other: TrainingRun | str, step: int | None = None) -> RunComparison:
        """Return the differences to another run; with ``step``, also of the metrics there."""
        named = other.info.id if isinstance(other, TrainingRun) else other
        return RunComparison.from_body(self._ask("compare_runs", run=self.info.id, other=named, step=step))

    def branch(
        self, step: int | None = None, set: Mapping[str, Any] | None = None, replace: bool = False
    ) -> TrainingRun:
        """Start the run's command again from one of its checkpoints, and return the new run.

        A process of the run starts it where and as the run was started. If none lives, it is started here, as
        ``loom branch`` does, if this is the run's host.

        Args:
            step: begin with the last checkpoint at or before it; None: with the last one.
            set: values to change before the first step; ``"0.5x"`` is half of the run's value at that step.
            replace: whether the run saves a checkpoint and is stopped first.

        Raises:
            BranchRefused: nothing can start it; the text says why, and what to call.
            WrongArguments: the run has no such key.
        """
        wanted: dict[str, Any] = {"step": step, "set": dict(set or {}), "replace": replace}
        try:
            return self._other(RunRecord.from_body(self._ask("branch_run", run=self.info.id, **wanted)))
        except BranchRefused:
            facts = self.refresh().details().start
            here = facts.get("host") == socket.gethostname() and os.path.isdir(facts.get("folder", ""))
            if self.info.state == "running" or self.info.session is not None or not here:
                raise
        return self._other(RunDetails.from_body(self._ask("run", id=self._branch_here(**wanted))))

    def _other(self, info: RunRecord) -> TrainingRun:
        return TrainingRun(self._ask, info, self._environment)

    def _branch_here(self, step: int | None, set: Mapping[str, Any], replace: bool) -> str:
        """Start a branch on this machine, and return its id."""
        words = ["branch", self.info.id, "--detach", "--json"]
        words += [] if step is None else ["--step", str(step)]
        for key, value in set.items():
            words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
        command = python("loom_auto", *words, *["--replace"] * replace)
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **self._environment()})
        if done.returncode:
            raise BranchRefused(done.stderr.strip().removeprefix("error: "))
        return str(json.loads(done.stdout)["run"])

    def set_note(self, text: str) -> None:
        """Set the note, in Markdown."""
        self._edited(self._ask("note_run", run=self.info.id, text=text))

    def tag(self, *add: str, remove: Iterable[str] = ()) -> None:
        """Add tags, and remove others."""
        self._edited(self._ask("tag_run", run=self.info.id, add=list(add), remove=list(remove)))

    def archive(self, back: bool = False) -> None:
        """Leave the run out of lists, or take it in again with ``back``."""
        self._edited(self._ask("archive_run", run=self.info.id, back=back))

    def remove(self) -> None:
        """Remove the run with its points.

        Raises:
            RunLives: it lives.
        """
        self._edited(self._ask("remove_run", run=self.info.id))

    def _edited(self, answer: Mapping[str, Any]) -> None:
        self.info, self._details = RunRecord.from_body(answer), None


class TrainingRuns(Shown, list[TrainingRun]):
    """A list of runs."""

    def _live(self) -> LiveSource:
        if not self:
            return LiveHtml(self._repr_html_, lambda: True)
        known, ask = {one.info.id: one.info for one in self}, self[0]._ask

        def runs() -> list[RunRecord]:
            found = map(RunRecord.from_body, ask("runs", sort="-began", limit=LATEST))
            known.update({one.id: one for one in found if one.id in known})
            return list(known.values())

        return LiveRuns(runs, ask)

    def _repr_html_(self) -> str:
        return runs_html([one.info for one in self])

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with a row for each run, by id. Needs pandas.

        Metrics are the columns ``summary.NAME`` (their last values), values of the configuration ``config.NAME``.
        """
        require({"pandas": "pandas"}, "to_pandas")
        import pandas

        return pandas.DataFrame([_row(run) for run in self]).set_index("id") if self else pandas.DataFrame()


_IN_ROW = (
    "id",
    "name",
    "state",
    "user",
    "began",
    "ended",
    "step",
    "max_step",
    "ranks",
    "commit",
    "reason",
    "by",
    "note",
)


def _row(run: TrainingRun) -> dict[str, Any]:
    info = run.info
    values = {f"config.{name}": value for name, value in info.config.items()}
    values |= {f"summary.{name}": one.last for name, one in info.summary.items()}
    return {**{name: getattr(info, name) for name in _IN_ROW}, "tags": list(info.tags), **values}
