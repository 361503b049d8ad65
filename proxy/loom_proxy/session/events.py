"""Events of a session, which come without a request, and callbacks for its failures."""

from __future__ import annotations

import _thread
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from loom.errors import LoomError, because
from loom.process.threads import keep_going
from loom.terminal_text import fit_lines
from loom_proxy.futures.timing import check_timeout

logger = logging.getLogger(__name__)

KEEP = 10_000  # events that are kept; the oldest go first


@dataclass(frozen=True)
class Event:
    """An event of a session. ``name`` says what happened, ``details`` gives the particulars.

    ``failure``: Monarch reported a fault that nothing handled; ``details`` has ``mesh`` and ``report``.
    ``host_lost``: a worker host is gone; ``details`` has ``host`` (its index), ``address`` and ``reason``.
    ``host_back``: a lost worker host is used again, see `Job.refresh_hosts`; ``details`` has ``host``, ``address``.
    ``host_joined``: another worker host is there, as for ``host_back``; `Job.refresh_hosts` adds it to `Job.hosts`.
    ``host_draining``: a worker host is about to be left; ``details`` has ``host``, ``address`` and the ``reason``.
    Processes of the session on the host tell it.
    ``process_lost``: a process of a proc mesh is gone without having been stopped; ``details`` has ``mesh``, ``id``
    (of the proc mesh), ``rank``, ``actors`` (ids of the actor meshes on it), ``reason`` and ``exit`` (as in
    `loom.weaver.views.ReplicaInfo`; None if that was not seen). A client that attaches to a
    session also gets the ``process_lost`` events of the time before.
    ``actors_lost``: Monarch has stopped actors unasked though their processes may live; ``details`` has ``mesh``,
    ``id`` (of the actor mesh), ``ranks`` and ``report``.
    ``operation_failed``: a spawn or a broadcast failed; ``error`` says how. Also: a limit of the gateway refused a
    call whose future is gone, unread; ``details`` has ``refused``, how many these are by now: 1, 2, 4, 8 and so on.
    ``gateway_draining``: the gateway is stopping; ``details`` has ``seconds``, the time left, and ``sessions_end``:
    whether its sessions end with it, or go on and are found by the next gateway.
    ``session_idle``: nothing happens in the session, which ends in ``details["seconds"]`` unless something does.
    ``disconnected``: the connection is lost and reconnects; ``details`` has ``url``.
    ``resumed``: the connection is back and nothing was lost; ``details`` has ``seconds``, how long that took.
    ``ended``: this client cannot use the session any more; ``error`` says why.
    """

    name: str
    details: Mapping[str, Any]
    error: LoomError | None = None
    time: float = field(default_factory=time.time)
    """Seconds since the epoch at which this client received the event."""


class SessionEvents:
    """The events of a session. Any number of readers may read them, each from the beginning."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEEP)
        self._dropped = 0  # events that are no longer kept: the number of the first one in `_events`
        self._closed = False
        self._changed = threading.Condition()
        self.on_event: Callable[[Event], object] | None = None
        """Called with each event that comes, on the connection's thread. It must not wait."""

    def add(self, event: Event) -> None:
        with self._changed:
            self._append(event)
        if self.on_event is not None:
            self.on_event(event)

    def close(self, last: Event) -> None:
        """Add the last event, after which readers stop."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._append(last)

    def let_go(self, last: Event) -> None:
        """Close in a forked child, in which no other thread holds or releases a lock."""
        self._changed = threading.Condition()
        self.close(last)

    def _append(self, event: Event) -> None:
        if len(self._events) == KEEP:
            self._dropped += 1
        self._events.append(event)
        self._changed.notify_all()

    def _has(self, position: int) -> bool:
        return self._closed or self._dropped + len(self._events) > position

    def read(self, timeout: float | None = None) -> Iterator[Event]:
        """Yield each event, old ones first, then new ones as they come.

        Args:
            timeout: stop after this many seconds without an event; None waits until the session ends.
        """
        timeout = check_timeout(timeout)
        position = 0
        while True:
            with self._changed:
                ready = self._changed.wait_for(partial(self._has, position), timeout)
                position = max(position, self._dropped)
                if not ready or position - self._dropped >= len(self._events):
                    return
                event = self._events[position - self._dropped]
            position += 1
            yield event


@dataclass(frozen=True)
class MeshFailure:
    """A failure that nothing in the cluster handled. It stands for Monarch's ``MeshFailure``."""

    mesh_name: str
    """Monarch's name of the mesh that failed: the name given at its spawn, and a suffix."""
    text: str
    event: Event
    """The event that reported the failure."""

    def report(self) -> str:
        """Return what failed and why, for a person to read."""
        return self.text

    def __str__(self) -> str:
        return self.text


class FailureCallbacks:
    """The callbacks for failures. They run in a thread of their own, so that they may call the session and wait."""

    def __init__(self, log: SessionEvents) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._callbacks: dict[object, Callable[[MeshFailure], object]] = {}
        self._thread: threading.Thread | None = None

    def add(self, callback: Callable[[MeshFailure], object]) -> Callable[[], None]:
        """Call a function with every failure from now on; return a function that removes it."""
        key = object()
        with self._lock:
            self._callbacks[key] = callback
            if self._thread is None:
                self._start()

        def remove() -> None:
            with self._lock:
                self._callbacks.pop(key, None)

        return remove

    def move_to(self, log: SessionEvents) -> None:
        """Go on with the events of the session's next driver. The thread ends behind the last one of the former."""
        with self._lock:
            if log is not self._log:
                self._log, self._thread = log, None
                if self._callbacks:
                    self._start()

    def _start(self) -> None:
        run = partial(self._run, self._log, [])
        calling = "call functions for failures", run
        self._thread = threading.Thread(target=keep_going, args=calling, name="loom-failures", daemon=True)
        self._thread.start()

    def _run(self, log: SessionEvents, reading: list[Iterator[Event]]) -> None:
        if not reading:
            reading.append(log.read())  # goes on behind an event that was the thread's end
        for event in reading[0]:
            failure = failure_of(event)
            if failure is None:
                continue
            with self._lock:
                callbacks = list(self._callbacks.values())
            for callback in callbacks:
                try:
                    callback(failure)
                except BaseException:
                    logger.exception("a failure callback raised on %s", failure.mesh_name)


def failure_of(event: Event) -> MeshFailure | None:
    """Return the failure that an event reports, if it does."""
    if event.name == "failure":
        return MeshFailure(str(event.details["mesh"]), str(event.details["report"]), event)
    if event.name == "host_lost":
        worker = f"worker host {event.details['host']} at {event.details['address']}"
        gone = because(f"{worker} is gone, and its processes with it", event.details.get("reason"))
        return MeshFailure("hosts", gone, event)
    return None


def unhandled_fault_hook(failure: Any) -> None:
    """Do nothing about a failure that nothing in the cluster handles. A program may assign another function.

    ``loom.unhandled_fault_hook = mine``, as with ``monarch.actor.unhandled_fault_hook``. On the laptop the function
    gets the failures of all jobs of the program, from then on. If it returns, the failure is dropped; if it raises,
    the report is printed and the main thread is interrupted (`KeyboardInterrupt`), as by Monarch. In `Job.run` it
    gets those of the session, and an exception of it is logged. In an actor nothing calls it.
    """


def assigned_hook() -> Callable[[Any], object] | None:
    """Return the function that this program has assigned, if any."""
    hook = vars(sys.modules["loom"]).get("unhandled_fault_hook")
    return None if hook is unhandled_fault_hook else hook


class FaultHook:
    """Calls the program's hook with each failure of one session, on a thread that the first failure starts."""

    def __init__(self) -> None:
        self._failures: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def handle(self, event: Event) -> None:
        """Take an event of the session. On the connection's thread."""
        failure = failure_of(event)
        if failure is None or assigned_hook() is None:
            return
        self._failures.put(failure)
        if self._thread is None:
            calling = "call the hook for failures", self._run
            self._thread = threading.Thread(target=keep_going, args=calling, name="loom-fault-hook", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            failure = self._failures.get()
            hook = assigned_hook()
            if hook is None:
                continue
            try:
                hook(failure)
            except BaseException:  # noqa: BLE001 - also a SystemExit: Monarch takes it for the end, too
                sys.stderr.write(fit_lines(f"{traceback.format_exc()}{_last_words(failure)}"))
                sys.stderr.flush()
                _interrupt_main()


def _interrupt_main() -> None:
    """Raise KeyboardInterrupt in the main thread, also while it waits: ``interrupt_main`` would not wake it."""
    main = threading.main_thread().ident
    if main is None or not hasattr(signal, "pthread_kill"):  # not on Windows
        _thread.interrupt_main()
    elif callable(signal.getsignal(signal.SIGINT)):  # else nobody heeds it, and by default it ends the process
        signal.pthread_kill(main, signal.SIGINT)


def _last_words(failure: MeshFailure) -> str:
    where = f"hostname={socket.gethostname()}, PID={os.getpid()} at time {datetime.now()}"
    return f"Unhandled monarch error on the root actor, {where}:\n{failure.report()}\n"
