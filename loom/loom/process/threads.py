"""Daemon threads, with the context of those who start them."""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeout  # until Python 3.11 another class
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def start_thread(name: str, work: Callable[..., object], *args: Any) -> None:
    """Run a function in a daemon thread, in the caller's context.

    In the context Monarch finds the actor that calls: without it, a thread of an actor would begin to be a client
    of its own, which an actor's process cannot. It also has the trace of `loom.tracing`.
    """
    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(work, *args), name=name, daemon=True).start()


def keep_going(name: str, work: Callable[[], object]) -> None:
    """Do the work of a thread until it has ended by itself, and again when it has died."""
    deaths = None
    while True:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is started again, whatever it died of: also a SystemExit
            if isinstance(error, RuntimeError) and not threading.main_thread().is_alive():
                return  # since Python 3.12, no thread can be started any more when the program has ended
            from loom.process.tasks import Deaths  # with asyncio, which a training process does without

            deaths = deaths or Deaths(name)
            deaths.note(error)
        else:
            return
        time.sleep(deaths.wait())


def get_within(source: queue.SimpleQueue[_T], seconds: float | None) -> _T:
    """Return the next item of a queue that this thread alone reads; None: wait for it for any time.

    Up to Python 3.12, a `SimpleQueue.get` whose time is over before it waits may wait for ever: it takes the
    queue's free lock, and then a negative time for an unlimited one. A `get` that fails leaves the lock taken.

    Raises:
        queue.Empty: there is none within the time.
    """
    with contextlib.suppress(queue.Empty):
        return source.get_nowait()
    return source.get(timeout=seconds)


def within(seconds: float, work: Callable[[], _T]) -> _T:
    """Return what a function returns that may hang where nothing bounds it, as name servers and keyrings do.

    Raises:
        TimeoutError: it takes longer; its thread goes on by itself.
    """
    done = DaemonExecutor("loom-within").submit(work)
    try:
        return done.result(max(0.0, seconds))
    except (TimeoutError, FutureTimeout) as error:
        raise error if done.done() else TimeoutError(f"no answer within {seconds:.0f} s") from None


class DaemonExecutor(Executor):
    """Calls each function in a daemon thread of its own: a process that ends does not wait for it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()  # from here on nothing cancels it

        def call() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
                future.set_exception(error)

        start_thread(self._name, call)
        return future
