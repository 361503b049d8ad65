"""A gateway that is told to stop: it takes no new sessions, tells its clients, and gives them time."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

import loom
from loom_gateway.relay.endpoint import DrainState
from loom_gateway.sessions.manager import SessionManager
from loom_proxy.local import LocalCluster
from loom_proxy.session.events import Event
from tests.integration.gateway.test_keep_gateway import announced, keep
from tests.support.actors import Counter
from tests.support.gateways import BOUND, TOKEN, Gateway, gateway_of
from tests.support.processes import run

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def draining(cluster: LocalCluster) -> Iterator[Gateway]:
    """A gateway that would drain for longer than a test may take, and ends its sessions then."""
    with gateway_of(cluster, "--drain", "100", "--end-sessions") as gateway:
        yield gateway


def ready(gateway: Gateway) -> tuple[int, str]:
    status, answer = gateway.ready()
    return status, answer["status"]


def told(job: loom.Job) -> Event:
    """The event by which a client learns that its gateway is to end."""
    return next(event for event in job.events(timeout=BOUND) if event.name == "gateway_draining")


def send(gateway: Gateway, number: int) -> None:
    assert gateway._process is not None
    gateway._process.send_signal(number)


def await_exit(gateway: Gateway) -> None:
    assert gateway._process is not None
    gateway._process.communicate(timeout=BOUND)
    gateway._process = None


@pytest.mark.parametrize("transport", ["websocket", "http"])
def test_a_session_goes_on_in_a_gateway_that_drains(draining: Gateway, transport: str) -> None:
    assert ready(draining) == (200, "ok")
    job = draining.connect(transport=transport)
    counters = job.hosts.spawn_procs().spawn("counters", Counter)

    send(draining, signal.SIGTERM)

    details = told(job).details
    assert 90 < details["seconds"] <= 100
    assert details["sessions_end"] is True
    assert ready(draining) == (503, "draining")
    assert list(counters.add.call(3).get(BOUND).values()) == [3, 3]
    with pytest.raises(loom.GatewayDraining, match="takes no new sessions: connect again when the next one runs"):
        draining.connect()
    job.detach()
    again = draining.connect(job.session)  # what is there can still be reached
    assert list(again.meshes["counters"].add.call(1).get(BOUND).values()) == [4, 4]
    assert told(again).details["sessions_end"] is True
    again.close()  # the last one
    await_exit(draining)


def test_a_gateway_without_sessions_does_not_wait(draining: Gateway) -> None:
    draining.end(signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_tells_it_twice_does_not_wait(draining: Gateway, number: int) -> None:
    job = draining.connect()
    send(draining, signal.SIGTERM)
    told(job)

    draining.end(number)

    assert draining.drivers() == []
    (last,) = [event for event in job.events(timeout=BOUND) if event.name == "ended"]
    assert "the gateway was stopped" in str(last.error)


@pytest.mark.slow
def test_the_time_to_drain_is_bounded(cluster: LocalCluster) -> None:
    with gateway_of(cluster, "--drain", "0.5", "--end-sessions") as gateway:
        job = gateway.connect()

        gateway.end(signal.SIGTERM)

        assert gateway.drivers() == []
        with pytest.raises(loom.SessionClosed, match="the gateway was stopped"):
            job.hosts.spawn_procs().initialized.get(BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["websocket", "http"])
def test_clients_are_told_that_their_sessions_go_on_with_the_next_gateway(
    cluster: LocalCluster, transport: str
) -> None:
    with gateway_of(cluster) as gateway, gateway.connect(transport=transport) as job:
        counters = job.hosts.spawn_procs().spawn("counters", Counter)
        assert list(counters.add.call(3).get(BOUND).values()) == [3, 3]

        gateway.end(signal.SIGTERM)

        assert told(job).details == {"seconds": 0.0, "sessions_end": False}
        gateway.start()
        assert list(counters.add.call(1).get(BOUND).values()) == [4, 4]


@pytest.mark.slow
def test_sessions_that_no_one_ends_are_left_to_the_next_gateway_after_draining(cluster: LocalCluster) -> None:
    with gateway_of(cluster, "--drain", "0.5") as gateway, gateway.connect() as job:
        counters = job.hosts.spawn_procs().spawn("counters", Counter)
        assert list(counters.add.call(3).get(BOUND).values()) == [3, 3]
        gateway.end(signal.SIGTERM)
        assert told(job).details["sessions_end"] is False
        gateway.start()
        assert list(counters.add.call(1).get(BOUND).values()) == [4, 4]


def test_ctrl_c_tells_clients_that_their_sessions_have_ended(cluster: LocalCluster) -> None:
    with gateway_of(cluster) as gateway:
        job = gateway.connect()
        job.hosts.initialized.get(BOUND)

        gateway.end(signal.SIGINT)

        with pytest.raises(loom.SessionClosed, match="the gateway was stopped"):
            job.hosts.spawn_procs().initialized.get(BOUND)


def test_a_kept_gateway_drains_and_is_not_started_again(cluster: LocalCluster) -> None:
    gateway = Gateway(cluster.workers, "--drain", "100")
    process = keep(*gateway.command()[2:])
    try:
        gateway.url = announced(process)["url"]
        job = loom.connect(gateway.url, TOKEN)
        process.terminate()
        assert told(job).details["sessions_end"] is True
        assert process.poll() is None
        job.close()
        assert process.wait(BOUND) == 0
    finally:
        process.kill()
        process.communicate(timeout=BOUND)
        gateway.close()


async def test_the_end_of_the_last_session_ends_the_draining(cluster: LocalCluster) -> None:
    manager = SessionManager(cluster.workers)
    draining = DrainState(manager)
    draining.begin(100.0)
    draining.begin(0.0)  # is not heard any more

    await draining.over()

    with pytest.raises(loom.GatewayDraining, match=r"ends in (99|100) s"):
        draining.check_open()
    await manager.close()


def test_a_negative_time_to_drain_is_refused() -> None:
    options = ["--worker", "tcp://127.0.0.1:1", "--drain", "-1"]
    refused = run("-c", "import loom.cli; loom.cli.main()", "serve", "gateway", *options)
    assert refused.returncode == 2
    assert "--drain" in refused.stderr
