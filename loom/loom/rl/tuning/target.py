"""`TunedRun`: what the tuner reads from a running run, and how it changes it."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from loom.control.commands import Acknowledgement
from loom.errors import GatewayUnreachable, WaitTimeout, WeaverUnavailable, WrongState
from loom.rl.diagnosis import sources
from loom.rl.diagnosis.analysis import analyze
from loom.rl.diagnosis.diagnosis import Finding
from loom.rl.diagnosis.result import Analysis
from loom.rl.tuning.changes import ORCHESTRATOR, TRAINER_JOB, NoChange, OptionChange, change_for
from loom.rl.tuning.ledger import Measurement
from loom.weaver.states import ReplicaState
from loom.weaver.views import MetricPoint, ReplicaInfo, WeaverEvent

T = TypeVar("T")

LOOK_EVERY = 0.5
"""Seconds between two looks at the run's step."""
AWAY = 600.0
"""Seconds for which the gateway or the weaver may be away."""
ANSWER_TIMEOUT = 120.0
"""Seconds in which a change is acknowledged; steps may be long."""
STEP_TIMEOUT = 3600.0
"""Seconds that one step may take."""
POINTS = 5_000
"""Values of a metric that are read at a time."""

LATE = 10.0
"""Seconds to wait for lines: a process writes its events once a second."""

TAIL = 20_000
"""Lines at the end of a log that are read first."""

_BEGINS = re.compile(r"\bStep (\d+) begins\b")
_COMPLETE = re.compile(r"\bStep (\d+) complete\b")


class RunEnded(WrongState):
    """The run has ended, so that nothing can be measured any more."""


class TunedWeaver(Protocol):
    """The used part of a `WeaverProxy`."""

    def replicas(self) -> dict[str, ReplicaInfo]:
        """Return every replica by its id."""

    def replica(self, id: str) -> ReplicaInfo:
        """Return a replica."""

    def history(
        self, replica: str, metric: str, since: float | None = None, until: float | None = None, points: int = 500
    ) -> list[MetricPoint]:
        """Return the values of a metric."""

    def events(self, after: int | None = None, *, limit: int = 100) -> Iterator[WeaverEvent]:
        """Return events."""

    def update_config(self, target: str = "*", **config: Any) -> Any:
        """Give new values of configuration keys; return the handle of the command."""


class TunedRun:
    """A running run of `loom.rl` in a session.

    Args:
        weaver: the weaver.
        logs: returns the last ``tail`` lines of the session's log, or all if that is None, as
            `loom.rest_client.Gateway.logs` yields them.
        session: the name of the session.

    Raises:
        WrongState: no run goes on in the session.
    """

    def __init__(self, weaver: TunedWeaver, logs: Callable[..., Iterable[Mapping[str, Any]]], session: str) -> None:
        self._weaver = weaver
        self._logs = logs
        self.session = session
        self.command_ids: set[str] = set()
        """The commands that were given through this object."""
        self._run_among(weaver.replicas())  # replicas that register later are not waited for

    def _find(self) -> ReplicaInfo:
        return self._run_among(self._patiently(self._weaver.replicas))

    def _run_among(self, replicas: dict[str, ReplicaInfo]) -> ReplicaInfo:
        found = replicas.get(ORCHESTRATOR)
        if found is None or found.session != self.session:
            raise WrongState(
                f"session {self.session!r} has no replica {ORCHESTRATOR!r} of yours: no Orchestrator of loom.rl "
                f"runs in it, or another user's does"
            )
        return found

    def config(self) -> Mapping[str, Any]:
        """Return the options that the run has now, with ``groups``, the number of trainer groups, 0 if unknown."""
        job = self._patiently(self._weaver.replicas).get(TRAINER_JOB)
        groups = 0 if job is None else int(job.metrics.get("groups", 0))
        return {**self._find().config, "groups": groups}

    def step(self) -> int:
        """Return the newest step that is surely complete, -1 before the first.

        Raises:
            RunEnded: the run has ended.
        """
        found = self._find()
        if found.state in (ReplicaState.FINISHED, ReplicaState.FAILED):
            raise RunEnded(f"the run in session {self.session!r} is {found.state.value}, at step {found.step}")
        return -1 if found.step is None else found.step - 1  # the replica's step may go on

    def await_step(self, step: int) -> None:
        """Wait until a step is complete.

        Raises:
            RunEnded: the run has ended before that.
            WaitTimeout: a step took more than `STEP_TIMEOUT` seconds.
        """
        newest, since = self.step(), time.monotonic()
        while newest < step:
            time.sleep(LOOK_EVERY)
            if (now := self.step()) > newest:
                newest, since = now, time.monotonic()
            elif time.monotonic() - since > STEP_TIMEOUT:
                raise WaitTimeout(f"step {newest + 1} of the run takes more than {STEP_TIMEOUT:g} s")

    def metric(self, name: str) -> float | None:
        """Return the newest value of a metric of the orchestrator."""
        value = self._find().metrics.get(name)
        return float(value) if isinstance(value, (int, float)) else None

    def apply(self, option: str, value: Any, replica: str) -> Acknowledgement:
        """Change an option at a step boundary, and wait until the replica says so or refuses.

        Raises:
            WaitTimeout: there is no acknowledgement within `ANSWER_TIMEOUT` seconds.
        """
        command = self._weaver.update_config(replica, **{option: value})
        self.command_ids.add(command.id)
        answers: dict[str, Acknowledgement] = command.get(ANSWER_TIMEOUT)
        if replica not in answers:
            return Acknowledgement.failed(f"there is no replica {replica!r}")
        return answers[replica]

    def changes_by_others(self, after: int) -> tuple[list[WeaverEvent], int]:
        """Return the changes of configuration after an event that others gave, and the id of the newest event."""
        newest, found = after, []
        for event in self._patiently(lambda: list(self._weaver.events(after=after))):
            newest = max(newest, event.id)
            changes = event.kind == "applied" and bool(event.data.get("changes"))
            if changes and event.data.get("command") not in self.command_ids:
                found.append(event)
        return found, newest

    def newest_event(self) -> int:
        """Return the id of the newest event, 0 if there is none."""
        return max((event.id for event in self._patiently(lambda: list(self._weaver.events(limit=1)))), default=0)

    def analyse(self, first: int, last: int) -> Analysis:
        """Analyse what the session's log has of some steps.

        Raises:
            WrongState: the log does not have them.
        """
        until = time.monotonic() + LATE
        while time.monotonic() < until:
            if part := self._lines(first, last):
                return analyze(sources=[sources.session(self.session, part)])
            time.sleep(LOOK_EVERY)
        raise WrongState(
            f"the log of session {self.session!r} does not have the steps {first} to {last} of the run: start its "
            "Orchestrator with lines=True, which is the default"
        )

    def _lines(self, first: int, last: int) -> list[Mapping[str, Any]]:
        for tail in (TAIL, None):
            read = functools.partial(self._logs, tail=tail)
            lines = self._patiently(lambda read=read: list(read()))  # type: ignore[misc]
            if (part := _between(lines, first, last)) or len(lines) < TAIL:
                return part
        return []

    def measure(self, first: int, last: int) -> tuple[Measurement, Analysis]:
        """Return what some steps, which are complete, came to."""
        found = self.analyse(first, last)
        rewards, losses = (self._values(name, first, last) for name in ("reward", "loss"))
        return Measurement.of(first, last, found, rewards, losses), found

    def _values(self, metric: str, first: int, last: int) -> list[float]:
        points = self._patiently(lambda: self._weaver.history(ORCHESTRATOR, metric, points=POINTS))
        return [
            float(point.value)
            for point in points
            if point.step is not None and first <= point.step <= last and isinstance(point.value, (int, float))
        ]

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Ask until there is an answer, for `AWAY` seconds at most."""
        until = time.monotonic() + AWAY
        while True:
            try:
                return ask()
            except (WeaverUnavailable, GatewayUnreachable):
                if time.monotonic() >= until:
                    raise
            time.sleep(LOOK_EVERY)

    def undo(self, change: OptionChange) -> Acknowledgement:
        """Give an option its old value again."""
        return self.apply(change.option, change.old, change.replica)

    def change_for(
        self, finding: Finding, found: Analysis, tried: Container[tuple[str, str]]
    ) -> OptionChange | NoChange:
        """Return the change that answers a finding, or why there is none."""
        return change_for(finding, found, self.config(), tried)

    def taker(self, option: str) -> str:
        """Return the name of the replica that takes an option."""
        return TRAINER_JOB if option == "groups" else ORCHESTRATOR


def _between(lines: list[Mapping[str, Any]], first: int, last: int) -> list[Mapping[str, Any]]:
    """Return the lines from the beginning of a step to the end of another; none if they are not all there."""
    begin = end = None
    for number, entry in enumerate(lines):
        text = str(entry["text"])
        if (found := _BEGINS.search(text)) and int(found[1]) == first:
            begin, end = number, None
        elif (found := _COMPLETE.search(text)) and int(found[1]) == last:
            end = number
    return [] if begin is None or end is None else lines[begin : end + 1]
