"""The spans of this process for a while, in bounded memory, for `loom trace`."""

from __future__ import annotations

import json
import os
from typing import TypedDict

from loom.tracing import clock
from loom.tracing.files import HOST, plain
from loom.tracing.spans import Record, listen, recorder

MAX_BYTES = 4 << 20
"""Bytes of one process's records, as JSON."""
MAX_RECORDS = 20_000
LONGEST = 60.0
"""Seconds of the longest collection."""


class ProcessSpans(TypedDict):
    """The record of one process."""

    name: str
    """The name of the process, such as ``trainers[0]``."""
    host: str
    pid: int
    role: str | None
    offset: float
    """Seconds by which its clock was corrected."""
    error: float | None
    """By how many seconds its times may be wrong; None if that was not measured."""
    records: list[Record]
    """Events and spans as in the file of JSON lines, and what a profiler saw, with the field ``kernel``."""
    left_out: int
    """Records for which there was no room."""
    problem: str | None
    """Why records are missing, if they are."""


class SpanRecords:
    """Records in bounded memory."""

    def __init__(self, most: int = MAX_RECORDS) -> None:
        self._most = most
        self._lines: list[str] = []
        self._size = 0
        self._left_out = 0

    def append(self, record: Record) -> None:
        try:
            line = json.dumps(record, default=plain)
        except (TypeError, ValueError):
            self.leave_out()
            return
        if len(self._lines) >= self._most or self._size + len(line) > MAX_BYTES:
            self.leave_out()
            return
        self._lines.append(line)
        self._size += len(line)

    def leave_out(self) -> None:
        """Count a record for which there is no room."""
        self._left_out += 1

    def of(self, name: str, offset: clock.Offset, problem: str | None) -> ProcessSpans:
        """Return the records, as those of this process."""
        return ProcessSpans(
            name=name,
            host=HOST,
            pid=os.getpid(),
            role=recorder.role,
            offset=offset.seconds,
            error=offset.error,
            records=[json.loads(line) for line in self._lines],
            left_out=self._left_out,
            problem=problem,
        )


class Collection(SpanRecords):
    """The spans of this process from now until `end`."""

    def __init__(self, most: int = MAX_RECORDS) -> None:
        super().__init__(most)
        self._end = listen(self.append)

    def end(self, name: str, problem: str | None = None) -> ProcessSpans:
        """Stop, and return what was recorded."""
        self._end()
        return self.of(name, clock.offset(), problem)


def no_spans(name: str, problem: str | None) -> ProcessSpans:
    """Return what is known of a process that did not answer."""
    return ProcessSpans(
        name=name, host=HOST, pid=0, role=None, offset=0.0, error=None, records=[], left_out=0, problem=problem
    )
