"""Starting programs for tests, and seeing whole trees of processes end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import psutil

from loom_gateway.driver.process_link.link import REFUSED_FOR

STARTED_IN_TIME = 40.0
"""Seconds that a program may take to say that it is ready, on a busy machine."""

ENDED_IN_TIME = REFUSED_FOR + 15.0
"""Seconds in which a program and all its descendants must be gone.

An agent whose line to its driver was reset, and not closed, asks for the driver for `REFUSED_FOR` seconds.
"""

LOOM = "from loom.cli import main; main()"
"""Python code that is the command ``loom``."""

HIDDEN = "import sys; sys.modules[{module!r}] = None; "
"""Python code that makes a module look as if it were not installed."""


def start(*arguments: str, before: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
    """Start this interpreter with pipes for standard input and output; ``before`` begins the command."""
    return subprocess.Popen(
        [*before, sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=options.pop("stderr", subprocess.DEVNULL),
        text=True,
        start_new_session=True,
        **options,
    )


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this interpreter to its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=STARTED_IN_TIME,
        stdin=subprocess.DEVNULL,
        **options,
    )


def run_loom(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command ``loom`` to its end."""
    return run("-c", LOOM, *arguments, **options)


def read_json(process: subprocess.Popen[str]) -> Any:
    """The next line that the program prints."""
    assert process.stdout
    line = process.stdout.readline()
    assert line, f"the program ended with code {process.wait()} before it said anything"
    return json.loads(line)


def tree(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def processes_of_group(group: int) -> list[psutil.Process]:
    """The living processes of a process group."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(one.pid) == group and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def still_there(processes: Iterable[psutil.Process], timeout: float = ENDED_IN_TIME) -> list[str]:
    """What has not ended after ``timeout`` seconds. It is killed, so that a failed test leaves nothing behind."""
    _, alive = psutil.wait_procs(list(processes), timeout)
    left = []
    for process in alive:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"{process.pid}: {' '.join(process.cmdline())}")
                process.kill()
        except psutil.NoSuchProcess:
            continue
    return left
