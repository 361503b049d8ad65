"""The lines of a program that queue operations."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

_FOLDER = __file__.rpartition("/sending/")[0]
MOST_FILES = 4096
"""Files that are remembered: each cell of a notebook is one."""

_is_own: dict[str, bool] = {}
"""True if a file is of this package, by the name that its code objects have."""

Site = tuple[CodeType, int]
"""A line as a code object and a place in it, which cost little to keep."""


def caller_site() -> Site | None:
    """Return the line outside this package from which it was called, as a code object and a place in it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        own = _is_own.get(code.co_filename)
        if own is None:
            if len(_is_own) >= MOST_FILES:
                _is_own.clear()
            own = _is_own[code.co_filename] = code.co_filename.startswith(_FOLDER)
        if not own:
            return code, frame.f_lasti
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
