"""REST under ``/api/v1/sessions/{name}/``: a session's replicas, and commands to them, also for its guests."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from loom.weaver.client import WeaverClient
from loom.weaver.views import CommandState
from loom_gateway.access.control import AccessControl
from loom_gateway.access.middleware import DONE
from loom_gateway.rest.exact_json import ExactJson, written_json
from loom_gateway.rest.sessions import Sender
from loom_gateway.rest.weaver import By, ReplicaList
from loom_gateway.rest.weaver_changes import CommandRequest
from loom_gateway.rest.whose import whose


def session_replica_routes(weaver: WeaverClient, access: AccessControl) -> APIRouter:
    """Return the routes. They reach the replicas of the one session only, whoever else's its user has."""
    router = APIRouter(prefix="/api/v1/sessions", tags=["weaver"])

    @router.get("/{name}/replicas", response_model=ReplicaList)
    async def replicas(name: str, principal: Sender) -> Response:
        """The replicas of a session, including failed and finished ones."""
        of = await whose(principal, None, name, "view", access, weaver)
        return written_json(await weaver.ask_json("replicas", **of), replicas=...)

    @router.post("/{name}/commands", response_model=CommandState)
    async def give_command(
        name: str, asked: CommandRequest, request: Request, by: By, principal: Sender
    ) -> Response:
        """Give a command to replicas of a session, as to those of a user; a target means those of the session."""
        of = await whose(principal, None, name, "operate", access, weaver)
        target = "*" if asked.target is None else asked.target
        about = {"kind": asked.kind.value, "target": target, "keys": list(asked.params), "session": name}
        request.scope[DONE] = ("commanded", about)
        command: dict[str, Any] = {**asked.model_dump(exclude_none=True), "kind": asked.kind.value}
        state = await weaver.do("command", by, **of, **command)
        request.scope[DONE] = ("commanded", {**about, "command": state["id"]})
        return ExactJson(state)

    return router
