"""Writes the pages of what is guaranteed, from the marks of the tests: ``python -m tests.support.guarantees_page``.

``@pytest.mark.guarantees(SECTION, TEXT)`` at a test says that it fails without what the text promises. Tests of the
same text share a row. As ``pytestmark``, the mark is that of all tests of a file.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT

__all__ = ["PAGES", "page"]

FOLDER = ROOT / "docs" / "design"

PAGES = {
    "guarantees": ("What is guaranteed, and by which test", {
        "users": "Users and their sessions",
        "ports": "Ports and OpenID Connect",
        "nothing lost": "Nothing is lost or grows in a session",
        "drivers": "Drivers and what they reach",
        "training": "Training on hosts that come and go",
        "strangers": "Strangers, and users who want too much",
        "chaos": "Chaos leaves no damage",
        "process link": "The link between driver and processes",
        "weaver": "The weaver of each user",
    }),
    "guarantees-machines": ("What machines guarantee", {
        "disk and clock": "A full disk and a clock that jumps",
        "laptop": "The laptop",
        "after a session": "The gateway's machine, after a session",
        "workers": "Workers, probes and manifests",
    }),
    "guarantees-page": ("What the page guarantees", {
        "page access": "Who comes in",
        "page actions": "What it shows and does",
        "page data": "What it is sent",
        "page files": "How it is installed",
    }),
    "guarantees-rl": ("What reinforcement learning guarantees", {
        "rl run": "A run",
        "rl serving": "Serving",
        "tracing": "Tracing",
        "diagnosis": "The diagnosis",
        "tuning": "The change",
    }),
}  # fmt: skip
"""Title and sections of each page, by its name."""

BY_BENCHMARK = {
    "strangers": [("2,000 connections without a token, of each kind, keep nobody out", "siege --check")],
    "rl serving": [("Where orders wait, and which way helps there, is measured and named", "queue")],
    "tracing": [("Spans cost at most the budget", "spans")],
    "diagnosis": [("A log of 1 GB is read within the budgets of time and memory", "analyze")],
}
"""What benchmarks show: the text, and the benchmark."""

HEAD = """\
# {title}

Each row is a promise, and the tests that fail without it.{more} The tests' marks write this page:
`python -m tests.support.guarantees_page`.
"""


class Mark(NamedTuple):
    section: str
    text: str
    test: str
    """A test, or a file of tests."""


def page(name: str) -> str:
    """A page, as it has to be."""
    title, sections = PAGES[name]
    more = "" if name == "guarantees" else " [Guarantees](guarantees.md) has those of the rest."
    found = marks()
    assert not (unknown := {one.section for one in found} - {key for _, of in PAGES.values() for key in of}), (
        unknown
    )
    parts = [HEAD.format(title=title, more=more)]
    for key, heading in sections.items():
        rows: dict[str, list[str]] = {}
        for one in found:
            if one.section == key:
                rows.setdefault(one.text, []).append(one.test)
        for text, benchmark in BY_BENCHMARK.get(key, ()):
            rows.setdefault(text, []).append(f"python -m tests.benchmarks {benchmark}")
        told = [f"| {text} | {', '.join(f'`{test}`' for test in tests)} |" for text, tests in rows.items()]
        parts.append(
            "\n".join(
                [f"## {heading}\n", "| what holds | the test that fails without it |", "| --- | --- |", *told, ""]
            )
        )
    return "\n".join(parts)


@functools.cache
def marks() -> list[Mark]:
    """The marks of all tests, by file and line."""
    found: list[Mark] = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text()
        if "mark.guarantees(" in source:
            found += _marks_of(path.relative_to(ROOT), ast.parse(source))
    return found


def _marks_of(path: Path, module: ast.Module) -> Iterator[Mark]:
    for node in module.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _marks_in(node.decorator_list, f"{path}::{node.name}")
            case ast.Assign(targets=[ast.Name("pytestmark")], value=value):
                yield from _marks_in(value.elts if isinstance(value, ast.List) else [value], str(path))


def _marks_in(decorators: list[ast.expr], test: str) -> Iterator[Mark]:
    for one in decorators:
        match one:
            case ast.Call(func=ast.Attribute(attr="guarantees"), args=[ast.Constant(section), ast.Constant(text)]):
                yield Mark(section, text, test)


if __name__ == "__main__":
    for name in PAGES:
        (FOLDER / f"{name}.md").write_text(page(name))
