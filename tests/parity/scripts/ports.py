"""Ports, and the ways to send that use them."""

from __future__ import annotations

import asyncio
import operator
from typing import Any

from tests.parity.actors import Concurrent, Counter, Note, Porter


def _one(api: Any, cls: type = Porter) -> Any:
    return api.spawn(cls).slice(hosts=1, gpus=0)


def _take(receiver: Any, count: int) -> list[Any]:
    return [receiver.recv().get(timeout=30) for _ in range(count)]


def a_port_as_an_argument(hosts: Any, api: Any) -> Any:
    one = _one(api)
    port, receiver = api.Channel.open()
    sent = [0, "one", (2, [3]), None, {"four": 4}]
    count = one.send_to.call_one(port, sent).get(timeout=30)
    return count, _take(receiver, 5), isinstance(port, api.Port), isinstance(receiver, api.PortReceiver)


def thousands_of_messages_in_order(hosts: Any, api: Any) -> Any:
    one = _one(api)
    port, receiver = api.Channel.open()
    one.send_to.broadcast(port, list(range(3000)))
    return _take(receiver, 3000) == list(range(3000))


def a_port_of_many_senders(hosts: Any, api: Any) -> Any:
    porters = api.spawn(Porter)
    port, receiver = api.Channel.open()
    porters.send_to.call(port, [1, 2, 3]).get(timeout=30)
    return sorted(_take(receiver, 12))


def sending_to_an_own_port(hosts: Any, api: Any) -> Any:
    port, receiver = api.Channel.open()
    for number in range(5):
        port.send(number)
    return _take(receiver, 5)


def an_exception_to_a_port(hosts: Any, api: Any) -> Any:
    one = _one(api)
    port, receiver = api.Channel.open()
    one.send_to.call_one(port, ["before"]).get(timeout=30)
    one.fail_to.call_one(port, "to the port").get(timeout=30)
    one.send_to.call_one(port, ["after"]).get(timeout=30)
    first = receiver.recv().get(timeout=30)
    error = api.raised(lambda: receiver.recv().get(timeout=30))
    return first, error, receiver.recv().get(timeout=30), one.rank.call_one().get(timeout=30)


def a_timeout_of_recv_takes_no_message(hosts: Any, api: Any) -> Any:
    one = _one(api)
    port, receiver = api.Channel.open()
    future = receiver.recv()
    error = api.raised(lambda: future.get(timeout=0.05))
    one.send_to.call_one(port, ["late"]).get(timeout=30)
    return error, future.get(timeout=30)


def recv_awaited(hosts: Any, api: Any) -> Any:
    one = _one(api)
    port, receiver = api.Channel.open()
    one.send_to.broadcast(port, [1, 2, 3])

    async def main() -> Any:
        return [await receiver.recv() for _ in range(3)]

    return asyncio.run(main())


def a_port_for_one_message(hosts: Any, api: Any) -> Any:
    one = _one(api)
    port, receiver = api.Channel.open(once=True)
    one.send_to.call_one(port, ["only"]).get(timeout=30)
    return receiver.recv().get(timeout=30)


def a_port_in_a_constructor(hosts: Any, api: Any) -> Any:
    port, receiver = api.Channel.open()
    porter = api.procs.slice(hosts=0, gpus=0).spawn("porter", Porter, port)
    porter.let_go.call_one("from the constructor's").get(timeout=30)
    return receiver.recv().get(timeout=30)


def ranked_messages(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 2)
    port, receiver = api.Channel.open()
    api.send(counters.value, (), {}, port)
    return sorted(receiver.ranked().recv().get(timeout=30) for _ in range(4))


def explicit_response_ports(hosts: Any, api: Any) -> Any:
    porters = api.spawn(Porter)
    one = porters.slice(hosts=1, gpus=0)
    return [
        porters.answer.call("a").get(timeout=30),
        one.answer.call_one("b").get(timeout=30),
        one.answer.choose("c").get(timeout=30),
        sorted(future.get(timeout=30) for future in porters.answer.stream("d")),
        api.raised(lambda: one.refuse.call_one("no").get(timeout=30)),
        api.raised(lambda: one.answer.call_one()),
        api.raised(lambda: one.answer.call_one(1, 2)),
        one.rank.call_one().get(timeout=30),
    ]


def a_reply_that_is_deferred(hosts: Any, api: Any) -> Any:
    one = _one(api)
    future = one.answer_later.call_one()
    error = api.raised(lambda: future.get(timeout=0.05))
    one.let_go.call_one("later").get(timeout=30)
    return error, future.get(timeout=30)


def send(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 10)
    port, receiver = api.Channel.open()
    returned = api.send(counters.add, (5,), {}, port)
    replies = sorted(_take(receiver, 4))
    api.send(counters.add, (), {"k": 1})
    api.send(counters.slice(hosts=0, gpus=0).add, (100,), {}, port, "choose")
    return [
        returned,
        replies,
        receiver.recv().get(timeout=30),
        counters.value.call().get(timeout=30),
        api.raised(lambda: api.send(counters.add, (), {}, port)),
    ]


def send_and_an_exception(hosts: Any, api: Any) -> Any:
    one = _one(api, Counter)
    port, receiver = api.Channel.open()
    api.send(one.fail_at, (0,), {}, port)
    return api.raised(lambda: receiver.recv().get(timeout=30)), one.value.call_one().get(timeout=30)


def send_keeps_its_place(hosts: Any, api: Any) -> Any:
    one = _one(api, Note)
    one.write.broadcast(1)
    api.send(one.write, (2,), {})
    one.write.call_one(3)
    api.send(one.write, (4,), {}, api.Channel.open()[0])
    return one.read.call_one().get(timeout=30)


def methods_as_endpoints(hosts: Any, api: Any) -> Any:
    porters = api.spawn(Porter)
    one = porters.slice(hosts=1, gpus=0)
    plain = api.as_endpoint(porters.plain)
    return [
        plain.call(1).get(timeout=30),
        api.as_endpoint(one.plain).call_one(1, b=5).get(timeout=30),
        api.as_endpoint(one.plain).choose(2).get(timeout=30),
        api.as_endpoint(one.plain_with_port, explicit_response_port=True).call_one("x").get(timeout=30),
    ]


def methods_that_are_no_endpoints(hosts: Any, api: Any) -> Any:
    one = _one(api)
    return [
        api.raised(lambda: one.plain(1)),
        api.raised(lambda: one.plain.call_one(1)),
        api.raised(lambda: api.as_endpoint(one.rank)),
        api.raised(lambda: api.as_endpoint(len)),
        api.raised(lambda: one.no_such_method),
    ]


def accumulator(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 2)
    total = api.Accumulator(counters.add, 0, operator.add)
    future = total.accumulate(1)
    return future.get(timeout=30), future.get(), total.accumulate(k=1).get(timeout=30)


def accumulator_awaited(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 2)

    async def main() -> Any:
        return await api.Accumulator(counters.add, [], lambda found, value: [*found, value]).accumulate(1)

    return asyncio.run(main())


def accumulator_and_an_exception(hosts: Any, api: Any) -> Any:
    porters = api.spawn(Porter)
    total = api.Accumulator(porters.fail_on, 0, operator.add)
    return [
        api.raised(lambda: total.accumulate(2).get(timeout=30)),
        api.raised(lambda: total.accumulate()),
        total.accumulate(9).get(timeout=30),
    ]


def concurrent_endpoints(hosts: Any, api: Any) -> Any:
    one = _one(api, Concurrent)
    waiting = [one.wait.call_one(number) for number in range(3)]
    error = api.raised(lambda: one.fail.call_one().get(timeout=30))
    early = api.raised(lambda: waiting[2].get(timeout=0.05))
    one.let_go.call_one().get(timeout=30)
    return error, early, [future.get(timeout=30) for future in waiting]


def actors_have_channels_of_their_own(hosts: Any, api: Any) -> Any:
    return _one(api).own_channel.call_one(5).get(timeout=30)
