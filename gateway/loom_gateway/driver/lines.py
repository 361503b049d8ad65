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
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.actor import MethodSpecifier
from monarch._rust_bindings.monarch_hyperactor.endpoint import ActorEndpoint
from monarch.actor import ActorError, Channel

from loom.wire.arrays import passing_on
from loom_gateway.driver.answers import Answer, Gatherer, Key

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
        self._alive = _sentinel(mesh)
        self._waiting: deque[tuple[Key, str]] = deque()
        self._replies = 0
        self._watched = False
        self.broken = False
        """Whether the actor is dead, as far as the line knows; it takes no more calls then."""
        threading.Thread(target=self._receive, name="line", daemon=True).start()

    def call(self, key: Key, name: str, endpoint: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call an endpoint that `takes_lines`; its outcome goes to ``answer``. By one thread at a time.

        No argument may be a mesh: Monarch makes such a call later, or never, and the replies would be mixed up.

        Raises:
            Exception: whatever Monarch raises if it does not take the call, which was then not made.
        """
        waiting = (key, name)
        self._waiting.append(waiting)
        try:
            endpoint._send(args, kwargs, self._port, "all")
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
