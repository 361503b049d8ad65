"""The refusal of signals outside of the main thread, in words that say what to do instead."""

from __future__ import annotations

import functools
import signal
import threading
from typing import Any


def explain_refusals(sentence: str) -> None:
    """Let the ``ValueError`` with which `signal.signal` refuses a thread end with a sentence.

    Python's own text says only that signals work in the main thread, which code in an actor or in a run of the
    driver cannot choose.
    """
    original = getattr(signal.signal, "__wrapped__", signal.signal)

    @functools.wraps(original)
    def install(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except ValueError as error:
            if threading.current_thread() is threading.main_thread():
                raise
            raise ValueError(f"{error}; {sentence}") from None

    signal.signal = install
