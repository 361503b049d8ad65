"""The fields of messages from NATS as types of pydantic, and the reports of processes that have no threadlet.

``loom.proto`` documents the fields. A message that makes no sense raises `WrongArguments` with the field and the
reason. Protobuf writes whole numbers as texts, so a count may be a text of it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)
from pydantic_core import ErrorDetails

from loom.control.commands import Acknowledgement, Change, plain_config
from loom.control.frame import MAX_COUNT, MAX_NAME
from loom.control.handshake import MAX_DEVICES, Device
from loom.control.reports import DEVICE_NUMBERS, MAX_REASON
from loom.errors import WrongArguments
from loom.nats.subjects import Body, Envelope, EnvelopeKind

DEFAULT_INTERVAL = 5.0
"""Seconds between two heartbeats of a process that does not say how many."""

MAX_METRICS = 1000  # metrics of one report
MAX_KEYS = 1000  # keys of a configuration
MAX_THROTTLED = 16  # reasons why a device is slow

M = TypeVar("M", bound="NatsMessage")

# -- fields -----------------------------------------------------------------------------------------------------


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"has half a character: {value!a:.80}") from None
    return value


def short(value: str) -> str:
    """Return a text of at most `MAX_NAME` characters."""
    if len(value) > MAX_NAME:
        raise ValueError(f"has at most {MAX_NAME} characters, not {len(value)}")
    return _text(value)


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError(f"is a printable text, not {value!r:.80}")
    return short(value)


def _count(value: Any) -> Any:
    if isinstance(value, str) and len(value) < 20 and value.isascii() and value.isdigit():
        value = int(value)
    if type(value) is not int or not 0 <= value < MAX_COUNT:
        raise ValueError(f"is a whole number from 0, not {value!r:.80}")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if type(value) is not float and not (type(value) is int and abs(value) < MAX_COUNT):
        raise ValueError(f"is a number, not {value!r:.80}")
    return float(value)


def seconds(least: float, most: float) -> BeforeValidator:
    """Return the check of a time in seconds within bounds."""

    def check(value: Any) -> float:
        if type(value) not in (int, float) or math.isnan(value) or not least <= value <= most:
            raise ValueError(f"is from {least:g} to {most:g} seconds, not {value!r:.80}")
        return float(value)

    return BeforeValidator(check)


Text = Annotated[str, AfterValidator(_text)]
Required = Annotated[Text, StringConstraints(min_length=1)]
"""A text that is not empty."""

Name = Annotated[str, AfterValidator(_printable)]
RequiredName = Annotated[Name, StringConstraints(min_length=1)]
Reason = Annotated[Text, AfterValidator(lambda text: text[:MAX_REASON])]
Count = Annotated[int, BeforeValidator(_count)]
"""A count, such as a step."""

Number = Annotated[float, BeforeValidator(_number)]
"""A number, also one that is not finite, for which JSON has texts."""

Keys: Any = Field(default={}, max_length=MAX_KEYS)
Config = Annotated[dict[Name, Any], AfterValidator(lambda config: config and plain_config(config))]


class NatsMessage(BaseModel):
    """The body of a message; a field that is null is one that is missing."""

    model_config = ConfigDict(frozen=True, strict=True)

    @classmethod
    def read(cls: type[M], body: Body) -> M:
        """Return the message in a body, or raise `WrongArguments`."""
        try:
            return cls.model_validate({field: value for field, value in body.items() if value is not None})
        except ValidationError as error:
            raise WrongArguments(_refusal(error.errors(include_url=False)[0], body)) from None
        except RecursionError:
            raise WrongArguments("this is nested too deeply") from None


_REFUSALS = {
    "missing": "is missing; there is {there}",
    "too_short": "is missing; there is {there}",
    "string_type": "is a text, not {input!r:.80}",
    "dict_type": "has keys and values, not {input!r:.80}",
    "list_type": "is a list, not {input!r:.80}",
    "bool_type": "is true or false, not {input!r:.80}",
    "literal_error": "is {expected}, not {input!r:.80}",
    "too_long": "has at most {max_length} keys or items, not {length}",
    "value_error": "{error}",
}
"""The text of each kind of error of pydantic."""


def _refusal(error: ErrorDetails, body: Body) -> str:
    field, *inside = error["loc"]
    value = error["input"]
    if "[key]" in inside:
        field = f"a key of {field}"
    elif inside:
        field = f"{' of '.join(str(part) for part in reversed(inside))} in {field}"
    about = {**error.get("ctx", {}), "input": value, "there": names(body)}
    if error["type"] == "too_long":
        about["length"] = len(value)
    return f"{field:.200} {_REFUSALS.get(error['type'], error['msg']).format(**about)}"


def names(body: Body) -> str:
    """Return the names of the fields that are there, for an error."""
    return ", ".join(repr(field)[:40] for field in list(body)[:10]) or "nothing"


# -- reports ----------------------------------------------------------------------------------------------------


class DeviceRegistration(NatsMessage):
    """A process is a replica, and uses devices."""

    replica_id: RequiredName
    device_uuid: Name = ""
    device_uuids: list[RequiredName] = Field(default=[], max_length=MAX_DEVICES)
    """Further devices."""
    group: Name = ""
    """The group; "" for one of the replica's own."""
    instance: Name = ""
    """Id of the process; "" if it has none."""
    kind: Literal["gpu", "cpu", ""] = ""
    server: Name = ""
    type: Name = ""
    memory: Count = 0
    heartbeat_interval: Annotated[float, seconds(0.2, 300)] = DEFAULT_INTERVAL
    handlers: dict[Name, Name] = Keys
    config: Config = Keys
    current_step: Count | None = None

    @classmethod
    def read(cls, body: Body) -> DeviceRegistration:
        if not (body.get("device_uuid") or body.get("device_uuids")):
            raise WrongArguments(f"device_uuid is missing; there is {names(body)}")
        return super().read(body)

    @property
    def devices(self) -> dict[str, Device]:
        """The devices, by uuid."""
        uuids = filter(None, (self.device_uuid, *self.device_uuids))
        return {uuid: self._device(uuid) for uuid in uuids}

    def _device(self, uuid: str) -> Device:
        kind = self.kind or ("cpu" if uuid.upper().startswith("CPU") else "gpu")
        return Device(uuid, kind, self.server, self.type, self.memory)


class ProgressReport(NatsMessage):
    """The progress of a training."""

    replica_id: RequiredName
    state: Literal["running", "paused", "draining", "finished", "stopped", "failed", ""] = ""
    """The state; "" if it is not said."""
    reason: Reason = ""
    current_step: Count | None = None
    epoch: Count | None = None
    max_step: Count | None = None
    metrics: dict[Name, Number] = Field(default={}, max_length=MAX_METRICS)
    config: Config = Keys
    status_type: Name = ""
    """The type of the status, such as batch_update; "" if it has none."""

    @property
    def ends(self) -> bool:
        """True if it is the last report of the replica."""
        return self.state in ("finished", "stopped", "failed")


_OR_STEP = BeforeValidator(lambda said: "step" if said == "" else said)


class Sign(NatsMessage):
    """A sign that a process lives."""

    replica_id: RequiredName
    current_step: Count | None = None
    phase: Annotated[Literal["step", "between", "paused"], _OR_STEP] = "step"


class UseReport(NatsMessage):
    """The use and the health of a device."""

    replica_id: Name = ""
    """The replica that reports; "" for any that has registered the device."""
    device_uuid: RequiredName
    utilization: Number | None = None
    memory_used: Number | None = None
    temperature: Number | None = None
    power: Number | None = None
    sm_clock: Number | None = None
    memory_clock: Number | None = None
    ecc_corrected: Number | None = None
    ecc_uncorrected: Number | None = None
    throttled: list[Name] = Field(default=[], max_length=MAX_THROTTLED)
    error: Reason = ""
    xid: Count | None = None
    state: Text = ""
    reason: Reason = ""

    @property
    def use(self) -> dict[str, object]:
        """The fields of `loom.control.reports.DeviceReport`."""
        numbers = self.model_dump(include={*DEVICE_NUMBERS}, exclude_none=True)
        return {**numbers, "throttled": self.throttled, "error": self.error or None, "xid": self.xid}

    @property
    def failure(self) -> str | None:
        """Why the device has failed; None unless it has."""
        return (self.reason or "its process says that it has failed") if self.state == "failed" else None


class DrainReport(NatsMessage):
    """A replica leaves, or leaves one of its devices."""

    replica_id: RequiredName
    device_uuid: Name = ""
    """The device; "" for all."""
    reason: Reason = ""


class _Changed(NatsMessage):
    old: Any = None
    new: Any


def _plain(changes: dict[str, _Changed]) -> dict[str, _Changed]:
    for key, change in changes.items():
        plain_config({key: [change.old, change.new]})
    return changes


class CommandAnswer(NatsMessage):
    """A replica's acknowledgement of a command."""

    replica_id: RequiredName
    command_id: RequiredName
    ok: bool
    current_step: Count | None = None
    changes: Annotated[dict[Name, _Changed], AfterValidator(_plain)] = Keys
    refused: dict[Name, Reason | None] = Keys
    reason: Reason = ""

    @property
    def acknowledgement(self) -> Acknowledgement:
        """The acknowledgement as the weaver takes it."""
        changes = {key: Change(change.old, change.new) for key, change in self.changes.items()}
        refused = {key: reason or "" for key, reason in self.refused.items()}
        return Acknowledgement(self.ok, self.current_step, changes, refused, self.reason or None)


Report = DeviceRegistration | ProgressReport | Sign | UseReport | DrainReport | CommandAnswer

REPORTS: dict[EnvelopeKind, type[Report]] = {
    EnvelopeKind.REGISTER_DEVICE: DeviceRegistration,
    EnvelopeKind.TRAINING_STATUS: ProgressReport,
    EnvelopeKind.HEARTBEAT: Sign,
    EnvelopeKind.DEVICE_STATUS: UseReport,
    EnvelopeKind.DRAIN: DrainReport,
    EnvelopeKind.ACKNOWLEDGEMENT: CommandAnswer,
}
"""The messages that processes without a threadlet send."""


def read_report(envelope: Envelope) -> Report:
    """Return the report in a message."""
    return REPORTS[envelope.kind].read(envelope.body)
