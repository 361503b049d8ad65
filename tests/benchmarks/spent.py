"""What the events of a process cost it, measured where they happen: CPU time within the calls of `loom.tracing`."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from loom import tracing
from loom.tracing import clock, files, spans, trace_ids

__all__ = ["Spent", "begin", "in_all_processes", "measured", "read"]

C = TypeVar("C", bound=Callable[..., Any])


class Spent(NamedTuple):
    """What a call of `loom.tracing` took."""

    t: float
    """Seconds of the session's clock."""
    what: str
    seconds: float
    """CPU time of the thread."""


@contextmanager
def in_all_processes(folder: Path) -> Iterator[None]:
    """Have every Python that starts meanwhile measure, and write what it finds to a file in a folder."""
    root = Path(__file__).parents[2]
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"from {__name__} import begin\n\nbegin({str(folder)!r})\n")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(root), *([before] if before else ())])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def begin(folder: str) -> None:
    """Measure from now on, before anything else has imported `loom.tracing`."""
    found: list[Spent] = []
    tracing.event = spans.event = measured(spans.event, found)
    spans.record_call = measured(spans.record_call, found)
    for cls in (spans.span, trace_ids.trace):
        cls.__enter__ = measured(cls.__enter__, found)  # type: ignore[method-assign]
        cls.__exit__ = measured(cls.__exit__, found)  # type: ignore[method-assign]
    flush = measured(files.Writer.flush, found)

    @functools.wraps(flush)
    def flush_and_note(self: files.Writer[Any]) -> None:
        flush(self)
        with Path(folder, f"{os.getpid()}.jsonl").open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in found)
        found.clear()

    files.Writer.flush = flush_and_note  # type: ignore[method-assign]


def read(folder: Path, began: float, ended: float) -> list[Spent]:
    """Return what all processes have spent between two times."""
    texts = (file.read_text() for file in folder.glob("*.jsonl"))
    every = (Spent(*json.loads(line)) for text in texts for line in text.splitlines())
    return [one for one in every if began <= one.t <= ended]


def measured(function: C, found: list[Spent]) -> C:
    """Return a function that also notes the CPU time of each call, but for those within another one."""
    name = function.__qualname__
    look = time.thread_time

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(_here, "within", False):
            return function(*args, **kwargs)
        _here.within = True
        first = look()
        before = look()
        try:
            return function(*args, **kwargs)
        finally:
            after = look()
            _here.within = False
            # Two looks one after the other differ by what a look takes.
            found.append(Spent(clock.now(), name, after - before - (before - first)))

    return call  # type: ignore[return-value]


_here = threading.local()
