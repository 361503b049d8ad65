"""A process looks at its own stacks: the busy threads are found, the waiting ones are not."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loom.control.profiles import FoldedStacks, Profile, ProfileRequest
from loom.threadlet import profiling
from loom.threadlet.profiling import Profiler, sample

BOUND = 30.0


@contextmanager
def thread(work: object) -> Iterator[None]:
    """A thread that works until the end of the block."""
    over = threading.Event()
    running = threading.Thread(target=work, args=(over,))  # type: ignore[arg-type]
    running.start()
    try:
        yield
    finally:
        over.set()
        running.join()


def busy_work(over: threading.Event) -> None:
    while not over.is_set():
        sum(range(1000))


def idle_work(over: threading.Event) -> None:
    over.wait()


def short_work(over: threading.Event) -> None:
    """Be busy for less than the 5 ms for which Python lets a thread run, and wait."""
    while not over.wait(0.002):
        busy_for_2_ms()


def busy_for_2_ms() -> None:
    until = time.perf_counter() + 0.002
    while time.perf_counter() < until:
        pass


def sample_until_seen(function: str, seconds: float) -> FoldedStacks:
    """Sample for so long, again while a thread that is to be seen got no turn on a busy machine."""
    until = time.monotonic() + BOUND
    while function not in (stacks := sample(seconds)).text and time.monotonic() < until:
        pass
    return stacks


def test_a_busy_thread_is_found_with_its_functions_from_the_outermost_on() -> None:
    with thread(busy_work):
        stacks = sample_until_seen("busy_work", 0.3)

    line = next(line for line in stacks.text.splitlines() if "busy_work" in line)
    functions = [one.partition(" ")[0] for one in line.split(";")]
    assert [one.rpartition(".")[2] for one in functions][-2:] == ["run", "busy_work"]
    assert f"test_profiling.py:{busy_work.__code__.co_firstlineno})" in line
    assert stacks.samples > 0


def test_work_that_is_short_is_seen_where_it_is_done() -> None:
    before = sys.getswitchinterval()
    with thread(short_work):
        stacks = sample_until_seen("busy_for_2_ms", 1.5)

    assert "busy_for_2_ms" in stacks.text
    assert sys.getswitchinterval() == before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which thread uses the CPU")
def test_a_thread_that_waits_is_not_found() -> None:
    with thread(idle_work), thread(busy_work):
        assert "idle_work" not in sample(0.3).text


def test_where_the_system_does_not_say_who_is_busy_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_cpu_nanoseconds", lambda thread: None)
    with thread(idle_work):
        assert "idle_work" in sample(0.1).text


def test_a_thread_that_is_gone_has_used_nothing() -> None:
    assert profiling._cpu_nanoseconds(1 << 22) is None
    assert profiling._cpu_nanoseconds(None) is None


def test_a_name_has_no_semicolon_and_no_line_end() -> None:
    code = compile("x = 1", "a;b\nc.py", "exec")
    assert profiling._name(code) == "<module> (a:b c.py:1)"


def test_one_profile_is_taken_at_a_time() -> None:
    sent: queue.Queue[Profile] = queue.Queue()
    profiler = Profiler(sent.put)
    profiler.begin(ProfileRequest("first", 0.2))
    profiler.begin(ProfileRequest("second", 0.2))

    refused, taken = sent.get(timeout=BOUND), sent.get(timeout=BOUND)
    assert (refused.id, refused.error) == ("second", "another profile of its process is being taken")
    assert (taken.id, taken.error) == ("first", "")
