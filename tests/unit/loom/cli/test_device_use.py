"""The exit codes of commands that replicas refuse; see also `tests/integration/weaver/test_device_use.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from loom.cli.app import app
from loom.cli.options import UserAccess
from loom.control.commands import Acknowledgement


@pytest.fixture(autouse=True)
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the weaver by one whose only replica refuses every command."""
    refused = {"train_0": Acknowledgement.failed("it goes on as it likes")}
    command = SimpleNamespace(id="c", get=lambda timeout: refused)
    weaver = SimpleNamespace(command=lambda *_, **__: command)
    weaver.deactivate = weaver.reactivate = weaver.command
    monkeypatch.setattr(UserAccess, "weaver", lambda self: weaver)


def outcome(*words: str) -> Any:
    return CliRunner().invoke(app, [*words, "--url", "ws://127.0.0.1:1"])


@pytest.mark.parametrize("command", ["deactivate", "reactivate"])
def test_a_device_is_out_of_use_or_in_use_whatever_replicas_answer(command: str) -> None:
    ended = outcome(command, "--device", "GPU-0")

    assert ended.exit_code == 0
    assert "refused: it goes on as it likes" in ended.stdout


def test_a_command_that_is_refused_exits_with_1() -> None:
    assert outcome("pause").exit_code == 1
