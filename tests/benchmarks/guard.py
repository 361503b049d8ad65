"""``python -m tests.benchmarks.guard COMMAND…`` runs a command that must not outlive whoever holds standard input.

The command gets a session of its own. When standard input is closed, or the command ends by itself, all processes
of that session are ended: the command is asked, and what is left is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""


def main() -> None:
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def end_with_parent() -> None:
        while os.read(0, 4096):
            pass
        command.terminate()
        threading.Timer(GRACE, _kill_session, [command.pid]).start()

    threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()
    command.wait()
    _kill_session(command.pid)


def _kill_session(session: int) -> None:
    for pid in _members(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _members(session: int) -> list[int]:
    """Process ids of a session, zombies left out; from /proc, since the standard library does not know."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _parent, _group, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


if __name__ == "__main__":
    main()
