"""``loom logs --run``: a run that there is not; see also `tests/integration/session/test_loom_logs.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from loom.cli.app import app
from loom.errors import NoSuchRun, UnknownSession
from loom.rest_client import Gateway

LINE = {"mesh": "driver", "place": "", "stream": "stdout", "text": "printed", "run": 3}


class StandIn:
    """Stands in for a gateway with one session, whose log has a line of run 3; its driver also knows run 4."""

    living = True

    def logs(self, session: str, follow: bool, run: int, **wanted: Any) -> Iterator[dict[str, Any]]:
        return iter([LINE] if run == 3 and wanted.get("stream") in (None, "stdout") else [])

    def runs(self, session: str) -> list[dict[str, Any]]:
        if not self.living:
            raise UnknownSession(f"no session named {session!r}")
        return [
            {"id": 3, "name": "train", "trains": [{"id": "3f2a9c", "name": "sft"}]},
            {"id": 4, "name": "evaluate"},
        ]


@pytest.fixture(autouse=True)
def gateway(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(Gateway, "logs", lambda _, *given, **wanted: found.logs(*given, **wanted))
    monkeypatch.setattr(Gateway, "runs", lambda _, session: found.runs(session))
    return found


def loom_logs(*options: str) -> tuple[str, BaseException | None]:
    common = ["logs", "--url", "ws://127.0.0.1:1", "--session", "s"]
    ended = CliRunner().invoke(app, [*common, *options])
    return ended.stdout, ended.exception


def test_the_lines_of_a_run_are_shown() -> None:
    assert loom_logs("--run", "3") == ("[driver] printed\n", None)


@pytest.mark.parametrize("options", [("--run", "4"), ("--run", "3", "--stream", "stderr")])
def test_a_run_without_such_lines_shows_nothing(options: tuple[str, ...]) -> None:
    assert loom_logs(*options) == ("", None)


def test_a_run_that_there_is_not_is_an_error() -> None:
    shown, error = loom_logs("--run", "17")

    assert shown == ""
    assert isinstance(error, NoSuchRun)
    assert "session 's' knows no run 17" in str(error)
    assert "3 (train, trains sft 3f2a9c), 4 (evaluate)" in str(error)


def test_of_a_session_that_has_ended_the_log_decides(gateway: StandIn) -> None:
    gateway.living = False

    assert loom_logs("--run", "3", "--stream", "stderr") == ("", None)
    assert isinstance(loom_logs("--run", "4")[1], NoSuchRun)
