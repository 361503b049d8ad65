"""What the weaver wants to be respawned: replicas whose device has failed, where their group's policy says so."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from loom.beside import Session
from loom.errors import LoomError

__all__ = ["RespawnOrders"]

_log = logging.getLogger("loom")

ASK_EVERY = 0.5
"""Seconds."""

MOST_AT_ONCE = 1000


class RespawnOrders:
    """Asks the weaver again and again, in a thread of its own; while it is away, later.

    Args:
        session: that knows the weaver.
        wanted: called with each replica, and the reason.
    """

    def __init__(self, session: Session, wanted: Callable[[str, str], object]) -> None:
        self._session = session
        self._wanted = wanted
        self._last: int | None = None
        """The id of the last event that was looked at; None before the weaver has said where they are."""
        self._over = threading.Event()
        threading.Thread(target=self._run, name="respawn orders", daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(ASK_EVERY):
            try:
                self._ask()
            except LoomError as error:
                _log.debug("nobody says what is to be respawned: %s", error)

    def _ask(self) -> None:
        if self._last is None:
            self._last = self._session.ask_weaver("status", {})["event"]
            return
        what = {"after": self._last, "kind": "respawn_wanted", "limit": MOST_AT_ONCE}
        for event in self._session.ask_weaver("events", what):
            self._last = event["id"]
            self._wanted(event["replica"], event["reason"])
