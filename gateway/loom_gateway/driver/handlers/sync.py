"""Synchronised folders on their way from the laptop to every host.

The contents first come into the cache of the driver's machine. Then they go to one agent on each host, which
reports the contents that it lacks. New processes see the new folder only when every living host has all of it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
import zlib
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from loom.errors import FileChanged, LoomError, ProtocolMismatch, SyncFailed
from loom.manifest import Blob, Manifest, Span, batches, check_sizes
from loom.wire.bodies import BeginSync, CommitSync, SendPieces
from loom.wire.messages import Kind, Message
from loom_gateway.driver.code_sync.cache import BlobsMissing, Hold, TreeCache
from loom_gateway.driver.code_sync.host_actor import Assembled, FilePart, TreeAgent
from loom_gateway.driver.code_sync.sys_path import DriverPath, OnPath, SyncedTree, make_current
from loom_gateway.driver.monarch.errors import MonarchSupervisionError, is_monarchs
from loom_gateway.driver.monarch.mesh_table import stop_quietly
from loom_gateway.driver.monarch.process_bootstrap import hold_on
from loom_gateway.driver.process_link.link import ProcessLinkAddress
from loom_gateway.driver.process_link.server import ProcessLinkServer
from loom_gateway.driver.runs.restart_file import RestartFile
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.driver.session.replies import Handler

logger = logging.getLogger(__name__)

BATCH = 4 << 20  # bytes of contents in one message to an agent

BATCH_PIECES = 1024

MOST_NAMED = 10  # meshes that a warning names

ATTEMPTS = 3  # to fill a host's gaps; another session may trim the host's cache meanwhile


class Syncs:
    """The synchronised folders of one session."""

    def __init__(self, context: SessionContext, restart_file: RestartFile) -> None:
        self._context = context
        self._restart_file = restart_file
        self._numbers: dict[str, int] = {}  # of the folders in that file, by name
        # A single thread keeps the pieces of an upload in order, and makes a sync wait for the one before it.
        self._thread = ThreadPoolExecutor(1, "sync")
        self._upload: _Upload | None = None
        self._cache: TreeCache | None = None
        self._driver_path = DriverPath()
        self._agents: dict[int, _HostAgent] = {}  # by host
        self._ends: list[asyncio.Event] = []  # of every agent process, by its number on the process links
        self._links: ProcessLinkServer | None = None
        self._starting = asyncio.Lock()
        self._trees: tuple[SyncedTree, ...] = ()  # the newest first
        self._given: dict[int, tuple[SyncedTree, ...]] = {}  # trees of each proc mesh that has some, by its id
        context.on_retired.append(lambda procs: self._given.pop(procs, None))
        self._manifests: dict[str, Manifest] = {}  # manifests of the newest trees, by name
        self.handlers: dict[int, Handler] = {
            Kind.SYNC: self._sync,
            Kind.SYNC_PIECES: self._pieces,
            Kind.SYNC_COMMIT: self._commit,
        }

    def on_path(self, procs: int) -> OnPath | None:
        """Return the object that puts the newest trees on the ``sys.path`` of a new mesh; None if there are none.

        Args:
            procs: id of the proc mesh.
        """
        if not self._trees:
            return None
        self._given[procs] = self._trees
        return OnPath(self._trees)

    def host_gone(self, host: int) -> None:
        agent = self._agents.get(host)
        if agent is not None:
            agent.host_lost.set()

    async def host_back(self, host: int) -> None:
        """Give a worker host that is back, or has joined, the folders of the other hosts. On the event loop."""
        if self._links is None:
            return
        agent = self._agents[host] = self._new_agent(host)
        for name, manifest in self._manifests.items():
            try:
                await self._give(agent, manifest, uuid.uuid4().hex)
            except LoomError as error:
                logger.warning("host %d is back without the folder %r: %s", host, name, error)

    async def restore(self, left: Iterable[Message]) -> None:
        """Take up the folders of an earlier driver, whose contents are in this machine's cache, or in a host's."""
        for message in left:
            manifest = Manifest.unpack(message.parts[0])
            why = ""
            try:
                upload = await self._on_thread(_taking, self._found, manifest)
                found = await self._distribute(upload)
                if found["missing"]:
                    await self._fetch(upload)
                    found = await self._distribute(upload)
                if found["missing"]:
                    why = "some of its files are neither on the driver's machine nor on a host any more"
            except LoomError as error:
                why = str(error)
            if why:
                logger.warning("the synced folder %r is not there again: %s", manifest.name, why)

    def _found(self, manifest: Manifest) -> _Upload:
        self._cache = self._cache or TreeCache.of_this_machine()
        return _Upload(0, manifest)

    async def _fetch(self, upload: _Upload) -> None:
        """Fetch the missing contents of a folder from the hosts. Raise `LoomError` if one breaks."""
        await self._start_agents()
        for host in sorted(self._agents):
            lacking = await self._on_thread(_taking, self._lacking, upload)
            try:
                for batch in batches(lacking, BATCH, BATCH_PIECES):
                    pieces = await self._agents[host].call("give", batch)
                    await self._on_thread(_taking, self._receive_from_host, upload, pieces)
            except (_HostLost, _AgentGone):
                continue
            except Exception as error:
                if isinstance(error, LoomError) and not is_monarchs(error):
                    raise
                raise SyncFailed(f"host {host} cannot give what it has of the folder: {error}") from error

    def _lacking(self, upload: _Upload) -> list[Blob]:
        assert self._cache is not None
        self._cache.forget(upload.key)  # what a host began, another one may have whole
        blobs = upload.manifest.blobs
        return [(digest, blobs[digest]) for digest in self._cache.missing(blobs.items())]

    def _receive_from_host(self, upload: _Upload, pieces: list[FilePart]) -> None:
        assert self._cache is not None
        for piece in pieces:
            self._cache.receive(upload.key, *piece)

    async def stop(self) -> None:
        agents = [agent for host, agent in self._agents.items() if host not in self._context.hosts.lost]
        await asyncio.gather(*(agent.stop() for agent in agents))

    def _sync(self, message: Message, started: float) -> None:
        manifest = Manifest.unpack(message.parts[0])
        check_sizes([(entry.path, entry.size) for entry in manifest.entries], "the cluster's limit")
        self._in_thread(message, started, self._begin, BeginSync.from_body(message.body).sync, manifest)
        # The agents start while the laptop sends.
        asyncio.run_coroutine_threadsafe(self._start_agents(), self._context.loop)

    def _begin(self, ident: int, manifest: Manifest) -> list[str]:
        if self._cache is None:
            self._cache = TreeCache.of_this_machine()
        if self._upload is not None:
            self._cache.forget(self._upload.key)
        self._cache.check_fits(manifest.size)
        self._upload = _Upload(ident, manifest)
        return self._cache.missing(manifest.blobs.items())

    def _pieces(self, message: Message, started: float) -> None:
        self._in_thread(message, started, self._receive, message)

    def _receive(self, message: Message) -> None:
        request = SendPieces.from_body(message.body)
        upload = self._upload
        if upload is None or upload.ident != request.sync or self._cache is None:
            return  # the pieces belong to a sync that was given up
        for (digest, offset, length, compressed), part in zip(request.pieces, message.parts, strict=True):
            size = upload.manifest.blobs.get(digest)
            if size is None or not 0 <= offset <= offset + length <= size:
                raise ProtocolMismatch(f"a piece of {length} bytes at {offset} is of no file of the folder")
            data = _decompressed(part, length) if compressed else part
            if len(data) != length:
                raise ProtocolMismatch(f"a piece of {length} bytes has {len(data)}")
            self._cache.receive(upload.key, digest, size, offset, data)
        upload.has_brought = True

    def _commit(self, message: Message, started: float) -> None:
        upload = self._upload
        if upload is None or upload.ident != CommitSync.from_body(message.body).sync:
            raise FileChanged("another sync of this session has begun meanwhile: sync again")
        self._context.replies.answer_with(message, started, self._distribute(upload))

    def _in_thread(self, message: Message, started: float, work: Callable[..., Any], *args: Any) -> None:
        self._context.replies.answer_when(message, started, self._thread.submit(_taking, work, *args))

    async def _distribute(self, upload: _Upload) -> dict[str, object]:
        """Give the folder to every host, then to the processes that are spawned later."""
        manifest = upload.manifest
        assert self._cache is not None
        try:
            hold = await self._on_thread(_taking, self._cache.assemble, manifest)
        except BlobsMissing as lacking:
            return {"missing": lacking.digests, "warnings": []}
        try:
            await self._start_agents()
            hosts = sorted(self._agents)
            answers = await _all(self._give(self._agents[host], manifest, upload.key) for host in hosts)
            assembled = [answer for answer in answers if answer is not None]
            if not assembled:
                raise SyncFailed("no host can take the folder: all are lost")
        except BaseException:
            hold.close()
            raise
        self._show(manifest, hold, assembled)
        if upload.has_brought:
            self._thread.submit(self._trim, self._cache)
        warnings = list(dict.fromkeys(text for answer in assembled for text in answer.shadowed))
        lost = [host for host, answer in zip(hosts, answers, strict=True) if answer is None]
        warnings += [f"host {host} is lost and does not have the folder" for host in lost]
        warnings += self._outdated(manifest)
        return {"missing": [], "warnings": warnings}

    def _on_thread(self, work: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        return self._context.loop.run_in_executor(self._thread, work, *args)

    def _show(self, manifest: Manifest, hold: Hold, assembled: list[Assembled]) -> None:
        places = tuple(dict.fromkeys(answer.place for answer in assembled))
        tree = SyncedTree(manifest.name, manifest.digest, manifest.roots, places)
        self._driver_path.show(tree, hold, manifest.module_names)
        self._manifests[manifest.name] = manifest
        self._trees = (tree, *(other for other in self._trees if other.name != tree.name))
        make_current(OnPath(self._trees))
        number = self._numbers.setdefault(manifest.name, len(self._numbers))
        kept = BeginSync(number).message(number, [manifest.pack()])
        self._thread.submit(self._keep, kept)

    def _keep(self, folder: Message) -> None:
        """Have the session's next driver show a folder, too, if it has functions to start again."""
        try:
            self._restart_file.keep(folder)
        except (LoomError, OSError) as error:
            logger.warning("a synced folder would not be there again if this driver died: %s", error)

    def _outdated(self, manifest: Manifest) -> list[str]:
        """Return a warning that names the meshes whose processes do not have a folder as it is now."""
        whole = {ident: entry for ident, entry in self._context.meshes.whole("procs") if not entry.stopped}
        now = (manifest.name, manifest.digest)
        old = [
            entry.name
            for ident, entry in whole.items()
            if now not in [tree[:2] for tree in self._given.get(ident, ())]
        ]
        if not old:
            return []
        more = f" and {len(old) - MOST_NAMED} more" if len(old) > MOST_NAMED else ""
        return [
            f"proc meshes that were spawned before keep the code that they had: "
            f"{', '.join(map(repr, old[:MOST_NAMED]))}{more}. Spawn them again to have the folder as it is now"
        ]

    async def _start_agents(self) -> None:
        async with self._starting:
            if self._links is None:
                self._links = ProcessLinkServer(
                    self._context.link_address.host, self._context.link_address.patience
                )
                await self._links.start(lambda number, rank: self._ends[number].set())
        for host in range(len(self._context.hosts.addresses)):
            if host not in self._agents:
                self._agents[host] = self._new_agent(host)

    def _new_agent(self, host: int) -> _HostAgent:
        assert self._links is not None
        return _HostAgent(self._context, host, self._links.address, self._ends)

    async def _give(self, agent: _HostAgent, manifest: Manifest, upload: str) -> Assembled | None:
        """Assemble the tree on a host. Return None if the host is lost."""
        try:
            try:
                return await self._assemble_on(agent, manifest, upload)
            except _AgentGone:
                agent.spawn()
                return await self._assemble_on(agent, manifest, upload)
        except _HostLost:
            return None
        except _AgentGone:
            raise SyncFailed(f"host {agent.host}: the process that keeps synced folders died twice") from None
        except Exception as error:
            if isinstance(error, LoomError) and not is_monarchs(error):
                raise
            cause = getattr(error, "exception", error)
            if isinstance(cause, LoomError) and not isinstance(cause, FileChanged):
                raise type(cause)(f"host {agent.host}: {cause}") from error
            text = f"{type(cause).__name__}: {cause}"
            raise SyncFailed(f"host {agent.host} cannot take the folder: {text}") from error

    async def _assemble_on(self, agent: _HostAgent, manifest: Manifest, upload: str) -> Assembled:
        packed = manifest.pack()
        for _ in range(1 + ATTEMPTS):
            assembled: Assembled = await agent.call("assemble", packed)
            if not assembled.missing:
                return assembled
            lacking = ((digest, manifest.blobs[digest]) for digest in assembled.missing)
            for batch in batches(lacking, BATCH, BATCH_PIECES):
                pieces = await self._on_thread(self._read, batch)
                await agent.call("put", f"{upload}-{agent.host}", pieces)
        raise SyncFailed(f"host {agent.host}: its cache loses files as they come; is LOOM_CACHE_LIMIT too low?")

    @staticmethod
    def _trim(cache: TreeCache) -> None:
        try:
            cache.trim()
        except OSError as error:
            logger.warning("the cache in %s cannot be trimmed: %s", cache.folder, error)

    def _read(self, batch: list[Span]) -> list[FilePart]:
        assert self._cache is not None
        return [
            FilePart(digest, size, offset, self._cache.read(digest, size, offset, count))
            for digest, size, offset, count in batch
        ]


class _Upload:
    """A sync that has begun."""

    def __init__(self, ident: int, manifest: Manifest) -> None:
        self.ident = ident
        self.manifest = manifest
        self.key = uuid.uuid4().hex  # distinguishes this upload from all others on any machine
        self.has_brought = False  # whether contents were missing and have arrived


class _AgentGone(Exception):
    """The process of an agent died."""


class _HostLost(Exception):
    """A worker host is gone."""


class _HostAgent:
    """The agent of a host, hidden from the session's meshes."""

    def __init__(
        self, context: SessionContext, host: int, address: ProcessLinkAddress, ends: list[asyncio.Event]
    ) -> None:
        self.host = host
        self.host_lost = asyncio.Event()
        if host in context.hosts.lost:
            self.host_lost.set()
        self._context = context
        self._address = address
        self._ends = ends
        self.spawn()

    def spawn(self) -> None:
        """Start the agent's process, also after it died."""
        self._gone = asyncio.Event()
        self._ends.append(self._gone)
        here = self._context.mesh_of_host(self.host)
        bootstrap = functools.partial(hold_on, self._address, len(self._ends) - 1)
        self._procs = here.slice(hosts=0).spawn_procs(bootstrap=bootstrap, name="loom_sync")
        self._actor = self._procs.spawn("loom_sync", TreeAgent)

    async def call(self, name: str, *args: Any) -> Any:
        """Call an endpoint. Raise `_HostLost` or `_AgentGone` if no answer will come."""
        if self.host_lost.is_set():
            raise _HostLost
        answer = getattr(self._actor, name).call_one(*args).as_asyncio()
        lost, gone = (asyncio.ensure_future(event.wait()) for event in (self.host_lost, self._gone))
        try:
            await asyncio.wait((answer, lost, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
            gone.cancel()
            answer.add_done_callback(_look_at)
        if answer.done() and not isinstance(answer.exception(), MonarchSupervisionError):
            return answer.result()
        if self.host_lost.is_set():
            raise _HostLost
        raise _AgentGone

    async def stop(self) -> None:
        """Stop the agent's process."""
        await stop_quietly(self._procs, f"loom_sync of host {self.host}", "the session has ended")


def _taking(work: Callable[..., Any], *args: Any) -> Any:
    """Run work on the cache of the driver's machine, and turn its errors into `SyncFailed`."""
    try:
        return work(*args)
    except LoomError:
        raise
    except OSError as error:
        raise SyncFailed(f"the driver's machine cannot take the folder: {error}") from error


def _look_at(done: asyncio.Future[Any]) -> None:
    """Retrieve the result, so that asyncio does not log an error that nothing waits for."""
    if not done.cancelled():
        done.exception()


async def _all(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """Wait for all of the work. Return the results, or raise the first error."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _decompressed(part: Any, length: int) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        return unpacker.decompress(part, length + 1)
    except zlib.error as error:
        raise ProtocolMismatch(f"a compressed piece is broken: {error}") from error
