"""Threads that call actors."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any


def start_thread(name: str, work: Callable[..., object], *args: Any) -> None:
    """Run a function in a daemon thread, in the caller's context.

    In the context Monarch finds the actor that calls: without it, a thread of an actor would begin to be a client
    of its own, which an actor's process cannot. It also has the trace of `loom.timing`.
    """
    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(work, *args), name=name, daemon=True).start()
