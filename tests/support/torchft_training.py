"""Replica groups of torchft that average their gradients, for the tests of their cohorts.

``python -m tests.support.torchft_training WAY FILES`` is one rank of a group. It trains until it is stopped, stalls
at random, and writes a line of JSON into its file after each step: the learning rate, and the digest of its
parameters.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from loom.cli.run import environment
from loom.process.listen import free_ports
from tests.support.gateways import await_true
from tests.support.processes import start
from tests.unit.loom.weaver.raw_threadlet import RawGateway, WeaverProcess

__all__ = ["ReplicaGroups", "replica_groups"]

STARTS = 40.0
"""Seconds that processes have to import torch, one beside the other, and to make a step."""

TIMEOUT = 8.0
"""Seconds of torchft's own waits."""


def hold_up(file: Path) -> None:
    """Let this rank come to the store of a quorum only while a file is not there: a stand-in for a slow one."""
    from loom.instrument.torchft import Quorums

    find = Quorums._store_of

    def find_later(self: Quorums, *args: Any) -> Any:
        await_true(lambda: not file.exists(), STARTS)
        return find(self, *args)

    Quorums._store_of = find_later  # type: ignore[method-assign]


def train(way: str, files: str) -> None:
    """The rank's process."""
    import torch
    from torch import nn
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    replica, rank, ranks = (int(os.environ[name]) for name in ("REPLICA_GROUP_ID", "RANK", "WORLD_SIZE"))
    port = int(os.environ["MASTER_PORT"])
    hold_up(Path(f"{files}_{replica}_held_up"))
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    torch.manual_seed(replica)
    module = nn.Linear(8, 4)
    inner = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9999)

    def load_state_dict(state: Any) -> None:
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])
        schedule.load_state_dict(state["schedule"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {
            "model": module.state_dict(),
            "optim": inner.state_dict(),
            "schedule": schedule.state_dict(),
        },
        replica_id=f"train_{replica}",
        timeout=timedelta(seconds=TIMEOUT),
        quorum_timeout=timedelta(seconds=60),
        rank=rank,
        world_size=ranks,
        store_addr="127.0.0.1",
        store_port=port,
        hostname="127.0.0.1",
    )
    model = DistributedDataParallel(manager, module)
    optimizer = Optimizer(manager, inner)
    chance = random.Random(f"{os.environ['STALLS']} {replica} {rank}")
    written = open(f"{files}_{replica * ranks + rank}", "a", buffering=1)  # noqa: SIM115 - until the process ends
    threadlet = None
    if way == "register":
        import loom.train

        threadlet = loom.train.register(manager, group="train")

        @threadlet.handler("learning_rate")
        def set_learning_rate(value: float) -> None:
            inner.param_groups[0]["lr"] = value

    while threadlet is None or not threadlet.should_stop:
        if os.environ["STALLS"] and chance.random() < 0.1:
            time.sleep(chance.choice([0.001, 0.005, 0.02, 0.08]))
        before = manager.current_step()
        optimizer.zero_grad()
        inputs = torch.full((2, 8), float(1 + (before + replica) % 3))
        model(inputs).square().mean().backward()
        optimizer.step()
        if manager._commit_failures:
            continue  # the step does not count; a replica that heals has the others' number nevertheless
        step = manager.current_step()
        if threadlet is None:
            schedule.step()
        state = [*module.parameters(), *(one["momentum_buffer"] for one in inner.state.values())]
        data = b"".join(one.detach().numpy().tobytes() for one in state)
        rate = inner.param_groups[0]["lr"]
        line = {"step": step, "lr": rate, "digest": hashlib.sha256(data).hexdigest(), "of": os.getpid()}
        written.write(json.dumps(line) + "\n")
        time.sleep(0.005)
    manager.shutdown(wait=False)
    del store


class ReplicaGroups:
    """The processes of the groups, by global rank."""

    def __init__(
        self, weaver: WeaverProcess, folder: Path, groups: int, ranks: int, way: str, stalls: str, bound: float
    ) -> None:
        from torchft.coordination import LighthouseServer

        self.groups, self.ranks, self.world = groups, ranks, groups * ranks
        self._folder, self._way = folder, way
        options = {"join_timeout_ms": 200, "quorum_tick_ms": 20, "heartbeat_timeout_ms": 1000}
        self.lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **options)
        common = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "STALLS": stalls,
            "OMP_NUM_THREADS": "1",
            "RUST_LOG": "error",
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.lighthouse.address().rpartition(':')[2]}",
            "LOOM_COHORT_BOUND": str(bound),
            "LOOM_WEAVER": weaver.address,
        }
        if way == "run":
            common |= environment(common, weaver.address, "train")
        self._common = common
        self.processes: list[subprocess.Popen[str]] = []
        for group in range(groups):
            self.processes += self._start(group)

    def _start(self, group: int) -> list[subprocess.Popen[str]]:
        (port,) = free_ports(1)
        made = []
        for rank in range(self.ranks):
            own = {"RANK": str(rank), "MASTER_PORT": str(port), "REPLICA_GROUP_ID": str(group)}
            with (self._folder / f"errors_{group * self.ranks + rank}").open("a") as errors:
                arguments = ["-m", "tests.support.torchft_training", self._way, str(self._folder / "rank")]
                made.append(start(*arguments, env={**self._common, **own}, stderr=errors))
        return made

    def of_group(self, group: int) -> slice:
        return slice(group * self.ranks, (group + 1) * self.ranks)

    def kill(self, group: int) -> None:
        for process in self.processes[self.of_group(group)]:
            process.kill()
            process.wait()

    def signal(self, group: int, name: str) -> None:
        for process in self.processes[self.of_group(group)]:
            process.send_signal(getattr(signal, name))

    @contextmanager
    def held_up(self, group: int) -> Iterator[None]:
        """Let the ranks of a group not come to the store of a new quorum."""
        file = self._folder / f"rank_{group}_held_up"
        file.touch()
        try:
            yield
        finally:
            file.unlink()

    def start_again(self, group: int, restarts: int = 0) -> None:
        """Start a group again, as a launcher says that it does which counts its ``restarts``."""
        self._common["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
        self.processes[self.of_group(group)] = self._start(group)

    def lines(self, rank: int) -> list[dict[str, Any]]:
        """What a rank has written so far."""
        file = self._folder / f"rank_{rank}"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def errors(self, rank: int) -> str:
        return (self._folder / f"errors_{rank}").read_text()

    def rates(self, rank: int) -> dict[int, float]:
        return {line["step"]: line["lr"] for line in self.lines(rank)}

    def check_equal(self) -> int:
        """Check that the groups' parameters and rates are equal at each step; return the number of steps."""
        return self.check_equal_from([0] * self.world)

    def check_equal_from(self, lines: list[int]) -> int:
        """Check as `check_equal` from a line of each rank on."""
        found: dict[tuple[int, int], dict[int, tuple[str, float]]] = {}
        for rank in range(self.world):
            for line in self.lines(rank)[lines[rank] :]:
                found.setdefault((line["step"], rank % self.ranks), {})[rank] = line["digest"], line["lr"]
        several = {step: ranks for step, ranks in found.items() if len(ranks) > 1}
        differ = [step for step, ranks in sorted(several.items()) if len(set(ranks.values())) > 1]
        assert not differ, f"the ranks differ from step {differ[0]} on: {several[differ[0]]}"
        return len(several)

    def await_steps(self, count: int, of: list[int] | None = None) -> None:
        """Wait until ranks have made so many steps more."""
        there = list(range(self.world)) if of is None else of
        before = {rank: len(self.lines(rank)) for rank in there}
        await_true(lambda: all(len(self.lines(rank)) >= at + count for rank, at in before.items()), STARTS)

    def await_cohort(self, asking: RawGateway, world: int | None = None) -> None:
        """Wait until so many ranks are connected and in one cohort, all by default."""
        wanted = self.world if world is None else world

        def formed() -> bool:
            there = [one["cohort"] for one in asking.ask("replicas") if one["connected"] and one["cohort"]]
            return len(there) == wanted == there[0]["world"] and len({one["id"] for one in there}) == 1

        await_true(lambda: formed(), STARTS)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()
        self.lighthouse.shutdown()


@contextmanager
def replica_groups(
    weaver: WeaverProcess,
    folder: Path,
    groups: int = 2,
    ranks: int = 1,
    way: str = "run",
    stalls: str = "1",
    bound: float = 2.0,
) -> Iterator[ReplicaGroups]:
    """Replica groups that have formed their cohort. Their processes are killed in the end.

    Args:
        way: ``run``, as under ``loom run``, or ``register``, with the one line of `loom.train.register`.
        stalls: the seed of the random stalls; none without one.
        bound: ``LOOM_COHORT_BOUND``.
    """
    folder.mkdir(exist_ok=True)
    made = ReplicaGroups(weaver, folder, groups, ranks, way, stalls, bound)
    try:
        made.await_cohort(weaver.gateway())
        made.await_steps(1)
        yield made
    finally:
        made.close()


if __name__ == "__main__":
    train(*sys.argv[1:])
