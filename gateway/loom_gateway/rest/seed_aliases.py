"""Addresses of torchLoom's weaver, for programs that were written for it: ``POST /api/commands/update-config``."""

from __future__ import annotations

from fastapi import APIRouter, Response

from loom.weaver.views import CommandState
from loom_gateway.rest.exact_json import ExactJson
from loom_gateway.rest.sessions import Sender
from loom_gateway.rest.weaver import REFUSALS, Noted, Of
from loom_gateway.rest.weaver_changes import ConfigUpdate, WeaverChanges


def alias_routes(changes: WeaverChanges) -> APIRouter:
    """Return the routes. The `AccessMiddleware` requires scope operate for them."""
    router = APIRouter(prefix="/api/commands", responses=REFUSALS, tags=["weaver"])

    @router.post("/update-config", response_model=CommandState)
    async def update_config(asked: ConfigUpdate, principal: Sender, of: Of, note: Noted) -> Response:
        """Change values of replicas' configurations; the same as ``POST /api/v1/weaver/commands``."""
        return ExactJson(await changes.give_command(asked.to_command(), principal, of, note))

    return router
