"""`UserWeaver`: the weaver of one user as the server runs it, with its commits, its watchers and its callers.

Input goes to `loom.weaver.weaver.Weaver` at once. Output leaves after a commit, which happens every 100 ms while
there is something to store, and right away if a peer or a caller waits for it. Commits are written on other
threads, so that only those that wait for a commit wait for the disk. Each user has commits of their own, so that no
user waits for what another's replicas report.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import psutil

from loom.control.frame import Frame, pack
from loom.control.process_end import ProcessEnd
from loom.errors import LimitReached, LoomError, ProfileFailed, Unavailable
from loom.process.exit_status import exit_status
from loom.process.tasks import OwnedTasks
from loom.weaver.commit_output import CommittedOutput, OutboxPeer
from loom.weaver.replicas import Replica
from loom.weaver.server.handlers import RequestHandler
from loom.weaver.server.local_processes import is_alive, py_spy, py_spy_profile
from loom.weaver.server.pushes import Pushes, Watcher
from loom.weaver.storage.store import Commit, Store
from loom.weaver.storage.writer import StoreWriter, Undurable
from loom.weaver.weaver import Weaver
from loom.wings import Part

_log = logging.getLogger(__name__)

COMMIT_EVERY = 0.1
SOONEST_COMMIT = 0.005
"""Seconds between two commits at least, so that many urgent changes share one."""

STACK_WITHIN = 15.0
"""Seconds within which a threadlet answers, in addition to those that a profile takes."""

MOST_UNSTORED = 50_000
"""Status reports that wait for a full disk to have room; further ones wait in the processes that report them."""

FRAMES_AT_ONCE = 200
"""Frames to threadlets that are sent in one turn of the event loop."""


class ThreadletPeer(OutboxPeer, ABC):
    """The connection of a threadlet, as the weaver of its user uses it."""

    process: psutil.Process | None = None
    """The process at the other end, if it is on this host."""
    descriptor: int | None = None
    """A descriptor of this process, from which Linux tells how it has ended; None if there is none."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Send bytes."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection after what was sent."""


class UserWeaver:
    """One user's weaver. Its clock returns the seconds since the epoch, and never goes back.

    Args:
        py_spies: bounds the stacks that are got at the same time, of all users.
        profilers: bounds the profiles that are taken at the same time, of all users.
        active: the users' weavers that may have something to do; an idle one leaves it.
        threads: where commits are written.
        alert_operator: the file in which the gateway says what its operator allows alerts to reach.
        failed: called when the store is broken, after which the weaver's process has to end.
    """

    def __init__(
        self,
        weaver: Weaver,
        store: Store,
        clock: Callable[[], float],
        requests: RequestHandler,
        tasks: OwnedTasks,
        py_spies: asyncio.Semaphore,
        profilers: asyncio.Semaphore,
        active: dict[UserWeaver, None],
        threads: Executor,
        alert_operator: Path | None,
        failed: Callable[[Exception], object],
    ) -> None:
        self.weaver = weaver
        self.requests = requests
        self._pushes = Pushes(weaver, requests, tasks)
        self._store = store
        self._clock = clock
        self._tasks = tasks
        self._py_spies = py_spies
        self._profilers = profilers
        self._active = active
        self._failed = failed
        self._alert_operator = alert_operator
        self._deliveries: Any = None
        """The deliveries of alerts, once the event loop runs."""
        self._writer = StoreWriter(store, threads, clock, self._fail, self._note_durability)
        self._taken_before = 0
        """Status reports that were taken before the store took nothing any more."""
        self._closed = False
        self._answers: list[Callable[[], object]] = []
        """Sends of answers that wait for the next commit."""
        self._answers_to_written: list[Callable[[], object]] = []
        """Sends of answers that wait for the commit that is being written."""
        self._urgent_written = False
        """True if a peer or a caller waits for that one."""
        self._frames: deque[tuple[OutboxPeer, Frame | None]] = deque()
        """Frames that are sent in the next turns of the event loop, as in `CommittedOutput.frames`."""
        self._last: tuple[Frame | None, bytes] = None, b""
        """The frame that was sent last, and its bytes: many threadlets may get the same."""
        self._committed = 0.0
        """When the last commit was begun, by the event loop's clock."""
        self._planned: asyncio.TimerHandle | None = None
        self._planned_soon = False
        self._plan_next = False
        """True to plan a commit when the one that is being written is stored."""

    @property
    def is_idle(self) -> bool:
        """True if nothing happens here until something is received."""
        return not (self._pushes or self._writer.is_busy) and self.weaver.settled

    def tick(self, now: float) -> None:
        if self._writer.undurable is not None:
            self.weaver.reports.holds_back = self.weaver.reports.taken > self._taken_before + MOST_UNSTORED
        self.weaver.tick(now)
        self._deliver(now)
        self._pushes.tick(now)
        self.plan_commit()

    def _deliver(self, now: float) -> None:
        """Begin the attempts to deliver alerts that are due."""
        if self._deliveries is None:
            folder = None if self._store.path == ":memory:" else Path(self._store.path).parent
            later = asyncio.get_running_loop().call_soon_threadsafe
            make = Part.ALERT_DELIVERIES.load()
            self._deliveries = make(self.weaver.known.alerts, folder, self._alert_operator, self._clock, later)
        self._deliveries.tick(now)

    def plan_commit(self) -> None:
        """Plan a commit: soon if a peer or a caller waits for it, else in the usual time."""
        self._active[self] = None
        urgent = self.weaver.outbox.urgent
        if self._planned is not None:
            if self._planned_soon or not urgent:
                return
            self._planned.cancel()
        elif self._writer.is_busy:
            self._plan_next = True
            return
        self._planned_soon = urgent
        loop = asyncio.get_running_loop()
        at = self._committed + (SOONEST_COMMIT if urgent else COMMIT_EVERY)
        self._planned = loop.call_at(max(at, loop.time()), self.commit)

    def commit(self) -> None:
        """Begin a commit, unless one is being written, after which the next one follows."""
        if (begun := self._begin()) is None:
            return
        commit, output = begun
        if commit is None:
            self._send_output(output)
        else:
            self._writer.write(commit, lambda: self._send_output(output))

    def commit_now(self) -> None:
        """Store everything that has come in before this returns; raise `Unavailable` if the disk takes nothing."""
        self._writer.wait()
        if (begun := self._begin()) is not None:
            commit, output = begun
            if commit is None:
                self._send_output(output)
            else:
                self._writer.write_now(commit, lambda: self._send_output(output))
        if self._writer.undurable is not None:
            raise Unavailable(f"the weaver cannot store it: {self._writer.undurable.reason}")

    def answer(self, send: Callable[[], object], reads: bool = False) -> None:
        """Send an answer, after the next commit if it reports something that is not stored yet.

        While the disk takes nothing, an answer to a question that only ``reads`` does not wait for it: it says so.
        """
        if reads and self._writer.undurable is not None:
            send()
        elif self.weaver.urgent:
            self._answers.append(send)
        elif self._writer.is_busy and self._urgent_written:
            self._answers_to_written.append(send)
        else:
            send()

    def watch(self, watcher: Watcher, number: int, full: bool = False) -> None:
        """Send a watcher a snapshot, and then push every change; ``full`` is as for `Pushes.watch`."""
        self._pushes.watch(watcher, number, full, self._clock())

    def unwatch(self, watcher: Watcher) -> None:
        self._pushes.unwatch(watcher)

    def lost(self, link: ThreadletPeer) -> None:
        """Note that a link is lost; check whether its process is gone too, if the process is on this host."""
        replica = link.replica
        self.weaver.lost(link, self._clock())
        if replica is not None and link.process is not None:
            work = self._report_if_dead(replica, replica.instance, link.process, link.descriptor)
            self._tasks.run("look for a process", work)
        elif link.descriptor is not None:
            os.close(link.descriptor)
        self.plan_commit()

    def close(self) -> None:
        """Commit what has come in, and close the store."""
        with contextlib.suppress(Unavailable):
            self.commit_now()
        self._closed = True
        if self._planned is not None:
            self._planned.cancel()
        while self._frames:
            self._send_frames()
        self._writer.close()

    def _begin(self) -> tuple[Commit | None, CommittedOutput] | None:
        """Return the next commit, which may be None, and its output; None if it cannot begin."""
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
        if self._closed or self._writer.is_busy:
            return None
        self._committed = asyncio.get_running_loop().time()
        self._urgent_written = self.weaver.urgent
        try:
            begun = self.weaver.begin_commit(self._clock())
        except sqlite3.Error as error:
            self._fail(error)
            return None
        self._answers_to_written, self._answers = self._answers, []
        return begun

    def _note_durability(self, before: Undurable | None) -> None:
        """Note that the store takes nothing any more, or again, with why it did not before."""
        now = self._clock()
        self.weaver.undurable = self._writer.undurable
        if before is None:
            self._taken_before = self.weaver.reports.taken
        else:
            self.weaver.durable_again(before.since, before.reason, now)
        self.plan_commit()

    def _fail(self, error: Exception) -> None:
        # Without a store no report can be acknowledged. Threadlets keep unstored reports for the next weaver.
        _log.error("cannot store what replicas report: %s", error)
        self._closed = True
        self._failed(error)

    def _send_output(self, output: CommittedOutput) -> None:
        """Send what a stored commit has for peers, callers and watchers."""
        idle = not self._frames
        self._frames += output.frames
        if idle:
            self._send_frames()
        self.requests.notify(output)
        for id, replica in output.stacks:
            self._tasks.run("get a stack", self._get_stack(id, replica))
        for id, replica, seconds in output.profiles:
            self._tasks.run("get a profile", self._get_profile(id, replica, seconds))
        self._pushes.tell(output.events, output.described)
        answers, self._answers_to_written = self._answers_to_written, []
        for send in answers:
            send()
        if self._plan_next or self.weaver.urgent:
            self._plan_next = False
            self.plan_commit()

    def _send_frames(self) -> None:
        """Send some frames now, and the others in the next turns of the event loop."""
        for _ in range(min(len(self._frames), FRAMES_AT_ONCE)):
            peer, frame = self._frames.popleft()
            to: ThreadletPeer = peer  # type: ignore[assignment] # the server's only kind
            if frame is None:
                to.close()
                continue
            if frame is not self._last[0]:
                self._last = frame, self._packed(frame)
            if self._last[1]:
                to.write(self._last[1])
        if self._frames:
            asyncio.get_running_loop().call_soon(self._send_frames)

    @staticmethod
    def _packed(frame: Frame) -> bytes:
        """Return the bytes of a frame; none if it cannot be sent, so that others still are."""
        try:
            return pack(frame.to_body())
        except (LoomError, TypeError, ValueError, OverflowError) as error:
            _log.error("a %r frame for a replica is left out: %s", frame.KIND, error)
            return b""

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

    async def _report_if_dead(
        self, replica: Replica, instance: str, process: psutil.Process, descriptor: int | None
    ) -> None:
        """Report a process's death; check several times, because a process closes its sockets before it is gone."""
        try:
            for wait in (0.0, 0.02, 0.1, 0.3, 0.5):
                await asyncio.sleep(wait)
                if not is_alive(process):
                    seen = ProcessEnd(*await asyncio.to_thread(exit_status, process.pid, descriptor))
                    reason = f"its process {process.pid} is gone"
                    self.weaver.died(replica, instance, reason, self._clock(), seen)
                    self.plan_commit()
                    return
        finally:
            if descriptor is not None:
                os.close(descriptor)
