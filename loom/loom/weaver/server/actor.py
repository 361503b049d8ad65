"""`WeaverActor`: the actor mesh ``weaver`` of each session, by which actors and runs ask the weaver."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from loom import driver_api
from loom.actor import Actor, concurrent_endpoint
from loom.errors import LoomError

WEAVER_MESH = "weaver"
"""The name of the mesh, by which Monarch's ``get_or_spawn_controller`` finds it."""


class WeaverActor(Actor):
    """Asks the weaver for others. It runs in a session's driver, and uses the session's key."""

    @concurrent_endpoint  # a request that waits for replicas does not delay the next one
    async def ask(self, operation: str, arguments: Mapping[str, Any], timeout: float) -> tuple[str | None, Any]:
        """Do one of `OPERATIONS`; return (None, its result), or the code and the text of a `LoomError`.

        Args:
            timeout: seconds that the weaver has to answer.
        """
        try:
            return None, await asyncio.wrap_future(driver_api.session().begin(operation, arguments, timeout))
        except LoomError as error:
            return error.code, str(error)
