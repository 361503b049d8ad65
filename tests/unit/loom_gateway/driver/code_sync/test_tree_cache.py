"""The cache of synced folders on a machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import loom
from loom.manifest import Manifest, TreeEntry
from loom_gateway.driver.code_sync.cache import BlobsMissing, TreeCache

WAIT = 30.0


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tree_of(files: dict[str, bytes], executable: tuple[str, ...] = ()) -> Manifest:
    entries = [TreeEntry(path, digest_of(data), len(data), path in executable) for path, data in files.items()]
    return Manifest("tree", ("",), tuple(entries))


def fill(cache: TreeCache, files: dict[str, bytes]) -> None:
    for data in files.values():
        cache.receive("upload", digest_of(data), len(data), 0, data)


@pytest.fixture
def cache(tmp_path: Path) -> TreeCache:
    return TreeCache(tmp_path / "cache")


FILES = {"a/one.py": b"one", "two.py": b"two", "empty": b""}


def test_a_tree_is_assembled_from_contents(cache: TreeCache) -> None:
    tree = tree_of(FILES)
    assert sorted(cache.missing(tree.blobs.items())) == sorted(tree.blobs)

    fill(cache, FILES)

    assert cache.missing(tree.blobs.items()) == []
    with_tree = cache.assemble(tree).folder
    assert {str(p.relative_to(with_tree)): p.read_bytes() for p in with_tree.rglob("*") if p.is_file()} == FILES


def test_a_tree_whose_contents_are_lacking_is_not_assembled(cache: TreeCache) -> None:
    with pytest.raises(BlobsMissing) as raised:
        cache.assemble(tree_of(FILES))

    assert len(raised.value.digests) == 3
    assert cache.hold(tree_of(FILES).digest) is None


def test_pieces_may_come_in_any_order(cache: TreeCache) -> None:
    data = os.urandom(10_000)
    digest = digest_of(data)
    for start in (8000, 0, 4000):
        assert cache.missing([(digest, len(data))]) == [digest]
        cache.receive("upload", digest, len(data), start, data[start : start + 4000])

    assert cache.missing([(digest, len(data))]) == []
    assert cache.read(digest, len(data), 5000, 100) == data[5000:5100]


def test_contents_that_are_not_what_their_digest_says_are_refused(cache: TreeCache) -> None:
    digest = digest_of(b"promised")

    with pytest.raises(loom.FileChanged):
        cache.receive("upload", digest, 8, 0, b"deceived")

    assert cache.missing([(digest, 8)]) == [digest]


def test_an_upload_that_was_given_up_leaves_nothing(cache: TreeCache) -> None:
    digest = digest_of(b"whole")
    cache.receive("first", digest, 5, 0, b"who")
    cache.forget("first")
    assert list((cache.folder / "partial").iterdir()) == []

    cache.receive("second", digest, 5, 0, b"whole")

    assert cache.missing([(digest, 5)]) == []


def test_equal_files_of_different_modes(cache: TreeCache) -> None:
    fill(cache, {"x": b"#!/bin/sh"})
    tree = tree_of({"plain": b"#!/bin/sh", "script": b"#!/bin/sh"}, executable=("script",))

    folder = cache.assemble(tree).folder

    assert [(folder / name).stat().st_mode & 0o777 for name in ("plain", "script")] == [0o444, 0o555]


@pytest.mark.parametrize("damage", ["removed", "written to", "all gone"])
def test_a_damaged_tree_is_made_anew(cache: TreeCache, damage: str) -> None:
    fill(cache, FILES)
    tree = tree_of(FILES)
    folder = cache.assemble(tree).folder
    file = folder / "two.py"
    if damage == "removed":
        file.unlink()
    elif damage == "written to":
        file.chmod(0o644)
        file.write_bytes(b"owt")
        with pytest.raises(BlobsMissing):  # the content itself is that file
            cache.assemble(tree)
        fill(cache, FILES)
    else:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()

    assert (cache.assemble(tree).folder / "two.py").read_bytes() == b"two"


def test_many_assemble_the_same_tree_at_once(tmp_path: Path) -> None:
    files = {f"f{n}.py": str(n).encode() for n in range(200)}
    fill(TreeCache(tmp_path / "cache"), files)
    tree = tree_of(files)
    problems: list[BaseException] = []
    barrier = threading.Barrier(8)

    def assemble() -> None:
        cache = TreeCache(tmp_path / "cache")
        barrier.wait(WAIT)
        try:
            for _ in range(5):
                folder = cache.assemble(tree).folder
                assert len(list(folder.iterdir())) == 200
        except BaseException as error:  # noqa: BLE001 - told to the test
            problems.append(error)

    threads = [threading.Thread(target=assemble) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)

    assert problems == []
    assert list((tmp_path / "cache" / "partial").iterdir()) == []


# -- bounds -------------------------------------------------------------------------------------------------


def test_a_tree_larger_than_the_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(loom.TooLarge, match="LOOM_CACHE_LIMIT"):
        TreeCache(tmp_path, limit=10).check_fits(11)


def test_the_oldest_trees_that_nobody_uses_are_removed(tmp_path: Path) -> None:
    cache = TreeCache(tmp_path / "cache", limit=250)
    trees, holds = [], []
    for number in range(4):
        files = {"f": str(number).encode() * 100}
        fill(cache, files)
        trees.append(tree_of(files))
        holds.append(cache.assemble(trees[-1]))
        os.utime(cache.folder / "trees" / f"{trees[-1].digest}.lock", (number, number))
    for number in (1, 2, 3):
        holds[number].close()

    cache.trim()

    assert [cache.tree(tree.digest).exists() for tree in trees] == [True, False, False, True]
    assert [cache.missing(tree.blobs.items()) == [] for tree in trees] == [True, False, False, True]


def test_a_tree_that_another_process_holds_is_not_removed(tmp_path: Path) -> None:
    cache = TreeCache(tmp_path / "cache", limit=1)
    fill(cache, FILES)
    tree = tree_of(FILES)
    cache.assemble(tree).close()
    program = (
        "import sys; from pathlib import Path; from loom_gateway.driver.code_sync.cache import TreeCache\n"
        f"hold = TreeCache(Path({str(cache.folder)!r})).hold({tree.digest!r})\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        cache.trim()
        assert cache.tree(tree.digest).exists()
    finally:
        holder.kill()
        holder.communicate(timeout=WAIT)

    cache.trim()
    assert not cache.tree(tree.digest).exists()


def test_a_tree_that_was_removed_meanwhile_is_not_held(cache: TreeCache) -> None:
    fill(cache, FILES)
    tree = tree_of(FILES)
    cache.assemble(tree).close()
    TreeCache(cache.folder, limit=0).trim()

    assert cache.hold(tree.digest) is None
    assert cache.missing(tree.blobs.items())


# -- where it is --------------------------------------------------------------------------------------------


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_CACHE", str(tmp_path / "chosen"))
    monkeypatch.setenv("LOOM_CACHE_LIMIT", "123")
    cache = TreeCache.of_this_machine()
    assert (cache.folder, cache.limit) == (tmp_path / "chosen", 123)

    monkeypatch.delenv("LOOM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert TreeCache.of_this_machine().folder == tmp_path / "xdg" / "loom"


def test_a_home_that_cannot_be_written_to_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("LOOM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))

    assert TreeCache.of_this_machine().folder == tmp_path / f"loom-cache-{os.geteuid()}"


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOOM_CACHE", str(tmp_path / "file" / "cache"))

    with pytest.raises(loom.SyncFailed, match="Set LOOM_CACHE"):
        TreeCache.of_this_machine()
