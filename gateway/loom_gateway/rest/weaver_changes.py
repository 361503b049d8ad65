"""The changes that users make through the weaver: commands, faults and policies, by REST or over the WebSocket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from loom.chaos.faults import MAX_DURATION, Place, check_fault
from loom.control.aliases import translate
from loom.control.arguments import IDENTITY
from loom.control.commands import CommandKind
from loom.control.operations import MAX_WAIT
from loom.errors import WrongArguments
from loom.weaver.client import WeaverClient
from loom.weaver.policy import Action
from loom.weaver.views import InjectionState
from loom_gateway.access.sessions import Principal
from loom_gateway.rest.faults import Components

Identity = Annotated[str, Field(pattern=f"^{IDENTITY}$")]

Name = Annotated[str, Field(min_length=1, max_length=500)]

UserCommandKind = Literal[
    CommandKind.UPDATE_CONFIG,
    CommandKind.PAUSE,
    CommandKind.RESUME,
    CommandKind.STOP,
    CommandKind.DRAIN,
    CommandKind.DEACTIVATE_DEVICE,
    CommandKind.REACTIVATE,
]
"""The kinds of command that users give. The other kinds follow from a failure or a fault."""


class CommandRequest(BaseModel, extra="forbid"):
    """A command to give. Its kind may also be one of torchLoom's names, such as ``pause_training``."""

    kind: UserCommandKind
    target: str | list[str] | None = None
    """A replica's id, a group, a glob over both, ``*`` for all, or a list of ids; among the caller's replicas.
    Without it all are meant; of a command about devices, those on them."""
    params: dict[str, Any] = {}
    """For update_config, keys and their values; for deactivate_device and reactivate, ``device`` with the device's
    uuid, or ``group`` with the name of a group or replica, whose devices are meant; those on them are told."""
    wait: Annotated[float, Field(ge=0, le=MAX_WAIT)] = 0.0
    """Seconds to wait for acknowledgements before the answer."""
    id: Identity | None = None
    """An id for the command, of the caller's choice: a second request with the same id gives no second command."""
    announced: bool = False
    """Whether an update_config is news of a configuration and nobody's command: a training that takes updates by
    ``get_config_update`` gets the values alone, without ``_is_weaver_command``."""

    @model_validator(mode="before")
    @classmethod
    def _translated(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("kind"), str):
            return given
        params = given.get("params") or {}
        if not isinstance(params, dict):
            return given
        try:
            kind, target, params = translate(given["kind"], given.get("target"), params)
        except WrongArguments as error:
            raise ValueError(str(error)) from error
        return {**given, "kind": kind, "target": target, "params": params}


class ConfigUpdate(BaseModel, extra="forbid"):
    """New values of a replica's configuration, as torchLoom's page sends them."""

    replica_id: Name
    """A replica's id, a group, a glob over both, or ``*`` for all."""
    config_params: Annotated[dict[str, Any], Field(min_length=1)]
    """Keys and their values."""

    def to_command(self, wait: float = 0.0) -> CommandRequest:
        """Return the update as a command; ``wait`` is in seconds."""
        asked = {"target": self.replica_id, "params": self.config_params, "wait": wait}
        return CommandRequest.model_validate({"kind": "update_config", **asked})


class FaultRequest(BaseModel, extra="forbid"):
    """A fault to inject."""

    fault: Annotated[str, Field(max_length=200)]
    """The kind of fault, such as sigkill; `loom inject list` shows all kinds."""
    target: Annotated[str, Field(min_length=1, max_length=500)] | list[str]
    """The replicas, as for a command; for dead_driver a session; for dead_gateway and dead_weaver `*`."""
    params: dict[str, Any] = {}
    duration: Annotated[float, Field(gt=0, le=MAX_DURATION)] | None = None
    """Seconds until the fault is removed; without it, as long as its kind lasts."""
    wait: Annotated[float, Field(ge=0, le=MAX_WAIT)] = 0.0
    """Seconds to wait for acknowledgements before the answer."""
    id: Identity | None = None
    """An id for the fault, of the caller's choice: a second request with the same id injects no second fault.
    A fault of the gateway, the weaver or a driver has none."""


class PolicyRequest(BaseModel, extra="forbid"):
    """The action for replicas when one of their devices fails."""

    group: Annotated[str, Field(min_length=1, max_length=200)]
    """A group, or a glob; ``*`` for all."""
    action: Action


Note = Callable[[str, dict[str, Any]], None]
"""Takes an event and its details for the audit, in place of those that it took before."""


class WeaverChanges:
    """Makes the changes, and notes each for the audit before it is made.

    The caller checks the scope and writes the audit. ``of`` is whose replicas a change is about: see `whose`.
    """

    def __init__(self, weaver: WeaverClient, components: Components) -> None:
        self._weaver = weaver
        self._components = components

    async def give_command(self, asked: CommandRequest, by: Principal, of: dict[str, str], note: Note) -> Any:
        """Give a command to replicas; return its `CommandState` as JSON."""
        target = "*" if asked.target is None else asked.target
        about = {"kind": asked.kind.value, "target": target, "keys": list(asked.params), **about_whose(of)}
        note("commanded", about)
        command: dict[str, Any] = {**asked.model_dump(exclude_none=True), "kind": asked.kind.value}
        state = await self._weaver.do("command", by.token.name, **of, **command)
        note("commanded", {**about, "command": state["id"]})
        return state

    async def inject(self, asked: FaultRequest, by: Principal, of: dict[str, str], note: Note) -> Any:
        """Inject a fault; return its `InjectionState` as JSON.

        Raises:
            Denied: a target is not marked as injectable, or another user has processes on a host to strike.
            ScopeError: the gateway or the weaver is to be struck by anyone but an admin.
        """
        about = {"fault": asked.fault, "target": asked.target, "duration": asked.duration, **about_whose(of)}
        note("injected", about)
        kind, params, duration = check_fault(asked.fault, asked.params, asked.duration)
        if kind.place is Place.GATEWAY:
            if not isinstance(asked.target, str):
                raise WrongArguments(f"{kind.name} strikes one {kind.of}, not {asked.target!r:.80}")
            evidence = await self._components.kill(kind.name, asked.target, by)
            return InjectionState(f"{kind.name}-{evidence['pid']}", (), True, {}, evidence).to_body()
        fault: dict[str, Any] = {"fault": kind.name, "params": params, "duration": duration, "target": asked.target}
        if asked.id is not None:
            fault["id"] = asked.id
        state = await self._weaver.do("inject", by.token.name, **of, **fault, admin=by.is_admin, wait=asked.wait)
        note("injected", {**about, "command": state["id"], "replicas": state["replicas"][:100]})
        return {**state, "evidence": {}}

    async def remove_fault(self, injection: str, by: Principal, of: dict[str, str], note: Note) -> Any:
        """Remove a fault before its time is over; return the `CommandState` of its removal as JSON."""
        note("injected", {"removed": injection[:200], **about_whose(of)})
        return await self._weaver.do("remove_fault", by.token.name, **of, injection=injection)

    async def set_policy(self, asked: PolicyRequest, by: Principal, of: dict[str, str], note: Note) -> Any:
        """Set the action for a group; return all actions by group."""
        note("commanded", {"group": asked.group, "action": asked.action.value, **about_whose(of)})
        return await self._weaver.do("policy", by.token.name, **of, group=asked.group, action=asked.action.value)


def about_whose(of: Mapping[str, str]) -> dict[str, str]:
    """Return whose replicas a request was about, for the audit."""
    return {"of": of["user"], **({"session": of["in_session"]} if "in_session" in of else {})}
