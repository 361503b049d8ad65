"""The commands that replicas take, and their acknowledgements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Annotated, Any, ClassVar, NamedTuple

from loom.control.frame import MAX_NAME, Frame, check_count, pack_value
from loom.errors import ProtocolMismatch, WrongArguments
from loom.wire.plain import plain


class CommandKind(str, Enum):
    """The kind of a command, with the same names in Python, REST, NATS and the CLI."""

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
    SAVE = "save"
    """Save a checkpoint now."""
    EVALUATE = "evaluate"
    """Evaluate the model now."""
    DEVICE_FAILED = "device_failed"
    """Notify the replica that a ``device`` has failed, and of the ``reason``."""
    DEACTIVATE_DEVICE = "deactivate_device"
    """Stop using a ``device``, or all that the replicas of a ``group`` use."""
    REACTIVATE = "reactivate"
    """Use a ``device`` again, or all that replicas of a ``group`` used when they were taken out of use."""
    BRANCH = "branch"
    """Start the command of the replica's run again from a checkpoint; see `loom.branches`."""
    INJECT = "inject"
    """Inject a ``fault`` with its ``params`` for a ``duration``; see `loom.chaos`."""
    REMOVE_FAULT = "remove_fault"
    """Remove the fault that was injected as ``injection``."""

    def __str__(self) -> str:
        return self.value

    @classmethod
    def read(cls, kind: Any) -> CommandKind:
        """Return the kind with a name."""
        try:
            return cls(kind)
        except ValueError:
            names = ", ".join(one.value for one in cls)
            raise WrongArguments(f"there is no command {kind!r:.80}; choose one of {names}") from None


FAULT_COMMANDS = frozenset((CommandKind.INJECT, CommandKind.REMOVE_FAULT))
"""Commands that only replicas marked as injectable take."""

DEVICE_COMMANDS = frozenset((CommandKind.DEVICE_FAILED, CommandKind.DEACTIVATE_DEVICE, CommandKind.REACTIVATE))
"""Commands about a ``device``."""

COHORT_COMMANDS = frozenset(CommandKind) - FAULT_COMMANDS - DEVICE_COMMANDS - {CommandKind.BRANCH}
"""Commands that all ranks of a cohort apply at one step; the others concern a process by itself."""


USER_COMMANDS = frozenset(CommandKind) - FAULT_COMMANDS - {CommandKind.DEVICE_FAILED, CommandKind.BRANCH}
"""Commands that users give; the others follow from an injected fault, a device's failure or a branch."""


class UnknownCommandKind(ProtocolMismatch):
    """A newer weaver sent a command of a kind that this threadlet does not know."""

    def __init__(self, id: str, kind: str) -> None:
        super().__init__(f"this replica knows no command {kind!r:.80}")
        self.id = id


@dataclass(frozen=True, slots=True)
class Command(Frame, kind="command"):
    """``["command", id, kind, params]``, to a threadlet: do something at the next step boundary.

    ``true`` follows if the command is announced; for a cohort ``true`` or ``false``, and its id. The
    weaver sends the frame again after each reconnect, until an `Acknowledged` with its id comes.
    """

    id: str
    kind: CommandKind
    params: Mapping[str, Any]
    announced: bool = False
    """True if it is news of a configuration, such as on ``config.info`` of NATS, and nobody's command."""
    cohort: str | None = None
    """Id of the cohort whose ranks apply it at one step, or none of them; None if the replica applies it alone."""

    def to_body(self) -> list[Any]:
        body = [self.KIND, self.id, self.kind.value, self.params]
        if self.cohort is not None:
            return [*body, self.announced, self.cohort]
        return [*body, True] if self.announced else body

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> Command:
        match body:
            case [_, str(id), str(kind), dict(params), *rest] if rest in ([], [True]) or _of_cohort(rest):
                try:
                    return cls(id, CommandKind(kind), params, *rest)
                except ValueError:
                    raise UnknownCommandKind(id, kind) from None
        raise cls.mismatch(body)


@dataclass(frozen=True, slots=True)
class AppliedByOthers(Frame, kind="applied_by_others"):
    """``["applied_by_others", id]``, to a threadlet: another rank of its cohort has applied a command for good.

    A rank that has lost the store of its job learns by that what the ranks have decided.
    """

    id: str
    """Id of the command."""


def _of_cohort(rest: list[Any]) -> bool:
    return len(rest) == 2 and type(rest[0]) is bool and type(rest[1]) is str


class _OldAndNew(NamedTuple):
    old: Any
    new: Any


class Change(_OldAndNew):
    """A changed value, the pair ``(old, new)``. ``old`` is also None if the old value is unknown."""

    back: Mapping[str, Any] | None
    """The values, by key, that bring back what was before, if ``old`` does not: it was a schedule's."""

    def __new__(cls, old: Any, new: Any, back: Mapping[str, Any] | None = None) -> Change:
        self = super().__new__(cls, old, new)
        self.back = back
        return self

    def to_body(self) -> dict[str, Any]:
        """Return the object for JSON."""
        body = {"old": self.old, "new": self.new}
        return body if self.back is None else {**body, "back": dict(self.back)}


def former_values(changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values that take changes back, as far as it is known what was before.

    Args:
        changes: for each key a `Change` as JSON has it.
    """
    former: dict[str, Any] = {}
    for key, change in changes.items():
        if (back := change.get("back")) is not None:
            former |= back
        elif change.get("old") is not None:
            former[key] = change["old"]
    return former


class _JsonObject:
    """The pydantic schema of a `Change`, which is an object in JSON, not a list."""

    @staticmethod
    def __get_pydantic_json_schema__(schema: Any, handler: Any) -> dict[str, object]:
        values = {"old": {}, "new": {}, "back": {"type": "object"}}
        return {"type": "object", "properties": values, "required": ["old", "new"]}


@dataclass(frozen=True)
class Acknowledgement:
    """A replica's acknowledgement of a command.

    As JSON and on the link it is an object of these fields, a `Change` being ``{"old": …, "new": …}``. ``waiting``,
    ``evidence``, ``taken`` and a change's ``back`` are left out while they are false or empty.
    """

    # For pydantic, with which the gateway describes REST: fields with a default here may be missing in JSON.
    __pydantic_config__: ClassVar[Mapping[str, bool]] = {"json_schema_serialization_defaults_required": False}

    ok: bool
    step: int | None = None
    """The step at which the command was applied."""
    changes: Mapping[str, Annotated[Change, _JsonObject]] = field(default_factory=dict)
    """The changed values, by key."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """The reason for each value that was not changed, by key."""
    reason: str | None = None
    """Why the command was not applied, or only in part."""
    waiting: bool = False
    """True if the replica has not answered yet, but may still do so."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Evidence that a fault is present."""
    taken: Sequence[str] = ()
    """Values that the training program took by `get_config_update` and no function of its threadlet applied: keys
    of an update, or the command's kind. The program says itself what comes of it."""

    @classmethod
    def failed(cls, reason: str, waiting: bool = False) -> Acknowledgement:
        """Return the acknowledgement of a replica that did not apply a command."""
        return cls(False, reason=reason, waiting=waiting)

    def to_body(self) -> dict[str, Any]:
        """Return the object for JSON, for the link and for the store."""
        body: dict[str, object] = {
            "ok": self.ok,
            "reason": self.reason,
            "step": self.step,
            "changes": {key: change.to_body() for key, change in self.changes.items()},
            "refused": dict(self.refused),
        }
        if self.waiting:
            body["waiting"] = True
        if self.evidence:
            body["evidence"] = dict(self.evidence)
        if self.taken:
            body["taken"] = list(self.taken)
        return body

    @cached_property
    def packed(self) -> bytes:
        """The packed object, which is made once if thousands of replicas acknowledge a command in the same way."""
        return pack_value(self.to_body())

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Acknowledgement:
        """Check an object and return the acknowledgement that it holds."""
        # Without `match`: thousands of replicas acknowledge a command at once.
        get = body.get if isinstance(body, Mapping) else {}.get
        ok, step, reason = get("ok"), check_count("step", get("step")), get("reason")
        changes, refused = get("changes") or {}, get("refused") or {}
        evidence, taken = get("evidence") or {}, get("taken") or []
        if (
            type(ok) is bool
            and (reason is None or type(reason) is str)
            and type(changes) is type(refused) is type(evidence) is dict
            and type(taken) is list
            and all(type(one) is str for one in taken)
        ):
            read = {key: _read_change(change) for key, change in changes.items()}
            return cls(ok, step, read, refused, reason, get("waiting") is True, evidence, tuple(taken))
        raise ProtocolMismatch(f"not an acknowledgement: {body!r:.80}")


def _read_change(change: Any) -> Change:
    if type(change) is not dict or "new" not in change:
        raise ProtocolMismatch(f"a change is an old and a new value, not {change!r:.80}")
    back = change.get("back")
    return Change(change.get("old"), change["new"], back if type(back) is dict else None)


class CohortVerdict(str, Enum):
    """What a rank knows of the other ranks of its cohort when it refuses a command."""

    NOBODY = "nobody"
    """The ranks have decided that none of them applies it."""
    MOVED = "moved"
    """So they have, because other ranks form the job now: these may apply it."""


_VERDICTS = [verdict.value for verdict in CohortVerdict]


@dataclass(frozen=True, slots=True)
class Acknowledged(Frame, kind="ack"):
    """``["ack", command id, step or None, {"ok", "reason", "changes", "refused", …}]``, from a threadlet.

    A threadlet sends the frame when it has applied or refused the command, and again whenever the command comes
    again. With a `CohortVerdict`, the map has ``verdict`` as well.
    """

    command: str
    acknowledgement: Acknowledgement
    verdict: CohortVerdict | None = None

    def to_body(self) -> list[Any]:
        body = self.acknowledgement.to_body()
        if self.verdict is not None:
            body["verdict"] = self.verdict.value
        return [self.KIND, self.command, body.pop("step"), body]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> Acknowledged:
        if len(body) == 4 and type(body[1]) is str and type(body[3]) is dict:
            _, command, step, rest = body
            known = Acknowledgement.from_body({**rest, "step": step, "waiting": False})
            verdict = rest.get("verdict")
            return cls(command, known, CohortVerdict(verdict) if verdict in _VERDICTS else None)
        raise cls.mismatch(body)


@dataclass(frozen=True, slots=True)
class FaultRemoved(Frame, kind="fault"):
    """``["fault", injection id, {evidence that it is gone}]``, from a threadlet: an injected fault is gone."""

    injection: str
    evidence: Mapping[str, Any]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> FaultRemoved:
        match body:
            case [_, str(injection), dict(evidence)] if len(injection) <= MAX_NAME:
                return cls(injection, evidence)
        raise cls.mismatch(body)


def no_handler(key: str, handlers: Iterable[str]) -> str:
    """Return the refusal of a configuration key by a replica that has handlers for others."""
    return f"{key}: no handler for it in this replica; it has handlers for: {', '.join(sorted(handlers)) or 'none'}"


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration whose values can be sent to the weaver, in their plain form (`loom.wire.plain`).

    Raises:
        WrongArguments: there is no key, or a value has no plain form.
    """
    if not config:
        raise WrongArguments("give at least one key and its value, such as learning_rate=0.002")
    made: dict[str, Any] = plain(config, "config")
    return made
