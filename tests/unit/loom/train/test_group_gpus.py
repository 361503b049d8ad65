"""Which GPUs a job's groups get: each its own, and none that may not be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from loom.train import FaultTolerantJob, TrainerActor
from loom.train.controller.group import ReplicaGroup
from loom.train.controller.group_pool import GroupPool
from loom.train.controller.job_events import JobEvents
from loom.train.controller.summaries import GroupStatus


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
    agents: Any = SimpleNamespace(silent=set, ending=set, gpus=lambda host: gpus.get(host, []))
    here: Any = session
    events: Any = SimpleNamespace(record=lambda *arguments, **data: None)
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

    pool.refuse({"GPU-0": "inactive, deactivated by anna", "GPU-1": "failed, Xid 79"})
    assert pool.refusal(here) == "GPU-0: inactive, deactivated by anna"
    assert pool.spares == []  # it was stopped
    here.stop("it leaves")
    assert pool.start("train_0") is None

    pool.refuse({"GPU-1": "failed, Xid 79"})
    assert pool.refusal(here) == ""
    assert start(pool).devices == ("GPU-0",)


def test_a_job_on_cpus_has_nothing_to_do_with_gpus() -> None:
    session = Session(1)
    pool = pool_of(session, {0: ["GPU-0"]}, trainer=TrainerActor)

    groups = [start(pool), start(pool)]

    assert [group.devices for group in groups] == [(), ()]
    assert session.started == [(0, None), (0, None)]


def test_a_job_hears_which_devices_it_may_not_use_when_that_changes() -> None:
    devices = [
        {"uuid": "GPU-0", "state": "failed", "reason": "Xid 79"},
        {"uuid": "GPU-1", "state": "inactive", "reason": ""},
        {"uuid": "GPU-2", "state": "active", "reason": None},
    ]
    heard: list[dict[str, str]] = []
    here: Any = SimpleNamespace(ask_weaver=lambda operation, arguments, timeout=2.0: devices)
    events = JobEvents("train", here, lambda replica, reason: None, heard.append)  # type: ignore[arg-type]
    events.close()
    heard.clear()
    events._refused = {}

    for _ in range(2):
        events._ask_for_devices(heard.append)  # type: ignore[arg-type]
    devices[0]["state"] = "active"
    events._ask_for_devices(heard.append)  # type: ignore[arg-type]

    assert heard == [
        {"GPU-0": "failed, Xid 79", "GPU-1": "inactive, for no given reason"},
        {"GPU-1": "inactive, for no given reason"},
    ]
