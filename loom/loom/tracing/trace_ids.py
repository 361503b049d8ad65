"""The trace id of what runs now: it follows a call from the laptop to the actor, and names its events and spans."""

from __future__ import annotations

import os
import re
from contextvars import ContextVar, Token
from typing import TypeVar

T = TypeVar("T")

TRACE_ID = r"[0-9A-Za-z][0-9A-Za-z_.-]{0,63}"
"""The alphabet and the length of a trace id, as a regular expression."""

TRACE_HEADER = "x-trace-id"
"""The HTTP header with the trace id of a request."""

_whole = re.compile(TRACE_ID)
_current: ContextVar[str | None] = ContextVar("loom_trace", default=None)

trace_here = _current.get
"""As `current_trace`, in half the time: for the way of each call."""

begin_trace = _current.set
"""Set the trace id of this context, until another is set; None for none. For a context that serves one call."""


def current_trace() -> str | None:
    """Return the trace id of what runs now, or None."""
    return _current.get()


def checked_trace(id: object) -> str | None:
    """Return a trace id that came from elsewhere, or None if it is none."""
    return id if isinstance(id, str) and _whole.fullmatch(id) else None


def new_trace() -> str:
    """Return a new trace id: six hexadecimal digits."""
    return os.urandom(3).hex()


def reset(variable: ContextVar[T], token: Token[T]) -> None:
    """Set a variable back, unless the block ends in another context than it began in, as an async generator may."""
    try:  # noqa: SIM105 - `suppress` takes five times as long
        variable.reset(token)
    except ValueError:
        pass


class trace:  # noqa: N801 - it reads as a function, like `span`
    """Give a trace id to the block: to its events and spans, and to the calls it makes. The block gets the id.

    Args:
        id: the id; a new one of six hexadecimal digits if None.

    Raises:
        ValueError: the id is not 1 to 64 letters, digits, ``_``, ``.`` and ``-``, beginning with a letter or digit.
    """

    __slots__ = ("_id", "_token")

    def __init__(self, id: str | None = None) -> None:
        if id is not None and checked_trace(id) is None:
            raise ValueError(f"a trace id is 1 to 64 letters, digits, '_', '.' and '-', not {str(id)[:80]!r}")
        self._id = id

    def __enter__(self) -> str:
        id = self._id or new_trace()
        self._token = _current.set(id)
        return id

    def __exit__(self, *_: object) -> None:
        reset(_current, self._token)
