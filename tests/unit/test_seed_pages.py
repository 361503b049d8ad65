"""The rows of the plans that Loom comes from: each names a test that exists, a decision, or what it lacks."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections import Counter
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import slow
from tests.support.docs import Page
from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "design" / "seeds"
INDEX = Page(FOLDER / "README.md")
DECISIONS = Page.of("docs/design/decisions.md")
PAGES = [Page(path) for path in sorted(FOLDER.glob("*.md")) if path.name != "README.md"]

NODE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:::(\w+))?(?:\[[^\]`]+\])?`")
PAGE_NODE = re.compile(r"`(gateway/dashboard/tests/\w+\.test\.ts): ([^`]+)`")
"""A test of the page's own code, by its title."""

ONLY_SLOW = re.compile(r"; only slow: .{10,}")
_NODES = rf"(?:{NODE.pattern}|{PAGE_NODE.pattern})"
SHOWN = re.compile(rf"{_NODES}(?:, {_NODES})*(?:{ONLY_SLOW.pattern})?")
REFUSED = re.compile(r"refused: \[([^]]+)\]\(\.\./decisions\.md#([\w-]+)\)")
NEVER_RUN = re.compile(r"never run: .{20,}")

LEAST_ROWS = 150
"""So many at least: a table that is not recognized would have none."""


class Kind(str, Enum):
    """What a row says instead of, or with, a test. The order is that of the index's columns."""

    SHOWN = "shown by a test"
    REFUSED = "refused"
    NOT_BUILT = "not built"
    NEVER_RUN = "never run"


class Row(NamedTuple):
    page: str
    asked: str
    where: str
    proof: str

    def __str__(self) -> str:
        return f"{self.page}: {self.asked[:60]}"

    @property
    def kind(self) -> Kind | None:
        """None if the row says neither what shows it nor what it lacks."""
        if SHOWN.fullmatch(self.proof):
            return Kind.SHOWN
        if REFUSED.fullmatch(self.proof):
            return Kind.REFUSED
        if self.proof == "not built":
            return Kind.NOT_BUILT
        return Kind.NEVER_RUN if NEVER_RUN.fullmatch(self.proof) else None


def rows(page: Page) -> list[Row]:
    found = []
    for line in page.text.splitlines():
        if line.startswith("| ") and not line.startswith(("| what is asked |", "| --- |")):
            cells = line.strip("| ").split(" | ")
            assert len(cells) == 3, f"{page.path.name}: {line}"
            found.append(Row(page.path.name, *cells))
    return found


ROWS = [row for page in PAGES for row in rows(page)]


@functools.cache
def names_in(path: Path) -> set[str]:
    """The tests of a file: functions, methods as ``Class::test``, and what hypothesis makes as ``TestName``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}::{one.name}" for one in methods if one.name.startswith("test_")}
        elif (
            isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr == "TestCase"
        ):
            found |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return found


@functools.cache
def marked_slow(path: Path) -> set[str]:
    """The tests of a file that are marked slow themselves, with their class or with their whole file."""

    def marked(decorators: list[ast.expr]) -> bool:
        return any("mark.slow" in ast.unparse(one) for one in decorators)

    body = ast.parse(path.read_text()).body
    whole = any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "pytestmark"
        and "mark.slow" in ast.unparse(node.value)
        for node in body
    )
    found = names_in(path).copy() if whole else set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and marked(node.decorator_list):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            for one in node.body:
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and marked(
                    node.decorator_list + one.decorator_list
                ):
                    found.add(f"{node.name}::{one.name}")
    return found


@functools.cache
def recorded_slow() -> set[str]:
    """The tests that took long when they were recorded, and those of which one parameter did."""
    seconds: dict[str, float] = json.loads(slow.SECONDS.read_text())
    return {test.partition("[")[0] for test, took in seconds.items() if took >= slow.LONG}


def quick_ones(row: Row) -> list[str]:
    """The tests of a row that run whenever tests do."""
    found = [file for file, _ in PAGE_NODE.findall(row.proof)]
    for file, *names in NODE.findall(row.proof):
        test = "::".join(filter(None, names))
        if test not in marked_slow(ROOT / file) and f"{file}::{test}" not in recorded_slow():
            found.append(f"{file}::{test}")
    return found


@functools.cache
def decisions() -> dict[str, str]:
    """The text of each decision, by its heading."""
    parts = re.split(r"^## (.+)$", DECISIONS.text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_there_are_rows_of_every_plan() -> None:
    assert len(PAGES) >= 5
    assert len(ROWS) >= LEAST_ROWS
    assert all(rows(page) for page in PAGES)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_names_a_test_that_exists_or_a_decision_or_what_it_lacks(row: Row) -> None:
    assert row.asked
    match row.kind:
        case Kind.SHOWN:
            for file, *names in NODE.findall(row.proof):
                path = ROOT / file
                assert path.is_file(), f"there is no {file}"
                assert "::".join(filter(None, names)) in names_in(path), f"{file} has no such test: {names}"
            for file, title in PAGE_NODE.findall(row.proof):
                assert f"'{title}'" in (ROOT / file).read_text(), f"{file} has no such test: {title}"
        case Kind.REFUSED:
            found = REFUSED.fullmatch(row.proof)
            assert found is not None
            assert found[1] in decisions(), f"no decision is named {found[1]}"
            assert found[2] == anchor(found[1])
        case None:
            pytest.fail(f"write `tests/…::test_…`, a refusal, not built, or never run: …, and not {row.proof!r}")


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind is Kind.SHOWN], ids=str)
def test_a_row_is_shown_by_a_quick_test_or_says_why_only_a_slow_one_can(row: Row) -> None:
    says_why = ONLY_SLOW.search(row.proof) is not None

    assert bool(quick_ones(row)) is not says_why, (
        "name a test that runs with every change, or write `; only slow: ` and the reason behind the slow ones"
    )


def test_every_decision_has_its_date_and_its_reason() -> None:
    assert decisions()
    for heading, text in decisions().items():
        assert re.match(r"\s*\d{4}-\d\d-\d\d\. \S.{80,}", text, re.DOTALL), (
            f"{heading}: write the date and the reason"
        )


def test_every_decision_is_of_some_row() -> None:
    referred = {found[1] for row in ROWS if (found := REFUSED.fullmatch(row.proof))}
    assert referred == decisions().keys()


def test_the_index_counts_what_is_shown_refused_and_lacking() -> None:
    counted = {}
    for page in PAGES:
        kinds = Counter(row.kind for row in rows(page))
        counted[page.path.name] = [len(rows(page)), *(kinds[kind] for kind in Kind)]
    told = {
        name: [int(number) for number in numbers.split(" | ")]
        for name, numbers in re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\) \| ([\d |]+) \|$", INDEX.text, re.MULTILINE)
    }
    assert told == counted


def test_no_row_is_told_twice() -> None:
    told = Counter((row.page, row.asked) for row in ROWS)
    assert [row for row, times in told.items() if times > 1] == []


@pytest.mark.parametrize(
    ("proof", "kind"),
    [
        ("`tests/unit/test_docs.py::test_pages_are_short`", Kind.SHOWN),
        ("`tests/a.py::test_one[x-1]`, `tests/b.py::TestThese::test_two`", Kind.SHOWN),
        ("`tests/unit/test_docs.py`", None),
        ("`tests/a.py::test_one` and more", None),
        ("`tests/a.py::test_one`; only slow: it takes a GPU", Kind.SHOWN),
        ("`tests/a.py::test_one`; only slow: no", None),
        ("`tests/a.py::test_one`, `gateway/dashboard/tests/a.test.ts: is empty, and says so`", Kind.SHOWN),
        ("refused: [No toy](../decisions.md#no-toy)", Kind.REFUSED),
        ("refused", None),
        ("not built", Kind.NOT_BUILT),
        ("not built yet", None),
        ("never run: it needs a machine with a GPU", Kind.NEVER_RUN),
        ("never run: no", None),
        ("", None),
    ],
)
def test_what_a_row_says_is_known(proof: str, kind: Kind | None) -> None:
    assert Row("page", "asked", "where", proof).kind is kind


def test_a_slow_test_is_known_by_its_mark_and_by_its_seconds() -> None:
    marked = "tests/unit/loom/threadlet/test_exit_codes.py::test_what_is_not_known_is_not_told"
    recorded = next(one for one in sorted(recorded_slow()) if one.startswith("tests/integration/calls/"))
    quick = "tests/unit/test_seed_pages.py::test_there_are_rows_of_every_plan"

    proof = ", ".join(f"`{one}`" for one in (marked, recorded, quick))

    assert quick_ones(Row("page", "asked", "where", proof)) == [quick]


def test_a_test_that_is_not_there_is_missed() -> None:
    known = names_in(Path(__file__))
    assert {"test_a_test_that_is_not_there_is_missed", "test_what_a_row_says_is_known"} <= known
    assert "test_that_nobody_wrote" not in known
    assert "rows" not in known
