"""The commands that were given: the replicas that each is for, and those that have acknowledged it.

A command has an id. The weaver stores a command before sending it, and sends it again whenever the replica
reconnects. A command is done when each of its replicas has acknowledged it or has ended. A second acknowledgement
changes nothing.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from loom.control.arguments import check_name
from loom.control.commands import DEVICE_COMMANDS, Acknowledgement, Command, CommandKind, no_handler
from loom.control.fault_kinds import check_fault
from loom.control.frame import pack_value
from loom.errors import Denied, NotFound, TooLarge, WrongArguments
from loom.weaver.replicas import Replica
from loom.weaver.states import LIVING
from loom.weaver.storage.store import Store
from loom.weaver.views import few

MAX_PARAMS = 1 << 20  # bytes of a command's parameters, which a session could not carry if there were more

MAX_IDS = 20_000
"""Ids of the longest target."""

ATTEMPT = "\x1f"
"""What separates a command's id from the number of the attempt."""

Target = str | list[str]
"""The id of a replica, a glob on ids or groups, ``"*"``, or several ids."""


def select(target: Target, replicas: dict[str, Replica]) -> tuple[list[Replica], dict[str, Acknowledgement]]:
    """Return the replicas that a target names, and a failed acknowledgement for each name that no replica has.

    Only an id selects a replica that has ended.

    Raises:
        WrongArguments: it is no target, or a longer one than there are names: a glob of 60,000 characters takes
            seconds to be compiled, in which the weaver answers nobody.
    """
    if isinstance(target, str):
        check_name("a target", target)
        if target in replicas:
            return [replicas[target]], {}
        living = [replica for replica in replicas.values() if replica.state in LIVING]
        if target == "*":
            return living, {}
        matches = fnmatch.translate(target)
        found = _matching(matches, living)
        if found or any(special in target for special in "*?["):
            return found, {}
        return [], {target: Acknowledgement.failed(unknown(target, replicas))}
    if not isinstance(target, list) or not all(isinstance(id, str) for id in target):
        raise WrongArguments(f"a target is a replica's id, a glob or a list of ids, not {target!r:.80}")
    if len(target) > MAX_IDS:
        raise WrongArguments(f"a target has at most {MAX_IDS} ids, not {len(target)}")
    wanted = dict.fromkeys(target)
    there = [replicas[id] for id in wanted if id in replicas]
    return there, {id: Acknowledgement.failed(unknown(id, replicas)) for id in wanted if id not in replicas}


def check_injectable(there: list[Replica], unknown: dict[str, Acknowledgement], target: Target) -> None:
    """Check that every living replica of a target is marked as injectable, and that there is at least one."""
    if unknown:
        raise NotFound("; ".join(str(one.reason) for one in unknown.values()), code="unknown_replica")
    living = [replica for replica in there if replica.state in LIVING]
    if not living:
        raise NotFound(f"no replica that lives is named by {target!r:.80}", code="unknown_replica")
    unmarked = [replica.id for replica in living if not replica.injectable]
    if unmarked:
        raise Denied(
            f"not marked as injectable: {few(unmarked)}. Spawn them on job.hosts.as_injectable(), make their "
            "threadlets with injectable=True, or set LOOM_INJECTABLE=1 where they start",
            code="not_injectable",
        )


def _matching(pattern: str, replicas: Iterable[Replica]) -> list[Replica]:
    match = re.compile(pattern).match
    return [one for one in replicas if match(one.id) or match(one.short_name) or match(one.group)]


def unknown(id: str, replicas: dict[str, Replica]) -> str:
    """Return the text of the error that no replica has this id."""
    return f'no replica named "{id:.80}"; registered: {few(replicas)}'


def unknown_command(id: str) -> NotFound:
    """Return the error that no command has this id."""
    return NotFound(f"there is no command {id!r:.80}, or it was done long ago", code="unknown_command")


@dataclass(slots=True)
class GivenCommand:
    """A command, the replicas that it was given to, and their acknowledgements."""

    command: Command
    target: Target
    by: str
    time: float
    replicas: list[str]
    event: int = 0
    acknowledgements: dict[str, Acknowledgement] = field(default_factory=dict)
    waiting: dict[str, None] = field(default_factory=dict)
    """The replicas that have not acknowledged the command, in order."""
    cohorts: Mapping[str, str] = field(default_factory=dict)
    """The cohort of each replica that applies the command together with the other ranks of its job."""

    attempts: dict[str, int] = field(default_factory=dict)
    """By rank, how often it went to the ranks anew, because those before were the job's no more."""

    # Not stored:
    told: set[str] = field(default_factory=set)
    """The cohorts of which the other ranks were told that one has applied the command."""
    decided: dict[str, str] = field(default_factory=dict)
    """For each cohort whose ranks have decided that none of them applies it, the reason."""

    @property
    def id(self) -> str:
        return self.command.id

    def sent_id(self, replica: str) -> str:
        """Return the id by which a replica knows it: each attempt has its own, and is another decision of ranks."""
        attempt = self.attempts.get(replica, 0)
        return f"{self.id}{ATTEMPT}{attempt}" if attempt else self.id

    @property
    def kind(self) -> CommandKind:
        return self.command.kind

    @property
    def done(self) -> bool:
        return not self.waiting

    def ranks(self, cohort: str) -> list[str]:
        """Return the replicas of a cohort that the command was given to."""
        return [id for id, one in self.cohorts.items() if one == cohort]

    def to_dict(self) -> Mapping[str, object]:
        what: dict[str, object] = {
            "id": self.command.id,
            "kind": self.command.kind.value,
            "params": self.command.params,
        }
        if self.command.announced:
            what["announced"] = True
        if self.cohorts:
            what["cohorts"] = self.cohorts
        if self.attempts:
            what["attempts"] = self.attempts
        return what | {name: getattr(self, name) for name in ("target", "by", "time", "replicas", "event")}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> GivenCommand:
        rest = dict(stored)
        if isinstance(attempts := rest.get("attempts"), int):  # of all ranks, as an earlier weaver has stored it
            rest["attempts"] = dict.fromkeys(rest["replicas"], attempts)
        kind, announced = CommandKind(rest.pop("kind")), rest.pop("announced", False)
        command = Command(rest.pop("id"), kind, rest.pop("params"), announced)
        return cls(command, **rest)


class Commands:
    """The commands that are not done, and the last ``keep`` commands that are, loaded from the store."""

    def __init__(self, store: Store, keep: int = 1000) -> None:
        self._store = store
        self._keep = keep
        self._commands: dict[str, GivenCommand] = {}
        self._done: dict[str, None] = {}  # the ids of the commands that are done, in the order in which they were
        self._unacknowledged: dict[str, dict[str, None]] = {}
        """For each replica, the ids of the commands that it has not acknowledged, the oldest first."""
        self._load()

    def __iter__(self) -> Iterator[GivenCommand]:
        return iter(self._commands.values())

    def get(self, id: str) -> GivenCommand | None:
        """Return a command; None if no command has that id, or if the command was done long ago."""
        return self._commands.get(id)

    def find(self, id: str) -> GivenCommand:
        """Return a command as `get`, but raise `NotFound` for None."""
        found = self.get(id)
        if found is None:
            raise unknown_command(id)
        return found

    def add(self, command: GivenCommand, acknowledgements: dict[str, Acknowledgement]) -> None:
        """Add a command, with the acknowledgements that are known already, by replica."""
        self._store.put("commands", command.id, command.to_dict())
        for id, one in acknowledgements.items():
            self._store.put_acknowledgement(command.id, id, one.packed)
        self._enter(command, acknowledgements)

    def of(self, sent_id: str, replica: str) -> GivenCommand | None:
        """Return the command that a replica knows by this id; None if there is none, or it is one before."""
        found = self._commands.get(sent_id) or self._commands.get(sent_id.rpartition(ATTEMPT)[0])
        return found if found is not None and found.sent_id(replica) == sent_id else None

    def give_to(self, given: GivenCommand, replicas: Collection[str], cohort: str | None) -> None:
        """Give a command to these replicas, as a cohort or by themselves, whatever cohort they were in."""
        kept = {id: of for id, of in given.cohorts.items() if id not in replicas}
        given.cohorts = kept | ({} if cohort is None else dict.fromkeys(replicas, cohort))
        for id in replicas:
            given.acknowledgements.pop(id, None)
            if id not in given.replicas:
                given.replicas.append(id)
            given.waiting[id] = None
            self._unacknowledged.setdefault(id, {})[given.id] = None
        self._store.put("commands", given.id, given.to_dict())

    def unacknowledged(self, replica: str) -> list[GivenCommand]:
        """Return the commands that a replica has not acknowledged, in the order in which they were given."""
        return [self._commands[id] for id in self._unacknowledged.get(replica, ())]

    def that_stopped(self, replica: Replica) -> GivenCommand | None:
        """Return the newest command by which the replica's present process was told to end; None if none was."""
        for given in reversed(self._commands.values()):
            if given.time < replica.registered:
                break
            made = given.acknowledgements.get(replica.id)
            if given.kind in (CommandKind.STOP, CommandKind.DRAIN) and made is not None and made.ok:
                return given
        return None

    def acknowledge(self, id: str, replica: str, acknowledgement: Acknowledgement) -> GivenCommand | None:
        """Record a replica's acknowledgement; return the command, or None if it does not wait for this replica."""
        command = self._commands.get(id)
        if command is None or replica not in command.waiting:
            return None
        self._store.put_acknowledgement(id, replica, acknowledgement.packed)
        del command.waiting[replica]
        command.acknowledgements[replica] = acknowledgement
        left = self._unacknowledged[replica]
        del left[id]
        if not left:
            del self._unacknowledged[replica]
        self._forget_surplus(command)
        return command

    def _load(self) -> None:
        known: dict[str, dict[str, Acknowledgement]] = {}
        for id, replica, body in self._store.acknowledgements():
            known.setdefault(id, {})[replica] = Acknowledgement.from_body(body)
        for stored in sorted((stored for _, stored in self._store.rows("commands")), key=lambda row: row["event"]):
            self._enter(GivenCommand.from_dict(stored), known.get(stored["id"], {}))

    def _enter(self, command: GivenCommand, acknowledgements: dict[str, Acknowledgement]) -> None:
        self._commands[command.id] = command
        command.acknowledgements.update(acknowledgements)
        for replica in command.replicas:
            if replica not in command.acknowledgements:
                command.waiting[replica] = None
                self._unacknowledged.setdefault(replica, {})[command.id] = None
        self._forget_surplus(command)

    def _forget_surplus(self, changed: GivenCommand) -> None:
        if changed.done:
            self._done[changed.id] = None
        while len(self._done) > self._keep:
            oldest = next(iter(self._done))
            del self._done[oldest]
            del self._commands[oldest]
            self._store.drop("commands", oldest)


def not_offered(replica: Replica, command: Command, together: bool) -> Acknowledgement | None:
    """Return a replica's refusal of a command that nothing in its process carries out, as far as it has said so.

    Args:
        together: whether other ranks apply it with the replica, or none: a single key is enough then.
    """
    if (reason := replica.not_offered.get(command.kind.value)) is not None:
        return Acknowledgement.failed(reason)
    if replica.any_key or command.announced or command.kind is not CommandKind.UPDATE_CONFIG:
        return None
    refused = {key: no_handler(key, replica.handlers) for key in command.params if key not in replica.handlers}
    if not refused or (len(refused) < len(command.params) and not together):
        return None
    return Acknowledgement(False, refused=refused, reason="; ".join(refused.values()))


def check_command(kind: CommandKind, params: Any) -> None:
    """Check that a command makes sense, before any replica gets it."""
    if not isinstance(params, dict) or not all(isinstance(key, str) for key in params):
        raise WrongArguments(f"the parameters of {kind} are names and values, not {params!r:.80}")
    if (size := len(pack_value(params))) > MAX_PARAMS:
        raise TooLarge(
            f"the parameters of {kind} have {size:,} bytes; {MAX_PARAMS:,} are the most. Send a path to large data"
        )
    if kind is CommandKind.UPDATE_CONFIG and not params:
        raise WrongArguments("update_config needs at least one key and its value")
    if kind is CommandKind.INJECT:
        check_fault(params.get("fault"), params.get("params", {}), params.get("duration"))
    if (
        kind in DEVICE_COMMANDS
        and len([one for one in ("device", "group") if isinstance(params.get(one), str)]) != 1
    ):
        raise WrongArguments(f"{kind} needs the uuid of a device, as `device`, or the name of a group, as `group`")
