"""Faults of processes, by their numbers and through a threadlet: killed, and stopped for a while."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import psutil
import pytest

from loom.chaos.host import processes
from loom.errors import FaultRefused
from tests.integration.chaos.conftest import Struck
from tests.unit.loom.threadlet.fake_weaver import BOUND, eventually

Start = Callable[..., Struck]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_a_killed_process_is_gone(sleeper: subprocess.Popen[bytes]) -> None:
    injected = processes.kill(sleeper.pid)

    assert injected.evidence["state"] == "gone"
    assert not injected.removable
    assert sleeper.wait(BOUND) == -signal.SIGKILL


def test_a_stopped_process_is_stopped_and_goes_on_when_that_is_removed(sleeper: subprocess.Popen[bytes]) -> None:
    with processes.stop(sleeper.pid) as injected:
        assert injected.evidence == {"pid": sleeper.pid, "state": "T"}
        assert psutil.Process(sleeper.pid).status() == psutil.STATUS_STOPPED

    eventually(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_SLEEPING)
    assert injected.removal is not None
    assert injected.removal["state"] in "RS"


def test_what_was_killed_while_it_was_stopped_is_removed_all_the_same(sleeper: subprocess.Popen[bytes]) -> None:
    injected = processes.stop(sleeper.pid)
    sleeper.kill()
    sleeper.wait(BOUND)

    assert injected.remove() == {"pid": sleeper.pid, "state": "gone"}


def test_a_process_that_is_not_there_is_refused() -> None:
    with pytest.raises(FaultRefused, match="no process 4194303"):
        processes.kill(4194303)


def test_a_training_that_is_killed_has_said_so_before(struck: Start) -> None:
    train = struck()

    assert train.injected("sigkill") == {"pid": train.pid}

    assert train.wait() == -signal.SIGKILL
    assert train.goodbye() is None


def test_a_training_that_is_stopped_goes_on_when_the_time_is_over(struck: Start) -> None:
    train = struck()

    evidence = train.injected("sigstop", duration=0.5)

    assert evidence == {"pid": train.pid}
    eventually(lambda: psutil.Process(train.pid).status() == psutil.STATUS_STOPPED)
    _, _, removal = train.connection.expect("fault")
    assert removal["was"] == {"pid": train.pid, "state": "T"}
    assert psutil.Process(train.pid).status() != psutil.STATUS_STOPPED
    train.connection.rows(2)


def test_a_training_that_is_stopped_is_released_by_another_of_its_host(struck: Start) -> None:
    train = struck()
    other = struck()
    stopped = train.inject("sigstop", 600.0)
    eventually(lambda: psutil.Process(train.pid).status() == psutil.STATUS_STOPPED)

    removal = other.weaver.command(other.connection, "remove_fault", injection=stopped)

    assert other.connection.ack(removal)[1]["ok"]
    assert psutil.Process(train.pid).status() != psutil.STATUS_STOPPED
    assert train.connection.ack(stopped)[1]["ok"]
    assert not os.listdir(train.agents)


def test_the_end_of_a_fault_is_told_again_with_each_connection(struck: Start) -> None:
    train = struck()
    fault = train.inject("clock_jump", 0.01)
    assert train.connection.expect("fault")[1] == fault

    train.connection.close()

    _, hello = train.weaver.welcome()
    assert list(hello["removed"]) == [fault]
