"""Monarch receivers in two steps: waiting for a message, and unpickling it.

Monarch 0.7 offers the two steps. From 0.8 on a receiver unpickles a message while it receives it, and says of which
rank it is only if every message has one. So a receiver that needs the ranks takes the messages out on their way.
"""

from __future__ import annotations

import pickle
import queue
from typing import Any, NamedTuple, Protocol

from monarch._rust_bindings.monarch_hyperactor.actor import PythonMessage, PythonMessageKind
from monarch._rust_bindings.monarch_hyperactor.buffers import Buffer
from monarch.actor import Channel, Port, context

from loom_gateway.workers.monarch_env import monarch_version


class Receiver(Protocol):
    """The receiver of a new Monarch port. The result of `wait` is good for the same receiver's other methods."""

    port: Any
    """The sending end."""

    def wait(self) -> Any:
        """Wait for the next message, and return it. Not on the event loop."""

    async def wait_on_loop(self) -> Any:
        """Wait for the next message, and return it."""

    def rank(self, message: Any) -> int | None:
        """Return the rank of the actor that replied with a message; None if the message has no rank."""

    def unpickle(self, message: Any) -> Any:
        """Return the unpickled message. Raise the exception that was sent, or why it cannot be unpickled."""


def open_for_replies() -> Receiver:
    """Open a port for replies, whose ranks nobody asks for."""
    return _TwoSteps(once=False) if monarch_version() < (0, 8) else _OneStep(once=False)


def open_for_messages(once: bool) -> Receiver:
    """Open a port for messages of any sender. With ``once``, it takes one message only.

    From Monarch 0.8 on, the one message of a port with ``once`` has no rank.
    """
    if monarch_version() < (0, 8):
        return _TwoSteps(once)
    return _OneStep(once) if once else _Intercepting()


class _TwoSteps:
    """A receiver of Monarch 0.7."""

    def __init__(self, once: bool) -> None:
        self.port, self._native = Channel[Any].open(once=once)

    def wait(self) -> Any:
        return self._native._receiver.recv_task().block_on()

    async def wait_on_loop(self) -> Any:
        return await self._native._receiver.recv_task().spawn_handle()

    def rank(self, message: Any) -> int | None:
        return _rank(message)

    def unpickle(self, message: Any) -> Any:
        return self._native._process(message)


class _Received(NamedTuple):
    value: Any
    error: BaseException | None


class _OneStep:
    """A receiver of Monarch 0.8. In `wait`, the calling thread unpickles the message."""

    def __init__(self, once: bool) -> None:
        self.port, native = Channel[Any].open(once=once)
        self._native = native._receiver

    def wait(self) -> _Received:
        try:
            return _Received(self._native.recv(False).block_on(), None)
        except BaseException as error:  # noqa: BLE001 - raised by `unpickle`
            return _Received(None, error)

    async def wait_on_loop(self) -> _Received:
        try:
            return _Received(await self._native.recv(False).spawn_handle(), None)
        except Exception as error:  # noqa: BLE001 - raised by `unpickle`
            return _Received(None, error)

    def rank(self, message: _Received) -> int | None:
        return None

    def unpickle(self, message: _Received) -> Any:
        if message.error is not None:
            raise message.error
        return message.value


class _Intercepting:
    """A receiver of Monarch 0.8 whose messages keep their ranks.

    Its port accumulates: Monarch calls an accumulator with each message before the receiver. This one keeps the
    message. The receiver gets an empty one instead, or one for several, which only says that there are messages.
    """

    def __init__(self) -> None:
        instance = context().actor_instance
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        handle, self._native = instance._mailbox.open_accum_port(_Keep(self._messages))
        self.port = Port(handle.bind(), instance._as_rust(), None)

    def wait(self) -> Any:
        while True:
            try:
                return self._messages.get_nowait()
            except queue.Empty:
                self._native.recv(False).block_on()

    async def wait_on_loop(self) -> Any:
        while True:
            try:
                return self._messages.get_nowait()
            except queue.Empty:
                await self._native.recv(False).spawn_handle()

    def rank(self, message: Any) -> int | None:
        return _rank(message)

    def unpickle(self, message: Any) -> Any:
        value = message.decode()
        if isinstance(message.kind, PythonMessageKind.Exception):
            raise value
        return value


class _Keep:
    """Monarch's accumulator that keeps each message, and hands on an empty one."""

    reducer = None

    def __init__(self, messages: queue.SimpleQueue[Any]) -> None:
        self._messages = messages
        empty = Buffer()
        empty.write(pickle.dumps(None))
        self.initial_state = PythonMessage(PythonMessageKind.Result(None), empty.freeze(), [])

    def __call__(self, state: Any, update: Any) -> Any:
        self._messages.put(update)
        return state


def _rank(message: Any) -> int | None:
    rank: int | None = getattr(message.kind, "rank", None)
    return rank
