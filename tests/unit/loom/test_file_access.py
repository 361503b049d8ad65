"""Files get their names when they are whole, and problems name their paths."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loom.errors import Denied, NotFound, WrongState
from loom.file_access import FILE, FOLDER, LINK, OTHER, FileAccess, FileProblem, attempt, checked


def test_a_file_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_text("before")
    access = FileAccess()

    access.begin(str(path))
    access.write(str(path), 3, b"def")
    access.write(str(path), 0, b"abc")
    assert path.read_text() == "before"
    access.finish(str(path), 0o640)

    assert path.read_bytes() == b"abcdef"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["model"]


def test_what_was_begun_is_removed(tmp_path: Path) -> None:
    access = FileAccess()
    access.begin(str(tmp_path / "model"))
    access.write(str(tmp_path / "model"), 0, b"abc")

    access.close()

    assert os.listdir(tmp_path) == []


def test_a_folder_lists_files_folders_links_and_others(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("four")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")

    listed = FileAccess().list(str(tmp_path))

    found = [(entry.name, entry.kind, entry.size, entry.target) for entry in listed]
    assert found == [
        ("file", FILE, 4, ""),
        ("folder", FOLDER, 0, ""),
        ("link", LINK, 0, "nowhere"),
        ("pipe", OTHER, 0, ""),
    ]


def test_a_copy_goes_into_a_folder_or_gets_the_name(tmp_path: Path) -> None:
    access = FileAccess()

    assert access.destination(str(tmp_path), "model") == str(tmp_path / "model")
    assert access.destination(f"{tmp_path}/other", "model") == str(tmp_path / "other")
    for path in ("missing/other", "missing/"):
        with pytest.raises(FileNotFoundError) as missing:
            access.destination(f"{tmp_path}/{path}", "model")
        assert missing.value.filename == str(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        access.destination(f"{tmp_path}/file/other", "model")


def test_a_link_is_no_folder_to_write_into(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "folder").symlink_to("elsewhere")

    with pytest.raises(NotADirectoryError):
        FileAccess().make_folder(str(tmp_path / "folder"))


def test_a_link_takes_the_place_of_another_and_not_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("before")
    (tmp_path / "folder").mkdir()

    FileAccess().make_link(str(tmp_path / "link"), "after")
    with pytest.raises(OSError, match="folder"):
        FileAccess().make_link(str(tmp_path / "folder"), "after")

    assert os.readlink(tmp_path / "link") == "after"
    assert sorted(os.listdir(tmp_path)) == ["folder", "link"]


def test_a_folder_in_the_way_of_a_file_is_a_problem_that_names_it(tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    os.mkdir(path)
    access = FileAccess()
    access.begin(path)

    answer = attempt(lambda: access.finish(path, 0o600))

    with pytest.raises(WrongState, match=r"Is a directory: '.*/model' on rank 3"):
        checked(answer, "rank 3")
    access.close()
    assert os.listdir(tmp_path) == ["model"]


def test_problems_become_errors_that_name_path_and_place() -> None:
    missing = attempt(lambda: FileAccess().look("/missing"))

    assert missing == FileProblem(2, "No such file or directory", "/missing")
    with pytest.raises(NotFound, match="No such file or directory: '/missing' on rank 3"):
        checked(missing, "rank 3")
    with pytest.raises(Denied, match="Permission denied: '/x' on here"):
        checked(FileProblem(13, "Permission denied", "/x"), "here")
    with pytest.raises(WrongState):
        checked(attempt(lambda: FileAccess().write("/never begun", 0, b"")), "here")
    assert checked(4, "here") == 4
