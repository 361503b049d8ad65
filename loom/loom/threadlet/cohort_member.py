"""A rank's part in its cohort: it finds the process group, and meets the other ranks in a clone of its store.

Only the side thread, which is started for a process group of several ranks, uses the store, and may hang with it.
The training thread waits for it, with a bound. The link's thread waits for neither. torch is never imported: a
process that has not imported ``torch.distributed`` has no process group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Generator
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

from loom.control.commands import Command
from loom.control.introduction import CohortPlace
from loom.errors import describe_error
from loom.process.threads import keep_going
from loom.threadlet.cohort import (
    Count,
    Decide,
    Forget,
    Gate,
    Hear,
    Letter,
    Look,
    Meeting,
    Put,
    Read,
    Steps,
    StoreFailed,
    StoreOperation,
    Word,
    confer,
    keys_of,
)

BOUND_VARIABLE = "LOOM_COHORT_BOUND"

MOST_BOUND = 5.0
"""Seconds that ranks wait for each other in a round, at most; see `bound_below`."""

JOIN_WITHIN = 0.5
"""Seconds that the first hello waits for the ranks' agreement on the cohort's id."""

REMEMBERED = 8
"""The last commands whose keys stay in the store, for a rank that comes late."""

_log = logging.getLogger("loom")

T = TypeVar("T")


def bound_below(timeout: float) -> float:
    """Return the seconds that ranks wait for each other in a round, for a process group with a timeout in seconds.

    Three rounds stay below the timeout, also if the store is gone. ``LOOM_COHORT_BOUND`` overrides it.
    """
    with contextlib.suppress(KeyError, ValueError):
        if (given := float(os.environ[BOUND_VARIABLE])) > 0:
            return given
    return min(MOST_BOUND, timeout / 4)


class JobStore:
    """The operations of the protocol on a c10d store."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def do(self, operation: StoreOperation) -> Any:
        """Do an operation. Raise `StoreFailed` if the store fails."""
        try:
            return self._do(operation)
        except Exception as error:
            raise StoreFailed(describe_error(error)) from error

    def _do(self, operation: StoreOperation) -> Any:
        store = self._store
        match operation:
            case Put(key, value):
                store.set(_named(key), value)
            case Count(key):
                return store.add(_named(key), 1)
            case Decide(key, value):
                return store.compare_set(_named(key), "", value).decode()
            case Look(key, seconds):
                return self._look(_named(key), seconds)
            case Read(keys):
                return [self._look(_named(key), 0.0) for key in keys]
            case Forget(keys):
                for key in keys:
                    store.delete_key(_named(key))

    def _look(self, key: str, seconds: float) -> str | None:
        # The store's own `wait` would print a warning to the user's standard error when it times out.
        deadline, pause = time.monotonic() + seconds, 0.001
        while not self._store.check([key]):
            if (left := deadline - time.monotonic()) <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.05)
        text: str = self._store.get(key).decode()
        return text


def _named(key: str) -> str:
    return f"loom/{key}"


class CohortMember:
    """A threadlet's part in a cohort.

    Args:
        refusal: returns why this rank cannot apply a command, or None; called on the side thread.
        refuse: acknowledges a command that was not applied, with the reason; called on the side thread.
        wake: wakes a training thread that waits in a pause.
    """

    _of_process: CohortMember | None = None
    """The first threadlet of the process that has found its process group: a process is one rank."""

    def __init__(
        self,
        refusal: Callable[[Command], str | None],
        refuse: Callable[[Command, str], object],
        wake: Callable[[], object],
    ) -> None:
        self.gate = Gate()
        self.place: CohortPlace | None = None
        self.changed: Callable[[], object] = lambda: None
        """Called on the side thread when ``place`` has changed."""
        self._refusal = refusal
        self._refuse = refuse
        self._wake = wake
        self._lock = threading.Condition()  # guards the gate, and wakes the thread that waits for the other
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._group: Callable[[], Any] = lambda: None  # a weak reference to the process group that was found last
        self._groups = 0  # the process groups found
        self._joined = threading.Event()
        self._store: JobStore | None = None
        self._bound = MOST_BOUND
        self._done: deque[Command] = deque()  # the last commands, the oldest first
        self._ended = False

    def look(self, wait: bool = False) -> None:
        """Look for the default process group, which may be a new one or gone; ``wait`` for the cohort for a moment.

        The link's thread calls this at each beat.
        """
        try:
            group = _default_group()
        except Exception as error:  # noqa: BLE001 - a torch that differs from the ones known
            _log.debug("no process group is found: %s", describe_error(error))
            return
        gone = group is None and self.place is not None
        if gone or self._group() is not group:
            if CohortMember._of_process not in (None, self):
                return
            CohortMember._of_process = self
            self._group = weakref.ref(group) if group is not None else lambda: None
            self._joined.clear()
            if group is None:
                self.place = None
            else:
                self._groups += 1
                number = self._groups
                self._start()
                self._tasks.put(lambda: self._join(group, number))
        if wait and group is not None:
            self._joined.wait(JOIN_WITHIN)

    def take(self, command: Command) -> None:
        """Take a command of the cohort, which the side thread brings to its end."""
        self._start()
        self._tasks.put(lambda: self._meet(command))

    def attend(self, step: int | None) -> Meeting | None:
        """Come to the boundary that the gate has counted; return the command that applies here. May wait."""
        with self._lock:
            return self._wait(self.gate.attend(step, self._patience))

    def confirm(self, meeting: Meeting, refused: str | None) -> str | None:
        """Say whether this rank has applied a command; return why it is to be taken back, or None. May wait."""
        with self._lock:
            return self._wait(self.gate.confirm(meeting, refused, self._patience)).refused

    def pause(self, waits: bool) -> None:
        """Note that the training begins or ends to wait in a pause."""
        with self._lock:
            self.gate.wait(waits)

    def close(self, timeout: float) -> None:
        """End: a command under way is refused, since this rank passes no boundary any more."""
        if CohortMember._of_process is self:
            CohortMember._of_process = None
        with self._lock:
            self._ended = True
            if (meeting := self.gate.meeting) is not None:
                meeting.words.setdefault(Letter.COME, Word("its training has ended"))
            self._lock.notify_all()
        self._tasks.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    @classmethod
    def forget(cls) -> None:
        """Let another threadlet of this process be a rank, in a forked child."""
        cls._of_process = None

    @property
    def _patience(self) -> float:
        """Seconds that the training thread waits for the side thread: longer than that waits for other ranks."""
        return 1.25 * self._bound

    def _wait(self, steps: Generator[float, bool, T]) -> T:
        """Run the training thread's steps; the caller holds the lock."""
        heard: Any = None
        deadline: float | None = None
        try:
            while True:
                seconds = steps.send(heard)
                self._lock.notify_all()
                deadline = deadline or time.monotonic() + 2 * seconds  # there are two waits at most
                heard = self._lock.wait(max(0.0, min(seconds, deadline - time.monotonic())))
        except StopIteration as ended:
            result: T = ended.value
            return result
        finally:
            self._lock.notify_all()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=keep_going, args=("meet the other ranks", self._run), name="loom-cohort", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _join(self, group: Any, number: int) -> None:
        """Agree with the other ranks of a process group on the cohort's id."""
        try:
            clone, timeout = _clone_of_store(group)
            self._bound = bound_below(timeout)
            self._store = JobStore(clone)
            # torchrun may start ranks again with the store that they had.
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            id = self._store.do(Decide(f"cohort/{restarts}/{number}", uuid.uuid4().hex))
        except Exception as error:  # noqa: BLE001 - such as of a process group without a store
            _log.warning("this process takes commands by itself: its process group has no store: %s", error)
            return
        self.place = CohortPlace(id, group.rank(), group.size())
        self._joined.set()
        self.changed()

    def _meet(self, command: Command) -> None:
        place, store = self.place, self._store
        if place is None or store is None or command.cohort != place.id:
            self._refuse(command, "the process group of this rank is another one than when this was sent")
            return
        refused = self._refusal(command)
        with self._lock:
            meeting = self.gate.hold(command)
            if self._ended:
                refused = "its training has ended"
        self._wake()
        self._forget_old(command, place, store)
        verdict = self._drive(confer(self.gate, meeting, place, refused, self._bound), meeting, store)
        if not meeting.applies:
            self._refuse(command, verdict.refused or "the training went on before the ranks had decided")

    def _drive(self, steps: Steps[Word], meeting: Meeting, store: JobStore) -> Word:
        result, failed = None, None
        while True:
            with self._lock:
                try:
                    operation = steps.send(result) if failed is None else steps.throw(failed)
                except StopIteration as ended:
                    verdict: Word = ended.value
                    return verdict
                finally:
                    self._lock.notify_all()
            result = failed = None
            if isinstance(operation, Hear):
                result = self._hear(meeting, operation)
                continue
            try:
                result = store.do(operation)
            except StoreFailed as error:
                failed = error

    def _hear(self, meeting: Meeting, operation: Hear) -> Word | None:
        with self._lock:
            self._lock.wait_for(lambda: operation.letter in meeting.words, operation.seconds)
            return meeting.words.get(operation.letter)

    def _forget_old(self, command: Command, place: CohortPlace, store: JobStore) -> None:
        """Delete the keys of a command so old that no rank reads them any more."""
        self._done.append(command)
        if len(self._done) > REMEMBERED:
            with contextlib.suppress(StoreFailed):
                store.do(Forget(keys_of(self._done.popleft().id, place)))


def _default_group() -> Any:
    """Return the default process group of torch.distributed if it has several ranks, else None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    group = distributed.group.WORLD
    return group if group is not None and group.size() > 1 else None


def _clone_of_store(group: Any) -> tuple[Any, float]:
    """Return a clone of a process group's store, with its own connections, and the group's timeout in seconds."""
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    store = c10d._world.pg_map[group][1]
    timeout = store.timeout.total_seconds()
    with contextlib.suppress(Exception):  # a backend that tells no timeout
        for device in group._device_types:
            timeout = min(timeout, group._get_backend(device).options._timeout.total_seconds())
    clone = store.clone()
    clone.set_timeout(timedelta(seconds=max(1.0, bound_below(timeout))))
    return clone, timeout
