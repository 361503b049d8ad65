"""The pages that readers have, with their links and their blocks of code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

__all__ = ["PAGES", "Block", "Page"]

_FENCE = re.compile(r"^ *```(\w*)$")
_INLINE_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code."""

    page: Path
    line: int
    """Line of its first line in the page, from 1."""
    language: str
    """What stands behind the fence: ``python``, ``sh``, or nothing."""
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Page:
    """A page of Markdown."""

    path: Path

    @classmethod
    def of(cls, name: str) -> Page:
        """The page with a name from the root of the checkout, such as ``docs/deploy/workers.md``."""
        return cls(ROOT / name)

    @property
    def text(self) -> str:
        return _read(self.path)[0]

    @property
    def prose(self) -> str:
        """The text without its blocks of code."""
        return _read(self.path)[1]

    def blocks(self, language: str | None = None) -> list[Block]:
        """The blocks of code, all or those of a language."""
        return [block for block in _read(self.path)[2] if language in (None, block.language)]

    def inline(self) -> list[str]:
        """What stands in backquotes within the prose."""
        return _INLINE_CODE.findall(self.prose)

    def command(self, words: str) -> str:
        """Return the only command within a sentence that begins with these words."""
        (found,) = {code for code in self.inline() if code.startswith(words)}
        return str(found)

    def links(self) -> list[str]:
        """Where its links lead: addresses, or paths from its folder with ``#anchor``."""
        return _LINK.findall(_INLINE_CODE.sub("", self.prose))

    def anchors(self) -> set[str]:
        """The anchors of its headings, as GitHub names them."""
        return {_slug(heading) for heading in _HEADING.findall(self.prose)}

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))


def _slug(heading: str) -> str:
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


@cache
def _read(path: Path) -> tuple[str, str, tuple[Block, ...]]:
    text = path.read_text()
    blocks = tuple(_blocks(path, text))
    lines = text.splitlines()
    for block in blocks:
        for number in range(block.line - 1, block.line - 1 + len(block.lines)):
            lines[number] = ""
    prose = "\n".join(line for line in lines if not _FENCE.match(line))
    return text, prose, blocks


def _blocks(path: Path, text: str) -> Iterator[Block]:
    inside: list[str] | None = None
    begun, language = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if inside is None:
            if fence:
                inside, begun, language = [], number + 1, fence[1]
        elif fence:
            yield Block(path, begun, language, tuple(inside))
            inside = None
        else:
            inside.append(line)
    assert inside is None, f"{path}: the block that begins at line {begun} does not end"


PAGES = [
    Page(path)
    for path in (
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "images" / "README.md",
        ROOT / "examples" / "chaos" / "README.md",
    )
]
"""Every page that readers have."""
