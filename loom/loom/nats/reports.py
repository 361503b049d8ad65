"""The messages of processes that have no threadlet: they are checked, and become frames of the weaver's link.

Messages that make no sense raise `WrongArguments`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loom.control.commands import Acknowledgement, plain_config
from loom.control.introduction import MAX_DEVICES, Device
from loom.control.membership import MAX_REASON
from loom.control.reports import DEVICE_NUMBERS, Phase
from loom.errors import LoomError, WrongArguments
from loom.nats.envelopes import Envelope, EnvelopeKind
from loom.nats.fields import check_name, count, name, names, number, seconds, text, values

DEFAULT_INTERVAL = 5.0
"""Seconds between two heartbeats of a process that does not say how many."""

MAX_METRICS = 1000  # metrics of one report
MAX_KEYS = 1000  # keys of a configuration
MAX_THROTTLED = 16  # reasons why a device is slow

_LEAST_INTERVAL, _MOST_INTERVAL = 0.2, 300.0
_ENDS = ("finished", "stopped", "failed")
_STATES = ("running", "paused", "draining", *_ENDS)


@dataclass(frozen=True)
class DeviceRegistration:
    """A process is a replica, and uses devices."""

    replica: str
    devices: tuple[Device, ...]
    group: str
    instance: str
    """Id of the process; "" if it has none."""
    interval: float
    """Seconds between two heartbeats."""
    handlers: dict[str, str]
    config: dict[str, Any]
    step: int | None


@dataclass(frozen=True)
class ProgressReport:
    """The progress of a training."""

    replica: str
    state: str
    """One of running, paused, draining, finished, stopped and failed; "" if it is not said."""
    reason: str
    step: int | None
    epoch: int | None
    max_step: int | None
    metrics: dict[str, float]
    config: dict[str, Any]
    status_type: str = ""
    """What the status is about, such as batch_update; "" if that is not said."""

    @property
    def ends(self) -> bool:
        """Whether it is the last report of the replica."""
        return self.state in _ENDS


@dataclass(frozen=True)
class Sign:
    """A sign that a process lives."""

    replica: str
    step: int | None
    phase: Phase


@dataclass(frozen=True)
class UseReport:
    """The use and the health of a device."""

    replica: str
    """The replica that reports; "" for any that has registered the device."""
    device: str
    use: dict[str, Any]
    """The fields of `loom.control.reports.DeviceReport`."""
    failure: str | None
    """Why the device has failed; None unless it has."""


@dataclass(frozen=True)
class DrainReport:
    """A replica leaves, or leaves one of its devices."""

    replica: str
    device: str
    """The device; "" for all."""
    reason: str


@dataclass(frozen=True)
class CommandAnswer:
    """A replica's acknowledgement of a command."""

    replica: str
    command: str
    acknowledgement: Acknowledgement = field(default_factory=lambda: Acknowledgement(True))


Report = DeviceRegistration | ProgressReport | Sign | UseReport | DrainReport | CommandAnswer


def read_report(envelope: Envelope) -> Report:
    """Return the report in a message."""
    try:
        return READERS[envelope.kind](envelope.body)
    except RecursionError:
        raise WrongArguments("this is nested too deeply") from None


def _registration(body: dict[str, Any]) -> DeviceRegistration:
    replica = name(body, "replica_id")
    more = body.get("device_uuids") or []
    if not isinstance(more, list) or len(more) > MAX_DEVICES:
        raise WrongArguments(f"device_uuids is a list of at most {MAX_DEVICES}, not {more!r:.80}")
    one = name(body, "device_uuid", "")
    uuids = dict.fromkeys([*([one] if one else []), *(check_name("a device_uuid", uuid) for uuid in more)])
    if not all(uuids):
        raise WrongArguments("a device_uuid is empty")
    if not uuids:
        raise WrongArguments(f"device_uuid is missing; there is {names(body)}")
    handlers = {check_name("a key", key): check_name(key, type) for key, type in _map(body, "handlers").items()}
    return DeviceRegistration(
        replica,
        tuple(_device(body, uuid) for uuid in uuids),
        name(body, "group", "") or replica,
        name(body, "instance", ""),
        seconds(body, "heartbeat_interval", DEFAULT_INTERVAL, _LEAST_INTERVAL, _MOST_INTERVAL),
        handlers,
        _config(body),
        count(body, "current_step"),
    )


def _device(body: dict[str, Any], uuid: str) -> Device:
    kind = name(body, "kind", "") or ("cpu" if uuid.upper().startswith("CPU") else "gpu")
    if kind not in ("gpu", "cpu"):
        raise WrongArguments(f"kind is gpu or cpu, not {kind!r:.80}")
    return Device(uuid, kind, name(body, "server", ""), name(body, "type", ""), count(body, "memory") or 0)


def _progress(body: dict[str, Any]) -> ProgressReport:
    state = text(body, "state", "")
    if state and state not in _STATES:
        raise WrongArguments(f"state is one of {', '.join(_STATES)}, not {state!r:.80}")
    metrics = values(body, "metrics", MAX_METRICS)
    return ProgressReport(
        name(body, "replica_id"),
        state,
        text(body, "reason", "")[:MAX_REASON],
        count(body, "current_step"),
        count(body, "epoch"),
        count(body, "max_step"),
        {check_name("the name of a metric", key): number(key, value) for key, value in metrics.items()},
        _config(body),
        name(body, "status_type", ""),
    )


def _sign(body: dict[str, Any]) -> Sign:
    phase = text(body, "phase", "") or Phase.STEP.value
    if phase not in [one.value for one in Phase]:
        raise WrongArguments(f"phase is step, between or paused, not {phase!r:.80}")
    return Sign(name(body, "replica_id"), count(body, "current_step"), Phase(phase))


def _use(body: dict[str, Any]) -> UseReport:
    use: dict[str, Any] = {one: number(one, body[one]) for one in DEVICE_NUMBERS if body.get(one) is not None}
    throttled = body.get("throttled") or []
    if not isinstance(throttled, list) or len(throttled) > MAX_THROTTLED:
        raise WrongArguments(f"throttled is a list of at most {MAX_THROTTLED} reasons, not {throttled!r:.80}")
    use["throttled"] = [check_name("a reason in throttled", one) for one in throttled]
    use["error"] = text(body, "error", "")[:MAX_REASON] or None
    use["xid"] = count(body, "xid")
    state = text(body, "state", "")
    reason = text(body, "reason", "")[:MAX_REASON]
    failure = (reason or "its process says that it has failed") if state == "failed" else None
    return UseReport(name(body, "replica_id", ""), name(body, "device_uuid"), use, failure)


def _drain(body: dict[str, Any]) -> DrainReport:
    return DrainReport(
        name(body, "replica_id"), name(body, "device_uuid", ""), text(body, "reason", "")[:MAX_REASON]
    )


def _answer(body: dict[str, Any]) -> CommandAnswer:
    ok = body.get("ok")
    if type(ok) is not bool:
        raise WrongArguments(f"ok is true or false, not {ok!r:.80}")
    refused = _map(body, "refused")
    made: dict[str, Any] = {
        "ok": ok,
        "step": count(body, "current_step"),
        "changes": values(body, "changes", MAX_KEYS),
        "refused": {key: text(refused, key, "")[:MAX_REASON] for key in refused},
        "reason": text(body, "reason", "")[:MAX_REASON] or None,
    }
    try:
        acknowledgement = Acknowledgement.from_body(made)
    except LoomError as error:
        raise WrongArguments(str(error)) from error
    for key, change in acknowledgement.changes.items():
        plain_config({check_name("a key", key): [change.old, change.new]})
    return CommandAnswer(name(body, "replica_id"), name(body, "command_id"), acknowledgement)


def _config(body: dict[str, Any]) -> dict[str, Any]:
    config = _map(body, "config")
    return plain_config(config) if config else config


def _map(body: dict[str, Any], field: str) -> dict[str, Any]:
    return {check_name("a key", key): value for key, value in values(body, field, MAX_KEYS).items()}


READERS: dict[EnvelopeKind, Callable[[dict[str, Any]], Report]] = {
    EnvelopeKind.REGISTER_DEVICE: _registration,
    EnvelopeKind.TRAINING_STATUS: _progress,
    EnvelopeKind.HEARTBEAT: _sign,
    EnvelopeKind.DEVICE_STATUS: _use,
    EnvelopeKind.DRAIN: _drain,
    EnvelopeKind.ACKNOWLEDGEMENT: _answer,
}
"""The kinds of messages that processes without a threadlet send."""
