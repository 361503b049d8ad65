"""What actors know of themselves, and what they make."""

from __future__ import annotations

from typing import Any

from tests.parity.actors import AsyncCounter, Counter, Relay, Where


def rank_and_size(hosts: Any, api: Any) -> Any:
    where = api.spawn(Where)
    return where.rank.call().get(timeout=30), where.mesh_size.call().get(timeout=30)


def rank_in_a_slice(hosts: Any, api: Any) -> Any:
    part = api.spawn(Where).slice(hosts=1)
    return [
        part.rank.call().get(timeout=30),
        part.mesh_size.call().get(timeout=30),
        part.own_rank.call().get(timeout=30),
        part.slice(gpus=1).rank.call_one().get(timeout=30),
        part.slice(gpus=1).own_rank.call_one().get(timeout=30),
    ]


def rank_at_birth(hosts: Any, api: Any) -> Any:
    on_a_slice = api.procs.slice(gpus=1).spawn("where", Where)
    return api.spawn(Where).birth.call().get(timeout=30), on_a_slice.birth.call().get(timeout=30)


def rank_when_chosen(hosts: Any, api: Any) -> Any:
    return sorted(api.spawn(Where).slice(hosts=0, gpus=1).rank.choose().get(timeout=30))


def names(hosts: Any, api: Any) -> Any:
    where = api.procs.spawn("a_name", Where)
    return where.names.call().get(timeout=30), where.actor_name.call().get(timeout=30)


def creator(hosts: Any, api: Any) -> Any:
    return api.spawn(Where).creator.call().get(timeout=30)


def own_proc_and_host(hosts: Any, api: Any) -> Any:
    where = api.spawn(Where)
    return where.proc.call().get(timeout=30), where.proc_mesh.call().get(timeout=30)


def actors_call_actors(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 10)
    relay = api.spawn(Relay, counters.slice(hosts=0)).slice(hosts=1, gpus=0)
    return [
        relay.add_all.call_one(1).get(timeout=30),
        relay.add_to.call_one(counters.slice(gpus=0), 5).get(timeout=30),
        counters.value.call().get(timeout=30),
    ]


def async_actors_call_actors(hosts: Any, api: Any) -> Any:
    counters = api.spawn(AsyncCounter, 10)
    caller = api.spawn(AsyncCounter, 0).slice(hosts=0, gpus=0)
    return [
        caller.sum_of.call_one(counters, 1).get(timeout=30),
        caller.both.call_one(counters.slice(hosts=0, gpus=1), counters.slice(hosts=1, gpus=1)).get(timeout=30),
    ]


def meshes_as_arguments(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter)
    relay = api.spawn(Relay).slice(hosts=0, gpus=0)
    meshes = [counters, counters.slice(hosts=1), api.procs, api.procs.slice(gpus=0), hosts, hosts.slice(hosts=0)]
    meshes += [counters.flatten("rank"), counters.rename(gpus="devices"), api.procs.flatten("rank")]
    return [
        [relay.describe.call_one(mesh).get(timeout=30) for mesh in meshes],
        relay.describe_all.call_one({"meshes": meshes}).get(timeout=30),
    ]


def actors_spawn_actors(hosts: Any, api: Any) -> Any:
    relay = api.spawn(Relay).slice(hosts=1, gpus=1)
    return [
        relay.spawn_here.call_one(5).get(timeout=30),
        relay.spawn_on.call_one(api.procs.slice(hosts=0), 7).get(timeout=30),
    ]


def actors_spawn_procs(hosts: Any, api: Any) -> Any:
    return api.spawn(Relay).slice(hosts=1, gpus=1).spawn_procs_here.call_one(2).get(timeout=30)


def actors_give_meshes(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 10)
    relay = api.spawn(Relay, counters).slice(hosts=1, gpus=1)
    given = relay.give_slice.call_one(hosts=1).get(timeout=30)
    relay.spawn_on.call_one(api.procs.slice(hosts=0), 7).get(timeout=30)
    made = relay.give.call_one().get(timeout=30)
    return [
        given.sizes,
        given.add.call(5).get(timeout=30),
        given.slice(gpus=0).add.call_one(5).get(timeout=30),
        counters.value.call().get(timeout=30),
        made.add.call(1).get(timeout=30),
        relay.add_to.call_one(made, 1).get(timeout=30),
        made.slice(gpus=1).value.call_one().get(timeout=30),
    ]


def actors_give_procs(hosts: Any, api: Any) -> Any:
    procs = api.spawn(Relay).slice(hosts=1, gpus=1).give_procs.call_one().get(timeout=30)
    counters = procs.slice(hosts=1).spawn("on_given", Counter, 1)
    return procs.sizes, counters.add.call(1).get(timeout=30)


def controllers(hosts: Any, api: Any) -> Any:
    relays = api.spawn(Relay)
    first = relays.slice(hosts=0, gpus=0).controller.call_one("parity", 100).get(timeout=30)
    second = relays.slice(hosts=1, gpus=1).controller.call_one("parity", 500).get(timeout=30)
    made = relays.slice(hosts=1, gpus=1).give.call_one().get(timeout=30)
    return first, second, made.sizes, made.add.call_one(1).get(timeout=30)


def closures_travel(hosts: Any, api: Any) -> Any:
    factor = 3

    class Local(api.Actor):  # type: ignore[misc, name-defined]
        def __init__(self, base: int) -> None:
            self.base = base

        @api.endpoint
        def apply(self, function: Any, value: int) -> Any:
            return function(value) + self.base + factor

    local = api.procs.spawn("local", Local, 100)
    return local.apply.call(lambda value: value * factor, 5).get(timeout=30)


def inherited_endpoints(hosts: Any, api: Any) -> Any:
    class Doubling(Counter):
        @api.endpoint  # type: ignore[misc, untyped-decorator]
        def double(self) -> int:
            self.n *= 2
            return self.n

        @api.endpoint  # type: ignore[misc, untyped-decorator]
        def value(self) -> int:
            return -self.n

    doubling = api.procs.spawn("doubling", Doubling, 4).slice(hosts=0, gpus=0)
    return [
        doubling.add.call_one(1).get(timeout=30),
        doubling.double.call_one().get(timeout=30),
        doubling.value.call_one().get(timeout=30),
    ]


def state_is_the_actors_own(hosts: Any, api: Any) -> Any:
    first, second = api.spawn(Counter, 1), api.spawn(Counter, 1)
    first.slice(hosts=0, gpus=0).add.call_one(5).get(timeout=30)
    return first.value.call().get(timeout=30), second.value.call().get(timeout=30)


def actors_of_one_process_share_it(hosts: Any, api: Any) -> Any:
    first, second = api.spawn(Counter), api.spawn(Counter)
    pids, same = first.pid.call().get(timeout=30), second.pid.call().get(timeout=30)
    return len(set(pids.values())), list(pids.values()) == list(same.values())
