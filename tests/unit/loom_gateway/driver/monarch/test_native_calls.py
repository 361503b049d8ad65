"""The futures of calls that a function in the driver makes, when a process is gone that they wait for."""

from __future__ import annotations

import asyncio
import gc
import inspect
import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from monarch._rust_bindings.monarch_hyperactor.handle import _new_handle_pair
from monarch._src.actor.future import Future
from monarch.actor import Extent

from loom_gateway.driver.monarch import native_calls
from loom_gateway.driver.monarch.errors import MonarchSupervisionError
from loom_gateway.driver.monarch.native_calls import CallTarget, TrackedProcs

BOUND = 30.0  # seconds; far over what any wait takes, so that only a hang fails

get = native_calls._heeding_get(Future.get)
as_asyncio = native_calls._heeding_as_asyncio(Future.as_asyncio)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_calls, "GRACE", 0.01)


def call_on(procs: TrackedProcs, ranks: int = 2) -> tuple[Future[Any], Any]:
    """Return the future of a call on the first processes of a mesh, and what completes it."""
    shape = Extent(["gpus"], [ranks]).region.as_shape()
    handle, completer = _new_handle_pair()
    future: Future[Any] = Future._from_handle(handle)
    future._target = CallTarget(procs, SimpleNamespace(_shape=shape, _mesh_name="counters"), "add")
    return future, completer


GONE = r"counters\.add\(\) has no answer: process 1 of proc mesh 'trainers' is gone"


@pytest.mark.parametrize("timeout", [None, BOUND])
def test_a_thread_that_waits_learns_that_a_process_is_gone(timeout: float | None) -> None:
    procs = TrackedProcs(1, "trainers")
    future, _ = call_on(procs)
    lost = threading.Timer(0.05, procs.lose, [1])
    lost.start()
    with pytest.raises(MonarchSupervisionError, match=GONE):
        get(future, timeout)
    lost.join()


def test_a_task_that_waits_learns_that_a_process_is_gone_and_so_does_a_later_get() -> None:
    procs = TrackedProcs(1, "trainers")
    future, completer = call_on(procs)

    async def wait() -> None:
        awaited = as_asyncio(future)
        threading.Thread(target=procs.lose, args=[1]).start()
        await asyncio.wait_for(awaited, BOUND)

    with pytest.raises(MonarchSupervisionError, match=GONE):
        asyncio.run(wait())
    completer.set_result("too late")
    with pytest.raises(MonarchSupervisionError, match=GONE):
        get(future, 0.0)


def test_a_call_after_the_end_of_a_process_fails_too() -> None:
    procs = TrackedProcs(1, "trainers")
    procs.lose(1)
    future, _ = call_on(procs)

    async def wait() -> None:
        await asyncio.wait_for(as_asyncio(future), BOUND)

    with pytest.raises(MonarchSupervisionError, match=GONE):
        asyncio.run(wait())


def test_a_call_on_other_processes_waits_on() -> None:
    procs = TrackedProcs(1, "trainers")
    future, completer = call_on(procs, ranks=1)

    async def wait() -> Any:
        awaited = as_asyncio(future)
        procs.lose(1)
        done, _ = await asyncio.wait([awaited], timeout=0.05)
        assert not done
        completer.set_result("an answer")
        return await awaited

    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        get(future, 0.05)
    assert asyncio.run(wait()) == "an answer"


def test_an_answer_that_came_first_stays_the_answer() -> None:
    procs = TrackedProcs(1, "trainers")
    future, completer = call_on(procs)

    async def wait() -> Any:
        awaited = as_asyncio(future)
        completer.set_result("an answer")
        await asyncio.wait_for(awaited, BOUND)
        procs.lose(1)
        return await awaited

    assert asyncio.run(wait()) == "an answer"
    assert get(future) == "an answer"


def test_monarch_may_complete_a_call_that_has_failed_here() -> None:
    procs = TrackedProcs(1, "trainers")
    future, completer = call_on(procs)
    complaints: list[Any] = []

    async def wait() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        awaited = as_asyncio(future)
        procs.lose(1)
        with pytest.raises(MonarchSupervisionError):
            await awaited
        other = Future.as_asyncio(Future._from_handle(completer_handle))
        completer.set_exception(RuntimeError("Monarch's own"))
        with pytest.raises(RuntimeError):
            await other

    completer_handle = future._status.handle
    asyncio.run(wait())
    assert not complaints


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), float("inf")])
def test_a_timeout_that_monarch_refuses_is_refused(timeout: float) -> None:
    future, _ = call_on(TrackedProcs(1, "trainers"))
    with pytest.raises(ValueError, match="timeout"):
        get(future, timeout)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The proc meshes for whose lost processes something asks, which are then reported to be gone at once."""
    found: list[int] = []

    def ask(ident: int) -> None:
        found.append(ident)
        native_calls.lose(ident, 1)

    monkeypatch.setattr(native_calls, "_ask", ask)
    return found


def test_a_thread_that_waits_asks_once_for_processes_that_are_gone(asked: list[int]) -> None:
    procs = native_calls.track(11, "trainers")
    for _ in range(2):
        future, completer = call_on(procs)
        with pytest.raises(MonarchSupervisionError, match=GONE):
            get(future, BOUND)
        del completer
    assert asked == [11]


def test_a_task_that_waits_asks_once_for_processes_that_are_gone(asked: list[int]) -> None:
    procs = native_calls.track(12, "trainers")

    async def wait() -> None:
        future, completer = call_on(procs)
        await asyncio.wait_for(as_asyncio(future), BOUND)
        del completer

    for _ in range(2):
        with pytest.raises(MonarchSupervisionError, match=GONE):
            asyncio.run(wait())
    assert asked == [12]


def test_calls_that_are_answered_in_time_ask_for_nothing(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_calls, "GRACE", 0.25)  # in which a busy machine passes the answer on
    procs = native_calls.track(13, "trainers")

    async def wait() -> None:
        future, completer = call_on(procs)
        awaited = as_asyncio(future)
        completer.set_result("an answer")
        await awaited
        looked_at = asyncio.Event()
        asyncio.get_running_loop().call_later(2 * native_calls.GRACE, looked_at.set)
        await looked_at.wait()

    asyncio.run(wait())
    assert asked == []


def test_a_mesh_that_was_sent_is_of_the_same_processes() -> None:
    reduce = native_calls._with_its_procs(lambda mesh, protocol: (SimpleNamespace, ()))
    mesh = SimpleNamespace()
    assert reduce(mesh, 4) == (SimpleNamespace, ())
    native_calls.belong(mesh, TrackedProcs(9, "trainers"))
    make, args = reduce(mesh, 4)
    first, second = make(*args), make(*args)
    assert first._tracked_procs is second._tracked_procs
    assert (first._tracked_procs.ident, first._tracked_procs.name) == (9, "trainers")


def test_nothing_is_kept_of_calls_that_nobody_waits_for_any_more() -> None:
    procs = native_calls.track(7, "trainers")

    async def wait(procs: TrackedProcs) -> None:
        for answered in (True, False):
            future, completer = call_on(procs)
            awaited = as_asyncio(future)
            if answered:
                completer.set_result("an answer")
                await awaited
            del future, completer, awaited

    asyncio.run(wait(procs))
    awaited = procs._awaited
    _until(lambda: not awaited)
    del procs
    _until(lambda: 7 not in native_calls._tracked)


def _until(true: Callable[[], bool]) -> None:
    for _ in range(int(BOUND)):
        gc.collect()
        if true():
            return
        threading.Event().wait(0.1)
    raise AssertionError("it did not come true")


def test_the_signature_of_an_endpoint_is_pickled_as_an_ordinary_one() -> None:
    signature = native_calls._Signature([inspect.Parameter("k", inspect.Parameter.POSITIONAL_OR_KEYWORD)])
    signature.target = call_on(TrackedProcs(1, "trainers"))[0]._target
    assert str(pickle.loads(pickle.dumps(signature))) == "(k)"
    assert type(pickle.loads(pickle.dumps(signature))) is inspect.Signature
