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
    return _outcome(*GATEWAY, *arguments)


def _outcome(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["tune", *arguments])
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


VERL = "step:{step} - timing_s/step:30.0 - timing_s/gen:28.0 - timing_s/update_actor:2.0 - actor/pg_loss:0.1\n"


def test_logs_of_another_framework_need_no_gateway(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("".join(VERL.format(step=step) for step in range(20)))

    code, said = _outcome(str(log), "--out", str(tmp_path / "tuning"))

    assert code == 0, said
    assert "generator: verl takes no changes while it runs. Add generators" in said
    assert "no option of a running run" not in said
    (entry,) = json.loads((tmp_path / "tuning" / "ledger.json").read_text())["entries"]
    assert (entry["rule"], entry["decision"]) == ("generator", "none")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run.log", "--session", "rl"], "logs and --session do not go together"),
        (["run.log", "--apply"], "name its training with --replica"),
        (["--framework", "verl"], "name its logs, too"),
        (["no.log"], "no.log"),
    ],
)
def test_what_makes_no_sense_for_another_framework_is_refused(arguments: list[str], says: str) -> None:
    code, said = _outcome(*arguments)
    assert code != 0
    assert says in said
