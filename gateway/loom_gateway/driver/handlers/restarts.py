"""What has to be as it was before a function with restarts is started again in the same driver."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable

from loom.errors import because
from loom.process.backoff import Backoff
from loom.wire.bodies import STDERR
from loom_gateway.driver.monarch.mesh_table import stop_quietly
from loom_gateway.driver.runs.output import RecordedOutput
from loom_gateway.driver.session.context import SessionContext

logger = logging.getLogger(__name__)

BACKOFF = Backoff(1.0, 60.0)  # seconds between two starts of a function that raises

HOSTS_WITHIN = 600.0
"""Seconds that a function waits for lost worker hosts before it is started again without them."""

LOOK_EVERY = 2.0  # seconds between two looks whether lost hosts are back


class CleanStart:
    """Makes room for the next start of a function that has raised. On the event loop."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self.take_hosts_back: Callable[[], Awaitable[object]]
        """Uses lost hosts again that have come back."""

    async def prepare(self, output: RecordedOutput, error: BaseException, attempt: int, left: int) -> None:
        """End what the last start has left running, and wait until a next one may go better.

        Args:
            error: what the function raised.
            attempt: how many starts have failed before, from 0.
            left: how many more there may be after the next one.
        """
        text = "".join(traceback.format_exception(error))
        output.write(STDERR, f"{text}loom: the function is started again; {left} more restarts are left\n")
        output.processes.end_soon()
        await self._stop_meshes(output)
        await asyncio.sleep(BACKOFF.wait(attempt))
        await self._wait_for_hosts(output)

    async def _stop_meshes(self, output: RecordedOutput) -> None:
        """Stop the proc meshes that the function has spawned: the next start spawns its own."""
        spawned, why = output.processes, "its function is started again"
        stops: list[Awaitable[None]] = [stop_quietly(mesh, "of a function", why) for mesh in spawned.native]
        for ident in spawned.meshes:
            entry = self._context.meshes.known(ident)
            if entry is not None and not entry.stopped:
                entry.stopped, entry.stop_reason = True, because("its processes were stopped", why)
                stops.append(self._context.retire(ident, stop_quietly(entry.mesh, entry.name, why)))
        spawned.native.clear()
        spawned.meshes.clear()
        await asyncio.gather(*stops)

    async def _wait_for_hosts(self, output: RecordedOutput) -> None:
        """Wait for lost hosts: while an allocation or a pod ends, a start would be in vain."""
        hosts, until = self._context.hosts, self._context.loop.time() + HOSTS_WITHIN
        told: set[int] = set()
        while hosts.lost and self._context.loop.time() < until:
            if hosts.lost != told:
                told = set(hosts.lost)
                names = ", ".join(f"{host} ({hosts.addresses[host]})" for host in sorted(told))
                output.write(STDERR, f"loom: waiting up to {HOSTS_WITHIN:g} s for the lost hosts {names}\n")
            await self.take_hosts_back()
            if hosts.lost:
                await asyncio.sleep(LOOK_EVERY)
