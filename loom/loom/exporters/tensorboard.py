"""TensorBoard: a folder of event files for each replica, with marks and the configuration as texts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from loom.exporters.naming import event_of, local_address, set_apart
from loom.exporters.tracker import Destination, TrackedRun, TrackerMark, TrackerRow, TrackerSink, Written
from loom.weaver.views import ReplicaInfo

EVENTS, CONFIG = "loom/events", "loom/config"
"""The tags of marks and of the configuration."""


class _Run(TrackedRun):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = local_address(folder)
        self._config = ""
        """The configuration that was written last."""
        self._step = 0
        self._writer: EventFileWriter | None = None

    def written(self) -> Written:
        found = Written()
        for value, step, at in _values(self._folder):
            self._step = max(self._step, step)
            if value.tag == EVENTS:
                found.event = max(found.event, event_of(_text(value)))
            elif value.tag == CONFIG:
                self._config = _text(value)
            else:
                found.add(value.tag, at)
        return found

    def log(self, rows: Sequence[TrackerRow]) -> None:
        for row in rows:
            self._step = self._step if row.step is None else row.step
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
            self._add(row.time, self._step, Summary(value=values))
        self._flush()

    def mark(self, marks: Sequence[TrackerMark]) -> None:
        for mark in marks:
            self._add(mark.time, self._step if mark.step is None else mark.step, text_pb(EVENTS, mark.line))
        self._flush()

    def set_config(self, config: Mapping[str, Any]) -> None:
        text = "\n".join(f"    {key} = {json.dumps(value)}" for key, value in config.items())
        if text != self._config:
            self._config = text
            self._add(time.time(), self._step, text_pb(CONFIG, text))
            self._flush()

    def close(self, replica: ReplicaInfo) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, at: float, step: int, summary: Summary) -> None:
        if self._writer is None:
            self._writer = EventFileWriter(str(self._folder))
        self._writer.add_event(Event(wall_time=at, step=step, summary=summary))

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()


def _values(folder: Path) -> Iterator[tuple[Summary.Value, int, float]]:
    """Yield the values in a folder's files, with steps and times; a file's end that was cut off is passed over."""
    for file in sorted(folder.glob("*tfevents*")):
        for raw in RawEventFileLoader(str(file)).Load():
            event = Event.FromString(raw)
            yield from ((value, event.step, event.wall_time) for value in event.summary.value)


def _text(value: Summary.Value) -> str:
    return bytes(value.tensor.string_val[0]).decode(errors="replace")


class _TensorBoard(TrackerSink):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def name_of(self, metric: str) -> str:
        return set_apart(metric, "metric/", lambda name: name in (EVENTS, CONFIG))

    def open(self, replica: ReplicaInfo) -> TrackedRun:
        parts = (quote(part, safe=" @=,+").replace(".", "%2E") for part in (replica.user, replica.id) if part)
        return _Run(self._folder.joinpath(*parts))


def open_tracker(destination: Destination) -> TrackerSink:
    """Return TensorBoard, whose ``--logdir`` is the destination's folder."""
    return _TensorBoard(destination.folder)
