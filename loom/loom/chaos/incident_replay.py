"""The faults that replay an incident: the injected ones, and one for each trouble of a replica or a host."""

from __future__ import annotations

import glob
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from loom.chaos.durations import spoken
from loom.chaos.incident_troubles import Incident, Injection, Trouble, TroubleKind
from loom.chaos.plans import parse_plan
from loom.control.fault_kinds import MAX_DURATION, check_fault
from loom.errors import EmptyLog, WrongArguments
from loom.weaver.views import ReplicaInfo, WeaverEvent

MOST = 200_000
"""Events that a file may have."""


def read_events(file: Path) -> list[WeaverEvent]:
    """Read events from a file, or from standard input if its name is ``-``.

    Raises:
        WrongArguments: a line is no event, or there are more than `MOST`.
    """
    if str(file) == "-":
        return parse_events(sys.stdin, "-")
    try:
        with file.open() as lines:
            return parse_events(lines, str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise WrongArguments(f"{file}: the events cannot be read: {error}") from error


def parse_events(lines: Iterable[str], file: str) -> list[WeaverEvent]:
    """Parse events, one a line; empty lines are left out."""
    events: list[WeaverEvent] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(events) == MOST:
            raise WrongArguments(f"{file}:{number}: there are more than {MOST} events: choose a shorter time")
        event: WeaverEvent | None
        try:
            event = WeaverEvent.from_body(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            event = None
        if event is None or not _is_one(event):
            text = f"{line.strip()!r:.80} is no event: write what `loom events --json` prints"
            raise WrongArguments(f"{file}:{number}: {text}")
        events.append(event)
    return events


def _is_one(event: WeaverEvent) -> bool:
    return (
        type(event.id) is int
        and type(event.time) in (int, float)
        and isinstance(event.kind, str)
        and isinstance(event.replica, (str, type(None)))
    )


FOLLOWS_WITHIN = 10.0
"""Seconds after an injected fault, or after the weaver's start, in which a trouble is their consequence."""

TOGETHER = 3.0
"""Seconds within which all replicas of a host fall silent if the host does."""

LEAST = 0.1  # seconds that a fault lasts
MOST_SLOW = 600.0  # seconds by which slow_rank makes a step longer


@dataclass(frozen=True)
class ReplayedFault:
    """A fault of the plan, with what it replays."""

    at: float
    """The time of the event, in seconds since the epoch."""
    fault: str
    target: Mapping[str, Any]
    what: str
    """The event, for a comment."""
    duration: float | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    detected: float | None = None
    """Seconds until the weaver noticed; None if that was when the trouble began, as far as is known."""
    recovered: float | None = None
    """Seconds until the replica ran again, as a run counts them: from the fault, or from its end if it lasts."""


class Replay:
    """The faults that replay an incident."""

    def __init__(self, incident: Incident) -> None:
        self._incident = incident
        self._left = list(incident.troubles)
        """The troubles that nothing replays so far."""
        self.left_out = list(incident.left_out)
        found = [*self._injected(), *self._weaver_restarts(), *self._hosts(), *map(self._process, self._left)]
        self.faults = sorted(found, key=lambda one: one.at)
        self.left_out.sort()

    def _target(self, replica: str) -> Mapping[str, object]:
        """Return the target of a fault that strikes a replica: its group and rank if no other replica has them."""
        places = self._incident.places
        place, short = places.get(replica), replica.partition("@")[0]
        if place is not None and place.group and place.rank is not None:
            same = {
                id.partition("@")[0]
                for id, one in places.items()
                if (one.group, one.rank) == (place.group, place.rank)
            }
            if same == {short}:
                return {"mesh": glob.escape(place.group), "rank": place.rank}
        return {"replica": glob.escape(short)}

    def _take(self, wanted: Iterable[Trouble]) -> list[Trouble]:
        taken = list(wanted)
        self._left = [one for one in self._left if one not in taken]
        return taken

    def _injected(self) -> Iterator[ReplayedFault]:
        for injection in self._incident.injections.values():
            try:
                kind, params, duration = check_fault(injection.fault, injection.params, injection.duration)
            except WrongArguments as error:
                self.left_out.append((injection.at, f"the fault {injection.fault}: {error}"))
                continue
            if not (struck := self._struck(injection)):
                text = f"{kind.name} of {injection.target}: {injection.refused or 'no replica took it'}"
                self.left_out.append((injection.at, text))
                continue
            if duration is not None and injection.over is not None:
                duration = max(LEAST, min(duration, injection.over - injection.at))
            over = injection.at + (duration or 0.0)
            hosts = {self._host(id) for id in struck} if kind.of == "host" else set()
            followed = self._take(
                one
                for one in self._left
                if (one.replica in struck or self._host(one.replica) in hosts - {""})
                and injection.at - TOGETHER <= one.noticed <= over + FOLLOWS_WITHIN
            )
            for id in self._one_a_host(struck) if kind.of == "host" else sorted(struck):
                mine = [one for one in followed if one.replica == id or kind.of == "host"]
                yield ReplayedFault(
                    injection.at,
                    kind.name,
                    self._target(id),
                    f"{kind.name} was injected into {id}" + _came_back(mine, injection.at),
                    duration,
                    {name: value for name, value in params.items() if value != kind.params[name].default},
                    min((max(0.0, one.noticed - injection.at) for one in mine), default=None),
                    _recovery(mine, injection.at if kind.ends else over),
                )

    def _struck(self, injection: Injection) -> set[str]:
        given = injection.target
        if injection.struck or injection.refused or isinstance(given, str):
            return injection.struck
        return {one for one in given if one in self._incident.places}

    def _weaver_restarts(self) -> Iterator[ReplayedFault]:
        for at in self._incident.weaver_restarts:
            self._take(
                one
                for one in self._left
                if one.kind is TroubleKind.SILENT
                and one.same
                and at - TOGETHER <= one.noticed <= at + FOLLOWS_WITHIN
            )
            yield ReplayedFault(at, "dead_weaver", {}, "the weaver started again, or the gateway with it")

    def _hosts(self) -> Iterator[ReplayedFault]:
        """Yield a fault for each time at which all replicas of a host fell silent."""
        places = self._incident.places
        several = len({one.host for one in places.values() if one.host}) > 1
        silent = [one for one in self._left if one.kind is TroubleKind.SILENT]
        while silent:
            first = silent.pop(0)
            host = self._host(first.replica)
            with_it = [
                one for one in silent if self._host(one.replica) == host and one.since - first.since <= TOGETHER
            ]
            there = {id for id, one in places.items() if one.host == host}
            fell = {one.replica for one in (first, *with_it)}
            if not host or fell != there or not (several or len(there) > 1):
                continue
            silent = [one for one in silent if one not in with_it]
            yield self._host_fault(host, self._take([first, *with_it]))

    def _host_fault(self, host: str, troubles: list[Trouble]) -> ReplayedFault:
        first = troubles[0]
        untils = [one.until for one in troubles if one.until is not None]
        partition = any(one.same for one in troubles)
        lasted = _bounded(max(untils) - first.since) if untils else None
        what = f"the host {host} was silent" + (f" for {spoken(lasted)}" if lasted else "")
        since = max(untils) if partition else first.since
        return ReplayedFault(
            first.since,
            "partition" if partition else "lost_host",
            self._target(first.replica),
            what + _came_back(troubles, since),
            lasted,
            recovered=_recovery(troubles, since),
        )

    def _process(self, trouble: Trouble) -> ReplayedFault:
        since, end = trouble.since, self._incident.events[-1].time
        lasted = _bounded((end if trouble.until is None else trouble.until) - since)
        about = f"{trouble.replica} {trouble.kind.value}" + (f": {trouble.reason}" if trouble.reason else "")
        params: dict[str, object] = {}
        fault, duration, counted = "sigkill", None, since
        match trouble.kind:
            case TroubleKind.RAISED:
                fault, params = "exception", {"text": trouble.reason[:200]}
            case TroubleKind.STALLED:
                fault, duration, counted = "slow_rank", lasted, since + lasted
                params = {"seconds": round(min(lasted, MOST_SLOW), 3)}
                about = f"{trouble.replica} took no step for {spoken(lasted)}"
            case TroubleKind.SILENT if trouble.same:
                fault, duration, counted = "sigstop", lasted, since + lasted
                about = f"{trouble.replica} was silent for {spoken(lasted)}; others on its host were not"
            case TroubleKind.SILENT:
                about = f"{trouble.replica} was silent, and its process never came back"
        target, back = self._target(trouble.replica), _came_back([trouble], counted)
        recovered = _recovery([trouble], counted)
        return ReplayedFault(since, fault, target, about + back, duration, params, recovered=recovered)

    def _one_a_host(self, replicas: set[str]) -> list[str]:
        first = {self._host(id) or id: id for id in sorted(replicas, reverse=True)}
        return sorted(first.values())

    def _host(self, replica: str) -> str:
        place = self._incident.places.get(replica)
        return "" if place is None else place.host


def _bounded(seconds: float) -> float:
    return round(min(max(seconds, LEAST), MAX_DURATION), 3)


def _recovery(troubles: list[Trouble], since: float) -> float | None:
    """Return the seconds from a time until all replicas ran again; None if one did not, or none had any trouble."""
    backs = [one.back for one in troubles]
    known = [back for back in backs if back is not None]
    return max(0.0, max(known) - since) if known and len(known) == len(backs) else None


def _came_back(troubles: list[Trouble], since: float) -> str:
    if not troubles:
        return ""
    took = _recovery(troubles, since)
    return "; it had not recovered when the events end" if took is None else f"; it ran again after {spoken(took)}"


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
