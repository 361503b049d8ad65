"""Ports: what anyone in the cluster sends to them comes here, in order, and not faster than it is taken."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from typing import Any

import pytest

import loom
from loom import Actor, endpoint
from loom_gateway.driver.monarch.port_batching import MOST_MESSAGES
from loom_proxy import port as sending_end
from loom_proxy import port_receiver as receiving_end
from loom_proxy.local import LocalCluster
from tests.support.actors import BadLuck, Counter, NeedsCluster
from tests.support.gateways import attach

BOUND = 30.0


class Sender(Actor):
    """Sends to ports that it is given."""

    def __init__(self, port: Any = None) -> None:
        self.port = port

    @endpoint
    def send(self, port: Any, value: Any) -> None:
        port.send(value)

    @endpoint
    def count(self, port: Any, numbers: int) -> None:
        for number in range(numbers):
            port.send(number)

    @endpoint
    def send_sizes(self, port: Any, sizes: list[int]) -> None:
        for number, size in enumerate(sizes):
            port.send((number, bytes([number % 256]) * size))

    @endpoint
    def count_and_reply(self, port: Any, numbers: int) -> str:
        for number in range(numbers):
            port.send(number)
        return "reply"

    @endpoint
    def send_all_kinds(self, port: Any, numbers: int) -> None:
        for number in range(numbers):
            if number % 7 == 3:
                port.send(Point(number))
            elif number % 11 == 5:
                port.exception(BadLuck("in between", number))
            else:
                port.send({"number": number})

    @endpoint
    def count_in_threads(self, port: Any, numbers: int) -> None:
        def count(thread: int) -> None:
            for number in range(numbers):
                port.send((thread, number))

        threads = [threading.Thread(target=count, args=(thread,)) for thread in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @endpoint
    def send_to_its_own(self, value: Any) -> None:
        self.port.send(value)

    @endpoint
    def kind(self, port: Any) -> bool:
        from monarch.actor import Port

        return isinstance(port, Port)

    @endpoint
    def send_exception(self, port: Any, text: str) -> None:
        port.exception(BadLuck(text, 7))

    @endpoint
    def send_strange_exception(self, port: Any, laptop: int) -> None:
        port.exception(NeedsCluster(laptop))

    @endpoint
    def send_unpicklable(self, port: Any) -> None:
        port.send(Unloadable())

    @endpoint
    def pass_on(self, port: Any, sender: Any, value: Any) -> None:
        sender.send.call_one(port, value).get()

    @endpoint
    def own_channel(self) -> int:
        port, receiver = loom.Channel[int].open()
        port.send(5)
        return receiver.recv().get() + 1


class Point:
    """Something that is no plain value."""

    def __init__(self, number: int) -> None:
        self.number = number


class Unloadable:
    """Pickles, but cannot be pickled again where it was unpickled."""

    def __init__(self) -> None:
        self.lock: Any = None

    def __setstate__(self, state: Any) -> None:
        self.lock = threading.Lock()


@pytest.fixture(scope="module")
def senders(shared: loom.Job) -> Any:
    return shared.hosts.spawn_procs(per_host={"gpus": 1}, name="senders").spawn("senders", Sender)


@pytest.fixture(scope="module")
def sender(senders: Any) -> Any:
    return senders.slice(hosts=0, gpus=0)


def take(receiver: Any, count: int) -> list[Any]:
    return [receiver.recv().get(timeout=BOUND) for _ in range(count)]


# -- receiving ----------------------------------------------------------------------------------------------


def test_a_port_arrives_as_monarchs_own(shared: loom.Job, sender: Any) -> None:
    port, receiver = shared.channel()
    assert sender.kind.call_one(port).get(timeout=BOUND)
    sender.send.call_one(port, {"loss": 0.5}).get(timeout=BOUND)
    assert receiver.recv().get(timeout=BOUND) == {"loss": 0.5}


def test_thousands_of_messages_come_in_order(shared: loom.Job, sender: Any) -> None:
    port, receiver = shared.channel()
    counting = sender.count.call_one(port, 5000)
    assert take(receiver, 5000) == list(range(5000))
    counting.get(timeout=BOUND)


def test_messages_of_any_size_keep_their_order(shared: loom.Job, sender: Any) -> None:
    sizes = [1, 3 << 20, 2, 100_000, 0, 17_000, 5, 700_000, 3]
    port, receiver = shared.channel()
    sender.send_sizes.call_one(port, sizes).get(timeout=BOUND)
    for number, (size, message) in enumerate(zip(sizes, take(receiver, len(sizes)), strict=True)):
        assert message == (number, bytes([number]) * size)


def test_messages_of_any_kind_keep_their_order(shared: loom.Job, sender: Any) -> None:
    port, receiver = shared.channel()
    sender.send_all_kinds.call_one(port, 300).get(timeout=BOUND)
    for number in range(300):
        future = receiver.recv()
        if number % 7 == 3:
            assert future.get(timeout=BOUND).number == number
        elif number % 11 == 5:
            with pytest.raises(BadLuck) as raised:
                future.get(timeout=BOUND)
            assert raised.value.number == number
        else:
            assert future.get(timeout=BOUND) == {"number": number}


def test_an_actors_replies_to_a_port_come_after_what_it_sent_before(shared: loom.Job, sender: Any) -> None:
    port, receiver = shared.channel()
    for _ in range(20):
        loom.send(sender.count_and_reply, (port, 50), {}, port)
    for _ in range(20):
        assert take(receiver, 51) == [*range(50), "reply"]
    for _ in range(20):
        sender.count.broadcast(port, 50)
        loom.send(sender.kind, (port,), {}, port)
    for _ in range(20):
        assert take(receiver, 51) == [*range(50), True]


def test_messages_of_each_thread_of_an_actor_keep_their_order(shared: loom.Job, sender: Any) -> None:
    port, receiver = shared.channel()
    sender.count_in_threads.call_one(port, 200).get(timeout=BOUND)
    messages = take(receiver, 600)
    for thread in range(3):
        assert [number for sent_by, number in messages if sent_by == thread] == list(range(200))


def test_no_more_comes_than_there_is_credit_for(
    shared: loom.Job, sender: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sending_end, receiving_end):
        monkeypatch.setattr(module, "CREDIT_MESSAGES", 40)
    port, receiver = shared.channel()
    sender.count.call_one(port, 5000).get(timeout=BOUND)
    first = receiver.recv().get(timeout=BOUND)
    assert shared.run(len, "a round trip to the driver") == 26
    assert len(receiver._inbox._messages) <= 40 + MOST_MESSAGES
    assert [first, *take(receiver, 4999)] == list(range(5000))


def test_bytes_are_credit_too(shared: loom.Job, sender: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sending_end, receiving_end):
        monkeypatch.setattr(module, "CREDIT_BYTES", 100_000)
    port, receiver = shared.channel()
    sizes = [30_000] * 50
    sender.send_sizes.call_one(port, sizes).get(timeout=BOUND)
    first = receiver.recv().get(timeout=BOUND)
    assert shared.run(len, "a round trip to the driver") == 26
    assert sum(message.size for message in receiver._inbox._messages) <= 100_000 + 31_000
    assert [number for number, _ in [first, *take(receiver, 49)]] == list(range(50))


def test_a_timeout_takes_no_message(shared: loom.Job, sender: Any) -> None:
    port, receiver = shared.channel()
    kept = receiver.recv()
    for future in (kept, receiver.recv()):
        with pytest.raises(loom.WaitTimeout):
            future.get(timeout=0.01)
    sender.count.call_one(port, 2).get(timeout=BOUND)
    assert take(receiver, 2) == [0, 1]
    sender.send.call_one(port, "last").get(timeout=BOUND)
    assert kept.get(timeout=BOUND) == "last"
    assert kept.get(timeout=BOUND) == "last"


def test_a_cancelled_wait_takes_no_message(shared: loom.Job, sender: Any) -> None:
    port, receiver = shared.channel()

    async def receive() -> list[Any]:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(receiver.recv(), 0.01)
        given_up = asyncio.ensure_future(receiver.recv().as_asyncio())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sender.count.call_one(port, 3).get(timeout=BOUND)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        return [await receiver.recv() for _ in range(3)]

    assert asyncio.run(asyncio.wait_for(receive(), BOUND)) == [0, 1, 2]


def test_waiting_for_several_futures_keeps_the_order(shared: loom.Job, sender: Any) -> None:
    port, receiver = shared.channel()
    futures = [receiver.recv() for _ in range(5)]
    nothing = loom.wait(futures, timeout=0.01)
    assert not nothing.done
    sender.count.broadcast(port, 6)
    assert loom.wait(futures, timeout=BOUND).done == set(futures)
    assert [future.get(timeout=BOUND) for future in futures] == list(range(5))
    assert take(receiver, 1) == [5]


def test_futures_can_be_waited_for_before_anything_comes(shared: loom.Job, sender: Any) -> None:
    port, receiver = shared.channel()

    async def receive() -> list[Any]:
        waiting = [receiver.recv().as_asyncio() for _ in range(200)]
        await asyncio.sleep(0)
        sender.count.broadcast(port, 200)
        return await asyncio.gather(*waiting)

    assert asyncio.run(asyncio.wait_for(receive(), BOUND)) == list(range(200))


def test_many_threads_share_a_receiver(shared: loom.Job, sender: Any) -> None:
    port, receiver = shared.channel()
    taken: list[int] = []

    def receive() -> None:
        for _ in range(100):
            taken.append(receiver.recv().get(timeout=BOUND))

    threads = [threading.Thread(target=receive) for _ in range(4)]
    for thread in threads:
        thread.start()
    sender.count.call_one(port, 400).get(timeout=BOUND)
    for thread in threads:
        thread.join(BOUND)
    assert sorted(taken) == list(range(400))


def test_a_callback_takes_a_message(shared: loom.Job, sender: Any) -> None:
    port, receiver = shared.channel()
    got: list[Any] = []
    called = threading.Event()
    receiver.recv().add_done_callback(lambda future: (got.append(future.get()), called.set()))
    assert not receiver.recv().done()
    sender.send.call_one(port, 1).get(timeout=BOUND)
    assert called.wait(BOUND)
    assert got == [1]


def test_a_receiver_is_an_iterator_until_it_is_closed(shared: loom.Job, sender: Any) -> None:
    port, receiver = shared.channel()
    sender.count.call_one(port, 3).get(timeout=BOUND)
    got = []
    for number in receiver:
        got.append(number)
        if number == 2:
            receiver.close()
    assert got == [0, 1, 2]

    port, again = shared.channel()

    async def iterate() -> list[Any]:
        found = []
        async for number in again:
            found.append(number)
            if number == 2:
                again.close()
        return found

    sender.count.call_one(port, 3).get(timeout=BOUND)
    assert asyncio.run(asyncio.wait_for(iterate(), BOUND)) == [0, 1, 2]


# -- ports --------------------------------------------------------------------------------------------------


def test_a_port_can_be_sent_to_from_here(shared: loom.Job) -> None:
    port, receiver = shared.channel()
    port.send([1, 2])
    port.exception(BadLuck("sent from here", 3))
    port.send("after it")
    assert receiver.recv().get(timeout=BOUND) == [1, 2]
    with pytest.raises(BadLuck, match="sent from here") as raised:
        receiver.recv().get(timeout=BOUND)
    assert raised.value.number == 3
    assert receiver.recv().get(timeout=BOUND) == "after it"


def test_an_actors_exception_is_raised_by_recv_and_kills_nobody(shared: loom.Job, sender: Any) -> None:
    port, receiver = shared.channel()
    sender.send_exception.call_one(port, "on purpose").get(timeout=BOUND)
    sender.send_strange_exception.call_one(port, os.getpid()).get(timeout=BOUND)
    sender.send.call_one(port, "alive").get(timeout=BOUND)
    with pytest.raises(BadLuck, match="on purpose") as raised:
        receiver.recv().get(timeout=BOUND)
    assert raised.value.number == 7
    with pytest.raises(loom.RemoteException, match="NeedsCluster"):
        receiver.recv().get(timeout=BOUND)
    assert receiver.recv().get(timeout=BOUND) == "alive"


def test_a_message_that_cannot_travel_on_is_an_error_in_its_place(shared: loom.Job, sender: Any) -> None:
    port, receiver = shared.channel()
    sender.send.call_one(port, 1).get(timeout=BOUND)
    sender.send_unpicklable.call_one(port).get(timeout=BOUND)
    sender.send.call_one(port, 2).get(timeout=BOUND)
    assert receiver.recv().get(timeout=BOUND) == 1
    with pytest.raises(loom.UnpicklableError, match="a message to a port"):
        receiver.recv().get(timeout=BOUND)
    assert receiver.recv().get(timeout=BOUND) == 2


def test_ports_go_to_constructors_to_runs_and_on_to_other_actors(shared: loom.Job, senders: Any) -> None:
    port, receiver = shared.channel()
    owners = shared.hosts.spawn_procs(name="owners").spawn("owners", Sender, port)
    owners.slice(hosts=0).send_to_its_own.call_one("from a constructor").get(timeout=BOUND)
    assert receiver.recv().get(timeout=BOUND) == "from a constructor"
    shared.run(lambda port: port.send("from a run"), port)
    assert receiver.recv().get(timeout=BOUND) == "from a run"
    first, second = senders.slice(hosts=0, gpus=0), senders.slice(hosts=1, gpus=0)
    first.pass_on.call_one(port, second, "passed on").get(timeout=BOUND)
    assert receiver.recv().get(timeout=BOUND) == "passed on"


def test_an_actor_opens_channels_of_its_own(sender: Any) -> None:
    assert sender.own_channel.call_one().get(timeout=BOUND) == 6


def test_a_port_for_one_message(shared: loom.Job, sender: Any) -> None:
    port, receiver = loom.Channel[int].open(once=True, job=shared)
    sender.send.call_one(port, 1).get(timeout=BOUND)
    assert receiver.recv().get(timeout=BOUND) == 1
    with pytest.raises(ValueError, match="received already"):
        receiver.recv().get(timeout=BOUND)

    port, receiver = shared.channel(once=True)
    port.send("here")
    with pytest.raises(loom.OncePortUsed, match="sent already"):
        port.send("twice")
    assert receiver.recv().get(timeout=BOUND) == "here"


def test_more_ports_than_there_are_threads_for(shared: loom.Job, sender: Any) -> None:
    channels = [shared.channel() for _ in range(80)]
    for number, (port, _) in enumerate(channels):
        sender.count.broadcast(port, number % 3 + 1)
    for number, (_, receiver) in enumerate(channels):
        assert take(receiver, number % 3 + 1) == list(range(number % 3 + 1))


def test_ranked_messages_say_who_replied(shared: loom.Job, senders: Any, sender: Any) -> None:
    port, receiver = loom.Channel[Any].open_ranked(job=shared)
    loom.send(senders.kind, (port,), {}, port)
    assert sorted(take(receiver, 2)) == [(0, True), (1, True)]
    sender.send.call_one(port, "no rank").get(timeout=BOUND)
    with pytest.raises(ValueError, match="without a rank"):
        receiver.recv().get(timeout=BOUND)


# -- the end of ports ---------------------------------------------------------------------------------------


def _port_threads_end(left: int) -> bool:
    """In the driver: wait until all but ``left`` of the threads that read ports have ended."""
    for _ in range(600):
        alive = [thread for thread in threading.enumerate() if thread.name == "port"]
        if len(alive) <= left:
            return True
        alive[-1].join(0.05)
    return False


def _port_threads() -> int:
    return sum(thread.name == "port" for thread in threading.enumerate())


def test_a_receiver_that_is_closed_or_garbage_is_closed_in_the_driver(job: loom.Job) -> None:
    channels = [job.channel() for _ in range(3)]
    assert job.run(_port_threads) == 3
    channels[0][1].close()
    assert job.run(_port_threads_end, 2)
    port = channels[1][0]
    del channels
    gc.collect()
    job.channel()  # collected receivers are told with the next chance
    assert job.run(_port_threads_end, 1)
    sender = job.hosts.spawn_procs().spawn("senders", Sender).slice(hosts=0)
    sender.send.call_one(port, "nobody hears").get(timeout=BOUND)
    assert sender.kind.call_one(port).get(timeout=BOUND)


def test_a_closed_receiver_says_so(job: loom.Job) -> None:
    port, receiver = job.channel()
    port.send(1)
    waiting = receiver.recv()
    assert waiting.get(timeout=BOUND) == 1
    pending = receiver.recv()
    assert not pending.done()
    receiver.close()
    for future in (pending, receiver.recv()):
        with pytest.raises(loom.PortClosed):
            future.get(timeout=BOUND)
    receiver.close()


@pytest.mark.slow
def test_a_detached_clients_ports_take_no_memory(cluster: LocalCluster) -> None:
    first = loom.connect(cluster.url, cluster.token)
    port, receiver = first.channel()
    senders = first.hosts.spawn_procs().spawn("senders", Sender, port)
    waiting = receiver.recv()
    assert not waiting.done()
    first.detach()
    with pytest.raises(loom.SessionClosed):
        waiting.get(timeout=BOUND)
    with pytest.raises(loom.SessionClosed):
        port.send(1)
    assert len(senders) == 2
    with attach(cluster, first.session) as again:
        assert again.run(_port_threads_end, 0)
        senders = again.meshes["senders"]
        senders.send_to_its_own.call("nobody hears").get(timeout=BOUND)


# -- bad input ----------------------------------------------------------------------------------------------


def test_a_channel_needs_one_open_job(
    cluster: LocalCluster, shared: loom.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    import weakref

    monkeypatch.setattr(receiving_end, "open_jobs", weakref.WeakSet())
    with pytest.raises(loom.NoOpenJob, match=r"loom\.connect"):
        loom.Channel[int].open()
    receiving_end.open_jobs.add(shared)
    port, receiver = loom.Channel[int].open()
    port.send(1)
    assert receiver.recv().get(timeout=BOUND) == 1
    with loom.connect(cluster.url, cluster.token) as other:
        receiving_end.open_jobs.add(other)
        with pytest.raises(loom.NoOpenJob, match=other.session):
            loom.Channel[int].open()
    loom.Channel[int].open()
    with pytest.raises(loom.SessionClosed):
        loom.Channel[int].open(job=other)


def test_a_port_stays_in_its_session(job: loom.Job, shared: loom.Job, sender: Any) -> None:
    import pickle

    port, _ = job.channel()
    with pytest.raises(loom.NoSuchMesh, match="belongs to session"):
        sender.send.call_one(port, 1)
    with pytest.raises(loom.NoSuchMesh, match="belongs to session"):
        loom.send(sender.send, (1, 2), {}, port)
    with pytest.raises(loom.UnpicklableError, match="its own session"):
        pickle.dumps(port)


def test_what_cannot_be_sent(shared: loom.Job) -> None:
    port, receiver = shared.channel()
    with pytest.raises(loom.UnpicklableError, match="what is sent to the port"):
        port.send(threading.Lock())
    with pytest.raises(loom.WrongArguments, match="sends an exception"):
        port.exception("no exception")  # type: ignore[arg-type]
    port.send("still works")
    assert receiver.recv().get(timeout=BOUND) == "still works"


def test_a_dead_connection_ends_receivers_after_what_has_come(own_cluster: LocalCluster) -> None:
    job = loom.connect(own_cluster.url, own_cluster.token, reconnect_timeout=1.0)
    port, receiver = job.channel()
    counter = job.hosts.spawn_procs().spawn("counters", Counter).slice(hosts=0)
    for number in range(3):
        port.send(number)
    assert receiver.recv().get(timeout=BOUND) == 0
    assert counter.add.call_one(1).get(timeout=BOUND) == 1
    first = receiver.recv()
    assert first.get(timeout=BOUND) == 1
    own_cluster.close()
    assert job._connection.ended.wait(BOUND)
    assert receiver.recv().get(timeout=BOUND) == 2
    with pytest.raises(loom.LoomError):
        receiver.recv().get(timeout=BOUND)
