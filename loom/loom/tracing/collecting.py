"""The spans of this process for a while, in bounded memory, for `loom trace`.

`Kernels` adds the operators of torch's profiler, and kernels on a device. Only a process that has loaded torch is
profiled. A process has one profiler: if the user's own runs, that is left alone, and the trace says so.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any, TypedDict

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
        """Stop, and return the record."""
        self._end()
        return self.of(name, clock.offset(), problem)


def no_spans(name: str, problem: str | None) -> ProcessSpans:
    """Return the record of a process that did not answer."""
    return ProcessSpans(
        name=name, host=HOST, pid=0, role=None, offset=0.0, error=None, records=[], left_out=0, problem=problem
    )


_KINDS = frozenset({"cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"})


class Kernels:
    """A run of torch's profiler. Begin and end it in one thread."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why there is nothing, if torch is loaded and yet could not be profiled."""
        self.left_out = 0
        self._profile: Any = None
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "profiler"):
            return
        try:
            self._profile = _started(torch)
        except Exception as error:  # noqa: BLE001 - torch's profiler raises errors of any kind
            self.problem = f"torch's profiler did not start: {error!s:.200}"

    def end(self, most: int) -> list[Record]:
        """Stop, and return the findings as records with the fields ``kernel`` and ``thread``.

        Beyond so many the shortest are left out.
        """
        if self._profile is None:
            return []
        try:
            self._profile.stop()
            found = _records(_exported(self._profile))
        except Exception as error:  # noqa: BLE001 - as above
            self.problem = f"torch's profiler failed: {error!s:.200}"
            return []
        finally:
            self._profile = None
        found.sort(key=lambda record: -float(record["dur_ms"]))  # type: ignore[arg-type]
        self.left_out = max(0, len(found) - most)
        return found[:most]


def _started(torch: Any) -> Any:
    from torch.autograd import _profiler_enabled

    if _profiler_enabled():
        raise RuntimeError("another profile of this process is being taken")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # Without it, only operators of the thread that starts the profiler are seen.
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    profile = torch.profiler.profile(activities=activities, experimental_config=everything)
    profile.start()
    return profile


def _exported(profile: Any) -> Mapping[str, Any]:
    descriptor, path = tempfile.mkstemp(prefix="loom-trace-", suffix=".json")
    os.close(descriptor)
    try:
        profile.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            exported: Mapping[str, Any] = json.load(file)
        return exported
    finally:
        os.unlink(path)


def _records(exported: Mapping[str, Any]) -> list[Record]:
    """Return Kineto's events. Their times are microseconds since a base in nanoseconds of Unix time."""
    base = exported.get("baseTimeNanoseconds", 0) / 1e9
    to_session = clock.now() - time.time()
    found: list[Record] = []
    for event in exported.get("traceEvents", ()):
        if event.get("ph") == "X" and event.get("cat") in _KINDS:
            unix = base + event["ts"] / 1e6
            found.append(
                {
                    "name": str(event["name"])[:200], "t": unix + to_session, "time": unix, "host": HOST,
                    "pid": os.getpid(), "role": None, "trace": None, "dur_ms": event.get("dur", 0) / 1000,
                    "kernel": event["cat"], "thread": str(event.get("tid"))[:40],
                }
            )  # fmt: skip
    return found
