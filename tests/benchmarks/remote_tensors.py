"""Monarch's own remote tensors: the same operations and reads as `tests.benchmarks.tensors`, without Loom.

They run in one process on this machine. They have no gradients of their own.
"""

from __future__ import annotations

import time
from typing import Any

from tests.benchmarks.caller import seconds_each, serve


class RemoteTensors:
    """Queues operations on a mesh of one process, and reads from it."""

    def __init__(self) -> None:
        import monarch
        import torch
        from monarch.actor import this_host

        self._fetch = monarch.fetch_shard
        self._procs = this_host().spawn_procs(per_host={"gpus": 1})
        self._active = self._procs.activate()
        self._active.__enter__()
        self._x, self._one = torch.ones(4), torch.ones(())

    def operations(self, count: int) -> list[float]:
        """Return the seconds of an operation until it is queued, and until it is done."""
        x = self._x
        self._read()
        began = time.perf_counter()
        for _ in range(count // 4):
            y: Any = x.mul(x).add(x).relu().sum()
        queued = time.perf_counter() - began
        self._fetch(y).result()
        return [queued / count, (time.perf_counter() - began) / count]

    def read(self, count: int) -> list[float]:
        """Return the seconds of each of some reads of a number."""
        return seconds_each(self._read, count)

    def _read(self) -> None:
        assert self._fetch(self._one).result().item() == 1.0

    def close(self) -> None:
        self._active.__exit__(None, None, None)
        self._procs.stop().get()


if __name__ == "__main__":
    serve(RemoteTensors)  # type: ignore[arg-type]
