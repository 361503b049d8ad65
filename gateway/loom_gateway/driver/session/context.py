"""The state that the handlers of one session share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from loom.wire.codec import Decoder, Encoder
from loom_gateway.driver.clients.unread_results import StoredResults
from loom_gateway.driver.monarch.mesh_table import HOST_MESH, HostTable, MeshEntry, MeshTable
from loom_gateway.driver.monarch.objects_for_laptop import Translations
from loom_gateway.driver.monarch.reply_channels import ReplyChannels, sentinel
from loom_gateway.driver.process_link.link import ProcessLinkAddress
from loom_gateway.driver.session.failures import DeadElements, Failures
from loom_gateway.driver.session.replies import Futures, Replies, Send
from loom_gateway.driver.weaver_link import DriverWeaverLink

BRIEFLY = 0.2  # seconds for which an answer about short broadcasts is waited for


class Broadcasts:
    """The broadcasts of one session, and whether actors still work on them. No caller is told their end.

    An actor takes the messages of one sender one after the other. So a call that does nothing is answered when the
    broadcasts before it are over. It is made only on demand, as for a session that has no client or is shown.
    Those of concurrent endpoints are not waited for.
    """

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
        """True if a broadcast may go on; the actors are asked, for the next time. Safe on any thread."""
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


class SessionContext:
    """The shared state of one session.

    Args:
        link_address: where every process of the session ties itself to the driver.
        send: takes a message for the client.
        flush: sends the messages that were not eager.
        has_room: returns whether printed lines may join what waits for the client.
        results: keeps results that no client takes now.
    """

    def __init__(
        self,
        host_mesh: Any,
        addresses: Sequence[str],
        link_address: ProcessLinkAddress,
        weaver: DriverWeaverLink,
        loop: asyncio.AbstractEventLoop,
        send: Send,
        flush: Callable[[], None],
        has_room: Callable[[], bool],
        results: StoredResults,
    ) -> None:
        self.loop = loop
        self.send = send
        self.has_room = has_room
        self.results = results
        self.weaver = weaver
        self.link_address = link_address
        self.hosts = HostTable(addresses)
        self.meshes = MeshTable()
        hosts = MeshEntry("hosts", "hosts", host_mesh, HOST_MESH, ranks=tuple(range(len(host_mesh))))
        self.meshes.add(HOST_MESH, hosts)
        self.decoder = Decoder(self.meshes.resolve)
        self.passing_decoder = Decoder(self.meshes.resolve, passing_on=True)  # does not assemble arrays and tensors
        self.encoder = Encoder(swaps=Translations(self.meshes).swaps)
        dead = self.dead = DeadElements(self.meshes)
        self.broadcasts = Broadcasts(loop, self.meshes)
        self.replies = Replies(loop, self.encoder, send, flush, dead.why_silent)  # operations without an answer
        self.replies.how_died = dead.how_died
        self.futures = Futures(loop, self.replies)  # answers operations with the results of Monarch's futures
        self.channels = ReplyChannels(loop, self.replies, self.meshes)  # faster way to call single actors
        self.failures = Failures(loop, self.meshes, dead, self.replies, self.channels, send, self.hosts)
        self.drives_for: Callable[[int], bool] = lambda operation: False
        """True if the driving client takes the notice ``collect_spans`` for the client that asks an operation."""
        self.guest_of: Callable[[int], str | None] = lambda operation: None
        """Returns the user of the client that asks an operation, if it is not the session's own user."""
        self.caller_is_gone: Callable[[int], bool] = lambda operation: False
        """True if an operation is of a client that called next to the one that drives, and is not connected."""
        self.on_retired: list[Callable[[int], object]] = []  # with the id of a whole mesh that was stopped

    def mesh_of_host(self, host: int) -> Any:
        """Return Monarch's mesh of one worker host, on which processes are started there now."""
        whole = self.meshes.mesh(HOST_MESH)
        first = whole.slice(hosts=slice(host, host + 1)) if host < self.hosts.first else None
        return self.hosts.mesh_on((host,), first)

    async def retire(self, ident: int, stopped: Awaitable[Any]) -> None:
        """Wait until a whole mesh or a part of one has stopped, and release what belongs to a whole one.

        On the event loop.
        """
        try:
            await stopped
        finally:
            entry = self.meshes.known(ident)
            if entry is not None and entry.root == ident and entry.failure is None:
                ids = self.meshes.retire(ident)
                self.channels.retire(ids)
                self.failures.retire(ids)
                for notify in self.on_retired:
                    notify(ident)
