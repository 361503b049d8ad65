"""The reports of a threadlet while its training runs, and the weaver's replies to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, TypeAlias

from loom.control.frame import Frame, check_count
from loom.control.introduction import MAX_DEVICES
from loom.errors import ProtocolMismatch

MAX_KEPT_REPORTS = 8192
"""Status reports that a threadlet keeps while the weaver has not stored them; the oldest are dropped first."""

_DEVICE_NUMBERS = ("utilization", "memory_used", "temperature", "power")

Row: TypeAlias = list[Any]
"""A status report, as it travels and as the weaver's journal keeps it.

Its items are ``[seq, time, step or None, epoch or None, max_step or None, {metric: float}, {config} or None]``. A
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
class StatusReports(Frame):
    """``["status", [row, …]]``, from a threadlet: the progress of its training; see `Row`.

    A threadlet sends a report again after a reconnect until a `Stored` covers its number.
    """

    KIND: ClassVar[str] = "status"

    rows: list[Row]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> StatusReports:
        if len(body) != 2 or type(body[1]) is not list:
            raise cls.mismatch(body)
        return cls(body[1])


@dataclass(frozen=True, slots=True)
class Stored(Frame):
    """``["stored", seq]``, to a threadlet: its status reports up to this number are committed."""

    KIND: ClassVar[str] = "stored"

    seq: int


@dataclass(frozen=True, slots=True)
class Heartbeat(Frame):
    """``["beat", time, step or None, phase]``, from a threadlet, at the interval that the welcome gives."""

    KIND: ClassVar[str] = "beat"

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
class DeviceReport(Frame):
    """``["devices", time, {uuid: {number: float or None}}]``, from a threadlet: the status of its devices.

    The numbers are ``utilization`` (0 to 1), ``memory_used`` (bytes), ``temperature`` (°C) and ``power`` (W).
    """

    KIND: ClassVar[str] = "devices"

    time: float
    """Seconds since the epoch, by the threadlet's clock."""
    devices: dict[str, dict[str, float | None]]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> DeviceReport:
        match body:
            case [_, int() | float() as time, dict(devices)] if len(devices) <= MAX_DEVICES:
                return cls(time, {uuid: _read_numbers(status) for uuid, status in devices.items()})
        raise cls.mismatch(body)


def _read_numbers(status: Any) -> dict[str, float | None]:
    if type(status) is not dict or not all(one is None or type(one) in (int, float) for one in status.values()):
        raise ProtocolMismatch(f"a device's status is made of numbers, not {status!r:.80}")
    return {name: status.get(name) for name in _DEVICE_NUMBERS}


@dataclass(frozen=True, slots=True)
class StackRequest(Frame):
    """``["stack", request id]``, to a threadlet: send the stacks of all threads of the process."""

    KIND: ClassVar[str] = "stack"

    id: str


@dataclass(frozen=True, slots=True)
class Stack(Frame):
    """``["stack", request id, text]``, from a threadlet: the answer to a `StackRequest`."""

    KIND: ClassVar[str] = "stack"

    id: str
    text: str
