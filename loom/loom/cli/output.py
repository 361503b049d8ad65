"""The output of the commands: tables for users, JSON for programs."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

UNLIMITED = 1_000_000
"""Columns of the output when it is no terminal: no table is as wide."""


def show(
    as_json: bool, answer: dict[str, Any], title: str, columns: list[str], rows: Iterable[Iterable[object]]
) -> None:
    """Print an answer as JSON, or as a table."""
    if as_json:
        print_json(answer)
    else:
        print_table(title, columns, rows)


def print_json(answer: dict[str, Any]) -> None:
    """Print an answer as indented JSON."""
    typer.echo(json.dumps(answer, indent=2))


def print_table(title: str, columns: list[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a title, which stays one line to be copied, and a table; None makes an empty cell.

    A cell that is too wide for the terminal goes on in the next line.
    """
    from rich.table import Column, Table
    from rich.text import Text

    folding = (Column(name, overflow="fold") for name in columns)
    table = Table(*folding)
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    screen = console()
    screen.print(Text(title), soft_wrap=True)
    screen.print(table)


def console() -> Console:
    """Return a console for the standard output, which is as wide as the terminal, or `UNLIMITED` without one."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=UNLIMITED)


def when(seconds: float | None) -> str:
    """Return a time as text for users."""
    return "" if seconds is None else datetime.datetime.fromtimestamp(seconds).isoformat(" ", "seconds")


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun, in singular or plural."""
    return f"{number} {one if number == 1 else many or one + 's'}"
