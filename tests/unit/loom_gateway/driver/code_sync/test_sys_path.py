"""The trees that a driver imports from."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from loom_gateway.driver.code_sync.cache import Hold
from loom_gateway.driver.code_sync.sys_path import DriverPath, SyncedTree


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is shown here from other tests, and from the programs that they start."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.mark.guarantees("nothing lost", "A folder that is synced again and again takes one descriptor")
def test_a_folder_that_is_synced_again_unchanged_takes_no_further_descriptor(tmp_path: Path) -> None:
    descriptors = [os.open(tmp_path, os.O_RDONLY) for _ in range(3)]
    path, tree = DriverPath(), SyncedTree("project", "digest", ("",), (str(tmp_path),))
    for descriptor in descriptors:
        path.show(tree, Hold(tmp_path, descriptor), frozenset())
    assert [is_open(descriptor) for descriptor in descriptors] == [False, False, True]
    assert sys.path.count(str(tmp_path)) == 1
    os.close(descriptors[-1])


def test_a_folder_of_a_package_that_was_forgotten_is_forgotten_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "whole" / "inner").mkdir(parents=True)
    (tmp_path / "whole" / "__init__.py").touch()
    importlib.import_module("whole.inner")
    del sys.modules["whole"]  # by hand: its folder asks for it by name
    descriptor = os.open(tmp_path, os.O_RDONLY)

    DriverPath().show(
        SyncedTree("project", "digest", ("",), (str(tmp_path),)), Hold(tmp_path, descriptor), frozenset()
    )

    assert "whole.inner" not in sys.modules
    os.close(descriptor)
