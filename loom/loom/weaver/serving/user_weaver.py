"""`UserWeaver`: the weaver of one user as the server runs it, with its commits, its watchers and its callers.

Input goes to `loom.weaver.weaver.Weaver` at once. Output leaves after a commit, which happens every 100 ms while
there is something to store, and right away if a peer or a caller waits for it. Each user has commits of their own,
so that no user waits for what another's replicas report.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import psutil

from loom.control.frame import Frame, pack
from loom.errors import LimitReached, ProfileFailed
from loom.weaver.outbox import Output, Peer
from loom.weaver.replicas import Replica
from loom.weaver.serving.full_watch import FullWatch
from loom.weaver.serving.processes import is_alive, py_spy, py_spy_profile
from loom.weaver.serving.requests import RequestHandler
from loom.weaver.serving.tasks import Tasks
from loom.weaver.storage.store import Store
from loom.weaver.weaver import Weaver

_log = logging.getLogger(__name__)

COMMIT_EVERY = 0.1
SOONEST_COMMIT = 0.005
"""Seconds between two commits at least, so that many urgent changes share one."""

STACK_WITHIN = 15.0
"""Seconds within which a threadlet answers, in addition to those that a profile takes."""

CHANGES_EVERY = 0.5
"""Seconds between two pushes of replicas' reports to watchers."""

MAX_CHANGES = 500
"""Replicas, and devices, in one push, so that no watcher is busy with it for more than some milliseconds."""


class ThreadletPeer(Peer, ABC):
    """The connection of a threadlet, as the weaver of its user uses it."""

    process: psutil.Process | None = None
    """The process at the other end, if it is on this host."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Send bytes."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection after what was sent."""


class Watcher(Protocol):
    """A connection that watches."""

    def push(self, number: int, update: dict[str, Any]) -> None:
        """Send an update for the watch with a number; disconnect a watcher that does not read."""


class UserWeaver:
    """One user's weaver. Its clock returns the seconds since the epoch, and never goes back.

    Args:
        py_spies: bounds the stacks that are got at the same time, of all users.
        profilers: bounds the profiles that are taken at the same time, of all users.
        active: the users' weavers that may have something to do; an idle one leaves it.
        failed: called when the store is broken, after which the weaver's process has to end.
    """

    def __init__(
        self,
        weaver: Weaver,
        store: Store,
        clock: Callable[[], float],
        requests: RequestHandler,
        tasks: Tasks,
        py_spies: asyncio.Semaphore,
        profilers: asyncio.Semaphore,
        active: dict[UserWeaver, None],
        failed: Callable[[Exception], object],
    ) -> None:
        self.weaver = weaver
        self.requests = requests
        self._further = FullWatch(requests.user, weaver, requests)
        self._store = store
        self._clock = clock
        self._tasks = tasks
        self._py_spies = py_spies
        self._profilers = profilers
        self._active = active
        self._failed = failed
        self._closed = False
        self._watchers: dict[tuple[Watcher, int], bool] = {}
        """Whether each watch, by its watcher and number, is a full one."""
        self._answers: list[Callable[[], object]] = []
        """Sends of answers that wait for the next commit."""
        self._committed = 0.0
        """When the last commit was, by the event loop's clock."""
        self._changes_pushed = 0.0
        self._planned: asyncio.TimerHandle | None = None
        self._planned_soon = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing happens here until something is received."""
        return not self._watchers and self.weaver.settled

    def tick(self, now: float) -> None:
        self.weaver.tick(now)
        if self._watchers and now >= self._changes_pushed + CHANGES_EVERY:
            self._changes_pushed = now
            changes, further = self.weaver.known.take_changes(), self._further_changes(now)
            *first, last = _split(changes)
            for part in first:
                self._push({"changes": part}, {})
            if any(last.values()) or further:
                self._push({"changes": last}, further)
        self.plan_commit()

    def plan_commit(self) -> None:
        """Plan a commit: soon if a peer or a caller waits for it, else in the usual time."""
        self._active[self] = None
        urgent = self.weaver.urgent
        if self._planned is not None:
            if self._planned_soon or not urgent:
                return
            self._planned.cancel()
        self._planned_soon = urgent
        loop = asyncio.get_running_loop()
        at = self._committed + (SOONEST_COMMIT if urgent else COMMIT_EVERY)
        self._planned = loop.call_at(max(at, loop.time()), self.commit)

    def commit(self) -> None:
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
        if self._closed:
            return
        self._committed = asyncio.get_running_loop().time()
        try:
            output = self.weaver.commit(self._clock())
        except sqlite3.Error as error:
            # Without a store no report can be acknowledged. Threadlets keep unstored reports for the next weaver.
            _log.error("cannot store what replicas report: %s", error)
            self._closed = True
            self._failed(error)
            return
        self._send_output(output)
        if self.weaver.urgent:
            self.plan_commit()

    def answer(self, send: Callable[[], object]) -> None:
        """Send an answer, after the next commit if it reports something that is not stored yet."""
        self._answers.append(send)
        if not self.weaver.urgent:
            self._flush()

    def watch(self, watcher: Watcher, number: int, full: bool = False) -> dict[str, Any]:
        """Push every change from now on to a watcher; return the state up to now.

        A ``full`` watch also has what `FullWatch` adds, as ``more`` in the snapshot and in each push.
        """
        self._flush()
        self._watchers[watcher, number] = full
        self.weaver.known.watching = True
        if not full:
            return self.requests.snapshot()
        now = self._clock()
        self._further.begin(now)
        return {**self.requests.snapshot(), "more": self._further.snapshot(now)}

    def unwatch(self, watcher: Watcher) -> None:
        for key in [key for key in self._watchers if key[0] is watcher]:
            del self._watchers[key]
        self.weaver.known.watching = bool(self._watchers)
        if not self._has_full:
            self._further.end()

    def lost(self, link: ThreadletPeer) -> None:
        """Note that a link is lost; check whether its process is gone too, if the process is on this host."""
        replica = link.replica
        self.weaver.lost(link, self._clock())
        if replica is not None and link.process is not None:
            self._tasks.run(self._report_if_dead(replica, replica.instance, link.process))
        self.plan_commit()

    def close(self) -> None:
        """Commit what has come in, and close the store."""
        self.commit()
        self._closed = True
        if self._planned is not None:
            self._planned.cancel()
        self._store.close()

    def _flush(self) -> None:
        answers, self._answers = self._answers, []
        for send in answers:
            send()

    def _send_output(self, output: Output) -> None:
        last: Frame | None = None
        data = b""
        for peer, frame in output.frames:
            to: ThreadletPeer = peer  # type: ignore[assignment] # the server's only kind
            if frame is None:
                to.close()
                continue
            if frame is not last:
                last, data = frame, pack(frame.to_body())
            to.write(data)
        self.requests.notify(output)
        for id, replica in output.stacks:
            self._tasks.run(self._get_stack(id, replica))
        for id, replica, seconds in output.profiles:
            self._tasks.run(self._get_profile(id, replica, seconds))
        if self._watchers:
            full = self._has_full
            self._further.describe(output.described)
            for event in output.events:
                self._push({"event": event.to_body()}, self._further.event(event) if full else {})
        self._flush()

    @property
    def _has_full(self) -> bool:
        return any(self._watchers.values())

    def _further_changes(self, now: float) -> dict[str, Any]:
        return self._further.changes(now) if self._has_full else {}

    def _push(self, update: dict[str, Any], further: dict[str, Any]) -> None:
        """Push an update to all watchers, and its further part to full ones."""
        for (watcher, number), full in list(self._watchers.items()):
            watcher.push(number, {**update, "more": further} if full and further else update)

    async def _get_stack(self, id: str, replica: Replica) -> None:
        link: ThreadletPeer | None = replica.link
        text = None
        if link is not None and link.process is not None and is_alive(link.process):
            async with self._py_spies:
                text = await py_spy(replica.pid)
        if text is None and self.weaver.stacks.ask_threadlet(id):
            self.plan_commit()
            await asyncio.sleep(STACK_WITHIN)
            text = "its threadlet did not answer: the interpreter may be held by native code"
        self.weaver.stacks.take(id, text or "it is not connected")
        self.plan_commit()

    async def _get_profile(self, id: str, replica: Replica, seconds: float) -> None:
        if self._profilers.locked():
            text = "the weaver takes as many profiles as it may, of all users: ask again when one is there"
            self.weaver.profiles.fail(id, LimitReached(text))
            return
        async with self._profilers:
            await self._take_profile(id, replica, seconds)
        self.plan_commit()

    async def _take_profile(self, id: str, replica: Replica, seconds: float) -> None:
        profiles = self.weaver.profiles
        link: ThreadletPeer | None = replica.link
        if link is not None and link.process is not None and is_alive(link.process):
            found = await py_spy_profile(replica.pid, seconds)
            if not is_alive(link.process):
                text = f"the process of replica {replica.id!r} ended during the profile"
                profiles.fail(id, ProfileFailed(text))
            elif found is not None:
                profiles.take(id, found.text, found.samples, found.left_out, "py-spy")
        answered = asyncio.Event()
        if profiles.ask_threadlet(id, answered.set):
            self.plan_commit()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(answered.wait(), seconds + STACK_WITHIN)
            text = f"replica {replica.id!r}: its threadlet did not answer: it is older, or native code holds it up"
            profiles.fail(id, ProfileFailed(text))

    async def _report_if_dead(self, replica: Replica, instance: str, process: psutil.Process) -> None:
        """Report a process's death; check several times, because a process closes its sockets before it is gone."""
        for wait in (0.0, 0.02, 0.1, 0.3, 0.5):
            await asyncio.sleep(wait)
            if not is_alive(process):
                self.weaver.died(replica, instance, f"its process {process.pid} is gone", self._clock())
                self.plan_commit()
                return


def _split(changes: dict[str, dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Return the changes, or several of at most `MAX_CHANGES` replicas and devices each."""
    most = max(map(len, changes.values()))
    if most <= MAX_CHANGES:
        return [changes]
    items = {name: iter(changed.items()) for name, changed in changes.items()}
    parts = range(0, most, MAX_CHANGES)
    return [{name: dict(itertools.islice(rest, MAX_CHANGES)) for name, rest in items.items()} for _ in parts]
