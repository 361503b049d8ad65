"""Monarch's other ways to send: `send`, `as_endpoint`, `Accumulator`, explicit ports, concurrent endpoints."""

from __future__ import annotations

import asyncio
import operator
from typing import Any

import pytest

import loom
import loom.actor
from loom import Actor, concurrent_endpoint, current_rank, endpoint
from loom.signatures import endpoints
from tests.support.actors import BadLuck, Counter
from tests.support.standard_exceptions import instance
from tests.unit.loom.test_signatures import stand_ins

BOUND = 30.0


class Replier(Actor):
    """Replies through the ports that it is given."""

    @endpoint(explicit_response_port=True)
    def answer(self, port: Any, value: Any, *, times: int = 1) -> None:
        for _ in range(times):
            port.send((current_rank().rank, value))

    @endpoint(explicit_response_port=True)
    def refuse(self, port: Any, text: str) -> None:
        port.exception(BadLuck(text, 3))

    @endpoint(explicit_response_port=True)
    def refuse_with(self, port: Any, name: str) -> None:
        port.exception(instance(name))

    @endpoint(explicit_response_port=True)
    def keep(self, port: Any) -> None:
        self.kept = port

    @endpoint
    def reply_now(self, value: Any) -> None:
        self.kept.send(value)

    @endpoint
    def rank(self) -> int:
        return int(current_rank().rank)

    @endpoint
    def fail(self, text: str) -> None:
        raise BadLuck(text, 4)

    @endpoint
    def fail_on(self, rank: int) -> int:
        if current_rank().rank == rank:
            raise BadLuck("this one", rank)
        return 1

    limit = 3

    def plain(self, a: int, b: int = 1) -> int:
        return a + b

    def plain_failing(self) -> None:
        raise BadLuck("plain", 5)

    def plain_with_port(self, port: Any, value: Any) -> None:
        port.send(("through the port", value))

    @staticmethod
    def static(a: int) -> int:
        return -a


class Concurrent(Actor):
    """Handles messages while others wait."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    @concurrent_endpoint
    async def wait(self, value: int) -> int:
        await self.open.wait()
        return value

    @concurrent_endpoint(explicit_response_port=True)
    async def wait_with_port(self, port: Any, value: int) -> None:
        await self.open.wait()
        port.send(value)

    @concurrent_endpoint
    async def fail(self) -> None:
        raise BadLuck("concurrently", 6)

    @endpoint
    async def let_go(self) -> None:
        self.open.set()


@pytest.fixture(scope="module")
def repliers(shared: loom.Job) -> Any:
    return shared.hosts.spawn_procs(per_host={"gpus": 1}, name="repliers").spawn("repliers", Replier)


@pytest.fixture(scope="module")
def replier(repliers: Any) -> Any:
    return repliers.slice(hosts=1, gpus=0)


def take(receiver: Any, count: int) -> list[Any]:
    return [receiver.recv().get(timeout=BOUND) for _ in range(count)]


# -- explicit response ports --------------------------------------------------------------------------------


def test_every_adverb_takes_replies_from_an_explicit_port(repliers: Any, replier: Any) -> None:
    assert list(repliers.answer.call("a").get(timeout=BOUND).values()) == [(0, "a"), (1, "a")]
    assert replier.answer.call_one("b").get(timeout=BOUND) == (0, "b")  # of the one that was called
    assert repliers.answer.choose("c").get(timeout=BOUND) in [(0, "c"), (1, "c")]
    assert sorted(future.get(timeout=BOUND) for future in repliers.answer.stream("d")) == [(0, "d"), (1, "d")]
    repliers.answer.broadcast("e")
    assert replier.answer.call_one("f").get(timeout=BOUND) == (0, "f")


def test_an_exception_through_the_port_fails_the_call_and_not_the_actor(repliers: Any, replier: Any) -> None:
    for future in (replier.refuse.call_one("no"), repliers.refuse.call("no"), repliers.refuse.choose("no")):
        with pytest.raises(Exception, match="no") as raised:
            future.get(timeout=BOUND)
        assert isinstance(raised.value, (BadLuck, loom.LoomError))
    assert replier.rank.call_one().get(timeout=BOUND) == 0


@pytest.mark.parametrize("name", ["ValueError", "KeyError", "StopIteration", "UnicodeDecodeError", "TimeoutError"])
def test_a_built_in_exception_that_is_sent_to_the_response_port_arrives_as_itself(replier: Any, name: str) -> None:
    sent = instance(f"builtins:{name}")

    with pytest.raises(type(sent)) as raised:
        replier.refuse_with.call_one(f"builtins:{name}").get(timeout=BOUND)

    assert type(raised.value) is type(sent)
    assert (str(raised.value), vars(raised.value)) == (str(sent), vars(sent))


def test_a_reply_may_come_after_the_endpoint_has_returned(replier: Any) -> None:
    kept = replier.keep.call_one()
    replier.reply_now.call_one("later").get(timeout=BOUND)
    assert kept.get(timeout=BOUND) == "later"


def test_the_port_is_no_argument_of_the_caller(replier: Any) -> None:
    for args, kwargs in (((), {}), ((1, 2), {}), ((1,), {"port": 1}), ((1,), {"time": 2})):
        with pytest.raises(loom.WrongArguments, match=r"Replier\.answer\(value, \*, times=\.\.\.\)"):
            replier.answer.call_one(*args, **kwargs)
        with pytest.raises(loom.WrongArguments):
            loom.send(replier.answer, args, kwargs)


# -- send ---------------------------------------------------------------------------------------------------


def test_send_to_all_and_to_one(shared: loom.Job, repliers: Any) -> None:
    port, receiver = shared.channel()
    loom.send(repliers.rank, (), {}, port)
    assert sorted(take(receiver, 2)) == [0, 1]
    loom.send(repliers.rank, (), {}, port, selection="choose")
    assert take(receiver, 1)[0] in (0, 1)
    port.send("nothing more")
    assert take(receiver, 1) == ["nothing more"]


def test_an_explicit_port_takes_several_replies(shared: loom.Job, repliers: Any) -> None:
    port, receiver = shared.channel()
    loom.send(repliers.answer, ("x",), {"times": 3}, port=port)
    assert sorted(take(receiver, 6)) == [(0, "x")] * 3 + [(1, "x")] * 3


def test_what_an_endpoint_raises_goes_to_the_port(shared: loom.Job, replier: Any) -> None:
    port, receiver = shared.channel()
    loom.send(replier.fail, ("to the port",), {}, port)
    with pytest.raises(loom.ActorError, match="to the port") as raised:
        receiver.recv().get(timeout=BOUND)
    assert isinstance(raised.value.exception, BadLuck)
    assert replier.rank.call_one().get(timeout=BOUND) == 0


def test_send_without_a_port_is_a_broadcast(job: loom.Job) -> None:
    counters = job.hosts.spawn_procs().spawn("counters", Counter)
    loom.send(counters.add, (2,), {})
    assert list(counters.add.call(1).get(timeout=BOUND).values()) == [3, 3]
    loom.send(counters.slice(hosts=0).fail, ("it dies",), {})
    with pytest.raises(loom.SupervisionError):
        counters.slice(hosts=0).value.call_one().get(timeout=BOUND)
    assert counters.slice(hosts=1).value.call_one().get(timeout=BOUND) == 3


def test_sends_and_calls_to_an_actor_keep_their_order(shared: loom.Job) -> None:
    counter = shared.hosts.spawn_procs().spawn("ordered", Counter).slice(hosts=0)
    port, receiver = shared.channel()
    expected = []
    futures = []
    for number in range(100):
        if number % 2:
            loom.send(counter.add, (1,), {}, port)
            expected.append(number + 1)
        else:
            futures.append((counter.add.call_one(1), number + 1))
    assert take(receiver, 50) == expected
    assert all(future.get(timeout=BOUND) == number for future, number in futures)


@pytest.mark.parametrize("selection", ["some", "", 1, None])
def test_send_to_an_unknown_selection(replier: Any, selection: Any) -> None:
    with pytest.raises(loom.UnknownSelection, match="'all' or 'choose'"):
        loom.send(replier.rank, (), {}, selection=selection)


def test_send_takes_endpoints_and_ports(replier: Any) -> None:
    with pytest.raises(loom.WrongArguments, match="takes an endpoint"):
        loom.send(replier.plain, (1,), {})
    with pytest.raises(loom.WrongArguments, match="takes a Port"):
        loom.send(replier.rank, (), {}, port="here")  # type: ignore[arg-type]


# -- as_endpoint --------------------------------------------------------------------------------------------


def test_a_method_is_called_as_an_endpoint(shared: loom.Job, repliers: Any, replier: Any) -> None:
    plain = loom.as_endpoint(repliers.plain)
    assert list(plain.call(1).get(timeout=BOUND).values()) == [2, 2]
    assert plain.choose(1, b=2).get(timeout=BOUND) == 3
    assert [future.get(timeout=BOUND) for future in plain.stream(3)] == [4, 4]
    plain.broadcast(1)
    assert loom.as_endpoint(replier.plain).call_one(5, 5).get(timeout=BOUND) == 10
    assert loom.as_endpoint(replier.static).call_one(5).get(timeout=BOUND) == -5
    port, receiver = shared.channel()
    loom.send(plain, (7,), {}, port)
    assert take(receiver, 2) == [8, 8]


def test_a_method_that_replies_through_a_port(replier: Any) -> None:
    with_port = loom.as_endpoint(replier.plain_with_port, explicit_response_port=True)
    assert with_port.call_one(1).get(timeout=BOUND) == ("through the port", 1)
    with pytest.raises(loom.WrongArguments, match=r"plain_with_port\(value\)"):
        with_port.call_one(1, 2)


def test_a_methods_arguments_and_exceptions(replier: Any) -> None:
    with pytest.raises(loom.WrongArguments, match=r"Replier\.plain\(a, b=\.\.\.\)"):
        loom.as_endpoint(replier.plain).call_one()
    with pytest.raises(loom.ActorError, match="plain_failing") as raised:
        loom.as_endpoint(replier.plain_failing).call_one().get(timeout=BOUND)
    assert isinstance(raised.value.exception, BadLuck)


def test_a_method_that_is_no_endpoint_says_so(replier: Any) -> None:
    with pytest.raises(RuntimeError, match="add a @endpoint decorator"):
        replier.plain(1)
    with pytest.raises(loom.EndpointNotFound, match=r"loom\.as_endpoint\(mesh\.plain\)"):
        replier.plain.call_one(1)
    with pytest.raises(loom.EndpointNotFound, match="has no endpoint 'unheard'"):
        replier.unheard.call_one(1)
    for wrong in (replier.rank, replier, "plain", None):
        with pytest.raises(loom.WrongArguments, match="expected an method of a spawned actor"):
            loom.as_endpoint(wrong)


# -- Accumulator --------------------------------------------------------------------------------------------


def test_accumulate(repliers: Any) -> None:
    assert loom.Accumulator(repliers.rank, 10, operator.add).accumulate().get(timeout=BOUND) == 11
    assert asyncio.run(_awaited(loom.Accumulator(repliers.fail_on, [], _append).accumulate(7))) == [1, 1]
    folded = loom.Accumulator(loom.as_endpoint(repliers.plain), 0, operator.add).accumulate(1, b=2)
    assert folded.result(timeout=BOUND) == folded.get() == 6


def _append(values: list[int], value: int) -> list[int]:
    return [*values, value]


async def _awaited(future: Any) -> Any:
    return await asyncio.wait_for(future, BOUND)


def test_an_error_is_the_outcome_of_accumulate(repliers: Any) -> None:
    with pytest.raises(loom.ActorError, match="this one"):
        loom.Accumulator(repliers.fail_on, 0, operator.add).accumulate(1).get(timeout=BOUND)
    with pytest.raises(TypeError, match="unsupported operand"):
        loom.Accumulator(repliers.rank, "", operator.sub).accumulate().get(timeout=BOUND)
    with pytest.raises(loom.WrongArguments, match="fail_on"):
        loom.Accumulator(repliers.fail_on, 0, operator.add).accumulate()
    with pytest.raises(loom.WrongArguments, match="takes an endpoint"):
        loom.Accumulator(repliers.plain, 0, operator.add).accumulate(1)


# -- concurrent endpoints -----------------------------------------------------------------------------------


def test_a_concurrent_endpoint_does_not_hold_up_the_next_message(shared: loom.Job) -> None:
    actor = shared.hosts.spawn_procs().spawn("concurrent", Concurrent).slice(hosts=0)
    waiting = [actor.wait.call_one(number) for number in range(5)]
    with_port = actor.wait_with_port.call_one(5)
    with pytest.raises(loom.ActorError, match="concurrently"):
        actor.fail.call_one().get(timeout=BOUND)
    assert not any(future.done() for future in waiting)
    actor.let_go.call_one().get(timeout=BOUND)
    assert [future.get(timeout=BOUND) for future in (*waiting, with_port)] == list(range(6))
    with pytest.raises(loom.WrongArguments, match=r"Concurrent\.wait\(value\)"):
        actor.wait.call_one()


def test_a_concurrent_endpoint_is_async() -> None:
    with pytest.raises(ValueError, match="async"):

        @concurrent_endpoint
        def synchronous(self: Any) -> None: ...

    async def asynchronous(self: Any) -> None: ...

    with pytest.raises(ValueError, match="does not wrap"):
        concurrent_endpoint(endpoint(asynchronous))


@pytest.mark.parametrize("explicit", [False, True])
def test_stand_ins_become_monarchs_concurrent_endpoints(explicit: bool) -> None:
    kit = stand_ins()

    class Laptops(kit.Actor):  # type: ignore[misc, name-defined]
        if explicit:

            @kit.concurrent_endpoint(explicit_response_port=True)  # type: ignore[untyped-decorator]
            async def work(self, port: Any, amount: int) -> None: ...

        else:

            @kit.concurrent_endpoint  # type: ignore[untyped-decorator]
            async def work(self, amount: int) -> None: ...

    assert str(endpoints(Laptops)["work"]) == "Laptops.work(amount)"
    rebuild, options = Laptops.__dict__["work"].__reduce__()
    rebuilt = getattr(loom.actor, rebuild.__name__)(*options)
    assert type(rebuilt) is type(Concurrent.__dict__["wait"])
    with pytest.raises(ValueError, match="async"):
        kit.concurrent_endpoint(lambda self: None)
    with pytest.raises(ValueError, match="does not wrap"):
        kit.concurrent_endpoint(kit.endpoint(lambda self: None))


def _replies_once(concurrent: Any, repliers: Any) -> list[bool]:
    from loom_gateway.driver.monarch.reply_channels import replies_once

    return [replies_once(one) for one in (concurrent.let_go, concurrent.wait, repliers.rank, repliers.answer)]


def test_explicit_and_concurrent_endpoints_do_not_use_reply_channels(shared: loom.Job, repliers: Any) -> None:
    concurrent = shared.hosts.spawn_procs().spawn("concurrent", Concurrent)
    assert shared.run(_replies_once, concurrent, repliers) == [True, False, True, False]


# -- inside the cluster -------------------------------------------------------------------------------------


def _in_the_driver(repliers: Any) -> list[Any]:
    port, receiver = loom.Channel[Any].open()
    loom.send(repliers.rank, (), {}, port)
    ranks = sorted(receiver.recv().get() for _ in range(2))
    plain = list(loom.as_endpoint(repliers.plain).call(1).get().values())
    return [ranks, plain, loom.Accumulator(repliers.rank, 0, operator.add).accumulate().get()]


def test_the_same_names_are_monarchs_in_the_cluster(shared: loom.Job, repliers: Any) -> None:
    assert shared.run(_in_the_driver, repliers) == [[0, 1], [2, 2], 1]


def test_rref_says_what_it_needs(replier: Any) -> None:
    with pytest.raises(loom.NotSupported, match="tensor engine"):
        replier.rank.rref()
