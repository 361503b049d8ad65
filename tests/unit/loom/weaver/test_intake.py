"""The turns in which the weaver handles what threadlets send."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from loom.weaver.serving import intake
from loom.weaver.serving.intake import TURN, Intake, Source
from tests.unit.loom.weaver.raw_threadlet import BOUND
from tests.unit.loom.weaver.running import running


class Clock:
    """A clock that stands, but for what `Kept` says that it took."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Kept(Source):
    """A source that keeps what it handles."""

    def __init__(self, clock: Clock, order: list[tuple[Kept, bytes]], takes: float = 0.0) -> None:
        self.reads: list[bool] = []
        self.aborted = False
        self._clock = clock
        self._order = order
        self._takes = takes

    def handle(self, data: bytes) -> None:
        if data == b"bad":
            raise ValueError("nobody can handle this")
        self._clock.now += self._takes
        self._order.append((self, data))

    def read(self, more: bool) -> None:
        self.reads.append(more)

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_what_comes_after_a_turn_waits_and_is_not_read_on(clock: Clock) -> None:
    order: list[tuple[Kept, bytes]] = []
    taken = Intake(clock)
    slow, late, later = Kept(clock, order, takes=TURN), Kept(clock, order, takes=TURN), Kept(clock, order)

    taken.take(slow, b"1")
    taken.take(late, b"2")
    taken.take(later, b"3")
    taken.take(slow, b"4")

    assert order == [(slow, b"1")]
    assert (slow.reads, late.reads, later.reads) == ([False], [False], [False])
    await asyncio.sleep(0)  # one turn, which the second takes whole
    assert order == [(slow, b"1"), (late, b"2")]
    assert late.reads == [False, True]
    await asyncio.sleep(0)
    assert order[2:] == [(later, b"3"), (slow, b"4")]
    assert (slow.reads, later.reads) == ([False, True], [False, True])


async def test_a_source_keeps_its_order_though_there_is_time_again(clock: Clock) -> None:
    order: list[tuple[Kept, bytes]] = []
    taken = Intake(clock)
    one = Kept(clock, order)
    taken.take(one, b"1")
    clock.now += TURN
    taken.take(one, b"2")
    clock.now -= TURN

    taken.take(one, b"3")

    assert order == [(one, b"1")]
    await asyncio.sleep(0)
    assert order == [(one, b"1"), (one, b"23")]
    assert one.reads == [False, True]


async def test_what_has_no_room_to_wait_is_handled_at_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_WAITING", 3)
    order: list[tuple[Kept, bytes]] = []
    taken = Intake(clock)
    first, second, third = (Kept(clock, order) for _ in range(3))
    taken.take(first, b"1")
    clock.now += TURN

    taken.take(second, b"234")
    taken.take(third, b"5")

    assert order == [(first, b"1"), (third, b"5")]
    taken.finish(second)
    taken.take(first, b"6")  # there is room again
    assert order == [(first, b"1"), (third, b"5"), (second, b"234")]
    await asyncio.sleep(0)
    assert order[3:] == [(first, b"6")]


async def test_a_source_that_ends_is_handled_before_it_is_gone(clock: Clock) -> None:
    order: list[tuple[Kept, bytes]] = []
    taken = Intake(clock)
    one = Kept(clock, order)
    taken.take(one, b"1")
    clock.now += TURN
    taken.take(one, b"2")

    taken.finish(one)
    taken.finish(one)

    await asyncio.sleep(0)
    assert order == [(one, b"1"), (one, b"2")]


async def test_a_fault_costs_the_one_source(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    order: list[tuple[Kept, bytes]] = []
    taken = Intake(clock)
    one, other = Kept(clock, order), Kept(clock, order)
    taken.take(one, b"1")
    clock.now += TURN
    taken.take(one, b"bad")
    taken.take(other, b"2")

    await asyncio.sleep(0)

    assert order == [(one, b"1"), (other, b"2")]
    assert (one.aborted, other.aborted) == (True, False)
    assert "a threadlet is disconnected" in caplog.text


async def test_a_weaver_without_time_answers_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything waits for a turn of its own, with many that send as much as they can."""
    monkeypatch.setattr(intake, "TURN", 0.0)
    reports, rounds = 50, 20
    async with running() as weaver:
        links = [await weaver.threadlet(f"train_{number}") for number in range(20)]
        for done in range(0, reports * rounds, reports):
            for link in links:
                rows: list[list[Any]] = [
                    [seq, time.time(), seq, None, None, {"loss": 1.0}, None]
                    for seq in range(done + 1, done + reports + 1)
                ]
                link.send("status", rows)
            await asyncio.wait_for(weaver.client.ask("status"), BOUND)

        for link in links:
            while (await link.receive("stored"))[1] < reports * rounds:
                pass
        steps = {one["step"] for one in await weaver.client.ask("replicas")}

        links[0].send("status", [[reports * rounds + 1, time.time(), 9999, None, None, {}, None]])
        links[0].close()  # the report is read with the end behind it
        await weaver.until(lambda: weaver.admin.weaver.known.replicas["train_0"].step == 9999)

    assert steps == {reports * rounds}
