"""Evictions: the end of a machine that is told in advance, to every open threadlet of this process.

A process of a session hears of it from its worker. A program that such a process has started, such as
``torchrun``, gets SIGTERM from the worker. A threadlet that is made in its main thread heeds this signal, unless
the program does.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from types import FrameType
from typing import Protocol

SIGNALLED_VARIABLE = "LOOM_SIGTERM_EVICTS"
"""The environment variable that is 1 below a worker, which ends with SIGKILL what does not heed its SIGTERM."""


class Evictable(Protocol):
    """A reason to go on after the machine was told to end, until the worker's grace is over."""

    def evict(self) -> None:
        """Save the state and end soon. Any thread may call."""


_open: weakref.WeakSet[Evictable] = weakref.WeakSet()
_lock = threading.Lock()  # also guards `_evicting`; the handler of a signal does not take it
_evicting = False


def add(one: Evictable) -> None:
    """Tell a threadlet, or another object, of an eviction, from now on until it is discarded."""
    with _lock:
        _open.add(one)
        if _evicting:
            one.evict()
    if os.environ.get(SIGNALLED_VARIABLE) == "1":
        _heed_sigterm()


def discard(one: Evictable) -> None:
    """Forget an object that was added."""
    with _lock:
        _open.discard(one)


def evict_all() -> bool:
    """Evict all that was added, now or later; return whether there is any."""
    global _evicting
    with _lock:
        _evicting = True
        there = list(_open)
        for one in there:
            one.evict()
    return bool(there)


def _heed_sigterm() -> None:
    """Evict at the first SIGTERM; the second ends this process, and so does the first if nothing trains."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    owner = os.getpid()

    def tell(pid: int) -> None:
        if not evict_all():
            os.kill(pid, signal.SIGTERM)

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != owner:  # a forked child, which does not train
            os.kill(os.getpid(), signal.SIGTERM)
            return
        # On a thread: the interrupted code may hold a lock of a threadlet.
        threading.Thread(target=tell, args=(owner,), name="loom-eviction", daemon=True).start()

    signal.signal(signal.SIGTERM, on_sigterm)


def _start_anew() -> None:
    global _open, _lock, _evicting
    _open, _lock, _evicting = weakref.WeakSet(), threading.Lock(), False


os.register_at_fork(after_in_child=_start_anew)
