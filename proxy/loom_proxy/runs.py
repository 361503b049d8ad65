"""Handles of functions that run in the driver."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from loom.errors import LoomError, NameTaken, NoSuchRun, ProtocolMismatch, SessionRestarted
from loom.tracing.trace_ids import current_trace
from loom.weaver.run_views import TrainingName
from loom.wire.bodies import (
    AT_EACH,
    MOST_RESTARTS,
    RECORD,
    STDOUT,
    AwaitRun,
    EndRun,
    ListRuns,
    ReadRunOutput,
    RunChanged,
    StartRun,
)
from loom.wire.body import Body
from loom.wire.messages import Buffer, Message
from loom.wire.mux import After
from loom.wire.plain import shortened
from loom_proxy.futures.future import FutureProxy
from loom_proxy.logs import print_text
from loom_proxy.notebook.html import run_html
from loom_proxy.notebook.live import LiveHtml, Shown
from loom_proxy.session.calls import Calls

RUNNING = "running"


class RunHandle(Shown):
    """A function that runs, or has run, in the driver, from ``job.run(fn, detach=True)`` or ``job.runs()``.

    Awaiting a handle returns the function's result. The run goes on while no client is connected; a later
    connection to the session finds it with ``job.runs()``. When its driver dies, the handle says so once by
    `SessionRestarted`. After that it is the function's that the next driver has started again, if that has.
    """

    def __init__(
        self, caller: Calls, ident: int, name: str, follow: Callable[[RunHandle], object] = lambda handle: None
    ) -> None:
        self._caller = caller
        self._follow = follow
        self._answer: FutureProxy[Any] | None = None
        self._asked: FutureProxy[Any] | None = None
        """The answer that was asked for last."""
        self._has_said = False
        """True if an operation was refused because the driver has died."""
        self.id = ident
        """Number of the run, unique in the session."""
        self.name = name
        """Name of the run; no two runs that are going have the same name."""
        self.status = RUNNING
        """``"running"``, ``"done"``, ``"failed"`` or ``"cancelled"``, as last reported by the driver."""
        self.started: float | None = None
        """Start of the run, in seconds since the epoch on the driver's clock; None until the driver reports it."""
        self.finished: float | None = None
        """End of the run, in seconds since the epoch on the driver's clock; None until then."""
        self.trains: tuple[TrainingName, ...] = ()
        """Id and name of each training's run that the function is of, as ``job.runs()`` found them last; ``()`` if
        it trains nothing. ``job.weaver.run(id)`` has the rest."""

    def done(self) -> bool:
        """Return whether the run has ended, in whatever way."""
        return self.status != RUNNING

    @property
    def future(self) -> FutureProxy[Any]:
        """The future of the run's result, for `loom.wait` and `loom.as_completed`."""
        if self._answer is None or _says_restarted(self._answer):
            self._answer = self._ask(AwaitRun(self.id))
        return self._answer

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the function's result. It can be had any number of times.

        Args:
            timeout: seconds to wait at most; None waits for ever.

        Raises:
            Exception: the function's exception; its chain of causes ends with the remote traceback.
            OperationFailed: the function's exception cannot be rebuilt here, or is no `Exception` (`SystemExit`).
            OperationCancelled: the run was cancelled.
            UnpicklableError: the result cannot be pickled there, or cannot be unpickled here.
            WaitTimeout: the time is up; the run goes on.
            NoSuchRun: the driver has forgotten the run: it keeps the last 256 that have ended.
            LoomError: the session or the connection failed.
        """
        return self.future.get(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the run; return the error that `result` would raise, or None.

        Raises:
            WaitTimeout: the time is up; the run goes on.
        """
        return self.future.exception(timeout)

    def __await__(self) -> Generator[Any, None, Any]:
        return self.future.__await__()

    def cancel(self) -> bool:
        """Ask the function to end; return whether it was still going. `result` shows how the run ends.

        Each call cancels a coroutine in asyncio's way. In a plain function the first call raises an exception,
        which is no `Exception`, when the function next runs Python code: a sleep or a wait in C ends first. A
        function that catches the exception and goes on is not cancelled.
        """
        return bool(self._ask(EndRun(self.id, "cancel")).get())

    def forget(self) -> None:
        """Let the driver forget the run, if it has ended, so that others are kept longer."""
        if not self._caller.ended.is_set():
            with contextlib.suppress(LoomError):  # the connection broke, and the session may have ended with it
                self._caller.send(EndRun(self.id, "forget"), key=After(self.id))

    def output(self) -> str:
        """Return the text that the run has printed so far, to stdout and stderr, in the order of printing.

        The driver keeps the last MiB (2 ** 20 characters); a first line says how much is missing.
        """
        position, printed = 0, ""
        while True:
            position, _, pieces = self._ask_output(position, wait=False).get()
            printed += _printed(pieces)
            if all(stream != RECORD for stream, _ in pieces):  # only records make a reply too long for all of it
                return printed

    def follow(self) -> RunOutput:
        """Return the run's output piece by piece: first the text that is kept, then more until the run ends.

        Iterate over it with ``for`` or with ``async for``.
        """
        return RunOutput(self)

    def _ask_output(self, position: int, wait: bool = True) -> FutureProxy[Any]:
        return self._ask(ReadRunOutput(self.id, position, wait))

    def _ask(self, operation: Body) -> FutureProxy[Any]:
        self._asked = self._driver().ask(operation, key=After(self.id))
        return self._asked

    def _driver(self) -> Calls:
        """Return the calls of the driver that has the run: of the next one, once it was said that one has died.

        Raises:
            SessionRestarted: that was not said before, or the next one does not have the run.
        """
        error = self._caller.error
        if isinstance(error, SessionRestarted):
            if not (self._has_said or _says_restarted(self._asked) or _says_restarted(self._answer)):
                self._has_said = True
                raise error
            self._follow(self)
        return self._caller

    def _move_to(self, caller: Calls) -> None:
        """Go on with the session's next driver, which has the run."""
        self._caller, self._asked, self._has_said = caller, None, False
        if not self.done():
            self._answer = None

    def _note(self, status: str, started: float | None, finished: float | None) -> None:
        if not self.done():
            self.started, self.finished = started, finished
            self.status = status  # last, since the others are read once the run has ended

    def _live(self) -> LiveHtml:
        return LiveHtml(self._repr_html_, self.done)

    def _repr_html_(self) -> str:
        return run_html(self.name, self.status, self.started, self.finished, self._training())

    def __repr__(self) -> str:
        training = self._training()
        return f"<RunHandle {self.name!r} {self.status}{training and f', {training}'}>"

    def _training(self) -> str:
        """Return the runs of its trainings in words."""
        return f"trains {', '.join(f'{one.name} {one.id}' for one in self.trains)}" if self.trains else ""


class RunOutput:
    """The output of a run, as an iterator and asynchronous iterator of texts. For one reader."""

    def __init__(self, run: RunHandle) -> None:
        self._run = run
        self._caller = run._caller
        self._position = 0
        self._ended = False
        self._asked: FutureProxy[Any] | None = None

    def ask(self) -> FutureProxy[Any]:
        """Ask the driver for more output, if no earlier request is pending; return the answer's future."""
        if self._asked is None or _says_restarted(self._asked):
            driver = self._run._driver()
            if driver is not self._caller:  # the function was started again, and so was its output
                self._caller, self._position = driver, 0
            self._asked = self._run._ask_output(self._position)
        return self._asked

    def _take(self, reply: tuple[int, bool, list[tuple[int, str]]]) -> list[tuple[int, str]]:
        self._asked = None
        self._position, self._ended, pieces = reply
        return pieces

    @property
    def ended(self) -> bool:
        """True if the run has ended and all of its output was read."""
        return self._ended

    def read(self, timeout: float | None = None) -> list[tuple[int, str]]:
        """Wait for more output; return its texts with their streams: `STDOUT`, `STDERR` or `RECORD`.

        Args:
            timeout: seconds to wait at most; None waits for ever.

        Raises:
            WaitTimeout: the time is up. A later call goes on from there.
        """
        return self._take(self.ask().get(timeout))

    def pieces(self) -> Iterator[tuple[int, str]]:
        """Yield each text with its stream, as `read` returns them, until the run has ended."""
        while not self._ended:
            yield from self.read()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._ended:
            if text := _printed(self._take(self.ask().get())):
                return text
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while not self._ended:
            if text := _printed(self._take(await self.ask())):
                return text
        raise StopAsyncIteration


def _says_restarted(answer: FutureProxy[Any] | None) -> bool:
    """Return whether an answer was read, and is that its driver has died and another one goes on."""
    return answer is not None and isinstance(answer._error, SessionRestarted)


def _printed(pieces: Sequence[tuple[int, str]]) -> str:
    return "".join(text for stream, text in pieces if stream != RECORD)


class KnownRuns:
    """The runs of a session that have a handle in this program.

    Args:
        printing: returns whether `call` prints what arrives now.
        current: returns the calls of the session's driver, which after `SessionRestarted` is another one.
    """

    def __init__(
        self,
        caller: Calls,
        printing: Callable[[], bool] = lambda: True,
        current: Callable[[], Calls] | None = None,
    ) -> None:
        self._current = current or (lambda: caller)
        self._printing = printing
        self._handles: WeakValueDictionary[int, RunHandle] = WeakValueDictionary()
        self._before: WeakValueDictionary[int, RunHandle] = WeakValueDictionary()
        """The handles of an earlier driver's runs, of which the session's driver may have started some again."""
        self._lock = threading.Lock()
        self._listing = 0  # lists that were asked for, and whose handles are not made yet
        self._missed: dict[int, RunChanged] = {}  # messages of runs without a handle

    def receive(self, message: Message) -> None:
        """Take in a `RunChanged` message. The thread that reads the connection calls this."""
        changed = RunChanged.from_body(message.body)
        with self._lock:
            handle = self._handles.get(message.id)
            if handle is None:
                if self._listing:
                    self._missed[message.id] = changed
                return
        handle._note(changed.status, changed.started, changed.finished)

    def move_to_next_driver(self) -> None:
        """Note that the session has another driver, before anything comes from it."""
        with self._lock:
            self._before, self._handles = self._handles, WeakValueDictionary()

    def _follow(self, handle: RunHandle) -> None:
        """Move a handle to the session's driver, if that has started its function again.

        Raises:
            SessionRestarted: it has not.
        """
        lost = handle._caller
        self.listed()
        if handle._caller is lost:
            lost.check_open()

    def listed(self) -> dict[str, RunHandle]:
        """Return the driver's runs by name, oldest first; of two with one name, the going or the newer one."""
        caller = self._current()
        with self._lock:
            self._listing += 1
        try:
            listed = caller.ask(ListRuns(caller.knows_trainings or None)).get()
            with self._lock:
                handles = [self._handle(caller, *one) for one in listed]
        finally:
            with self._lock:
                self._listing -= 1
                if not self._listing:
                    self._missed.clear()
        found: dict[str, RunHandle] = {}
        for handle in handles:
            if handle.name not in found or found[handle.name].done():
                found[handle.name] = handle
        return found

    def _handle(
        self,
        caller: Calls,
        ident: int,
        name: str,
        status: str,
        started: float | None,
        finished: float | None,
        trains: Sequence[tuple[str, str]] = (),
    ) -> RunHandle:
        """Return the handle of a run that was listed, in its newest state: it may have ended since."""
        handle = self._handles.get(ident)
        if handle is None:
            handle = self._before.pop(ident, None)
            if handle is not None and handle.name == name:
                handle._move_to(caller)
            else:
                handle = RunHandle(caller, ident, name, self._follow)
            self._handles[ident] = handle
        handle._note(status, started, finished)
        handle.trains = tuple(TrainingName(*one) for one in trains)
        if (missed := self._missed.get(ident)) is not None:
            handle._note(missed.status, missed.started, missed.finished)
        return handle

    def start(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        name: str | None,
        restarts: int = 0,
    ) -> RunHandle:
        """Start a function and return its handle at once."""
        caller = self._current()
        operation = self._operation(caller, True, restarts)
        handle, parts = self._prepare(caller, fn, args, kwargs, name)
        caller.send(replace(operation, name=handle.name), parts, ident=handle.id)
        caller.flush()
        return handle

    def call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        name: str | None,
        restarts: int = 0,
    ) -> Any:
        """Start a function, print its output if printing is on, and return its result."""
        caller = self._current()
        operation = self._operation(caller, False, restarts)
        handle, parts = self._prepare(caller, fn, args, kwargs, name)
        handle._answer = caller.ask(replace(operation, name=handle.name), parts, ident=handle.id)
        try:
            with contextlib.suppress(NoSuchRun):  # it ended, and so many others after it that it was forgotten
                for stream, text in RunOutput(handle).pieces():
                    if stream == RECORD or not self._printing():
                        continue
                    print_text("stdout" if stream == STDOUT else "stderr", text)
            handle.exception()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"stopped waiting for run {handle.name!r}, which goes on in the driver: "
                f"job.runs()[{handle.name!r}] finds it, .cancel() ends it"
            ) from None
        # Its name is free, though the traceback of what it raised may hold the handle for long.
        self._handles.pop(handle.id, None)
        handle.forget()
        return handle.result()

    def _operation(self, caller: Calls, detached: bool, restarts: int) -> StartRun:
        """Return the operation for a function that has no name yet."""
        if isinstance(restarts, bool) or not isinstance(restarts, int) or not 0 <= restarts <= AT_EACH:
            raise ValueError(f"restarts is a number from 0 to {MOST_RESTARTS}, not {shortened(restarts)}")
        if 0 < restarts < AT_EACH and not caller.knows_restarts:
            raise ProtocolMismatch(
                "the cluster's Loom is older, and starts no function again: upgrade it, or leave out restarts"
            )
        trace = current_trace() if caller.knows_traces else None
        return StartRun("", detached, trace, restarts if caller.knows_restarts and restarts else None)

    def _prepare(
        self,
        caller: Calls,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        name: str | None,
    ) -> tuple[RunHandle, Sequence[Buffer]]:
        caller.check_open()
        if not callable(fn):
            raise TypeError(f"run() takes a function and then its arguments; {fn!r} is not a function")
        label = getattr(fn, "__name__", type(fn).__name__)
        ident = caller.next_id()
        if name is None:
            name = f"{label}-{ident}"
        elif not isinstance(name, str) or not name:
            raise ValueError(f"the name of a run is a text that is not empty, not {shortened(name)}")
        same = next((run for run in list(self._handles.values()) if run.name == name and not run.done()), None)
        if same is not None:
            raise NameTaken(
                f"run {name!r} is still going (id {same.id}): wait for it, cancel it, or take another name",
                code="run_name_taken",
            )
        parts = caller.encoder.dumps((fn, args, kwargs), f"{label} (function, args, kwargs)")
        handle = self._handles[ident] = RunHandle(caller, ident, name, self._follow)
        return handle, parts
