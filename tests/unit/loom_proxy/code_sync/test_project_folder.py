"""Which files of a project folder are shipped."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import loom
from loom_proxy.code_sync import scan as project_folder
from loom_proxy.code_sync.scan import FoundFile, find_files, hash_files


def make(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def names(folder: Path, exclude: Sequence[str] = ()) -> list[str]:
    return [file.path for file in find_files(str(folder.resolve()), exclude).files]


def test_every_file_is_found_with_its_size_and_mode(tmp_path: Path) -> None:
    make(tmp_path, {"b.py": "xyz", "a/c.py": "", "run.sh": "#!"})
    (tmp_path / "run.sh").chmod(0o755)

    found = find_files(str(tmp_path.resolve()))

    assert [(f.path, f.size, f.executable) for f in found.files] == [
        ("a/c.py", 0, False),
        ("b.py", 3, False),
        ("run.sh", 2, True),
    ]
    assert (found.skipped, found.warnings) == (0, [])


def test_what_is_never_shipped(tmp_path: Path) -> None:
    make(
        tmp_path,
        {
            "kept.py": "",
            "venv/pyvenv.cfg": "",
            "venv/lib/x.py": "",
            ".git/config": "",
            "__pycache__/kept.cpython-311.pyc": "",
            "old.pyc": "",
            "sub/.git": "gitdir: elsewhere",
        },
    )

    assert names(tmp_path) == ["kept.py"]
    assert find_files(str(tmp_path.resolve())).skipped == 5


def test_what_is_neither_file_nor_folder_gives_a_warning(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    found = find_files(str(tmp_path.resolve()))

    assert (found.files, found.skipped) == ([], 1)
    assert "pipe" in found.warnings[0]


def test_nested_and_negated_gitignores(tmp_path: Path) -> None:
    make(
        tmp_path,
        {
            ".gitignore": "*.log\n/build\ndata/\n!keep.log\n# a comment\n",
            "a.log": "",
            "keep.log": "",
            "build/x": "",
            "sub/build/y": "",
            "sub/.gitignore": "!b.log\n/z.txt\n",
            "sub/a.log": "",
            "sub/b.log": "",
            "sub/z.txt": "",
            "sub/deep/z.txt": "",
            "data/x.bin": "",
        },
    )

    assert names(tmp_path) == [
        ".gitignore",
        "keep.log",
        "sub/.gitignore",
        "sub/b.log",
        "sub/build/y",
        "sub/deep/z.txt",
    ]


def test_exclude_is_above_the_gitignores(tmp_path: Path) -> None:
    make(tmp_path, {".gitignore": "*.bin\n", "small.bin": "", "large.bin": "", "notes.txt": "", "code.py": ""})

    assert names(tmp_path, ["!small.bin", "*.txt"]) == [".gitignore", "code.py", "small.bin"]


def test_gitignores_above_the_folder_hold_in_a_repository(tmp_path: Path) -> None:
    make(
        tmp_path,
        {
            ".gitignore": "*.secret\n",
            "repo/.git/HEAD": "",
            "repo/.gitignore": "*.log\n/project/data/\n",
            "repo/project/a.log": "",
            "repo/project/b.secret": "",
            "repo/project/data/x": "",
            "repo/project/sub/data/x": "",
        },
    )

    assert names(tmp_path / "repo" / "project") == ["b.secret", "sub/data/x"]


def test_a_folder_that_the_repository_ignores_is_shipped_all_the_same(tmp_path: Path) -> None:
    make(tmp_path, {".git/HEAD": "", ".gitignore": "scratch/\n*.py\n", "scratch/inner/a.py": ""})

    assert names(tmp_path / "scratch" / "inner") == ["a.py"]


PATTERNS = ["*", "*.py", "*/", "a", "a/", "/a", "b/*", "a/b", "**/c", "a/**", "a/**/c", "?.py", "[ab].py", "b.*"]


@pytest.mark.skipif(shutil.which("git") is None, reason="compares with git")
@pytest.mark.parametrize("seed", range(40))
def test_the_same_files_are_ignored_as_by_git(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    folders = ["", "a/", "b/", "a/b/", "a/b/d/", "b/a/"]
    for folder in folders:
        make(tmp_path, {folder + file: "" for file in ("a.py", "b.py", "c", "d.txt")})
        if chance.random() < 0.6:
            lines = [chance.choice(["", "", "!"]) + chance.choice(PATTERNS) for _ in range(chance.randint(1, 4))]
            make(tmp_path, {folder + ".gitignore": "\n".join(lines) + "\n"})

    listed = subprocess.run(
        ["git", "-C", tmp_path, "ls-files", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout

    assert sorted(names(tmp_path)) == sorted(listed.splitlines())


# -- links --------------------------------------------------------------------------------------------------


def test_links_that_stay_inside_are_kept_and_not_followed(tmp_path: Path) -> None:
    make(tmp_path, {"sub/file": ""})
    links = {"to_file": "sub/file", "to_folder": "sub", "up": ".", "sub/across": "../to_file", "dangling": "no"}
    for path, target in links.items():
        (tmp_path / path).symlink_to(target)
    (tmp_path / "absolute").symlink_to(tmp_path.resolve() / "sub" / "file")
    (tmp_path / "roundabout").symlink_to(f"../{tmp_path.name}/sub/file")

    found = find_files(str(tmp_path.resolve())).files

    assert {file.path: file.target for file in found if file.target} == {
        **links,
        "absolute": "sub/file",
        "roundabout": "sub/file",
    }
    assert [file.path for file in found if not file.target] == ["sub/file"]


@pytest.mark.parametrize("target", ["..", "../other", "/etc/passwd", "sub/../../x"])
def test_a_link_that_leads_outside_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to(target)

    with pytest.raises(loom.UnsafeLink, match=r"link leads outside .*exclude"):
        find_files(str(tmp_path.resolve()))
    assert names(tmp_path, ["link"]) == []


def test_a_link_to_a_link_that_leads_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("/etc")

    with pytest.raises(loom.UnsafeLink, match="outside"):
        find_files(str(tmp_path.resolve()))


# -- names and contents -------------------------------------------------------------------------------------


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.py"))).touch()

    with pytest.raises(loom.UnreadableFile, match="not UTF-8"):
        find_files(str(tmp_path.resolve()))


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)  # permissions would not stop root

    with pytest.raises(loom.UnreadableFile, match="Permission denied"):
        find_files(str(tmp_path.resolve()))


def digests(folder: Path) -> list[str]:
    return [entry.digest for entry in hash_files(find_files(str(folder.resolve())).files, lambda count: None)]


def age(place: Path) -> None:
    """Have a file look as if it had not been touched for a while."""
    os.utime(place, (1_600_000_000, 1_600_000_000))


def test_a_file_is_read_again_only_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, {"a": "one", "b": "two"})
    for name in "ab":
        age(tmp_path / name)
    first = digests(tmp_path)
    reads: list[str] = []
    read = project_folder.UnchangedFile.read

    def note(self: project_folder.UnchangedFile, count: int) -> bytes:
        reads.append(self._path)
        return read(self, count)

    monkeypatch.setattr(project_folder.UnchangedFile, "read", note)
    assert digests(tmp_path) == first
    assert reads == []

    make(tmp_path, {"b": "TWO"})
    second = digests(tmp_path)
    assert set(reads) == {"b"}
    assert (second[0] == first[0], second[1] == first[1]) == (True, False)


def test_a_file_that_was_changed_just_now_is_read_again(tmp_path: Path) -> None:
    make(tmp_path, {"a": "one"})
    status = (tmp_path / "a").stat()
    (before,) = digests(tmp_path)
    make(tmp_path, {"a": "two"})
    os.utime(tmp_path / "a", ns=(status.st_atime_ns, status.st_mtime_ns))  # within one tick of the clock

    assert digests(tmp_path) != [before]


def test_a_file_that_is_removed_meanwhile(tmp_path: Path) -> None:
    gone = FoundFile("gone.py", str(tmp_path / "gone.py"), 1, False, "")

    with pytest.raises(loom.FileChanged, match=r"gone\.py was removed"):
        list(hash_files([gone], lambda count: None))
