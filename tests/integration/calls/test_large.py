"""Large data through a cluster: it arrives whole; the gateway holds little of it, and small calls go on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import loom
from loom import Actor, endpoint
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter

MIB = 2**20


class Store(Actor):
    """Takes large values and gives them back."""

    def __init__(self, weights: Any = None) -> None:
        self.kept: Any = weights

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def double(self, value: Any) -> Any:
        value *= 2
        return value

    @endpoint
    def keep(self, value: Any) -> str:
        self.kept = value
        return type(value).__name__

    @endpoint
    def give(self) -> Any:
        return self.kept

    @endpoint
    def many(self, count: int, size: int) -> list[Any]:
        return [numpy.full(size, number, numpy.uint8) for number in range(count)]


class Waits(Actor):
    """Passes what another actor answers on."""

    @endpoint
    def relay(self, store: Any, value: Any) -> tuple[str, Any]:
        answer = store.echo.call_one(value).get()
        return type(answer).__name__, answer


def spawn(job: loom.Job, *arguments: Any) -> Any:
    return job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 1}).spawn("store", Store, *arguments)


@pytest.fixture(scope="module")
def process(shared: loom.Job) -> loom.ProcMeshProxy:
    """A process that imports torch once."""
    return shared.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 1})


@pytest.fixture
def store(process: loom.ProcMeshProxy, tidied: loom.Job) -> Any:
    return process.spawn("store", Store)


VALUES = {
    "tensor": torch.arange(3 * MIB, dtype=torch.float32),
    "small tensor": torch.arange(4.0),
    "bfloat16": torch.arange(3 * MIB).to(torch.bfloat16),
    "parameter": torch.nn.Parameter(torch.ones(MIB)),
    "array": numpy.arange(3 * MIB),
    "read-only array": numpy.arange(MIB),
    "bytes": bytes(5 * MIB),
    "bytearray": bytearray(5 * MIB),
    "state dict": torch.nn.Linear(1000, 1000).state_dict(),
    "batch": {"x": torch.ones(MIB), "y": [numpy.arange(MIB), 3], "name": "first"},
    "module": torch.nn.Linear(1000, 1000),
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.nn.Module):
        return same(left.state_dict(), right.state_dict())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return bool(numpy.array_equal(left, right)) if isinstance(left, numpy.ndarray) else bool(left == right)


VALUES["read-only array"].flags.writeable = False  # type: ignore[union-attr]


def test_large_values_of_every_kind_come_back_as_they_went(store: Any) -> None:
    for name, value in VALUES.items():
        echoed = store.echo.call_one(value).get(timeout=60)
        assert type(echoed) is type(value), name
        assert same(echoed, value), name


@pytest.mark.slow
def test_every_adverb_carries_large_values(job: loom.Job) -> None:
    stores = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("stores", Store)
    tensor = torch.arange(MIB, dtype=torch.float32)

    called = stores.echo.call(tensor).get(timeout=60)
    chosen = stores.echo.choose(tensor).get(timeout=60)
    streamed = [future.get(timeout=60) for future in stores.echo.stream(tensor)]
    stores.keep.broadcast(tensor)
    kept = stores.give.call().get(timeout=60)

    for value in [*called.values(), chosen, *streamed, *kept.values()]:
        assert torch.equal(value, tensor)


def test_what_arrives_can_be_changed_on_either_side(store: Any) -> None:
    tensor = store.double.call_one(torch.ones(MIB)).get(timeout=60)
    array = store.double.call_one(numpy.ones(MIB)).get(timeout=60)

    tensor += 1
    array += 1
    assert tensor[-1] == array[-1] == 3


@pytest.mark.parametrize("size", [MIB // 2, 8 * MIB])
def test_an_argument_may_be_changed_as_soon_as_the_call_has_been_made(store: Any, size: int) -> None:
    array = numpy.ones(size, numpy.uint8)

    futures = []
    for number in range(1, 5):
        array[:] = number
        futures.append(store.echo.call_one(array))
    array[:] = 0

    for number, future in enumerate(futures, 1):
        assert (future.get(timeout=60) == number).all()


async def test_an_argument_may_be_changed_on_an_event_loop_too(store: Any) -> None:
    array = numpy.ones(8 * MIB, numpy.uint8)

    future = store.echo.call_one(array)
    array[:] = 0

    assert (await future == 1).all()


@pytest.mark.slow
def test_a_constructor_takes_large_values(job: loom.Job) -> None:
    weights = torch.arange(MIB, dtype=torch.float32)

    assert torch.equal(spawn(job, weights).give.call_one().get(timeout=60), weights)


def test_a_function_in_the_driver_has_tensors_whole(shared: loom.Job, store: Any) -> None:
    def work(store: Any, value: Any) -> Any:
        import torch

        assert isinstance(value, torch.Tensor)
        return store.echo.call_one(value).get() + 1

    assert torch.equal(shared.run(work, store, torch.ones(MIB)), torch.full((MIB,), 2.0))


@pytest.mark.slow
def test_an_actor_has_the_large_result_of_another_whole(job: loom.Job) -> None:
    procs = job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 2})
    store = procs.slice(gpus=0).spawn("store", Store)
    waits = procs.slice(gpus=1).spawn("waits", Waits)
    tensor = torch.arange(MIB, dtype=torch.float32)

    name, echoed = waits.relay.call_one(store, tensor).get(timeout=60)

    assert name == "Tensor"
    assert torch.equal(echoed, tensor)


def test_a_driver_that_passes_tensors_on_needs_no_torch(job: loom.Job) -> None:
    store = spawn(job)

    assert store.keep.call_one(torch.ones(MIB)).get(timeout=60) == "Tensor"
    assert store.give.call_one().get(timeout=60).shape == (MIB,)

    assert not job.run(lambda: "torch" in __import__("sys").modules)


def test_more_large_messages_at_once_than_take_turns_all_arrive(store: Any) -> None:
    arrays = [numpy.full(MIB, number, numpy.uint8) for number in range(80)]

    futures = [store.echo.call_one(array) for array in arrays]

    for future, array in zip(futures, arrays, strict=True):
        numpy.testing.assert_array_equal(future.get(timeout=60), array)


def test_a_result_of_many_arrays_arrives(store: Any) -> None:
    arrays = store.many.call_one(20, 2 * MIB).get(timeout=60)

    assert [int(array[-1]) for array in arrays] == list(range(20))


def test_small_calls_are_answered_while_large_data_moves(job: loom.Job) -> None:
    procs = job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 2})
    store = procs.slice(gpus=0).spawn("store", Store)
    counter = procs.slice(gpus=1).spawn("counter", Counter)
    array = numpy.ones(96 * MIB, numpy.uint8)

    moving = store.echo.call_one(array)
    moved = threading.Event()
    threading.Thread(target=lambda: (moving.get(timeout=90), moved.set()), daemon=True).start()
    answered = 0
    while not moved.is_set() and answered < 100_000:
        counter.add.call_one(1).get(timeout=30)
        answered += 1

    assert moved.wait(30)
    assert answered > 3
    assert moving.get().nbytes == array.nbytes


def peak_mib(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) // 1024
    raise AssertionError(f"no {field} in the status of {pid}")


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def gateway_of(cluster: LocalCluster) -> int:
    gateway: int = cluster.pids[0]
    return gateway


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("way", ["there", "back", "both"])
@pytest.mark.slow
def test_the_gateway_holds_little_of_what_moves(job: loom.Job, cluster: LocalCluster, way: str) -> None:
    store, array = spawn(job), numpy.ones(192 * MIB, numpy.uint8)
    store.keep.call_one(array if way == "back" else None).get(timeout=60)
    store.echo.call_one(array[: 8 * MIB]).get(timeout=60)
    gateway = gateway_of(cluster)
    forget_peak(gateway)
    before = peak_mib(gateway, "VmRSS")

    if way == "there":
        store.keep.call_one(array).get(timeout=90)
    elif way == "back":
        assert store.give.call_one().get(timeout=90).nbytes == array.nbytes
    else:
        futures = [store.echo.call_one(array), store.echo.call_one(array)]
        assert [future.get(timeout=90).nbytes for future in futures] == [array.nbytes] * 2

    assert peak_mib(gateway, "VmHWM") - before < 128
