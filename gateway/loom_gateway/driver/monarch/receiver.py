"""A Monarch receiver in two steps: waiting for a message, and unpickling it."""

from __future__ import annotations

from typing import Any

from monarch.actor import Channel


class Receiver:
    """The receiver of a new Monarch port. With ``once``, the port takes one message only."""

    def __init__(self, once: bool = False) -> None:
        self.port, self._native = Channel[Any].open(once=once)  # sending end

    def wait(self) -> Any:
        """Wait for the next message, and return it pickled."""
        return self._native._receiver.recv_task().block_on()

    async def wait_on_loop(self) -> Any:
        return await self._native._receiver.recv_task().spawn_handle()

    def unpickle(self, message: Any) -> Any:
        """Return the unpickled message. Raise the exception that was sent, or why it cannot be unpickled."""
        return self._native._process(message)
