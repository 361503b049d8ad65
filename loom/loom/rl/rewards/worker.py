"""A process that judges completions: ``python -m loom.rl.rewards.worker``, with a socket as its standard input.

The main thread runs the functions, so that these may use signals. Another one reads, and kills this process, with
what the functions have started, when the parent is gone.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

import cloudpickle

from loom.errors import describe_error
from loom.process.parent_pipe import take_standard_input
from loom.rl.rewards.functions import Opinion, RewardCall, RewardFunction


def main() -> None:
    """Read the functions, and then calls, until the parent ends this process."""
    parent = Connection(take_standard_input())
    received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(parent, received), name="receive calls", daemon=True).start()
    seconds, path, pickled = pickle.loads(received.get())
    sys.path[:] = path
    try:
        functions: list[RewardFunction] = cloudpickle.loads(pickled)
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        parent.send(describe_error(error))
        return
    parent.send("")
    while True:
        asyncio.run(_judge_all(parent, functions, cloudpickle.loads(received.get()), seconds))


def _receive(parent: Connection, received: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            received.put(parent.recv_bytes())
    except (EOFError, OSError):
        os.killpg(os.getpgrp(), signal.SIGKILL)


async def _judge_all(
    parent: Connection, functions: Sequence[RewardFunction], calls: Sequence[RewardCall], seconds: float
) -> None:
    """Answer each call: one after the other, or at the same time if its function is a coroutine function."""
    waiting = []
    for place, call in enumerate(calls):
        function = functions[call.function]
        if function.is_async:
            waiting.append(_judge_in_time(parent, function, place, call, seconds))
        else:
            parent.send((place, await function.judge(call)))
    await asyncio.gather(*waiting)


async def _judge_in_time(
    parent: Connection, function: RewardFunction, place: int, call: RewardCall, seconds: float
) -> None:
    try:
        found = await asyncio.wait_for(function.judge(call), seconds)
    except asyncio.TimeoutError:
        found = [Opinion(failure=f"{function.name} took longer than {seconds:g} s")] * len(call.answers)
    parent.send((place, found))


if __name__ == "__main__":
    main()
