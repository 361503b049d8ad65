"""Spawning, calling and slicing through a real gateway and real workers."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

import loom
from loom_proxy.local import LocalCluster
from loom_proxy.mesh.actors import ActorMeshProxy
from tests.support.actors import BadLuck, Caller, Counter, Gate, open_gate


@pytest.fixture
def pipes(tmp_path: Path) -> list[str]:
    """Two named pipes."""
    paths = [str(tmp_path / name) for name in ("first", "second")]
    for path in paths:
        os.mkfifo(path)
    return paths


def test_call_answers_with_every_value_at_its_coordinates(counters: Any) -> None:
    values = counters.add.call(1).get()
    assert values.sizes == {"hosts": 2, "gpus": 2}
    assert list(values.values()) == [11] * 4
    where = counters.rank.call().get()
    assert all(dict(point) == value for point, value in where.items())
    assert where.item(hosts=1, gpus=0) == {"hosts": 1, "gpus": 0}


def test_call_one_reaches_the_sliced_actor_and_no_other(counters: Any) -> None:
    assert counters.slice(hosts=1, gpus=0).add.call_one(5).get() == 15
    assert list(counters.value.call().get().values()) == [10, 10, 15, 10]


def test_a_slice_of_a_slice_selects_within_the_first(counters: Any) -> None:
    second_host = counters.slice(hosts=1)
    assert second_host.sizes == {"gpus": 2}
    assert second_host.slice(gpus=1).add.call_one(7).get() == 17
    assert list(counters.value.call().get().values()) == [10, 10, 10, 17]


def test_a_range_with_a_step_selects_every_other(tidied: loom.Job) -> None:
    counters = tidied.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 4}).spawn("four", Counter)
    odd = counters.slice(gpus=slice(1, None, 2))
    assert odd.sizes == {"gpus": 2}
    assert list(odd.add.call(1).get().values()) == [1, 1]
    assert list(counters.value.call().get().values()) == [0, 1, 0, 1]
    assert list(counters.slice(gpus=slice(0, 4, 3)).add.call(5).get().values()) == [5, 6]


def test_flatten_split_and_rename_address_the_same_actors(counters: Any) -> None:
    flat = counters.flatten("rank")
    assert flat.slice(rank=2).add.call_one(1).get() == 11
    renamed = counters.rename(gpus="devices")
    assert renamed.slice(hosts=1, devices=0).value.call_one().get() == 11
    assert flat.split(rank=("a", "b"), b=2).slice(a=1, b=0).value.call_one().get() == 11


def test_procs_on_a_slice_of_hosts_run_there_only(tidied: loom.Job) -> None:
    everywhere = tidied.hosts.spawn_procs(name="all").spawn("all", Counter)
    second = tidied.hosts.slice(hosts=1).spawn_procs(per_host={"gpus": 2}, name="second")
    assert second.sizes == {"gpus": 2}
    workers = tidied.run(_parents, everywhere)
    assert set(tidied.run(_parents, second.spawn("some", Counter))) == {workers[1]}


def _parents(counters: Any) -> list[int]:
    import psutil

    return [psutil.Process(pid).ppid() for pid in counters.pid.call().get().values()]


def test_actors_spawned_on_a_slice_of_procs_are_counted_from_it(tidied: loom.Job) -> None:
    procs = tidied.hosts.spawn_procs(per_host={"gpus": 2})
    counters = procs.slice(hosts=1).spawn("half", Counter, 1)
    assert counters.sizes == {"gpus": 2}
    assert counters.slice(gpus=1).add.call_one(2).get() == 3
    assert list(counters.value.call().get().values()) == [1, 3]


def test_choose_calls_one_actor_and_stream_calls_all(counters: Any) -> None:
    assert counters.add.choose(1).get() == 11
    assert sorted(future.get() for future in counters.value.stream()) == [10, 10, 10, 11]


def test_stream_gives_the_first_result_before_the_slowest_actor_is_done(tidied: loom.Job, pipes: list[str]) -> None:
    gates = tidied.hosts.spawn_procs().spawn("gates", Gate)
    first, second = gates.wait.stream(pipes)
    open_gate(pipes[1])
    assert first.get(timeout=30) == "open"
    assert not second.done()
    open_gate(pipes[0])
    assert second.get(timeout=30) == "open"


def test_broadcast_reaches_every_actor_in_order_with_calls(counters: Any) -> None:
    for _ in range(10):
        counters.add.broadcast(1)
    assert list(counters.value.call().get().values()) == [20] * 4


def test_arguments_of_every_kind_arrive(counters: Any) -> None:
    one = counters.slice(hosts=0, gpus=0)
    assert one.append.call_one([1], 2, last=3).get() == [1, 2, 3]
    for value in (
        None,
        2**80,
        1.5,
        "ü",
        b"x" * 100_000,
        {"a": [1, {2}]},
        bytearray(b"y" * 50_000),
        BadLuck("a", 1).args,
    ):
        assert one.echo.call_one(value).get() == value


def test_arrays_arrive_writable_and_equal(counters: Any) -> None:
    one = counters.slice(hosts=0, gpus=0)
    for size in (3, 10_000, 3_000_000):
        array = np.arange(size, dtype=np.float32)
        back = one.echo.call_one(array).get()
        assert np.array_equal(back, array)
        back[0] = 1


def test_small_and_large_calls_to_one_actor_keep_their_order(counters: Any) -> None:
    one = counters.slice(hosts=0, gpus=0)
    large = np.zeros(8 << 20, np.uint8)
    first = one.echo.call_one(large)
    adds = [one.add.call_one(1) for _ in range(3)]
    second = one.echo.call_one(large)
    assert [future.get() for future in adds] == [11, 12, 13]
    assert len(first.get()) == len(second.get()) == 8 << 20


def test_actor_and_proc_meshes_arrive_as_real_meshes_sliced_as_they_were(tidied: loom.Job, counters: Any) -> None:
    part = counters.slice(hosts=1)
    caller = tidied.hosts.slice(hosts=0).spawn_procs().spawn("caller", Caller, part)
    assert caller.held_sizes.call_one().get() == {"gpus": 2}
    assert len(caller.call_held.call_one().get()) == 2
    module, name, sizes = caller.kind.call_one(counters.slice(gpus=1)).get()
    assert module.startswith("monarch.")
    assert (name, sizes) == ("ActorMesh", {"hosts": 2})
    procs = tidied.meshes["procs"]
    assert caller.kind.call_one(procs.slice(hosts=0)).get()[1:] == ("ProcMesh", {"gpus": 2})
    assert len(caller.call.call_one(counters.slice(hosts=0, gpus=slice(0, 1))).get()) == 1


def test_a_mesh_inside_a_container_arrives_too(tidied: loom.Job, counters: Any) -> None:
    caller = tidied.hosts.slice(hosts=0).spawn_procs().spawn("caller", Caller, counters)
    nested = {"list": [counters.slice(hosts=0)]}
    assert tidied.run(lambda value: type(value["list"][0]).__name__, nested) == "ActorMesh"
    assert caller.held_sizes.call_one().get() == {"hosts": 2, "gpus": 2}


def test_a_raised_exception_comes_back_as_itself_and_the_actor_lives(counters: Any) -> None:
    one = counters.slice(hosts=0, gpus=0)
    with pytest.raises(loom.ActorError) as caught:
        one.fail.call_one("bad").get()
    assert isinstance(caught.value.exception, BadLuck)
    assert caught.value.exception.number == 10
    assert "in fail" in str(caught.value)
    assert "BadLuck" in str(caught.value)
    assert one.add.call_one(1).get() == 11


def test_an_exception_that_cannot_be_unpickled_here_has_a_stand_in(counters: Any) -> None:
    with pytest.raises(loom.ActorError) as caught:
        counters.slice(hosts=0, gpus=0).fail_strangely.call_one(os.getpid()).get()
    stand_in = caught.value.exception
    assert isinstance(stand_in, loom.RemoteException)
    assert stand_in.type_name.endswith("NeedsCluster")
    assert stand_in.text == "made in the cluster"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_standard_stream_as_an_argument_is_the_one_of_the_actor(
    counters: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sys, name, getattr(sys, f"__{name}__"))  # not pytest's
    printed = counters.slice(hosts=0, gpus=0).print_to.call_one(getattr(sys, name))
    assert printed.get(timeout=30.0) == [name]


def test_functions_from_a_closure_travel_by_value(tidied: loom.Job, counters: Any) -> None:
    factor = 3

    class Scaled(loom.Actor):
        def __init__(self, values: list[int]) -> None:
            self.values = values

        @loom.endpoint
        def total(self) -> int:
            return sum(value * factor for value in self.values)

    scaled = tidied.hosts.slice(hosts=0).spawn_procs().spawn("scaled", Scaled, [1, 2])
    assert scaled.total.call_one().get() == 9


def test_a_class_whose_source_is_not_in_the_cluster_can_import_torch(tidied: loom.Job, tmp_path: Path) -> None:
    source = tmp_path / "elsewhere.py"
    source.write_text(
        "import loom\n"
        "class Late(loom.Actor):\n"
        "    @loom.endpoint\n"
        "    def total(self):\n"
        "        import torch\n"
        "        return torch.ones(3).sum().item()\n"
    )
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source.read_text(), str(source), "exec"), namespace)
    source.unlink()
    late = tidied.hosts.slice(hosts=0).spawn_procs().spawn("late", namespace["Late"])
    assert late.total.call_one().get(timeout=60) == 3.0


def test_run_executes_next_to_the_meshes(tidied: loom.Job, counters: Any) -> None:
    def loop(mesh: Any, times: int) -> int:
        for _ in range(times):
            total = sum(mesh.add.call(1).get().values())
        return total

    async def loop_async(mesh: Any) -> int:
        return sum((await mesh.add.call(1)).values())

    assert tidied.run(loop, counters, 20) == 4 * 30
    assert tidied.run(loop_async, counters) == 4 * 31
    with pytest.raises(ZeroDivisionError):
        tidied.run(lambda: 1 / 0)


def test_futures_time_out_without_being_consumed(tidied: loom.Job, pipes: list[str]) -> None:
    gate = tidied.hosts.slice(hosts=0).spawn_procs().spawn("gate", Gate)
    waiting = gate.wait.call_one(pipes)
    with pytest.raises(TimeoutError):
        waiting.get(timeout=0.01)
    assert not waiting.done()
    open_gate(pipes[0])
    assert waiting.get(timeout=30) == "open"
    assert waiting.result() == "open"
    assert waiting.exception() is None
    assert waiting.timing is not None
    assert waiting.timing.wall_ms >= waiting.timing.rpc_ms


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_futures_can_be_awaited_on_any_loop(counters: Any, run: Any) -> None:
    one = counters.slice(hosts=0, gpus=0)

    async def main() -> list[int]:
        first = await one.add.call_one(1)
        rest = await asyncio.gather(*(one.add.call_one(1).as_asyncio() for _ in range(50)))
        with pytest.raises(loom.ActorError):
            await one.fail.call_one("no")
        return [first, *rest]

    assert run(main()) == list(range(11, 62))


def test_eight_threads_call_at_once(counters: Any) -> None:
    one = counters.slice(hosts=1, gpus=1)
    seen: list[int] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            mine = [one.add.call_one(1).get() for _ in range(100)]
            pipelined = [one.add.call_one(1) for _ in range(100)]
            mine += [future.get() for future in pipelined]
            assert mine == sorted(mine)
            seen.extend(mine)
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert sorted(seen) == list(range(11, 11 + 1600))


def test_two_sessions_on_the_same_workers_do_not_disturb_each_other(
    cluster: LocalCluster, tidied: loom.Job
) -> None:
    mine = tidied.hosts.spawn_procs(name="same").spawn("same", Counter, 1)
    with loom.connect(cluster.url, cluster.token) as other:
        theirs = other.hosts.spawn_procs(name="same").spawn("same", Counter, 100)
        assert other.session != tidied.session
        futures = [(mine.add.call(1), theirs.add.call(1)) for _ in range(20)]
        assert [list(m.get().values()) for m, _ in futures] == [[n, n] for n in range(2, 22)]
        assert [list(t.get().values()) for _, t in futures] == [[n, n] for n in range(101, 121)]
        with pytest.raises(loom.ActorError):
            theirs.slice(hosts=0).fail.call_one("there").get()
    assert list(mine.value.call().get().values()) == [21, 21]


def test_a_detached_session_is_found_again_with_its_meshes(cluster: LocalCluster) -> None:
    job = loom.connect(cluster.url, cluster.token)
    counters = job.hosts.spawn_procs(per_host={"gpus": 2}, name="procs").spawn("counters", Counter, 10)
    counters.add.call(1).get()
    job.detach()
    with pytest.raises(loom.SessionClosed):
        counters.add.call(1)
    with loom.connect(cluster.url, cluster.token, session=job.session) as again:
        assert again.session == job.session
        found = again.meshes["counters"]
        assert isinstance(found, ActorMeshProxy)
        assert found.slice(hosts=0, gpus=1).add.call_one(5).get() == 16
        assert list(again.meshes["procs"].spawn("more", Counter).value.call().get().values()) == [0] * 4
        with pytest.raises(loom.WrongArguments):
            found.add.call()


def test_stopped_procs_answer_no_more(tidied: loom.Job) -> None:
    procs = tidied.hosts.spawn_procs(name="brief")
    counters = procs.spawn("brief", Counter)
    assert procs.initialized.get() is True
    assert counters.initialized.get() is None
    counters.add.call(1).get()
    assert procs.stop().get(timeout=30) is None
    with pytest.raises(loom.LoomError):
        counters.add.call(1).get(timeout=30)


def test_state_and_meshes_name_what_there_is(job: loom.Job) -> None:
    counters = job.hosts.spawn_procs(name="procs").spawn("counters", Counter)
    assert job.state().workers is job.hosts
    assert set(job.meshes) == {"procs", "counters"}
    assert repr(job.hosts) == "<HostMeshProxy 'hosts' {hosts: 2}>"
    assert "Counter" in repr(counters)
    assert job.versions["torchmonarch"]


def test_a_huge_error_text_arrives_shortened_and_ends_nothing(counters: Any) -> None:
    with pytest.raises(loom.ActorError, match="characters left out"):
        counters.slice(hosts=0, gpus=0).fail.call_one("x" * 3_000_000).get()
    many = [counters.slice(hosts=0, gpus=0).fail.call_one("y" * 20_000) for _ in range(300)]
    assert all(isinstance(future.exception(), loom.ActorError) for future in many)
    assert len(counters.value.call().get()) == 4
