"""Chromium's trace of a tab, and what the main thread did for each update of the page.

An update begins with the task in which a message of the WebSocket arrives. It has everything that the main thread
does until the next update begins, with garbage collection, timers, and work that was put off until after the frame.
A message that arrives before the first one is shown belongs to the same update. So each task after the first one
counts once, whatever it does; only the time without a task does not count. Times are those of a clock: they include
what the thread waited for a core or for another thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["KINDS", "Trace", "Update", "read_trace", "record"]

CATEGORIES = ("devtools.timeline", "disabled-by-default-devtools.timeline", "v8")

KINDS = ("script", "style", "layout", "paint", "other")

UNSHOWN = 0.25
"""Seconds after which a message begins an update of its own, though the one before has not been shown."""

_KIND_OF = {
    **dict.fromkeys(
        ("EvaluateScript", "FunctionCall", "EventDispatch", "TimerFire", "FireAnimationFrame"), "script"
    ),
    **dict.fromkeys(("FireIdleCallback", "RunMicrotasks", "v8.callFunction", "MinorGC", "MajorGC"), "script"),
    **dict.fromkeys(("UpdateLayoutTree", "ParseAuthorStyleSheet"), "style"),
    **dict.fromkeys(("Layout", "HitTest", "IntersectionObserverController::computeIntersections"), "layout"),
    **dict.fromkeys(("PrePaint", "Paint", "Layerize", "UpdateLayer", "Commit"), "paint"),
}


@dataclass
class Update:
    """Milliseconds of the main thread for an update."""

    total: float = 0.0
    cpu: float = 0.0
    """Of CPU time."""
    longest: float = 0.0
    """Of the longest task."""
    kinds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    """Of the total, by `KINDS`."""

    @property
    def bounded(self) -> float:
        """Of the total, script, style, layout and paint: what the budget bounds."""
        return self.total - self.kinds["other"]


@dataclass(frozen=True)
class Trace:
    """What a tab did in some time."""

    seconds: float
    updates: tuple[Update, ...]
    busy: float
    """Seconds in which the main thread had a task."""


def record(browser: Browser, seconds: float, wait: Callable[[float], object]) -> Trace:
    """Trace the browser's one tab for some seconds.

    Args:
        browser: Chromium.
        seconds: how long.
        wait: waits for some seconds, and takes the browser's messages meanwhile.
    """
    devtools = browser.new_browser_cdp_session()
    try:
        config = {"recordMode": "recordUntilFull", "includedCategories": list(CATEGORIES)}
        devtools.send("Tracing.start", {"transferMode": "ReturnAsStream", "traceConfig": config})
        wait(seconds)
        complete: list[dict[str, Any]] = []
        devtools.once("Tracing.tracingComplete", lambda event: complete.append(event))
        devtools.send("Tracing.end")
        while not complete:
            wait(0.02)
        assert not complete[0]["dataLossOccurred"], "Chromium's buffer for the trace was too small"
        chunks, handle = [], complete[0]["stream"]
        while True:
            chunk = devtools.send("IO.read", {"handle": handle, "size": 1 << 20})
            chunks.append(chunk["data"])
            if chunk["eof"]:
                break
        devtools.send("IO.close", {"handle": handle})
    finally:
        devtools.detach()
    return read_trace(json.loads("".join(chunks))["traceEvents"], seconds)


def read_trace(events: Iterable[dict[str, Any]], seconds: float) -> Trace:
    """Return what the thread did that received messages of a WebSocket.

    Args:
        events: of Chromium's trace.
        seconds: for which was traced.
    """
    events = list(events)
    threads = {(one["pid"], one["tid"]) for one in events if one["name"] == "WebSocketReceive"}
    main = {(one["pid"], one["tid"]) for one in events if one["args"].get("name") == "CrRendererMain"}
    assert len(threads) <= 1, "more than one tab received messages"
    assert threads <= main, "another than the main thread received messages: what it does is not measured"
    mine = [one for one in events if (one["pid"], one["tid"]) in threads and one["ph"] in ("X", "I")]
    # Of two that begin together, the longer one is around the other.
    mine.sort(key=lambda one: (one["ts"], -one.get("dur", 0)))
    tasks = _tasks(mine)
    return Trace(
        seconds=seconds,
        updates=tuple(_updates(tasks)),
        busy=sum(one.update.total for one in tasks) / 1e3,
    )


@dataclass
class _Task:
    begin: float  # microseconds
    end: float
    update: Update
    receives: bool = False
    shows: bool = False


def _tasks(events: Sequence[dict[str, Any]]) -> list[_Task]:
    """Return the thread's tasks; one within another belongs to it."""
    tasks: list[_Task] = []
    open_events: list[tuple[float, str]] = []  # end and kind of those around the next
    for event in events:
        name, begin = event["name"], event["ts"]
        end = begin + event.get("dur", 0)
        task = tasks[-1] if tasks and begin < tasks[-1].end else None
        if name == "RunTask" and task is None:
            took = (end - begin) / 1e3
            task = _Task(begin, end, Update(took, event.get("tdur", 0) / 1e3, took))
            task.update.kinds["other"] = took
            tasks.append(task)
            open_events = [(end, "other")]
        elif task is not None and event["ph"] == "X":
            while open_events[-1][0] <= begin:
                open_events.pop()
            around_end, outer = open_events[-1]
            kind = _KIND_OF.get(name, outer)
            if kind != outer:
                took = (min(end, around_end) - begin) / 1e3
                task.update.kinds[kind] += took
                task.update.kinds[outer] -= took
            open_events.append((min(end, around_end), kind))
        if task is not None:
            task.receives |= name == "WebSocketReceive"
            task.shows |= name == "Commit"
    return tasks


def _updates(tasks: Iterable[_Task]) -> Iterable[Update]:
    """Return the updates, but for the last if the trace ends before it was shown."""
    update: Update | None = None
    began, shown = 0.0, True
    for task in tasks:
        if task.receives and (shown or task.begin > began + UNSHOWN * 1e6):
            if update is not None:
                yield update
            update, began, shown = Update(), task.begin, False
        if update is not None:
            update.total += task.update.total
            update.cpu += task.update.cpu
            update.longest = max(update.longest, task.update.longest)
            for kind, took in task.update.kinds.items():
                update.kinds[kind] += took
        shown |= task.shows
    if update is not None and shown:
        yield update
