"""The changes that users make through the weaver: commands, faults and policies, by REST or over the WebSocket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, TypeAdapter

from loom.control.faults import Place, check_fault
from loom.control.operations import GiveCommand, InjectFault, Operation
from loom.errors import WrongArguments
from loom.weaver.client import WeaverClient
from loom.weaver.views import InjectionState
from loom_gateway.access.sessions import Principal
from loom_gateway.rest.faults import Components

Op = TypeVar("Op", bound=Operation)

Name = Annotated[str, Field(min_length=1, max_length=500)]


def checked_change(operation: type[Op], given: Mapping[str, Any]) -> Op:
    """Return a change that JSON asks for.

    Raises:
        pydantic.ValidationError: an argument is missing, or makes no sense, or there is no such argument.
        WrongArguments: torchLoom's name for it lacks a target.
    """
    read: Op = _adapter(operation).validate_python(operation.in_own_words(given))  # type: ignore[arg-type]
    return read


@cache
def _adapter(operation: type[Operation]) -> TypeAdapter[Any]:
    return TypeAdapter(operation)


class ConfigUpdate(BaseModel, extra="forbid"):
    """New values of a replica's configuration, as torchLoom's page sends them."""

    replica_id: Name
    """A replica's id, a group, a glob over both, or ``*`` for all."""
    config_params: Annotated[dict[str, Any], Field(min_length=1)]
    """Keys and their values."""

    def to_command(self, wait: float = 0.0) -> GiveCommand:
        """Return the update as a command; ``wait`` is in seconds."""
        asked = {"target": self.replica_id, "params": self.config_params, "wait": wait}
        return checked_change(GiveCommand, {"kind": "update_config", **asked})


Note = Callable[[str, dict[str, Any]], None]
"""Takes an event and its details for the audit, in place of those that it took before."""


class WeaverChanges:
    """Makes the changes, and notes each for the audit before it is made.

    The caller checks the scope and writes the audit. ``of`` is whose replicas a change is about: see `whose`.
    """

    def __init__(self, weaver: WeaverClient, components: Components) -> None:
        self._weaver = weaver
        self._components = components

    async def make(self, asked: Operation, by: Principal, of: dict[str, str], note: Note) -> Any:
        """Make a change; return its result as JSON.

        Raises:
            Denied: a target of a fault is not marked as injectable, or another user has processes on its host.
            ScopeError: the gateway or the weaver is to be struck by anyone but an admin.
        """
        event, about = asked.noted()
        about.update(about_whose(of))
        note(event, about)
        given = {name: value for name, value in vars(asked).items() if value is not None}
        if isinstance(asked, InjectFault):
            kind, given["params"], given["duration"] = check_fault(asked.fault, asked.params, asked.duration)
            if kind.place is Place.GATEWAY:
                if not isinstance(asked.target, str):
                    raise WrongArguments(f"{kind.name} strikes one {kind.of}, not {asked.target!r:.80}")
                evidence = await self._components.kill(kind.name, asked.target, by)
                return InjectionState(f"{kind.name}-{evidence['pid']}", (), True, {}, evidence).to_body()
            given["admin"] = by.is_admin
        state = await self._weaver.do(asked.name, by.token.name, **of, **given)
        if asked.gives:
            hit = {"replicas": state["replicas"][:100]} if isinstance(asked, InjectFault) else {}
            note(event, {**about, "command": state["id"], **hit})
        return {**state, "evidence": {}} if isinstance(asked, InjectFault) else state


def about_whose(of: Mapping[str, str]) -> dict[str, str]:
    """Return whose replicas a request was about, for the audit."""
    return {"of": of["user"], **({"session": of["in_session"]} if "in_session" in of else {})}
