"""The requests to the bridge on NATS: they are checked, and carried out through the gateway's REST.

Requests that make no sense raise `WrongArguments`; a refusal of the gateway raises the errors of `Gateway.ask`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loom.control.aliases import ALIASES, translate
from loom.control.commands import DEVICE_COMMANDS, FAULT_COMMANDS, CommandKind
from loom.control.frame import MAX_NAME
from loom.errors import LoomError, WrongArguments
from loom.nats.envelopes import Envelope, EnvelopeKind
from loom.nats.fields import names, seconds, text, values
from loom.rest import Gateway

WAIT = 10.0  # seconds to wait for acknowledgements before a reply

MAX_WAIT = 300.0

COMMANDS = tuple(kind for kind in CommandKind if kind not in (CommandKind.DEVICE_FAILED, *FAULT_COMMANDS))
"""The commands that NATS may give. A failed device has a message of its own; NATS cannot inject faults."""

_MAX_REASON = 2000


@dataclass(frozen=True)
class FailureReport:
    """A report that a device has failed."""

    device: str
    reason: str

    def give(self, gateway: Gateway, id: str | None = None) -> dict[str, Any]:
        """Report the failure to the weaver; return the body of the reply. The same ``id`` is not reported twice."""
        event = gateway.ask("fail_device", device=self.device, reason=self.reason, report=id)
        affected = [
            {
                "replica_id": one["replica"],
                **{name: one[name] for name in ("group", "state", "action") if one[name] is not None},
                "command_ids": one["commands"],
            }
            for one in event["replicas"]
        ]
        return {"ok": True, "done": True, "event_id": event["id"], "affected": affected}


@dataclass(frozen=True)
class CommandRequest:
    """A command to replicas."""

    kind: CommandKind
    target: str | None
    """The target; None means the replicas on the device or on the devices of the group."""
    params: dict[str, Any]
    wait: float
    """Seconds to wait for acknowledgements before the reply."""
    announced: bool = False
    """Whether it is news of a configuration, and nobody's command."""

    def give(self, gateway: Gateway, id: str | None = None) -> dict[str, Any]:
        """Give the command; return its state so far. The same ``id`` is not given twice."""
        target: str | list[str] | None = self.target
        if target is None and "device" in self.params:
            devices = gateway.ask("devices")
            found = (device["replicas"] for device in devices if device["uuid"] == self.params["device"])
            target = next(found, [])
        asked: dict[str, Any] = {"kind": self.kind.value, "target": target, "params": self.params, "id": id}
        news: dict[str, Any] = {"announced": True} if self.announced else {}
        given: dict[str, Any]
        try:
            given = gateway.ask("command", **asked, **news)
        except WrongArguments:
            if not self.announced:
                raise
            given = gateway.ask("command", **asked)  # the gateway is older, and takes commands alone
        return given

    def reply(self, command: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the reply for a command's state."""
        outcomes = command["outcomes"]
        reply = {
            "ok": command["done"] and all(outcome["ok"] for outcome in outcomes.values()),
            "command_id": command["id"],
            "done": command["done"],
            "outcomes": {
                id: {name: value for name, value in outcome.items() if value is not None}
                for id, outcome in outcomes.items()
            },
        }
        if not outcomes and self.kind not in DEVICE_COMMANDS:
            why = f"no replica that lives is named by {self.target!r:.80}"
            return reply | {"ok": False, "error": {"code": "unknown_replica", "message": why}}
        return reply


def read_request(envelope: Envelope) -> FailureReport | CommandRequest:
    """Return the request in a message."""
    try:
        return _READERS[envelope.kind](envelope.body)
    except RecursionError:
        raise WrongArguments("this is nested too deeply") from None


def error_reply(error: LoomError) -> dict[str, Any]:
    """Return the body of the reply for a request that failed."""
    return {"ok": False, "error": {"code": error.code, "message": str(error)}}


def _read_failure(body: dict[str, Any]) -> FailureReport:
    device = text(body, "device_uuid")
    if len(device) > MAX_NAME:
        raise WrongArguments(f"device_uuid has at most {MAX_NAME} characters, not {len(device)}")
    return FailureReport(device, text(body, "reason", "")[:_MAX_REASON])


def _read_command(body: dict[str, Any]) -> CommandRequest:
    wanted, params = text(body, "command_type"), values(body, "params")
    if "device_uuid" in params and "device" not in params:
        params = {**params, "device": params["device_uuid"]}
        del params["device_uuid"]
    name, target, params = translate(wanted, text(body, "target_id", ""), params)
    if name not in COMMANDS:
        known = ", ".join([*COMMANDS, *ALIASES])
        raise WrongArguments(f"there is no command {wanted!r:.80}; command_type is one of {known}")
    kind = CommandKind(name)
    if kind in DEVICE_COMMANDS:
        return _device_command(kind, target or None, params, _wait(body))
    if kind is CommandKind.UPDATE_CONFIG and not params:
        raise WrongArguments("params is missing: the new values, by key")
    return CommandRequest(kind, text(body, "target_id"), params, _wait(body))


def _device_command(kind: CommandKind, target: str | None, params: dict[str, Any], wait: float) -> CommandRequest:
    """Return the request of a command about one device, or about all devices of a group."""
    device, group = text(params, "device", ""), text(params, "group", "")
    if bool(device) == bool(group):
        raise WrongArguments(
            f"{kind} needs in params either device_uuid, or group, the name of a group or a replica; there is "
            f"{names(params)}"
        )
    if group:
        return CommandRequest(kind, None, {"group": group}, wait)
    return CommandRequest(kind, target, {"device": device}, wait)


def _read_config(body: dict[str, Any]) -> CommandRequest:
    config = values(body, "config_params")
    if not config:
        raise WrongArguments(f"config_params is missing: the new values, by key; there is {names(body)}")
    target = text(body, "replica_id", "") or "*"
    return CommandRequest(CommandKind.UPDATE_CONFIG, target, config, _wait(body), announced=True)


_READERS: dict[EnvelopeKind, Callable[[dict[str, Any]], FailureReport | CommandRequest]] = {
    EnvelopeKind.MONITORED_FAIL: _read_failure,
    EnvelopeKind.UI_COMMAND: _read_command,
    EnvelopeKind.CONFIG_INFO: _read_config,
}


def _wait(body: dict[str, Any]) -> float:
    return seconds(body, "wait", WAIT, 0, MAX_WAIT)
