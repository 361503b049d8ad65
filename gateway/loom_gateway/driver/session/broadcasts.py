"""`Broadcasts`: whether actors still work on what was broadcast to them, which nobody is told.

An actor takes the messages of one sender one after the other. So a call that does nothing is answered when the
broadcasts before it are over. It is made only when somebody asks, as for a session that has no client or is shown.
"""

from __future__ import annotations

import asyncio
from typing import Any

from loom_gateway.driver.monarch.fast_call import sentinel
from loom_gateway.driver.monarch.mesh_table import MeshTable

BRIEFLY = 0.2  # seconds for which an answer about short broadcasts is waited for


class Broadcasts:
    """The broadcasts of one session. Those of concurrent endpoints are not waited for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, meshes: MeshTable) -> None:
        self._loop = loop
        self._meshes = meshes
        self._sent: dict[int, None] = {}  # meshes to which something was broadcast since they were asked
        self._asked: dict[asyncio.Future[Any], int] = {}  # the mesh of each call that is not answered

    def note(self, mesh: int) -> None:
        """Note a broadcast to a mesh. Safe on any thread."""
        self._sent[mesh] = None

    @property
    def go_on(self) -> bool:
        """Whether a broadcast may go on; the actors are asked, for the next time. Safe on any thread."""
        meshes = {*self._sent.copy(), *self._asked.copy().values()}
        if meshes:
            self._loop.call_soon_threadsafe(self._ask)
        return any(map(self._lives, meshes))

    async def settle(self) -> None:
        """Ask the actors, and wait for those that answer at once. On the event loop."""
        self._ask()
        if self._asked:
            await asyncio.wait(list(self._asked), timeout=BRIEFLY)

    def _lives(self, mesh: int) -> bool:
        entry = self._meshes.known(mesh)
        return entry is not None and not entry.stopped and entry.failure is None

    def _ask(self) -> None:
        self._asked = {asked: mesh for asked, mesh in self._asked.items() if self._lives(mesh)}
        waited_for = set(self._asked.values())
        for mesh in list(self._sent):
            if mesh in waited_for:
                continue  # it is asked again after its answer
            self._sent.pop(mesh, None)  # before the call, which a later broadcast follows
            entry = self._meshes.known(mesh)
            if entry is not None and self._lives(mesh):
                asked: asyncio.Future[Any] = sentinel(entry.mesh).call().as_asyncio()
                self._asked[asked] = mesh
                asked.add_done_callback(self._answered)

    def _answered(self, asked: asyncio.Future[Any]) -> None:
        self._asked.pop(asked, None)
        if not asked.cancelled():
            asked.exception()  # of a mesh that has failed, where nothing goes on
