"""The turns in which the weaver handles what threadlets and sessions send."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from loom.control.frame import MAX_FRAME, pack, unpack_all
from loom.control.operations import Operation
from loom.weaver.server import threadlets as intake
from loom.weaver.server.guests_and_admins import Asker
from loom.weaver.server.handlers import RequestHandler
from loom.weaver.server.threadlets import TURN, Intake, IntakeSource
from loom.wire.length_prefix import FrameSplitter
from tests.unit.loom.weaver.raw_threadlet import BOUND
from tests.unit.loom.weaver.running import KEYS, running


class Clock:
    """A clock that stands, but for what `Kept` says that it took."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Kept(IntakeSource):
    """A source that keeps what it handles, in one piece, or in as many as there are commas."""

    def __init__(self, clock: Clock, order: list[tuple[Kept, bytes]], takes: float = 0.0, user: str = "") -> None:
        self.user = user
        self.reads: list[bool] = []
        self.aborted = False
        self._clock = clock
        self._order = order
        self._takes = takes

    def handle(self, data: bytes) -> Iterator[None]:
        for number, piece in enumerate(data.split(b",")):
            if number:
                yield
            if piece == b"bad":
                raise ValueError("nobody can handle this")
            self._clock.now += self._takes
            self._order.append((self, piece))

    def read(self, more: bool) -> None:
        self.reads.append(more)

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a source may wait while its connection is read on."""
    monkeypatch.setattr(intake, "MAX_UNHANDLED", 0)


async def test_a_connection_is_read_until_much_of_it_waits(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_UNHANDLED", 4)
    order: list[tuple[Kept, bytes]] = []
    taken = Intake(clock)
    one = Kept(clock, order)
    taken.take(one, b"1")
    clock.now += TURN

    taken.take(one, b"2345")
    assert one.reads == []
    taken.take(one, b"6")
    taken.take(one, b"7")
    assert one.reads == [False]
    await asyncio.sleep(0)
    assert one.reads == [False, True]
    assert order == [(one, b"1"), (one, b"234567")]


async def test_what_comes_after_a_turn_waits_and_is_not_read_on(clock: Clock, small: None) -> None:
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


async def test_a_source_keeps_its_order_though_there_is_time_again(clock: Clock, small: None) -> None:
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
    await asyncio.sleep(0)
    taken.take(first, b"6")
    clock.now += TURN
    taken.take(third, b"7")  # there is room again
    assert order[2:] == [(second, b"234"), (first, b"6")]
    await asyncio.sleep(0)
    assert order[4:] == [(third, b"7")]


async def test_a_source_that_ends_is_handled_before_it_is_gone(clock: Clock) -> None:
    order: list[tuple[Kept, bytes]] = []
    taken = Intake(clock)
    one, other = Kept(clock, order), Kept(clock, order)
    taken.take(one, b"1")
    clock.now += TURN
    taken.take(one, b"2,3")

    taken.finish(one, lambda: order.append((one, b"end")))
    taken.finish(other, lambda: order.append((other, b"end")))

    await asyncio.sleep(0)
    assert order == [(one, b"1"), (other, b"end"), (one, b"2"), (one, b"3"), (one, b"end")]


async def test_a_turn_ends_within_what_was_read_at_once(clock: Clock) -> None:
    order: list[tuple[Kept, bytes]] = []
    taken = Intake(clock)
    one = Kept(clock, order, takes=TURN)

    taken.take(one, b"1,2,3")

    for handled in range(1, 4):
        assert order == [(one, b"%d" % number) for number in range(1, handled + 1)]
        await asyncio.sleep(0)
    assert one.reads == []
    assert not one.waits


async def test_a_user_waits_for_one_piece_of_each_other_user(clock: Clock) -> None:
    order: list[tuple[Kept, bytes]] = []
    taken = Intake(clock)
    flood = [Kept(clock, order, takes=TURN, user="flood") for _ in range(50)]
    few = Kept(clock, order, takes=TURN, user="few")
    for source in flood:
        taken.take(source, b"1,2,3")
    taken.take(few, b"a,b")

    for _ in range(4):
        await asyncio.sleep(0)

    assert [piece for _, piece in order] == [b"1", b"2", b"a", b"1", b"b"]


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
    assert "a peer of the weaver is disconnected" in caplog.text


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


async def test_a_session_that_floods_the_weaver_does_not_delay_another_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A turn is one frame here, so that it does not matter how fast the machine is."""
    monkeypatch.setattr(intake, "TURN", 0.0)
    asked: list[str] = []
    do = RequestHandler.do

    def note(self: RequestHandler, operation: Operation, asker: Asker) -> Any:
        asked.append(asker.by)
        return do(self, operation, asker)

    monkeypatch.setattr(RequestHandler, "do", note)
    questions = 2000
    async with running() as weaver:
        for session in ("flood", "few"):
            weaver.server.users.of(session)
        flood, few = [await asyncio.open_unix_connection(weaver.client.place, limit=1 << 22) for _ in range(2)]
        for user, (_, writer) in (("flood", flood), ("few", few)):
            writer.write(pack(["hello", KEYS.of(user, user)]))
        flood[1].write(b"".join(pack(["ask", number, None, "status", {}]) for number in range(questions)))
        await weaver.until(lambda: len(asked) > 10)

        few[1].write(pack(["ask", 0, None, "status", {}]))
        splitter = FrameSplitter(MAX_FRAME)
        before = len(asked)
        frames: list[list[Any]] = []
        while not frames:
            frames += unpack_all(splitter.feed(await asyncio.wait_for(few[0].read(1 << 16), BOUND)))

        assert frames[0][:2] == ["answer", 0]
        assert asked.index("few") - before < 100
        await weaver.until(lambda: len(asked) == questions + 1)  # none is lost
        for _, writer in (flood, few):
            writer.close()
