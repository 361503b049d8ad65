"""`attempt`: one attempt to deliver an alert, which no kill of the weaver loses or repeats.

Each attempt has a file, with a lock. The weaver takes the lock and starts `loom.alerting.send` with the locked file
as its standard output, so that the lock is held by the two of them from the start of the process on. A weaver that
comes after a killed one finds the file:

- locked: the process goes on; its outcome is awaited;
- with an outcome: it is taken, as if the process were this weaver's;
- without a line: nothing was sent, and is sent now;
- begun without an outcome: the process itself has died, with its machine perhaps. Whether the receiver has got the
  alert is not known, and it is sent again, with the same id. Deliveries are at least once then.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from loom.alerting.send import BEGUN, ENDS_AFTER
from loom.process.child import python

POLL = 0.05
"""Seconds between two looks at a file that a former weaver's process holds."""

PATIENCE = ENDS_AFTER + 5.0
"""Seconds within which the process has ended, whatever it met."""

_ENVIRONMENT = ("PATH", "HOME", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR", "TZ")
"""The variables that the process gets: none with a secret of the gateway's."""


class AttemptOutcome(NamedTuple):
    """The outcome of an attempt."""

    status: int | None = None
    """The HTTP status, or 0 of an e-mail command, if the alert was delivered."""
    error: str | None = None

    @property
    def delivered(self) -> bool:
        return self.error is None


LOST = AttemptOutcome(None, "the sending process was ended before it had an answer")


def attempt(
    path: Path, job: bytes, sleep: Callable[[float], object] = time.sleep, command: list[str] | None = None
) -> AttemptOutcome:
    """Make an attempt, unless the file tells the outcome of the same one by a former weaver; block until then.

    Raises:
        OSError: there is no room for the file, or the process cannot be started.
    """
    path.parent.mkdir(0o700, exist_ok=True)
    with open(path, "a+b", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        for _ in range(int(PATIENCE / POLL)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                sleep(POLL)
        else:
            return LOST
        if (known := _read(path)) is not None:
            return known
        file.truncate(0)
        process = subprocess.Popen(
            command or python("loom.alerting.send"),
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.DEVNULL,
            env={name: value for name in _ENVIRONMENT if (value := os.environ.get(name)) is not None},
            start_new_session=True,
            cwd="/",
        )
        try:
            process.communicate(job, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return _read(path) or LOST


def _read(path: Path) -> AttemptOutcome | None:
    """Return the outcome in a file; None if nothing was sent."""
    begun, outcome = False, None
    for line in path.read_bytes().decode(errors="replace").splitlines():
        if line == BEGUN:
            begun = True
            continue
        try:
            told = json.loads(line)
            outcome = AttemptOutcome(told.get("status"), told.get("error"))
        except (ValueError, AttributeError):
            break  # it was cut off
    return outcome or (LOST if begun else None)
