"""A rank's part in its cohort: it finds the process group, and meets the other ranks in a clone of its store.

Only the side thread, which is started for a process group of several ranks, uses the store, and may hang with it.
The training thread waits for it, with a bound. The link's thread waits for neither. torch is never imported: a
process that has not imported ``torch.distributed`` has no process group.

The replicas of torchft have no process group in common that lasts: a quorum may change at each step. There the
manager's thread enters the cohort of each new quorum, with the store of that quorum (`CohortMember.enter`).
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
from collections.abc import Callable, Container, Generator, Mapping
from dataclasses import replace
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

from loom.control.commands import CohortVerdict, Command
from loom.control.handshake import CohortPlace
from loom.errors import describe_error
from loom.process.threads import keep_going
from loom.threadlet.cohort import (
    Await,
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
    Standing,
    Steps,
    StoreFailed,
    StoreOperation,
    Word,
    confer,
    keys_of,
    settle,
    standing_keys,
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
        """Do an operation, over a new connection if the one before is lost.

        Raises:
            StoreFailed: the store fails.
        """
        try:
            try:
                return self._do(operation)
            except Exception:
                if isinstance(operation, Count | Forget):
                    raise  # it may have been counted; and there is nothing to forget in a store that is gone
                self._store = self._store.clone()
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
                names = [_named(key) for key in keys]
                if store.check(names):  # of many ranks over a slow line, one question each would take seconds
                    return [value.decode() for value in store.multi_get(names)]
                return [self._look(name, 0.0) for name in names]
            case Forget(keys):
                for key in keys:
                    store.delete_key(_named(key))

    def await_value(self, key: str, seconds: float) -> str:
        """Return the value of a key of another program's, once it is there.

        Raises:
            StoreFailed: it did not come in so many seconds.
        """
        if (text := self._look(key, seconds)) is None:
            raise StoreFailed(f"{key} did not come within {seconds:g} s")
        return text

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
        refuse: Callable[[Command, str, CohortVerdict | None], object],
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
        self.follows = False
        """True if a manager names the other ranks, and no process group is looked for."""
        self._standing = Standing(0, {})
        self._before: dict[str, Any] = {}
        """For the keys in `_standing`, the value before any command, or a function that brings back what held."""
        self._settled: tuple[JobStore, tuple[str, ...]] | None = None  # the last round by which a cohort began
        self.behind = False
        """True if this rank got its state from another one, and none has come to say which values it has set."""
        self.wanted: dict[str, Any] = {}
        """Values that this rank has to take over from the others of its cohort, before its next step.

        A function in place of a value brings back what held before any command."""

    def look(self, wait: bool = False) -> None:
        """Look for the default process group, which may be a new one or gone; ``wait`` for the cohort for a moment.

        The link's thread calls this at each beat.
        """
        if self.follows:
            return
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

    def follow(self, number: Callable[[], int]) -> None:
        """Let a manager name the other ranks with `enter`; ``number`` returns the number of the next boundary."""
        CohortMember._of_process = self
        self.follows, self.place = True, None
        self.gate.number = number

    def enter(self, store: Any, name: str, rank: int, world: int, timeout: float, behind: bool) -> None:
        """Form a cohort with the other ranks that enter with this store and name, or be in none.

        The call takes as long as the others need to come, within a bound. Values that they have, and this rank has
        not, are `wanted` afterwards. If it is still `behind` then, its next step must not count.

        Args:
            store: the store of c10d, for this rank alone; None if there are no other ranks, or no store is reached.
            name: a name that the ranks share, and that no others had before.
            rank: the rank, from 0.
            world: the number of ranks.
            timeout: seconds after which the ranks give up waiting for each other in their own exchanges.
            behind: whether this rank gets its state from another one.
        """
        self.abandon("the ranks of the job have changed")
        self._bound, place, own = bound_below(timeout), None, JobStore(store)
        self.behind = world > 1 and (behind or self.behind)
        if world > 1 and store is not None:
            place = self._settle(own, CohortPlace(name, rank, world))
        with self._lock:
            self.place, self._store = place, own
        self.changed()

    def _settle(self, store: JobStore, place: CohortPlace) -> CohortPlace | None:
        """Agree with the others on the cohort's id and values; return the place, or None if there is no cohort."""
        key = f"{place.id}/s"
        keys = standing_keys(key, place)
        with self._lock:
            own = replace(self._standing, behind=self.behind, cohort=uuid.uuid4().hex)
        steps, result = settle(key, place, own, self._bound), None
        try:
            while True:
                result = store.do(steps.send(result))  # type: ignore[arg-type]  # it hears no thread
        except StopIteration as ended:
            agreed: Standing | None = ended.value
        except StoreFailed as error:
            _log.warning("this process takes commands by itself until its job's ranks change again: %s", error)
            return None
        if agreed is None:
            _log.warning(
                "no rank has come within %g s to say which values commands have set",
                2 * self._bound,
            )
            return None
        self.behind = False
        last, self._settled = (
            self._settled,
            (store, (keys[place.rank], *((key, f"{key}#") if place.rank == 0 else ()))),
        )
        self._take_over(agreed)
        if last is not None:  # after the round, in which nobody waits for long: the former store may be gone
            with contextlib.suppress(StoreFailed):
                last[0].do(Forget(last[1]))
        return replace(place, id=agreed.cohort or place.id)

    def _take_over(self, agreed: Standing) -> None:
        with self._lock:
            own, self._standing = self._standing, Standing(agreed.version, dict(agreed.values))
            if list(own.values.items()) != list(agreed.values.items()):
                given_up = {key: self._before.pop(key, None) for key in own.values if key not in agreed.values}
                self.wanted = {**given_up, **agreed.values}

    def note(self, values: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        """Note values that a command has set for good, and those before, or functions that bring these back."""
        with self._lock:
            kept = {key: value for key, value in self._standing.values.items() if key not in values}
            self._standing = Standing(self._standing.version + 1, {**kept, **values})
            self._before = {**before, **self._before}

    def take_wanted(self, known: Container[str]) -> dict[str, Any]:
        """Return the values to take over whose keys are known; the others stay `wanted`."""
        with self._lock:
            taken = {key: value for key, value in self.wanted.items() if key in known}
            self.wanted = {key: value for key, value in self.wanted.items() if key not in known}
        return taken

    def abandon(self, reason: str) -> None:
        """Let a command that is under way not be applied, unless this rank has come to its boundary already."""
        with self._lock:
            if (meeting := self.gate.meeting) is not None:
                meeting.words.setdefault(Letter.COME, Word(reason, moved=True))
                self._lock.notify_all()

    def hear(self, command: str) -> None:
        """Take the weaver's word that another rank has applied a command for good."""
        with self._lock:
            self.gate.hear(command)
            self._lock.notify_all()

    def take(self, command: Command) -> None:
        """Take a command of the cohort, which the side thread brings to its end."""
        self._start()
        self._tasks.put(lambda: self._meet(command))

    def attend(self, step: int | None, epoch: int | None) -> Meeting | None:
        """Come to the boundary that the gate has counted; return the command that applies here. May wait."""
        with self._lock:
            return self._wait(self.gate.attend(step, epoch, self._patience))

    def confirm(self, meeting: Meeting, refused: str | None) -> str | None:
        """Say whether this rank has applied a command; return why it is to be taken back, or None. May wait."""
        with self._lock:
            return self._wait(self.gate.confirm(meeting, refused, self._patience)).refused

    def verdict(self, nobody: Word | None) -> CohortVerdict | None:
        """Return what the weaver is told of all ranks; by the refusal ``nobody`` none of them applies a command."""
        if nobody is None:
            return None
        return CohortVerdict.MOVED if nobody.moved and self.follows else CohortVerdict.NOBODY

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
                meeting.unconfirmed = True
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
            # torchrun may start ranks again with the store that they had. A new one needs no number: launchers
            # count by themselves, and the one of a host that has come later has started none again.
            again = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if again else "0"
            id = self._store.do(Decide(f"cohort/{restarts}/{number}", uuid.uuid4().hex))
        except Exception as error:  # noqa: BLE001 - such as of a process group without a store
            _log.warning("this process takes commands by itself: its process group has no store: %s", error)
            return
        if self.follows:
            return  # a manager has begun meanwhile to name the ranks
        self.place = CohortPlace(id, group.rank(), group.size())
        self._joined.set()
        self.changed()

    def _meet(self, command: Command) -> None:
        with self._lock:
            place, store = self.place, self._store
        if place is None or store is None or command.cohort != place.id:
            reason = "the process group of this rank is another one than when this was sent: give it again"
            self._refuse(command, reason, self.verdict(Word(reason, moved=True)))
            return
        refused = self._refusal(command)
        with self._lock:
            meeting = self.gate.hold(command)
            if self._ended:
                refused = "its training has ended"
        self._wake()
        verdict = self._drive(confer(self.gate, meeting, place, refused, self._bound), meeting, store)
        if not meeting.applies:
            reason = verdict.refused or "the training went on before the ranks had decided"
            self._refuse(command, reason, self.verdict(meeting.nobody))
        self._forget_old(command, place, store)  # now that no training waits

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
            if isinstance(operation, Await):
                with self._lock:
                    self._lock.wait_for(lambda: not meeting.open, operation.seconds)
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
