"""A user's program that counts and goes on counting, whatever is killed around it.

Prints a line of JSON for each count that was confirmed. Says so when it has to begin again, and why.

    python -m tests.support.endurance_client URL TOKEN [SESSION]
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import loom
from tests.support.actors import Counter

BOUND = 60.0


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Counting:
    """Counts on every host. Each count is one more than the one before, or something was lost or done twice."""

    def __init__(self, url: str, token: str, session: str | None) -> None:
        self._url, self._token = url, token
        self._job = loom.connect(url, token, session, take_over=session is not None)
        if session is None:
            self._begin("the program has")
        else:
            self._counters = self._job.meshes["counters"]
            self._count = self._confirmed(0)
            say(session=session, attached=self._count)

    def _begin(self, why: str) -> None:
        self._count = 0
        procs = self._job.hosts.spawn_procs(name="procs")
        self._counters = procs.spawn("counters", Counter)
        pids = list(self._counters.pid.call().get(BOUND).values())
        say(session=self._job.session, begun=why, pids=pids)

    def _confirmed(self, more: int) -> int:
        values = list(self._counters.add.call(more).get(BOUND).values())
        (value,) = set(values)
        return int(value)

    def count(self) -> None:
        try:
            value = self._confirmed(1)
        except (loom.SessionLost, loom.UnknownSession) as error:
            self._job = loom.connect(self._url, self._token)
            self._begin(type(error).__name__)
        except loom.SupervisionError:
            # A host is gone. It comes back, but has nothing of what ran there.
            until = time.monotonic() + BOUND
            while not self._job.refresh_hosts():
                assert time.monotonic() < until, (
                    f"the host does not come back: {list(self._job.events(timeout=1.0))}"
                )
                time.sleep(0.1)
            self._begin("SupervisionError")
        else:
            assert value == self._count + 1, f"{value} comes after {self._count}"
            self._count = value
            say(count=value)


def main() -> None:
    counting = Counting(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
    while True:
        counting.count()


if __name__ == "__main__":
    main()
