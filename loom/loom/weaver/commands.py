"""Commands: what replicas are told to do, and what each made of it.

A command has an id. It is stored before it is sent, sent again whenever the replica is connected again, and done
when every replica it names has acknowledged it or cannot any more. A second acknowledgement changes nothing.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from loom.chaos.faults import check_fault
from loom.errors import NotInjectable, UnknownReplica, WrongArguments
from loom.weaver.link import COMMANDS
from loom.weaver.replicas import LIVING, Replica

__all__ = [
    "FAULT_COMMANDS",
    "Command",
    "Commands",
    "Outcome",
    "Target",
    "check_command",
    "check_injectable",
    "not_done",
    "select",
]

FAULT_COMMANDS = ("inject", "remove_fault")
"""Those that only replicas take which are marked as injectable."""

Target = str | list[str]
"""The id of a replica, a glob on ids or groups, ``"*"``, or several ids."""

Outcome = dict[str, Any]
"""What a replica made of a command: ``ok``, ``reason``, ``step``, ``changes`` and ``refused``."""


def not_done(reason: str) -> Outcome:
    """The outcome for a replica that did not apply a command."""
    return {"ok": False, "reason": reason, "step": None, "changes": {}, "refused": {}}


def select(target: Target, replicas: dict[str, Replica]) -> tuple[list[Replica], dict[str, Outcome]]:
    """The replicas that a target names, and the outcome for names of none.

    A glob, a group's name or a short name means those of its replicas that live, an id the replica in whatever
    state it is.

    Raises:
        WrongArguments: the target is neither text nor a list of texts.
    """
    if isinstance(target, str):
        if target in replicas:
            return [replicas[target]], {}
        living = [replica for replica in replicas.values() if replica.state in LIVING]
        if target == "*":
            return living, {}
        matches = fnmatch.translate(target)
        found = _matching(matches, living)
        if found or any(special in target for special in "*?["):
            return found, {}
        return [], {target: not_done(_unknown(target, replicas))}
    if not isinstance(target, list) or not all(isinstance(id, str) for id in target):
        raise WrongArguments(f"a target is a replica's id, a glob or a list of ids, not {target!r:.80}")
    wanted = dict.fromkeys(target)
    there = [replicas[id] for id in wanted if id in replicas]
    return there, {id: not_done(_unknown(id, replicas)) for id in wanted if id not in replicas}


def check_injectable(there: list[Replica], unknown: dict[str, Outcome], target: Target) -> None:
    """See that a fault strikes only what is marked for it, and something.

    Raises:
        UnknownReplica: nobody who lives is named by the target.
        NotInjectable: somebody is not marked.
    """
    if unknown:
        raise UnknownReplica("; ".join(str(outcome["reason"]) for outcome in unknown.values()))
    living = [replica for replica in there if replica.state in LIVING]
    if not living:
        raise UnknownReplica(f"no replica that lives is named by {target!r:.80}")
    unmarked = [replica.id for replica in living if not replica.injectable]
    if unmarked:
        few = ", ".join(unmarked[:5]) + (f" and {len(unmarked) - 5} more" if len(unmarked) > 5 else "")
        raise NotInjectable(
            f"not marked as injectable: {few}. Spawn them on job.hosts.as_injectable(), make their threadlets with "
            "injectable=True, or set LOOM_INJECTABLE=1 where they start"
        )


def _matching(pattern: str, replicas: Iterable[Replica]) -> list[Replica]:
    match = re.compile(pattern).match
    return [one for one in replicas if match(one.id) or match(one.short_name) or match(one.group)]


def _unknown(id: str, replicas: dict[str, Replica]) -> str:
    few = ", ".join(list(replicas)[:5]) or "none"
    more = f" and {len(replicas) - 5} more" if len(replicas) > 5 else ""
    return f'no replica named "{id:.80}"; registered: {few}{more}'


@dataclass(slots=True)
class Command:
    """Something that replicas are told to do. ``waiting`` names those that have not answered."""

    id: str
    kind: str
    params: dict[str, Any]
    target: Target
    by: str
    time: float
    replicas: list[str]
    event: int = 0
    """Of the log, that says that it was given."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    waiting: dict[str, None] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether nobody has to answer any more."""
        return not self.waiting

    def to_dict(self) -> dict[str, Any]:
        """As it is stored, without the outcomes."""
        names = ("id", "kind", "params", "target", "by", "time", "replicas", "event")
        return {name: getattr(self, name) for name in names}


class Commands:
    """The commands that are not done, and the last ones that are.

    Args:
        keep: how many done ones to remember.
    """

    def __init__(self, keep: int = 1000) -> None:
        self._keep = keep
        self._commands: dict[str, Command] = {}
        self._done: dict[str, None] = {}
        self._unanswered: dict[str, dict[str, None]] = {}
        self._waiters: dict[str, list[Callable[[Command], None]]] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._commands

    def __iter__(self) -> Iterator[Command]:
        return iter(self._commands.values())

    def get(self, id: str) -> Command | None:
        """A command; None where there is none with that id, or it was done long ago."""
        return self._commands.get(id)

    def add(self, command: Command, outcomes: dict[str, Outcome]) -> list[str]:
        """Take a new command, or one from the store.

        Args:
            command: whose ``replicas`` all have to answer but for those in ``outcomes``.
            outcomes: those known.

        Returns:
            The ids of commands that are forgotten for it.
        """
        self._commands[command.id] = command
        command.outcomes.update(outcomes)
        for replica in command.replicas:
            if replica not in command.outcomes:
                command.waiting[replica] = None
                self._unanswered.setdefault(replica, {})[command.id] = None
        return self._finish(command) if command.done else []

    def unanswered(self, replica: str) -> list[Command]:
        """What a replica has to answer, in the order in which it was told."""
        return [self._commands[id] for id in self._unanswered.get(replica, ())]

    def answer(self, id: str, replica: str, outcome: Outcome) -> tuple[Command | None, list[str]]:
        """Take what a replica made of a command.

        Returns:
            The command, or None where the replica does not have to answer it, or has; and the ids of commands that
            are forgotten.
        """
        command = self._commands.get(id)
        if command is None or replica not in command.waiting:
            return None, []
        del command.waiting[replica]
        command.outcomes[replica] = outcome
        unanswered = self._unanswered[replica]
        del unanswered[id]
        if not unanswered:
            del self._unanswered[replica]
        return command, self._finish(command) if command.done else []

    def when_done(self, id: str, tell: Callable[[Command], None]) -> Callable[[], None]:
        """Have ``tell`` called once everybody has answered; returns what ends that."""
        waiters = self._waiters.setdefault(id, [])
        waiters.append(tell)

        def leave() -> None:
            if tell in waiters:
                waiters.remove(tell)
            if not waiters and self._waiters.get(id) is waiters:
                del self._waiters[id]

        return leave

    def take_waiters(self, id: str) -> list[Callable[[Command], None]]:
        """Those who wait for a command that is done."""
        return self._waiters.pop(id, [])

    def _finish(self, command: Command) -> list[str]:
        self._done[command.id] = None
        forgotten = []
        while len(self._done) > self._keep:
            oldest = next(iter(self._done))
            del self._done[oldest]
            del self._commands[oldest]
            forgotten.append(oldest)
        return forgotten


def check_command(kind: Any, params: Any) -> None:
    """See that a command makes sense before anybody is told.

    Raises:
        WrongArguments: there is no such kind, or its parameters are not those of the kind.
    """
    if kind not in COMMANDS:
        raise WrongArguments(f"there is no command {kind!r:.80}; choose one of {', '.join(COMMANDS)}")
    if not isinstance(params, dict) or not all(isinstance(key, str) for key in params):
        raise WrongArguments(f"the parameters of {kind} are names and values, not {params!r:.80}")
    if kind == "update_config" and not params:
        raise WrongArguments("update_config needs at least one key and its value")
    if kind == "inject":
        check_fault(params.get("fault"), params.get("params", {}), params.get("duration"))
    if kind == "remove_fault" and not isinstance(params.get("injection"), str):
        raise WrongArguments("remove_fault needs the id of the fault, as `injection`")
    if kind in ("device_failed", "deactivate_device", "reactivate") and not isinstance(params.get("device"), str):
        raise WrongArguments(f"{kind} needs the uuid of a device, as `device`")
