"""The page of `docs/results` that a benchmark writes of its run: ``python -m tests.benchmarks SUITE --write …``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["results_page"]


def results_page(suite: str, about: str, found: RenderableType, at: datetime, load: float) -> str:
    """Return the page as Markdown.

    Args:
        suite: name of the benchmark, such as ``calls``.
        about: what it measures, in a sentence.
        found: the tables and lines of its report.
        at: when it was run.
        load: the machine's load average meanwhile, in processes that want to run.
    """
    ran = f"Written by the benchmark itself, on {at:%Y-%m-%d at %H:%M} UTC, at a load average of {load:.1f}."
    head = [f"# Results: {suite}", about, ran]
    return "\n\n".join([*head, *_parts(found)]) + "\n"


def _parts(found: RenderableType) -> Iterator[str]:
    match found:
        case Group():
            for one in found.renderables:
                yield from _parts(one)
        case Table():
            if found.title:
                yield f"## {_plain(found.title)}"
            yield "\n".join(_rows(found))
        case _:
            yield f"`{_plain(found)}`"


def _rows(table: Table) -> Iterator[str]:
    yield _row(_plain(column.header) for column in table.columns)
    yield _row("---:" if column.justify == "right" else "---" for column in table.columns)
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        yield _row(map(_plain, cells))


def _row(cells: Iterator[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _plain(cell: RenderableType) -> str:
    text = cell if isinstance(cell, Text) else Text.from_markup(str(cell))
    return " ".join(text.plain.replace("|", "/").split())
