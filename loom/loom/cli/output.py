"""The output of the commands: tables for users, JSON for programs."""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import typer

from loom.terminal_text import fit_line, fit_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

UNLIMITED = 1_000_000
"""Columns of the output when it is no terminal: no table is as wide."""


def show(
    as_json: bool, answer: Mapping[str, object], title: str, columns: list[str], rows: Iterable[Iterable[object]]
) -> None:
    """Print an answer as JSON, or as a table."""
    if as_json:
        print_json(answer)
    else:
        print_table(title, columns, rows)


def say(line: str, err: bool = False) -> None:
    """Print one line, to standard error with ``err``. Text of others in it is made fit to show."""
    typer.echo(fit_line(line), err=err)


def say_lines(text: str, err: bool = False, nl: bool = True) -> None:
    """Print a text of several lines as `say` prints one; without ``nl``, it has its last line's end already."""
    typer.echo(fit_lines(text), err=err, nl=nl)


def cell(text: str, style: str = "", no_wrap: bool = False) -> Text:
    """Return a text for a table or a picture, made fit to show, in which nothing counts as rich's markup."""
    from rich.text import Text

    return Text(fit_lines(text), style=style, no_wrap=no_wrap)


def print_json(answer: Mapping[str, object]) -> None:
    """Print an answer as indented JSON."""
    typer.echo(fit_lines(json.dumps(answer, indent=2)))


def print_table(title: str, columns: list[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a title, which stays one line to be copied, and a table; None makes an empty cell.

    A cell that is too wide for the terminal goes on in the next line.
    """
    from rich.table import Column, Table

    folding = (Column(name, overflow="fold") for name in columns)
    table = Table(*folding)
    for row in rows:
        table.add_row(*(cell("" if each is None else str(each)) for each in row))
    screen = console()
    screen.print(cell(fit_line(title)), soft_wrap=True)
    screen.print(table)


def console() -> Console:
    """Return a console for the standard output, which is as wide as the terminal, or `UNLIMITED` without one."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=UNLIMITED)


def file_name(text: str) -> str:
    """Return a name that others chose as a part of a file's name here, in which it leads to no other folder."""
    return re.sub(r"[^\w.@-]", "_", text, flags=re.ASCII)[:100].lstrip(".") or "_"


def when(seconds: float | None) -> str:
    """Return a time as text for users."""
    return "" if seconds is None else datetime.datetime.fromtimestamp(seconds).isoformat(" ", "seconds")


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun, in singular or plural."""
    return f"{number} {one if number == 1 else many or one + 's'}"
