"""The plan that replays an incident, as YAML with comments."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone

from loom.chaos.durations import spoken
from loom.chaos.incidents.replay import Replay, ReplayedFault
from loom.chaos.incidents.troubles import Incident
from loom.chaos.plans.files import parse_plan
from loom.errors import EmptyLog
from loom.weaver.views import ReplicaInfo, WeaverEvent

SLACK = 2.0
"""A replay may take this many times as long as the incident took."""

LEAST_RECOVERY, LEAST_DETECTION = 5.0, 2.0
"""Seconds that a plan allows at least, however quick the incident was."""

LEAST_PATIENCE = 60.0
"""Seconds that a run waits for a recovery at least."""

LEFT_OUT = 100
"""Entries of what cannot be replayed; more are counted."""

_WIDTH = 200


def plan_text(events: Iterable[WeaverEvent], replicas: Mapping[str, ReplicaInfo] | None = None) -> str:
    """Return the plan that replays what the events tell, in YAML.

    Its faults come at the same distances in time as in the incident, and expect recoveries that take at most
    `SLACK` times as long. Events that no fault replays stand in comments, with the reason.

    Args:
        events: a weaver's events.
        replicas: the replicas as the weaver knows them, for those that registered before the first event.

    Raises:
        EmptyLog: the events have nothing that a fault replays.
    """
    incident = Incident(events, replicas or {})
    replay = Replay(incident)
    if not replay.faults:
        others = "".join(f"\n  {what}" for _, what in replay.left_out[:LEFT_OUT])
        count = len(incident.events)
        raise EmptyLog(f"{count} events tell of nothing that a fault replays{':' if others else ''}{others}")
    text = "\n".join(_lines(incident, replay)) + "\n"
    parse_plan(text)
    return text


def _lines(incident: Incident, replay: Replay) -> Iterator[str]:
    first, last = (datetime.fromtimestamp(incident.events[at].time, timezone.utc) for at in (0, -1))
    count = len(incident.events)
    when = f"{first:%Y-%m-%d}, {first:%H:%M:%S} to {last:%H:%M:%S} UTC"
    yield f"# Replays the incident of {when}, from {count} events."
    if replay.left_out:
        yield "# Not replayed:"
        yield from (f"#   {_clock(at)}  {_comment(what)}" for at, what in replay.left_out[:LEFT_OUT])
        if len(replay.left_out) > LEFT_OUT:
            yield f"#   and {len(replay.left_out) - LEFT_OUT} more"
    yield f"name: incident-{first:%Y%m%d-%H%M%S}"
    groups = {place.group for place in incident.places.values() if place.group}
    if len(groups) == 1:
        yield f"watch: {_quoted(groups.pop())}"
    patience = max(_allowed(one.recovered or 0.0, LEAST_PATIENCE) for one in replay.faults)
    yield f"recovery: {patience:g} s"
    yield "faults:"
    began = replay.faults[0].at
    for fault in replay.faults:
        yield from _fault(fault, fault.at - began)


def _fault(fault: ReplayedFault, at: float) -> Iterator[str]:
    yield f"  # {_clock(fault.at)}  {_comment(fault.what)}"
    yield f"  - fault: {fault.fault}"
    yield f"    when: {{time: {at:.3f} s}}"
    if fault.target:
        values = (
            f"{name}: {value if isinstance(value, int) else _quoted(value)}" for name, value in fault.target.items()
        )
        yield f"    target: {{{', '.join(values)}}}"
    if fault.duration is not None:
        yield f"    for: {fault.duration:.3f} s"
    if fault.params:
        yield f"    with: {json.dumps(dict(fault.params))}"
    expected = []
    if fault.detected is not None:
        expected.append(f"detected within {_allowed(fault.detected, LEAST_DETECTION):g} s")
    if fault.recovered is not None:
        expected.append(f"recovers within {_allowed(fault.recovered, LEAST_RECOVERY):g} s")
    if expected:
        took = [("noticed after", fault.detected), ("recovered after", fault.recovered)]
        told = ", ".join(f"{what} {spoken(seconds)}" for what, seconds in took if seconds is not None)
        yield f"    expect: [{', '.join(expected)}]  # {told}"


def _allowed(took: float, least: float) -> float:
    return max(least, math.ceil(SLACK * took))


def _clock(at: float) -> str:
    when = datetime.fromtimestamp(at, timezone.utc)
    return f"{when:%H:%M:%S}.{when.microsecond // 1000:03d}"


def _comment(text: str) -> str:
    return _printable(" ".join(text.split()))[:_WIDTH]


def _quoted(text: str) -> str:
    return json.dumps(_printable(text), ensure_ascii=False)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
