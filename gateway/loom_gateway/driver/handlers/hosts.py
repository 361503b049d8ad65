"""The worker hosts of a session: noticing that one is gone, and using it again when it has come back.

A host may come back at another address, as a pod does that is replaced: the gateway says so, see
`loom_gateway.workers.registry_file`. Monarch's host mesh of the session knows the first addresses only; what is
started on a host that has moved is started through a mesh that was attached to it afterwards.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from loom.errors import SupervisionError, WorkerUnreachable
from loom.wire.messages import Kind, Message
from loom.wire.texts import pack_texts
from loom_gateway.driver.monarch.liveness import watch_host
from loom_gateway.driver.monarch.root_client import attach, probe
from loom_gateway.workers.registry_file import WorkerList
from loom_gateway.workers.sources import parse_worker_address

if TYPE_CHECKING:
    from loom_gateway.driver.session.operations import Handler, Operations

__all__ = ["Hosts"]

logger = logging.getLogger(__name__)

ATTACH_TIMEOUTS = (1.0, 2.0, 4.0, 8.0)
"""Seconds that hosts have to answer each attempt. The first is often lost: it goes out on what was left of the
connection to the worker before, which breaks only then."""


FOLLOW_EVERY = 1.0
"""Seconds between two looks at what the gateway says of the workers, and between two attempts at one that moved."""


class Hosts:
    """The hosts of one session, by number. Everything but `check` and handlers is on the event loop.

    Args:
        session: whose hosts they are.
        workers: their addresses.
    """

    def __init__(self, session: Operations, workers: Sequence[str]) -> None:
        self._session = session
        self._workers = list(workers)
        self._moved: set[int] = set()
        self._at: dict[tuple[str, ...], Any] = {}
        self._following: asyncio.Task[None] | None = None
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._refreshing = asyncio.Lock()
        self._attached: list[Any] = []
        self.handlers: dict[int, Handler] = {Kind.REFRESH_HOSTS: self._refresh}

    def check(self, hosts: Iterable[int]) -> None:
        """Raise `SupervisionError` where one of the hosts is gone."""
        gone = sorted(self._session.lost_hosts.intersection(hosts))
        if gone:
            named = " and ".join(f"worker host {host} at {self._workers[host]}" for host in gone)
            raise SupervisionError(
                f"{named} {'is' if len(gone) == 1 else 'are'} gone: slice the hosts that live or, if a worker was "
                f"started there again, call job.refresh_hosts() first"
            )

    def mesh_on(self, hosts: tuple[int, ...], mesh: Any, python: str = "") -> Any:
        """What to start processes with on some hosts, wherever they are now. On any thread.

        Args:
            hosts: their numbers.
            mesh: Monarch's host mesh of them, as they were when the session was opened.
            python: the interpreter that it starts, if it is not the workers' own.
        """
        if self._moved.isdisjoint(hosts):
            return mesh
        addresses = tuple(self._workers[host] for host in hosts)
        if addresses not in self._at:
            self._at[addresses] = self._attach_to(list(addresses))
        there = self._at[addresses]
        return there.with_python_executable(python) if python else there

    def _attach_to(self, addresses: list[str]) -> Any:
        mesh = attach(addresses, f"back{len(self._attached)}")
        self._attached.append(mesh)  # Monarch might stop what is on a host mesh that nobody holds
        return mesh

    # -- going ----------------------------------------------------------------------------------------------

    def watch(self, read: Callable[[], WorkerList | None]) -> None:
        """Notice it when a host goes, and when it has another address.

        Args:
            read: what the gateway says of the workers.
        """
        for host in range(len(self._workers)):
            self._watch(host)
        self._following = self._session.loop.create_task(self._follow(read))

    def _watch(self, host: int) -> None:
        self._watches[host] = self._session.loop.create_task(self._await_end(host))

    async def _await_end(self, host: int) -> None:
        await watch_host(parse_worker_address(self._workers[host]))
        self._session.host_gone(host)
        self._tell("host_lost", host)

    def _tell(self, event: str, host: int) -> None:
        details = {"host": host, "address": self._workers[host]}
        logger.warning("%s: %s", event, details)
        self._session.send(Message(Kind.EVENT, 0, [event], [pack_texts(details)]))

    # -- moving ---------------------------------------------------------------------------------------------

    async def _follow(self, read: Callable[[], WorkerList | None]) -> None:
        while True:
            said = read()
            for host, address in enumerate(() if said is None else said.addresses):
                if host < len(self._workers) and address != self._workers[host]:
                    self._move(host, address)
            away = self._moved & self._session.lost_hosts
            if away:
                await self._take_back(away)
            await asyncio.sleep(FOLLOW_EVERY)

    def _move(self, host: int, address: str) -> None:
        """Note that a host is at another address now; it counts as gone until a worker answers there."""
        self._watches[host].cancel()
        if host not in self._session.lost_hosts:
            self._session.host_gone(host)
            self._tell("host_lost", host)
        self._workers[host] = address
        self._moved.add(host)

    # -- coming back ----------------------------------------------------------------------------------------

    def _refresh(self, message: Message, started: float) -> None:
        key = self._session.expect(message, started)

        def answer(done: Any) -> None:
            error = done.exception()
            self._session.answer(key, None if error else done.result(), error, eager=True)

        back = self._take_back(self._session.lost_hosts)
        asyncio.run_coroutine_threadsafe(back, self._session.loop).add_done_callback(answer)

    async def _take_back(self, wanted: Iterable[int]) -> list[int]:
        """Use again what hosts have come back; return their numbers."""
        async with self._refreshing:
            lost = sorted(self._session.lost_hosts.intersection(wanted))
            back = await self._session.loop.run_in_executor(None, self._attach_again, lost)
            for host in back:
                self._session.lost_hosts.discard(host)
                self._watch(host)
            await asyncio.gather(*(self._session.syncs.host_back(host) for host in back))
            for host in back:
                self._tell("host_back", host)
            return back

    def _attach_again(self, lost: list[int]) -> list[int]:
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            waiting = [host for host, answers in zip(lost, pool.map(self._answers, lost), strict=True) if answers]
        back: list[int] = []
        for timeout in ATTACH_TIMEOUTS:
            if not waiting:
                break
            back += self._attach(waiting, timeout)
            waiting = [host for host in waiting if host not in back]
        return sorted(back)

    def _answers(self, host: int) -> bool:
        try:
            probe([self._workers[host]])
        except WorkerUnreachable:
            return False
        return True

    def _attach(self, hosts: list[int], timeout: float) -> list[int]:
        attached = []
        until = time.monotonic() + timeout
        meshes = {}
        for host in hosts:
            meshes[host] = self._attach_to([self._workers[host]])
        for host, mesh in meshes.items():
            try:
                mesh.initialized.get(timeout=max(0.0, until - time.monotonic()))
                attached.append(host)
                if host in self._moved:
                    self._at[(self._workers[host],)] = mesh
            except (TimeoutError, RuntimeError) as error:
                logger.warning("host %d does not answer yet: %s", host, str(error).partition("\n\n")[0])
        return attached
