"""Results that wait on the disk: where they are, how many, and which goes first."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from loom.wire.bodies import OperationResult
from loom.wire.messages import Kind, Message
from loom.wire.mux import Pieces
from loom_gateway.driver.clients import unread_results as module
from loom_gateway.driver.clients.unread_results import StoredResults, UnreadAnswers, is_stored
from tests.support.gateways import await_true

MIB = 1 << 20


def result(size: int, ident: int = 1) -> Message:
    return Message(Kind.RESULT, ident, (0.0, None), [bytes([ident % 256]) * 10, bytes([ident % 256]) * (size - 10)])


def test_a_result_is_the_same_from_the_disk(tmp_path: Path) -> None:
    stored = StoredResults(str(tmp_path))
    writable = bytearray(b"w" * MIB)
    message = Message(Kind.RESULT, 1, (0.0, None), [b"", b"r" * 100, writable, Pieces([b"a", b"bc"], True)])

    kept = stored.keep(message)

    assert kept is not None
    assert [bytes(part) for part in kept.parts] == [b"", b"r" * 100, bytes(writable), b"abc"]
    assert [memoryview(part).readonly for part in kept.parts] == [True, True, False, True]
    assert stored.used == message.size
    assert stored.keep(kept) is kept


@pytest.mark.guarantees("nothing lost", "Results for a program that is away wait in the session's folder")
def test_the_files_are_in_the_sessions_folder_and_have_no_names(tmp_path: Path) -> None:
    kept = StoredResults(str(tmp_path)).keep(result(MIB))
    assert kept is not None
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) in Path("/proc/self/maps").read_text()


def test_a_thousand_small_results_take_one_descriptor(tmp_path: Path) -> None:
    stored = StoredResults(str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    kept = [stored.keep(result(4096, ident)) for ident in range(1000)]
    assert len(os.listdir("/proc/self/fd")) - before <= 2
    assert all(one is not None and bytes(one.parts[1][:1]) == bytes([n % 256]) for n, one in enumerate(kept))


def test_room_comes_back_when_results_are_gone(tmp_path: Path) -> None:
    stored = StoredResults(str(tmp_path), limit=3 * MIB)
    kept = [stored.keep(result(MIB)) for _ in range(3)]
    assert stored.keep(result(MIB)) is None
    assert stored.used == 3 * MIB
    kept.clear()
    assert stored.used == 0
    assert stored.keep(result(2 * MIB)) is not None


def test_what_is_needed_least_makes_room_and_no_more_than_that(tmp_path: Path) -> None:
    stored = StoredResults(str(tmp_path), limit=8 * MIB)
    module_size, module.FILE_SIZE = module.FILE_SIZE, MIB  # so that each result has a file of its own
    try:
        kept = [stored.keep(result(MIB, ident)) for ident in range(8)]
        stored.free_some = lambda: bool(kept) and kept.pop(0) is not None
        assert stored.keep(result(MIB, 8)) is not None
        assert [one.id for one in kept if one is not None] == [1, 2, 3, 4, 5, 6, 7]
        assert stored.keep(result(9 * MIB)) is None  # it would not fit alone, so nothing makes room
        assert len(kept) == 7
    finally:
        module.FILE_SIZE = module_size


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_disk_that_takes_nothing_is_no_room_for_now_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    stored = StoredResults(str(tmp_path), limit=4 * MIB)
    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        assert stored.keep(result(MIB)) is None
        assert os.strerror(number) in stored.why_full
    kept = stored.keep(result(MIB))
    assert kept is not None
    assert stored.keep(result(8 * MIB)) is None
    assert "--keep-results" in stored.why_full
    assert StoredResults(str(tmp_path / "missing")).keep(result(MIB)) is None


def test_a_file_goes_with_the_last_of_its_results(tmp_path: Path) -> None:
    stored = StoredResults(str(tmp_path))
    kept = [stored.keep(result(MIB))]
    stored.begin_anew()
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    kept.clear()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


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
