"""`HistoryExporter`: writes each point, event and configuration of replicas into a tracker, once.

The weaver numbers the points of a replica: the cursor of a request says which ones have come. An exporter notes
the cursor after each pass, with the number of points that the tracker's run has then. An exporter that was killed
between writing and noting finds more points in the run than that, and passes over as many of those that it asks for
again. One that finds fewer, because the tracker has lost some, begins with the oldest points, and passes over those
that are there. If the weaver has means in the place of some of them, counts say nothing: the exporter then passes
over all points until the time of the last one in the run.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from loom.errors import Conflict, Denied, LoomError, NotFound, Unavailable, UnsafeStateFolder, WrongArguments
from loom.exporters.tracker import (
    Destination,
    TrackedRun,
    TrackerKind,
    TrackerMark,
    TrackerRow,
    TrackerSink,
    Written,
    open_tracker,
)
from loom.process.backoff import Backoff
from loom.process.state_file import write_json
from loom.rest_client import Gateway
from loom.weaver.states import LIVING
from loom.weaver.views import MetricPoint, NewPoints, ReplicaInfo, WeaverEvent

_log = logging.getLogger(__name__)

INTERVAL = 5.0
"""Seconds between two passes."""

PAGE, PAGES = 1000, 10
"""Events of one request, and requests of one user's events in one pass."""

MANY = 25
"""Replicas with news for each second until the next pass: far fewer than a gateway allows requests."""

_AGAIN = Backoff(1.0, 30.0)  # waits while nobody answers
_REFUSED = Backoff(INTERVAL, 600.0, at_once=True)  # waits before a run that failed is opened again
_LONGEST_MARK = 1000  # characters

_UNMARKED = frozenset(("reconnected",))
"""Kinds of events that are no marks."""


class HistorySource(Protocol):
    """The weaver's answers."""

    def ask(self, operation: str, user: str | None = None, **arguments: Any) -> Any:
        """Do an operation on the replicas of a user, or on all of the source. Raise `LoomError`."""


class GatewaySource:
    """The weaver behind a gateway, for the token's user, for another, or with ``*`` for everyone."""

    def __init__(self, gateway: Gateway, user: str | None) -> None:
        self._gateway = gateway
        self._user = user

    def ask(self, operation: str, user: str | None = None, **arguments: Any) -> Any:
        as_user = user if self._user == "*" and user is not None else self._user
        return self._gateway.ask(operation, as_user=as_user, **arguments)


@dataclass
class _Place:
    """How far the export of a replica has come."""

    cursor: str = ""
    points: Counter[str] = field(default_factory=Counter)
    """The points of each metric in the run, by the tracker's names."""
    since: float | None = None
    """The time of the last point."""
    skip: Counter[str] = field(default_factory=Counter)
    """The points of each metric after the cursor that the run has already."""
    last: Mapping[str, float] = field(default_factory=dict)
    """The time of each metric's last point in the run, when it was opened."""
    timed: set[str] = field(default_factory=set)
    """The metrics of which the points until that time are passed over, whatever their number is."""

    def to_body(self) -> Mapping[str, object]:
        return {"cursor": self.cursor, "points": self.points, "since": self.since}

    @classmethod
    def found(cls, noted: Mapping[str, Any] | None, written: Written) -> _Place:
        """Return the place of a run that holds so much, given what was noted before."""
        points = written.points
        if noted is not None:
            counted = Counter(noted["points"])
            if all(points[name] >= count for name, count in counted.items()):
                return cls(noted["cursor"], points, noted["since"], points - counted, written.times)
        return cls("", points, None, Counter(points), written.times)

    def left(self, name: str, points: Sequence[MetricPoint], coarse: bool) -> Sequence[MetricPoint]:
        """Return those of a metric's points that the run does not have.

        Args:
            name: the tracker's.
            coarse: whether there are means among them.
        """
        if coarse and self.skip.pop(name, 0):
            self.timed.add(name)
        if name in self.timed:
            return [point for point in points if point.time > self.last.get(name, -math.inf)]
        passed = min(self.skip[name], len(points))
        self.skip[name] -= passed
        return points[passed:]


class _Followed:
    """A replica that is followed."""

    def __init__(
        self, replica: ReplicaInfo, run: TrackedRun, noted: Mapping[str, Any] | None, careful: bool = False
    ) -> None:
        self.replica = replica
        self.run = run
        self._careful = careful
        """Whether each metric is written by itself, so that one which the tracker refuses is found."""
        self._refused: set[str] = set()
        """The metrics that the tracker refuses."""
        written = run.written()
        self.place = _Place.found(noted, written)
        self.event = written.event
        self.config: Mapping[str, Any] | None = None
        self.seen: object = None
        """The part of the replica's state after the last pass in which news show."""
        self._trouble = ""
        """The last error with the configuration."""

    def log(self, points: Mapping[str, Sequence[MetricPoint]]) -> None:
        """Write the points of metrics."""
        wanted = {name: some for name, some in points.items() if some and name not in self._refused}
        if not self._careful:
            if rows := list(_rows(wanted)):
                self.run.log(rows)
            return
        errors: dict[str, Exception] = {}
        for name, some in wanted.items():
            try:
                self.run.log(list(_rows({name: some})))
            except Exception as error:  # noqa: BLE001 - whatever a tracker's package raises
                errors[name] = error
        if errors and len(errors) == len(wanted):  # it takes nothing at all
            raise next(iter(errors.values()))
        for name, why in errors.items():
            _log.error("the tracker refuses the metric %s of %s: %.1000r", name, self.replica.id, why)
        self._refused.update(errors)
        self._careful = bool(errors)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Set the configuration. If the tracker does not take it, points and marks go on, and it is tried again."""
        if config == self.config:
            return
        try:
            self.run.set_config(config)
            self.config, self._trouble = config, ""
        except Exception as error:  # noqa: BLE001 - whatever a tracker's package raises
            if repr(error) != self._trouble:
                self._trouble = repr(error)
                _log.error("the configuration of %s is not in the tracker: %.1000s", self.replica.id, self._trouble)


class _Failed:
    """A replica whose run has failed."""

    def __init__(self) -> None:
        self._waits = iter(_REFUSED)
        self._next = 0.0
        self.times = 0
        self.text = ""
        """The last error."""

    @property
    def waits(self) -> bool:
        """True until it is time to open the run again."""
        return time.monotonic() < self._next

    def failed(self, text: str) -> bool:
        """Note an error. Return whether it is another one than the last."""
        self._next = time.monotonic() + next(self._waits)
        self.times += 1
        before, self.text = self.text, text
        return text != before


class HistoryExporter:
    """An export to one tracker.

    Args:
        state: the file with the places of the replicas, which one exporter at a time uses.
        only: a glob on the replicas' ids and groups.
    """

    def __init__(
        self, source: HistorySource, tracker: TrackerSink, name: str, state: Path, only: str = "*"
    ) -> None:
        self._source = source
        self._tracker = tracker
        self._name = name
        self._state = state
        self._only = only
        noted = _read(state)
        self._places: dict[str, Mapping[str, Any]] = dict(noted.get("replicas", {}))
        self._events: dict[str, int] = dict(noted.get("events", {}))
        """The last event of each user that was asked for."""
        self._behind: dict[str, int] = dict(noted.get("behind", {}))
        """The last event that is marked in each run that has not taken all of these."""
        self._failed: dict[str, _Failed] = {}
        self._users: set[str] = set()
        """The users of the replicas of the last pass."""
        self._followed: dict[str, _Followed] = {}
        self._may_link = True

    def run(self, ended: threading.Event) -> None:
        """Export until the event is set, and then what is there.

        Raises:
            Denied: the token is not good, or not any more.
            Unavailable: the tracker has not taken all that is there at the end.
            LoomError: what is there at the end cannot be exported. Before, such errors are waited out.
        """
        waits = iter(_AGAIN)
        last_passes = 2  # events are asked for before replicas, of whose user the first pass may not have known
        while last_passes:
            last_passes -= ended.is_set()
            try:
                wait = max(INTERVAL, self.export() / MANY)
                waits = iter(_AGAIN)
            except (Denied, WrongArguments):
                raise
            except LoomError as error:
                if ended.is_set():
                    raise
                wait = next(waits)
                _log.warning("the export goes on later: %s", error)
            ended.wait(wait)
        if self._failed:
            names = ", ".join(sorted(key.rpartition("/")[2] for key in self._failed))
            why = next(iter(self._failed.values())).text
            raise Unavailable(f"{self._name} has not taken everything of {names:.200}: {why:.500}; export again")

    def export(self) -> int:
        """Export what has come since the last pass; return the number of replicas that had news."""
        marks, events = self._new_marks()  # before the replicas, so that each event's replica is there
        asked = [ReplicaInfo.from_body(one) for one in self._source.ask("replicas")]
        replicas = {_key(one): one for one in asked if self._wants(one)}
        self._users = {one.user for one in replicas.values()}
        count, opens = 0, True
        for key, replica in replicas.items():
            if key not in marks and key not in self._behind and not self._has_news(key, replica):
                continue
            failed = self._failed.get(key)
            if key not in self._followed and (not opens or (failed is not None and failed.waits)):
                self._put_off(key, replica, marks)
                continue
            count += 1
            try:
                self._export(key, replica, marks.get(key, ()))
                self._took(key, replica)
            except LoomError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a tracker's package raises, other runs go on
                opens = opens and key in self._followed  # a tracker that is away is waited for once in a pass
                self._refused(key, replica, marks, error)
        self._events.update(events)
        for kept in (self._places, self._behind, self._failed):
            for key in kept.keys() - replicas.keys():
                del kept[key]
        self._note()
        return count

    def _put_off(self, key: str, replica: ReplicaInfo, marks: Mapping[str, object]) -> None:
        """Note that a replica's marks are still to come."""
        if key in marks:
            self._behind.setdefault(key, self._events.get(replica.user, 0))

    def _refused(self, key: str, replica: ReplicaInfo, marks: Mapping[str, object], error: Exception) -> None:
        """Note that a run has failed: it is opened again later, and what it holds is read again."""
        self._put_off(key, replica, marks)
        if self._failed.setdefault(key, _Failed()).failed(f"{error!r:.1000}"):
            _log.error("%s takes nothing of %s now: %.1000r", self._name, replica.id, error)
        self._leave(key)

    def _took(self, key: str, replica: ReplicaInfo) -> None:
        self._behind.pop(key, None)
        if self._failed.pop(key, None) is not None:
            _log.info("%s takes everything of %s again", self._name, replica.id)

    def _note(self) -> None:
        try:
            noted = {"replicas": self._places, "events": self._events, "behind": self._behind}
            write_json(self._state, noted)
        except OSError as error:
            why = error.strerror or error
            raise Unavailable(f"cannot note in {self._state} what is exported: {why}") from error

    def close(self) -> None:
        """End the work on all runs."""
        for key in list(self._followed):
            self._leave(key)

    def _leave(self, key: str) -> None:
        followed = self._followed.pop(key, None)
        if followed is not None:
            try:
                followed.run.close(followed.replica)
            except Exception as error:  # noqa: BLE001 - as above
                _log.warning("the run of %s was not closed: %r", followed.replica.id, error)

    def _has_news(self, key: str, replica: ReplicaInfo) -> bool:
        followed = self._followed.get(key)
        if followed is not None:
            return followed.seen != _state(replica)
        return replica.state in LIVING or self._places.get(key, {}).get("ended") != _state(replica)[:2]

    def _wants(self, replica: ReplicaInfo) -> bool:
        return any(fnmatchcase(name, self._only) for name in (replica.id, replica.group))

    def _export(self, key: str, replica: ReplicaInfo, marks: Sequence[TrackerMark]) -> None:
        followed = self._followed.get(key)
        if followed is None:
            run = self._tracker.open(replica)
            careful = key in self._failed and self._failed[key].times > 1
            followed = self._followed[key] = _Followed(replica, run, self._places.get(key), careful)
            self._link(replica, run)
        followed.configure(replica.config)
        more = True
        while more:
            more = self._export_points(followed)
        if key in self._behind:
            marks = self._marks_of(replica, self._behind[key])
        new = [mark for mark in marks if mark.event > followed.event]
        if new:
            followed.run.mark(new)
            followed.event = new[-1].event
        followed.replica, followed.seen = replica, _state(replica)
        self._places[key] = followed.place.to_body()
        if replica.state not in LIVING:
            self._leave(key)
            self._places[key] = {**self._places[key], "ended": _state(replica)[:2]}

    def _export_points(self, followed: _Followed) -> bool:
        """Export the points after a replica's place, which moves on; return whether more follow."""
        replica, place = followed.replica, followed.place
        asked = {"replica": replica.id, "cursor": place.cursor, "since": place.since}
        given = NewPoints.from_body(self._source.ask("points", replica.user, **asked))
        left: dict[str, list[MetricPoint]] = defaultdict(list)
        for metric, points in given.metrics.items():
            name = self._tracker.name_of(metric)
            left[name] += place.left(name, points, given.coarse)
        followed.log(left)
        place.points.update({name: len(points) for name, points in left.items()})
        times = [points[-1].time for points in given.metrics.values() if points]
        place.since = max(times, default=place.since)
        place.cursor = given.cursor
        if not given.more:
            place.timed.clear()
        return given.more

    def _new_marks(self) -> tuple[Mapping[str, Sequence[TrackerMark]], dict[str, int]]:
        """Return the new marks of each replica, and the last event of each user."""
        marks: dict[str, list[TrackerMark]] = defaultdict(list)
        last: dict[str, int] = {}
        for user in self._users:
            last[user] = self._events.get(user, 0)
            for event in self._new_events(user, last[user], PAGES):
                last[user] = event.id
                if event.replica is not None and event.kind not in _UNMARKED:
                    marks[f"{user}/{event.replica}"].append(_mark(event))
        return marks, last

    def _marks_of(self, replica: ReplicaInfo, after: int) -> Sequence[TrackerMark]:
        """Return the marks of a replica after an event."""
        found = self._new_events(replica.user, after, None, replica=replica.id)
        return [_mark(event) for event in found if event.kind not in _UNMARKED]

    def _new_events(self, user: str, after: int, pages: int | None, **which: str) -> Iterator[WeaverEvent]:
        """Yield a user's events after one of them, those of at most so many pages."""
        for _ in itertools.count() if pages is None else range(pages):
            asked = self._source.ask("events", user, after=after, limit=PAGE, **which)
            found = [WeaverEvent.from_body(one) for one in asked]
            yield from found
            if len(found) < PAGE:
                return
            after = found[-1].id

    def _link(self, replica: ReplicaInfo, run: TrackedRun) -> None:
        """Show the address of a run with its replica, if the exporter may."""
        if run.url is None or not self._may_link or replica.links.get(self._name) == run.url:
            return
        try:
            self._source.ask("link", replica.user, replica=replica.id, tracker=self._name, url=run.url)
        except (Denied, NotFound) as error:
            self._may_link = not isinstance(error, Denied)
            _log.warning("the run's address is not shown with %s: %s", replica.id, error)


def export_to(
    kind: TrackerKind,
    destination: Destination,
    source: HistorySource,
    state: Path,
    ended: threading.Event,
    only: str = "*",
) -> None:
    """Export to a tracker until the event is set, and what is there then.

    Args:
        state: the folder in which the export's places are noted, held by one exporter at a time.
        only: as for `HistoryExporter`.

    Raises:
        MissingDependency: the tracker's package is not installed.
        Conflict: another exporter uses the state folder.
    """
    tracker = open_tracker(kind, destination)
    with held(state):
        exporter = HistoryExporter(source, tracker, kind.value, state / "places.json", only)
        exporter.run(ended)
        exporter.close()


@contextmanager
def held(state: Path) -> Iterator[None]:
    """Hold a folder for an exporter, which makes it. Raise `Conflict` if another one has it."""
    try:
        state.mkdir(0o700, parents=True, exist_ok=True)
        lock = open(state / "lock", "a")  # noqa: SIM115 - entered below
    except OSError as error:
        raise UnsafeStateFolder(f"cannot note in {state} what is exported: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"another exporter uses {state}: end it, or name another folder with --state") from None
        yield


def _key(replica: ReplicaInfo) -> str:
    return f"{replica.user}/{replica.id}"


def _state(replica: ReplicaInfo) -> list[object]:
    """Return the part of a replica's state in which news show."""
    return [replica.instance, replica.seq, replica.state, replica.config]


def _read(state: Path) -> Mapping[str, Any]:
    """Return what was noted in a file; nothing if there is none, or none that can be read."""
    try:
        found = json.loads(state.read_text())
        return found if isinstance(found, dict) else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _log.warning("%s is left out, and the runs are counted instead: %s", state, error)
        return {}


def _rows(metrics: Mapping[str, Sequence[MetricPoint]]) -> Iterator[TrackerRow]:
    """Yield the points of metrics, those of one report in one row, each metric's in their order."""
    left = {name: iter(points) for name, points in metrics.items()}
    heads = {name: point for name, points in left.items() if (point := next(points, None)) is not None}
    while heads:
        time, step, _ = min(heads.values(), key=lambda one: (one.time, -1 if one.step is None else one.step))
        row = {name: point.value for name, point in heads.items() if point.time == time and point.step == step}
        yield TrackerRow(time, step, row)
        for name in row:
            following = next(left[name], None)
            if following is None:
                del heads[name]
            else:
                heads[name] = following


def _mark(event: WeaverEvent) -> TrackerMark:
    """Return an event as a mark: what it did, by whom, and the changed values."""
    data = dict(event.data)
    step = data.pop("step", None)
    changes = data.pop("changes", None) or {}
    words = [str(data.pop(name)) for name in ("do", "reason") if data.get(name)]
    if data.get("by"):
        words.append(f"by {data['by']}")
    if isinstance(changes, Mapping):
        words += [f"{key}: {one.get('old')} → {one.get('new')}" for key, one in changes.items()]
    return TrackerMark(event.id, event.time, step, event.kind, " ".join(words)[:_LONGEST_MARK])
