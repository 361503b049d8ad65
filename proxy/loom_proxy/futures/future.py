"""Results that are on their way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from loom.errors import OperationCancelled, WaitTimeout
from loom.wire.bodies import Body
from loom_proxy.display import progress
from loom_proxy.display.notebook import future_html
from loom_proxy.futures.timeouts import check_timeout
from loom_proxy.futures.timing import Timing
from loom_proxy.session.waits import Waits

logger = logging.getLogger(__name__)

R = TypeVar("R")

_PENDING = object()


class FutureProxy(Generic[R]):
    """The result of an operation in the cluster. As ``monarch.actor.Future``.

    `get` waits for it in ordinary code and ``await`` in a coroutine, on any event loop. It may be waited for by
    many, many times; a wait that times out leaves the future as it was. The result is unpickled by whoever asks
    for it first, in their thread.
    """

    def __init__(
        self,
        connection: Waits,
        operation: Body | None = None,
        ident: int | None = None,
        convert: Callable[[Any], R] | None = None,
    ) -> None:
        self._connection = connection
        self.operation = operation
        """What was asked, for what is shown while it is waited for."""
        self._ident = ident
        """Id of the operation, if it has this one answer."""
        self._convert = convert
        self._lock = threading.Lock()
        self._unpack: Callable[[], R] | None = None
        self._value: Any = _PENDING
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._started = time.perf_counter()
        self._finished = 0.0
        self._rpc_ms = 0.0

    def _complete(self, unpack: Callable[[], R], rpc_ms: float = 0.0) -> None:
        """Note the answer; ``unpack`` makes the value of it, or raises the error that it is."""
        self._finished = time.perf_counter()
        with self._lock:
            if self._unpack is not None:
                return
            self._rpc_ms = rpc_ms
            self._unpack = unpack
            callbacks, self._callbacks = self._callbacks, []
        if callbacks:
            self._connection.read_loop.awaits_no_more(self)
        for callback in callbacks:
            callback()

    def done(self) -> bool:
        """Whether the answer is here."""
        return self._unpack is not None

    def get(self, timeout: float | None = None) -> R:
        """Wait for the result.

        Args:
            timeout: seconds to wait at most; None waits for ever.

        Raises:
            WaitTimeout: the time is up (a `TimeoutError`). The operation goes on; ask again whenever you like.
            ActorError: the endpoint raised.
            SupervisionError: a process or an actor that had to answer is dead.
            LoomError: the session or the connection failed.
        """
        check_timeout(timeout)
        if self._unpack is None:
            self._connection.flush()
            self._wait(timeout)
        return self._result()

    def result(self, timeout: float | None = None) -> R:
        """The same as `get`."""
        return self.get(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait; return what `get` would raise, or None. A timeout raises as it does there."""
        check_timeout(timeout)
        if self._unpack is None:
            self._connection.flush()
            self._wait(timeout)
        try:
            self._result()
        except BaseException as error:
            if error is self._error:
                return error
            raise
        return None

    def cancel(self) -> bool:
        """Take the operation back, if it has not been started; as `concurrent.futures.Future.cancel`.

        An operation is started when the driver has handed it to Monarch. Before that it may be on this machine, on
        the way, or in the driver behind others; if it has left this machine, the driver is asked, which takes a
        round trip. One that has been started goes on. Results of a `stream` cannot be taken back.

        Returns:
            True if the operation will not be started: whoever waits gets an `OperationCancelled`.
        """
        ident = self._ident
        if self._unpack is None and ident is not None and self._connection.withdraw(ident):
            self._complete(_Cancelled())
        return self.cancelled()

    def cancelled(self) -> bool:
        """Whether the operation was taken back."""
        return isinstance(self._unpack, _Cancelled) or isinstance(self._error, OperationCancelled)

    @property
    def timing(self) -> Timing | None:
        """Where the time went, once the answer is here."""
        if self._unpack is None:
            return None
        wall_ms = (self._finished - self._started) * 1000
        return Timing(wall_ms, wall_ms - self._rpc_ms, self._rpc_ms)

    def add_done_callback(self, callback: Callable[[FutureProxy[R]], None]) -> None:
        """Have a function called when the answer is here: at once if it is, else by the thread that takes it in.

        What it raises is logged.
        """

        def call() -> None:
            try:
                callback(self)
            except Exception:
                # It would end the connection.
                logger.exception("a callback of %r raised", self)

        self._connection.flush()
        if not self._add(call):
            call()

    def as_asyncio(self) -> asyncio.Future[R]:
        """An ``asyncio.Future`` of the running loop with the same outcome, for ``asyncio.gather`` and the like.

        To cancel it ends that wait only; see `cancel`. Each call gives a new one.

        Raises:
            RuntimeError: no event loop runs in this thread.
        """
        if asyncio._get_running_loop() is None:
            raise RuntimeError("as_asyncio() needs a running event loop; elsewhere use get()")
        return asyncio.ensure_future(self._await())

    def __await__(self) -> Generator[Any, None, R]:
        if asyncio._get_running_loop() is None:
            raise ValueError("a future is awaited on a running event loop; elsewhere use get()")
        return self._await().__await__()

    async def _await(self) -> R:
        if self._unpack is None:
            loop = asyncio.get_running_loop()
            arrived: asyncio.Future[None] = loop.create_future()

            def wake() -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
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
            self._connection.read_loop.awaits(self)
            return True

    def _wait(self, timeout: float | None) -> None:
        if timeout is not None and timeout > threading.TIMEOUT_MAX:
            timeout = None
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
        """Take back what `_add` added."""
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)
                if not self._callbacks:
                    self._connection.read_loop.awaits_no_more(self)

    def _result(self) -> R:
        with self._lock:
            if self._value is _PENDING and self._error is None:
                assert self._unpack is not None
                try:
                    value: Any = self._unpack()
                    self._value = value if self._convert is None else self._convert(value)
                except Exception as error:  # noqa: BLE001 - raised to every waiter
                    self._error = error
                self._unpack = _unpacked
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]

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


class _Cancelled:
    """The answer of an operation that was taken back before it was started."""

    def __call__(self) -> Any:
        raise OperationCancelled("the operation was taken back before it was started")


def _unpacked() -> Any:
    """Stands for a payload that has been unpacked, so that it can be freed."""


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
