"""Mistakes that Monarch refuses with a text of its own. Loom's text contains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loom import Actor, concurrent_endpoint, endpoint
from tests.parity.actors import Counter, Porter


class Mixed(Actor):
    @endpoint
    def one(self) -> None: ...

    @endpoint
    async def other(self) -> None: ...


class AsyncCleanup(Actor):
    @endpoint
    def one(self) -> None: ...

    async def __cleanup__(self, exc: Any) -> None: ...


class SyncCleanup(Actor):
    @endpoint
    async def one(self) -> None: ...

    def __cleanup__(self, exc: Any) -> None: ...


class AsyncSupervise(Actor):
    @endpoint
    def one(self) -> None: ...

    async def __supervise__(self, failure: Any) -> bool:  # type: ignore[override]
        return True


class AsyncUndeliverable(Actor):
    @endpoint
    def one(self) -> None: ...

    async def _handle_undeliverable_message(self, message: Any) -> bool:
        return True


class Stopping(Actor):
    @endpoint
    def stop(self) -> None: ...  # type: ignore[override]


class Slicing(Actor):
    @endpoint
    def slice(self) -> None: ...  # type: ignore[override]


class Plain:
    @endpoint
    def one(self) -> None: ...


def classes_that_are_no_actors(hosts: Any, api: Any) -> Any:
    kinds: list[Any] = [Mixed, AsyncCleanup, SyncCleanup, AsyncSupervise, AsyncUndeliverable, Plain, 5]
    collides = "ActorMesh has an attribute that collides with an endpoint name: attribute="
    return [
        *(api.mistake(lambda kind=kind: api.procs.spawn("wrong", kind)) for kind in kinds),
        api.mistake(lambda: api.procs.spawn("wrong", Stopping), f"{collides}stop, ActorMesh.stop="),
        api.mistake(lambda: api.procs.spawn("wrong", Slicing), f"{collides}slice, ActorMesh.slice="),
    ]


def concurrent_endpoints_that_are_none(hosts: Any, api: Any) -> Any:
    def plain(self: Any) -> None: ...

    return [
        api.mistake(lambda: concurrent_endpoint(plain)),
        api.mistake(lambda: concurrent_endpoint(endpoint(plain))),
    ]


def methods_that_are_no_endpoints(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter)
    return [
        api.mistake(lambda: counters.not_an_endpoint()),
        api.mistake(lambda: counters.add(1), "ActorEndpoint' object is not callable"),
        api.mistake(lambda: counters.nothing_of_the_kind),
        api.mistake(lambda: api.as_endpoint(counters.add)),
        api.mistake(lambda: api.as_endpoint(len)),
    ]


def arguments_that_do_not_fit(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter)
    return [
        api.mistake(lambda: counters.add.call()),
        api.mistake(lambda: counters.add.call(1, 2)),
        api.mistake(lambda: counters.add.broadcast(k=1, j=2)),
        api.mistake(lambda: counters.add.stream()),
        api.mistake(lambda: api.procs.spawn("wrong", Counter, 1, 2, 3)),
        api.mistake(lambda: api.send(counters.add, (), {})),
    ]


def calls_of_one_actor_on_several(hosts: Any, api: Any) -> Any:
    return [api.mistake(lambda: api.spawn(Counter).add.call_one(1).get(timeout=30))]


def processes_that_cannot_be(hosts: Any, api: Any) -> Any:
    return [
        api.mistake(lambda: hosts.spawn_procs(per_host={"gpus": 2}, proc_bind=[{"cpus": "0"}])),
        api.mistake(lambda: hosts.spawn_procs(per_host={"gpus": 2, "hosts": 2})),
        api.mistake(lambda: api.procs.host_mesh),
    ]


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except (RuntimeError, ValueError):
        return True
    return False


def futures_asked_wrongly(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter)
    future = counters.value.call()
    return [
        api.mistake(lambda: future.get(timeout=-1), "invalid timeout"),  # the rest is not the same in 0.7 and 0.8
        api.mistake(lambda: future.get(timeout=float("nan")), "invalid timeout"),
        api.mistake(lambda: future.as_asyncio()),
        _is_refused(lambda: future.__await__()),  # by ValueError in 0.7, RuntimeError in 0.8
        api.mistake(lambda: api.Future()),
    ]


def late_answers(hosts: Any, api: Any) -> Any:
    ported = api.spawn(Porter).slice(hosts=0, gpus=0)
    future = ported.answer_later.call_one()
    return [api.mistake(lambda: future.get(timeout=0.05))]


def meshes_that_were_stopped(hosts: Any, api: Any) -> Any:
    procs = hosts.spawn_procs(name="stopped")
    counters = procs.spawn("counters", Counter)
    counters.value.call().get(timeout=30)
    counters.stop("enough").get(timeout=30)
    who = "Endpoint call counters.value() failed, Supervision event: actor counters"
    why = "has status:\n  stopped: ActorMeshController received explicit stop request"
    calls = [
        api.mistake(lambda: counters.slice(hosts=0).value.call_one().get(timeout=30), part) for part in (who, why)
    ]
    calls += [api.mistake(lambda: counters.value.call().get(timeout=30), why)]
    others = procs.spawn("others", Counter)
    others.value.call().get(timeout=30)
    procs.stop().get(timeout=30)
    stopped = "`ProcMesh` has already been stopped"
    return [
        *calls,
        api.mistake(lambda: others.value.choose().get(timeout=30), "has status:\n  stopped: stopped by client"),
        api.mistake(lambda: procs.spawn("more", Counter).initialized.get(timeout=30), stopped),
    ]


def sends_to_what_is_none(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter)
    return [api.mistake(lambda: api.send(counters.add, (1,), {}, selection="some"))]


def dimensions_that_are_none(hosts: Any, api: Any) -> Any:
    procs = api.procs
    return [
        api.mistake(lambda: procs.slice(racks=0)),
        api.mistake(lambda: procs.slice(gpus=2)),
        api.mistake(lambda: procs.slice(gpus=slice(2, 3))),
        api.mistake(lambda: procs.slice(gpus=slice(1, 1))),
        api.mistake(lambda: procs.slice(gpus=slice(0, 1)).flatten("all")),
        api.mistake(lambda: procs.split(gpus=("a", "b"))),
        api.mistake(lambda: procs.split(gpus=("a", "b"), a=3)),
        api.mistake(lambda: procs.split(gpus="a")),
        api.mistake(lambda: procs.split(racks="a")),
        api.mistake(lambda: procs.split(gpus=("hosts",))),
        api.mistake(lambda: procs.rename(racks="a")),
        api.mistake(lambda: procs.extent["racks"]),
        api.mistake(lambda: api.Point(9, procs.extent)["gpus"]),
    ]
