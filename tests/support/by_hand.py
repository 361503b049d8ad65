"""A cluster of this machine for a person: it is started by a command, and there until Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

C = TypeVar("C")


def hold(missing: str, make: Callable[[], AbstractContextManager[C]], tell: Callable[[C], None]) -> None:
    """Start a cluster, say how to use it, and end it after Ctrl-C or SIGTERM.

    Args:
        missing: what this machine lacks for it; empty if nothing.
        tell: prints how to use it.
    """
    if missing:
        sys.exit(f"error: {missing}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with make() as cluster:
        tell(cluster)
        print(f"Ctrl-C ends it (process {os.getpid()}).", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("ending", flush=True)
