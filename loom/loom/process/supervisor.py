"""The supervision of a process or another activity: it is run again whenever it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from loom.process.backoff import Backoff


async def run_again(run: Callable[[], Awaitable[None]], backoff: Backoff, steady: float) -> NoReturn:
    """Run something, and again after each end, until this task is cancelled.

    Args:
        run: returns when the activity has ended.
        backoff: the waits before it runs again.
        steady: seconds of one run after which the waits are short again.
    """
    waits = iter(backoff)
    while True:
        began = time.monotonic()
        await run()
        if time.monotonic() - began > steady:
            waits = iter(backoff)
        await asyncio.sleep(next(waits))
