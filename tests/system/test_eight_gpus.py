"""A host with eight GPUs: eight processes side by side, each with its own line, log, replica and end."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import loom
from loom.rest_client import Gateway
from loom_proxy.local import LocalCluster
from tests.support.gateways import await_true
from tests.support.processes import still_there, tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

IN_TIME = 60.0
GPUS = 8
LINES = 200


class Trainer(loom.Actor):
    """Trains until it should stop, and then writes how far it came."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.rank = loom.current_rank().rank

    @loom.endpoint
    def print_lines(self) -> int:
        for number in range(LINES):
            print(f"line {number}")
        return os.getpid()

    @loom.endpoint
    def train(self) -> None:
        number = 0
        with loom.Threadlet() as threadlet:
            while not threadlet.should_stop:
                number += 1
                with threadlet.step(number):
                    time.sleep(0.01)
                (self.folder / f"begun-{self.rank}").write_text(str(number))
            (self.folder / f"saved-{self.rank}").write_text(f"{number} {threadlet.evicted}")


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1) as cluster:
        yield cluster


def ranks(folder: Path, what: str) -> set[int]:
    return {int(path.name.rpartition("-")[2]) for path in folder.glob(f"{what}-*")}


def test_eight_processes_of_a_host_print_train_die_and_are_evicted_each_for_itself(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    everyone = set(range(GPUS))
    with loom.connect(cluster.url, cluster.token) as job:
        procs = job.hosts.spawn_procs(per_host={"gpus": GPUS}, name="procs")
        trainers = procs.spawn("trainers", Trainer, str(tmp_path))
        pids = list(trainers.print_lines.call().get(IN_TIME).values())
        assert len(set(pids)) == GPUS

        printed = defaultdict(list)

        def all_are_there() -> bool:
            printed.clear()
            for line in Gateway(cluster.url, cluster.token).logs(job.session, follow=False, mesh="procs"):
                printed[line["rank"]].append(line["text"])
            return sum(map(len, printed.values())) >= GPUS * LINES

        await_true(all_are_there)
        assert dict(printed) == {rank: [f"line {number}" for number in range(LINES)] for rank in everyone}

        training = trainers.train.call()
        await_true(lambda: ranks(tmp_path, "begun") == everyone)
        await_true(lambda: len(job.weaver.replicas()) == GPUS)
        assert {replica.session for replica in job.weaver.replicas().values()} == {job.session}
        assert {replica.rank for replica in job.weaver.replicas().values()} == everyone

        os.kill(pids[3], signal.SIGKILL)
        with pytest.raises((loom.ActorError, loom.SupervisionError)):
            training.get(IN_TIME)
        begun = {rank: (tmp_path / f"begun-{rank}").read_text() for rank in everyone - {3}}
        await_true(lambda: all((tmp_path / f"begun-{rank}").read_text() != text for rank, text in begun.items()))

        worker = psutil.Process(cluster.pids[1])
        processes = tree(worker.pid)
        worker.send_signal(signal.SIGTERM)
        await_true(lambda: ranks(tmp_path, "saved") == everyone - {3})
        assert all((tmp_path / f"saved-{rank}").read_text().endswith("True") for rank in everyone - {3})
    assert still_there(processes, IN_TIME) == []
