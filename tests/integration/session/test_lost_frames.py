"""A connection that loses frames while it stays open is made anew, and each call runs once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import loom
from loom.wire import lost_frames as watch
from loom_proxy.local import LocalCluster
from loom_proxy.transport.http import HttpTransport
from tests.support.actors import Counter
from tests.support.gateways import await_true
from tests.support.network.dropping_proxy import DOWN, UP, DroppingProxy, dropping

BOUND = 40.0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVERY", 0.5)
    monkeypatch.setattr(watch, "PATIENCE", 2.0)


@pytest.fixture
def proxy(cluster: LocalCluster) -> Iterator[DroppingProxy]:
    with dropping(cluster.url.removesuffix("/ws/v1")) as running:
        yield running


@pytest.fixture
def job(proxy: DroppingProxy, cluster: LocalCluster, quick: None) -> Iterator[loom.Job]:
    with loom.connect(proxy.url, cluster.token, transport="websocket") as connected:
        yield connected


@pytest.fixture
def counter(job: loom.Job) -> Any:
    counter = job.hosts.slice(hosts=0).spawn_procs(name="procs").spawn("counter", Counter)
    assert counter.value.call_one().get(60) == 0
    return counter


@pytest.mark.parametrize("direction", [UP, DOWN])
def test_a_call_whose_frame_was_dropped_returns_soon_and_ran_once(
    proxy: DroppingProxy, job: loom.Job, counter: Any, direction: str
) -> None:
    proxy.drop(direction, 1)
    began = time.monotonic()

    assert counter.add.call_one(1).get(BOUND) == 1

    assert proxy.dropped[direction] == 1
    assert time.monotonic() - began < BOUND / 2
    assert counter.value.call_one().get(BOUND) == 1


@pytest.mark.parametrize("direction", [UP, DOWN])
@pytest.mark.parametrize("size", [1, pytest.param(3 << 20, marks=pytest.mark.slow)])
def test_a_gap_is_noticed_without_a_question(
    proxy: DroppingProxy, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, direction: str, size: int
) -> None:
    monkeypatch.setattr(watch, "EVERY", 10 * BOUND)
    with loom.connect(proxy.url, cluster.token, transport="websocket") as job:
        assert job.run(len, b"") == 0
        proxy.drop(direction, 1)

        calls = [job.run(bytes, size, detach=True) if direction == DOWN else job.run(len, bytes(size), detach=True)]
        await_true(lambda: proxy.dropped[direction] == 1)  # one frame with all calls would leave no gap
        calls += [job.run(abs, -number, detach=True) for number in range(3)]

        assert [call.result(BOUND) for call in calls] == [bytes(size) if direction == DOWN else size, 0, 1, 2]
        assert proxy.dropped[direction] == 1


@pytest.mark.parametrize("direction", [UP, DOWN])
@pytest.mark.parametrize("size", [1, pytest.param(3 << 20, marks=pytest.mark.slow)])
def test_a_frame_that_the_line_has_damaged_is_sent_again(
    proxy: DroppingProxy, job: loom.Job, direction: str, size: int
) -> None:
    assert job.run(len, b"") == 0
    proxy.damage(direction, 1)

    calls = [job.run(bytes, size, detach=True) if direction == DOWN else job.run(len, bytes(size), detach=True)]
    calls += [job.run(abs, -number, detach=True) for number in range(3)]

    assert [call.result(BOUND) for call in calls] == [bytes(size) if direction == DOWN else size, 0, 1, 2]
    assert not job.closed


@pytest.mark.slow
@pytest.mark.parametrize("direction", [UP, DOWN])
def test_a_connection_that_drops_everything_but_pings_is_made_anew(
    proxy: DroppingProxy, job: loom.Job, counter: Any, direction: str
) -> None:
    proxy.drop_all(direction)

    calls = [counter.add.call_one(1) for _ in range(5)]

    assert [call.get(BOUND) for call in calls] == [1, 2, 3, 4, 5]
    assert not job.closed


@pytest.mark.slow
@pytest.mark.parametrize("direction", [UP, DOWN])
def test_a_frame_after_a_gap_does_not_end_the_session(
    proxy: DroppingProxy, job: loom.Job, counter: Any, direction: str
) -> None:
    proxy.drop(direction, 2)

    calls = [counter.echo.call_one(number) for number in range(3)]
    job._calls.flush()
    calls += [counter.echo.call_one(number) for number in range(3, 6)]

    assert [call.get(BOUND) for call in calls] == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("direction", [UP, DOWN])
def test_chunks_that_were_dropped_are_sent_again(
    proxy: DroppingProxy, job: loom.Job, counter: Any, direction: str
) -> None:
    large = bytes(range(256)) * (3 << 12)  # 3 MiB

    proxy.drop(direction, 2)
    call = counter.echo.call_one(large)

    assert call.get(2 * BOUND) == large
    assert proxy.dropped[direction] == 2


@pytest.mark.slow
@pytest.mark.parametrize("direction", [UP, DOWN])
def test_a_batch_that_was_lost_in_an_http_tunnel_is_noticed_too(
    cluster: LocalCluster, quick: None, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    send_all, receive = HttpTransport.send_all, HttpTransport.receive
    losses: list[str] = []

    def lossy_send(self: HttpTransport, data: bytes) -> None:
        if direction in losses and direction == UP:
            losses.clear()
        else:
            send_all(self, data)

    def lossy_receive(self: HttpTransport, wait: bool = True) -> list[bytes] | None:
        frames = receive(self, wait)
        if frames and direction in losses and direction == DOWN:
            losses.clear()
            return []
        return frames

    monkeypatch.setattr(HttpTransport, "send_all", lossy_send)
    monkeypatch.setattr(HttpTransport, "receive", lossy_receive)
    with loom.connect(cluster.url, cluster.token, transport="http") as job:
        counter = job.hosts.slice(hosts=0).spawn_procs(name="procs").spawn("counter", Counter)
        assert counter.value.call_one().get(60) == 0
        losses.append(direction)

        assert counter.add.call_one(1).get(BOUND) == 1
        assert not losses
        assert counter.value.call_one().get(BOUND) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("method", "counter"), [("send_all", "_sent"), ("receive", "_received")])
def test_a_batch_that_something_on_the_way_has_answered_does_not_end_the_session(
    cluster: LocalCluster, method: str, counter: str
) -> None:
    with loom.connect(cluster.url, cluster.token, transport="http") as job:
        assert job.run(int) == 0
        transport: Any = job._connection._transport
        plain = getattr(transport, method)

        def count_one_more(*args: Any) -> Any:
            setattr(transport, method, plain)
            setattr(transport, counter, getattr(transport, counter) + 1)
            return plain(*args)

        # Between two batches: one under way would write its own number over the changed one.
        setattr(transport, method, count_one_more)

        assert [job.run(abs, number) for number in range(3)] == [0, 1, 2]
        assert job._connection._transport is not transport
