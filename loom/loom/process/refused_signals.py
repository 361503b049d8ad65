"""The refusal of signals outside of the main thread, in words that say what to do instead."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any


def explain_refusals(sentence: str) -> None:
    """Let the ``ValueError`` with which `signal` refuses a thread end with a sentence. Refuse it timers, too.

    Python's own text says only that signals work in the main thread, which code in an actor or in a run of the
    driver cannot choose. It takes a timer from any thread: the signal would end this process, or come to another
    run's handler.
    """
    for name in ("signal", "set_wakeup_fd"):  # asyncio's `add_signal_handler` begins with the latter
        _replace(name, functools.partial(_explained, sentence))
    _replace("alarm", functools.partial(_refused, sentence, 0, 0))
    _replace("setitimer", functools.partial(_refused, sentence, 1, (0.0, 0.0)))


def _replace(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(signal, name)
    original = getattr(original, "__wrapped__", original)
    setattr(signal, name, functools.wraps(original)(make(original)))


def _explained(sentence: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def install(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except ValueError as error:
            if _in_main_thread():
                raise
            raise ValueError(f"{error}; {sentence}") from None

    return install


def _refused(sentence: str, place: int, none: object, original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a thread's timer.

    ``place``: of the seconds in the arguments; ``none``: the answer where no timer is set.
    """

    def start(*args: Any) -> Any:
        if _in_main_thread() or len(args) <= place:
            return original(*args)
        if args[place]:
            raise ValueError(f"{original.__name__} only works in main thread; {sentence}")
        return none  # the end of a time limit that was refused, and no other run's

    return start


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
