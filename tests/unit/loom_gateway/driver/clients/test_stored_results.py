"""Results that wait on the disk: where they are, how many, and which goes first."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from loom.wire.messages import Kind, Message
from loom.wire.mux import Pieces
from loom_gateway.driver.clients import stored_results as module
from loom_gateway.driver.clients.stored_results import StoredResults

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
