"""The page that a benchmark writes of its run."""

from __future__ import annotations

from datetime import datetime, timezone

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tests.benchmarks.results_page import results_page

AT = datetime(2026, 2, 3, 4, 5, tzinfo=timezone.utc)


def test_tables_and_lines_become_markdown() -> None:
    table = Table("", "one call\np50, ms", title="calls, 5 rounds")
    table.columns[1].justify = "right"
    table.add_row("through [bold]Loom[/bold]", Text("0.88", style="green"))
    found = Group(table, Text("2 cores", style="dim"))

    assert results_page("calls", "One call.", found, AT, 1.25) == (
        "# Results: calls\n\n"
        "One call.\n\n"
        "Written by the benchmark itself, on 2026-02-03 at 04:05 UTC, at a load average of 1.2.\n\n"
        "## calls, 5 rounds\n\n"
        "|  | one call p50, ms |\n"
        "| --- | ---: |\n"
        "| through Loom | 0.88 |\n\n"
        "`2 cores`\n"
    )


def test_a_bar_in_a_cell_does_not_end_it() -> None:
    table = Table("a")
    table.add_row("x | y")

    assert "| x / y |" in results_page("calls", "", table, AT, 1.25)
