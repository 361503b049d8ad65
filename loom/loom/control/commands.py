"""What replicas can be told to do, and what they make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, ClassVar, NamedTuple

from loom.control.frame import MAX_NAME, Frame, check_count
from loom.errors import ProtocolMismatch, WrongArguments


class CommandKind(str, Enum):
    """What a replica can be told to do, under the same names in Python, REST, NATS and the CLI."""

    UPDATE_CONFIG = "update_config"
    """Take new values of configuration keys; the parameters are the keys and values."""
    PAUSE = "pause"
    """Wait at the next step boundary."""
    RESUME = "resume"
    """Go on after a pause."""
    STOP = "stop"
    """End the training at the next step boundary."""
    DRAIN = "drain"
    """Make one more step, and leave."""
    DEVICE_FAILED = "device_failed"
    """Hear that a ``device`` has failed, and the ``reason``."""
    DEACTIVATE_DEVICE = "deactivate_device"
    """Use a ``device`` no longer."""
    REACTIVATE = "reactivate"
    """Use a ``device`` again."""
    INJECT = "inject"
    """Suffer a ``fault`` with its ``params`` for a ``duration``; see `loom.chaos`."""
    REMOVE_FAULT = "remove_fault"
    """End the fault that was injected as ``injection``."""

    def __str__(self) -> str:
        return self.value

    @classmethod
    def read(cls, kind: Any) -> CommandKind:
        """Return the kind of a name.

        Raises:
            WrongArguments: there is none of that name.
        """
        try:
            return cls(kind)
        except ValueError:
            names = ", ".join(one.value for one in cls)
            raise WrongArguments(f"there is no command {kind!r:.80}; choose one of {names}") from None


FAULT_COMMANDS = frozenset((CommandKind.INJECT, CommandKind.REMOVE_FAULT))
"""Commands that only replicas take which are marked as injectable."""

DEVICE_COMMANDS = frozenset((CommandKind.DEVICE_FAILED, CommandKind.DEACTIVATE_DEVICE, CommandKind.REACTIVATE))
"""Commands about a ``device``."""


USER_COMMANDS = frozenset(CommandKind) - FAULT_COMMANDS - {CommandKind.DEVICE_FAILED}
"""Commands that people give; the others follow from a fault that is injected, or from a device's failure."""


class UnknownCommandKind(ProtocolMismatch):
    """A weaver that is newer than this threadlet sent a command of a kind that the threadlet does not know."""

    def __init__(self, id: str, kind: str) -> None:
        super().__init__(f"this replica knows no command {kind!r:.80}")
        self.id = id


@dataclass(frozen=True, slots=True)
class Command(Frame):
    """``["command", id, kind, params]``, to a threadlet: do something at the next step boundary.

    The weaver sends it again after each reconnect, until an `Acknowledged` with its id comes.
    """

    KIND: ClassVar[str] = "command"

    id: str
    kind: CommandKind
    params: dict[str, Any]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> Command:
        match body:
            case [_, str(id), str(kind), dict(params)]:
                try:
                    return cls(id, CommandKind(kind), params)
                except ValueError:
                    raise UnknownCommandKind(id, kind) from None
        raise cls.mismatch(body)


class Change(NamedTuple):
    """A value that was changed. ``old`` is None also if it was not known."""

    old: Any
    new: Any


class _JsonObject:
    """Tells pydantic that a `Change` is an object with two keys in JSON, not a list."""

    @staticmethod
    def __get_pydantic_json_schema__(schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "object", "properties": {"old": {}, "new": {}}, "required": ["old", "new"]}


@dataclass(frozen=True)
class Acknowledgement:
    """What a replica made of a command.

    As JSON and on the link it is an object of these fields, a `Change` being ``{"old": …, "new": …}``; ``waiting``
    and ``evidence`` are left out while they say nothing.
    """

    # Read by pydantic, which the gateway describes REST with: what has a default here may be missing.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"json_schema_serialization_defaults_required": False}

    ok: bool
    step: int | None = None
    """The step at which it was applied."""
    changes: Mapping[str, Annotated[Change, _JsonObject]] = field(default_factory=dict)
    """What was changed, by key."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """What was not, by key, and why."""
    reason: str | None = None
    """Why it was not applied, or not all of it."""
    waiting: bool = False
    """Whether the replica has not answered yet, and may."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """What shows that a fault is there."""

    @classmethod
    def failed(cls, reason: str, waiting: bool = False) -> Acknowledgement:
        """Return what stands for a replica that did not apply a command."""
        return cls(False, reason=reason, waiting=waiting)

    def to_body(self) -> dict[str, Any]:
        """Return the object that stands for it in JSON, on the link and in the store."""
        body = {
            "ok": self.ok,
            "reason": self.reason,
            "step": self.step,
            "changes": {key: {"old": change.old, "new": change.new} for key, change in self.changes.items()},
            "refused": dict(self.refused),
        }
        if self.waiting:
            body["waiting"] = True
        if self.evidence:
            body["evidence"] = dict(self.evidence)
        return body

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Acknowledgement:
        """Check such an object and return what it stands for.

        Raises:
            ProtocolMismatch: it is something else.
        """
        match body:
            case {"ok": bool(ok), **rest}:
                step, reason = check_count("step", rest.get("step")), rest.get("reason")
                changes, refused = rest.get("changes") or {}, rest.get("refused") or {}
                evidence = rest.get("evidence") or {}
                if (reason is None or type(reason) is str) and all(
                    type(one) is dict for one in (changes, refused, evidence)
                ):
                    read = {key: _read_change(change) for key, change in changes.items()}
                    return cls(ok, step, read, refused, reason, rest.get("waiting") is True, evidence)
        raise ProtocolMismatch(f"not an acknowledgement: {body!r:.80}")


def _read_change(change: Any) -> Change:
    if type(change) is not dict or "new" not in change:
        raise ProtocolMismatch(f"a change is an old and a new value, not {change!r:.80}")
    return Change(change.get("old"), change["new"])


@dataclass(frozen=True, slots=True)
class Acknowledged(Frame):
    """``["ack", command id, step or None, {"ok", "reason", "changes", "refused", "evidence"}]``, from a threadlet.

    It is sent when the command has been applied or refused, and again if the command comes again.
    """

    KIND: ClassVar[str] = "ack"

    command: str
    acknowledgement: Acknowledgement

    def to_body(self) -> list[Any]:
        body = self.acknowledgement.to_body()
        return [self.KIND, self.command, body.pop("step"), body]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> Acknowledged:
        match body:
            case [_, str(command), step, dict(rest)]:
                return cls(command, Acknowledgement.from_body({**rest, "step": step, "waiting": False}))
        raise cls.mismatch(body)


@dataclass(frozen=True, slots=True)
class FaultRemoved(Frame):
    """``["fault", injection id, evidence]``, from a threadlet: a fault that was injected is gone.

    ``evidence`` is a map of what shows that it is gone.
    """

    KIND: ClassVar[str] = "fault"

    injection: str
    evidence: Mapping[str, Any]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> FaultRemoved:
        match body:
            case [_, str(injection), dict(evidence)] if len(injection) <= MAX_NAME:
                return cls(injection, evidence)
        raise cls.mismatch(body)


def check_config(config: Mapping[str, Any]) -> None:
    """Check that values of a configuration can be told to the weaver.

    Raises:
        WrongArguments: there is none, or one is no plain value.
    """
    if not config:
        raise WrongArguments("give at least one key and its value, such as learning_rate=0.002")
    for key, value in config.items():
        if not _is_plain(value):
            kind = type(value).__name__
            known = "numbers, texts, booleans, None, and lists and dicts of them"
            raise WrongArguments(f"{key}: values of a configuration are {known}, not {kind}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(one) for key, one in value.items())
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 64
    return value is None or type(value) in (bool, float, str)
