"""Writes the page of the errors, from their own docstrings: ``python -m tests.support.errors_page``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from loom import errors
from loom.errors import LoomError
from tests.support.paths import ROOT

__all__ = ["PAGE", "page"]

PAGE = ROOT / "docs" / "reference" / "errors.md"

HEAD = """\
# Errors

Every exception of Loom's is a `loom.LoomError`, so `except loom.LoomError` catches what Loom raises and nothing
else. An exception derives from a built-in class too if Monarch or Python raise that class in the same situation.
Its `code` is its stable name on the wire and in [REST](rest.md). Its class owns the HTTP status and the
[exit code](exit-codes.md) that report it; without an entry they are 500 and 1.

This page is written by `python -m tests.support.errors_page`.
"""

ALIASES = """\
## Other names of these classes

Each of these names stands for a class above. The `code` of an error tells the cases of its class apart.

| name | is |
| --- | --- |"""


def page() -> str:
    """The page, as it has to be."""
    aliases = [
        name for name in errors.__all__ if inspect.isclass(cls := getattr(errors, name)) and _is_alias(name, cls)
    ]
    rows = [f"| `{name}` | `{getattr(errors, name).__name__}` |" for name in aliases]
    return "\n".join([HEAD, *_sections(), ALIASES, *rows, ""])


def _is_alias(name: str, cls: type) -> bool:
    return cls.__name__ != name


def _sections() -> Iterator[str]:
    """The sections: each begins with a comment between two classes, the first with the categories."""
    title = "# Categories"
    for part in re.split(r"\n\n\n(?=# )", inspect.getsource(errors).partition("# Cases that")[0]):
        title = part.splitlines()[0] if part.startswith("# ") else title
        yield f"#{title}\n\n| exception | code | HTTP | exit | also a | when |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for name in re.findall(r"^class (\w+)\(", part, re.MULTILINE):
            yield _row(getattr(errors, name))
        yield ""


def _row(cls: type[LoomError]) -> str:
    bases = [base for base in cls.__bases__ if base is not LoomError and base not in (Exception, object)]
    also = ", ".join(f"`{base.__name__}`" for base in bases)
    when = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")
    status = "" if cls.http_status == LoomError.http_status else cls.http_status
    ends = "" if cls.exit_status == LoomError.exit_status else cls.exit_status
    return f"| `{cls.__name__}` | `{cls.code}` | {status} | {ends} | {also} | {when} |"


if __name__ == "__main__":
    PAGE.write_text(page())
