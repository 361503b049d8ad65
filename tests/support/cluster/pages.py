"""The commands of README.md, as they stand there."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

__all__ = ["blocks", "inline", "section"]

README = ROOT / "README.md"


def section(title: str) -> str:
    """The text under a heading of the third level, up to the next heading."""
    _, found, rest = README.read_text().partition(f"\n### {title}\n")
    assert found, f"README has no section {title}"
    return re.split(r"\n##+ ", rest)[0]


def blocks(text: str, language: str = "") -> list[list[str]]:
    """The lines of each block of commands."""
    return [
        found.splitlines() for found in re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


def inline(text: str, words: str) -> str:
    """The one command within a sentence that begins with these words."""
    (found,) = set(re.findall(rf"`({re.escape(words)}[^`]*)`", text))
    return str(found)
