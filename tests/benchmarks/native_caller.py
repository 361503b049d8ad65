"""Monarch without Loom: a root client attached to one worker, both on this machine."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

from typing import Any

from loom_gateway.workers.monarch_env import set_monarch_environment
from tests.benchmarks.caller import MeshCaller, serve, wait_one_by_one
from tests.benchmarks.native_procs import native_procs


def make_caller() -> MeshCaller:
    set_monarch_environment()
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

    procs, close = native_procs(gpus=1)
    counter = procs.spawn("counters", Counter).slice(hosts=0, gpus=0)
    return MeshCaller(counter.add.call_one, counter.echo.call_one, wait_one_by_one, close)


if __name__ == "__main__":
    serve(make_caller)
