"""`Timeline`: the marks of runs, which are made of events.

A mark tells once what many ranks do together: a command with its acknowledgements, a start, a crash. It names the
event that began it, for the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from loom.control.commands import CommandKind
from loom.control.frame import pack_value
from loom.weaver.commands import Commands
from loom.weaver.runs.run import Run
from loom.weaver.states import ReplicaEnding
from loom.weaver.storage.store import Store
from loom.weaver.views import WeaverEvent

MAX_MARKS = 1000
"""Marks of one run."""

FOLDED_FOR = 60.0
"""Seconds in which what ranks do alike is one mark."""

KEPT = 64
"""Runs whose marks stay in memory after their last change."""

MAX_TEXT = 1000
"""Characters of a text, or of a value, in a mark."""

BETWEEN = "\x1f"
"""What separates a run's id from the rest of a key in the store."""

_OUTCOMES = {"applied": "applied", "refused": "refused", "unanswered": "refused"}
_TOLD = (ReplicaEnding.CRASHED, ReplicaEnding.LOST, ReplicaEnding.EVICTED)
"""The ends of single ranks that have a mark."""

Mark = dict[str, Any]


class Timeline:
    """The marks of a user's runs."""

    def __init__(self, store: Store, commands: Commands) -> None:
        self._store = store
        self._commands = commands
        self._marks: OrderedDict[str, list[Mark]] = OrderedDict()
        """The marks of the runs that had one lately, by run."""
        self._unsaved: dict[tuple[str, int], Mark] = {}
        self._started: dict[str, dict[str, None]] = {}
        """The replicas in the last mark of a start, by run."""

    def of(self, run: Run) -> list[Mark]:
        """Return the marks of a run, the oldest first."""
        found = self._marks.get(run.id)
        if found is None:
            rows = self._store.rows_after("run_marks", run.id + BETWEEN, MAX_MARKS)
            found = self._marks[run.id] = [dict(stored) for _, stored in rows]
        self._marks.move_to_end(run.id)
        return found

    def take(self, run: Run, event: WeaverEvent, again: bool = False) -> None:
        """Take an event about a replica of a run; ``again`` if the replica's process is not the first there."""
        if event.kind in _OUTCOMES:
            self._answered(run, event)
        elif event.kind == "registered":
            self._registered(run, event, again)
        elif event.kind in ("failed", "finished") and event.data.get("ending") in list(_TOLD):
            about = {"reason": _short(event.data.get("reason")), "replica": event.replica}
            self._fold(run, event.data["ending"], event, about)
        elif event.kind == "stalled":
            self._fold(run, "stalled", event, {"replica": event.replica})

    def ended(self, run: Run, time: float, event: int) -> None:
        """Add the mark of a run's end, or of another cause of it."""
        about = {name: getattr(run, name) for name in ("state", "reason", "by", "first")}
        self._add(run, {"kind": "ended", "time": time, "event": event, "step": run.step, **about})

    def save(self) -> None:
        """Put what has changed into the store. The marks of some other runs, which are stored, leave the memory."""
        changing = {run for run, _ in self._unsaved}
        for run in list(self._marks)[: max(0, len(self._marks) - KEPT)]:
            if run not in changing:
                del self._marks[run]
                self._started.pop(run, None)
        for (run, number), mark in self._unsaved.items():
            self._store.put("run_marks", _key(run, number), mark)
        self._unsaved.clear()

    def forget(self, run: str) -> None:
        self._marks.pop(run, None)
        self._started.pop(run, None)
        self._unsaved = {key: mark for key, mark in self._unsaved.items() if key[0] != run}

    def _answered(self, run: Run, event: WeaverEvent) -> None:
        data, outcome = event.data, _OUTCOMES[event.kind]
        id = data["command"]
        marks = self.of(run)
        mark = marks[-1] if marks and marks[-1].get("command") == id else None  # as for most of thousands
        mark = mark or self._last(run, lambda one: one.get("command") == id)
        if mark is None:
            given = self._commands.get(id)
            about: Mark = {"command": id, "do": data["do"], "by": data.get("by") or (given.by if given else None)}
            params = {} if given is None else dict(given.command.params)
            if data["do"] == CommandKind.BRANCH:  # the rest is for the process that starts it
                params = {key: params[key] for key in ("id", "step", "set", "replace") if key in params}
            if params:
                about["params"] = {str(key)[:MAX_TEXT]: _value(one) for key, one in params.items()}
            mark = self._begin(run, "command", event, {**about, "applied": 0, "refused": 0, "changes": {}})
        mark[outcome] += 1
        step = data.get("step")
        if outcome == "applied" and step is not None:
            mark["step"] = step if mark["step"] is None else min(mark["step"], step)
            mark["last_step"] = max(mark.get("last_step", step), step)
        for key, change in (data.get("changes") or {}).items():
            if key not in mark["changes"]:
                mark["changes"][key] = {name: _value(one) for name, one in change.items()}
        if outcome == "refused" and "reason" not in mark:
            mark["reason"] = _short(data.get("reason"))
        self._changed(run, mark)

    def _registered(self, run: Run, event: WeaverEvent, again: bool) -> None:
        """Take the start of a process. Those that start together are one mark."""
        counted = self._started.setdefault(run.id, {})
        kind = "started" if run.marks == 0 else "restarted" if again else "joined"
        if event.replica in counted:
            counted.clear()
        if not counted:
            mark = self._begin(run, kind, event, {"replica": event.replica, "count": 0})
            run.restarts += kind == "restarted"
        else:
            mark = self._last(run, lambda one: one["kind"] in ("started", "restarted", "joined")) or {}
            if not mark or event.time > mark["time"] + FOLDED_FOR or (again and mark["kind"] != "restarted"):
                counted.clear()
                return self._registered(run, event, again)
        counted[event.replica or ""] = None
        mark["count"] += 1
        self._changed(run, mark)

    def _fold(self, run: Run, kind: str, event: WeaverEvent, about: Mark) -> None:
        """Add a mark, or count in the last one if it is of the kind, and not long ago."""
        marks = self.of(run)
        if marks and marks[-1]["kind"] == kind and event.time <= marks[-1]["time"] + FOLDED_FOR:
            mark = marks[-1]
        else:
            mark = self._begin(run, kind, event, {**about, "count": 0})
        mark["count"] += 1
        self._changed(run, mark)

    def _last(self, run: Run, wanted: Any) -> Mark | None:
        return next((mark for mark in reversed(self.of(run)) if wanted(mark)), None)

    def _begin(self, run: Run, kind: str, event: WeaverEvent, about: Mark) -> Mark:
        step = event.data.get("step")
        return self._add(run, {"kind": kind, "time": event.time, "event": event.id, "step": step, **about})

    def _add(self, run: Run, mark: Mark) -> Mark:
        marks = self.of(run)
        mark["number"] = run.marks
        run.marks += 1
        marks.append(mark)
        if len(marks) > MAX_MARKS:
            gone = marks.pop(1)["number"]  # the first one is the start
            self._unsaved.pop((run.id, gone), None)
            self._store.drop("run_marks", _key(run.id, gone))
        self._changed(run, mark)
        return mark

    def _changed(self, run: Run, mark: Mark) -> None:
        self._unsaved[run.id, mark["number"]] = mark


def _key(run: str, number: int) -> str:
    return f"{run}{BETWEEN}{number:09}"


def _short(text: object) -> str | None:
    return None if text is None else str(text)[:MAX_TEXT]


def _value(value: Any) -> Any:
    """Return a value for a mark; a large one as the beginning of its text."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return value if len(pack_value(value)) <= MAX_TEXT else f"{value!r:.200}…"


def members(rows: Mapping[str, Mapping[str, Any]], run: Run, limit: int) -> list[Mapping[str, Any]]:
    """Return what is known of the replicas of a run, by rank: stored ones, and those whose process is its last."""
    found = {**rows, **{id: about_rank(run, id) for id in run.there}}
    ordered = sorted(found.items(), key=lambda one: (one[1]["group"], one[1]["rank"] or 0, one[0]))
    return [{"replica": id, **about} for id, about in ordered[:limit]]


def about_rank(run: Run, id: str) -> Mapping[str, Any]:
    """Return what is kept of a replica when its name goes to another run."""
    one = run.there[id]
    return {
        "group": one.group,
        "rank": one.rank,
        "host": one.host,
        "state": one.state.value,
        "step": one.step,
        "ending": None if one.ending is None else one.ending.value,
        "end_reason": _short(one.end_reason),
        "ended_by": one.ended_by,
        "changed": one.changed,
    }
