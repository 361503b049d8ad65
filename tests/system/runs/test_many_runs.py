"""Two hundred runs, with weaver and gateway killed meanwhile: state and cause of each, every point in its curve."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from loom.errors import LoomError, WrongArguments
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from loom_proxy.weaver.runs import TrainingRun
from tests.support.gateways import TOKEN, Gateway, await_true, gateway_of
from tests.support.told_training import MAX_STEP
from tests.support.weavers import await_weaver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

RUNS = int(os.environ.get("LOOM_TEST_RUNS", "200"))
AT_ONCE = 6
ENDS = 240.0
"""Seconds for one process, also on a busy machine."""


@dataclass
class Expected:
    """What one run has to look like in the end."""

    name: str
    number: int
    state: str
    steps: list[list[int]]
    """The steps of each section of the curve."""
    killed: bool = False
    """True if a process of it was killed, whose last points it may have kept to itself."""
    first: str | None = None
    parent: str | None = None
    ids: list[str] = field(default_factory=list)


class Cluster:
    """Starts trainings against a gateway whose weaver dies now and then."""

    def __init__(self, gateway: Gateway, weaver: WeaverProxy) -> None:
        self.gateway = gateway
        self.weaver = weaver
        self.address = await_weaver(weaver)

    def start(self, expected: Expected, *told: object, **environment: str) -> subprocess.Popen[bytes]:
        loom_run = [str(Path(sys.executable).with_name("loom")), "run", "--name", expected.name, "--"]
        about = {"NAME": expected.name, "NUMBER": str(expected.number), "LOOM_WEAVER": self.address}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOOM_", "SLURM_"))}
        command = [*loom_run, sys.executable, "-m", "tests.support.told_training", *map(str, told)]
        return subprocess.Popen(command, env={**kept, **about, **environment}, stderr=subprocess.DEVNULL)

    def run(self, expected: Expected, *told: object, **environment: str) -> None:
        """Let one process train to its end."""
        self.start(expected, *told, **environment).wait(ENDS)

    def found(self, expected: Expected) -> list[TrainingRun]:
        while True:
            try:
                return list(reversed(self.weaver.runs(expected.name)))
            except LoomError:  # the weaver or the gateway was killed just now
                threading.Event().wait(0.2)

    def settle(self, expected: Expected, runs: int = 1) -> TrainingRun:
        """Wait until the runs of the name have ended; return the newest."""
        found: list[TrainingRun] = []

        def over() -> bool:
            found[:] = self.found(expected)
            return len(found) >= runs and all(one.ended for one in found)

        try:
            await_true(over, timeout=ENDS)
        except AssertionError:
            raise AssertionError(f"{expected}: {[one.info for one in found]}") from None
        return found[-1]


Kind = Callable[[Cluster, str, int], list[Expected]]


def completes(cluster: Cluster, name: str, number: int) -> list[Expected]:
    one = Expected(name, number, "completed", [[*range(MAX_STEP)]])
    cluster.run(one, 0, MAX_STEP, "completes")
    return [one]


def returns_early(cluster: Cluster, name: str, number: int) -> list[Expected]:
    one = Expected(name, number, "ended early", [[*range(17)]])
    cluster.run(one, 0, 17, "returns")
    return [one]


def raises(cluster: Cluster, name: str, number: int) -> list[Expected]:
    one = Expected(name, number, "crashed", [[*range(11)]], first=f"{name}_0")
    cluster.run(one, 0, 11, "raises")
    return [one]


def is_killed(cluster: Cluster, name: str, number: int) -> list[Expected]:
    one = Expected(name, number, "crashed", [[*range(30)]], killed=True, first=f"{name}_0")
    cluster.run(one, 0, 30, "is_killed")
    return [one]


def is_stopped(cluster: Cluster, name: str, number: int) -> list[Expected]:
    one = Expected(name, number, "stopped", [])
    process = cluster.start(one, 0, MAX_STEP, "waits")
    await_true(lambda: any((run.step or 0) > 3 for run in cluster.found(one)), timeout=ENDS)
    while process.poll() is None:
        try:
            cluster.weaver.stop(f"{name}_0").get(10)
        except (LoomError, TimeoutError):
            threading.Event().wait(0.2)
    return [one]


def starts_twice(cluster: Cluster, name: str, number: int) -> list[Expected]:
    """Two starts of a name are two runs."""
    first = Expected(name, number, "completed", [[*range(MAX_STEP)]])
    second = Expected(name, number, "crashed", [[*range(9)]], first=f"{name}_0")
    cluster.run(first, 0, MAX_STEP, "completes")
    cluster.settle(first)
    cluster.run(second, 0, 9, "raises")
    return [first, second]


def restarts(cluster: Cluster, name: str, number: int) -> list[Expected]:
    """A supervisor starts it again from a checkpoint, twice."""
    one = Expected(name, number, "completed", [[*range(20)], [*range(10, 25)], [*range(20, MAX_STEP)]])
    same = {"LOOM_RUN_ID": f"start-{number}"}
    cluster.run(one, 0, 20, "raises", **same)
    cluster.settle(one)
    cluster.run(one, 0, 25, "raises", FROM="10", **same)
    cluster.run(one, 0, MAX_STEP, "completes", FROM="20", **same)
    return [one]


def is_requeued(cluster: Cluster, name: str, number: int) -> list[Expected]:
    """Slurm starts it again under the same job and step."""
    one = Expected(name, number, "completed", [[*range(15)], [*range(12, MAX_STEP)]])
    slurm = {"SLURM_JOB_ID": str(90_000 + number), "SLURM_STEP_ID": "0"}
    cluster.run(one, 0, 15, "raises", **slurm)
    cluster.run(one, 0, MAX_STEP, "completes", FROM="12", SLURM_RESTART_COUNT="1", **slurm)
    return [one]


def branches(cluster: Cluster, name: str, number: int) -> list[Expected]:
    parent = Expected(name, number, "completed", [[*range(MAX_STEP)]])
    cluster.run(parent, 0, MAX_STEP, "completes")
    id = cluster.settle(parent).id
    branch = Expected(name, number, "ended early", [[*range(20, 30)]], parent=id)
    cluster.run(branch, 0, 30, "returns", FROM="20", LOOM_RUN_PARENT=f"branch:{id}:20")
    return [parent, branch]


def rank_fails(cluster: Cluster, name: str, number: int) -> list[Expected]:
    """The second of two ranks fails, and its launcher kills the first one."""
    one = Expected(name, number, "crashed", [[*range(MAX_STEP * 100)]], killed=True, first=f"{name}_1")
    same = {"LOOM_RUN_ID": f"start-{number}"}
    other = cluster.start(one, 0, MAX_STEP, "waits", RANK="0", **same)
    await_true(lambda: any((run.step or 0) > 1 for run in cluster.found(one)), timeout=ENDS)
    cluster.run(one, 1, 12, "raises", RANK="1", **same)
    await_true(lambda: any(_ended(run, f"{name}_1") for run in cluster.found(one)), timeout=ENDS)
    other.kill()
    other.wait(ENDS)
    return [one]


def _ended(run: TrainingRun, replica: str) -> bool:
    try:
        return any(one["replica"] == replica and one["ending"] for one in run.details().members)
    except LoomError:
        return False


KINDS: Sequence[Kind] = (
    completes,
    returns_early,
    raises,
    is_killed,
    is_stopped,
    starts_twice,
    restarts,
    is_requeued,
    branches,
    rank_fails,
)


@pytest.fixture
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    with gateway_of(cluster, "--connection-rate", "100000") as running:
        yield running


def fault_all(gateway: Gateway, over: threading.Event, done: list[str]) -> None:
    """Kill the weaver every few seconds, and the gateway now and then."""
    chance = random.Random(4)
    while not over.wait(chance.uniform(2.0, 4.0)):
        if chance.random() < 0.25:
            gateway.end()
            gateway.start()
            done.append("gateway")
        else:
            for weaver in gateway.weavers():
                weaver.kill()
                done.append("weaver")


def test_each_run_has_its_state_its_cause_and_its_points(gateway: Gateway) -> None:
    cluster = Cluster(gateway, WeaverProxy(gateway.url, TOKEN))
    over, faults = threading.Event(), list[str]()
    chaos = threading.Thread(target=fault_all, args=(gateway, over, faults))
    chaos.start()
    made: list[Expected] = []
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            per_kind = -(-RUNS // 12)  # two of the ten kinds make two runs
            plans = [kind for _ in range(per_kind) for kind in KINDS]
            doing = [pool.submit(kind, cluster, f"run{at}", at) for at, kind in enumerate(plans)]
            for one in doing:
                made += one.result()
    finally:
        over.set()
        chaos.join()
    await_weaver(cluster.weaver)

    assert len(made) >= RUNS
    assert len(faults) >= RUNS // 20
    wrong = [problem for one in made for problem in problems(cluster, one, made)]
    assert wrong == [], f"{len(wrong)} of {len(made)} after {faults}:\n" + "\n".join(wrong)


def problems(cluster: Cluster, expected: Expected, made: Sequence[Expected]) -> Iterator[str]:
    """Yield what is wrong with a run."""
    of_name = [one for one in made if one.name == expected.name]
    cluster.settle(expected, len(of_name))
    found = cluster.found(expected)
    if len(found) != len(of_name):
        yield f"{expected.name}: {len(found)} runs, not {len(of_name)}"
        return
    run = found[of_name.index(expected)].refresh()
    if (run.state, run.first) != (expected.state, expected.first):
        yield f"{expected.name}: {run.state} ({run.reason}), first {run.first}, not {expected}"
    if expected.state == "stopped" and not run.by:
        yield f"{expected.name}: nobody stopped it"
    if (run.parent or {}).get("run") != expected.parent:
        yield f"{expected.name}: its parent is {run.parent}"
    try:
        points = run.history("loss")
    except WrongArguments as error:  # one that was killed while the weaver was away has told nothing
        if not expected.killed:
            yield f"{expected.name}: {error}"
        return
    foreign = [one for one in points if abs(one.value - expected.number - (one.step or 0) / 1000) > 1e-9]
    if foreign:
        yield f"{expected.name}: {len(foreign)} points of another curve, such as {foreign[0]}"
    steps = [one.step for one in points]
    wanted = [step for section in expected.steps for step in section]
    if not wanted:
        wanted = [*range(len(steps))]
    if expected.killed:
        wanted = wanted[: len(steps)]
    if steps != wanted:
        yield f"{expected.name}: the steps {steps}, not {wanted}"
