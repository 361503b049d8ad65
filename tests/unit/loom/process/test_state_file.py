"""Files that are replaced as a whole."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from loom.process.state_file import replace_file, write_json


def test_a_file_in_the_working_folder_is_replaced_and_only_its_user_can_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("state").write_text("a longer content before")

    replace_file("state", "after")

    assert Path("state").read_text() == "after"
    assert stat.S_IMODE(os.stat("state").st_mode) == 0o600


def test_the_old_content_stays_if_the_new_one_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "state", {"before": 1}, 0o644)

    def full_disk(descriptor: int) -> None:
        raise OSError("no room")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no room"):
        write_json(tmp_path / "state", {"after": 2})

    assert json.loads((tmp_path / "state").read_text()) == {"before": 1}
    assert os.listdir(tmp_path) == ["state"]
