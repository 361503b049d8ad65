"""`RespawnRequests`: replicas that the weaver wants respawned, by their policy, as their device has failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from loom.beside import Session
from loom.errors import LoomError

__all__ = ["RespawnRequests"]

_log = logging.getLogger("loom")

ASK_EVERY = 0.5
"""Seconds."""

MOST_AT_ONCE = 1000


class RespawnRequests:
    """Asks the weaver every half second, in a thread of its own.

    Args:
        session: knows the weaver.
        wanted: called with each replica and the reason.
    """

    def __init__(self, session: Session, wanted: Callable[[str, str], object]) -> None:
        self._session = session
        self._wanted = wanted
        self._last: int | None = None
        """The id of the newest event that was seen; None before the first answer."""
        self._over = threading.Event()
        threading.Thread(target=self._run, name="respawn requests", daemon=True).start()

    def close(self) -> None:
        """Stop asking."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(ASK_EVERY):
            try:
                self._ask()
            except LoomError as error:
                _log.debug("the weaver does not say what to respawn: %s", error)

    def _ask(self) -> None:
        if self._last is None:
            self._last = self._session.ask_weaver("status", {})["event"]
            return
        query = {"after": self._last, "kind": "respawn_wanted", "limit": MOST_AT_ONCE}
        for event in self._session.ask_weaver("events", query):
            self._last = event["id"]
            self._wanted(event["replica"], event["reason"])
