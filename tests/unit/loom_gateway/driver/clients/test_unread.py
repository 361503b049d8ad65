"""The answers that were sent and not read: within bounds, the oldest go first, the large ones to the disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loom.wire.bodies import OperationResult
from loom.wire.messages import Kind, Message
from loom_gateway.driver.clients import unread as module
from loom_gateway.driver.clients.stored_results import StoredResults, is_stored
from loom_gateway.driver.clients.unread import UnreadAnswers
from tests.support.gateways import await_true

CALL = (int(Kind.CALL_ONE), [1, "add"])


def answer(ident: int, size: int = 3, index: int | None = None) -> Message:
    return OperationResult.message_of(ident, [bytes(size)], 0.5, index)


def ids(unread: UnreadAnswers) -> list[int]:
    return [one.operation for one in unread.take(lambda ident: True)]


@pytest.fixture
async def unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UnreadAnswers:
    """It keeps four answers, 10,000 bytes in memory and 9,000 on the disk."""
    monkeypatch.setattr(module, "MOST", 4)
    monkeypatch.setattr(module, "IN_MEMORY", 10_000)
    monkeypatch.setattr(module, "STORED_FROM", 1_000)
    results = StoredResults(str(tmp_path), 9_000)
    made = UnreadAnswers(results, asyncio.get_running_loop())
    results.free_some = made.drop_oldest_stored
    made.of_client(0, tells=True)
    return made


async def until_moved(unread: UnreadAnswers) -> None:
    def all_are() -> bool:
        return all(any(map(is_stored, one.parts)) for one, _ in unread._moved.copy().values())

    await asyncio.to_thread(await_true, all_are)


async def test_what_was_read_is_kept_no_more(unread: UnreadAnswers) -> None:
    for number in range(3):
        unread.keep(answer(number), CALL)
    unread.keep(answer(7, index=0), CALL)
    unread.keep(answer(7, index=1), CALL)
    unread.read([1, (7, 0), 99])
    assert [one.message for one in unread.take(lambda ident: True)] == [answer(2), answer(7, index=1)]
    assert unread._bytes == 0


async def test_of_an_answer_to_a_client_that_tells_no_reads_the_request_is_kept(unread: UnreadAnswers) -> None:
    unread.of_client(1, tells=False)
    for number in range(10):
        unread.keep(answer(number), CALL)
    assert unread.request_of(answer(9)) == CALL
    assert unread.request_of(answer(5)) is None
    assert unread.take(lambda ident: True) == [(number, None, CALL) for number in range(6, 10)]


async def test_an_answer_that_was_not_sent_gives_its_request(unread: UnreadAnswers) -> None:
    unread.keep(answer(7, index=1), CALL)
    assert unread.pop(answer(7, index=0)) is None
    assert unread.pop(answer(7, index=1)) == CALL
    assert unread.pop(Message(Kind.EVENT, 7, [])) is None
    assert unread._bytes == 0


async def test_the_oldest_small_ones_go_first_when_there_are_many(unread: UnreadAnswers) -> None:
    for number in range(10):
        unread.keep(answer(number), CALL)
    assert ids(unread) == [6, 7, 8, 9]


@pytest.mark.guarantees(
    "nothing lost",
    "A result that has arrived in part, or was not read, when its program died is found by the next one; "
    "of those that had been delivered only so many are kept",
)
async def test_older_large_ones_go_to_the_disk_as_far_as_there_is_room(unread: UnreadAnswers) -> None:
    for number in range(6):
        unread.keep(answer(number, 4_000), CALL)
    await until_moved(unread)
    assert unread._bytes <= module.IN_MEMORY
    assert len(unread._moved) == 2  # of four, in 9,000 bytes
    kept = {one.operation: one.message for one in unread.take(lambda ident: True)}
    assert {4, 5} < set(kept)
    assert all(message is not None and b"".join(message.parts) == bytes(4_000) for message in kept.values())


async def test_a_large_one_costs_no_small_one(unread: UnreadAnswers) -> None:
    unread.keep(answer(0), CALL)
    unread.keep(answer(1, 20_000), CALL)  # which no disk takes either, once it is not the newest
    assert ids(unread) == [0, 1]
    for number, size in enumerate((3, 20_000, 3, 20_000)):
        unread.keep(answer(number, size), CALL)
    assert not {0, 2, 3} - set(unread._kept)
    await asyncio.to_thread(await_true, lambda: not unread._moved)
    assert ids(unread) == [0, 2, 3]
    assert (unread._bytes, unread._large) == (0, {})


async def test_what_is_read_while_it_goes_to_the_disk_does_not_come_back(unread: UnreadAnswers) -> None:
    for number in range(4):
        unread.keep(answer(number, 4_000), CALL)
    unread.read(range(4))
    await asyncio.sleep(0.05)
    assert ids(unread) == []


async def test_one_of_another_client_stays(unread: UnreadAnswers) -> None:
    unread.keep(answer(1), CALL)
    unread.keep(answer(1_001), CALL)
    assert [one.operation for one in unread.take(lambda ident: ident > 1_000)] == [1_001]
    assert ids(unread) == [1]


async def test_an_answer_that_was_stored_on_its_way_is_kept_in_that_form(unread: UnreadAnswers) -> None:
    first = answer(1, 5_000)
    unread.keep(first, CALL)
    unread.replace(answer(1, 10))
    assert unread._bytes == 10 + module.OVERHEAD
    unread.replace(answer(2, 10))  # which is not kept
    assert ids(unread) == [1]
