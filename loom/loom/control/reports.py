"""The reports of a threadlet while its training runs, the weaver's replies, and who takes part in the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from loom.control.frame import MAX_COUNT, MAX_NAME, Frame, check_count
from loom.control.handshake import MAX_DEVICES, Device
from loom.errors import ProtocolMismatch

MAX_KEPT_REPORTS = 8192
"""Status reports that a threadlet keeps while the weaver has not stored them; the oldest are dropped first."""

DEVICE_NUMBERS = (
    "utilization",
    "memory_used",
    "temperature",
    "power",
    "sm_clock",
    "memory_clock",
    "ecc_corrected",
    "ecc_uncorrected",
)
"""The numbers that are told of a device, by the names of the fields of `loom.devices.DeviceUse`."""
_NUMBERS = frozenset((int, float, type(None)))
_OLDEST_NUMBERS = DEVICE_NUMBERS[:4]
"""The numbers that a weaver takes which does not take `ThreadletWelcome.health`."""
_MAX_REASONS = 16
_MAX_PROCESSES = 256
_MAX_ERROR = 500

Row: TypeAlias = list[Any]
"""A status report, as it travels and as the weaver's journal keeps it.

Its items are ``[seq, time, step or None, epoch or None, max_step or None, {metric: float}, {config} or None]``, and
behind them, for a weaver that takes `ThreadletWelcome.status_types`, what the status is about, if that was said. A
report stays a list because thousands come each second; the weaver checks each field as it takes it.
"""


class Phase(str, Enum):
    """The phase of a training loop."""

    STEP = "step"
    BETWEEN = "between"
    """Between two steps."""
    PAUSED = "paused"
    """Waiting while paused."""


@dataclass(frozen=True, slots=True)
class StatusReports(Frame, kind="status"):
    """``["status", [row, …]]``, from a threadlet: the progress of its training; see `Row`.

    A threadlet sends a report again after a reconnect until a `Stored` covers its number.
    """

    rows: list[Row]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> StatusReports:
        return cls(cls.read(body))

    @classmethod
    def read(cls, body: Sequence[Any]) -> list[Row]:
        """Check a received list, and return its rows without an object for each of thousands a second."""
        if len(body) != 2 or type(body[1]) is not list:
            raise cls.mismatch(body)
        return body[1]


@dataclass(frozen=True, slots=True)
class Stored(Frame, kind="stored"):
    """``["stored", seq]``, to a threadlet: its status reports up to this number are committed."""

    seq: int

    def to_body(self) -> list[Any]:
        return [self.KIND, self.seq]  # without a loop over fields: thousands leave each second


@dataclass(frozen=True, slots=True)
class Heartbeat(Frame, kind="beat"):
    """``["beat", time, step or None, phase]``, from a threadlet, at the interval that the welcome gives.

    A status report with a step shows as much, so that the next heartbeat may come later, unless the phase changes.
    """

    time: float
    """Seconds since the epoch, by the threadlet's clock."""
    step: int | None
    phase: Phase

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> Heartbeat:
        return cls(*cls.read(body))

    @classmethod
    def read(cls, body: Sequence[Any]) -> tuple[float, int | None, Phase]:
        """Check a received list, and return its fields without an object for each of thousands a second."""
        # Nor with `match`, which takes several times as long.
        if len(body) == 4:
            _, time, step, name = body
            phase = _PHASES.get(name) if type(name) is str else None
            if phase is not None and type(time) in (float, int):
                return time, check_count("step", step), phase
        raise cls.mismatch(body)


_PHASES = {phase.value: phase for phase in Phase}


@dataclass(frozen=True, slots=True)
class DeviceReport(Frame, kind="devices"):
    """``["devices", time, {uuid: {field: value}}]``, from a threadlet: the status of its devices.

    The fields are those of `loom.devices.DeviceUse` except ``lost``, and ``xid``, the last Xid of a GPU. Numbers
    may be None; of the other fields, those that are empty are left out. A weaver without `ThreadletWelcome.health`
    gets four numbers only; see `numbers`.
    """

    time: float
    """Seconds since the epoch, by the threadlet's clock."""
    devices: Mapping[str, Mapping[str, Any]]

    def numbers(self) -> DeviceReport:
        """Return the report for a weaver that takes no health."""
        few = {uuid: {name: one.get(name) for name in _OLDEST_NUMBERS} for uuid, one in self.devices.items()}
        return DeviceReport(self.time, few)

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> DeviceReport:
        if len(body) == 3:
            _, time, devices = body
            if type(time) in (int, float) and type(devices) is dict and len(devices) <= MAX_DEVICES:
                return cls(time, {uuid: _read_status(status) for uuid, status in devices.items()})
        raise cls.mismatch(body)


def _read_status(status: Any) -> Mapping[str, Any]:
    if type(status) is not dict:
        raise ProtocolMismatch(f"a device's status is a map, not {status!r:.80}")
    numbers = [status.get(name) for name in DEVICE_NUMBERS]
    if not _NUMBERS.issuperset(map(type, numbers)):
        numbers = [_number(name, status.get(name)) for name in DEVICE_NUMBERS]  # which names the one that is none
    read: dict[str, object] = dict(zip(DEVICE_NUMBERS, numbers, strict=True))
    if (reasons := status.get("throttled")) is not None:
        if type(reasons) is not list or len(reasons) > _MAX_REASONS or {*map(type, reasons)} - {str}:
            raise ProtocolMismatch(f"throttled is a list of reasons, not {reasons!r:.80}")
        read["throttled"] = [one[:MAX_NAME] for one in reasons]
    if (processes := status.get("processes")) is not None:
        if type(processes) is not list or len(processes) > _MAX_PROCESSES:
            raise ProtocolMismatch(f"processes is a list of at most {_MAX_PROCESSES}, not {processes!r:.80}")
        read["processes"] = [_read_process(one) for one in processes]
    if (error := status.get("error")) is not None:
        read["error"] = str(error)[:_MAX_ERROR]
    if (xid := check_count("xid", status.get("xid"))) is not None:
        read["xid"] = xid
    return read


def _read_process(process: Any) -> Mapping[str, Any]:
    match process:
        case {"pid": int(pid), **rest}:
            return {"pid": pid, **{name: _number(name, rest.get(name)) for name in ("memory", "utilization")}}
    raise ProtocolMismatch(f"a process of a device has a pid, not {process!r:.80}")


def _number(name: str, value: Any) -> float | None:
    if value is not None and type(value) not in (int, float):
        raise ProtocolMismatch(f"{name} of a device is a number or None, not {value!r:.80}")
    number: float | None = value
    return number


@dataclass(frozen=True, slots=True)
class DeviceFailed(Frame, kind="device_failed"):
    """``["device_failed", id, uuid, reason]``, from a threadlet: a device of its own has failed for good.

    A threadlet sends the frame again after a reconnect until a `FailureNoted` has its id.
    """

    id: str
    device: str
    reason: str
    """A text for users."""

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> DeviceFailed:
        match body:
            case [_, str(id), str(device), str(reason)] if len(id) <= MAX_NAME:
                return cls(id, device, reason[:_MAX_ERROR])
        raise cls.mismatch(body)


@dataclass(frozen=True, slots=True)
class FailureNoted(Frame, kind="failure_noted"):
    """``["failure_noted", id]``, to a threadlet: the weaver has stored a `DeviceFailed` and acts on it."""

    id: str


@dataclass(frozen=True, slots=True)
class StackRequest(Frame, kind="stack"):
    """``["stack", request id]``, to a threadlet: send the stacks of all threads of the process."""

    id: str


@dataclass(frozen=True, slots=True)
class Stack(Frame, kind="stack"):
    """``["stack", request id, text]``, from a threadlet: the answer to a `StackRequest`."""

    id: str
    text: str


MAX_REASON = 500
"""Characters of the longest reason for a drain or for a peer's failure; a longer one is cut."""


@dataclass(frozen=True, slots=True)
class Registration(Frame, kind="register"):
    """``["register", [device, …]]``, from a threadlet: all the devices that its process uses from now on."""

    devices: tuple[Device, ...]

    def to_body(self) -> list[Any]:
        return [self.KIND, [device.to_body() for device in self.devices]]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> Registration:
        match body:
            case [_, list(devices)] if len(devices) <= MAX_DEVICES:
                return cls(tuple(map(Device.from_body, devices)))
        raise cls.mismatch(body)


@dataclass(frozen=True, slots=True)
class Draining(Frame, kind="draining"):
    """``["draining", reason]``, from a threadlet: its process makes one more step and leaves, by its own choice."""

    reason: str

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> Draining:
        match body:
            case [_, str(reason)] if len(reason) <= MAX_REASON:
                return cls(reason)
        raise cls.mismatch(body)


class PeerFailure(NamedTuple):
    """The failure of a replica of the same job."""

    replica: str
    instance: str
    """Id of the process that failed."""
    reason: str


@dataclass(frozen=True, slots=True)
class PeerFailures(Frame, kind="peers"):
    """``["peers", [[replica, instance, reason], …]]``, to a threadlet: replicas of its job have failed.

    The weaver repeats failures on a new connection; the threadlet drops those that it has heard of.
    """

    failures: tuple[PeerFailure, ...]

    def to_body(self) -> list[Any]:
        return [self.KIND, [list(failure) for failure in self.failures]]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> PeerFailures:
        match body:
            case [_, list(failures)]:
                return cls(tuple(map(_read_failure, failures)))
        raise cls.mismatch(body)


def _read_failure(failure: Any) -> PeerFailure:
    match failure:
        case [str(replica), str(instance), str(reason)] if len(replica) <= MAX_NAME:
            return PeerFailure(replica, instance, reason)
    raise PeerFailures.mismatch(failure)


REASONS = ("compute", "lost", "checkpoint", "waiting", "detection", "respawn", "idle")
"""The reasons for which time is spent; a training may name more.

compute: steps that count. lost: steps that were repeated, that raised, or that died with their process. waiting:
between the start and the first step, for a pause, for peers. detection: from the last sign of a process to the
weaver's notice of its death. respawn: from then until another process has its place. idle: everything else.
"""

RESERVED_REASONS = frozenset(("compute", "lost", "detection", "respawn", "idle"))
"""Reasons that a training cannot name, because Loom determines them."""

OTHER = "other"  # the reason for time under further reasons, once a process has named the maximum
MAX_REASONS = 16  # reasons that one process may name
MAX_REASON_NAME = 40  # characters in a reason

_LONGEST = 1e10


@dataclass(frozen=True, slots=True)
class TimeAccount(Frame, kind="spent"):
    """``["spent", [seconds, first_at or None, first or None, highest or None, open, {reason: seconds}]]``.

    From a threadlet whose weaver takes time accounts, with a heartbeat or a status report, as often as an
    `AccountPause` says. Times are seconds since the process began, by its own clock. An account is cumulative: the
    newest is all that is needed, and one that is lost does no harm.
    """

    seconds: float
    """Seconds since the process began. Those neither in a reason nor open were spent idle."""
    first_at: float | None
    """When the first step began, plus the seconds spent with reasons in that step."""
    first: int | None
    """The number of the first step."""
    highest: int | None
    """The highest number of a finished step."""
    open: float
    """Seconds in the unfinished step."""
    by_reason: dict[str, float]

    def to_body(self) -> list[Any]:
        return [self.KIND, [self.seconds, self.first_at, self.first, self.highest, self.open, self.by_reason]]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> TimeAccount:
        # This runs for every replica every second: loops, because generators take twice the time.
        try:
            _, (seconds, first_at, first, highest, open, by_reason) = body
            for time in (seconds, open, 0.0 if first_at is None else first_at, *by_reason.values()):
                if type(time) is not float or not 0.0 <= time <= _LONGEST:
                    raise ValueError(f"a time is from 0 to {_LONGEST:g} seconds, not {time!r:.40}")
            for step in (first, highest):
                if step is not None and (type(step) is not int or not 0 <= step < MAX_COUNT):
                    raise ValueError(f"a step is a count below {MAX_COUNT}, not {step!r:.40}")
            if len(by_reason) > MAX_REASONS + len(REASONS) + 1:
                raise ValueError(f"{len(by_reason)} reasons are more than {MAX_REASONS + len(REASONS) + 1}")
            for name in by_reason:
                if type(name) is not str or not 0 < len(name) <= MAX_REASON_NAME or not name.isprintable():
                    raise ValueError(f"a reason has 1 to {MAX_REASON_NAME} printable characters: {name!r:.80}")
        except (TypeError, ValueError, AttributeError) as error:
            raise cls.mismatch(body, str(error)) from error
        return cls(seconds, first_at, first, highest, open, by_reason)


@dataclass(frozen=True, slots=True)
class AccountPause(Frame, kind="account_pause"):
    """``["account_pause", seconds]``, to a threadlet: the time from one `TimeAccount` to the next, at least."""

    seconds: float
