"""The changes of who takes part in a training: the devices of a replica, its drain, and the failures of peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from loom.control.frame import MAX_NAME, Frame
from loom.control.introduction import MAX_DEVICES, Device

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
