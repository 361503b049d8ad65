"""Clients in mode ``call``: they call a session's actors next to the client that drives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import loom
from loom_gateway.driver.clients.registry import CALLER_ROOM
from loom_proxy.local import LocalCluster
from tests.integration.session.test_resume import Tally
from tests.support.actors import BadLuck, Counter
from tests.support.gateways import BOUND, await_true
from tests.support.network.gate import Gate
from tests.support.ordinary_classes import Shop
from tests.support.users import House


@pytest.fixture(scope="module")
def house(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made = House(list(cluster.workers), tmp_path_factory.mktemp("users"))
    yield made
    made.gateway.close()


@pytest.fixture(scope="module")
def job(house: House) -> Iterator[loom.Job]:
    """A session of ann's with a counter on each of two hosts."""
    with house.connect("ann") as opened:
        counters = opened.hosts.spawn_procs(name="procs").spawn("counters", Counter, 10)
        counters.initialized.get(BOUND)
        yield opened


@pytest.fixture
def caller(house: House, job: loom.Job) -> Iterator[loom.Job]:
    with house.connect("ann", job.session, mode="call") as opened:
        yield opened


def values(call: Any) -> list[Any]:
    return list(call.get(BOUND).values())


def test_both_clients_call_the_same_actors(caller: loom.Job, job: loom.Job) -> None:
    ours, theirs = job.meshes["counters"], caller.meshes["counters"]

    first, second = values(ours.add.call(0))
    assert values(theirs.add.call(1)) == [first + 1, second + 1]
    assert values(ours.add.call(1)) == [first + 2, second + 2]
    assert theirs.value.choose().get(BOUND) in (first + 2, second + 2)
    theirs.add.broadcast(1)
    assert values(theirs.value.call()) == [first + 3, second + 3]


def test_the_calls_of_a_caller_run_in_their_order(caller: loom.Job) -> None:
    theirs = caller.meshes["counters"]
    start = values(theirs.value.call())[0]

    calls = [theirs.add.call(1) for _ in range(200)]

    assert [values(call)[0] for call in calls] == list(range(start + 1, start + 201))


def test_callers_and_the_driving_client_call_at_once(house: House, job: loom.Job) -> None:
    with loom.cls(Shop).to(job, name="busy") as shop:
        jobs = [house.connect("ann", job.session, mode="call") for _ in range(3)]
        failures: list[BaseException] = []

        def buy(mesh: Any) -> None:
            try:
                for _ in range(50):
                    mesh.run.call_one("buy", (1,), {}).get(BOUND)
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(error)

        meshes = [shop.mesh, *(one.meshes["busy"] for one in jobs)]
        threads = [threading.Thread(target=buy, args=(mesh,)) for mesh in meshes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND)
        assert failures == []
        assert shop.buy(0) == 200
        for one in jobs:
            one.detach()


def test_an_error_comes_to_the_caller_that_asked(caller: loom.Job) -> None:
    with pytest.raises(loom.ActorError) as caught:
        caller.meshes["counters"].fail.call("unlucky").get(BOUND)

    assert isinstance(caught.value.exception, BadLuck)


def test_a_process_that_dies_fails_the_callers_calls(house: House, job: loom.Job) -> None:
    with loom.cls(Shop).to(job, name="mortal"), house.connect("ann", job.session, mode="call") as caller:
        mortal = caller.meshes["mortal"]
        with pytest.raises(loom.SupervisionError):
            mortal.run.call_one("die", (), {}).get(BOUND)
        with pytest.raises(loom.SupervisionError):
            mortal.run.call_one("pid", (), {}).get(BOUND)


@pytest.mark.parametrize(
    "change",
    [
        lambda job: job.hosts.spawn_procs(),
        lambda job: job.meshes["counters"].stop(),
        lambda job: job.run(print),
        lambda job: job.meshes["counters"].slice(hosts=0).add.call_one(1),
    ],
    ids=["spawn", "stop", "run", "slice"],
)
def test_whatever_else_it_asks_is_refused(caller: loom.Job, change: Callable[[loom.Job], object]) -> None:
    with pytest.raises(loom.ReadOnlySession, match="calls actors of session"):
        change(caller)


def test_a_caller_that_leaves_does_not_end_the_session(house: House, job: loom.Job) -> None:
    house.connect("ann", job.session, mode="call").close()

    assert values(job.meshes["counters"].value.call())


def test_each_call_runs_once_though_the_line_is_cut(house: House, job: loom.Job) -> None:
    address = urlsplit(house.url)
    assert address.port is not None
    with Gate(address.port) as gate:
        url = house.url.replace(f":{address.port}", f":{gate.port}")
        with loom.connect(url, house.tokens["ann"], job.session, mode="call") as caller:
            theirs = caller.meshes["counters"]
            start = values(theirs.value.call())[0]
            calls = []
            for number in range(60):
                calls.append(theirs.add.call(1))
                if number % 20 == 10:
                    values(calls[number // 2])
                    gate.cut()
            assert [values(call)[0] for call in calls] == list(range(start + 1, start + 61))
            assert [event for event in caller.events(timeout=0) if event.name == "resumed"]


@pytest.mark.slow
def test_a_caller_that_is_away_while_too_much_waits_for_it_is_disconnected(
    house: House, job: loom.Job, tmp_path: Path
) -> None:
    size, go = 32 << 20, tmp_path / "go"
    tally = job.hosts.slice(hosts=0).spawn_procs(name="large").spawn("large", Tally)
    tally.initialized.get(BOUND)
    address = urlsplit(house.url)
    assert address.port is not None
    with Gate(address.port) as gate:
        url = house.url.replace(f":{address.port}", f":{gate.port}")
        with loom.connect(url, house.tokens["ann"], job.session, mode="call") as caller:
            theirs = caller.meshes["large"]
            calls = [theirs.make.call_one(1, size, str(go)) for _ in range(CALLER_ROOM // size + 3)]
            caller._calls.flush()
            await_true(lambda: in_flight(house, job, "large", "make") == len(calls))
            gate.shut()
            go.touch()
            await_true(lambda: in_flight(house, job, "large", "make") == 0)
            gate.open()
            with pytest.raises(loom.WatcherTooSlow, match="over 256 MiB waited"):
                calls[-1].get(BOUND)
    assert tally.all.call_one().get(BOUND) == []
    tally.stop().get(BOUND)


def in_flight(house: House, job: loom.Job, mesh: str, endpoint: str) -> int:
    """The unanswered calls of an endpoint."""
    procs = house.rest("ann").meshes(job.session)["hosts"]["procs"]
    actors = next(actors for one in procs for actors in one["actors"] if actors["name"] == mesh)
    return sum(one["in_flight"] for one in actors["endpoints"] if one["name"] == endpoint)


def test_only_who_may_drive_calls(house: House, job: loom.Job) -> None:
    def call() -> loom.Job:
        return house.connect("bob", job.session, mode="call")

    with pytest.raises(loom.UnknownSession):
        call()
    job.share("bob", "operate")
    with pytest.raises(loom.ScopeError, match=r"'ann' shares session .* with you for operate"):
        call()
    with house.watch("bob", job.session) as watching, pytest.raises(loom.ReadOnlySession):
        watching.meshes["counters"].value.call()

    job.share("bob", "drive")
    with call() as guest:
        assert values(guest.meshes["counters"].value.call())
        await_true(lambda: house.audit(event="called", user="bob", session=job.session))
        job.unshare("bob")
        with pytest.raises(loom.LoomError):
            guest.meshes["counters"].value.call().get(BOUND)
    with pytest.raises(loom.UnknownSession):
        call()


def test_a_new_session_has_nothing_to_call(house: House) -> None:
    with pytest.raises(loom.WrongArguments, match="needs session"):
        house.connect("ann", mode="call")
