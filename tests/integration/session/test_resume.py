"""A connection that is lost is made again, and nothing is lost or done twice."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

import loom
from loom import Actor, concurrent_endpoint, current_rank, endpoint
from loom.wire.bodies import CollectAnswer
from loom.wire.sender import HIGH_WATER
from loom_gateway.driver.clients.client import AWAY_CROWD
from loom_gateway.driver.clients.registry import WATCHERS_AWAY
from loom_gateway.driver.clients.unread_results import FILE_SIZE
from loom_proxy.local import LocalCluster
from tests.integration.calls.test_failures import driver_pid, rest
from tests.support.gateways import await_true
from tests.support.network.chaos_proxy import ChaosProxy, Schedule
from tests.support.network.gate import Gate

BOUND = 30.0


class Tally(Actor):
    """Keeps the numbers that it is given."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    @endpoint
    async def add(self, number: int) -> int:
        self.numbers.append(number)
        return len(self.numbers)

    @endpoint
    async def all(self) -> list[int]:
        return self.numbers

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def make(self, number: int, size: int, when: str) -> bytes:
        """So many bytes, as soon as there is a file of that name."""
        while not await asyncio.to_thread(os.path.exists, when):  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
        return bytes([number]) * size


class Slow(Actor):
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    @concurrent_endpoint
    async def hold(self, value: str) -> str:
        await self.released.wait()
        return f"{value}{current_rank().rank}"

    @concurrent_endpoint
    async def ready(self) -> bool:
        return True

    @concurrent_endpoint
    async def release(self) -> None:
        self.released.set()


@contextmanager
def through(gate: Gate, cluster: LocalCluster, **options: Any) -> Iterator[loom.Job]:
    job = loom.connect(f"ws://127.0.0.1:{gate.port}", cluster.token, **options)
    try:
        yield job
    finally:
        gate.open()
        job.close()


@pytest.fixture
def gate(cluster: LocalCluster) -> Iterator[Gate]:
    port = urlsplit(cluster.url).port
    assert port is not None
    with Gate(port) as gate:
        yield gate


@pytest.fixture
def far_job(gate: Gate, cluster: LocalCluster) -> Iterator[loom.Job]:
    with through(gate, cluster) as job:
        yield job


def await_event(job: loom.Job, name: str, count: int = 1) -> list[loom.Event]:
    """The events of a session up to the n-th of a name."""
    seen = []
    for event in job.events(timeout=BOUND):
        seen.append(event)
        count -= event.name == name
        if not count:
            return seen
    raise AssertionError(f"no event {name!r} in {seen}")


def tally(job: loom.Job) -> Any:
    return job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 1}, name="procs").spawn("tally", Tally)


def tally_out_of_reach(gate: Gate, job: loom.Job) -> Any:
    """An actor that has counted 1, and then the network is away."""
    actor = tally(job)
    actor.add.call_one(1).get(BOUND)
    gate.shut()
    await_event(job, "disconnected")
    return actor


def test_a_call_after_a_cut_goes_over_the_next_connection(gate: Gate, far_job: loom.Job) -> None:
    actor = tally(far_job)
    assert actor.add.call_one(1).get(BOUND) == 1

    gate.cut()
    await_event(far_job, "resumed")

    assert actor.add.call_one(2).get(BOUND) == 2
    names = [event.name for event in await_event(far_job, "resumed")]
    assert names.count("disconnected") == names.count("resumed") == 1


def test_what_is_asked_while_the_network_is_away_waits_and_runs_once(gate: Gate, far_job: loom.Job) -> None:
    actor = tally(far_job)
    actor.add.call_one(0).get(BOUND)
    gate.shut()
    await_event(far_job, "disconnected")

    futures = [actor.add.call_one(number) for number in range(1, 50)]
    with pytest.raises(loom.WaitTimeout, match="connection is lost"):
        futures[0].get(timeout=0.1)
    assert gate.knocked.wait(BOUND)
    gate.open()

    assert [future.get(BOUND) for future in futures] == list(range(2, 51))
    assert actor.all.call_one().get(BOUND) == list(range(50))


@pytest.mark.slow
def test_a_get_that_waits_while_the_connection_is_cut_gets_its_answer(gate: Gate, far_job: loom.Job) -> None:
    actor = tally(far_job)
    answers: list[int] = []
    for number in range(20):
        future = actor.add.call_one(number)
        waiting = threading.Thread(target=lambda future=future: answers.append(future.get(BOUND)))
        waiting.start()
        gate.cut()
        waiting.join(BOUND)

    assert answers == list(range(1, 21))
    assert actor.all.call_one().get(BOUND) == list(range(20))


def test_a_large_argument_and_its_result_survive_cuts_in_the_middle(gate: Gate, far_job: loom.Job) -> None:
    actor = tally(far_job)
    sent = bytes(range(256)) * (48 << 12)  # 48 MiB
    future = actor.echo.call_one(sent)
    while not future.timing:
        gate.cut()
        try:
            future.get(timeout=0.05)
        except loom.WaitTimeout:
            gate.knocked.wait(0.2)

    assert future.get(BOUND) == sent


def test_an_awaited_future_survives_a_cut(gate: Gate, far_job: loom.Job) -> None:
    actor = tally(far_job)

    async def ask() -> list[int]:
        future = actor.add.call_one(1).as_asyncio()
        gate.cut()
        return [await future, await actor.add.call_one(2)]

    assert asyncio.run(asyncio.wait_for(ask(), BOUND)) == [1, 2]


def test_a_caller_waits_where_too_much_is_kept_for_a_network_that_is_away(gate: Gate, far_job: loom.Job) -> None:
    actor = tally(far_job)
    actor.add.call_one(0).get(BOUND)
    gate.shut()
    await_event(far_job, "disconnected")
    pieces = 2 * HIGH_WATER >> 22
    calls: list[Any] = []

    def call() -> None:
        for number in range(pieces):
            calls.append(actor.echo.call_one(bytes([number]) * (4 << 20)))

    calling = threading.Thread(target=call)
    calling.start()
    calling.join(2.0)
    assert calling.is_alive()
    assert len(calls) < pieces
    gate.open()
    calling.join(BOUND)

    assert [future.get(BOUND)[0] for future in calls] == list(range(pieces))


def test_results_beyond_the_bound_wait_on_the_disk(
    gate: Gate, far_job: loom.Job, cluster: LocalCluster, tmp_path: Path
) -> None:
    actor = tally(far_job)
    count = 24
    go = tmp_path / "go"
    asked = [actor.make.call_one(number, 8 << 20, str(go)) for number in range(count)]
    far_job.flush_logs(BOUND)  # the calls have been started
    driver = driver_pid(cluster, far_job)
    gate.shut()
    await_event(far_job, "disconnected")
    go.touch()
    deadline = time.monotonic() + BOUND
    while len(maps(driver)) < ((count << 23) - 2 * AWAY_CROWD) // FILE_SIZE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    gate.open()

    for number, future in enumerate(asked):
        value = future.get(BOUND)
        assert (len(value), value[0]) == (8 << 20, number)
    await_true(lambda: not maps(driver))  # once the laptop has acknowledged them


def maps(pid: int) -> list[str]:
    """The files without a name that a process has in its memory."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if "/tmp/" in line and line.endswith("(deleted)")]


def test_a_network_that_does_not_come_back_is_given_up_in_time(gate: Gate, cluster: LocalCluster) -> None:
    with through(gate, cluster, reconnect_timeout=0.3) as job:
        tally(job).all.call_one().get(BOUND)
        gate.shut()
        error = await_event(job, "ended")[-1].error
        assert isinstance(error, loom.ConnectionLost)
        assert "not made again within 0.3 s" in str(error)
        with pytest.raises(loom.ConnectionLost):
            tally(job)
        session = job.session
    with loom.connect(cluster.url, cluster.token, session=session) as job:
        assert "tally" in job.meshes


def test_leaving_while_the_network_is_away_takes_no_time(
    gate: Gate, far_job: loom.Job, cluster: LocalCluster
) -> None:
    actor = tally_out_of_reach(gate, far_job)
    pending = actor.add.call_one(2)

    far_job.detach()

    with pytest.raises(loom.LoomError):
        pending.get(BOUND)
    with loom.connect(cluster.url, cluster.token, session=far_job.session) as job:
        assert job.meshes["tally"].add.call_one(3).get(BOUND) == 2


def test_a_session_that_ended_meanwhile_is_said_to_be_lost(
    gate: Gate, far_job: loom.Job, cluster: LocalCluster
) -> None:
    actor = tally_out_of_reach(gate, far_job)
    with loom.connect(cluster.url, cluster.token, session=far_job.session):
        pass  # which closes it
    gate.open()

    with pytest.raises((loom.UnknownSession, loom.SessionLost)):
        actor.add.call_one(2).get(BOUND)


def test_answers_that_a_program_left_behind_are_found_by_the_next(job: loom.Job, cluster: LocalCluster) -> None:
    hosts = job.hosts.spawn_procs(per_host={"gpus": 1}, name="procs").spawn("slow", Slow)
    one = hosts.slice(hosts=1)
    one.hold.call_one("a")
    hosts.hold.call("b")
    list(hosts.hold.stream("c"))
    assert hosts.ready.call().get(BOUND)
    job.detach()

    with loom.connect(cluster.url, cluster.token, session=job.session) as other:
        found = other.undelivered()
        assert [(call.mesh, call.endpoint, call.adverb) for call in found] == [
            ("slow", "hold", adverb) for adverb in ("call_one", "call", "stream")
        ]
        futures = [call.futures for call in found]
        other.meshes["slow"].release.call().get(BOUND)
        assert futures[0][0].get(BOUND) == "a0"  # the only one of its slice
        assert futures[1][0].get(BOUND).values() == ["b0", "b1"]
        assert sorted(future.get(BOUND) for future in futures[2]) == ["c0", "c1"]
        assert other.undelivered() == []


def test_an_answer_that_was_on_its_way_when_the_program_died_is_kept(
    gate: Gate, far_job: loom.Job, cluster: LocalCluster
) -> None:
    actors = far_job.hosts.slice(hosts=0).spawn_procs(name="procs").spawn("slow", Slow)
    actors.hold.call_one("a")
    actors.ready.call_one().get(BOUND)
    gate.shut()
    await_event(far_job, "disconnected")
    with loom.connect(cluster.url, cluster.token, session=far_job.session) as other:
        other.meshes["slow"].release.call_one().get(BOUND)
        other.meshes["slow"].ready.call_one().get(BOUND)
        other.detach()
    with loom.connect(cluster.url, cluster.token, session=far_job.session) as other:
        (call,) = [call for call in other.undelivered() if call.endpoint == "hold"]
        assert call.future.get(BOUND) == "a0"
        with pytest.raises(loom.OperationFailed, match="may have been collected or dropped already"):
            other._calls.ask(CollectAnswer(call._ident)).get(BOUND)


# -- other clients of the session ---------------------------------------------------------------------------


def test_a_client_that_takes_the_session_over_puts_the_other_out(job: loom.Job, cluster: LocalCluster) -> None:
    actor = tally(job)
    actor.add.call_one(1).get(BOUND)
    with pytest.raises(loom.SessionInUse, match="take_over=True"):
        loom.connect(cluster.url, cluster.token, session=job.session)

    with loom.connect(cluster.url, cluster.token, session=job.session, take_over=True) as other:
        assert isinstance(await_event(job, "ended")[-1].error, loom.SessionTakenOver)
        with pytest.raises(loom.SessionTakenOver):
            actor.add.call_one(2).get(BOUND)
        assert other.meshes["tally"].add.call_one(3).get(BOUND) == 2


@pytest.mark.slow
def test_a_client_that_was_away_finds_that_another_has_taken_its_place(
    gate: Gate, far_job: loom.Job, cluster: LocalCluster
) -> None:
    actor = tally_out_of_reach(gate, far_job)
    with loom.connect(cluster.url, cluster.token, session=far_job.session) as other:
        gate.open()
        with pytest.raises(loom.SessionTakenOver):
            actor.add.call_one(2).get(BOUND)
        assert other.meshes["tally"].all.call_one().get(BOUND) == [1]


def test_a_client_that_watches_sees_everything_and_changes_nothing(job: loom.Job, cluster: LocalCluster) -> None:
    actor = tally(job)
    actor.add.call_one(1).get(BOUND)
    watching = loom.connect(cluster.url, cluster.token, session=job.session, mode="watch")
    try:
        seen = watching.meshes["tally"]
        with pytest.raises(loom.ReadOnlySession, match="watch"):
            seen.add.call_one(2).get(BOUND)
        run = job.run(_say, "hello", detach=True, name="said")
        assert run.result(BOUND) == "hello"
        assert watching.runs()["said"].result(BOUND) == "hello"
        assert actor.all.call_one().get(BOUND) == [1]
    finally:
        watching.close()
    assert actor.add.call_one(2).get(BOUND) == 2


@pytest.mark.slow
def test_two_that_watch_get_their_own_answers(job: loom.Job, cluster: LocalCluster) -> None:
    tally(job).all.call_one().get(BOUND)
    watching = [loom.connect(cluster.url, cluster.token, session=job.session, mode="watch") for _ in range(2)]
    try:
        assert [sorted(one.meshes) for one in watching] == [["procs", "tally"]] * 2
        job.close()
        for one in watching:
            assert any(event.name == "ended" for event in one.events(BOUND))
    finally:
        for one in watching:
            one.detach()


def test_clients_that_watched_and_left_are_let_go_of(job: loom.Job, cluster: LocalCluster) -> None:
    tally(job).all.call_one().get(BOUND)
    threads = psutil.Process(driver_pid(cluster, job)).num_threads
    before = threads()
    for _ in range(3 * WATCHERS_AWAY):
        loom.connect(cluster.url, cluster.token, session=job.session, mode="watch").detach()

    assert threads() - before < 2 * WATCHERS_AWAY  # each has one


@pytest.mark.parametrize(("options", "text"), [({"mode": "look"}, "'look'"), ({"mode": "watch"}, "needs session")])
def test_a_mode_that_makes_no_sense_is_refused(cluster: LocalCluster, options: Any, text: str) -> None:
    with pytest.raises(loom.WrongArguments, match=text):
        loom.connect(cluster.url, cluster.token, **options)


def _say(text: str) -> str:
    return text


class SlowToUnpickle:
    """Takes as long to be unpickled as there is no file of a name, and tells by another that this has begun."""

    def __init__(self, began: str, when: str) -> None:
        self._names = (began, when)

    def __reduce__(self) -> Any:
        return _unpickle_slowly, self._names


def _unpickle_slowly(began: str, when: str) -> int:
    with open(began, "x"):
        pass
    while not os.path.exists(when):
        time.sleep(0.01)
    return 10


class Counts(Actor):
    """Counts from a number."""

    def __init__(self, start: int) -> None:
        self.n = start

    @endpoint
    def add(self, k: int) -> int:
        self.n += k
        return self.n


@pytest.mark.guarantees(
    "process link", "Cuts while an operation takes long to start cost nothing and change no order"
)
def test_cuts_while_an_operation_takes_long_to_start_cost_nothing_and_change_no_order(
    far_job: loom.Job, gate: Gate, tmp_path: Path
) -> None:
    began, when = tmp_path / "began", tmp_path / "when"
    procs = far_job.hosts.slice(hosts=0).spawn_procs()
    first = procs.spawn("first", Counts, 0)
    assert first.add.call_one(1).get(BOUND) == 1
    slow = procs.spawn("slow", Counts, SlowToUnpickle(str(began), str(when)))
    before = slow.add.call_one(1)
    await_true(began.exists)
    for cut in (1, 2, 3):
        gate.cut()
        await_event(far_job, "resumed", cut)  # though the operation is still being started
        first.add.broadcast(1)

    answers = [slow.add.call_one(1) for _ in range(100)]
    assert not before.done()
    when.touch()

    assert before.get(BOUND) == 11
    assert [answer.get(BOUND) for answer in answers] == list(range(12, 112))
    assert first.add.call_one(1).get(BOUND) == 5


@pytest.mark.guarantees(
    "process link",
    "A client that takes the place of another does not mix its operations with one that is still being started",
)
def test_another_client_does_not_mix_its_operations_with_one_that_is_still_being_started(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    began, when = tmp_path / "began", tmp_path / "when"
    job = loom.connect(cluster.url, cluster.token)
    procs = job.hosts.slice(hosts=0).spawn_procs()
    slow = procs.spawn("slow", Counts, SlowToUnpickle(str(began), str(when)))
    call = slow.add.call_one(1)
    await_true(began.exists)
    connected: list[loom.Job] = []
    taking = threading.Thread(
        target=lambda: connected.append(
            loom.connect(cluster.url, cluster.token, session=job.session, take_over=True)
        )
    )
    taking.start()
    with pytest.raises(loom.LoomError):
        call.get(BOUND)
    assert not connected
    when.touch()
    taking.join(BOUND)
    with connected[0] as other:
        assert other.meshes["slow"].add.call_one(1).get(BOUND) in (11, 12)  # whether the call had come


@pytest.mark.guarantees(
    "process link", "A first connection that is cut in the handshake is made again, and opens one session"
)
@pytest.mark.parametrize("seed", range(6))
def test_a_first_connection_that_is_cut_in_the_handshake_is_made_again_and_opens_one_session(
    own_cluster: LocalCluster, seed: int
) -> None:
    port = urlsplit(own_cluster.url).port
    assert port is not None
    with ChaosProxy(port) as proxy:
        # In a handshake: before the gateway has the hello, or after its answer.
        proxy.attack(Schedule(seed=seed, cuts=4, gap=(200, 800), others=0))
        url = f"ws://127.0.0.1:{proxy.port}"
        with loom.connect(url, own_cluster.token, timeout=BOUND, transport="websocket") as job:
            assert proxy.cuts > 0
            await_true(
                lambda: [one["name"] for one in rest(own_cluster, "/api/v1/sessions")["sessions"]] == [job.session]
            )


def test_a_session_that_ended_as_asked_is_closed_though_the_answer_was_lost(
    gate: Gate, cluster: LocalCluster, far_job: loom.Job
) -> None:
    far_job.hosts.spawn_procs().initialized.get(BOUND)
    gate.hold_answers()
    closing = threading.Thread(target=far_job.close)
    closing.start()
    await_true(
        lambda: far_job.session not in {one["name"] for one in rest(cluster, "/api/v1/sessions")["sessions"]}
    )
    gate.cut()
    closing.join(BOUND)

    assert not closing.is_alive()
    with pytest.raises(loom.SessionClosed, match=f"{far_job.session}.* was closed here"):
        far_job.hosts.spawn_procs()
