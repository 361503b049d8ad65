"""What a synced folder consists of."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

import loom
from loom.manifest import Manifest, TreeEntry, bytes_from_environment, check_sizes, human_size

DIGEST = "ab" * 32


def manifest(*entries: TreeEntry, roots: tuple[str, ...] = ("",)) -> Manifest:
    return Manifest("name", roots, entries)


def test_a_manifest_travels() -> None:
    whole = manifest(
        TreeEntry("a/b.py", DIGEST, 3, True),
        TreeEntry("link", target="a/b.py"),
        TreeEntry("empty", DIGEST),
        roots=("", "a"),
    )

    assert Manifest.unpack(whole.pack()) == whole


def test_the_digest_tells_trees_apart_and_nothing_else() -> None:
    one, two = TreeEntry("a", DIGEST, 3), TreeEntry("b", DIGEST, 3)
    base = manifest(one, two).digest

    assert manifest(two, one).digest == base
    assert Manifest("other", ("", "src"), (one, two)).digest == base
    for other in (
        manifest(one),
        manifest(one, TreeEntry("c", DIGEST, 3)),
        manifest(one, TreeEntry("b", "cd" * 32, 3)),
        manifest(one, TreeEntry("b", DIGEST, 3, True)),
        manifest(one, TreeEntry("b", target="a")),
    ):
        assert other.digest != base


def test_the_modules_that_can_be_imported() -> None:
    paths = ("top.py", "package/__init__.py", "package/inner.py", "folder/x.py", "src/lib/__init__.py", "data.txt")
    whole = manifest(*(TreeEntry(path, DIGEST) for path in paths), roots=("", "src"))

    assert whole.module_names == {"top", "package", "lib"}


@pytest.mark.parametrize(
    "entries",
    [
        [TreeEntry("/etc/passwd", DIGEST)],
        [TreeEntry("../outside", DIGEST)],
        [TreeEntry("a/../../outside", DIGEST)],
        [TreeEntry("a//b", DIGEST)],
        [TreeEntry("./a", DIGEST)],
        [TreeEntry("", DIGEST)],
        [TreeEntry("a\0b", DIGEST)],
        [TreeEntry("a", DIGEST), TreeEntry("a", DIGEST)],
        [TreeEntry("a", DIGEST), TreeEntry("a/b", DIGEST)],
        [TreeEntry("a/b/c", DIGEST), TreeEntry("a", target="x")],
        [TreeEntry("link", target="/etc")],
        [TreeEntry("link", target="..")],
        [TreeEntry("sub/link", target="../../x")],
        [TreeEntry("sub/link", target="x/../../../y")],
        [TreeEntry("a", "../../x")],
        [TreeEntry("a", DIGEST.upper())],
        [TreeEntry("a", DIGEST, -1)],
        [TreeEntry("a", DIGEST, "3")],  # type: ignore[arg-type]
    ],
    ids=lambda entries: " ".join(f"{e.path or e.target}"[:20] for e in entries),
)
def test_what_could_write_outside_of_its_tree_is_refused(entries: list[TreeEntry]) -> None:
    with pytest.raises(loom.ProtocolMismatch):
        Manifest.unpack(manifest(*entries).pack())


def test_a_root_outside_of_its_tree_is_refused() -> None:
    with pytest.raises(loom.ProtocolMismatch):
        Manifest.unpack(manifest(roots=("../x",)).pack())


_NESTED = st.recursive(st.integers(-9, 9) | st.text(), st.lists)


@given(st.one_of(st.binary(max_size=200), _NESTED.map(msgpack.packb)))
def test_anything_else_is_refused(data: bytes) -> None:
    try:
        unpacked = Manifest.unpack(data)
    except loom.ProtocolMismatch:
        return
    assert Manifest.unpack(unpacked.pack()) == unpacked


def test_a_folder_over_a_limit_names_its_largest_files(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [(f"small{n}", 1) for n in range(10)] + [("data/big.bin", 5 << 20)]
    monkeypatch.setenv("LOOM_SYNC_LIMIT", str((5 << 20) + 10))
    check_sizes(files, "the limit")

    monkeypatch.setenv("LOOM_SYNC_LIMIT", "100")
    with pytest.raises(loom.TooLarge, match=r"5242890 bytes, over the limit of 100.*data/big\.bin \(5\.0 MiB\)"):
        check_sizes(files, "the limit")


def test_too_many_files_name_the_fullest_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loom.manifest.MAX_FILES", 3)

    with pytest.raises(loom.TooLarge, match=r"4 files, over the limit of 3.*node_modules \(3\)"):
        check_sizes([("a.py", 0)] + [(f"node_modules/{n}.js", 0) for n in range(3)], "the limit")


def test_a_limit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bytes_from_environment("LOOM_TEST_LIMIT", 7) == 7
    monkeypatch.setenv("LOOM_TEST_LIMIT", "1000")
    assert bytes_from_environment("LOOM_TEST_LIMIT", 7) == 1000
    monkeypatch.setenv("LOOM_TEST_LIMIT", "10 GB")
    with pytest.raises(loom.LoomError, match="LOOM_TEST_LIMIT='10 GB' is no number of bytes"):
        bytes_from_environment("LOOM_TEST_LIMIT", 7)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (20 << 20, "20.0 MiB"), (3 << 30, "3.0 GiB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert human_size(size) == text
