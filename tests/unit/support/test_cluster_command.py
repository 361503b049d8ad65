"""``python -m tests.support.cluster`` reads its command line before it starts anything."""

from __future__ import annotations

import sys

import pytest

from tests.support.cluster import __main__ as command


@pytest.mark.parametrize(
    ("argument", "code", "shown"), [("--help", 0, "Start a cluster"), ("--hosts", 2, "unrecognized arguments")]
)
def test_help_and_unknown_arguments_start_no_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argument: str, code: int, shown: str
) -> None:
    def start() -> str:
        raise AssertionError("it goes on to start a cluster")

    monkeypatch.setattr(command, "missing", start)
    monkeypatch.setattr(sys, "argv", ["cluster", argument])

    with pytest.raises(SystemExit) as ended:
        command.main()

    printed = capsys.readouterr()
    assert ended.value.code == code
    assert shown in printed.out + printed.err
