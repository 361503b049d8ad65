"""What is raised, where, and who survives it."""

from __future__ import annotations

import threading
from typing import Any

from tests.parity.actors import Broken, Counter, Note, Parent, Relay, Trouble


def _wait_until_dead(api: Any, actor: Any) -> Any:
    """What a call to an actor raises once it is known to be dead; it may answer until then."""
    for _ in range(300):
        error = api.raised(lambda: actor.value.call_one().get(timeout=30))
        if isinstance(error, api.SupervisionError):
            return error
        threading.Event().wait(0.1)
    return error


def an_endpoint_raises(hosts: Any, api: Any) -> Any:
    one = api.spawn(Counter, 3).slice(hosts=0, gpus=0)
    error = api.raised(lambda: one.fail_at.call_one(0).get(timeout=30))
    inner = error.exception
    return [
        error,
        type(inner).__name__,
        inner.args,
        inner.number,
        "Trouble" in str(error),
        "fail_at" in str(error),
        "Traceback" in error.exception_formatted,
        one.value.call_one().get(timeout=30),
    ]


def built_in_exceptions(hosts: Any, api: Any) -> Any:
    one = api.spawn(Counter).slice(hosts=0, gpus=0)
    sent = [
        ValueError("a", 1),
        KeyError("k"),
        OSError(2, "no such file", "name"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "why"),
        ZeroDivisionError(),
        AssertionError("assert"),
        TimeoutError("late"),
        NotImplementedError(),
        RuntimeError("multi", "part"),
    ]
    return [api.raised(lambda error=error: one.raise_this.call_one(error).get(timeout=30)) for error in sent]


def each_adverb_raises(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter)
    one = counters.slice(hosts=1, gpus=1)
    error = Trouble("x", 1)
    return [
        api.raised(lambda: counters.raise_this.call(error).get(timeout=30)),
        api.raised(lambda: one.raise_this.call_one(error).get(timeout=30)),
        api.raised(lambda: counters.raise_this.choose(error).get(timeout=30)),
        api.raised(lambda: next(iter(counters.raise_this.stream(error))).get(timeout=30)),
    ]


def one_of_many_raises(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter, 1)
    return api.raised(lambda: counters.fail_at.call(2).get(timeout=30)), counters.value.call().get(timeout=30)


def an_exception_with_a_cause(hosts: Any, api: Any) -> Any:
    one = api.spawn(Counter).slice(hosts=0, gpus=0)
    error = api.raised(lambda: one.fail_from.call_one().get(timeout=30))
    return error, "KeyError" in str(error), "direct cause" in str(error)


def an_unpicklable_argument(hosts: Any, api: Any) -> Any:
    one = api.spawn(Counter).slice(hosts=0, gpus=0)
    return [
        api.raised(lambda: one.echo.call_one(threading.Lock())),
        api.raised(lambda: one.echo.broadcast({"deep": [threading.Lock()]})),
        one.value.call_one().get(timeout=30),
    ]


def a_raise_in_a_broadcast_kills_the_actor(hosts: Any, api: Any) -> Any:
    procs = hosts.spawn_procs(name="for_broadcast")
    counters = procs.spawn("counters", Counter, 1)
    counters.value.call().get(timeout=30)
    counters.slice(hosts=0).raise_this.broadcast(Trouble("broadcast", 1))
    return [
        type(_wait_until_dead(api, counters.slice(hosts=0))).__name__,
        counters.slice(hosts=1).value.call_one().get(timeout=30),
        api.raised(lambda: counters.value.call().get(timeout=30)),
        # Monarch makes no actors on processes of which an actor has failed.
        api.raised(lambda: procs.spawn("others", Counter, 5).value.call().get(timeout=30)),
    ]


def messages_before_a_fatal_broadcast_are_handled(hosts: Any, api: Any) -> Any:
    procs = hosts.slice(hosts=0).spawn_procs(name="for_fatal")
    notes = procs.spawn("notes", Note)
    notes.write.broadcast(1)
    before = notes.read.call_one().get(timeout=30)
    notes.write_and_raise.broadcast(2)
    return before, api.raised(lambda: notes.read.call_one().get(timeout=30))


def a_process_dies(hosts: Any, api: Any) -> Any:
    procs = hosts.spawn_procs(name="dying")
    counters = procs.spawn("counters", Counter, 1)
    others = procs.spawn("others", Counter, 2)
    counters.value.call().get(timeout=30)
    others.value.call().get(timeout=30)
    counters.slice(hosts=1).die.broadcast()
    return [
        type(_wait_until_dead(api, counters.slice(hosts=1))).__name__,
        type(_wait_until_dead(api, others.slice(hosts=1))).__name__,
        api.raised(lambda: counters.slice(hosts=slice(1, 2)).value.call().get(timeout=30)),
        api.raised(lambda: others.value.call().get(timeout=30)),
        counters.slice(hosts=0).value.call().get(timeout=30),
        others.slice(hosts=0).value.call_one().get(timeout=30),
    ]


def a_pending_call_to_a_dying_process(hosts: Any, api: Any) -> Any:
    procs = hosts.slice(hosts=1).spawn_procs(name="pending")
    counters = procs.spawn("counters", Counter, 1)
    counters.value.call().get(timeout=30)
    return api.raised(lambda: counters.die.call_one().get(timeout=30))


def a_constructor_raises(hosts: Any, api: Any) -> Any:
    procs = hosts.slice(hosts=slice(0, 1)).spawn_procs(name="for_broken")
    broken = procs.spawn("broken", Broken)
    error = api.raised(lambda: broken.anything.call().get(timeout=30))
    # A SupervisionError, or a plain RuntimeError where Monarch hears of it before the mesh is complete.
    return isinstance(error, RuntimeError), "ValueError: cannot be made" in str(error)


def wrong_arguments_of_a_constructor(hosts: Any, api: Any) -> Any:
    return [
        api.raised(lambda: api.spawn(Counter, 1, 2)),
        api.raised(lambda: api.spawn(Counter, begin=1)),
        api.raised(lambda: api.procs.spawn("lock", Counter, threading.Lock())),
    ]


def no_actor_class(hosts: Any, api: Any) -> Any:
    class Mixed(api.Actor):  # type: ignore[misc, name-defined]
        @api.endpoint
        def one(self) -> None: ...
        @api.endpoint
        async def other(self) -> None: ...

    class Taken(api.Actor):  # type: ignore[misc, name-defined]
        @api.endpoint
        def slice(self) -> None: ...

    return [
        api.raised(lambda: api.procs.spawn("dict", dict)),
        api.raised(lambda: api.procs.spawn("mixed", Mixed)),
        api.raised(lambda: api.procs.spawn("taken", Taken)),
    ]


def errors_through_another_actor(hosts: Any, api: Any) -> Any:
    counters = api.spawn(Counter)
    relay = api.spawn(Relay).slice(hosts=0, gpus=0)
    one = counters.slice(hosts=1, gpus=1)
    return [
        api.raised(lambda: relay.fail_through.call_one(one).get(timeout=30)),
        relay.catch_through.call_one(one).get(timeout=30),
    ]


def a_handled_failure_of_a_child(hosts: Any, api: Any) -> Any:
    procs = hosts.slice(hosts=0).spawn_procs(name="parents")
    parent = procs.spawn("parent", Parent, True)
    parent.lose_child.call_one().get(timeout=30)
    for _ in range(300):
        told = parent.told_of.call_one().get(timeout=30)
        if told:
            break
        threading.Event().wait(0.1)
    return told


def an_unhandled_failure_of_a_child(hosts: Any, api: Any) -> Any:
    procs = hosts.slice(hosts=1).spawn_procs(name="careless")
    parent = procs.spawn("parent", Parent, False)
    parent.lose_child.call_one().get(timeout=30)
    for _ in range(300):
        try:
            parent.told_of.call_one().get(timeout=30)
        except api.SupervisionError as error:
            return error
        threading.Event().wait(0.1)
    return "it lives on"
