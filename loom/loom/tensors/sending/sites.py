"""The lines of a program that queue operations."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

_FOLDER = __file__.rpartition("/sending/")[0]
_own_files: set[str] = set()
"""The files of this package that queue operations, as code objects name them."""

Site = tuple[CodeType, int]
"""A line as a code object and a place in it, which cost little to keep."""


def caller_site() -> Site | None:
    """Return the line outside this package from which it was called, as a code object and a place in it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file not in _own_files:
            if not file.startswith(_FOLDER):
                return code, frame.f_lasti
            _own_files.add(file)
        frame = frame.f_back
    return None


def place_of(site: Site) -> str:
    """Return a line as text."""
    code, at = site
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= at < end and number is not None:
            line = number
    return f"{code.co_filename}:{line}, in {code.co_name}"
