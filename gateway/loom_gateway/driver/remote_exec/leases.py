"""`HeldResource`: a client's hold on a process of a rank, until it lets go or has been silent for too long.

It knows nothing of messages, which are its handler's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from loom.errors import LoomError
from loom_gateway.driver.monarch.mesh_table import MeshEntry

HEARD = 256 << 10  # bytes of output in one answer
UNWRITTEN = 1 << 20  # bytes of input that may wait for a program; then the client has to wait


class HeldResource:
    """A command, a connection or a copy, which ends when its client asks for nothing during ``away`` seconds.

    On the driver's event loop.

    Args:
        process: the proc mesh with the one process.
        actor: Monarch's mesh of the actor that does the work.
        let_go: called when the client has been silent for too long.
    """

    def __init__(self, process: MeshEntry, actor: Any, away: float, let_go: Callable[[], None]) -> None:
        self.process = process
        self.actor = actor
        self.away = away
        self._let_go = let_go
        self._loop = asyncio.get_running_loop()
        self._asking = 0  # requests that have no answer yet
        self._timer: asyncio.TimerHandle | None = None

    @property
    def place(self) -> tuple[int, int]:
        """The id of the proc mesh, and the rank."""
        return self.process.root, self.process.ranks[0]

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Keep it for the time of a request, and ``away`` seconds more."""
        self._asking += 1
        self.forget()
        try:
            yield
        finally:
            self._asking -= 1
            if not self._asking:
                self._timer = self._loop.call_later(self.away, self._let_go)

    def forget(self) -> None:
        """Wait no longer for the client's silence."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def lose(self, error: LoomError) -> None:
        """Note that the process is gone."""


@dataclass
class _Output:
    """Output that the client has not taken yet."""

    pieces: deque[tuple[str, bytes]] = field(default_factory=deque)  # with the name of the stream
    end: tuple[int | None, str] | None = None  # the exit status, or why there is none
    error: LoomError | None = None


class HeldConduit(HeldResource):
    """A command or a connection, whose output waits here for the client."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._output = _Output()
        self._unwritten = 0
        self._changed = asyncio.Event()

    def take(self, kind: str, *values: Any) -> None:
        """Take an event of the `Conduit` in."""
        if kind == "data":
            self._output.pieces.append(values)
        elif kind == "wrote":
            self._unwritten -= values[0]
        else:
            self._output.end = values
        self._change()

    def lose(self, error: LoomError) -> None:
        self._output.error = error
        self._change()

    async def hear(self, timeout: float) -> tuple[list[tuple[str, bytes]], tuple[int | None, str] | None]:
        """Wait for output, at most some seconds. Return it, and how it ended once there is no more."""
        output = self._output
        await self._wait_until(lambda: bool(output.pieces or output.end or output.error), timeout)
        taken, size = [], 0
        while output.pieces and size < HEARD:
            taken.append(output.pieces.popleft())
            size += len(taken[-1][1])
        if taken:
            return taken, None if output.pieces else output.end
        if output.error is not None and output.end is None:
            raise output.error
        return taken, output.end

    async def room(self, size: int, timeout: float) -> bool:
        """Wait until there is room for input; return whether there was within some seconds."""
        if await self._wait_until(lambda: self._unwritten < UNWRITTEN or self._is_over, timeout):
            self._unwritten += size
            return True
        return False

    @property
    def _is_over(self) -> bool:
        return self._output.end is not None or self._output.error is not None

    async def _wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        until = self._loop.time() + timeout
        while not condition() and (left := until - self._loop.time()) > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        return condition()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
