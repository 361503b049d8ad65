"""trackio: a run for each replica in a project on this machine, with marks as alerts.

``trackio show`` shows the project, and ``trackio sync`` copies it to a Space of Hugging Face.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from trackio.sqlite_storage import SQLiteStorage
from trackio.utils import RESERVED_KEYS

from loom.exporters.naming import event_of, local_address, run_id, set_apart
from loom.exporters.tracker import Destination, TrackedRun, TrackerMark, TrackerRow, TrackerSink, Written
from loom.weaver.views import ReplicaInfo

_ERRORS = frozenset(("failed", "refused", "unanswered"))
"""Kinds of events that are alerts of the level error."""


class _Run(TrackedRun):
    def __init__(self, project: str, replica: ReplicaInfo) -> None:
        self._project = project
        self._about = {"run": replica.id, "run_id": run_id(replica)}
        self.url = local_address(SQLiteStorage.get_project_db_path(project))
        self._group = replica.group
        self._registered = replica.registered
        self._step = 0
        self._config: Mapping[str, Any] | None = None
        """The configuration that the next points bring."""

    def written(self) -> Written:
        found = Written()
        for log in SQLiteStorage.get_logs(self._project, **self._about):
            at = datetime.fromisoformat(log["timestamp"]).timestamp()
            for name in log.keys() - {"timestamp", "step"}:
                found.add(name, at)
            self._step = max(self._step, log["step"])
        name, id = self._about["run"], self._about["run_id"]
        alerts = SQLiteStorage.get_alerts(self._project, run_name=name, run_id=id)
        found.event = max((event_of(alert["title"]) for alert in alerts), default=0)
        return found

    def log(self, rows: Sequence[TrackerRow]) -> None:
        steps = []
        for row in rows:
            self._step = self._step if row.step is None else row.step
            steps.append(self._step)
        SQLiteStorage.bulk_log(
            self._project,
            metrics_list=[dict(row.values) for row in rows],
            steps=steps,
            timestamps=[_time(row.time) for row in rows],
            config=self._config,
            **self._about,
        )
        self._config = None

    def mark(self, marks: Sequence[TrackerMark]) -> None:
        SQLiteStorage.bulk_alert(
            self._project,
            titles=[f"#{mark.event} {mark.kind}" for mark in marks],
            texts=[mark.text for mark in marks],
            levels=["error" if mark.kind in _ERRORS else "info" for mark in marks],
            steps=[self._step if mark.step is None else mark.step for mark in marks],
            timestamps=[_time(mark.time) for mark in marks],
            alert_ids=[f"{self._about['run_id']}-{mark.event}" for mark in marks],
            **self._about,
        )

    def set_config(self, config: Mapping[str, Any]) -> None:
        own = {"_Username": None, "_Created": _time(self._registered), "_Group": self._group}
        self._config = {**config, **own}

    def close(self, replica: ReplicaInfo) -> None:
        """Do nothing: each addition is a transaction, and a run has no end."""


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


class _Trackio(TrackerSink):
    def __init__(self, project: str) -> None:
        self._project = project

    def name_of(self, metric: str) -> str:
        # As `trackio.Run.log` renames them.
        return set_apart(metric, "__", lambda name: name in RESERVED_KEYS or metric.startswith("__"))

    def open(self, replica: ReplicaInfo) -> TrackedRun:
        return _Run(self._project, replica)


def open_tracker(destination: Destination) -> TrackerSink:
    """Return the trackio of this machine, whose files are in ``TRACKIO_DIR``."""
    SQLiteStorage.validate_project_name(destination.project)
    return _Trackio(destination.project)
