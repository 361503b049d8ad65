"""The changes that users make through the weaver: commands, faults and policies, by REST or over the WebSocket."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, TypeAdapter

from loom.control.fault_kinds import Place, check_fault
from loom.control.operations import GetUsers, GiveCommand, InjectFault, Operation
from loom.errors import Denied, NotFound, WeaverUnavailable, WrongArguments
from loom.token_file import ADMIN
from loom.weaver.client import WeaverClient
from loom.weaver.keys import EVERYONE
from loom.weaver.views import InjectionState, few
from loom_gateway.access.control import AccessControl
from loom_gateway.access.sessions import Principal
from loom_gateway.sessions.driver_process import DriverProcess
from loom_gateway.weaver_process import GatewayWeaver

BEFORE_THE_END = 0.1  # seconds that the gateway has to send its answer before it is killed


class Components:
    """The components that a fault may kill, if the gateway is injectable."""

    def __init__(self, access: AccessControl, supervisor: GatewayWeaver, injectable: bool) -> None:
        self._access = access
        self._supervisor = supervisor
        self._injectable = injectable

    async def kill(self, kind: str, target: str, by: Principal) -> Mapping[str, Any]:
        """Kill a component; for ``dead_driver``, that of the session ``target``. Return evidence of its end.

        Raises:
            ScopeError: the gateway or the weaver, which all users share, is to be killed by anyone but an admin.
            UnknownSession: the session is not the principal's.
        """
        if not self._injectable:
            raise Denied(
                "this gateway is not marked as injectable: start it with --injectable or with LOOM_INJECTABLE=1",
                code="not_injectable",
            )
        if kind == "dead_driver":
            return await _kill(self._access.find_own_session(by, target, "to kill its driver").driver)
        self._access.require(by, ADMIN, f"to inject {kind}, which strikes all users,")
        if kind == "dead_gateway":
            asyncio.get_running_loop().call_later(BEFORE_THE_END, os.kill, os.getpid(), signal.SIGKILL)
            return {"pid": os.getpid(), "state": f"killed in {BEFORE_THE_END:g} s"}
        if not self._supervisor.is_own:
            raise Denied(f"the weaver at {self._supervisor.place} is no process of this gateway's: kill it there")
        process = self._supervisor.process
        if process is None:
            raise WeaverUnavailable("the weaver is away already")
        return await _kill(process)


async def _kill(process: DriverProcess) -> Mapping[str, Any]:
    began = time.monotonic()
    process.signal(signal.SIGKILL)
    await process.exited.wait()
    return {"pid": process.pid, "state": "gone", "how": process.how_it_ended, "seconds": time.monotonic() - began}


async def whose(
    principal: Principal,
    user: str | None,
    session: str | None,
    scope: str,
    access: AccessControl,
    weaver: WeaverClient,
) -> dict[str, str]:
    """Return whose replicas a request is about, as arguments for `WeaverClient.ask`.

    These are the principal's own; for an admin those of the named user, or with ``*`` everyone's; with a session,
    the replicas of that session only, in which the principal needs the scope.

    Raises:
        WrongArguments: both a user and a session are named.
        ScopeError: the principal names another user and is no admin. Also as `AccessControl.find_session`.
        NotFound: the weaver knows no user of that name.
    """
    if session is not None:
        if user is not None:
            raise WrongArguments("name a user or a session: a session is of one user")
        found = access.find_session(principal, session, scope, "to reach a session's replicas")
        return {"user": found.user, "in_session": found.name}
    own = principal.user
    if user is None or user == own:
        return {"user": own}
    access.require(principal, ADMIN, "to name another user")
    if user == "*":
        return {"user": EVERYONE}
    known = await weaver.ask_for(GetUsers(), user=EVERYONE)
    if user not in known:
        raise NotFound(f"the weaver knows no user {user!r:.80}; it knows {few(known)}")
    return {"user": user}


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
    config_params: Annotated[Mapping[str, Any], Field(min_length=1)]
    """Keys and their values."""

    def to_command(self, wait: float = 0.0, id: object = None) -> GiveCommand:
        """Return the update as a command; ``wait`` is in seconds."""
        asked = {"target": self.replica_id, "params": self.config_params, "wait": wait, "id": id}
        return checked_change(GiveCommand, {"kind": "update_config", **asked})


Note = Callable[[str, Mapping[str, object]], None]
"""Takes an event and its details for the audit, in place of those that it took before."""


class WeaverChanges:
    """Makes the changes, and notes each for the audit before it is made.

    The caller checks the scope and writes the audit. ``of`` is whose replicas a change is about: see `whose`.
    """

    def __init__(self, weaver: WeaverClient, components: Components) -> None:
        self._weaver = weaver
        self._components = components

    async def make(self, asked: Operation, by: Principal, of: Mapping[str, str], note: Note) -> Any:
        """Make a change; return its result as JSON.

        Raises:
            Denied: a target of a fault is not marked as injectable, or another user has processes on its host.
            ScopeError: the gateway or the weaver is to be struck by anyone but an admin.
        """
        event, noted = asked.noted()
        about = {**noted, **about_whose(of)}
        note(event, about)
        given = asked.given()
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
