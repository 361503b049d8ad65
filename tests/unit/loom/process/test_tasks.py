"""Background tasks that die are logged, counted, and started again if they have to go on."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from loom.process import tasks
from loom.process.backoff import Backoff

BOUND = 30.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tasks, "AGAIN", Backoff(0.001, 0.01))
    before = tasks.died.copy()
    yield
    tasks.died.clear()
    tasks.died.update(before)


async def fail() -> None:
    raise ValueError("bad luck")


@pytest.mark.guarantees(
    "nothing lost",
    "A background task that dies is logged, counted in `/metrics`, and started again if it has to go on",
)
async def test_a_task_that_dies_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    await tasks.run("unlucky", fail())
    assert tasks.died["unlucky"] == 1
    told = [one.getMessage() for one in caplog.records if one.name == tasks.__name__]
    assert told.count("the background task 'unlucky' died") == 1  # other tests' threads may log, too
    assert "bad luck" in caplog.text


@pytest.mark.guarantees(
    "nothing lost",
    "A background task that dies is logged, counted in `/metrics`, and started again if it has to go on",
)
async def test_a_task_that_has_to_go_on_is_started_again_after_an_error_and_after_its_end() -> None:
    enough = asyncio.Event()
    starts = 0

    async def work() -> None:
        nonlocal starts
        starts += 1
        if starts == 5:
            enough.set()
            await asyncio.Event().wait()
        if starts % 2:
            raise ValueError("bad luck")

    task = tasks.keep_running("stubborn", work)
    await asyncio.wait_for(enough.wait(), BOUND)
    assert tasks.died["stubborn"] == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tasks.died["stubborn"] == 2


async def test_a_task_that_nothing_refers_to_goes_on() -> None:
    gate = asyncio.Event()
    done = asyncio.Event()

    async def work() -> None:
        await gate.wait()
        done.set()

    tasks.run("forgotten", work())
    await asyncio.sleep(0)
    gc.collect()
    gate.set()
    await asyncio.wait_for(done.wait(), BOUND)


async def test_a_task_that_is_cancelled_before_it_began_leaves_no_coroutine_behind() -> None:
    work = fail()
    task = tasks.run("cancelled", work)
    task.cancel()
    await asyncio.wait([task])
    assert work.cr_frame is None
    assert not tasks.died["cancelled"]


async def test_a_task_that_has_an_end_is_started_again_after_an_error_and_not_after_its_end() -> None:
    starts = 0

    async def work() -> None:
        nonlocal starts
        starts += 1
        if starts < 4:
            raise ValueError("bad luck")

    await asyncio.wait_for(tasks.run_to_end("watch", work), BOUND)
    assert starts == 4
    assert tasks.died["watch"] == 3


async def test_each_error_is_told_once_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    errors = iter([ValueError("one"), ValueError("one"), KeyError("two"), ValueError("one")])

    async def work() -> None:
        error = next(errors, None)
        if error is not None:
            raise error

    await asyncio.wait_for(tasks.run_to_end("watch", work), BOUND)
    told = [one for one in caplog.records if one.name == tasks.__name__ and one.levelname == "ERROR"]
    assert [one.exc_info and repr(one.exc_info[1]) for one in told] == ["ValueError('one')", "KeyError('two')"]
    assert tasks.died["watch"] == 4
