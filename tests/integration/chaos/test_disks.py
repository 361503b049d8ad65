"""Faults of disks: a file system that is full, and a checkpoint that is not what was written."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from loom.chaos.host import disks
from loom.errors import FaultRefused


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 megabytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"this machine cannot mount a small file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_takes_no_byte_and_then_does_again(small_disk: Path) -> None:
    (small_disk / "before").write_bytes(b"there")

    with disks.fill(str(small_disk)) as injected:
        assert injected.evidence["room"] == 0
        assert injected.evidence["written"] > 7 << 20
        with pytest.raises(OSError, match="No space left") as full:
            (small_disk / "checkpoint").write_bytes(bytes(4096))
        assert full.value.errno == errno.ENOSPC
        (small_disk / "checkpoint").unlink()

    assert injected.removal is not None
    assert injected.removal["room"] > 7 << 20
    (small_disk / "checkpoint").write_bytes(bytes(4096))
    assert sorted(os.listdir(small_disk)) == ["before", "checkpoint"]


def test_a_disk_with_more_room_than_may_be_filled_is_left_alone(small_disk: Path) -> None:
    with pytest.raises(FaultRefused, match=r"8 megabytes of room and at most 4 are filled"):
        disks.fill(str(small_disk), most=4)

    assert os.listdir(small_disk) == []


def checkpoint(folder: Path, name: str, when: int) -> Path:
    """A checkpoint of two files."""
    made = folder / name
    made.mkdir()
    (made / "weights").write_bytes(bytes(range(256)) * 8)
    (made / "manifest.json").write_text("{}")
    os.utime(made, (when, when))
    return made


def digests(folder: Path) -> dict[str, str]:
    return {str(one): hashlib.sha256(one.read_bytes()).hexdigest() for one in folder.rglob("*") if one.is_file()}


def test_the_newest_checkpoint_is_corrupted_and_then_as_it_was(tmp_path: Path) -> None:
    old, new = checkpoint(tmp_path, "step-1", 1), checkpoint(tmp_path, "step-2", 2)
    (tmp_path / ".being-written").mkdir()
    old_before, before = digests(old), digests(new)

    with disks.corrupt(str(tmp_path), seed=7) as injected:
        now = digests(new)
        assert all(now[name] != before[name] for name in before)
        assert (injected.evidence["before"], injected.evidence["after"]) == (before, now)
        assert digests(old) == old_before

    assert digests(new) == before


def test_a_seed_chooses_the_same_bytes(tmp_path: Path) -> None:
    checkpoint(tmp_path, "step-1", 1)
    after = []
    for seed in (3, 3, 4):
        with disks.corrupt(str(tmp_path), seed=seed) as injected:
            after.append(injected.evidence["after"][str(tmp_path / "step-1" / "weights")])

    assert after[0] == after[1] != after[2]


def test_a_checkpoint_that_was_written_again_meanwhile_stays_as_it_is(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path, "step-1", 1) / "weights"

    with disks.corrupt(str(tmp_path)):
        weights.write_bytes(b"written again")

    assert weights.read_bytes() == b"written again"


def test_where_there_is_no_checkpoint_there_is_nothing_to_corrupt(tmp_path: Path) -> None:
    with pytest.raises(FaultRefused, match="no checkpoint"):
        disks.corrupt(str(tmp_path))
    with pytest.raises(FaultRefused, match="no folder"):
        disks.corrupt(str(tmp_path / "none"))
