"""Functions for `job.run` that go on until something happens."""

from __future__ import annotations

import asyncio
import os
import time

from loom_proxy.runs import RunHandle

IN_TIME = 30.0
"""Seconds that no wait may take."""


def wait_for(path: str) -> str:
    """A function that goes on until a file is there."""
    print("waiting", flush=True)
    deadline = time.monotonic() + IN_TIME
    while not os.path.exists(path):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    print("there")
    return path


def go_on_for_ever() -> None:
    print("begun")
    while True:
        time.sleep(0.01)


async def wait_for_ever() -> None:
    print("begun")
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up")


def until_it_prints(run: RunHandle, text: str) -> None:
    seen = ""
    for piece in run.follow():
        seen += piece
        if text in seen:
            return
    raise AssertionError(f"{text!r} is not in {seen!r}")
