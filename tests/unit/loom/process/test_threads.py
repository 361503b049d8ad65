"""Daemon threads that give results."""

from __future__ import annotations

import contextvars
import subprocess
import sys
import threading

import pytest

from loom.process.threads import DaemonExecutor, within

BOUND = 30.0  # seconds

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("NAME", default="nobody")

PROGRAM = """
import threading
from loom.process.threads import DaemonExecutor

began = threading.Event()

def wait() -> None:
    began.set()
    threading.Event().wait()

DaemonExecutor("waits").submit(wait)
began.wait()
"""


def test_a_function_gives_its_result_in_the_context_of_the_caller() -> None:
    NAME.set("somebody")

    assert DaemonExecutor("asks").submit(NAME.get).result(BOUND) == "somebody"
    assert DaemonExecutor("asks").submit(divmod, 7, 2).result(BOUND) == (3, 1)


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3)])
def test_an_error_is_the_result_s(error: BaseException) -> None:
    def fail() -> None:
        raise error

    assert DaemonExecutor("fails").submit(fail).exception(BOUND) is error


def test_a_process_ends_while_a_function_still_waits() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=BOUND)


def test_what_hangs_is_left_alone() -> None:
    released = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        within(0.05, released.wait)
    released.set()

    assert within(BOUND, lambda: 3) == 3
    with pytest.raises(TimeoutError, match="its own"):
        within(BOUND, lambda: (_ for _ in ()).throw(TimeoutError("its own")))
