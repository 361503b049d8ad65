"""What the laptop's meshes refuse or do in another way than Monarch's; what they do alike is in `tests.parity`."""

from __future__ import annotations

from typing import Any

import pytest

import loom
from loom_gateway.workers.monarch_env import monarch_version
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter

BOUND = 30.0


class Mixed(loom.Actor):
    @loom.endpoint
    def one(self) -> None: ...

    @loom.endpoint
    async def other(self) -> None: ...


class AsyncCleanup(loom.Actor):
    @loom.endpoint
    def one(self) -> None: ...

    async def __cleanup__(self, exc: Exception | None) -> None: ...


class SyncCleanup(loom.Actor):
    @loom.endpoint
    async def one(self) -> None: ...

    def __cleanup__(self, exc: Exception | None) -> None: ...


class AsyncSupervise(loom.Actor):
    @loom.endpoint
    def one(self) -> None: ...

    async def __supervise__(self, failure: Any) -> bool:
        return True


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (dict, "must subclass monarch.service.Actor to spawn it. Derive it from loom.Actor"),
        (Mixed, r"mixes both async and sync endpoints.*sync: \['one'\] async: \['other'\]"),
        (AsyncCleanup, "has sync endpoints, but an async __cleanup__"),
        (SyncCleanup, "has async endpoints, but a synchronous __cleanup__"),
        (AsyncSupervise, "has sync endpoints, but an async __supervise__"),
    ],
)
def test_a_class_that_monarch_would_not_take_is_refused_at_once(
    procs: loom.ProcMeshProxy, cls: type, text: str
) -> None:
    with pytest.raises(loom.NotAnActor, match=text):
        procs.spawn("refused", cls)


def test_options_of_spawn_procs_are_checked_before_anything_is_sent(job: loom.Job) -> None:
    with pytest.raises(ValueError, match=r"proc_bind length \(1\) must equal procs_per_host \(2\)"):
        job.hosts.spawn_procs(per_host={"gpus": 2}, proc_bind=[{"cpus": "0"}])
    with pytest.raises(loom.WrongArguments, match="a command or a function that gives one, not 3"):
        job.hosts.spawn_procs(bootstrap_command=3)  # type: ignore[arg-type]
    assert not job.meshes


def test_a_command_that_cannot_be_made_is_an_error_of_monarchs_class(own_cluster: LocalCluster) -> None:
    def command(point: Any) -> Any:
        raise KeyError("no command")

    # On workers of its own: Monarch's may not answer other clients for many seconds afterwards.
    with loom.connect(own_cluster.url, own_cluster.token) as job:
        procs = job.hosts.slice(hosts=0).spawn_procs(bootstrap_command=command)
        with pytest.raises(loom.OperationFailed, match="no command") as raised:
            procs.initialized.get(timeout=BOUND)
        # Monarch 0.7 makes a ValueError of what the function raised.
        assert isinstance(raised.value, ValueError if monarch_version() < (0, 8) else KeyError)


def test_the_host_of_several_processes_is_refused(tidied: loom.Job) -> None:
    procs = tidied.hosts.spawn_procs()
    with pytest.raises(loom.NotOneProcess, match="has 2: slice"):
        procs.host_mesh
    assert procs.slice(hosts=1).host_mesh == tidied.hosts.slice(hosts=1)


def test_hosts_are_stopped_but_not_shut_down(job: loom.Job) -> None:
    procs = job.hosts.slice(hosts=0).spawn_procs()
    counters = procs.spawn("counters", Counter)
    assert counters.add.call_one(1).get(timeout=BOUND) == 1
    with pytest.raises(loom.HostsNotOwned, match="stop its proc meshes one by one"):
        job.hosts.slice(hosts=0).stop()
    with pytest.raises(loom.HostsNotOwned, match="belong to the gateway"):
        job.hosts.shutdown()

    job.hosts.stop().get(timeout=BOUND)

    with pytest.raises(loom.SupervisionError):
        counters.add.call_one(1).get(timeout=BOUND)
    again = job.hosts.slice(hosts=0).spawn_procs().spawn("again", Counter, 5)
    assert again.value.call_one().get(timeout=BOUND) == 5


async def test_hosts_as_a_context_are_stopped_at_its_end(job: loom.Job) -> None:
    async with job.hosts as hosts:
        counters = hosts.slice(hosts=0).spawn_procs().spawn("counters", Counter)
        assert await counters.add.call_one(1) == 1
    with pytest.raises(loom.SupervisionError):
        await counters.add.call_one(1)


def test_failures_of_other_actors_arrive_as_looms_own(tidied: loom.Job) -> None:
    def call(counters: Any) -> None:
        counters.fail.call_one("inside").get()

    counters = tidied.hosts.slice(hosts=0).spawn_procs().spawn("counters", Counter)
    one = counters.echo.call_one(loom.Point(3, loom.Extent(["a"], [4]))).get(timeout=BOUND)
    assert type(one) is loom.Point
    assert (one.rank, dict(one)) == (3, {"a": 3})
    with pytest.raises(loom.ActorError) as raised:
        tidied.run(call, counters)
    assert type(raised.value) is loom.ActorError


@pytest.mark.parametrize(
    ("error", "built_in"),
    [(KeyError("k"), "KeyError"), (FileNotFoundError(2, "x"), "OSError"), (UnicodeError("u"), "ValueError")],
)
def test_an_operation_fails_with_the_built_in_class_too(error: Exception, built_in: str) -> None:
    import pickle

    failed = loom.operation_failed("the text", error)
    assert (str(failed), failed.built_in) == ("the text", built_in)
    assert isinstance(failed, loom.OperationFailed)
    again = pickle.loads(pickle.dumps(failed))
    assert type(again) is type(failed)


def test_an_operation_that_failed_strangely_is_just_that() -> None:
    assert type(loom.operation_failed("text", StopIteration())) is loom.OperationFailed
    assert type(loom.operation_failed("text", "os")) is loom.OperationFailed
