"""Tables on a narrow terminal, and without a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from loom.cli.output import print_table

SESSION = "session-" + "0123456789" * 8
REASON = "a reason with many words " * 8


class Terminal(io.StringIO):
    """Stands in for a terminal."""

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_each_row_is_one_whole_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")

    print_table("a title that is wider than the table " * 9, ["name", "why"], [[SESSION, REASON], ["other", None]])

    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert len(rows) == 2
    assert SESSION in rows[0]
    assert REASON.strip() in rows[0]


def test_on_a_narrow_terminal_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")

    title = "sigstop 0123456789abcdef0123456789abcdef 0123456789"  # an id is copied from it
    print_table(title, ["name", "why"], [[SESSION, REASON]])

    assert terminal.getvalue().splitlines()[0] == title
    rows = [line for line in terminal.getvalue().splitlines() if line.startswith("│")]
    assert max(map(len, rows)) == 40
    assert "".join(row.split("│")[1].strip() for row in rows) == SESSION
    assert "…" not in terminal.getvalue()
