"""`OneSession`: a user's weaver as a guest of one of the user's sessions sees it, and may command it."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from loom.control.commands import DEVICE_COMMANDS
from loom.errors import Denied, NotFound
from loom.weaver.commands import unknown_command
from loom.weaver.registry import named
from loom.weaver.replicas import Replica
from loom.weaver.serving.arguments import text
from loom.weaver.states import LIVING
from loom.weaver.views import few
from loom.weaver.weaver import Weaver

Answer = Callable[[str, dict[str, Any]], Any]


class OneSession:
    """The operations on the replicas of one session. The user's other replicas do not exist here.

    Args:
        answer: does an operation on all replicas of the user.
    """

    def __init__(self, session: str, weaver: Weaver, answer: Answer) -> None:
        self._session = session
        self._known = weaver.known
        self._answer = answer
        self._operations: dict[str, Callable[[dict[str, Any]], Any]] = {
            "status": self._status,
            "replicas": self._replicas,
            "devices": self._devices,
            "events": self._events,
            "goodput": self._goodput,
            "command": self._command,
            "command_state": self._command_state,
            "replica": lambda arguments: self._of_replica("replica", "id", arguments),
            **{name: self._about_replica(name) for name in ("metrics", "history", "stacks", "profile")},
        }

    def answer(self, operation: str, arguments: dict[str, Any]) -> Any:
        """Do an operation and return its result; the result of one that waits has to be awaited."""
        found = self._operations.get(operation)
        if found is None:
            raise Denied(
                f"{operation!r:.80} reaches beyond session {self._session!r}: only the session's user asks for it"
            )
        return found(arguments)

    @property
    def _own(self) -> dict[str, Replica]:
        return {id: one for id, one in self._known.replicas.items() if one.session == self._session}

    def _about_replica(self, operation: str) -> Callable[[dict[str, Any]], Any]:
        return lambda arguments: self._of_replica(operation, "replica", arguments)

    def _of_replica(self, operation: str, name: str, arguments: dict[str, Any]) -> Any:
        """Do an operation on the replica that an argument names by its id, or by a short name."""
        wanted, own = text(arguments, name), self._own
        found = own.get(wanted) or named(wanted, own.values())
        if found is None:
            raise self._unknown(wanted, own)
        return self._answer(operation, {**arguments, name: found.id})

    def _unknown(self, wanted: object, own: dict[str, Replica]) -> NotFound:
        return NotFound(
            f"no replica of session {self._session!r} is meant by {wanted!r:.80}; it has: {few(own)}",
            code="unknown_replica",
        )

    def _status(self, arguments: dict[str, Any]) -> dict[str, Any]:
        own = self._own
        mine = {
            "replicas": dict(Counter(one.state.value for one in own.values())),
            "devices": len({device for id in own for device in self._known.devices.devices_of(id)}),
            "commands": sum(
                not command.done and own.keys() >= {*command.replicas} for command in self._known.commands
            ),
            "reports": sum(one.seq for one in own.values()),
        }
        return {**self._answer("status", arguments), **mine}

    def _replicas(self, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        return [self._answer("replica", {"id": id}) for id in self._own]

    def _devices(self, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        own = self._own
        known = self._answer("devices", arguments)
        used = ({**one, "replicas": tuple(id for id in one["replicas"] if id in own)} for one in known)
        return [one for one in used if one["replicas"]]

    def _events(self, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events about the session's replicas."""
        if arguments.get("replica") is not None:
            found: list[dict[str, Any]] = self._of_replica("events", "replica", arguments)
            return found
        found = self._answer("events", {**arguments, "replicas": list(self._own)})
        return found

    def _goodput(self, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        jobs = {one.job for one in self._own.values()}
        return [one for one in self._answer("goodput", arguments) if one["job"] in jobs]

    def _command(self, arguments: dict[str, Any]) -> Any:
        if arguments.get("kind") in DEVICE_COMMANDS:
            raise Denied(f"{arguments['kind']} is about a device, which other sessions may use, too")
        target = "*" if arguments.get("target") is None else arguments["target"]
        wanted, own = [target] if isinstance(target, str) else list(target), self._own
        found = [
            one.id for one in own.values() if one.state in LIVING and any(_means(name, one) for name in wanted)
        ]
        if not found:
            raise self._unknown(target, own)
        # No id of the guest's choice: it could be that of a command to other sessions' replicas.
        return self._answer("command", {**arguments, "target": found, "id": None})

    def _command_state(self, arguments: dict[str, Any]) -> Awaitable[Any]:
        command = self._known.commands.get(str(arguments.get("id")))
        if command is not None and not self._own.keys() >= {*command.replicas}:
            raise unknown_command(command.id)
        waiting: Awaitable[Any] = self._answer("command_state", arguments)
        return waiting


def _means(name: str, replica: Replica) -> bool:
    """Return whether a target means a replica: its id, its short name, its group, or a glob over them."""
    return any(fnmatch.fnmatchcase(one, name) for one in (replica.id, replica.short_name, replica.group))
