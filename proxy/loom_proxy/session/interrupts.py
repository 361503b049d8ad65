"""Blocks of code that Ctrl-C, or the interrupt of a notebook's cell, does not break off.

Python raises KeyboardInterrupt in the main thread between any two instructions. Between taking a frame from the
stream and noting how much of it was sent, that would lose the frame, and with it the session.
"""

from __future__ import annotations

import signal
import threading
from importlib import import_module
from typing import Any

# The C module: `signal` wraps its functions to return enums, which takes longer than the rest of a block.
_signal: Any = import_module("_signal")
_handler, _handle = _signal.getsignal, _signal.signal
_SIGINT = int(signal.SIGINT)
_get_ident, _main_thread = threading.get_ident, threading.main_thread


class Uninterrupted:
    """A ``with`` block that a SIGINT does not interrupt: a signal that comes meanwhile is handled at its end.

    Only for blocks that do not wait, or that check `came` often. Outside the main thread, in which alone Python
    handles signals, it does nothing.
    """

    __slots__ = ("_previous", "came")

    def __init__(self) -> None:
        self.came = False
        self._previous: Any = None

    def __enter__(self) -> Uninterrupted:
        if _get_ident() == _main_thread().ident:
            previous = _handler(_SIGINT)
            if previous is not None:  # None: a handler that C code installed, which could not be put back
                _handle(_SIGINT, self._note)
                self._previous = previous
        return self

    def _note(self, number: int, frame: object) -> None:
        self.came = True

    def __exit__(self, *error: object) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            _handle(_SIGINT, previous)
            if self.came:
                signal.raise_signal(signal.SIGINT)
