"""An ordinary class and a function in the cluster, called like local ones.

Run it as it is, with a cluster of its own on this machine, or with LOOM_URL and LOOM_TOKEN set to a gateway's.
"""

from __future__ import annotations

import asyncio
import os
import platform

import loom


class RunningMean:
    """Knows nothing of Loom."""

    def __init__(self, start: float = 0.0) -> None:
        self.total = start
        self.count = 0

    def add(self, *values: float) -> float:
        self.total += sum(values)
        self.count += len(values)
        return self.mean()

    def mean(self) -> float:
        if not self.count:
            raise ValueError("there is nothing to take the mean of")
        return self.total / self.count


def where() -> str:
    return f"process {os.getpid()} of {platform.node()}"


async def add_at_once(mean: loom.RemoteObject) -> list[float]:
    return await asyncio.gather(*(mean.add(value, async_=True) for value in (1.0, 2.0, 3.0)))


def main() -> None:
    with loom.connect() if os.environ.get("LOOM_URL") else loom.local(hosts=2) as job:
        with loom.cls(RunningMean).to(job) as mean:
            try:
                mean.mean()
            except ValueError as error:
                print("refused:", error)
            print("mean:", mean.add(2.0, 4.0))
            print("then:", mean.add(6.0))
            print("at once:", asyncio.run(add_at_once(mean)))

        with loom.fn(where).to(job, hosts=slice(None)) as everywhere:
            for point, place in everywhere().items():
                print(f"host {point['hosts']}: {place}")


if __name__ == "__main__":
    main()
