"""What is about a run, a mesh or a port never comes before it, however large its making is, on every way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

import loom
from loom.wire.mux import CHUNK_SIZE
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter

BOUND = 60.0

SIZES = [CHUNK_SIZE - 300, CHUNK_SIZE - 60, CHUNK_SIZE, CHUNK_SIZE + 60, 1 << 20, 5 << 20]

WAYS = ["two connections", "one connection", "http"]


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest, cluster: LocalCluster) -> Iterator[loom.Job]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "one connection":
            patch.setenv("LOOM_LANES", "1")
        transport = "http" if request.param == "http" else "websocket"
        with loom.connect(cluster.url, cluster.token, transport=transport) as job:
            yield job


def printed(data: bytes) -> int:
    print("printed", len(data))
    return len(data)


def sleeping(data: bytes) -> None:
    for _ in range(3000):
        time.sleep(0.1)


def result(job: loom.Job, data: bytes) -> None:
    assert job.run(len, data, detach=True).result(BOUND) == len(data)


def output(job: loom.Job, data: bytes) -> None:
    run = job.run(printed, data, detach=True)
    assert "".join(run.follow()) == f"printed {len(data)}\n"
    assert run.output() == f"printed {len(data)}\n"


def cancel(job: loom.Job, data: bytes) -> None:
    run = job.run(sleeping, data, detach=True)
    assert run.cancel()
    with pytest.raises(loom.OperationCancelled):
        run.result(BOUND)


def listed(job: loom.Job, data: bytes) -> None:
    run = job.run(printed, data, detach=True, name=f"listed {len(data)}")
    assert job.runs()[run.name].result(BOUND) == len(data)
    run.forget()


def many(job: loom.Job, data: bytes) -> None:
    runs = [job.run(len, data, detach=True) for _ in range(5)]
    assert [run.result(BOUND) for run in reversed(runs)] == [len(data)] * 5


def actors(job: loom.Job, data: bytes) -> None:
    procs = job.hosts.slice(hosts=0).spawn_procs({"gpus": 2}, name="procs", bootstrap=lambda: data and None)
    counters = procs.spawn("counters", Counter, 1)
    assert counters.slice(gpus=1).value.call_one().get(BOUND) == 1
    assert len(procs.slice(gpus=0).spawn("holders", Counter, data).value.call_one().get(BOUND)) == len(data)
    procs.stop().get(BOUND)


def stopped(job: loom.Job, data: bytes) -> None:
    procs = job.hosts.slice(hosts=0).spawn_procs(name="procs", bootstrap=lambda: data and None)
    procs.spawn("holders", Counter, data).stop().get(BOUND)
    procs.stop().get(BOUND)


def ports(job: loom.Job, data: bytes) -> None:
    port, receiver = job.channel()
    port.send(data)
    port.send(1)
    assert receiver.recv().get(BOUND) == data
    assert receiver.recv().get(BOUND) == 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("use", [result, output, listed, many])
def test_nothing_about_a_run_overtakes_its_start(
    way: loom.Job, use: Callable[[loom.Job, bytes], None], size: int
) -> None:
    use(way, bytes(size))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("use", [cancel, actors, stopped, ports])
def test_nothing_about_a_mesh_or_a_port_overtakes_its_making(
    way: loom.Job, use: Callable[[loom.Job, bytes], None], size: int
) -> None:
    use(way, bytes(size))


def test_the_output_of_an_attached_run_with_large_arguments_is_printed(
    way: loom.Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert way.run(printed, bytes(1 << 20)) == 1 << 20

    assert capsys.readouterr().out == f"printed {1 << 20}\n"
