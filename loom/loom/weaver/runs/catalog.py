"""`Catalog`: the operations on a user's runs: lists, details, comparisons, histories and edits."""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from loom.control import operations
from loom.control.arguments import check_name
from loom.control.frame import pack_value
from loom.errors import WrongArguments
from loom.weaver.run_views import MetricSummary, RunComparison, RunCurves, RunDetails, RunRecord
from loom.weaver.runs.curves import CurveReader, outliers
from loom.weaver.runs.run import Run
from loom.weaver.runs.runs import UserRuns
from loom.weaver.runs.timeline import members
from loom.weaver.storage.history import MetricHistory

MAX_MEMBERS = 1000
"""Replicas of a run that its details list."""

MAX_IN_LIST = 3000
"""Bytes of the configuration, and of the summary, of each run in a list."""

MAX_LEFT_OUT = 8
"""Large values of a run that a list passes over, before it looks at no more of them."""

MAX_AT_STEP = 50
"""Metrics of two runs that are compared at a step."""

_DRAWN = {"one": 1, "band": 256, "each": 64}
"""The most ranks of which the curves are made."""

_SORTS = ("began", "ended", "name", "state", "step")
_SHOWN = (
    "id",
    "name",
    "state",
    "session",
    "reason",
    "by",
    "first",
    "began",
    "ended",
    "max_step",
    "ranks",
    "restarts",
)
_EDITED = ("note", "archived")


class Catalog:
    """The operations on a user's runs. ``urgent`` is called after an edit, whose answer follows the commit.

    An asker who is shown one session only learns nothing of runs of other sessions, also not that there are any.
    """

    def __init__(self, user: str, runs: UserRuns, history: MetricHistory, urgent: Callable[[], object]) -> None:
        self._user = user
        self._runs = runs
        self._history = history
        self._urgent = urgent
        self.handlers: dict[type[operations.Operation], Callable[[Any, Any, float], Any]] = {
            operations.GetRuns: lambda asked, asker, now: self._listed(asked, asker.within),
            operations.GetRun: lambda asked, asker, now: self._details(
                runs.find(asked.id, asker.within), asker.within
            ),
            operations.CompareRuns: lambda asked, asker, now: self._compare(asked, asker.within),
            operations.GetRunHistory: lambda asked, asker, now: self._points(
                asked, runs.find(asked.run, asker.within)
            ),
            operations.GetRunCurves: lambda asked, asker, now: self._curves(
                asked, runs.find(asked.run, asker.within)
            ),
            operations.NoteRun: lambda asked, asker, now: self._edit(asked.run, runs.note, now, asked.text),
            operations.TagRun: lambda asked, asker, now: self._edit(
                asked.run, runs.tag, now, asked.add, asked.remove
            ),
            operations.ArchiveRun: lambda asked, asker, now: self._edit(
                asked.run, runs.archive, now, not asked.back
            ),
            operations.RemoveRun: lambda asked, asker, now: self._remove(asked.run, now),
        }

    def _listed(self, asked: operations.GetRuns, within: str | None) -> list[RunRecord]:
        found = [run for run in self._runs if within in (None, run.session) and _is_wanted(run, asked)]
        key, falling = asked.sort.removeprefix("-"), asked.sort.startswith("-")
        have, lack = _sorted(found, key, falling)
        return [self.shown(run, within) for run in (have + lack)[: max(1, min(asked.limit, 1000))]]

    def shown(self, run: Run, within: str | None = None) -> RunRecord:
        """Return a run as a list shows it, to those who are shown one session only if that is given."""
        return _small(self._info(run, within))

    def _info(self, run: Run, within: str | None) -> RunRecord:
        start = run.start or {}
        return RunRecord(
            **{name: getattr(run, name) for name in (*_SHOWN, *_EDITED)},
            user=self._user,
            groups=tuple(run.groups),
            step=_step(run),
            replicas=Counter(run.there[id].state.value for id in run.living),
            command=tuple(start.get("command", ())),
            commit=start.get("commit"),
            clean=start.get("clean"),
            tags=tuple(run.tags),
            parent=run.parent if within is None or self._parent(run, within) is not None else None,
            config=run.config,
            summary={name: MetricSummary(*values[:4]) for name, values in run.summary.items()},
        )

    def _parent(self, run: Run, within: str | None) -> Run | None:
        """Return the run that a run continues; None if it has none, it was removed, or it is not shown."""
        parent = None if run.parent is None else self._runs.get(run.parent["run"])
        return parent if parent is not None and within in (None, parent.session) else None

    def _details(self, run: Run, within: str | None) -> RunDetails:
        known = self._runs.ranks_before(run, MAX_MEMBERS)
        timeline = self._runs.timeline(run)
        metrics = {name for one in self._ordered(run) for name in self._history.metrics(one, run.id)}
        info = self._info(run, within)
        if info.parent is not None:
            before = self._parent(run, within)
            info = replace(info, parent={**info.parent, "name": None if before is None else before.name})
        return RunDetails(
            **vars(info),
            start=run.start or {},
            metrics=tuple(sorted(metrics)),
            members=tuple(members(known, run, MAX_MEMBERS)),
            timeline=tuple(dict(mark) for mark in timeline),
            children=tuple(_child(one) for one in self._runs.children(run) if within in (None, one.session)),
            marks_left_out=run.marks - len(timeline),
        )

    def _ordered(self, run: Run) -> list[str]:
        """Return the replicas with points of a run: leads first."""
        leads = [str(lead[1]) for lead in run.leads.values()]
        found = self._history.replicas_in(run.id)
        return sorted(found, key=lambda id: (leads.index(id) if id in leads else len(leads), id))

    def _points(self, asked: operations.GetRunHistory, run: Run) -> list[tuple[float, int | None, float]]:
        replica = self._telling(run, asked.metric, asked.replica)
        return self._history.between(replica, asked.metric, points=asked.points, run=run.id)

    def _curves(self, asked: operations.GetRunCurves, run: Run) -> RunCurves:
        for name, value, known in (("by", asked.by, ("step", "time")), ("ranks", asked.ranks, tuple(_DRAWN))):
            if value not in known:
                raise WrongArguments(f"{name} is one of {', '.join(known)}, not {value!r:.80}")
        lead = self._telling(run, asked.metric, asked.replica)
        having = [one for one in self._ordered(run) if asked.metric in self._history.metrics(one, run.id)]
        drawn = [lead] if asked.ranks == "one" else _evenly(having, _DRAWN[asked.ranks])
        reader = CurveReader(
            lambda one, closely: self._history.samples(
                one,
                asked.metric,
                run.id,
                asked.by,
                -math.inf if asked.since is None else asked.since,
                math.inf if asked.until is None else asked.until,
                closely,
            ),
            asked.by,
            asked.points,
            self._runs.restarts(run),
        )
        curves = [reader.band(lead, drawn)] if asked.ranks == "band" else reader.each(drawn)
        living = {one: run.there[one].metrics.get(asked.metric) for one in run.living}
        values = {one: value for one, value in living.items() if value is not None}
        return RunCurves(
            run.id,
            asked.metric,
            asked.by,
            ranks=len(having),
            drawn=len(drawn),
            curves=tuple(curves),
            outliers=tuple(outliers(values)) if asked.ranks != "one" else (),
        )

    def _telling(self, run: Run, metric: str, replica: str | None) -> str:
        """Return the replica, or without one that which stands for the run, if it has the metric."""
        teller = replica or self._teller(run, metric)
        known = self._history.metrics(teller, run.id) if teller else []
        if teller is None or metric not in known:
            names = known if teller else sorted(run.summary)
            raise WrongArguments(
                f"run {run.id!r} has no metric {metric!r:.80}{f' of {teller!r:.80}' if teller else ''}; "
                f"it has {', '.join(names[:50]) or 'none'}"
            )
        return teller

    def _teller(self, run: Run, metric: str) -> str | None:
        """Return the replica whose values of a metric stand for the run."""
        known = run.summary.get(metric)
        if known is not None:
            return str(known[4])
        there = (one for one in self._ordered(run) if metric in self._history.metrics(one, run.id))
        return next(there, None)

    def _compare(self, asked: operations.CompareRuns, within: str | None) -> RunComparison:
        runs = self._runs.find(asked.run, within), self._runs.find(asked.other, within)
        infos = tuple(self._info(run, within) for run in runs)
        metrics = list(dict.fromkeys([*runs[0].summary, *runs[1].summary]))
        at_step = {}
        if asked.step is not None:
            both = [name for name in metrics if all(name in run.summary for run in runs)][:MAX_AT_STEP]
            at_step = {
                name: tuple(
                    self._history.value_at(str(run.summary[name][4]), name, run.id, asked.step) for run in runs
                )
                for name in both
            }
        return RunComparison(
            runs=tuple(replace(_small(one), config={}, summary={}) for one in infos),
            config=_differences(*(one.config for one in infos)),
            start=_differences(*({**(run.start or {}), "replica": None} for run in runs)),
            summary={name: tuple(one.summary.get(name) for one in infos) for name in metrics},  # type: ignore[misc]
            step=asked.step,
            at_step=at_step,  # type: ignore[arg-type]
        )

    def _edit(self, name: str, edit: Callable[..., object], *values: Any) -> RunRecord:
        run = self._runs.find(name)
        edit(run, *values)
        self._urgent()
        return self.shown(run)

    def _remove(self, name: str, now: float) -> RunRecord:
        run = self._runs.find(name)
        shown = self.shown(run)
        self._runs.remove(run, now)
        self._urgent()
        return shown


def _evenly(replicas: list[str], most: int) -> list[str]:
    """Return at most so many of the replicas, the first one and others at equal distances."""
    every = max(1.0, len(replicas) / most)
    return [replicas[int(at * every)] for at in range(min(most, len(replicas)))]


def _step(run: Run) -> int | None:
    """Return the step that a run has reached: that of its first lead while it lives."""
    if run.ended is not None:
        return run.step
    leads = (run.there[lead[1]].step for lead in run.leads.values() if lead[1] in run.there)
    return max((step for step in leads if step is not None), default=run.step)


def _child(run: Run) -> dict[str, Any]:
    parent = run.parent or {}
    return {"run": run.id, "name": run.name, "state": run.state, "step": parent["step"], "kind": parent["kind"]}


def _is_wanted(run: Run, asked: operations.GetRuns) -> bool:
    if run.archived is not bool(asked.archived):
        return False
    if asked.state not in (None, run.state) or (asked.tag is not None and asked.tag not in run.tags):
        return False
    since = -math.inf if asked.since is None else asked.since
    until = math.inf if asked.until is None else asked.until
    if not since <= run.began <= until:
        return False
    if asked.run is None:
        return True
    check_name("a run", asked.run)
    match = re.compile(fnmatch.translate(asked.run)).match
    return match(run.name) is not None or match(run.id) is not None


def _sorted(runs: list[Run], key: str, falling: bool) -> tuple[list[Run], list[Run]]:
    """Return the runs that have what they are sorted by, and the others, the latest first."""
    kind, _, name = key.partition(".")
    found: dict[Run, Any]
    if key in _SORTS:
        found = {run: _step(run) if key == "step" else getattr(run, key) for run in runs}
    elif kind == "summary":
        found = {run: run.summary.get(name, [None])[0] for run in runs}
    elif kind == "config":
        found = {run: run.config.get(name) for run in runs}
    else:
        raise WrongArguments(
            f"sort is one of {', '.join(_SORTS)}, summary.METRIC or config.KEY, with - in front for the largest "
            f"first; not {key!r:.80}"
        )
    values: dict[Run, Any] = {run: one for run, one in found.items() if one is not None and one == one}
    if not all(isinstance(one, (int, float)) for one in values.values()):
        values = {run: str(one) for run, one in values.items()}
    have = sorted(values, key=values.__getitem__)
    if falling:
        have.reverse()
    return have, sorted((run for run in runs if run not in values), key=lambda run: -run.began)


def _small(info: RunRecord) -> RunRecord:
    """Return a run as a list shows it, without large values and without what has no room."""
    config, summary = _first(info.config), _first(info.summary)
    kept = {"config": config, "summary": summary, "note": info.note[:MAX_IN_LIST]}
    command, size = [], 0
    for argument in info.command:
        size += len(argument)
        if size > MAX_IN_LIST:
            break
        command.append(argument)
    kept["command"] = tuple(command)
    left_out = tuple(name for name, value in kept.items() if len(value) < len(getattr(info, name)))
    return replace(info, **kept, left_out=left_out)  # type: ignore[arg-type]


def _first(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part of the values that has room in a list; mostly all of them."""
    if len(pack_value(values)) <= MAX_IN_LIST:
        return values
    kept, room, left_out = {}, MAX_IN_LIST, 0
    for name, value in values.items():
        size = len(pack_value([name, value]))
        if size <= room:
            kept[name] = value
            room -= size
        elif (left_out := left_out + 1) == MAX_LEFT_OUT:
            break
    return kept


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys([*first, *second])
    pairs = ((name, first.get(name), second.get(name)) for name in names)
    return {name: (one, other) for name, one, other in pairs if one != other}
