"""`Users`: one weaver for each user, in one process. None knows of another's replicas, devices or commands.

`AuditTrail`: what the drivers' sessions were asked to do to replicas and in processes of ranks.

It is for the gateway, which keeps the audit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from loom.errors import UnsafeStateFolder
from loom.process.tasks import OwnedTasks
from loom.token_file import ADMIN
from loom.weaver.keys import Keys
from loom.weaver.liveness import LivenessTimeouts
from loom.weaver.persistent_state import Registry
from loom.weaver.server.handlers import RequestHandler
from loom.weaver.server.session_leases import SessionLeases
from loom.weaver.server.user_weaver import UserWeaver
from loom.weaver.storage.store import Store
from loom.weaver.weaver import Weaver

AT_ONCE = 256
"""Entries in one answer to a gateway, whose event loop takes them."""

MAX_ENTRIES = 10_000
"""Entries that wait for a gateway; beyond it the oldest are dropped."""

_MAX_TEXT = 200


class AuditTrail:
    """Numbered entries, each of which is given to the gateway until it says that it has written it."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._entries: deque[tuple[int, Mapping[str, object]]] = deque(maxlen=MAX_ENTRIES)
        self._last = 0
        self._more = asyncio.Event()

    def add(self, user: str, session: str, operation: str, arguments: Mapping[str, Any], time: float) -> None:
        """Add an entry for an operation of a session. Values stay out of it: they may be secrets."""
        about = {name: str(value)[:_MAX_TEXT] for name, value in arguments.items() if name in _SHOWN}
        keys = {"keys": [str(key)[:_MAX_TEXT] for key in arguments["params"]]} if "params" in arguments else {}
        self._last += 1
        entry = {"given": time, "user": user, "session": session, "operation": operation, **about, **keys}
        self._entries.append((self._last, entry))
        self._more.set()

    async def after(self, trail: str, number: int, timeout: float) -> Mapping[str, object]:
        """Drop the entries up to a number of this trail; return those after it, or none when the time is over."""
        while trail == self._id and self._entries and self._entries[0][0] <= number:
            self._entries.popleft()
        if not self._entries:
            self._more.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._more.wait(), timeout)
        given = list(islice(self._entries, AT_ONCE))
        last = given[-1][0] if given else self._last
        return {"trail": self._id, "last": last, "entries": [entry for _, entry in given]}


_OF_RANKS = ("mesh", "rank", "what", "guest")
"""``what`` is a command, a path or a port; ``guest`` is the user, if the session is another user's."""

_SHOWN = ("kind", "target", "fault", "duration", "injection", "device", "reason", "group", "action", *_OF_RANKS)


_log = logging.getLogger(__name__)

STORE_THREADS = 4
"""Threads that write what the users' weavers store."""


class Users:
    """The weavers of the users that the gateway, or a valid key, has named.

    Args:
        open_store: opens the store of a user.
        existing: the users that have a store already, whose replicas may live.
        clock: returns the seconds since the epoch, and never goes back.
        place: where threadlets connect, ``tcp://HOST:PORT``.
        alert_operator: as for `UserWeaver`.
        leases: of session hosts; by default they are kept in memory only.
    """

    def __init__(
        self,
        open_store: Callable[[str], Store],
        existing: Collection[str],
        keys: Keys,
        clock: Callable[[], float],
        place: str,
        timing: LivenessTimeouts | None = None,
        alert_operator: Path | None = None,
        leases: SessionLeases | None = None,
    ) -> None:
        self.keys = keys
        self.clock = clock
        self.tasks = OwnedTasks()
        self.audit = AuditTrail()
        self.leases = leases or SessionLeases(clock)
        self.ended = asyncio.Event()
        """Set when a store is broken, or the server ends."""
        self.failure: Exception | None = None
        """The error that ended the weaver; None if it ended as requested."""
        self._open_store = open_store
        self._place = place
        self._timing = timing
        self._alert_operator = alert_operator
        self._py_spies = asyncio.Semaphore(2)
        self._profilers = asyncio.Semaphore(4)
        self._threads = ThreadPoolExecutor(STORE_THREADS, "store")
        self._users: dict[str, UserWeaver] = {}
        self._active: dict[UserWeaver, None] = {}
        """The weavers that may have something to do."""
        for user in existing:
            try:
                self.of(user)
            except UnsafeStateFolder as error:
                if user == ADMIN:
                    raise
                _log.error("%s", error)  # the others go on; this user's requests are refused with the reason

    def items(self) -> Iterable[tuple[str, UserWeaver]]:
        return list(self._users.items())

    def of(self, user: str) -> UserWeaver:
        """Return a user's weaver, which is made when the user is first named."""
        return self._users.get(user) or self._new(user)

    def note_held_up(self, seconds: float, now: float) -> None:
        """Note that the weaver's process listened to nobody for some seconds until now."""
        self.leases.note_held_up(seconds)
        for user in self._active:
            user.weaver.note_held_up(seconds, now)

    def tick(self, now: float) -> None:
        for user in list(self._active):
            user.tick(now)
            if user.is_idle:
                del self._active[user]

    def address(self, user: str, session: str | None = None) -> str:
        """Return the address for threadlets of a user, or of one session."""
        return f"{self._place}/{self.keys.of(user, session)}"

    def close(self) -> None:
        for user in self._users.values():
            user.close()
        self._threads.shutdown()

    def _new(self, user: str) -> UserWeaver:
        store, now = self._open_store(user), self.clock()
        weaver = Weaver(Registry(store, now), now, self._timing)
        requests = RequestHandler(user, weaver, self.clock, self.address, self._others_on)
        made = UserWeaver(
            weaver,
            store,
            self.clock,
            requests,
            self.tasks,
            self._py_spies,
            self._profilers,
            self._active,
            self._threads,
            self._alert_operator,
            self.fail,
        )
        self._users[user] = made
        self._active[made] = None
        return made

    def fail(self, error: Exception) -> None:
        """End the weaver's process with an error."""
        self.failure = error
        self.ended.set()

    def _others_on(self, user: str, hosts: Collection[str], workers: Collection[str]) -> bool:
        """Return whether another user's replica lives on one of the hosts, or their session uses a worker."""
        others = (one for name, one in self._users.items() if name != user)
        return any(one.requests.is_on(hosts, workers) for one in others)
