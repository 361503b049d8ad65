"""`wait` and `as_completed` of Monarch's futures, alone and beside Loom's. The futures are real."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
from monarch._rust_bindings.monarch_hyperactor.handle import _new_handle_pair
from monarch.actor import Future

import loom
from loom_proxy.futures.future import FutureProxy
from loom_proxy.futures.waiting_for_many import as_completed, wait
from tests.unit.loom_proxy.session.silence import Silence

SOON = 0.02
IN_TIME = 30.0


def pending(count: int) -> tuple[list[Any], list[Any]]:
    """Futures, and what completes each."""
    pairs = [_new_handle_pair() for _ in range(count)]
    return [Future._from_handle(handle) for handle, _ in pairs], [completer for _, completer in pairs]


def test_wait_tells_which_are_done() -> None:
    futures, completers = pending(3)
    done, not_done = wait(futures, timeout=0)
    assert (done, not_done) == (set(), set(futures))

    completers[1].set_result("second")
    threading.Timer(SOON, completers[2].set_exception, [ValueError("third")]).start()

    assert wait(futures, IN_TIME, return_when="FIRST_COMPLETED").done == {futures[1]}
    done, not_done = wait(futures, IN_TIME, return_when="FIRST_EXCEPTION")
    assert futures[2] in done
    assert not_done == {futures[0]}
    assert futures[1].get() == "second"
    with pytest.raises(ValueError, match="third"):
        futures[2].get()
    completers[0].set_result(None)
    assert wait(futures, IN_TIME).not_done == set()


def test_as_completed_gives_them_in_the_order_of_their_answers() -> None:
    futures, completers = pending(3)
    completers[2].set_result(2)
    order = []
    for future in as_completed(futures, IN_TIME):
        order.append(future.get())
        if len(order) < 3:
            completers[len(order) - 1].set_result(len(order) - 1)
    assert order == [2, 0, 1]


def test_as_completed_on_an_event_loop() -> None:
    futures, completers = pending(2)
    threading.Timer(SOON, completers[1].set_result, [1]).start()

    async def main() -> list[int]:
        taken = []
        async for future in as_completed(futures, IN_TIME):
            taken.append(await future)
            if len(taken) == 1:
                completers[0].set_result(0)
        return taken

    assert asyncio.run(main()) == [1, 0]


def test_the_futures_of_both_may_be_mixed() -> None:
    (monarchs,), (completer,) = pending(1)
    ours: FutureProxy[str] = FutureProxy(Silence())
    ours._complete(lambda: "ours")
    done, not_done = wait([monarchs, ours], timeout=SOON)
    assert (done, not_done) == ({ours}, {monarchs})

    completer.set_result("Monarch's")

    assert {future.get() for future in as_completed([monarchs, ours], IN_TIME)} == {"ours", "Monarch's"}


def test_a_wait_that_is_given_up_leaves_the_future_as_it_was() -> None:
    (future,), (completer,) = pending(1)
    with pytest.raises(loom.WaitTimeout, match="1 of 1 futures had no answer"):
        next(as_completed([future], SOON))
    completer.set_result(4)
    assert future.get(IN_TIME) == 4


IMPORTS = """
from monarch.actor import Future, returns_future
from loom_proxy.futures.waiting_for_many import wait, watch
"""


def in_a_process_of_its_own(program: str) -> None:
    """Run a program. Its futures make their process a root client, which would prefix later log lines here."""
    subprocess.run([sys.executable, "-c", IMPORTS + textwrap.dedent(program)], check=True, timeout=60)


def test_a_future_with_a_body_runs_it_once() -> None:
    in_a_process_of_its_own(
        f"""
        import asyncio

        runs = []

        @returns_future
        async def body():
            runs.append(1)
            await asyncio.sleep(0)
            return len(runs)

        future = body()
        assert wait([future, Future._resolved(7)], {IN_TIME}).not_done == set()
        assert future.get({IN_TIME}) == 1
        assert runs == [1]
        """
    )


def test_a_consumed_future_is_an_error_for_the_caller() -> None:
    pytest.importorskip(
        "monarch._rust_bindings.monarch_hyperactor.pytokio", reason="only futures of torchmonarch 0.7 are consumed"
    )
    in_a_process_of_its_own(
        """
        import pytest
        from monarch._rust_bindings.monarch_hyperactor.pytokio import PythonTask

        async def nothing(): ...

        future = Future._from_coro(PythonTask.from_coroutine(nothing()))
        future._take_inner().block_on()
        with pytest.raises(ValueError, match="consumed"):
            watch([future])
        """
    )


def test_what_is_no_future_is_refused() -> None:
    with pytest.raises(TypeError, match="is not a future of Loom's but a int"):
        wait([3])  # type: ignore[list-item]
