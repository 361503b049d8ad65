"""`SessionLeases`: which session host may have a session, where sessions move from a dead host to another.

A host that says that it lives keeps its sessions for `LEASE` seconds. Another one gets them only after it was
silent for longer. What was given away is stored before it is acknowledged, so that the host before learns of it
whenever it comes back; who lives is not: a weaver that starts gives nothing away for as long as a lease lasts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from loom.control.operations import LEASE, HoldSessions, TakeSessions
from loom.errors import WrongState
from loom.process.state_file import write_json

logger = logging.getLogger(__name__)

MOST_TAKEN = 100_000
"""Sessions of which it is known where they went; beyond them, the first are forgotten."""

SLACK = 2.0
"""Seconds beyond a lease before it is over here: clocks differ in speed, and a driver looks once a second."""


class SessionLeases:
    """The hosts that live, and the sessions that have moved.

    Args:
        clock: returns seconds, and never goes back.
        path: the file of what was given away; None: it is kept in memory only.
        check: raises if another weaver has the folder now.
    """

    def __init__(
        self, clock: Callable[[], float], path: Path | None = None, check: Callable[[], None] = lambda: None
    ) -> None:
        self._clock = clock
        self._path = path
        self._check = check
        self._since = clock()  # since when hosts could say that they live
        self._held: dict[str, float] = {}
        self._taken: dict[str, str] = {}
        if path is not None and path.exists():
            self._taken = {str(name): str(host) for name, host in json.loads(path.read_bytes()).items()}

    def note_held_up(self, seconds: float) -> None:
        """Note that nobody was listened to for some seconds: hosts may have said that they live."""
        self._since += seconds
        self._held = {host: at + seconds for host, at in self._held.items()}

    def hold(self, asked: HoldSessions) -> list[str]:
        """Note that a host lives; return those of its sessions that another host has."""
        self._held[asked.host] = self._clock()
        return [name for name in asked.sessions if self._taken.get(name, asked.host) != asked.host]

    def take(self, asked: TakeSessions) -> list[str]:
        """Give a silent host's sessions to another one; return those that this one has from now on.

        Raises:
            WrongState: the host is not silent for long enough.
            Conflict: another weaver decides.
        """
        silent = self._clock() - max(self._held.get(asked.of, self._since), self._since)
        if silent < LEASE + SLACK:
            raise WrongState(f"session host {asked.of} may live: it has been silent for {silent:.1f} s")
        given = [name for name in asked.sessions if self._taken.get(name, asked.of) in (asked.of, asked.host)]
        before, self._taken = self._taken, {**self._taken, **dict.fromkeys(given, asked.host)}
        try:
            self._store()
        except BaseException:
            self._taken = before
            raise
        if given:
            logger.warning("host %s is silent: host %s has %d of its sessions", asked.of, asked.host, len(given))
        return given

    def _store(self) -> None:
        while len(self._taken) > MOST_TAKEN:
            del self._taken[next(iter(self._taken))]
        if self._path is not None:
            write_json(self._path, self._taken)
            self._check()  # after the write, which another weaver may have undone
