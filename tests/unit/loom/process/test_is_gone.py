"""A file is gone if there is none, and not because its disk does not answer."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from loom.process.state_file import is_gone


def test_a_file_that_is_not_there_is_gone(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")

    assert [is_gone(tmp_path / name) for name in ("", "link", "missing", "link/x")] == [False, False, True, True]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.EMFILE, errno.ENOMEM])
def test_a_file_of_a_disk_that_does_not_answer_is_not_gone(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "lstat", fails)

    assert not is_gone("/file")
