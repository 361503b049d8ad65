"""Orphans that a process adopts end as nobody's zombies."""

from __future__ import annotations

import subprocess
import sys

import pytest

ADOPTING = """
import subprocess, sys, time
import psutil
from loom.process.orphans import Patience, adopt_orphans

adopt_orphans(Patience(of_session=0.2, of_others=0.1))
own = subprocess.Popen(["sh", "-c", "exit 7"], start_new_session=True)
print(own.wait())
# Each shell leaves a child that outlives it; the second one is of another session, as are an engine's processes.
for leader in (False, True):
    subprocess.run(["sh", "-c", "sleep 0.3 & exit 0"], start_new_session=leader, check=True)
until = time.monotonic() + 20
adopted = psutil.Process().children()
while psutil.Process().children() and time.monotonic() < until:
    time.sleep(0.02)
print(len(adopted), len(psutil.Process().children()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_adopted_processes_that_end_are_reaped() -> None:
    done = subprocess.run([sys.executable, "-c", ADOPTING], check=True, capture_output=True, text=True, timeout=60)

    assert done.stdout.split() == ["7", "2", "0"]
