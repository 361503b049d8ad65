"""Which devices a job's groups get: none that may not be used, and those of other jobs last."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from loom.train import FaultTolerantJob, Timeouts, TrainerActor
from loom.train.controller.group import ReplicaGroup
from loom.train.controller.group_pool import GroupPool
from loom.train.controller.job_events import JobEvents, UsableDevices
from loom.train.controller.summaries import GroupStatus
from loom.train.settings import Ending


class OnGpus(TrainerActor):
    """Trains on a GPU."""

    device = "cuda"


class Session:
    """Stands for the session of a driver: it starts nothing, and keeps what it was asked to start."""

    def __init__(self, hosts: int) -> None:
        self._hosts = list(range(hosts))
        self.started: list[tuple[int, str | None]] = []
        self.name = "procs"
        self.stop: Callable[[str], None] = lambda reason: None
        self.mesh = SimpleNamespace(spawn=lambda *arguments, **options: SimpleNamespace(prepare=self))
        self.call = lambda: SimpleNamespace(get=lambda: SimpleNamespace(values=list))

    def hosts(self) -> list[int]:
        return self._hosts

    def spawn_procs(self, name: str, host: int, per_host: Any, gone: Any, environment: Mapping[str, str]) -> Any:
        self.started.append((host, environment.get("CUDA_VISIBLE_DEVICES")))
        return self


def pool_of(
    session: Session, gpus: dict[int, list[str]], trainer: type[TrainerActor] = OnGpus, **job: Any
) -> GroupPool:
    agents: Any = SimpleNamespace(silent=set, ending=set, devices=lambda host: gpus.get(host, []))
    here: Any = session
    recorded: list[tuple[str, dict[str, Any]]] = []
    events: Any = SimpleNamespace(record=lambda kind, replica=None, **data: recorded.append((kind, data)))
    events.recorded = recorded
    return GroupPool(here, FaultTolerantJob(trainer, **job), events, agents, lambda: None)


def start(pool: GroupPool) -> ReplicaGroup:
    group = pool.start("train_0")
    assert group is not None
    return group


def test_each_group_gets_gpus_of_its_own_on_the_host_with_the_fewest_groups() -> None:
    session = Session(2)
    pool = pool_of(session, {0: ["GPU-0", "GPU-1", "GPU-2"], 1: ["GPU-3", "GPU-4"]}, members=2)

    groups = [start(pool), start(pool)]

    assert session.started == [(0, "GPU-0,GPU-1"), (1, "GPU-3,GPU-4")]
    assert [group.devices for group in groups] == [("GPU-0", "GPU-1"), ("GPU-3", "GPU-4")]
    assert GroupStatus.of(groups[0]).devices == ("GPU-0", "GPU-1")
    assert pool.start("train_2") is None  # one GPU is left, and a group needs two


def test_the_gpu_of_a_group_that_was_stopped_is_free_again() -> None:
    session = Session(1)
    pool = pool_of(session, {0: ["GPU-0"]})
    first = start(pool)
    assert pool.start("train_1") is None

    first.stop("the test wants so")

    assert start(pool).devices == ("GPU-0",)


def test_no_group_is_started_before_the_gpus_of_a_host_are_known() -> None:
    gpus: dict[int, list[str]] = {}
    pool = pool_of(Session(1), gpus)
    assert pool.start("train_0") is None

    gpus[0] = ["GPU-0"]
    assert start(pool).host == 0


def test_a_gpu_that_is_refused_is_left_out_until_it_is_not_any_more() -> None:
    pool = pool_of(Session(1), {0: ["GPU-0", "GPU-1"]})
    here, spare = start(pool), start(pool)
    pool.spares.append(spare)

    pool.use(UsableDevices({"GPU-0": "inactive, deactivated by anna", "GPU-1": "failed, Xid 79"}))
    assert pool.refusal(here) == "GPU-0: inactive, deactivated by anna"
    assert pool.spares == []  # it was stopped
    here.stop("it leaves")
    assert pool.start("train_0") is None

    pool.use(UsableDevices({"GPU-1": "failed, Xid 79"}))
    assert pool.refusal(here) == ""
    assert start(pool).devices == ("GPU-0",)


def test_a_job_on_cpus_has_nothing_to_do_with_gpus() -> None:
    session = Session(1)
    pool = pool_of(session, {0: ["GPU-0"]}, trainer=TrainerActor)

    groups = [start(pool), start(pool)]

    assert [group.devices for group in groups] == [(), ()]
    assert session.started == [(0, None), (0, None)]


def test_the_gpus_of_other_jobs_come_last() -> None:
    session = Session(2)
    pool = pool_of(session, {0: ["GPU-0", "GPU-1"], 1: ["GPU-2", "GPU-3"]})
    pool.use(UsableDevices(occupied={"GPU-0": "other_0", "GPU-1": "other_1", "GPU-2": "other_2"}))

    groups = [start(pool) for _ in range(4)]

    assert [group.devices for group in groups] == [("GPU-3",), ("GPU-0",), ("GPU-1",), ("GPU-2",)]
    shared = [data["gpus"] for kind, data in pool.events.recorded if kind == "gpus_shared"]
    assert shared == [{"GPU-0": "other_0"}, {"GPU-1": "other_1"}, {"GPU-2": "other_2"}]


def test_on_cpus_a_host_whose_slot_was_deactivated_is_left_out_until_it_is_not_any_more() -> None:
    session = Session(2)
    pool = pool_of(session, {0: ["CPU-a-0", "CPU-a-1"], 1: ["CPU-b-0", "CPU-b-1"]}, trainer=TrainerActor, members=2)
    here = start(pool)

    pool.use(UsableDevices({"CPU-a-1": "inactive, deactivated by anna"}))

    assert (here.host, pool.refusal(here)) == (0, "CPU-a-1: inactive, deactivated by anna")
    assert [start(pool).host for _ in range(2)] == [1, 1]
    pool.use(UsableDevices(dict.fromkeys(["CPU-a-1", "CPU-b-0"], "inactive, deactivated by anna")))
    assert not pool.has_place()
    pool.use(UsableDevices())
    assert (pool.has_place(), start(pool).host) == (True, 0)
    assert [kind for kind, _ in pool.events.recorded] == ["cpus_refused"] * 3


def device(
    uuid: str, kind: str = "gpu", state: str = "active", reason: str | None = None, on: str = ""
) -> dict[str, Any]:
    return {"uuid": uuid, "kind": kind, "state": state, "reason": reason, "replicas": tuple(on.split())}


DEVICES = [
    device("GPU-0", state="failed", reason="Xid 79", on="train_0"),
    device("GPU-1", state="inactive", reason=""),
    device("GPU-2", on="train_1 train_1.1 train_spare_x ended_0"),
    device("GPU-3", on="train_2 training_0"),
    device("CPU-a-0", "cpu", "failed", "too hot"),
    device("CPU-b-0", "cpu", "inactive", "deactivated by anna", on="other_0"),
]

LIVING = {"train_0", "train_1", "train_1.1", "train_2", "training_0", "train_spare_x", "other_0"}


def test_what_the_weaver_knows_says_which_devices_a_job_may_not_use_and_which_are_others() -> None:
    on_gpus = UsableDevices.of("train", True, DEVICES, LIVING)
    assert on_gpus.refused == {"GPU-0": "failed, Xid 79", "GPU-1": "inactive, for no given reason"}
    assert on_gpus.occupied == {"GPU-2": "train_spare_x", "GPU-3": "training_0"}

    on_cpus = UsableDevices.of("train", False, DEVICES, LIVING)
    assert on_cpus == UsableDevices({"CPU-b-0": "inactive, deactivated by anna"})


def test_a_job_hears_of_devices_when_what_it_may_use_changes() -> None:
    devices = [dict(one) for one in DEVICES]
    replicas = [{"id": id, "state": "running"} for id in LIVING]
    answers = {"devices": devices, "replicas": replicas}
    heard: list[UsableDevices] = []
    here: Any = SimpleNamespace(ask_weaver=lambda operation, arguments, timeout=2.0: answers[operation])
    events = JobEvents("train", here, lambda replica, reason: None, heard.append, uses_gpus=True)
    events.close()
    heard.clear()

    events._ask_for_devices()
    devices[0]["state"] = "active"
    replicas[:] = [one for one in replicas if one["id"] != "training_0"]
    for _ in range(2):
        events._ask_for_devices()

    assert [one.refused.keys() for one in heard] == [{"GPU-1"}]
    assert [one.occupied for one in heard] == [{"GPU-2": "train_spare_x"}]


@pytest.mark.parametrize(("own", "found"), [(None, "7.0"), ("30", "30")])
def test_nccl_waits_as_long_as_the_job_says(monkeypatch: pytest.MonkeyPatch, own: str | None, found: str) -> None:
    monkeypatch.setitem(os.environ, "TORCH_NCCL_NONBLOCKING_TIMEOUT", own or "")  # so that it is put back
    if own is None:
        del os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"]
    job: Any = SimpleNamespace(backend="nccl", members=1, timeouts=Timeouts(collective=7.0))
    assignment: Any = SimpleNamespace(job=job, replica="train_0")

    report = TrainerActor()._train(assignment, 0)

    assert report.ending is Ending.FAILED, "there is no more of an assignment"
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == found
