"""Plans are read one at a time, since each may take seconds of the interpreter."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from loom.errors import LimitReached
from loom_gateway.chaos import runs
from loom_gateway.chaos.runs import PlanRuns

BOUND = 20.0


async def test_a_user_has_one_plan_read_at_a_time_and_others_come_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    reading: list[str] = []

    def slow(text: str) -> str:
        reading.append(text)
        assert goes_on.wait(BOUND)
        return text

    monkeypatch.setattr(runs, "parse_plan", slow)
    nothing: Any = None
    plans = PlanRuns(nothing, nothing, nothing)
    first = asyncio.ensure_future(plans._parsed("ann's", "ann"))
    second = asyncio.ensure_future(plans._parsed("bob's", "bob"))
    while not reading:  # noqa: ASYNC110
        await asyncio.sleep(0)

    with pytest.raises(LimitReached, match="being read already"):
        await plans._parsed("another one", "ann")
    assert reading == ["ann's"]
    await asyncio.wait_for(asyncio.to_thread(lambda: None), BOUND)  # other threads are free
    goes_on.set()

    assert await asyncio.wait_for(asyncio.gather(first, second), BOUND) == ["ann's", "bob's"]
    assert await plans._parsed("the next", "ann") == "the next"
