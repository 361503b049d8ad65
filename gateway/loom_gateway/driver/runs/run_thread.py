"""The thread of a run, in which its function is called, and interrupted if the run is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from loom_gateway.driver.runs.forked_children import end_child, is_child
from loom_gateway.driver.runs.main_thread import main_thread
from loom_gateway.driver.runs.output import RecordedOutput, printing_to


class Interruption(BaseException):
    """Raised inside a function to end it. Not an `Exception`, so that few functions catch it."""


class RunThread:
    """Calls a function, or runs a coroutine function on a new event loop.

    ``done`` is called in the thread with the result and the exception, one of them None.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[], Any],
        output: RecordedOutput,
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        self._function = function
        self._output = output
        self._done = done
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._gate = threading.Lock()  # held while an interruption is raised
        self._entered = False  # whether the thread has begun to call the function
        self._over = False  # set when nothing may be raised in the thread any longer
        self._interrupted = False
        self._asked = False  # set by `cancel`
        self._name = name
        self._ident: int | None = None  # of the thread, once it runs

    def start(self) -> None:
        """Start the function. Call it on one thread."""
        if not main_thread.give(self._run_in_main):
            threading.Thread(target=self._run, name=f"run {self._name}", daemon=True).start()

    def cancel(self) -> None:
        """Request the end of the function. Called by one thread at a time.

        A coroutine is cancelled as asyncio cancels. In a plain function, an `Interruption` is raised once, as soon
        as the function runs Python code: not while it sleeps or waits in C.
        """
        self._asked = True
        if self._task is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed because the coroutine has ended
                self._loop.call_soon_threadsafe(self._task.cancel)
        elif self._entered and not self._interrupted and not self._over:
            with self._gate:
                if not self._over and self._ident is not None:
                    self._interrupted = True
                    _raise_in(self._ident, Interruption)

    def was_cancelled(self, error: BaseException | None) -> bool:
        """Return whether the function ended with this error because of `cancel`."""
        return self._asked and isinstance(error, (Interruption, asyncio.CancelledError))

    def _run(self) -> None:
        self._done(*self._outcome())

    def _run_in_main(self) -> None:
        main_thread.enter()
        outcome = self._outcome()
        main_thread.leave()  # before the client learns of the end, and starts what also needs the main thread
        self._done(*outcome)

    def _outcome(self) -> tuple[Any, BaseException | None]:
        """Call the function. Return its result and what it raised, one of them None."""
        self._ident = threading.get_ident()
        outcome: tuple[Any, BaseException | None] | None = None
        try:
            try:
                with printing_to(self._output):
                    outcome = (self._call(), None)
            except BaseException as error:  # noqa: BLE001 - sent to the client; a SystemExit ends the run only
                outcome = (None, error)
            if is_child():
                end_child(outcome[1])
            self._close_gate()
        except BaseException as error:  # noqa: BLE001 - an interruption, or of a signal's handler, that came this late
            outcome = outcome or (None, error)
        return outcome

    def _call(self) -> Any:
        self._entered = True
        if self._asked:
            raise Interruption
        result = self._function()
        if inspect.iscoroutine(result):
            result, error = asyncio.run(self._main(result))
            if error is not None:
                raise error
        return result

    async def _main(self, coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, Exception | None]:
        """Await a coroutine. Return its exception, since asyncio and signal raise if its ``repr`` does."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        try:
            return await coroutine, None
        except Exception as error:  # noqa: BLE001 - raised by the caller
            return None, error

    def _close_gate(self) -> None:
        """Make sure that nothing is raised in this thread from here on.

        If an `Interruption` comes between these lines, the gate may stay locked. That is harmless: `cancel`
        interrupts at most once, so it does not take the gate again.
        """
        self._gate.acquire()
        self._over = True
        self._gate.release()
        if self._interrupted:
            _raise_in(threading.get_ident(), None)  # it may not have been raised yet


def _raise_in(ident: int, exception: type[BaseException] | None) -> None:
    """Raise an exception in a thread soon. None withdraws one that was not raised yet."""
    raised = None if exception is None else ctypes.py_object(exception)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), raised)
