"""The reports of a threadlet while its training runs, and the weaver's replies to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from loom.control.frame import MAX_NAME, Frame, check_count
from loom.control.introduction import MAX_DEVICES
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
        if len(body) != 2 or type(body[1]) is not list:
            raise cls.mismatch(body)
        return cls(body[1])


@dataclass(frozen=True, slots=True)
class Stored(Frame, kind="stored"):
    """``["stored", seq]``, to a threadlet: its status reports up to this number are committed."""

    seq: int


@dataclass(frozen=True, slots=True)
class Heartbeat(Frame, kind="beat"):
    """``["beat", time, step or None, phase]``, from a threadlet, at the interval that the welcome gives."""

    time: float
    """Seconds since the epoch, by the threadlet's clock."""
    step: int | None
    phase: Phase

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> Heartbeat:
        match body:
            case [_, int() | float() as time, step, str(phase)] if phase in _PHASES:
                return cls(time, check_count("step", step), _PHASES[phase])
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
        match body:
            case [_, int() | float() as time, dict(devices)] if len(devices) <= MAX_DEVICES:
                return cls(time, {uuid: _read_status(status) for uuid, status in devices.items()})
        raise cls.mismatch(body)


def _read_status(status: Any) -> Mapping[str, Any]:
    if type(status) is not dict:
        raise ProtocolMismatch(f"a device's status is a map, not {status!r:.80}")
    read: dict[str, object] = {name: _number(name, status.get(name)) for name in DEVICE_NUMBERS}
    match status.get("throttled"):
        case None:
            pass
        case [*reasons] if len(reasons) <= _MAX_REASONS and all(type(one) is str for one in reasons):
            read["throttled"] = [one[:MAX_NAME] for one in reasons]
        case wrong:
            raise ProtocolMismatch(f"throttled is a list of reasons, not {wrong!r:.80}")
    match status.get("processes"):
        case None:
            pass
        case [*processes] if len(processes) <= _MAX_PROCESSES:
            read["processes"] = [_read_process(one) for one in processes]
        case wrong:
            raise ProtocolMismatch(f"processes is a list of at most {_MAX_PROCESSES}, not {wrong!r:.80}")
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
