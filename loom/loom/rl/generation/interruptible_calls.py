"""Calls to actors whose waits can be interrupted, and end when the actor's process is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from loom.errors import ActorError, SupervisionError, Unavailable
from loom.process.threads import DaemonExecutor

LOOK_EVERY = 0.1
"""Seconds between two looks at whether a wait has a point; a cancelled `job.run` is interrupted between two."""


class ProcessGone(Exception):
    """The process of an actor is gone, or is as good as gone."""


def begin(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Run a function in a thread of its own, which may wait for an actor for ever; return its result to come."""
    return DaemonExecutor(f"rl {getattr(function, '__name__', 'call')}").submit(function, *args, **kwargs)


def call_one(endpoint: Any, *args: Any, **kwargs: Any) -> Future[Any]:
    """Call an endpoint of a mesh of one actor; return its result to come."""
    future = endpoint.call_one(*args, **kwargs)
    return begin(future.get)


def result_of(future: Future[Any], gone: threading.Event, timeout: float | None = None) -> Any:
    """Return the result of a call.

    Args:
        gone: set when the actor's process has ended.
        timeout: seconds after which the process counts as gone; None for as long as it takes.

    Raises:
        ProcessGone: the process is gone.
        Exception: the error of the endpoint.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while not future.done():
        wait([future], LOOK_EVERY)
        if gone.is_set() and not future.done():
            raise ProcessGone("its process is gone")
        if deadline is not None and time.monotonic() >= deadline and not future.done():
            raise ProcessGone(f"it has not answered for {timeout:g} s")
    error = future.exception()
    if isinstance(error, ActorError) and isinstance(error.exception, Unavailable):
        raise ProcessGone(str(error.exception)) from error  # the actor lives, and its engine does not
    if isinstance(error, (SupervisionError, Unavailable)) or (error is not None and gone.is_set()):
        raise ProcessGone(str(error)) from error
    return future.result()
