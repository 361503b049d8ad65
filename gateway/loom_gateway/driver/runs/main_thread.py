"""The driver's main thread: one run at a time has it, so that signals work in a run as in a program.

Python calls the handlers of signals in the main thread alone. So the driver's event loop runs on another thread,
and a run has the main thread to itself, with handlers and timers of its own: a time limit by ``SIGALRM`` ends its
waits. A run that begins while another has the main thread gets a thread of its own, without signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from loom.process.refused_signals import explain_refusals

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)

_signal: Any = importlib.import_module("_signal")

logger = logging.getLogger(__name__)


class MainThread:
    """The process's main thread. Until `serve` is called, it belongs to nobody's run."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._free = False
        self._told: Callable[[signal.Signals], object]
        self._told_by_gateway: Callable[[], bool]
        self._loop: asyncio.AbstractEventLoop
        self._handlers: dict[int, Any] = {}  # the driver's own
        self._wakeup = -1
        self._spares: list[int] = []  # copies of the standard descriptors
        self._limits: tuple[int, int, float | None, bool] = (1000, 0o77, None, True)  # what `serve` finds

    def serve(self) -> NoReturn:
        """Call what `give` passes, one after the other. On the main thread."""
        self._free = True
        self._spares = [os.dup(number) for number in range(3)]
        self._limits = sys.getrecursionlimit(), os.umask(0o77), socket.getdefaulttimeout(), gc.isenabled()
        os.umask(self._limits[1])
        explain_refusals(
            "of a session's runs one at a time has the main thread, and none of its threads has: for a time limit, "
            "give the work to a process of its own (multiprocessing, subprocess)"
        )
        while True:
            work = self._work.get()
            try:
                contextvars.Context().run(work)
            except BaseException:  # the thread is the driver's, whatever comes out of a run
                logger.exception("a run left the main thread with an error")

    def give(self, work: Callable[[], None]) -> bool:
        """Call a function on the main thread and return True; return False if another has it. On one thread."""
        if not self._free:
            return False
        self._free = False
        self._work.put(work)
        return True

    def enter(self) -> None:
        """Let a signal of the keyboard interrupt the run that begins here, as it interrupts a program."""
        if self._handlers:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def leave(self) -> None:
        """Take back what a run has set of this thread, and let the next one have it."""
        while True:
            try:
                self._reset()
                break
            except BaseException:  # noqa: BLE001 - of a handler of the run's, whose timer goes on until here
                continue
        self._free = True

    def _reset(self) -> None:
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        for number, handler in self._handlers.items():
            # Not by the module `signal`, which raises if the ``repr`` of a run's handler does.
            found = _signal.getsignal(number)
            if found is not handler and not (type(found) is int and found == handler):
                _signal.signal(number, int(handler) if isinstance(handler, signal.Handlers) else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number, spare in enumerate(self._spares):
            with contextlib.suppress(OSError):
                os.fstat(number)
                continue
            os.dup2(spare, number)  # a run has closed it, as ``open(0).read()`` does
        self._reset_limits()
        sys.settrace(None)
        sys.setprofile(None)
        asyncio.set_event_loop_policy(None)  # else the next run finds a loop that this one has closed

    def _reset_limits(self) -> None:
        """Take back the settings of the process under which the driver itself might fail."""
        recursion, umask, timeout, collects = self._limits
        sys.setrecursionlimit(recursion)
        os.umask(umask)
        socket.setdefaulttimeout(timeout)
        (gc.enable if collects else gc.disable)()

    def heed(self, told: Callable[[signal.Signals], object], told_by_gateway: Callable[[], bool]) -> None:
        """Call ``told`` on the running event loop with a signal that ends the driver.

        A run may have a handler of its own, or be busy in native code. Then a signal ends the driver if
        ``told_by_gateway`` says so.
        """
        self._told, self._told_by_gateway = told, told_by_gateway
        self._loop = asyncio.get_running_loop()
        woken, self._wakeup = os.pipe()
        for descriptor in (woken, self._wakeup):
            os.set_blocking(descriptor, False)
        self._loop.add_reader(woken, self._read, woken)
        installed = threading.Event()
        self._work.put(lambda: self._install(installed))
        installed.wait()

    def _install(self, installed: threading.Event) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        known = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
        self._handlers = {number: handler for number, handler in known.items() if handler is not None}
        installed.set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._told, signal.Signals(number))

    def _read(self, woken: int) -> None:
        """Look which signals have come: the handler itself may have to wait for a run."""
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in os.read(woken, 4096) and self._told_by_gateway():
                self._told(signal.SIGTERM)

    def forget_handlers(self) -> None:
        """Give a forked child of this process the handlers of a program. On its only thread."""
        signal.set_wakeup_fd(-1)
        usual: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
        for number in usual:
            if (found := signal.getsignal(number)) == self._on_signal or _is_of_asyncio(found):
                signal.signal(number, usual[number])

    def forget_loop(self, refuse: Callable[..., NoReturn]) -> None:
        """Let a forked child wait for nothing on the driver's event loop, whose thread it has not."""
        if (loop := getattr(self, "_loop", None)) is not None:
            loop.call_soon_threadsafe = refuse


def _is_of_asyncio(handler: object) -> bool:
    """Return whether a handler is that of `asyncio.run`, which would cancel a task of the parent."""
    owner = getattr(getattr(handler, "func", None), "__self__", None)
    return isinstance(owner, getattr(asyncio, "Runner", ()))  # Python 3.11 and newer


main_thread = MainThread()
