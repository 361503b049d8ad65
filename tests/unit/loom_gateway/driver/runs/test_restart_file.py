"""The file of what a session's next driver starts again."""

from __future__ import annotations

from pathlib import Path

import pytest

from loom.errors import WrongArguments
from loom.wire.bodies import AT_EACH, BeginSync, StartRun
from loom.wire.messages import Message
from loom_gateway.driver.runs import restart_file
from loom_gateway.driver.runs.restart_file import MOST_BYTES, RestartFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "driver.restart"


def function(ident: int, restarts: int = 1, payload: bytes = b"pickled") -> Message:
    return StartRun(f"run {ident}", True, None, restarts).message(ident, [payload, b"more"])


def folder(number: int) -> Message:
    return BeginSync(number).message(number, [b"a manifest"])


def read(path: Path) -> list[Message]:
    return [
        Message(each.kind, each.id, list(each.body), [bytes(part) for part in each.parts])
        for each in RestartFile(str(path)).take_over()
    ]


def test_what_is_kept_is_taken_over_in_its_order(path: Path) -> None:
    file = RestartFile(str(path))
    kept = [folder(0), function(7), folder(1), function(9, AT_EACH), function(8, 3)]
    for message in kept:
        file.keep(message)
    file.keep(folder(0))  # anew, and so behind the others

    assert read(path) == [*kept[1:], kept[0]]
    assert path.stat().st_mode & 0o777 == 0o600


def test_there_is_a_file_only_while_a_function_may_be_started_again(path: Path) -> None:
    file = RestartFile(str(path))
    file.keep(folder(0))
    file.keep(function(3, AT_EACH))
    assert not path.exists()

    file.keep(function(7))
    assert [message.id for message in read(path)] == [0, 3, 7]
    file.drop(function(7))

    assert not path.exists()
    file.drop(function(7))
    assert read(path) == []


def test_what_was_taken_over_is_kept_until_it_is_dropped(path: Path) -> None:
    RestartFile(str(path)).keep(function(7, 2))
    second = RestartFile(str(path))
    second.take_over()
    second.keep(function(7, 1))
    second.keep(folder(0))
    assert read(path) == [function(7, 1), folder(0)]

    second.drop(function(7))

    assert not path.exists()


@pytest.mark.parametrize("cut", [1, 3, 20])
def test_of_a_damaged_file_what_makes_sense_is_taken_over(path: Path, cut: int) -> None:
    file = RestartFile(str(path))
    file.keep(function(7))
    file.keep(function(8))
    path.write_bytes(path.read_bytes()[:-cut])

    assert read(path) == [function(7)]


def test_a_disk_that_is_full_leaves_what_was_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RestartFile(str(path))
    file.keep(function(7))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(restart_file, "replace_file", full)
        with pytest.raises(OSError, match="No space left"):
            file.keep(function(8))
    file.keep(function(9))

    assert read(path) == [function(7), function(9)]


def test_too_much_is_refused_and_leaves_what_was_kept(path: Path) -> None:
    file = RestartFile(str(path))
    file.keep(function(7))

    with pytest.raises(WrongArguments, match="64 MiB in a session"):
        file.keep(function(8, payload=bytes(MOST_BYTES)))

    assert read(path) == [function(7)]
