"""Addresses of torchLoom's weaver, for programs that were written for it: ``POST /api/commands/update-config``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from loom.control.operations import MAX_WAIT
from loom.weaver.views import CommandState
from loom_gateway.rest.exact_json import ExactJson
from loom_gateway.rest.sessions import Sender
from loom_gateway.rest.weaver import REFUSALS, Noted, Of
from loom_gateway.rest.weaver_changes import ConfigUpdate, WeaverChanges

WAIT = 5.0
"""Seconds to wait for acknowledgements before the answer, if the request does not say how many."""

Wait = Annotated[float, Query(ge=0, le=MAX_WAIT, description="Seconds to wait for acknowledgements.")]


def alias_routes(changes: WeaverChanges) -> APIRouter:
    """Return the routes. The `AccessMiddleware` requires scope operate for them."""
    router = APIRouter(prefix="/api/commands", responses=REFUSALS, tags=["weaver"])

    @router.post("/update-config", response_model=CommandState)
    async def update_config(
        asked: ConfigUpdate, principal: Sender, of: Of, note: Noted, wait: Wait = WAIT
    ) -> Response:
        """Change values of replicas' configurations; the same as ``POST /api/v1/weaver/commands``.

        The answer comes once all replicas have acknowledged the change, or the wait is over.
        """
        return ExactJson(await changes.make(asked.to_command(wait), principal, of, note))

    return router
