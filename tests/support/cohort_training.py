"""A training on several ranks that average their gradients, for the tests of cohorts.

``python -m tests.support.cohort_training WAY FILES`` is one rank, started as torchrun starts it. It trains until it
is stopped, stalls at random, and writes a line of JSON into its file when its learning rate changes, and every few
steps with the digest of its parameters. The file ends with the step at which it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from loom.process.listen import free_ports
from tests.support.gateways import await_true
from tests.support.network.delay_proxy import DelayProxy
from tests.support.network.gate import Gate
from tests.support.processes import start
from tests.unit.loom.weaver.raw_threadlet import RawGateway, WeaverProcess

__all__ = ["WAYS", "Ranks", "ranks_of", "training"]

WAYS = ("block", "calls", "taken", "wait")
"""The ways in which a loop comes to its step boundaries: `train`."""

CHECKED_EVERY = 5
"""Steps between two digests of the parameters."""


def train(way: str, files: str) -> None:  # noqa: C901 - a script, as users write it
    """The rank's process."""
    import torch
    from torch import distributed, nn

    import loom

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    chance = random.Random(f"{os.environ['STALLS']} {rank}")
    threadlet = loom.Threadlet(f"train_{rank}", group="train", config={"learning_rate": 0.01})
    written = open(f"{files}_{rank}", "a", buffering=1)  # noqa: SIM115 - until the process ends
    number = 0

    def write(**line: Any) -> None:
        written.write(json.dumps({"step": number, **line}) + "\n")

    def set_learning_rate(value: float) -> None:
        if value == 1000 + rank:
            raise ValueError("this rank refuses this one")
        optimizer.param_groups[0]["lr"] = min(value, 1.0)
        write(lr=value)

    if way != "taken":
        threadlet.handler("learning_rate")(set_learning_rate)

    @threadlet.on_save
    def save() -> None:
        write(saved=True)

    def stall() -> None:
        if os.environ["STALLS"] and chance.random() < 0.1:
            time.sleep(chance.choice([0.001, 0.005, 0.02, 0.08]))

    def step() -> None:
        stall()
        inputs = torch.full((2, 8), float(1 + (number + rank) % 3))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        stall()
        if number % CHECKED_EVERY == 0:
            state = [*model.parameters(), *(one["momentum_buffer"] for one in optimizer.state.values())]
            data = b"".join(one.detach().numpy().tobytes() for one in state)
            write(digest=hashlib.sha256(data).hexdigest())

    while not threadlet.should_stop:
        if way == "block":
            with threadlet.step(number):
                step()
        else:
            step()
            threadlet.publish_status(number)
            if way == "calls":
                threadlet.check_and_apply_updates()
            while way == "taken" and (command := threadlet.get_config_update()) is not None:
                if command["command_type"] == "update_config":
                    set_learning_rate(command["params"]["learning_rate"])
            threadlet.wait_while_paused()
        number += 1
    write(stopped=True)
    threadlet.close()


class Ranks:
    """The ranks' processes, each with a line of its own to the weaver."""

    def __init__(
        self,
        weaver: WeaverProcess,
        folder: Path,
        world: int,
        way: str,
        stalls: str,
        bound: float,
        restarts: int,
        delay: float,
    ) -> None:
        self.world = world
        self._folder = folder
        (port,) = free_ports(1)
        where, _, key = weaver.address.rpartition("/")
        self.gates = [Gate(int(where.rpartition(":")[2])) for _ in range(world)]
        for gate in self.gates:
            gate.__enter__()
        self._slow = DelayProxy(port, delay)
        self._slow.__enter__()
        common = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "WORLD_SIZE": str(world),
            "STALLS": stalls,
            "LOOM_COHORT_BOUND": str(bound),
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
        }
        self.processes: list[subprocess.Popen[str]] = []
        for rank, gate in enumerate(self.gates):
            environment: Mapping[str, str] = {
                **common,
                "RANK": str(rank),
                "MASTER_PORT": str(self._slow.port if delay and rank >= world // 2 else port),
                "LOOM_WEAVER": f"tcp://127.0.0.1:{gate.port}/{key}",
            }
            with (folder / f"errors_{rank}").open("w") as errors:
                arguments = ["-m", "tests.support.cohort_training", way, str(folder / "rank")]
                self.processes.append(start(*arguments, env=environment, stderr=errors))

    def lines(self, rank: int) -> list[dict[str, Any]]:
        """What a rank has written so far."""
        file = self._folder / f"rank_{rank}"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def errors(self, rank: int) -> str:
        return (self._folder / f"errors_{rank}").read_text()

    def changes(self, rank: int) -> list[tuple[int, float]]:
        """The steps after which a rank's learning rate was another one than before, with the new values."""
        after: dict[int, float] = {line["step"]: line["lr"] for line in self.lines(rank) if "lr" in line}
        values = [0.01, *after.values()]
        return [(step, value) for (step, value), old in zip(after.items(), values, strict=False) if value != old]

    def check_equal(self) -> int:
        """Check that the ranks' parameters are equal at each step with digests; return the number of these."""
        digests: dict[int, set[str]] = {}
        for rank in range(self.world):
            for line in self.lines(rank):
                if "digest" in line:
                    digests.setdefault(line["step"], set()).add(line["digest"])
        differ = sorted(step for step, found in digests.items() if len(found) > 1)
        assert not differ, f"the parameters differ from step {differ[0]} on"
        return len(digests)

    def await_steps(self, count: int) -> None:
        """Wait until each rank has checked its parameters so many times more."""
        before = [len(self.lines(rank)) for rank in range(self.world)]
        await_true(lambda: all(len(self.lines(rank)) >= at + count for rank, at in enumerate(before)))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()
        for gate in (*self.gates, self._slow):
            gate.__exit__(None, None, None)


@contextmanager
def training(
    weaver: WeaverProcess,
    folder: Path,
    world: int = 4,
    way: str = "block",
    stalls: str = "1",
    bound: float = 2.0,
    restarts: int = 0,
    delay: float = 0.0,
) -> Iterator[Ranks]:
    """A training whose ranks have formed their cohort. Its processes are killed in the end.

    Args:
        stalls: the seed of the random stalls; none without one.
        bound: ``LOOM_COHORT_BOUND``.
        restarts: how often the launcher has started the ranks before.
        delay: seconds of each way between the store of the job and the second half of its ranks.
    """
    folder.mkdir(exist_ok=True)
    ranks = Ranks(weaver, folder, world, way, stalls, bound, restarts, delay)
    asking = weaver.gateway()
    try:
        await_true(lambda: ranks_of(asking) == world)
        ranks.await_steps(1)
        yield ranks
    finally:
        ranks.close()


def ranks_of(asking: RawGateway) -> int:
    """The ranks that are connected and in one cohort."""
    there = [one for one in asking.ask("replicas") if one["connected"] and one["cohort"]]
    return len(there) if len({one["cohort"]["id"] for one in there}) == 1 else 0


if __name__ == "__main__":
    train(*sys.argv[1:])
