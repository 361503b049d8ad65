"""`OutsideReplica`: a replica whose process has no threadlet, and speaks NATS.

A replica has no clock and no socket of its own: ``now`` is in seconds on the bridge's monotonic clock.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Mapping, Sized
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from loom.control.commands import Acknowledged, Acknowledgement, Change, Command, CommandKind
from loom.control.frame import Frame
from loom.control.handshake import (
    MAX_DEVICES,
    Activity,
    Device,
    ThreadletHello,
    TrainingEnding,
)
from loom.control.reports import (
    DeviceFailed,
    Draining,
    FailureNoted,
    Heartbeat,
    Phase,
    Registration,
    Row,
    StatusReports,
)
from loom.errors import LimitReached
from loom.nats.message_counts import REPLICA_RATE, Bucket
from loom.nats.reports import MAX_KEYS, MAX_METRICS, DeviceRegistration, DrainReport, ProgressReport, Sign

MISSED = 3
"""Heartbeats that may be missing before a replica is lost."""

MAX_WAITING = 256  # reports that wait for a connection with the weaver; the oldest are dropped
MAX_COMMANDS = 100  # commands that a replica has not acknowledged; further ones are refused
MAX_ANSWERED = 200  # acknowledgements that are remembered, in case the weaver gives a command again
REPEAT_EVERY = 5.0
"""Seconds after which a command is published again if it was not acknowledged."""

S = TypeVar("S", bound=Sized)

_STORED = ("group", "instance", "interval", "handlers", "config", "ending")


@dataclass(eq=False)
class OutsideReplica:
    """A replica, with what its process has said."""

    id: str
    group: str
    instance: str
    interval: float
    """Seconds between two heartbeats."""
    devices: dict[str, Device] = field(default_factory=dict)
    handlers: dict[str, str] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)
    ending: TrainingEnding | None = None
    """Its ending when its heartbeats end; None if that is a failure."""
    heard: float = float("-inf")
    """When its process gave the last sign of life."""
    step: int | None = None
    phase: Phase = Phase.BETWEEN
    paused: bool = False
    paused_at: int = -1
    """The last step that the process had made when it acknowledged the pause that it is in."""
    takes_status_types: bool = False
    """True if the weaver takes what a status is about."""
    known: bool = False
    """True if the weaver has welcomed the replica once."""
    seq: int = 0
    """Number of the last report."""
    farewell: tuple[TrainingEnding, str] | None = None
    """Its ending and the reason, if the weaver has not heard of it."""
    failures: dict[str, DeviceFailed] = field(default_factory=dict)
    """The failures of devices that the weaver has not noted, by device."""
    metrics: set[str] = field(default_factory=set)
    """The names of the metrics so far."""
    waiting: deque[Row] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    """Reports that the weaver has not got."""
    commands: dict[str, tuple[Command, float]] = field(default_factory=dict)
    """The commands that are not acknowledged, and when each was published last."""
    answered: dict[str, Acknowledged] = field(default_factory=dict)
    bucket: Bucket = field(default_factory=lambda: Bucket(REPLICA_RATE))

    @classmethod
    def registered(cls, report: DeviceRegistration, bridge: str) -> OutsideReplica:
        """Return the replica of a process that registers for the first time with a bridge."""
        instance = _instance(report.instance or uuid.uuid4().hex, bridge)
        made = cls(report.replica_id, report.group or report.replica_id, instance, report.heartbeat_interval)
        made.register(report)
        return made

    @classmethod
    def restored(cls, id: str, stored: Mapping[str, Any]) -> OutsideReplica:
        """Return a replica that a bridge has stored. It is silent until its process gives a sign of life."""
        rest = {name: stored[name] for name in _STORED}
        rest["ending"] = TrainingEnding(rest["ending"]) if rest["ending"] else None
        devices = {one["uuid"]: Device(**one) for one in stored["devices"]}
        return cls(id, **rest, devices=devices, known=True)

    def to_stored(self) -> dict[str, object]:
        """Return what a bridge stores of the replica."""
        rest = {name: getattr(self, name) for name in _STORED}
        rest["ending"] = self.ending.value if self.ending else None
        return {**rest, "devices": [asdict(one) for one in self.devices.values()]}

    def is_of(self, report: DeviceRegistration, bridge: str) -> bool:
        """Return whether a registration comes from the process that is the replica already."""
        return not report.instance or self.instance == _instance(report.instance, bridge)

    def register(self, report: DeviceRegistration) -> None:
        """Take a registration; its devices join those that the replica has."""
        devices = {**self.devices, **report.devices}
        self.devices = bounded(devices, MAX_DEVICES, "devices")
        self.handlers = bounded({**self.handlers, **report.handlers}, MAX_KEYS, "keys")
        self.config = bounded({**self.config, **report.config}, MAX_KEYS, "keys")
        self.group, self.interval = report.group or self.id, report.heartbeat_interval
        self.step = self.step if report.current_step is None else report.current_step
        self.ending = None

    def is_alive(self, now: float) -> bool:
        """Return whether a sign of life came lately."""
        return now < self.heard + MISSED * self.interval

    def hello(self, key: str) -> ThreadletHello:
        """Return the first frame of a connection with the weaver."""
        state = Activity.RUNNING if self.known and self.step is not None else None
        if self.ending is not None:
            state = Activity.DRAINING
        elif self.paused:
            state = Activity.PAUSED
        return ThreadletHello(
            key=key,
            replica=self.id,
            instance=self.instance,
            group=self.group,
            pid=0,
            host=next((device.server for device in self.devices.values()), ""),
            procs=None,
            rank=None,
            actors=None,
            session=None,
            devices=tuple(self.devices.values()),
            handlers=self.handlers,
            config=self.config,
            state=state,
            step=self.step,
            injectable=False,
            removed={},
            announced=True,
        )

    def welcomed(self, seq: int) -> list[Frame]:
        """Begin after the last report that the weaver has; return the reports that waited."""
        self.known = True
        self.seq = seq
        rows = [[number, *self._taken(row)[1:]] for number, row in enumerate(self.waiting, seq + 1)]
        self.waiting.clear()
        self.seq += len(rows)
        return [*([StatusReports(rows)] if rows else ()), *self.failures.values()]

    def note(self, frame: list[Any]) -> None:
        """Forget the failure of a device that the weaver has noted."""
        if frame[0] == FailureNoted.KIND:
            noted = FailureNoted.from_body(frame).id
            self.failures = {device: failed for device, failed in self.failures.items() if failed.id != noted}

    def sign(self, sign: Sign) -> None:
        """Take a sign of life."""
        self.step = self.step if sign.current_step is None else sign.current_step
        self.phase = Phase(sign.phase)
        self.paused = self.phase is Phase.PAUSED

    def beat(self) -> Heartbeat:
        """Return a heartbeat for the weaver."""
        return Heartbeat(time.time(), self.step, Phase.PAUSED if self.paused else self.phase)

    def progress(self, report: ProgressReport, connected: bool) -> list[Frame]:
        """Take a report of progress; return the frames for the weaver."""
        self.metrics = bounded(self.metrics | report.metrics.keys(), MAX_METRICS, "metrics")
        self.config = bounded({**self.config, **report.config}, MAX_KEYS, "keys")
        self.step = self.step if report.current_step is None else report.current_step
        if report.state:
            self.paused = report.state == "paused"
        elif report.current_step is not None and report.current_step > self.paused_at:
            self.paused = False  # whatever it has acknowledged: it goes on
        if report.ends:
            self.ending = TrainingEnding(report.state)
            self.farewell = self.ending, report.reason or f"its process says that it is {report.state}"
        frames: list[Frame] = []
        if report.state == "draining":
            frames += self.drain(DrainReport(replica_id=self.id, reason=report.reason))
        row: Row = [
            self.seq + 1,
            time.time(),
            report.current_step,
            report.epoch,
            report.max_step,
            report.metrics,
            report.config or None,
        ]
        if report.status_type:
            row.append(report.status_type)
        if not connected:
            self.waiting.append(row)
            return frames
        self.seq += 1
        return [StatusReports([self._taken(row)]), *frames]

    def _taken(self, row: Row) -> Row:
        """Return the part of a report that the weaver takes."""
        return row if self.takes_status_types else row[:7]

    def drain(self, report: DrainReport) -> list[Frame]:
        """Take a drain; return the frames for the weaver."""
        if not report.device_uuid:
            self.ending = TrainingEnding.FINISHED
            return [Draining(report.reason)]
        del self.devices[report.device_uuid]
        return [Registration(tuple(self.devices.values()))]

    def command(self, command: Command, now: float) -> Acknowledged | None:
        """Take a command of the weaver; return the acknowledgement if it need not be published."""
        if (before := self.answered.get(command.id)) is not None:
            return before
        if command.id not in self.commands and len(self.commands) >= MAX_COMMANDS:
            why = f"the replica has left {MAX_COMMANDS} commands unacknowledged"
            return Acknowledged(command.id, Acknowledgement.failed(why))
        self.commands[command.id] = command, now
        return None

    def due_commands(self, now: float) -> list[Command]:
        """Return the commands to publish again."""
        due = [command for command, at in self.commands.values() if now >= at + REPEAT_EVERY]
        for command in due:
            self.commands[command.id] = command, now
        return due

    def answer(self, command_id: str, made: Acknowledgement) -> Acknowledged | None:
        """Take an acknowledgement of the process; return it for the weaver, or None if no command waits for it."""
        found = self.commands.pop(command_id, None)
        if found is None:
            return None
        command, _ = found
        if made.ok and command.kind is CommandKind.UPDATE_CONFIG:
            if not made.changes:
                changes = {key: Change(self.config.get(key), new) for key, new in command.params.items()}
                made = Acknowledgement(True, made.step, changes, made.refused, made.reason)
            self.config = {**self.config, **{key: change.new for key, change in made.changes.items()}}
        if made.ok:
            self._obeyed(command.kind)
        acknowledged = self.answered[command_id] = Acknowledged(command_id, made)
        while len(self.answered) > MAX_ANSWERED:
            del self.answered[next(iter(self.answered))]
        return acknowledged

    def _obeyed(self, kind: CommandKind) -> None:
        if kind in (CommandKind.PAUSE, CommandKind.RESUME):
            self.paused = kind is CommandKind.PAUSE
            self.paused_at = -1 if self.step is None else self.step
        elif kind is CommandKind.STOP:
            self.ending = TrainingEnding.STOPPED
        elif kind is CommandKind.DRAIN:
            self.ending = TrainingEnding.FINISHED


def _instance(process: str, bridge: str) -> str:
    """Return the id of a process for the weaver, which lets only one of several bridges speak for the process."""
    return f"{process[:150]}@{bridge}"


def bounded(found: S, most: int, what: str) -> S:
    """Return what a replica has said in all, if it is not too much."""
    if len(found) > most:
        raise LimitReached(f"a replica without a threadlet has at most {most} {what}, not {len(found)}")
    return found
