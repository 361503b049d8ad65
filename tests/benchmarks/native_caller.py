"""Monarch without Loom: a root client attached to one worker, both on this machine.

The argument ``tuned`` gives it Loom's worker and Loom's settings; without it Monarch is as it comes.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import sys
from typing import Any

from tests.benchmarks.caller import MeshCaller, serve
from tests.benchmarks.native_procs import native_hosts


def make_caller() -> MeshCaller:
    hosts, end = native_hosts(tuned="tuned" in sys.argv)
    from monarch.actor import Actor, endpoint

    class Counter(Actor):
        def __init__(self) -> None:
            self.number = 0

        @endpoint
        def add(self, amount: int) -> int:
            self.number += amount
            return self.number

        @endpoint
        def echo(self, value: Any) -> Any:
            return value

    return MeshCaller.on(hosts, Counter, end)


if __name__ == "__main__":
    serve(make_caller)
