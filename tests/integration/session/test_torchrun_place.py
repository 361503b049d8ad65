"""The variables of ``torchrun`` in every process that Loom spawns, by which torch.distributed finds its peers."""

from __future__ import annotations

import os
import re

import pytest

import loom
from loom import Actor, BootstrapCommand, current_rank, endpoint

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
BOUND = 60.0


class Place(Actor):
    """Tells of its process's environment."""

    @endpoint
    def variables(self) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in NAMES}

    @endpoint
    def sum_of_ranks(self) -> float:
        import torch
        from torch import distributed

        distributed.init_process_group("gloo")
        total = torch.tensor([float(current_rank().rank)])
        distributed.all_reduce(total)
        distributed.destroy_process_group()
        return float(total)


def set_own_master() -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "10.1.2.3", "29500"


def places(procs: loom.ProcMeshProxy) -> dict[int, dict[str, str | None]]:
    found = procs.spawn("places", Place).variables.call().get(BOUND)
    return dict(enumerate(found.values()))


def test_processes_on_two_hosts_have_the_places_that_torchrun_would_give_them(job: loom.Job) -> None:
    found = places(job.hosts.spawn_procs(per_host={"gpus": 2}, name="two"))

    meeting = {(place.pop("MASTER_ADDR"), place.pop("MASTER_PORT")) for place in found.values()}
    ((address, port),) = meeting
    assert address == "127.0.0.1"
    assert re.fullmatch(r"\d{4,5}", port or "")
    assert found == {
        rank: {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
        for rank in range(4)
    }


@pytest.mark.slow
def test_torch_distributed_works_without_a_word_about_places(job: loom.Job) -> None:
    pytest.importorskip("torch")
    procs = job.hosts.spawn_procs(per_host={"gpus": 2}, name="summers")

    sums = procs.spawn("places", Place).sum_of_ranks.call().get(BOUND)

    assert list(sums.values()) == [6.0] * 4


def test_a_slice_of_the_hosts_counts_from_its_own_first_host(job: loom.Job) -> None:
    found = places(job.hosts.slice(hosts=1).spawn_procs(name="second"))

    assert (found[0]["RANK"], found[0]["WORLD_SIZE"]) == ("0", "1")


def test_what_a_users_bootstrap_or_command_sets_wins(job: loom.Job) -> None:
    by_bootstrap = places(job.hosts.spawn_procs(bootstrap=set_own_master, name="boot"))
    command = BootstrapCommand(env={"LOCAL_RANK": "5", "MASTER_PORT": "29501"})
    by_command = places(job.hosts.spawn_procs(bootstrap_command=command, name="command"))

    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in by_bootstrap.values()} == {("10.1.2.3", "29500")}
    assert {(one["LOCAL_RANK"], one["MASTER_PORT"]) for one in by_command.values()} == {("5", "29501")}
    assert [one["RANK"] for one in by_command.values()] == ["0", "1"]


def test_a_worker_keeps_its_own_place_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "9")
    with loom.local(hosts=1) as job:
        found = places(job.hosts.spawn_procs(name="alone"))

    assert (found[0]["RANK"], found[0]["WORLD_SIZE"]) == ("0", "1")
