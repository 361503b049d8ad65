"""Spans of several processes as one file for Perfetto (https://ui.perfetto.dev), in Chrome's trace event format.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence

from loom.tracing.collecting import ProcessSpans
from loom.tracing.spans import Record

MAX_FLOW = 1000
"""Spans that one trace id ties together."""

_OWN = frozenset(
    {"name", "t", "time", "host", "pid", "role", "trace", "dur_ms", "span", "parent", "root", "kernel", "thread"}
)

Event = dict[str, object]


def to_perfetto(processes: Sequence[ProcessSpans]) -> str:
    """Return the text of the file.

    Each process has its lanes: a span stands in the lane of the span around it, or in the first free one. Arrows
    tie the spans of one trace id together, in the order in which they began.
    """
    start = min((_number(record["t"]) for each in processes for record in each["records"]), default=0.0)
    events: list[Event] = []
    chains: defaultdict[str, list[Event]] = defaultdict(list)
    for number, process in enumerate(processes, 1):
        events += _names(number, process)
        kernels = [record for record in process["records"] if "kernel" in record]
        lanes = [*_lanes([record for record in process["records"] if "kernel" not in record])]
        threads: dict[object, int] = {}
        lanes += [(record, threads.setdefault(record.get("thread"), 1000 + len(threads))) for record in kernels]
        for thread, lane in threads.items():
            events.append(_meta("thread_name", number, lane, f"torch {thread}"))
        for record, lane in lanes:
            event = _event(record, number, lane, start)
            events.append(event)
            if isinstance(record.get("trace"), str) and event["ph"] == "X":
                chains[str(record["trace"])].append(event)
    for number, (trace, chain) in enumerate(sorted(chains.items()), 1):
        events += _flow(number, trace, chain)
    told = [{key: value for key, value in each.items() if key != "records"} for each in processes]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"processes": told}})


def _lanes(records: Iterable[Record]) -> Iterable[tuple[Record, int]]:
    """Yield each record with its lane: spans of one lane lie inside each other or do not overlap."""
    order = sorted(records, key=lambda record: (_number(record["t"]), -_number(record.get("dur_ms", 0))))
    stacks: list[list[float]] = []  # the ends of the open spans of each lane, the outermost first
    lane_of: dict[object, int] = {}  # by the span's id
    for record in order:
        around = None if record.get("parent") is None else lane_of.get(record["parent"])
        begin = _number(record["t"])
        end = begin + _number(record.get("dur_ms", 0)) / 1000
        if "dur_ms" not in record:
            yield record, (around or 0) + 1
            continue
        tried = [*([] if around is None else [around]), *range(len(stacks))]
        lane = next((each for each in tried if _fits(stacks[each], begin, end, inside=each == around)), None)
        if lane is None:
            lane = len(stacks)
            stacks.append([])
        stacks[lane].append(end)
        if "span" in record:
            lane_of[record["span"]] = lane
        yield record, lane + 1


def _fits(stack: list[float], begin: float, end: float, inside: bool) -> bool:
    while stack and stack[-1] <= begin:
        stack.pop()
    return not stack or (inside and end <= stack[-1])


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e12 else 0.0


def _event(record: Record, process: int, lane: int, start: float) -> Event:
    args = {key: _finite(value) for key, value in record.items() if key not in _OWN}
    if record.get("trace") is not None:
        args["trace"] = str(record["trace"])[:64]
    name = str(record.get("name"))[:200]
    if isinstance(record.get("endpoint"), str):
        name = f"{name} {record['endpoint']}"[:200]
    event: Event = {
        "name": name,
        "cat": str(record.get("kernel", "loom")),
        "pid": process,
        "tid": lane,
        "args": args,
    }
    event["ts"] = round((_number(record["t"]) - start) * 1e6, 3)
    if "dur_ms" in record:
        return {**event, "ph": "X", "dur": round(max(0.0, _number(record["dur_ms"])) * 1000, 3)}
    return {**event, "ph": "i", "s": "t"}


def _finite(value: object) -> object:
    """Return a value that strict JSON has: NaN and infinity are text."""
    return str(value) if isinstance(value, float) and not abs(value) < float("inf") else value


def _names(number: int, process: ProcessSpans) -> list[Event]:
    role = f" {process['role']}" if process["role"] else ""
    error = process["error"]
    exact = "clock not compared" if error is None else f"±{error * 1000:.2f} ms"
    name = f"{process['name']}{role} · {process['host']} · pid {process['pid']} · {exact}"
    return [
        _meta("process_name", number, 0, name),
        {"name": "process_sort_index", "ph": "M", "pid": number, "tid": 0, "args": {"sort_index": number}},
    ]


def _meta(kind: str, process: int, lane: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": lane, "args": {"name": name}}


def _flow(number: int, trace: str, chain: list[Event]) -> list[Event]:
    chain = sorted(chain, key=lambda event: _number(event["ts"]))[:MAX_FLOW]
    flow = []
    for place, event in enumerate(chain):
        phase = "s" if place == 0 else "f" if place == len(chain) - 1 else "t"
        tied = {key: event[key] for key in ("pid", "tid", "ts")}
        flow.append({"name": trace, "cat": "trace", "id": number, "ph": phase, "bp": "e", **tied})
    return flow if len(flow) > 1 else []
