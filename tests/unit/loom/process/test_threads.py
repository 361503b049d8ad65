"""Daemon threads that give results."""

from __future__ import annotations

import contextlib
import contextvars
import queue
import subprocess
import sys
import threading

import pytest

from loom.process.threads import DaemonExecutor, get_within, within

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


ENDS = """
import atexit
import threading
from loom.process.threads import keep_going

ending = threading.Event()

def work() -> None:
    ending.wait()
    raise RuntimeError("can't create new thread at interpreter shutdown")

worker = threading.Thread(target=keep_going, args=("work", work), daemon=True)
worker.start()

@atexit.register
def end() -> None:
    ending.set()
    worker.join(30)
    print(worker.is_alive())
"""


def test_work_that_can_start_no_thread_because_the_program_ends_is_not_tried_again() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=BOUND)

    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize("seconds", [0.0, 1e-7, 1e-6])
def test_a_wait_for_a_queue_whose_time_is_over_at_once_ends(seconds: float) -> None:
    def wait() -> None:
        for _ in range(20_000):
            with contextlib.suppress(queue.Empty):
                get_within(queue.SimpleQueue[None](), seconds)

    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    waits.join(BOUND)

    assert not waits.is_alive()


def test_an_item_of_a_queue_is_had_at_once_and_later() -> None:
    items = queue.SimpleQueue[int]()
    items.put(1)
    assert get_within(items, 0.0) == 1
    with pytest.raises(queue.Empty):
        get_within(items, 0.01)
    threading.Timer(0.01, items.put, [2]).start()
    assert get_within(items, BOUND) == 2
    threading.Timer(0.01, items.put, [3]).start()
    assert get_within(items, None) == 3
