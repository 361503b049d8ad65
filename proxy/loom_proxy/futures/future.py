"""The future of an operation in the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from loom.errors import OperationCancelled, WaitTimeout, WrongArguments
from loom.in_cluster import Counterpart
from loom.tracing.spans import record_call, recorder
from loom.wire.bodies import EndpointCall
from loom.wire.body import Body
from loom_proxy import progress
from loom_proxy.futures.timing import Timing, check_timeout
from loom_proxy.notebook.html import future_html
from loom_proxy.notebook.live import LiveHtml, Shown
from loom_proxy.session.waits import Waits

logger = logging.getLogger(__name__)

R = TypeVar("R")

_PENDING = object()


class LargeAnswer(functools.partial[Any]):
    """Unpacks a large answer, whose parts are the first argument."""

    @property
    def size(self) -> int:
        """Bytes of the parts."""
        return sum(map(len, self.args[0]))


class FutureProxy(Shown, Generic[R], metaclass=Counterpart):
    """The future result of an operation in the cluster; the counterpart of ``monarch.actor.Future``.

    `get` waits for the result in ordinary code and ``await`` in a coroutine, on any event loop. Many threads and
    coroutines may wait, many times; a wait that times out leaves the future as it was. The first thread that asks
    for the result unpickles it.
    """

    def __init__(
        self,
        connection: Waits | None = None,
        operation: Body | None = None,
        ident: int | None = None,
        convert: Callable[[Any], R] | None = None,
    ) -> None:
        if connection is None:
            raise WrongArguments(
                "Future objects are returned by Monarch operations and cannot be constructed directly."
            )
        self._connection = connection
        self.operation = operation
        """The operation, which the progress display of a long wait names."""
        self._ident = ident  # id of the operation; None if it has several answers
        self._answer: Any = None  # reported to the driver when the answer was read; None for nothing
        self._convert = convert
        self._lock = threading.Lock()
        self._unpack: Callable[[], R] | None = None
        """Makes the value from the answer, or raises its error; None until the answer has come."""
        self._value: Any = _PENDING  # the unpickled result; `_PENDING` before that, or if there is an error
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        """Functions to call when the answer comes, which also end waits."""
        self._started = time.perf_counter()
        self._finished = 0.0
        self._rpc_ms = 0.0

    def _complete(self, unpack: Callable[[], R], rpc_ms: float = 0.0) -> None:
        """Complete the future; ``unpack`` makes the value from the answer, or raises its error."""
        self._finished = time.perf_counter()
        with self._lock:
            if self._unpack is not None:
                return
            self._rpc_ms = rpc_ms
            self._unpack = unpack
            callbacks, self._callbacks = self._callbacks, []
        if callbacks:
            self._connection.read_loop.remove_waiter(self)
        for callback in callbacks:
            callback()
        if recorder.sinks:
            self._record()

    def _fail_in_child(self, unpack: Callable[[], R]) -> None:
        """Fail in a forked child, unless the answer has come. Waiting threads are the parent's."""
        self._lock = threading.Lock()
        self._callbacks = []
        if self._unpack is None:
            self._unpack = unpack

    def _record(self) -> None:
        """Record a call of an endpoint for `loom.tracing`."""
        called = self.operation
        if isinstance(called, EndpointCall):
            fields = {"endpoint": called.endpoint, "rpc_ms": round(self._rpc_ms, 4)}
            record_call("call", self._started, self._finished, called.trace, **fields)

    def done(self) -> bool:
        """Return whether the answer has come."""
        return self._unpack is not None

    def get(self, timeout: float | None = None) -> R:
        """Wait for the result.

        Args:
            timeout: seconds to wait at most; None waits for ever.

        Raises:
            WaitTimeout: the time is up (a `TimeoutError`). The operation goes on and can be waited for again.
            ActorError: the endpoint raised.
            SupervisionError: a process or an actor that had to answer is dead.
            LoomError: the session or the connection failed.
        """
        timeout = check_timeout(timeout)
        if self._unpack is None:
            self._connection.flush()
            self._wait(timeout)
        return self._result()

    def result(self, timeout: float | None = None) -> R:
        """Wait for the result, exactly as `get` does."""
        return self.get(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the answer; return the error that `get` would raise, or None.

        Raises:
            WaitTimeout: the time is up.
        """
        try:
            self.get(timeout)
        except BaseException as error:
            if error is self._error:
                return error
            raise
        return None

    def cancel(self) -> bool:
        """Cancel the operation if it has not been started; the counterpart of `concurrent.futures.Future.cancel`.

        An operation counts as started when the driver has handed it to Monarch. Until then it waits on this
        machine, on the network, or in the driver behind others. If it has left this machine, the driver decides,
        which takes a round trip. A started operation goes on. Results of a `stream` cannot be cancelled.

        Returns:
            True if the operation will not be started: all who wait get an `OperationCancelled`.
        """
        ident = self._ident
        if self._unpack is None and ident is not None and self._connection.withdraw(ident):
            self._complete(_cancelled)
        return self.cancelled()

    def cancelled(self) -> bool:
        """Return whether the operation was cancelled."""
        return self._unpack is _cancelled or isinstance(self._error, OperationCancelled)

    @property
    def timing(self) -> Timing | None:
        """The operation's time accounting; None until the answer has come."""
        if self._unpack is None:
            return None
        wall_ms = (self._finished - self._started) * 1000
        return Timing(wall_ms, wall_ms - self._rpc_ms, self._rpc_ms)

    def add_done_callback(self, callback: Callable[[FutureProxy[R]], None]) -> None:
        """Call a function when the answer has come: at once if it has, else in the thread that takes it in.

        An exception of the function is logged.
        """

        def call() -> None:
            try:
                callback(self)
            except Exception:
                # Not raised: in the thread that reads, it would end the connection.
                logger.exception("a callback of %r raised", self)

        self._connection.flush()
        if not self._add(call):
            call()

    def as_asyncio(self) -> asyncio.Future[R]:
        """Return an ``asyncio.Future`` of the running loop with the same result, for ``asyncio.gather``, say.

        Cancelling that future ends that wait only; `cancel` cancels the operation. Each call returns a new one.

        Raises:
            RuntimeError: no event loop runs in this thread.
        """
        if asyncio._get_running_loop() is None:
            raise RuntimeError("as_asyncio() requires a running asyncio event loop. Elsewhere use get()")
        return asyncio.ensure_future(self._await())

    def __await__(self) -> Generator[Any, None, R]:
        if asyncio._get_running_loop() is None:
            raise ValueError("__await__ with no active event loop (either asyncio or tokio): elsewhere use get()")
        return self._await().__await__()

    async def _await(self) -> R:
        if self._unpack is None:
            loop = asyncio.get_running_loop()
            arrived: asyncio.Future[None] = loop.create_future()

            def wake() -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile, and the wait with it
                    loop.call_soon_threadsafe(_resolve, arrived)

            self._connection.flush()
            if self._add(wake):
                try:
                    with progress.shown_on(loop, self._connection, self.operation):
                        await arrived
                except BaseException:  # the wait was cancelled
                    self._drop(wake)
                    raise
        return self._result()

    def _add(self, callback: Callable[[], None]) -> bool:
        with self._lock:
            if self._unpack is not None:
                return False
            self._callbacks.append(callback)
            self._connection.read_loop.add_waiter(self)
            return True

    def _wait(self, timeout: float | None) -> None:
        if timeout is not None and timeout > threading.TIMEOUT_MAX:
            timeout = None
        # The first part of the wait may read inline, and needs no progress display.
        at_first = progress.AFTER if timeout is None else min(timeout, progress.AFTER)
        came = self._read(at_first)
        if came:
            return
        gate = threading.Lock()
        gate.acquire()
        if not self._add(gate.release):
            return
        try:
            if came is None:
                came = gate.acquire(timeout=at_first)
            if not came and timeout != at_first:
                with progress.shown(self._connection, self.operation):
                    came = gate.acquire(timeout=-1 if timeout is None else timeout - at_first)
        except BaseException:  # interrupted
            self._drop(gate.release)
            raise
        if not came:
            self._drop(gate.release)
            if self._unpack is None:
                away = "; the connection is lost and is being made again" if self._connection.away else ""
                raise WaitTimeout(
                    f"no answer within {timeout:g} s; the operation goes on, and can be waited for again{away}"
                )

    def _read(self, seconds: float) -> bool | None:
        """Read from the connection until the answer has come; see `ReadLoop.read_inline` for the result."""
        return self._connection.read_loop.read_inline(self._is_here, seconds)

    def _is_here(self) -> bool:
        return self._unpack is not None

    def _drop(self, callback: Callable[[], None]) -> None:
        """Remove a callback that `_add` added, if it has not been called."""
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)
                if not self._callbacks:
                    self._connection.read_loop.remove_waiter(self)

    def _result(self) -> R:
        with self._lock:
            if self._value is _PENDING and self._error is None:
                unpack = self._unpack
                assert unpack is not None
                try:
                    value: Any = unpack()
                    self._value = value if self._convert is None else self._convert(value)
                except Exception as error:  # noqa: BLE001 - raised to every waiter
                    self._error = error
                self._unpack = _unpacked
                if self._answer is not None:
                    self._connection.reads.note(self._answer, unpack.size if type(unpack) is LargeAnswer else 0)
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]

    def _live(self) -> LiveHtml:
        return LiveHtml(self._repr_html_, lambda: self._state() in ("done", "failed"))

    def _repr_html_(self) -> str:
        value = None if self._value is _PENDING else self._value
        return future_html(self._state(), self.timing, self._error, value)

    def _state(self) -> str:
        if self._unpack is None:
            return "pending"
        if self._value is _PENDING and self._error is None:
            return "arrived"
        return "failed" if self._error is not None else "done"

    def __repr__(self) -> str:
        return f"<FutureProxy {self._state()}>"


def _cancelled() -> Any:
    raise OperationCancelled("the operation was taken back before it was started")


def _unpacked() -> Any:
    """Take the place of `FutureProxy._unpack` after unpacking, so that the payload can be freed."""


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
