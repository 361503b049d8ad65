"""Waiting for many futures: in threads and on event loops, as `concurrent.futures` does it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

import loom
from loom.errors import ActorError, OperationCancelled, WaitTimeout
from loom_proxy.futures.future import FutureProxy, _cancelled
from loom_proxy.futures.waiting_for_many import as_completed, wait
from tests.unit.loom_proxy.session.silence import Silence

SOON = 0.02
"""Seconds after which an answer comes that a test waits for."""

IN_TIME = 30.0
"""Seconds that no wait may take."""


def pending(count: int, connection: Any = None) -> list[FutureProxy[int]]:
    connection = connection or Silence()
    return [FutureProxy(connection) for _ in range(count)]


def answer(future: FutureProxy[Any], value: Any = None, error: BaseException | None = None) -> None:
    def unpack() -> Any:
        if error is not None:
            raise error
        return value

    future._complete(unpack)


def soon(action: Callable[..., Any], *args: Any) -> None:
    """As the connection's reader thread would do it."""
    threading.Timer(SOON, action, args).start()


def run_on_asyncio(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def run_on_uvloop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return uvloop.run(coroutine)


runners = pytest.mark.parametrize("run", [run_on_asyncio, run_on_uvloop], ids=["asyncio", "uvloop"])


@pytest.fixture(autouse=True)
def no_thread_per_future() -> Iterator[None]:
    before = threading.active_count()
    yield
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(IN_TIME)
    assert threading.active_count() <= before, threading.enumerate()


# -- wait ---------------------------------------------------------------------------------------------------


def test_wait_waits_for_all() -> None:
    futures = pending(20)
    shuffled = random.Random(1).sample(futures, len(futures))
    for number, future in enumerate(shuffled):
        if number % 2:
            answer(future, number)
        else:
            soon(answer, future, number)

    done, not_done = wait(futures, IN_TIME)

    assert done == set(futures)
    assert not_done == set()


def test_wait_for_nothing_returns_at_once() -> None:
    for when in ("ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION"):
        assert wait([], return_when=when) == (set(), set())


def test_wait_returns_what_is_there_when_the_time_is_up() -> None:
    first, second = pending(2)
    answer(first)

    found = wait([first, second], timeout=0.01)

    assert found.done == {first}
    assert found.not_done == {second}
    assert second._callbacks == []


def test_a_future_that_is_given_twice_counts_once() -> None:
    (future,) = pending(1)
    soon(answer, future)

    assert wait([future, future], IN_TIME) == ({future}, set())


def test_wait_for_the_first() -> None:
    futures = pending(5)
    soon(answer, futures[3])

    done, not_done = wait(futures, IN_TIME, return_when=concurrent.futures.FIRST_COMPLETED)

    assert done == {futures[3]}
    assert not_done == {future for future in futures if future is not futures[3]}
    assert all(future._callbacks == [] for future in not_done)


def test_wait_for_the_first_failure() -> None:
    futures = pending(4)
    answer(futures[0], 0)
    soon(answer, futures[1], 1)
    soon(answer, futures[2], None, ActorError(KeyError("weights")))

    done, not_done = wait(futures, IN_TIME, return_when=concurrent.futures.FIRST_EXCEPTION)

    assert futures[2] in done
    assert not_done == {futures[3]} or not_done == {futures[1], futures[3]}


def test_wait_for_a_failure_that_does_not_come_waits_for_all() -> None:
    futures = pending(3)
    futures[0]._complete(_cancelled)  # which is no failure, as in concurrent.futures
    soon(answer, futures[1], 1)
    soon(answer, futures[2], ValueError("returned, not raised"))

    assert wait(futures, IN_TIME, return_when="FIRST_EXCEPTION") == (set(futures), set())


def test_wait_sends_what_was_gathered_by_each_connection() -> None:
    one, two = Silence(), Silence()

    wait([*pending(3, one), *pending(3, two)], timeout=0)

    assert (one.flushes, two.flushes) == (1, 1)


def test_wait_is_like_that_of_concurrent_futures() -> None:
    for when in ("ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION"):
        for states in (("done", "pending"), ("failed", "pending"), ("done", "done"), ("done", "failed")):
            theirs: list[concurrent.futures.Future[int]] = [concurrent.futures.Future() for _ in states]
            ours = pending(len(states))
            for state, their, our in zip(states, theirs, ours, strict=True):
                if state == "done":
                    their.set_result(1)
                    answer(our, 1)
                elif state == "failed":
                    their.set_exception(ValueError("failed"))
                    answer(our, None, ValueError("failed"))
            their_done, _ = concurrent.futures.wait(theirs, 0.01, when)
            our_done, _ = wait(ours, 0.01, when)
            assert [f in their_done for f in theirs] == [f in our_done for f in ours], (when, states)


def test_many_threads_wait_for_the_same_futures() -> None:
    futures = pending(50)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waits = [pool.submit(wait, futures, IN_TIME) for _ in range(4)]
        walks = [pool.submit(lambda: list(as_completed(futures, IN_TIME))) for _ in range(4)]
        for future in futures:
            answer(future)
        assert all(found.result(IN_TIME) == (set(futures), set()) for found in waits)
        orders = [walk.result(IN_TIME) for walk in walks]

    assert all(set(order) == set(futures) and len(order) == 50 for order in orders)


@pytest.mark.parametrize("call", [wait, as_completed])
def test_bad_arguments_are_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="5 is not a future of Loom's but a int"):
        call([5])
    with pytest.raises(TypeError, match="is not a future of Loom's but a Future"):
        call([concurrent.futures.Future()])
    for timeout in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="expected a non-negative, finite number of seconds"):
            call(pending(1), timeout=timeout)


def test_an_unknown_return_when_is_refused() -> None:
    with pytest.raises(ValueError, match="return_when is 'ALL': give one of FIRST_COMPLETED, FIRST_EX"):
        wait(pending(1), return_when="ALL")


# -- as_completed -------------------------------------------------------------------------------------------


def test_futures_come_as_they_are_completed() -> None:
    futures = pending(10)
    order = random.Random(2).sample(futures, len(futures))
    for future in order[:4]:
        answer(future)

    def answer_the_rest() -> None:
        for future in order[4:]:
            answer(future)

    soon(answer_the_rest)
    completed = list(as_completed(futures, IN_TIME))

    assert set(completed[:4]) == set(order[:4])
    assert completed[4:] == order[4:]


def test_as_completed_is_an_iterator() -> None:
    first, second = pending(2)
    completed = as_completed([first, second])
    answer(second)
    assert next(completed) is second
    answer(first)
    assert next(completed) is first
    with pytest.raises(StopIteration):
        next(completed)


def test_as_completed_times_out_and_leaves_the_futures_as_they_were() -> None:
    futures = pending(3)
    answer(futures[1])
    completed = as_completed(futures, timeout=0.01)

    assert next(completed) is futures[1]
    with pytest.raises(WaitTimeout, match=r"2 of 3 futures had no answer within 0\.01 s"):
        next(completed)

    assert futures[0]._callbacks == []
    answer(futures[0], 5)
    assert futures[0].get() == 5


def test_failures_and_cancellations_come_too() -> None:
    failed, cancelled = pending(2)
    answer(failed, None, ActorError(KeyError("weights")))
    cancelled._complete(_cancelled)

    assert set(as_completed([failed, cancelled], IN_TIME)) == {failed, cancelled}
    assert cancelled.cancelled()
    assert not failed.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        cancelled.get()
    with pytest.raises(OperationCancelled):
        cancelled.get()


def test_as_completed_does_not_keep_what_it_gave() -> None:
    futures = pending(2)
    answer(futures[0])
    completed = as_completed(futures)
    count = sys.getrefcount(futures[0])

    next(completed)

    assert sys.getrefcount(futures[0]) < count


@runners
def test_as_completed_on_an_event_loop(run: Callable[..., Any]) -> None:
    futures = pending(10)
    order = random.Random(3).sample(futures, len(futures))

    async def walk() -> list[FutureProxy[int]]:
        soon(lambda: [answer(future) for future in order])
        return [future async for future in as_completed(futures, IN_TIME)]

    assert run(walk()) == order


@runners
def test_as_completed_times_out_on_an_event_loop(run: Callable[..., Any]) -> None:
    futures = pending(2)

    async def walk() -> None:
        answer(futures[0])
        completed = as_completed(futures, 0.01)
        assert await completed.__anext__() is futures[0]
        with pytest.raises(WaitTimeout, match="1 of 2 futures"):
            await completed.__anext__()

    run(walk())
    assert futures[1]._callbacks == []


@runners
def test_a_walk_that_is_cancelled_can_go_on(run: Callable[..., Any]) -> None:
    (future,) = pending(1)

    async def walk() -> None:
        completed = as_completed([future])
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(completed.__anext__(), 0.01)
        soon(answer, future)
        assert await completed.__anext__() is future

    run(walk())


def test_answers_may_come_while_the_wait_begins() -> None:
    for _ in range(200):
        futures = pending(3)
        start = threading.Barrier(2)

        def answer_all(futures: list[FutureProxy[int]] = futures, start: threading.Barrier = start) -> None:
            start.wait(IN_TIME)
            for future in futures:
                answer(future)

        thread = threading.Thread(target=answer_all)
        thread.start()
        start.wait(IN_TIME)
        assert len(list(as_completed(futures, IN_TIME))) == 3
        assert wait(futures, IN_TIME).done == set(futures)
        thread.join()


# -- futures on loops ---------------------------------------------------------------------------------------


def test_as_asyncio_needs_a_loop() -> None:
    (future,) = pending(1)
    with pytest.raises(RuntimeError, match="running asyncio event loop"):
        future.as_asyncio()
    with pytest.raises(ValueError, match="__await__ with no active event loop"):
        future.__await__()
    answer(future, 5)
    assert future.get() == 5


@runners
def test_as_asyncio_gives_an_asyncio_future_each_time(run: Callable[..., Any]) -> None:
    (future,) = pending(1)

    async def observe() -> None:
        one, two = future.as_asyncio(), future.as_asyncio()
        assert isinstance(one, asyncio.Future)
        assert one is not two
        assert one.cancel()
        soon(answer, future, 5)
        assert await two == 5
        assert await future.as_asyncio() == 5

    run(observe())
    assert not future.cancelled()


@runners
def test_waits_that_are_cancelled_leave_nothing_behind(run: Callable[..., Any]) -> None:
    (future,) = pending(1)

    async def give_up() -> None:
        for _ in range(20):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(future, 0.001)

    run(give_up())
    assert future._callbacks == []


def test_the_names_are_looms() -> None:
    assert loom.wait is wait
    assert loom.as_completed is as_completed
    assert issubclass(loom.OperationCancelled, (loom.LoomError, concurrent.futures.CancelledError))
