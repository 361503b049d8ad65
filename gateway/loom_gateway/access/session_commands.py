"""The audit of what sessions ask of the weaver without the gateway: commands, policies and faults."""

from __future__ import annotations

import asyncio

from loom.errors import LoomError
from loom.weaver.client import WeaverClient
from loom.weaver.keys import EVERYONE
from loom_gateway.access.audit import Audit

BETWEEN_ATTEMPTS = 1.0  # seconds between two attempts to reach a weaver that is away


async def audit_session_commands(weaver: WeaverClient, audit: Audit) -> None:
    """Write a line for each, and tell the weaver with the next request that it is written. Never returns."""
    trail, last = "", 0
    while True:
        await weaver.available()
        try:
            found = await weaver.ask("audit", user=EVERYONE, trail=trail, last=last)
        except LoomError:
            await asyncio.sleep(BETWEEN_ATTEMPTS)
            continue
        written = [audit.put("commanded", None, "", **entry) for entry in found["entries"]]
        await asyncio.gather(*map(asyncio.wrap_future, written))
        trail, last = found["trail"], found["last"]
