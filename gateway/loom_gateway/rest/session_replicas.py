"""REST under ``/api/v1/sessions/{name}/``: a session's replicas, and commands to them, also for its guests."""

from __future__ import annotations

import fnmatch
from typing import Any

from fastapi import APIRouter, Request, Response

from loom.control.commands import CommandKind
from loom.errors import UnknownReplica, WrongArguments
from loom.weaver.client import WeaverClient
from loom.weaver.states import LIVING
from loom.weaver.views import CommandState
from loom_gateway.access.control import AccessControl
from loom_gateway.access.middleware import DONE
from loom_gateway.rest.exact_json import ExactJson
from loom_gateway.rest.sessions import Sender
from loom_gateway.rest.weaver import By, CommandRequest, ReplicaList
from loom_gateway.sessions.session import Session

_DEVICES = (CommandKind.DEACTIVATE_DEVICE, CommandKind.REACTIVATE)


def session_replica_routes(weaver: WeaverClient, access: AccessControl) -> APIRouter:
    """Return the routes. They reach the replicas of the one session only, whoever else's its user has."""
    router = APIRouter(prefix="/api/v1/sessions", tags=["weaver"])

    @router.get("/{name}/replicas", response_model=ReplicaList)
    async def replicas(name: str, principal: Sender) -> Response:
        """The replicas of a session, including failed and finished ones."""
        session = access.find_session(principal, name, "view", "to see a session's replicas")
        return ExactJson({"replicas": await _replicas(weaver, session)})

    @router.post("/{name}/commands", response_model=CommandState)
    async def give_command(
        name: str, asked: CommandRequest, request: Request, by: By, principal: Sender
    ) -> Response:
        """Give a command to replicas of a session, as to those of a user; a target means those of the session."""
        session = access.find_session(principal, name, "operate", "to send commands to a session's replicas")
        if asked.kind in _DEVICES:
            raise WrongArguments(f"{asked.kind.value} is about a device, which other sessions may use, too")
        about = {"kind": asked.kind.value, "target": asked.target, "keys": list(asked.params)}
        about["session"] = session.name
        request.scope[DONE] = ("commanded", about)
        target = _matching(asked.target, await _replicas(weaver, session), session.name)
        command: dict[str, Any] = {**asked.model_dump(), "kind": asked.kind.value, "target": target}
        state = await weaver.do("command", by, session.user, **command)
        request.scope[DONE] = ("commanded", {**about, "command": state["id"]})
        return ExactJson(state)

    return router


async def _replicas(weaver: WeaverClient, session: Session) -> list[dict[str, Any]]:
    known: list[dict[str, Any]] = await weaver.ask("replicas", user=session.user)
    return [one for one in known if one["session"] == session.name]


def _matching(target: str | list[str], replicas: list[dict[str, Any]], session: str) -> list[str]:
    """Return the ids of the living replicas that a target means: ids, a group, or a glob over both."""
    wanted = [target] if isinstance(target, str) else target
    found = [
        one["id"]
        for one in replicas
        if one["state"] in LIVING
        and any(fnmatch.fnmatchcase(one[key], pattern) for key in ("id", "group") for pattern in wanted)
    ]
    if not found:
        known = ", ".join(repr(one["id"]) for one in replicas[:10]) or "none"
        raise UnknownReplica(f"no replica of session {session!r} is meant by {target!r:.80}; it has: {known}")
    return found
