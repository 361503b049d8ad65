"""A process whose machine is about to be taken away: its threadlets tell the training."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from loom.threadlet import Threadlet, evictions
from tests.unit.loom.threadlet.fake_weaver import FakeWeaver, Loop, come

Make = Callable[..., Threadlet]
BOUND = 20

LOOP = """
import os, signal, sys
import loom

with loom.Threadlet("alone") as threadlet:
    os.kill(os.getpid(), signal.SIGTERM)
    while not threadlet.should_stop:
        pass
print("saved", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
signal.pause()
"""


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    yield
    evictions._start_anew()


def test_an_eviction_stops_every_open_threadlet_and_those_made_later() -> None:
    first = Threadlet("first")
    Threadlet("closed").close()

    assert evictions.evict_all()

    assert (first.should_stop, first.evicted) == (True, True)
    assert Threadlet("later").should_stop


def test_nothing_is_evicted_when_nothing_trains() -> None:
    Threadlet("closed").close()

    assert not evictions.evict_all()


def test_an_eviction_ends_a_pause_and_refuses_another(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    loop = Loop(lambda number: made.wait_while_paused())
    pause = weaver.command(connection, "pause")
    come(made)
    loop.go()
    connection.ack(pause)

    evictions.evict_all()
    assert loop.done.get(timeout=BOUND) == 0
    loop.end()
    again = weaver.command(connection, "pause")
    while not made._pending:
        pass
    made.check_and_apply_updates()

    assert not made.paused
    assert "about to end" in str(connection.ack(again))


@pytest.mark.parametrize("below_a_worker", [True, False])
def test_a_program_heeds_the_sigterm_of_a_worker_once(
    monkeypatch: pytest.MonkeyPatch, below_a_worker: bool
) -> None:
    monkeypatch.setenv(evictions.SIGNALLED_VARIABLE, "1" if below_a_worker else "")
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)  # measuring changes how the program ends

    ended = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, timeout=BOUND)

    assert ended.returncode == -signal.SIGTERM
    assert ended.stdout == ("saved\n" if below_a_worker else "")


FORKS = """
import os, signal
from loom.threadlet import Threadlet

t = Threadlet()
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), t.should_stop)
"""


def test_the_sigterm_of_a_forked_child_ends_that_child_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(evictions.SIGNALLED_VARIABLE, "1")
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)

    ended = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=BOUND)

    assert (ended.returncode, ended.stdout) == (0, f"{-signal.SIGTERM} False\n")
