"""``loom tune`` on the command line, where its usage makes no sense; see also `tests/system/rl/test_tune.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loom.cli.app import app
from loom.errors import UnknownSession
from loom.rest_client import Gateway

GATEWAY = ["--url", "ws://127.0.0.1:1", "--token", "t", "--session", "rl"]


def outcome(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["tune", *GATEWAY, *arguments])
    return result.exit_code, result.output + str(result.exception)


@pytest.mark.parametrize("option", [("--change", "async_level=2"), ("--replay", "ledger.json")])
def test_what_changes_the_run_needs_apply(option: tuple[str, str]) -> None:
    code, said = outcome(*option)
    assert code != 0
    assert "give --apply, too" in said


def test_two_sources_of_changes_do_not_go_together() -> None:
    assert "do not go together" in outcome("--apply", "--change", "a=1", "--replay", "ledger.json")[1]


def test_a_change_is_an_assignment() -> None:
    assert "'async_level' is not KEY=VALUE" in outcome("--apply", "--change", "async_level")[1]


def test_a_ledger_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "cannot read the ledger" in outcome("--apply", "--replay", str(tmp_path / "ledger.json"))[1]
    (tmp_path / "ledger.json").write_text(json.dumps({"entries": 3}))
    assert "is no ledger" in outcome("--apply", "--replay", str(tmp_path / "ledger.json"))[1]


def test_a_session_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gateway, "sessions", lambda _: [{"name": "other"}])

    ended = CliRunner().invoke(app, ["tune", *GATEWAY])

    assert isinstance(ended.exception, UnknownSession)
    assert "no session named 'rl'; living sessions: 'other'" in str(ended.exception)


def test_a_gateway_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    code, said = outcome("--out", str(tmp_path / "tuning"))
    assert code != 0
    assert "127.0.0.1:1" in said
    assert not (tmp_path / "tuning").exists()
