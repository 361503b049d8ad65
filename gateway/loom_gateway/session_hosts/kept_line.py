"""`KeptLine`, a line to a session host on which it is asked, and which is opened again when it breaks.

`KeptLines` has one for each session host that there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from loom.errors import LoomError, SessionHostUnreachable, WorkerUnreachable
from loom.process import tasks
from loom.process.backoff import Backoff
from loom_gateway.session_hosts.line import Line, Request, open_line, read_frame
from loom_gateway.workers.sources import WorkerHosts

logger = logging.getLogger(__name__)

AGAIN = Backoff(0.1, 3.0, jitter=0.2)  # seconds before a line to a host is opened again
LOOK_EVERY = 2.0  # seconds between two searches for hosts
ANSWER_TIMEOUT = 30.0  # seconds that a host has for most requests


class KeptLine(ABC):
    """A line to the session host at an address.

    Args:
        request: what the line is for.
    """

    def __init__(self, address: str, key: str, request: Request) -> None:
        self.address = address
        self._key = key
        self._request = request
        self._line: Line | None = None
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self.heard = asyncio.Event()
        """Set while the line holds and the host has told what it tells at first."""
        self.why = "it has not answered yet"
        """Why the line does not hold."""
        self._keeping = tasks.keep_running("keep a line to a session host", self._keep)

    @abstractmethod
    def _take(self, news: Mapping[str, Any]) -> None:
        """Take what the host tells without being asked."""

    async def _keep(self) -> None:
        while True:
            for wait in AGAIN:
                try:
                    self._line = await open_line(self.address, self._key, self._request)
                    await self._listen(self._line)
                except LoomError as error:
                    if str(error) != self.why:
                        logger.warning("%s", error)
                    self.why = str(error)
                except Exception as error:
                    logger.exception("the session host %s says what makes no sense", self.address)
                    self.why = repr(error)
                held = self.heard.is_set()
                self._lose()
                await asyncio.sleep(wait)
                if held:
                    break

    async def _listen(self, line: Line) -> None:
        while True:
            said = await line.take()
            if "answer" in said:
                asked = self._asked.get(said["answer"])
                if asked is not None and not asked.done():
                    asked.set_result(said)
            elif "news" in said:  # a newer host may say more
                self._take(said["news"])

    def _lose(self) -> None:
        self.heard.clear()
        line, self._line = self._line, None
        if line is not None:
            line.close()
        asked, self._asked = self._asked, {}
        for one in asked.values():
            if not one.done():
                one.set_exception(self._unreachable())

    def _unreachable(self) -> SessionHostUnreachable:
        return SessionHostUnreachable(f"the session host {self.address} does not answer: {self.why}")

    async def ask(self, method: str, timeout: float = ANSWER_TIMEOUT, **about: Any) -> Any:
        """Ask the host for something.

        Raises:
            SessionHostUnreachable: the line does not hold; what was asked may have been done.
            LoomError: the host refuses.
        """
        if self._line is None or not self.heard.is_set():
            raise self._unreachable()
        number = next(self._numbers)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._line.send([number, method, about])
            said = await asyncio.wait_for(asked, timeout)
        except asyncio.TimeoutError:
            raise SessionHostUnreachable(
                f"the session host {self.address} has not answered to {method} in {timeout:g} s"
            ) from None
        finally:
            self._asked.pop(number, None)
        if "error" in said:
            read_frame(said["error"])
        return said.get("value")

    async def tell(self, method: str, **about: Any) -> None:
        """Ask the host for something that nobody waits for, if it answers."""
        with contextlib.suppress(LoomError):
            await self.ask(method, **about)

    def close(self) -> None:
        self._keeping.cancel()
        self._lose()


K = TypeVar("K", bound=KeptLine)


class KeptLines(Generic[K]):
    """The lines to the session hosts in some places.

    Args:
        hosts: where they are.
        opened: returns the line to an address.
    """

    def __init__(self, hosts: WorkerHosts, opened: Callable[[str], K]) -> None:
        self._hosts = hosts
        self._opened = opened
        self._lines: dict[str, K] = {}
        self._looking: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()

    def start(self) -> None:
        """Look for hosts from now on."""
        self._looking = tasks.keep_running("look for session hosts", self._look_on)

    def all(self) -> list[K]:
        """Return the lines to all hosts that were found."""
        return list(self._lines.values())

    def heard(self, holds: bool = True) -> list[K]:
        """Return the lines that hold, or those that do not."""
        return [one for one in self.all() if one.heard.is_set() is holds]

    async def all_heard(self) -> None:
        """Wait until the hosts that are found first have told what they tell at first."""
        await self._looked.wait()
        for one in self.all():
            await one.heard.wait()

    async def _look_on(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._hosts.look)
            except WorkerUnreachable as error:
                logger.warning("session hosts: %s", error)
            addresses = self._hosts.addresses
            for address in addresses:
                if address not in self._lines:
                    self._lines[address] = self._opened(address)
            for address, line in list(self._lines.items()):
                if address not in addresses and not line.heard.is_set():  # its pod is gone
                    self._lines.pop(address).close()
            self._looked.set()
            await asyncio.sleep(LOOK_EVERY)

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        for one in self.all():
            one.close()
