"""Weights & Biases: a run for each replica, with marks as rows of its history.

What was logged is read back from the run's own log on the disk, which wandb writes online and offline. Rows are
numbered, so that W&B, which drops a row with a number that it has, and ``wandb sync`` agree on them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.proto.wandb_internal_pb2 import HistoryRecord, Record

from loom.exporters.naming import local_address, run_id, set_apart
from loom.exporters.tracker import Destination, TrackedRun, TrackerMark, TrackerRow, TrackerSink, Written
from loom.weaver.states import LIVING
from loom.weaver.views import ReplicaInfo

STEP, TIME, EVENT, MARK = "loom/step", "loom/time", "loom/event", "loom/mark"
"""The keys of a row beside metrics: step and time of the report; the id of an event and its text."""

_OWN = frozenset((STEP, TIME, EVENT, MARK))
_BLOCK, _HEADER, _FILE_HEADER = 1 << 15, 7, 7  # bytes, of the format of LevelDB's logs
_WHOLE = (1, 4)  # types of records: a whole one, and the end of one; between them are parts
_CLOSE_TIMEOUT = 20.0  # seconds that the process of wandb has to close a log
_LOOK = 0.02  # seconds between two looks at whether a log is closed


class _Run(TrackedRun):
    def __init__(self, project: str, folder: Path, replica: ReplicaInfo) -> None:
        self._folder, self._id = folder, run_id(replica)
        self._written, self._row = self._read_back()
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            id=self._id,
            name=replica.id,
            group=replica.group,
            dir=str(folder),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                save_code=False,
                silent=True,
                x_disable_meta=True,
                x_disable_stats=True,
            ),
        )
        self._run.define_metric("*", step_metric=STEP)
        self.url = local_address(Path(self._run.dir).parent) if self._run.offline else self._run.url
        self._row = max(self._row, self._run.step)
        if self._run.resumed and not self._row_is_local:
            self._read_back_online()

    @property
    def _row_is_local(self) -> bool:
        return bool(self._written.points or self._written.event)

    def written(self) -> Written:
        return self._written

    def log(self, rows: Sequence[TrackerRow]) -> None:
        for row in rows:
            step = {} if row.step is None else {STEP: row.step}
            self._log({**row.values, **step, TIME: row.time})

    def mark(self, marks: Sequence[TrackerMark]) -> None:
        for mark in marks:
            step = {} if mark.step is None else {STEP: mark.step}
            self._log({EVENT: mark.event, MARK: mark.line, TIME: mark.time, **step})

    def set_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def close(self, replica: ReplicaInfo) -> None:
        living = replica.state in LIVING
        self._run.finish(exit_code=0 if living or replica.died_of is None else 1)

    def _log(self, values: dict[str, Any]) -> None:
        self._run.log(values, step=self._row)
        self._row += 1

    def _read_back(self) -> tuple[Written, int]:
        """Return what the run's logs hold, and the number of the next row."""
        found, next_row = Written(), 0
        for log in sorted((self._folder / "wandb").glob(f"*run-*-{self._id}/run-{self._id}.wandb")):
            _await_writers(log)
            for history in _histories(log):
                next_row = max(next_row, history.step.num + 1)
                items = ((one.key or "/".join(one.nested_key), one.value_json) for one in history.item)
                _add(found, {key: json.loads(text) for key, text in items})
        return found, next_row

    def _read_back_online(self) -> None:
        """Read what W&B holds of a run whose logs are not on this machine."""
        for row in wandb.Api().run(self._run.path).scan_history():
            _add(self._written, {key: value for key, value in row.items() if value is not None})


def _add(found: Written, row: Mapping[str, Any]) -> None:
    if EVENT in row:
        found.event = max(found.event, int(row[EVENT]))
    for key in row.keys() - _OWN:
        if not key.startswith("_"):
            found.add(key, row.get(TIME, 0.0))


def _histories(log: Path) -> Iterator[HistoryRecord]:
    """Yield the rows in a run's log; an end that was cut off, or is not written yet, is passed over."""
    data, at, parts = log.read_bytes(), _FILE_HEADER, b""
    while True:
        left = -at % _BLOCK
        at += left if left < _HEADER else 0
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        begin, end = at + _HEADER, at + _HEADER + length
        if end > len(data) or begin > len(data):
            return
        parts += data[begin:end]
        if data[at + 6] in _WHOLE:
            record = Record.FromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                yield record.history
        at = end


def _await_writers(log: Path) -> None:
    """Wait until no process has a log open.

    That of wandb outlives a killed exporter for a moment, and closes a log only after its run has ended. The kernel
    tells no other process of that, which is why this looks again and again.

    Raises:
        TimeoutError: one goes on writing.
    """
    ends = time.monotonic() + _CLOSE_TIMEOUT
    name = str(log.resolve())
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        while _is_open(descriptor, name):
            if time.monotonic() > ends:
                raise TimeoutError(f"the process {descriptor.parts[2]} still writes {log}: end it")
            time.sleep(_LOOK)


def _is_open(descriptor: Path, file: str) -> bool:
    try:
        return os.readlink(descriptor) == file
    except OSError:  # it was closed meanwhile, or is another user's
        return False


class _Wandb(TrackerSink):
    def __init__(self, destination: Destination) -> None:
        self._destination = destination

    def name_of(self, metric: str) -> str:
        return set_apart(metric, "metric", lambda name: name.startswith("_") or name in _OWN)

    def open(self, replica: ReplicaInfo) -> TrackedRun:
        return _Run(self._destination.project, self._destination.folder, replica)


def open_tracker(destination: Destination) -> TrackerSink:
    """Return the W&B of ``WANDB_API_KEY``, or with ``WANDB_MODE=offline`` the files of it in the folder."""
    return _Wandb(destination)
