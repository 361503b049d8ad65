"""Standing lines to single actors: one Monarch port that takes the replies of every `call_one` to an actor.

Monarch's own ``call_one`` opens a port for each call. A port that stands costs less than half as much, and its
thread is already waiting when a reply comes. An actor handles its messages one at a time and a port delivers in
order ("reliable in-order messages", ``monarch.actor.Port``), so the first reply is the first call's.

What a port does not tell is that the actor has died. So whenever a reply is long in coming, a `sentinel` is sent
after the calls: a native call of something harmless, which Monarch fails when the actor dies.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.actor import MethodSpecifier, PythonMessageKind
from monarch._rust_bindings.monarch_hyperactor.buffers import Buffer
from monarch._rust_bindings.monarch_hyperactor.endpoint import ActorEndpoint
from monarch._rust_bindings.monarch_hyperactor.pickle import PendingMessage, PicklingState
from monarch.actor import ActorError, Channel, context

from loom.wire.arrays import passing_on
from loom_gateway.driver.monarch.futures import Answer, Gatherer, Key

__all__ = ["MOST_LINES", "Line", "takes_lines"]

MOST_LINES = 64
"""Lines of a session; each has a thread. Actors called after that are called in Monarch's own way."""

UNEASY = 0.1
"""Seconds without a reply after which the line asks whether the actor lives."""

LAST_REPLIES = 0.1
"""Seconds that replies sent before an actor died have to arrive."""

_SENTINEL = "__sizeof__"


def takes_lines(endpoint: Any) -> bool:
    """Whether an endpoint's calls may go over a line: it replies once, before the actor's next message.

    Endpoints that are given their port, as concurrent ones are, reply as often and whenever they like.
    """
    return isinstance(endpoint, ActorEndpoint) and isinstance(endpoint._name, MethodSpecifier.ReturnsResponse)


class Line:
    """The standing line to one actor.

    Args:
        mesh: an actor mesh of exactly one actor.
        loop: the driver's event loop, which watches the sentinels.
        answer: called with each outcome, on the line's thread or the event loop's.
        gatherer: sends the answers.
    """

    def __init__(self, mesh: Any, loop: asyncio.AbstractEventLoop, answer: Answer, gatherer: Gatherer) -> None:
        self._loop = loop
        self._answer = answer
        self._gatherer = gatherer
        port, self._receiver = Channel[Any].open()
        self._port = port._port_ref
        self._mesh = mesh._inner
        self._sender = context().actor_instance
        self._kinds: dict[str, Any] = {}
        """By endpoint, what a message that calls it says of itself; None where its calls may not go over a line."""
        self._alive = _sentinel(mesh)
        self._waiting: deque[tuple[Key, str]] = deque()
        self._replies = 0
        self._watched = False
        self.broken = False
        """Whether the actor is dead, as far as the line knows; it takes no more calls then."""
        threading.Thread(target=self._receive, name="line", daemon=True).start()

    def takes(self, name: str, endpoint: Any) -> bool:
        """Whether the line takes a call of an endpoint now; see `takes_lines`."""
        if name not in self._kinds:
            kind = PythonMessageKind.CallMethod(endpoint._name, self._port, None) if takes_lines(endpoint) else None
            self._kinds[name] = kind
        return self._kinds[name] is not None and not self.broken

    def call(self, key: Key, name: str, endpoint: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call an endpoint that the line `takes`; its outcome goes to ``answer``. By one thread at a time.

        No argument may be a mesh: Monarch makes such a call later, or never, and the replies would be mixed up.

        Raises:
            Exception: whatever Monarch raises if it does not take the call, which was then not made.
        """
        self._make(key, name, lambda: endpoint._send(args, kwargs, self._port, "all"))

    def pass_on(self, key: Key, name: str, pickled: bytes) -> None:
        """The same with ``(args, kwargs)`` as the client pickled them: nothing is unpickled here."""
        buffer = Buffer()
        buffer.write(pickled)
        message = PendingMessage(self._kinds[name], PicklingState(buffer.freeze()))
        # What `_send` does with the message that it makes.
        self._make(key, name, lambda: self._mesh.cast_unresolved(message, "all", self._sender))

    def _make(self, key: Key, name: str, send: Callable[[], None]) -> None:
        waiting = (key, name)
        self._waiting.append(waiting)
        try:
            send()
        except BaseException:
            self._waiting.remove(waiting)
            raise
        if not self._watched:
            self._watched = True
            self._loop.call_soon_threadsafe(self._watch)

    # -- the thread -----------------------------------------------------------------------------------------

    def _receive(self) -> None:
        with passing_on():
            while True:
                self._pass_on_next()

    def _pass_on_next(self) -> None:
        # A method of its own: what it holds, perhaps a gigabyte, is let go of while the next reply is waited for.
        message = self._receiver._receiver.recv_task().block_on()
        key, _ = self._waiting.popleft()
        self._replies += 1
        try:
            value, error = self._receiver._process(message), None
        except BaseException as raised:  # noqa: BLE001 - passed on to the laptop
            value, error = None, raised
        self._answer(key, value, error, False)
        self._gatherer.gathered(more=bool(self._waiting))

    # -- whether the actor lives, on the event loop ---------------------------------------------------------

    def _watch(self) -> None:
        self._loop.call_later(UNEASY, self._look, self._replies)

    def _look(self, replies_before: int) -> None:
        if self._replies != replies_before:
            self._watch()
        elif not self._waiting:
            self._watched = False
            if self._waiting:  # a call came in between and relied on being watched
                self._watched = True
                self._watch()
        else:
            self._alive.call_one().as_asyncio().add_done_callback(self._told)

    def _told(self, done: asyncio.Future[Any]) -> None:
        error = done.exception()
        if error is None or isinstance(error, ActorError):
            self._watch()
        else:
            self.broken = True
            self._loop.call_later(LAST_REPLIES, self._fail, error)

    def _fail(self, error: BaseException) -> None:
        # Those that were answered meanwhile are not answered again.
        for key, name in self._waiting.copy():
            text = str(error).replace(f".{_SENTINEL}()", f".{name.removesuffix('()')}()")
            self._answer(key, None, type(error)(text), True)


def _sentinel(mesh: Any) -> Any:
    method = MethodSpecifier.ReturnsResponse(_SENTINEL)
    return mesh._endpoint(method, object.__sizeof__, None)
