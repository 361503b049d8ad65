"""The detection of lost worker hosts, and their reuse when they come back; and hosts that join the session.

A host may come back at another address, as a replaced pod does. The gateway reports the new address, and further
hosts; see `loom_gateway.workers.watcher`. A host is watched by a connection to its worker, which says nothing and
breaks when the worker ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Callable, Iterable

from loom.process import tasks
from loom.wire.messages import Kind, Message
from loom_gateway.driver.handlers.sync import Syncs
from loom_gateway.driver.monarch.root_client import unreachable
from loom_gateway.driver.process_link.link import ATTEMPT, RETRY, Refusals, break_after
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.driver.session.replies import Handler, notice
from loom_gateway.workers.sources import WorkerAddress, WorkerList, parse_worker_address

SAME_AFTER = 2 * ATTEMPT  # seconds after the network is back in which the processes of a worker are back too
LOOK_EVERY = 1.0  # seconds between two looks whether processes live


class HostEnd(enum.Enum):
    """Why the watch over a host has ended; the value is the text for people."""

    ENDED = "its worker has ended"
    SILENT = "its worker was silent for too long"
    UNREACHABLE = "its worker could not be reached for too long"
    RESTARTED = "another worker is in its place"


async def watch_host(address: WorkerAddress, patience: float, lives: Callable[[], bool]) -> HostEnd:
    """Return when a worker host is gone: its worker has ended, or has been silent for ``patience`` seconds.

    Monarch keeps a silent connection open, so an idle one reveals the worker's end. Process links do not suffice: a
    process that is still being spawned has none yet. An idle connection outlives a network that is away for less
    than ``patience``. If it was reset all the same, another one tells whether the worker still listens. It may be
    the next worker that does. That has none of the processes of the one before.

    Args:
        lives: tells whether a process of the host is connected.
    """
    loop = asyncio.get_running_loop()
    refusals = Refusals(address.host)
    gone_since = loop.time()
    suspicious = False
    while True:
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(address.host, address.port), ATTEMPT)
        except ConnectionRefusedError:
            suspicious = True
            if refusals.refused(loop.time()):
                return HostEnd.ENDED
        except (OSError, asyncio.TimeoutError):
            refusals.other()
        else:
            connected_at = loop.time()
            end = asyncio.ensure_future(_ends_cleanly(reader, writer, patience))
            try:
                suspected = suspicious and await _done(end, SAME_AFTER)  # still, as it broke too soon to tell
                if suspicious and not suspected and not lives():
                    return HostEnd.RESTARTED
                lived = lives()
                while not await _done(end, LOOK_EVERY):
                    lived = lives()
                clean = end.result()
            except TimeoutError:
                return HostEnd.SILENT
            finally:
                end.cancel()
                await asyncio.wait([end])
                writer.close()  # also if it was cancelled before it began
            refusals = Refusals(address.host, clean)
            suspicious = clean or lived or suspected
            if loop.time() - connected_at >= ATTEMPT:  # else a proxy accepts in its place
                gone_since = loop.time()
                continue  # at once: a worker that has ended refuses the next connection
        if loop.time() - gone_since >= patience:
            return HostEnd.UNREACHABLE
        await asyncio.sleep(RETRY)


async def _done(task: asyncio.Future[bool], seconds: float) -> bool:
    return bool((await asyncio.wait([task], timeout=seconds))[0])


async def _ends_cleanly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: float) -> bool:
    """Wait for the end of a connection. Return whether the worker's machine closed it in order.

    Raises:
        TimeoutError: the worker was silent for ``patience`` seconds.
    """
    try:
        break_after(writer.get_extra_info("socket"), patience)  # may be closed already
        while await reader.read(4096):
            pass
        return True
    except TimeoutError:
        raise
    except OSError:
        return False
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


logger = logging.getLogger(__name__)

ATTACH_TIMEOUTS = (1.0, 2.0, 4.0, 8.0)
"""Seconds that hosts have to answer each attempt. The first attempt is often lost: it uses the remains of the
previous connection to the worker, which breaks only then."""

FOLLOW_EVERY = 1.0  # seconds between reads of the list of workers, and between attempts at a moved worker


class HostWatcher:
    """Watches the hosts of one session. On the event loop, except for the handler."""

    def __init__(self, context: SessionContext, syncs: Syncs) -> None:
        self._context = context
        self._hosts = context.hosts
        self._syncs = syncs
        self._following: asyncio.Task[None] | None = None
        self._watches: dict[int, asyncio.Task[None]] = {}  # one for each host that lives
        self._restarted: set[int] = set()  # lost hosts in whose place a worker has been seen
        self._joining: set[int] = set()  # hosts that have joined the session, and have not answered yet
        self._returned: set[int] = set()  # hosts that are used again, which no client that asked was told of
        self._refreshing = asyncio.Lock()
        self.handlers: dict[int, Handler] = {Kind.REFRESH_HOSTS: self._refresh}

    def start(
        self, read: Callable[[], WorkerList | None], connected: Callable[[], Iterable[tuple[int, int]]]
    ) -> None:
        """Start watching for lost hosts, and for new addresses in the gateway's list of workers.

        Args:
            read: returns the list of workers.
            connected: returns the connected processes, by proc mesh and rank.
        """
        self._connected = connected
        for host in range(len(self._hosts.addresses)):
            self._watch(host)
        self._following = tasks.keep_running("follow the workers", lambda: self._follow(read))

    def _watch(self, host: int) -> None:
        self._watches[host] = tasks.run_to_end("watch a host", lambda: self._await_end(host))

    async def _await_end(self, host: int) -> None:
        address, patience = parse_worker_address(self._hosts.addresses[host]), self._context.link_address.patience
        end = await watch_host(address, patience, lambda: self._lives(host))
        self._gone(host, end.value)
        if end == HostEnd.RESTARTED:
            self._restarted.add(host)

    def leaving(self, procs: int, rank: int, reason: str) -> None:
        """Note that a process's host is about to be left for a reason or, without one, that it is not any more."""
        entry = self._context.meshes.known(procs)
        for host in () if entry is None else entry.hosts[rank : rank + 1]:
            if not reason:
                self._hosts.draining.pop(host, None)
            elif host not in self._hosts.lost and self._hosts.draining.get(host) != reason:
                self._hosts.draining[host] = reason
                self._notify("host_draining", host, reason=reason)

    def _lives(self, host: int) -> bool:
        """Return whether a process on a host is connected."""
        for procs, rank in self._connected():
            entry = self._context.meshes.known(procs)
            # Of a mesh that was stopped no hosts are known, and its processes may be connected for a while.
            if entry is not None and entry.hosts[rank : rank + 1] == (host,):
                return True
        return False

    def _gone(self, host: int, reason: str) -> None:
        self._returned.discard(host)
        self._hosts.lose(host, reason)
        self._syncs.host_gone(host)
        self._context.failures.host_gone(host)
        self._notify("host_lost", host, reason=reason)

    def _notify(self, event: str, host: int, **more: str) -> None:
        details = {"host": host, "address": self._hosts.addresses[host], **more}
        logger.warning("%s: %s", event, details)
        self._context.send(notice(event, details))

    async def _follow(self, read: Callable[[], WorkerList | None]) -> None:
        while True:
            known = read()
            for host, address in enumerate(() if known is None else known.addresses):
                if host == len(self._hosts.addresses):
                    self._joining.add(self._hosts.join(address))
                elif address != self._hosts.addresses[host]:
                    self._move(host, address)
            away = (self._hosts.moved | self._restarted) & self._hosts.lost
            if away:
                await self._take_back(away)
            await asyncio.sleep(FOLLOW_EVERY)

    def _move(self, host: int, address: str) -> None:
        """Note the new address of a host. The host counts as gone until a worker answers there."""
        if host in self._watches:
            self._watches[host].cancel()
        if host not in self._hosts.lost:
            self._gone(host, f"its worker has moved from {self._hosts.addresses[host]} to {address}")
        self._hosts.move(host, address)

    def _refresh(self, message: Message, started: float) -> None:
        self._context.replies.answer_with(message, started, self._asked())

    async def _asked(self) -> list[int]:
        """Return the hosts that are back, or joined, since a client last asked: maybe before it asks."""
        await self.take_lost_back()
        told, self._returned = sorted(self._returned), set()
        return told

    async def take_lost_back(self) -> None:
        """Use all lost hosts again that have come back."""
        await self._take_back(self._hosts.lost)

    async def _take_back(self, wanted: Iterable[int]) -> None:
        """Use the hosts again that have come back."""
        async with self._refreshing:
            lost = sorted(self._hosts.lost.intersection(wanted))
            back = await self._context.loop.run_in_executor(None, self._attach_again, lost)
            for host in back:
                self._hosts.lost.discard(host)
                self._restarted.discard(host)
                self._returned.add(host)
                self._watch(host)
            await asyncio.gather(*map(self._syncs.host_back, back))
            for host in back:
                self._notify("host_joined" if host in self._joining else "host_back", host)
            self._joining.difference_update(back)

    def _attach_again(self, lost: list[int]) -> list[int]:
        addresses = self._hosts.addresses
        silent = unreachable([addresses[host] for host in lost])
        waiting = [host for host in lost if addresses[host] not in silent]
        back: list[int] = []
        for timeout in ATTACH_TIMEOUTS:
            if not waiting:
                break
            back += self._attach(waiting, timeout)
            waiting = [host for host in waiting if host not in back]
        return sorted(back)

    def _attach(self, hosts: list[int], timeout: float) -> list[int]:
        attached = []
        until = time.monotonic() + timeout
        meshes = {host: self._hosts.attach_to([self._hosts.addresses[host]]) for host in hosts}
        for host, mesh in meshes.items():
            try:
                mesh.initialized.get(timeout=max(0.0, until - time.monotonic()))
                attached.append(host)
                self._hosts.back_at(host, mesh)
            except (TimeoutError, RuntimeError) as error:
                logger.warning("host %d does not answer yet: %s", host, str(error).partition("\n\n")[0])
        return attached
