"""The weaver of a gateway: a process of its own, or one elsewhere that other gateways may use, too.

Its own process is started, found again by the next gateway, and started again when it dies. It has a folder in the
gateway's state folder, with the same kinds of files as a driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path

from loom.control.operations import GetStatus
from loom.errors import LoomError
from loom.process import tasks
from loom.process.backoff import Backoff
from loom.process.child import python
from loom.process.identity import start_time
from loom.weaver.client import WeaverClient
from loom.weaver.keys import Keys, read_secret
from loom_gateway.driver.monarch.root_client import address_towards
from loom_gateway.sessions.driver_process import AdoptedDriver, DriverProcess, NotOurDriver, OwnDriver
from loom_gateway.sessions.state_dir import DriverFiles
from loom_gateway.workers.sources import WorkerList

logger = logging.getLogger(__name__)

START_TIMEOUT = 30.0  # seconds that a weaver has to come up
END_TIMEOUT = 5.0  # seconds that a weaver has to store its state and exit before it is killed
BACKOFF = Backoff(0.05, 15.0)  # seconds before a weaver that died is started again
STEADY = 30.0  # seconds after which a weaver's death does not count as early, so that the pauses start anew
ANSWERS_WITHIN = 5.0  # seconds that a weaver elsewhere has to take a connection, and to answer
CANCEL_AGAIN = 0.1  # seconds between two attempts to cancel the supervision


class GatewayWeaver(ABC):
    """The weaver as a gateway sees it.

    Args:
        place: where it is, as for `WeaverClient`.
    """

    is_own = False
    """True if the weaver is a process of this gateway's."""
    backoff = BACKOFF
    """Pauses before the weaver is looked for again."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.client = WeaverClient(place, lambda: self.keys().gateway())
        self._keeping: asyncio.Task[None] | None = None

    @property
    def process(self) -> DriverProcess | None:
        """The weaver's process, if it is the gateway's own and lives."""
        return None

    @abstractmethod
    def keys(self) -> Keys:
        """Return the keys to the weaver."""

    @abstractmethod
    async def _run(self) -> None:
        """Have the client reach the weaver, and return when it is away."""

    def start(self) -> None:
        self._keeping = tasks.keep_running("keep the weaver", self._run, self.backoff, STEADY)

    async def close(self, end: bool) -> None:
        """Stop keeping the weaver, and end it if it is the gateway's own and not left to the next one."""
        if self._keeping is not None:
            # Cancel repeatedly: before Python 3.12, `asyncio.wait_for` may lose a cancellation that arrives
            # together with the result that it waits for.
            while not self._keeping.done():
                self._keeping.cancel()
                await asyncio.wait([self._keeping], timeout=CANCEL_AGAIN)
            with contextlib.suppress(asyncio.CancelledError):
                self._keeping.result()
        self.client.close()
        if end and self.process is not None:
            await self.process.end("the gateway was stopped", END_TIMEOUT)

    def abandon(self) -> None:
        """Make sure that a weaver of this gateway's ends when this process ends with its parent. On any thread."""
        if self.process is not None:
            self.process.abandon()


class RemoteWeaver(GatewayWeaver):
    """A weaver elsewhere.

    Args:
        place: its ``HOST:PORT``.
        secret: the weaver's.
    """

    backoff = Backoff(0.1, 2.0)

    def __init__(self, place: str, secret: bytes) -> None:
        super().__init__(place)
        self._keys = Keys(secret)
        self._since: str | None = None
        """When it was noticed to be away; None if it is there."""

    def keys(self) -> Keys:
        return self._keys

    async def _run(self) -> None:
        why = "it closed the connection"
        try:
            await self.client.stay_connected(ANSWERS_WITHIN, self._came)
        except (LoomError, OSError) as error:
            why = str(getattr(error, "strerror", None) or error)
        away = self._since is not None
        self._since = self._since or time.strftime("%Y-%m-%d %H:%M:%S %Z")
        text = f"the weaver at {self.place} does not answer since {self._since}: {why}"
        self.client.went(text)
        if not away:
            logger.error("%s", text)

    def _came(self) -> None:
        if self._since is not None:
            logger.warning("the weaver at %s answers again", self.place)
        self._since = None
        self.client.came()


class WeaverSupervisor(GatewayWeaver):
    """Keeps a weaver of the gateway's own running.

    Args:
        workers: waits for the workers and returns them.
        listen: the weaver's ``HOST:PORT`` for threadlets; None: this machine's address towards the workers, and the
            previous port, or any.
        advertise: the host that threadlets are told, if it differs from that of ``listen``.
        exit_with_gateway: whether the weaver ends with the gateway.
        linger: seconds that the weaver lives without a gateway, drivers and replicas.
        passable: whether drivers have user ids of their own.
        prepare: called with the weaver's folder before a weaver is started, or taken over.
    """

    is_own = True

    def __init__(
        self,
        folder: str,
        workers: Callable[[], Awaitable[WorkerList]],
        listen: str | None = None,
        advertise: str | None = None,
        exit_with_gateway: bool = False,
        linger: float = 3600.0,
        passable: bool = False,
        prepare: Callable[[Path], object] = lambda folder: None,
    ) -> None:
        self._files = DriverFiles(os.path.join(folder, "weaver"))
        super().__init__(self._files.socket)
        self._prepare = prepare
        self._passable = passable
        self._linger = linger
        self._secret: bytes | None = None  # the weaver's, once this gateway has read or made it
        self._workers = workers
        self._listen = listen
        self._advertise = advertise
        self._exit_with_gateway = exit_with_gateway
        self._process: DriverProcess | None = None

    @property
    def process(self) -> DriverProcess | None:
        return None if self._process is None or self._process.exited.is_set() else self._process

    def keys(self) -> Keys:
        return Keys(self._secret or self._share_secret())

    def _prepare_folder(self) -> None:
        self._share_secret()
        self._prepare(Path(self._files.socket).parent)

    def _share_secret(self) -> bytes:
        """Return the secret in the weaver's folder; one that was lost with the folder is written again."""
        folder = Path(self._files.socket).parent
        folder.mkdir(0o700, parents=True, exist_ok=True)
        self._secret = read_secret(folder, self._secret)
        return self._secret

    async def _run(self) -> None:
        try:
            process = self._adopt() or await self._start()
        except (LoomError, OSError) as error:
            why = f"it did not come up: {error}"
        else:
            self.client.came()
            with contextlib.suppress(LoomError):
                # this also keeps a connection open, so that the weaver does not linger out
                await self.client.ask_for(GetStatus())
            await process.exited.wait()
            last = "\n".join(process.output)
            why = f"it {process.how_it_ended}" + (f"; its last output:\n{last}" if last else "")
        self.client.went(f"the weaver is away: {why}. It is started again by itself")
        logger.error("the weaver is away and is started again: %s", why)

    def _adopt(self) -> DriverProcess | None:
        """Take over the weaver of an earlier gateway."""
        try:
            address = self._files.read_record().address
            if not address:
                raise NotOurDriver("its gateway ended before it had come up")
            if not self._has_secret():
                raise NotOurDriver("it is of an older Loom, or its secret was removed")
            process = AdoptedDriver.adopt(self._files)
        except (NotOurDriver, OSError, ValueError) as reason:
            logger.info("no weaver is adopted: %s", reason)
            self._clear_away()
            return None
        self._prepare(Path(self._files.socket).parent)
        self._process = process
        logger.info("the weaver goes on: process %d", process.pid)
        return process

    def _has_secret(self) -> bool:
        return (Path(self._files.socket).parent / "secret").exists()

    def _clear_away(self) -> None:
        """Kill a process that holds the folder but is no usable weaver, and remove its files."""
        with contextlib.suppress(OSError, ValueError):
            record = self._files.read_record()
            if start_time(record.pid) == record.started:
                os.kill(record.pid, signal.SIGKILL)
        self._files.remove()

    async def _start(self) -> DriverProcess:
        await asyncio.to_thread(self._prepare_folder)
        listen = self._listen
        if listen is None:
            workers = (await self._workers()).addresses
            host = await asyncio.to_thread(address_towards, workers) if workers else "127.0.0.1"
            listen = f"[{host}]:0" if ":" in host else f"{host}:0"
        # released once its record is written, so that the next gateway finds it
        arguments = ["--local", "--await-release", "--listen", listen, "--linger", str(self._linger)]
        if self._advertise is not None:
            arguments += ["--advertise", self._advertise]
        if self._exit_with_gateway:
            arguments.append("--exit-with-parent")
        if self._passable:
            arguments.append("--passable")
        command = python("loom.weaver", "--state", os.path.dirname(self._files.socket), *arguments)
        process = self._process = await OwnDriver.start("the weaver", self._files, command)
        announced = await process.come_up(START_TIMEOUT)
        await process.note(lambda _: {"address": str(announced["address"])})
        return process
