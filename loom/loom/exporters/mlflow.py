"""MLflow: a run for each replica, found again by a tag, with marks as tags."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunStatus, RunTag
from mlflow.exceptions import MlflowException

from loom.exporters.naming import escaped, local_address, run_id
from loom.exporters.tracker import Destination, TrackedRun, TrackerMark, TrackerRow, TrackerSink, Written
from loom.weaver.states import LIVING, ReplicaEnding
from loom.weaver.views import ReplicaInfo

RUN, EVENT, CONFIG = "loom.run", "loom.event.", "loom.config."
"""The tag by which a run is found, and the beginnings of those of marks and of the present configuration."""

_NO_PATH = re.compile(r"^/+|//+|/+$|^\.\.|(?<![^/])\.\.?(?![^/])")
"""Slashes and dots that a path does not keep."""

_LONGEST_NAME = 200  # characters before a hash; MLflow takes 250, with the tags' beginnings
_METRICS, _OTHERS = 1000, 100  # of one request
_LONGEST = 5000  # characters of a tag; servers take 8000


class _Run(TrackedRun):
    def __init__(self, client: MlflowClient, run: Run) -> None:
        self._client = client
        self._run = run
        self._id = run.info.run_id
        self._step = 0
        self.url = _address(str(client.tracking_uri), f"/#/experiments/{run.info.experiment_id}/runs/{self._id}")

    def written(self) -> Written:
        found = Written()
        for name in self._run.data.metrics:
            points = self._client.get_metric_history(self._id, name)
            latest = max((point.timestamp for point in points), default=0)
            found.add(name, (latest + 1) / 1000, len(points))  # MLflow's times are whole milliseconds
        events = (tag.removeprefix(EVENT) for tag in self._run.data.tags if tag.startswith(EVENT))
        found.event = max((int(event) for event in events if event.isdecimal()), default=0)
        return found

    def log(self, rows: Sequence[TrackerRow]) -> None:
        metrics = []
        for row in rows:
            self._step = self._step if row.step is None else row.step
            at = int(row.time * 1000)
            metrics += [Metric(name, value, max(at, 0), self._step) for name, value in row.values.items()]
        for start in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + _METRICS])

    def mark(self, marks: Sequence[TrackerMark]) -> None:
        at = (time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(mark.time)) for mark in marks)
        self._set_tags(
            {f"{EVENT}{mark.event:08}": f"{when} UTC {mark.line}" for when, mark in zip(at, marks, strict=True)}
        )

    def set_config(self, config: Mapping[str, Any]) -> None:
        """Set the tags of the present values; parameters, which MLflow never changes, have the first ones."""
        flat = {_name(key): str(value)[:_LONGEST] for key, value in config.items()}
        known = self._client.get_run(self._id).data
        new = (Param(key, value) for key, value in flat.items() if key not in known.params)
        while some := list(islice(new, _OTHERS)):
            self._client.log_batch(self._id, params=some)
        self._set_tags(
            {CONFIG + key: value for key, value in flat.items() if known.tags.get(CONFIG + key) != value}
        )

    def close(self, replica: ReplicaInfo) -> None:
        if replica.state not in LIVING:
            well = replica.ending in (ReplicaEnding.COMPLETED, ReplicaEnding.STOPPED)
            self._client.set_terminated(self._id, "FINISHED" if well else "FAILED")

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        left = (RunTag(name, text[:_LONGEST]) for name, text in tags.items())
        while some := list(islice(left, _OTHERS)):
            self._client.log_batch(self._id, tags=some)


class _MLflow(TrackerSink):
    def __init__(self, client: MlflowClient, project: str) -> None:
        self._client = client
        self._project = project

    def name_of(self, metric: str) -> str:
        return _name(metric)

    def open(self, replica: ReplicaInfo) -> TrackedRun:
        client, experiment = self._client, self._experiment()
        found = client.search_runs([experiment], f"tags.`{RUN}` = '{run_id(replica)}'", max_results=1)
        if found:
            run = found[0]
            if run.info.status != RunStatus.to_string(RunStatus.RUNNING):
                client.update_run(run.info.run_id, status="RUNNING")
        else:
            about = {RUN: run_id(replica), "loom.group": replica.group, "loom.user": replica.user}
            run = client.create_run(experiment, int(replica.registered * 1000), about, replica.id)
        return _Run(client, run)

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._project)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(self._project))
        except MlflowException:  # another exporter was faster
            return str(self._client.get_experiment_by_name(self._project).experiment_id)


def _name(name: str) -> str:
    """Return MLflow's name for a metric or a key: a path that stays the same if it is made short."""
    made = _NO_PATH.sub(lambda found: escaped(found[0], str.isalnum), escaped(name, _allowed)) or "_"
    if len(made) > _LONGEST_NAME:
        made = f"{made[:_LONGEST_NAME]}_{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return made


def _allowed(character: str) -> bool:
    return (character.isascii() and character.isalnum()) or character in "_-. /"


def _address(uri: str, path: str) -> str | None:
    """Return the address of a run for a browser, without the password of a tracking URI, or that of files."""
    found = urlsplit(uri)
    if found.scheme in ("http", "https"):
        return urlunsplit((found.scheme, found.netloc.rpartition("@")[2], found.path.rstrip("/"), "", "")) + path
    is_path = found.scheme in ("", "file", "sqlite") and found.path.startswith("/")
    return local_address(Path("/" + found.path.lstrip("/"))) if is_path else None


def open_tracker(destination: Destination) -> TrackerSink:
    """Return the MLflow of ``MLFLOW_TRACKING_URI``, else a database in the destination's folder."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        destination.folder.mkdir(parents=True, exist_ok=True)
        uri = f"sqlite:///{destination.folder.absolute()}/mlflow.db"
    return _MLflow(MlflowClient(uri), destination.project)
