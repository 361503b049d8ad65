"""Meshes in results: what an actor or a function in the driver returns works on the laptop."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import loom
from loom import Actor, endpoint
from tests.support.actors import Counter

BOUND = 30.0


class Keeper(Actor):
    """Returns meshes: one that it was given, and those that it spawns."""

    def __init__(self, counters: Any) -> None:
        self.counters = counters

    @endpoint
    def held(self) -> Any:
        return self.counters

    @endpoint
    def held_part(self) -> Any:
        return self.counters.slice(hosts=1)

    @endpoint
    def several(self) -> dict[str, Any]:
        return {"counters": self.counters, "list": [self.counters.slice(gpus=0)], "number": 1}

    @endpoint
    def call_all(self) -> Any:
        return self.counters.add.call(1).get()

    @endpoint
    def where(self) -> Any:
        from monarch.actor import this_host, this_proc

        return this_host(), this_proc()

    @endpoint
    def children(self) -> Any:
        from monarch.actor import this_host

        return this_host().spawn_procs(per_host={"threads": 2}, name="nested").spawn("children", Counter, 100)


@pytest.fixture
def keeper(tidied: loom.Job, counters: Any) -> Any:
    return tidied.meshes["procs"].spawn("keepers", Keeper, counters).slice(hosts=0, gpus=0)


def test_an_actor_that_returns_a_mesh_gives_a_working_proxy(keeper: Any, counters: Any) -> None:
    held = keeper.held.call_one().get(timeout=BOUND)
    assert isinstance(held, loom.ActorMeshProxy)
    assert held.sizes == counters.sizes
    assert list(held.add.call(1).get(timeout=BOUND).values()) == [11] * 4
    assert counters.slice(hosts=1, gpus=1).value.call_one().get(timeout=BOUND) == 11
    assert held.slice(hosts=1, gpus=0).add.call_one(5).get(timeout=BOUND) == 16
    assert [n for _, n in counters.value.call().get(timeout=BOUND)] == [11, 11, 16, 11]
    with pytest.raises(loom.EndpointNotFound, match="'add'"):
        held.ad
    with pytest.raises(loom.WrongArguments):
        held.add.call()


def test_a_part_of_a_mesh_comes_back_as_that_part(keeper: Any) -> None:
    part = keeper.held_part.call_one().get(timeout=BOUND)
    assert part.sizes == {"gpus": 2}
    values = part.rank.call().get(timeout=BOUND)
    assert [value["gpus"] for value in values.values()] == [0, 1]
    assert part.slice(gpus=1).add.call_one(5).get(timeout=BOUND) == 15


def test_meshes_inside_containers_and_from_every_actor(keeper: Any, tidied: loom.Job) -> None:
    several = keeper.several.call_one().get(timeout=BOUND)
    assert several["number"] == 1
    assert several["counters"].sizes == {"hosts": 2, "gpus": 2}
    assert len(several["list"][0].value.call().get(timeout=BOUND)) == 2
    everyone = tidied.meshes["keepers"].held.call().get(timeout=BOUND)
    assert [mesh.sizes for mesh in everyone.values()] == [{"hosts": 2, "gpus": 2}] * 4


def test_a_value_mesh_comes_back_as_one(keeper: Any) -> None:
    values = keeper.call_all.call_one().get(timeout=BOUND)
    assert isinstance(values, loom.ValueMeshProxy)
    assert values.sizes == {"hosts": 2, "gpus": 2}
    assert values.item(hosts=1, gpus=0) == 11


def test_host_and_proc_meshes_come_back_and_can_be_spawned_on(keeper: Any) -> None:
    host, proc = keeper.where.call_one().get(timeout=BOUND)
    assert isinstance(host, loom.HostMeshProxy)
    assert isinstance(proc, loom.ProcMeshProxy)
    assert len(host) == len(proc) == 1
    there = proc.spawn("there", Counter).pid.call().get(timeout=BOUND)
    here = keeper.where.call_one().get(timeout=BOUND)[0].spawn_procs().spawn("more", Counter)
    (pid,) = there.values()
    (other,) = here.pid.call().get(timeout=BOUND).values()
    assert pid != other


def test_an_actor_that_spawns_gives_its_children(keeper: Any) -> None:
    children = keeper.children.call_one().get(timeout=BOUND)
    assert children.sizes["threads"] == 2
    assert list(children.add.call(1).get(timeout=BOUND).values()) == [101, 101]


def test_run_returns_the_mesh_that_it_was_given(tidied: loom.Job, counters: Any) -> None:
    def same(mesh: Any) -> Any:
        return mesh, mesh.slice(hosts=0)

    whole, part = tidied.run(same, counters)
    assert whole == counters
    assert part.sizes == {"gpus": 2}
    part.add.call(1).get(timeout=BOUND)


def test_a_mesh_that_was_let_go_is_forgotten_in_the_driver(tidied: loom.Job, keeper: Any) -> None:
    held = keeper.held.call_one().get(timeout=BOUND)
    held.slice(hosts=0).value.call().get(timeout=BOUND)
    ident = held._whole.ident
    assert ident < 0
    part = held.slice(hosts=0).value
    part_ident = held.slice(hosts=0)._ident
    del held, part
    gc.collect()
    keeper.held_part.call_one().get(timeout=BOUND)
    from loom.wire.bodies import Call
    from loom.wire.codec import dumps

    for gone in (ident, part_ident):
        with pytest.raises(loom.NoSuchMesh):
            tidied._calls.ask(Call(gone, "value"), dumps(((), {}))).get(timeout=BOUND)
