"""Futures: waited for by anyone, in any thread and on any loop, as often as they like, and unpickled once."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvloop

from loom.errors import ActorError, LoomError, UnpicklableError, WaitTimeout
from loom_proxy.futures.future import FutureProxy
from tests.unit.loom_proxy.session.silence import Silence

SOON = 0.05
"""Seconds after which an answer comes that a test waits for."""

IN_TIME = 10.0
"""Seconds that no wait may take."""


class Payload:
    """An answer as the connection hands it over: called to be unpickled, by whoever asks first."""

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self.value = value
        self.error = error
        self.unpacked = 0

    def __call__(self) -> Any:
        self.unpacked += 1
        if self.error is not None:
            raise self.error
        return self.value


@pytest.fixture
def connection() -> Silence:
    return Silence()


@pytest.fixture
def future(connection: Silence) -> FutureProxy[Any]:
    return FutureProxy(connection)  # type: ignore[arg-type]


def soon(action: Callable[..., Any], *args: Any) -> None:
    """As the connection's reader thread would do it."""
    threading.Timer(SOON, action, args).start()


# -- get ----------------------------------------------------------------------------------------------------


def test_an_answer_that_is_here_is_given_at_once(future: FutureProxy[int]) -> None:
    future._complete(Payload(5))

    assert future.get() == 5
    assert future.result(timeout=0) == 5


def test_get_waits_for_the_answer(future: FutureProxy[int]) -> None:
    soon(future._complete, Payload(5))

    assert future.get(IN_TIME) == 5


def test_get_sends_what_was_gathered_before_it_waits(future: FutureProxy[int], connection: Silence) -> None:
    with pytest.raises(WaitTimeout):
        future.get(timeout=0)

    assert connection.flushes == 1


def test_a_timeout_leaves_the_future_as_it_was(future: FutureProxy[int]) -> None:
    for _ in range(3):
        with pytest.raises(WaitTimeout, match=r"no answer within 0\.01 s; the operation goes on"):
            future.get(timeout=0.01)
    assert not future.done()

    future._complete(Payload(5))

    assert future.get() == 5


def test_a_timeout_is_a_timeout_error(future: FutureProxy[int]) -> None:
    with pytest.raises(TimeoutError):
        future.result(timeout=0)


def test_waits_that_timed_out_leave_nothing_behind(future: FutureProxy[int]) -> None:
    for _ in range(100):
        with pytest.raises(WaitTimeout):
            future.get(timeout=0)

    assert future._callbacks == []


def test_a_negative_timeout_is_refused(future: FutureProxy[int]) -> None:
    with pytest.raises(ValueError, match="invalid timeout -1: expected a non-negative, finite number"):
        future.get(timeout=-1)


def test_a_negative_timeout_is_refused_if_the_answer_is_here(future: FutureProxy[int]) -> None:
    future._complete(Payload(5))

    for wait in (future.get, future.exception):
        with pytest.raises(ValueError, match="invalid timeout -1"):
            wait(timeout=-1)


def test_many_threads_wait_for_one_answer(future: FutureProxy[object]) -> None:
    payload = Payload(object())
    with ThreadPoolExecutor(16) as pool:
        waits = [pool.submit(future.get, IN_TIME) for _ in range(16)]
        soon(future._complete, payload)
        values = [wait.result(IN_TIME) for wait in waits]

    assert all(value is payload.value for value in values)
    assert payload.unpacked == 1


def test_threads_may_wait_while_the_answer_comes() -> None:
    for number in range(200):
        future: FutureProxy[int] = FutureProxy(Silence())  # type: ignore[arg-type]
        start = threading.Barrier(2)

        def answer(
            future: FutureProxy[int] = future, start: threading.Barrier = start, number: int = number
        ) -> None:
            start.wait(IN_TIME)
            future._complete(Payload(number))

        thread = threading.Thread(target=answer)
        thread.start()
        start.wait(IN_TIME)
        assert future.get(IN_TIME) == number
        thread.join()


def test_only_the_first_answer_counts(future: FutureProxy[int]) -> None:
    future._complete(Payload(5))
    future._complete(Payload(6))
    assert future.get() == 5

    future._complete(Payload(7))
    assert future.get() == 5


def test_none_is_an_answer(future: FutureProxy[None]) -> None:
    payload = Payload(None)
    future._complete(payload)

    assert future.get() is None
    assert future.get() is None
    assert payload.unpacked == 1


# -- failures -----------------------------------------------------------------------------------------------


def test_get_raises_what_the_endpoint_raised(future: FutureProxy[int]) -> None:
    failure = ActorError(KeyError("weights"))
    future._complete(Payload(error=failure))

    for _ in range(2):
        with pytest.raises(ActorError) as caught:
            future.get()
        assert caught.value is failure


def test_an_answer_that_cannot_be_unpickled_is_an_error_for_every_waiter(future: FutureProxy[int]) -> None:
    payload = Payload(error=UnpicklableError("no module named 'farm'"))
    future._complete(payload)

    for _ in range(2):
        with pytest.raises(UnpicklableError, match="farm"):
            future.get()
    assert isinstance(future.exception(), UnpicklableError)
    assert payload.unpacked == 1


def test_exception_waits_and_returns_what_get_would_raise(future: FutureProxy[int]) -> None:
    failure = LoomError("lost")
    soon(future._complete, Payload(error=failure))

    assert future.exception(IN_TIME) is failure


def test_exception_is_none_if_there_is_a_result(future: FutureProxy[int]) -> None:
    future._complete(Payload(5))

    assert future.exception() is None


def test_a_result_that_is_an_exception_is_a_result(future: FutureProxy[Exception]) -> None:
    value = ValueError("returned, not raised")
    future._complete(Payload(value))

    assert future.get() is value
    assert future.exception() is None


def test_exception_times_out_as_get_does(future: FutureProxy[int]) -> None:
    with pytest.raises(WaitTimeout):
        future.exception(timeout=0.01)


# -- await --------------------------------------------------------------------------------------------------


async def waited(future: FutureProxy[Any]) -> Any:
    return await future


def run_on_asyncio(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def run_on_uvloop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return uvloop.run(coroutine)


runners = pytest.mark.parametrize("run", [run_on_asyncio, run_on_uvloop], ids=["asyncio", "uvloop"])


@runners
def test_a_future_can_be_awaited(future: FutureProxy[int], run: Callable[..., Any], connection: Silence) -> None:
    soon(future._complete, Payload(5))

    assert run(waited(future)) == 5
    assert connection.flushes == 1
    assert run(waited(future)) == 5


@runners
def test_await_raises_what_get_raises(future: FutureProxy[int], run: Callable[..., Any]) -> None:
    soon(future._complete, Payload(error=LoomError("lost")))

    with pytest.raises(LoomError, match="lost"):
        run(waited(future))


def test_several_loops_and_threads_wait_for_one_answer(future: FutureProxy[object]) -> None:
    payload = Payload(object())
    with ThreadPoolExecutor(6) as pool:
        waits = [pool.submit(run, waited(future)) for run in (run_on_asyncio, run_on_uvloop) for _ in range(2)]
        waits += [pool.submit(future.get, IN_TIME) for _ in range(2)]
        soon(future._complete, payload)
        values = [wait.result(IN_TIME) for wait in waits]

    assert all(value is payload.value for value in values)
    assert payload.unpacked == 1


@runners
def test_futures_can_be_gathered(run: Callable[..., Any]) -> None:
    futures: list[FutureProxy[int]] = [FutureProxy(Silence()) for _ in range(5)]  # type: ignore[arg-type]

    async def gather() -> list[int]:
        return await asyncio.gather(*(future.as_asyncio() for future in futures))

    for number, future in enumerate(reversed(futures)):
        soon(future._complete, Payload(number))

    assert run(gather()) == [4, 3, 2, 1, 0]


@runners
def test_a_wait_that_is_cancelled_leaves_the_future_as_it_was(
    future: FutureProxy[int], run: Callable[..., Any]
) -> None:
    async def wait_twice() -> int:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future.as_asyncio(), 0.01)
        soon(future._complete, Payload(5))
        return await future

    assert run(wait_twice()) == 5


def test_an_answer_after_a_loop_was_closed_reaches_the_others(future: FutureProxy[int]) -> None:
    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future.as_asyncio(), 0.01)

    asyncio.run(give_up())
    soon(future._complete, Payload(5))

    assert future.get(IN_TIME) == 5


# -- callbacks ----------------------------------------------------------------------------------------------


def test_callbacks_are_called_when_the_answer_comes(future: FutureProxy[int], connection: Silence) -> None:
    seen: list[Any] = []
    future.add_done_callback(lambda done: seen.append((1, done.get())))
    future.add_done_callback(lambda done: seen.append((2, done.get())))
    assert seen == []
    assert connection.flushes

    future._complete(Payload(5))

    assert seen == [(1, 5), (2, 5)]


def test_a_callback_is_called_at_once_if_the_answer_is_here(future: FutureProxy[int]) -> None:
    seen: list[Any] = []
    future._complete(Payload(5))

    future.add_done_callback(seen.append)

    assert seen == [future]


def test_a_callback_that_raises_is_logged_and_keeps_nobody_waiting(
    future: FutureProxy[int], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    def careless(done: FutureProxy[int]) -> None:
        raise RuntimeError("careless")

    future.add_done_callback(careless)
    future.add_done_callback(seen.append)

    with caplog.at_level(logging.ERROR):
        future._complete(Payload(5))

    assert seen == [future]
    assert "careless" in caplog.text


# -- what else a future tells -------------------------------------------------------------------------------


def test_the_value_is_unpickled_when_it_is_asked_for(future: FutureProxy[int]) -> None:
    payload = Payload(5)
    future._complete(payload)
    assert future.done()
    assert payload.unpacked == 0

    future.get()

    assert payload.unpacked == 1


def test_timing_adds_up(future: FutureProxy[int]) -> None:
    assert future.timing is None
    time.sleep(0.02)
    future._complete(Payload(5), rpc_ms=7.5)

    timing = future.timing

    assert timing is not None
    assert timing.rpc_ms == 7.5
    assert timing.wall_ms >= 20
    assert timing.queue_ms == pytest.approx(timing.wall_ms - 7.5)


@pytest.mark.parametrize("error", [None, LoomError("lost")])
def test_the_repr_tells_the_state(future: FutureProxy[int], error: LoomError | None) -> None:
    states = [repr(future)]
    future._complete(Payload(5, error))
    states.append(repr(future))
    future.exception()
    states.append(repr(future))

    end = "done" if error is None else "failed"
    assert states == [f"<FutureProxy {state}>" for state in ("pending", "arrived", end)]
