"""The gateway's second process: it does what would hold up the first, and its end is survived."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from loom.errors import LimitReached, Unavailable, WrongState
from loom_gateway import offload
from loom_gateway.offload import Offload, Work
from loom_gateway.rest import metrics
from loom_gateway.sessions.session import check_description

RUNS = json.dumps({"runs": [], "left_out": 0, "more": "x" * 100_000}).encode()
ROWS = [["ann", "session-1", "open", 2, [1, 2, 3]]]


@pytest.fixture
def other() -> Iterator[Offload]:
    made = Offload()
    made.enable()
    yield made
    made.close()


async def test_work_is_done_in_another_process_and_comes_to_the_same(
    other: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = metrics.page(None, ROWS, 3, None, [("limit_reached", 1)], 7, [("ann", 2)])

    def not_here(*_: object) -> bytes:
        raise AssertionError("it is done in this process")

    monkeypatch.setattr(metrics, "page", not_here)

    there = await other.do(Work.METRICS, None, ROWS, 3, None, [("limit_reached", 1)], 7, [("ann", 2)])

    assert other._process is not None
    assert psutil.Process(other._process.pid).parent() == psutil.Process()
    assert there == here


async def test_an_error_of_the_work_is_an_error_here(other: Offload) -> None:
    with pytest.raises(WrongState, match="answers with no SessionTensors"):
        await other.do(Work.DESCRIPTION, RUNS, "SessionTensors")
    assert json.loads(await other.do(Work.DESCRIPTION, RUNS, "SessionRuns")) == json.loads(
        check_description(RUNS, "SessionRuns")
    )


async def test_a_process_that_ends_fails_its_work_and_the_next_begins_another(other: Offload) -> None:
    await other.do(Work.DESCRIPTION, RUNS, "SessionRuns")
    assert other._process is not None
    ended = psutil.Process(other._process.pid)
    os.kill(ended.pid, signal.SIGKILL)
    ended.wait(10)

    with pytest.raises(Unavailable, match="ask again"):
        await other.do(Work.DESCRIPTION, RUNS, "SessionRuns")
    assert await other.do(Work.DESCRIPTION, RUNS, "SessionRuns")


async def test_work_that_waits_is_bounded(other: Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MAX_WAITING_WORK", 2)
    waiting = [asyncio.ensure_future(other.do(Work.DESCRIPTION, RUNS, "SessionRuns")) for _ in range(2)]
    await asyncio.sleep(0)

    with pytest.raises(LimitReached, match="2 requests wait"):
        await other.do(Work.DESCRIPTION, RUNS, "SessionRuns")
    assert all(await asyncio.gather(*waiting))


async def test_the_process_ends_with_the_gateway(other: Offload) -> None:
    await other.do(Work.DESCRIPTION, RUNS, "SessionRuns")
    assert other._process is not None
    assert other._process.stdin is not None
    process = psutil.Process(other._process.pid)

    other._process.stdin.close()  # as the kernel does when the gateway is killed

    assert process.wait(10) == 0
