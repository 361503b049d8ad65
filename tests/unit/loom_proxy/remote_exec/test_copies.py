"""A rank's machine that lies of its files writes nothing on this one but the content of the copy."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loom.errors import LoomError, WrongState
from loom.file_access import FILE, FOLDER, LINK, OTHER, FileAccess, FileEntry
from loom_proxy.remote_exec.copies import PIECE, copy_from

Answers = Callable[..., Any]


class LyingRank:
    """A stand-in for a rank's place, whose machine says what it likes of its files."""

    name = "rank 0 of 'liars'"

    def __init__(self, **answers: Answers) -> None:
        self._answers = answers

    def ask(self, operation: str, *arguments: Any) -> Any:
        if operation != "file":
            return SimpleNamespace(get=lambda: "handle")
        _, method, *rest = arguments
        return SimpleNamespace(get=lambda: self._answers[method](*rest))


def entry(name: Any, kind: Any = FILE, mode: Any = 0o644, size: Any = 4, target: Any = "") -> FileEntry:
    return FileEntry(name, kind, mode, size, target)


def folder_with(*inside: Any, name: Any = "data") -> LyingRank:
    """A folder with entries; each folder in it is empty, and each file has four bytes."""
    return LyingRank(
        look=lambda path: ("/there/data", entry(name, FOLDER)),
        list=lambda path: list(inside) if path == "/there/data" else [],
        read=lambda path, offset, size: b"evil",
    )


def file_of(said: Any, data: Any = b"evil") -> LyingRank:
    return LyingRank(look=lambda path: ("/there/data", said), read=lambda path, offset, size: data)


def copy(rank: Any, destination: Path, path: str = "data") -> str:
    return copy_from(rank, path, str(destination), lambda progress: None, 1.0)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A folder for copies, beside which nothing may change."""
    (tmp_path / "private").mkdir(0o700)
    (tmp_path / "private" / "key").write_text("mine")
    (tmp_path / "here").mkdir()
    before = state(tmp_path)
    yield tmp_path / "here"
    after = {path: found for path, found in state(tmp_path).items() if not path.startswith("here/")}
    assert after == {path: found for path, found in before.items() if not path.startswith("here/")}


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


def whole_names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


NO_NAMES = ["", ".", "..", "/", "../out", "a/../../out", "/etc/evil", "a/b", "nul\0", "\x1b]0;x\a", "a\nb",
            "\x9b2J", "\u202egpj.exe", None, 7, b"bytes"]  # fmt: skip


@pytest.mark.guarantees(
    "laptop", "A copy from a rank writes in its destination alone, whatever the rank's machine says of its files"
)
@pytest.mark.parametrize("name", NO_NAMES, ids=ascii)
@pytest.mark.parametrize("kind", [FILE, FOLDER, LINK])
def test_a_name_that_is_none_is_refused(here: Path, name: Any, kind: str) -> None:
    with pytest.raises(WrongState):
        copy(folder_with(entry(name, kind, target="x")), here)

    assert whole_names(here) in ([], ["data"])


@pytest.mark.parametrize("name", NO_NAMES, ids=ascii)
def test_the_caller_names_a_copy(here: Path, name: Any) -> None:
    if isinstance(name, str):
        assert copy(file_of(entry(name)), here, "logs/run.log") == str(here / "run.log")
        assert whole_names(here) == ["run.log"]
    for path in (".", "..", "~", "x/.."):
        if name != "":  # the root has no name
            with pytest.raises(WrongState):
                copy(file_of(entry(name)), here, path)


@pytest.mark.guarantees("laptop", "It gets no set-user-id bit, and no permission that the umask forbids")
@pytest.mark.parametrize("mode", [0o7777, 0o4755, 0o2755, 0o1777, 0o666, 1 << 40 | 0o4777])
def test_permissions_are_bounded_by_the_umask(here: Path, mode: int) -> None:
    before = os.umask(0o027)
    try:
        copy(file_of(entry("data", mode=mode)), here)
        copy(folder_with(entry("in", FOLDER, mode), entry("file", mode=mode)), here, "tree")
    finally:
        os.umask(before)

    for name in ("data", "tree", "tree/in", "tree/file"):
        assert stat.S_IMODE((here / name).stat().st_mode) & ~0o750 == 0, name


@pytest.mark.guarantees(
    "laptop", "A copy from a rank writes in its destination alone, whatever the rank's machine says of its files"
)
@pytest.mark.parametrize(
    ("target", "inside"),
    [
        ("../private/key", False), ("../../private/key", False), ("/etc/passwd", False), ("..", False), ("", False),
        ("file/../../..", False), ("in/..", False), ("./../x", False), ("nul\0", False), (".", True),
        ("in/x", True),
    ],
)  # fmt: skip
def test_a_link_leads_to_no_place_out_of_the_copy(here: Path, target: str, inside: bool) -> None:
    rank = folder_with(entry("in", FOLDER), entry("link", LINK, target=target))

    if inside:
        copy(rank, here)
        assert os.readlink(here / "data" / "link") == target
    else:
        with pytest.raises(WrongState):
            copy(rank, here)
        assert not (here / "data" / "link").is_symlink()


def test_a_link_deeper_in_may_lead_up_to_the_copy(here: Path) -> None:
    inside = {"/there/data": [entry("in", FOLDER)], "/there/data/in": [entry("link", LINK, target="../file")]}
    rank = LyingRank(look=lambda path: ("/there/data", entry("data", FOLDER)), list=lambda path: inside[path])

    copy(rank, here)

    assert os.readlink(here / "data" / "in" / "link") == "../file"


@pytest.mark.parametrize("again", list(itertools.permutations([FILE, FOLDER, LINK], 2)), ids=str)
def test_a_name_comes_once(here: Path, again: tuple[str, str]) -> None:
    first, second = again
    rank = folder_with(entry("x", first, target="in"), entry("x", second, 0o777, target="in"))

    with pytest.raises(WrongState):
        copy(rank, here)


@pytest.mark.guarantees(
    "laptop", "A copy from a rank writes in its destination alone, whatever the rank's machine says of its files"
)
def test_what_the_destination_has_of_links_is_not_followed(here: Path) -> None:
    """Links that an earlier copy, or another program, has left where folders and files come."""
    (here / "data").mkdir()
    (here / "data" / "in").symlink_to("../../private")
    (here / "data" / "file").symlink_to("../../private/key")

    copy(folder_with(entry("file")), here)
    inside = {"/there/data": [entry("in", FOLDER, 0o777)], "/there/data/in": [entry("key"), entry("new")]}
    rank = LyingRank(
        look=lambda path: ("/there/data", entry("data", FOLDER)),
        list=lambda path: inside[path],
        read=lambda path, offset, size: b"evil",
    )
    with pytest.raises(WrongState, match="Not a directory"):
        copy(rank, here)
    assert (here / "data" / "file").read_bytes() == b"evil"


def test_a_folder_that_was_there_keeps_its_permissions(here: Path) -> None:
    (here / "data").mkdir(0o700)

    copy(folder_with(entry("file")), here)

    assert stat.S_IMODE((here / "data").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "rank",
    [
        file_of(entry("data", OTHER)), file_of(entry("data", LINK, target="x")), file_of(entry("data", "device")),
        file_of(entry("data", mode="0o777")), file_of(entry("data", size=-1)), file_of(entry("data", size=True)),
        file_of(entry("data", target=None)), file_of(None), file_of(("data",)), file_of(entry("data"), b"too much"),
        file_of(entry("data"), "text"), file_of(entry("data"), None),
        file_of(entry("data", size=PIECE + 1), b"less"),
        folder_with(None), folder_with(entry("pipe", OTHER)), LyingRank(look=lambda path: None),
        LyingRank(look=lambda path: ("/x", entry("x", FOLDER)), list=lambda path: None),
        LyingRank(look=lambda path: ("/x", entry("x", FOLDER)), list=lambda path: [entry("x", FOLDER)]),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_leaves_no_file(here: Path, rank: LyingRank) -> None:
    with pytest.raises(LoomError):
        copy(rank, here)

    assert [name for name in whole_names(here) if not (here / name).is_dir()] == []


@pytest.mark.parametrize(
    "path", ["/out", "../out", "{copy}/../out", "{copy}x", "{copy}//x", "{copy}/./x", "{copy}/\0"]
)
@pytest.mark.parametrize("method", ["begin", "make_folder", "make_link"])
def test_files_are_written_in_the_copy_alone(here: Path, method: str, path: str) -> None:
    access = FileAccess()
    copied = access.destination(str(here), "data")
    access.make_folder(copied)

    with pytest.raises(OSError, match="Invalid argument"):
        getattr(access, method)(path.format(copy=copied), *(["x"] if method == "make_link" else []))

    access.close()
    assert whole_names(here) == ["data"]
