"""A process is named for good: not by a number alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from loom.process.identity import has_ended, identity

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells for sure")


def test_a_process_has_ended_once_it_is_dead_even_while_nobody_has_waited_for_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    named = identity(child.pid)
    assert named is not None
    before = has_ended(named)

    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert not before
    assert has_ended(named)
    assert identity(child.pid) is None
    child.communicate()
    assert has_ended(named)


def test_a_later_process_of_the_same_number_is_another() -> None:
    named = identity(os.getpid())
    assert named is not None
    assert not has_ended(named)
    assert has_ended(named.rpartition(" ")[0] + " 1")


def test_of_a_process_of_another_machine_or_container_nothing_is_said() -> None:
    assert not has_ended("another-boot 4026531836 1 1")


@pytest.mark.parametrize("pid", [0, 1 << 40])
def test_there_is_no_process_of_that_number(pid: int) -> None:
    assert identity(pid) is None
