"""The pages that lead through the code name what is there: files, classes and functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.support.docs import Page
from tests.support.paths import ROOT

WALKS = Page.of("docs/design/walks.md")
CHANGES = Page.of("docs/design/changes.md")


class Hop(NamedTuple):
    section: str
    name: str
    """A function, or a class and its method."""
    file: str

    def __str__(self) -> str:
        return f"{self.name} in {self.file}"


def hops() -> Iterator[Hop]:
    section = ""
    for line in WALKS.text.splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif found := re.match(r"\d+\. `([\w.]+)` in `([\w./]+)`", line):
            yield Hop(section, found[1], found[2])


def defined(source: str) -> set[str]:
    """The functions, classes and methods of a module."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{one.name}" for one in inner}
    return names


@pytest.mark.parametrize("hop", list(hops()), ids=str)
def test_each_hop_of_the_walks_is_there(hop: Hop) -> None:
    path = ROOT / hop.file
    assert path.is_file(), f"{hop.file} is not there: correct docs/design/walks.md"
    assert hop.name in defined(path.read_text()), f"{hop.file} has no {hop.name}: correct docs/design/walks.md"


def test_every_line_of_the_walks_is_a_hop() -> None:
    numbered = [line for line in WALKS.text.splitlines() if re.match(r"\d+\. ", line)]
    assert len(numbered) == len(list(hops())) > 15


def changes() -> list[tuple[str, str]]:
    return re.findall(r"^\| \d+ \| ([^|]+) \| `([^`]+)` \|$", CHANGES.text, re.MULTILINE)


def test_there_are_25_changes_and_the_file_of_each_is_there() -> None:
    found = changes()
    assert len(found) == 25
    lacking = {change: file for change, file in found if not (ROOT / file).is_file()}
    assert not lacking, "correct docs/design/changes.md"


def test_each_guess_of_a_file_has_its_result_and_those_that_are_right_are_there() -> None:
    guesses = re.findall(r"^\| \d+ \| [^|]+ \| ([^|]+) \| ([^|]+) \| (yes|no) \|$", CHANGES.text, re.MULTILINE)
    assert len(guesses) == 140
    assert {result for _, found, result in guesses if found == "there"} == {"yes"}
    right = [guess.split("`")[-2] for guess, _, result in guesses if result == "yes"]
    assert not [file for file in right if not (ROOT / file).is_file()]
