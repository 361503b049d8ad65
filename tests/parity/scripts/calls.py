"""The adverbs."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from tests.parity.actors import AsyncCounter, Counter, Gate, Note


def call(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 10)
    return [counters.add.call(1).get(timeout=30), counters.add.call(k=2).get(timeout=30)]


def call_on_a_slice(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 10)
    part = counters.slice(gpus=1)
    return part.add.call(5).get(timeout=30), counters.value.call().get(timeout=30)


def call_one(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 10)
    one = counters.slice(hosts=1, gpus=0)
    return [
        one.add.call_one(5).get(timeout=30),
        one.nothing.call_one().get(timeout=30),
        one.add.call(5).get(timeout=30),
        counters.value.call().get(timeout=30),
    ]


def call_one_on_many(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 10)
    return [
        api.raised(lambda: counters.add.call_one(1).get(timeout=30)),
        api.raised(lambda: counters.slice(hosts=0).add.call_one(1).get(timeout=30)),
        counters.value.call().get(timeout=30),
    ]


def choose(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 0)
    chosen = [counters.add.choose(1).get(timeout=30) for _ in range(40)]
    values = counters.value.call().get(timeout=30)
    everybody_was_chosen = all(value > 0 for value in values.values())
    return len(chosen), sum(values.values()), everybody_was_chosen


def choose_of_one_is_that_one(hosts: Any, api: Any) -> Any:
    one = api.spawn(Counter, 0).slice(hosts=1, gpus=1)
    return [one.add.choose(1).get(timeout=30) for _ in range(3)]


def broadcast(hosts: Any, api: Any) -> Any:
    notes = api.spawn(Note)
    returned = [notes.write.broadcast(line) for line in range(20)]
    notes.slice(hosts=1).write.broadcast("second host")
    return returned, notes.read.call().get(timeout=30)


def adverbs_in_order(hosts: Any, api: Any) -> Any:
    notes = api.spawn(Note)
    one = notes.slice(hosts=0, gpus=1)
    futures = [notes.write.call(0), one.write.call_one(1)]
    notes.write.broadcast(2)
    futures += [one.write.choose(3), notes.write.call(4)]
    futures += list(one.write.stream(5))
    one.write.broadcast(6)
    lines = one.read.call_one().get(timeout=30)
    return (
        lines,
        notes.slice(hosts=1, gpus=0).read.call_one().get(timeout=30),
        [f.get(timeout=30) for f in futures[1:2]],
    )


def stream(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 3)
    futures = list(counters.add.stream(1))
    return len(futures), [future.get(timeout=30) for future in futures]


def stream_gives_results_as_they_come(hosts: Any, api: Any) -> Any:
    gates = api.spawn(Gate)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [os.path.join(folder, str(rank)) for rank in range(4)]
        for pipe in pipes:
            os.mkfifo(pipe)
        seen = []
        for rank, future in zip([2, 0, 3, 1], gates.wait.stream(pipes), strict=True):
            open(pipes[rank], "w").close()
            seen.append(future.get(timeout=30))
    return seen


def stream_of_one_is_an_iterator(hosts: Any, api: Any) -> Any:
    results = api.spawn(Counter, 3).slice(hosts=0, gpus=0).add.stream(1)
    first = next(results).get(timeout=30)
    return first, iter(results) is results, api.raised(lambda: next(results))


def stream_sends_without_being_read(hosts: Any, api: Any) -> Any:
    notes = api.spawn(Note)
    notes.write.stream("unread")
    return notes.read.call().get(timeout=30)


def stream_with_a_failure(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter)
    outcomes = []
    for future in counters.fail_at.stream(2):
        try:
            outcomes.append(repr(future.get(timeout=30)))
        except api.ActorError as error:
            outcomes.append(repr(error.exception))
    return sorted(outcomes)


def positional_keyword_and_default_arguments(hosts: Any, api: Any) -> Any:
    one = api.spawn(Counter, 0, step=2).slice(hosts=0, gpus=0)
    return [
        one.step_on.call_one().get(timeout=30),
        one.step_on.call_one(2).get(timeout=30),
        one.step_on.call_one(times=2).get(timeout=30),
        one.step_on.call_one(1, 2, 3, scale=10).get(timeout=30),
    ]


def wrong_arguments(hosts: Any, api: Any) -> Any:
    one = api.spawn(Counter, 0).slice(hosts=0, gpus=0)
    calls = [
        lambda: one.add.call_one(),
        lambda: one.add.call_one(1, 2),
        lambda: one.add.call_one(j=1),
        lambda: one.add.call_one(1, k=1),
        lambda: one.value.call(1),
        lambda: one.value.choose(1),
        lambda: one.value.broadcast(1),
        lambda: one.value.stream(1),
        lambda: one.step_on.call_one(factor=2),
    ]
    return [api.raised(do) for do in calls], one.value.call_one().get(timeout=30)


def attributes_that_an_actor_mesh_lacks(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter)
    return api.raised(lambda: counters.no_such_thing), api.raised(lambda: counters.no_such_thing.call(1))


def many_calls_on_the_way(hosts: Any, api: Any) -> Any:
    one = api.spawn(Counter, 0).slice(hosts=1, gpus=1)
    futures = [one.add.call_one(1) for _ in range(200)]
    return [future.get(timeout=30) for future in reversed(futures)]


def two_meshes_in_order(hosts: Any, api: Any) -> Any:
    first, second = api.spawn(Note), api.spawn(Note)
    for line in range(10):
        (first if line % 2 else second).write.broadcast(line)
    return first.read.call().get(timeout=30).item(hosts=0, gpus=0), second.read.call().get(timeout=30).get(3)


def async_actors(hosts: Any, api: Any) -> Any:
    counters = api.spawn(AsyncCounter, 5)
    one = counters.slice(hosts=0, gpus=0)
    futures = [one.add.call_one(1) for _ in range(5)]
    error = api.raised(lambda: one.fail.call_one().get(timeout=30))
    return counters.add.call(0).get(timeout=30), [future.get(timeout=30) for future in futures], error


def shared_objects_stay_shared(hosts: Any, api: Any) -> Any:
    one = api.spawn(Counter).slice(hosts=0, gpus=0)
    inner = [1]
    first, second = one.echo.call_one((inner, inner)).get(timeout=30)
    return first is second, one.echo.call_one(inner).get(timeout=30) is inner


def large_arguments_and_results(hosts: Any, api: Any) -> Any:
    one = api.spawn(Counter).slice(hosts=0, gpus=0)
    sent = bytes(range(256)) * 8192
    got = one.echo.call_one({"data": sent, "n": [1, sent]}).get(timeout=30)
    return type(got["data"]).__name__, got["data"] == sent, got["n"][1] == sent
