"""Folders that one process holds at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loom.errors import Conflict
from loom.process.held_folder import hold, holder_of


def test_who_holds_a_folder_is_known_until_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    assert holder_of(folder) is None

    lock = hold(folder, "gateway", "gateway.sock")
    held_by = holder_of(folder)
    with pytest.raises(Conflict, match=f"another gateway \\(pid {os.getpid()}\\)"):
        hold(folder, "gateway", "gateway.sock")
    os.close(lock)

    assert held_by == os.getpid()
    assert holder_of(folder) is None


@pytest.mark.parametrize("text", [b"", b"no pid", b"-1"])
def test_a_holder_without_a_number_is_none(tmp_path: Path, text: bytes) -> None:
    lock = hold(tmp_path / "state", "gateway", "gateway.sock")
    os.ftruncate(lock, 0)
    os.pwrite(lock, text, 0)

    assert holder_of(tmp_path / "state") is None
    os.close(lock)
