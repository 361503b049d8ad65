"""What drivers of other user ids share with each other: nothing, not even Monarch's log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loom_gateway.sessions.driver_ids import hold_folder_of_logs


def test_the_folder_of_monarchs_logs_belongs_to_the_gateway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "unknown"

    hold_folder_of_logs(str(folder))
    hold_folder_of_logs(str(folder))  # as the next gateway does

    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (os.geteuid(), 0o755)
    assert caplog.messages == []


def test_a_folder_of_logs_that_is_a_drivers_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    hold_folder_of_logs(str(tmp_path))

    assert "who can read Monarch's logs" in caplog.text
