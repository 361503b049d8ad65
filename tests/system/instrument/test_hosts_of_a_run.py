"""``loom run`` on three hosts of one job: each is a network namespace, with a slow line to the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from loom.weaver.views import ReplicaInfo
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import TOKEN, Gateway, await_true
from tests.support.needs import skipped_if
from tests.support.network.namespaces import WORKERS, Hosts, missing
from tests.support.weavers import await_weaver

pytestmark = [skipped_if(missing()), pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = """
import json, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = open(sys.argv[1] + f"/rank{dist.get_rank()}", "a", buffering=1)
rate = None
for n in range(1_000_000):
    model(torch.ones(2, 8) * dist.get_rank()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if (now := optimizer.param_groups[0]["lr"]) != rate:
        rate = now
        seen.write(json.dumps([n + 1, rate]) + "\\n")
    time.sleep(0.02)
"""
"""Writes down each learning rate, with the number of steps made."""

RANKS = ["far_0", "far_1", "far_2"]

APART = 0.01
"""Seconds from each host to the others."""


class Job:
    """The training on three hosts, and the gateway that it reports to."""

    def __init__(self, hosts: Hosts, gateway: Gateway, folder: Path) -> None:
        self.hosts = hosts
        self.gateway = gateway
        self.weaver = WeaverProxy(gateway.url, TOKEN)
        self.folder = folder
        self.launchers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the launchers of three hosts, which have numbers."""
        address = ("--master-addr", Hosts.address("worker0"), "--master-port", "29400")
        for number, host in enumerate(WORKERS):
            self.launch(host, "--nnodes", "3", "--node-rank", str(number), *address)

    def join(self, host: str) -> None:
        """Start the launcher of a host of an elastic job, which has two hosts or three."""
        met = f"is_host={int(host == WORKERS[0])},last_call_timeout=2,keep_alive_interval=1,join_timeout=120"
        found = (
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{Hosts.address('worker0')}:29400",
            "--rdzv-id",
            "far",
        )
        self.launch(
            host, "--nnodes", "2:3", "--max-restarts", "9", "--local-addr", Hosts.address(host), *found,
            "--rdzv-conf", met, "--monitor-interval", "0.5",
        )  # fmt: skip

    def launch(self, host: str, *options: str) -> None:
        (self.folder / "far.py").write_text(SCRIPT)
        left_out = ("LOOM_WEAVER", "LOOM_RUN", "RANK", "LOOM_AUTO")
        plain = {name: value for name, value in os.environ.items() if name not in left_out}
        mine = {"LOOM_URL": self.gateway.url, "LOOM_TOKEN": TOKEN, "LOOM_INSECURE": "1", "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}  # fmt: skip
        # Else torch lets the ranks of all attempts meet in one store, where they find former addresses.
        mine["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = [
            *(sys.executable, "-c", "from loom.cli import main; main()", "run", "--name", "far", "--"),
            *(str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "1", *options),
            *("far.py", str(self.folder)),
        ]
        with self.hosts.on(host), (self.folder / f"{host}.log").open("ab") as output:
            started = subprocess.Popen(
                command,
                env={**plain, **mine},
                cwd=self.folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.launchers.append(started)

    def close(self) -> None:
        for one in self.launchers:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGTERM)
        for one in self.launchers:
            try:
                one.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(one.pid, signal.SIGKILL)

    def replicas(self) -> dict[str, ReplicaInfo]:
        return {id: one for id, one in self.weaver.replicas().items() if one.group == "far"}

    def changes(self) -> list[list[list[Any]]]:
        return [
            [json.loads(line) for line in (self.folder / f"rank{rank}").read_text().splitlines()]
            for rank in range(3)
        ]

    def command(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        return dict(self.weaver.command(*arguments, target="far", **options).get(90))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("LOOM_INSECURE", "1")  # nobody else is on this network
    with Hosts(workers=3, apart=APART) as hosts, hosts.on("laptop"):
        address = Hosts.address("gateway")
        gateway = Gateway([f"tcp://{address}:26600"], "--host", address, "--weaver-listen", f"{address}:8471")
        with hosts.on("gateway"):
            gateway.start()
        made = Job(hosts, gateway, tmp_path)
        try:
            await_weaver(made.weaver)
            yield made
        finally:
            made.close()
            gateway.close()


def test_ranks_on_three_hosts_change_at_one_step_and_survive_cuts(job: Job) -> None:
    job.start()
    await_true(lambda: sorted(job.replicas()) == RANKS, 120)
    assert {one.config["world_size"] for one in job.replicas().values()} == {3}

    changed = job.command("update_config", {"learning_rate": 0.05})
    assert steps_of(changed) == {changed["far_0"].step}
    for kind in ("pause", "resume"):
        steps_of(job.command(kind))

    # The change begins while its line is cut: nobody applies it, and all go on.
    with job.hosts.cut("gateway", "worker1"):
        cut = job.command("update_config", {"learning_rate": 0.04})
        assert not any(one.ok for one in cut.values())
        before = job.replicas()["far_0"].step or 0
        await_true(lambda: (job.replicas()["far_0"].step or 0) > before + 10, 60)
        refused = job.command("update_config", {"learning_rate": 0.04})
        assert "far_1 is not connected" in str(refused["far_0"].reason)
    await_true(lambda: all(one.ok for one in job.command("update_config", {"learning_rate": 0.03}).values()), 60)

    # A host without any line for a moment, in the middle of a change: all apply it at one step, or none.
    with job.hosts.silence("worker2"):
        future = job.weaver.command("update_config", {"learning_rate": 0.02}, target="far")
        before = job.replicas()["far_0"].step or 0
    silenced = future.get(90)
    assert len({one.ok for one in silenced.values()}) == 1

    steps_of(job.command("stop"))
    assert [one.wait(90) for one in job.launchers] == [0, 0, 0]
    changes = job.changes()
    assert [rate for _, rate in changes[0]] in ([0.1, 0.05, 0.03, 0.02], [0.1, 0.05, 0.03])
    assert changes[0] == changes[1] == changes[2]


def test_a_host_that_cannot_reach_the_gateway_trains_and_is_named(job: Job) -> None:
    """Its line to the gateway was cut before its training began, and comes later."""
    with job.hosts.cut("gateway", "worker2"):
        job.start()
        await_true(lambda: sorted(job.replicas()) == RANKS[:2], 120)
        refused = job.command("update_config", {"learning_rate": 0.05})
        assert not any(one.ok for one in refused.values())
        assert "not connected" in str(refused["far_0"].reason)
        before = job.replicas()["far_0"].step or 0
        await_true(lambda: (job.replicas()["far_0"].step or 0) > before + 10, 60)
    await_true(lambda: sorted(job.replicas()) == RANKS, 90)

    changed = job.command("update_config", {"learning_rate": 0.05})
    assert steps_of(changed) == {changed["far_0"].step}
    steps_of(job.command("stop"))
    assert [one.wait(90) for one in job.launchers] == [0, 0, 0]


def steps_of(answers: dict[str, Any]) -> set[int]:
    """Return the steps at which a command was applied by all."""
    assert all(one.ok for one in answers.values()), answers
    assert sorted(answers) == RANKS
    return {one.step for one in answers.values()}


def test_a_host_that_joins_an_elastic_job_leaves_and_comes_back_has_the_others_values(job: Job) -> None:
    for host in WORKERS[:2]:
        job.join(host)
    await_true(lambda: world(job) == {2: RANKS[:2]}, 120)
    change(job, 0.05, 2)

    job.join(WORKERS[2])
    await_true(lambda: world(job) == {3: RANKS}, 120)
    check_values(job, 0.05)
    change(job, 0.04, 3)

    job.launchers[2].terminate()
    await_true(lambda: world(job) == {2: RANKS[:2]}, 120)
    check_values(job, 0.04)
    change(job, 0.03, 2)

    job.join(WORKERS[2])
    await_true(lambda: world(job) == {3: RANKS}, 120)
    check_values(job, 0.03)
    steps_of(job.command("stop"))
    assert [job.launchers[number].wait(90) for number in (0, 1, 3)] == [0, 0, 0]


def change(job: Job, rate: float, ranks: int) -> None:
    """Change the learning rate of so many ranks, at one step."""
    answers = job.command("update_config", {"learning_rate": rate})
    assert [made.ok for made in answers.values()] == [True] * ranks, answers
    assert len({made.step for made in answers.values()}) == 1


def world(job: Job) -> dict[int, list[str]]:
    """Return the ranks that train, by the number of ranks that they say that there are."""
    found: dict[int, list[str]] = {}
    for id, one in sorted(job.replicas().items()):
        if one.connected and one.ending is None and one.cohort is not None:
            found.setdefault(one.cohort["world"], []).append(id)
    return found


def check_values(job: Job, rate: float) -> None:
    """Check that all ranks get a learning rate that commands have set before."""
    ranks = [id for ids in world(job).values() for id in ids]
    await_true(lambda: {job.replicas()[id].config.get("learning_rate") for id in ranks} == {rate}, 30)


def test_a_line_that_swallows_packets_in_the_middle_of_a_change_lets_all_apply_it_or_none(job: Job) -> None:
    job.start()
    await_true(lambda: sorted(job.replicas()) == RANKS and world(job) == {3: RANKS}, 120)
    change(job, 0.05, 3)
    for number in range(3):
        future = job.weaver.command("update_config", {"learning_rate": 0.01 * (number + 1)}, target="far")
        with job.hosts.silence("worker1"), suppress(TimeoutError):  # its answer may be swallowed, too
            future.get(30)
        future.get(90)
        await_true(lambda: all(one.ok for one in job.command("pause").values()), 90)
        steps_of(job.command("resume"))

    steps_of(job.command("stop"))
    assert [one.wait(90) for one in job.launchers] == [0, 0, 0]
    changes = job.changes()
    assert changes[0] == changes[1] == changes[2]
