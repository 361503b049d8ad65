"""The failures of peers, as the training's functions hear of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from loom.control.membership import PeerFailure, PeerFailures

_log = logging.getLogger("loom")

MAX_HEARD = 10_000  # failed processes that a threadlet remembers, to drop repetitions


class PeerWatch:
    """Calls functions with each failure of a peer, once, on a thread of its own.

    It does not wait for a step boundary, which a training that waits for the dead peer in a collective never
    reaches. Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._functions: list[Callable[[str, str], Any]] = []
        self._heard: dict[str, None] = {}  # the instances of failed processes, the oldest first
        self._failures: SimpleQueue[PeerFailure | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, function: Callable[[str, str], Any]) -> None:
        """Call a function with each later failure: the peer's replica id, and the reason."""
        self._functions = [*self._functions, function]

    def take(self, frame: PeerFailures) -> None:
        """Take failures from the weaver, on the link's thread, which must not wait for a function."""
        if not self._functions:
            return
        for failure in frame.failures:
            if failure.instance not in self._heard:
                self._heard[failure.instance] = None
                self._failures.put(failure)
        while len(self._heard) > MAX_HEARD:
            del self._heard[next(iter(self._heard))]
        if self._thread is None:
            self._thread = threading.Thread(target=self._call, name="loom-peers", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._failures.put(None)

    def _call(self) -> None:
        while (failure := self._failures.get()) is not None:
            for function in self._functions:
                try:
                    function(failure.replica, failure.reason)
                except BaseException:  # noqa: BLE001 - the user's own code, such as sys.exit(), must not end the thread
                    _log.exception("a function for the failure of %s raised", failure.replica)
