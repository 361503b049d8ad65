"""The trace id of a call travels from this program to the actor's endpoint, whichever way the call goes."""

from __future__ import annotations

import os
import queue
from typing import Any

import pytest

import loom
from loom import tracing
from loom.tracing.spans import listen
from loom_proxy.session.calls import Calls


class Traced(loom.Actor):
    """Returns the trace ids that its endpoints see."""

    @loom.endpoint
    def here(self, *args: Any, **kwargs: Any) -> str | None:
        return tracing.current_trace()

    @loom.endpoint
    def tell(self, port: Any) -> None:
        port.send(tracing.current_trace())

    @loom.endpoint
    def of(self, other: Any) -> str | None:
        found: str | None = other.here.call_one().get()
        return found


class TracedAsync(loom.Actor):
    """As `Traced`, with coroutines."""

    @loom.endpoint
    async def here(self) -> str | None:
        return tracing.current_trace()

    @loom.endpoint
    async def of(self, other: Any) -> str | None:
        found: str | None = await other.here.call_one()
        return found


class Large:
    """An argument that the driver unpickles, since it is of a class."""


@pytest.fixture(scope="module")
def actors(shared: loom.Job) -> Any:
    return shared.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 2}, name="procs").spawn("traced", Traced)


@pytest.mark.parametrize("args", [(), (1, "x", b"y" * 1000), (Large(),)], ids=["none", "plain", "of a class"])
def test_every_adverb_takes_the_trace_along(shared: loom.Job, actors: Any, args: tuple[Any, ...]) -> None:
    one = actors.slice(gpus=0)
    with tracing.trace("abc"):
        assert one.here.call_one(*args).get() == "abc"
        assert one.here.call_one(*args, key=1).get() == "abc"
        assert list(actors.here.call(*args).get().values()) == ["abc"] * 2
        assert actors.here.choose(*args).get() == "abc"
        assert [future.get() for future in actors.here.stream(*args)] == ["abc"] * 2
    assert one.here.call_one(*args).get() is None
    assert list(actors.here.call(*args).get().values()) == [None] * 2


def test_a_send_with_a_port_and_a_broadcast_take_it_along(shared: loom.Job, actors: Any) -> None:
    port, receiver = loom.Channel.open()
    with tracing.trace("abc"):
        actors.tell.broadcast(port)
        assert [receiver.recv().get(timeout=30) for _ in range(2)] == ["abc"] * 2
        loom.send(actors.slice(gpus=0).here, (), {}, port)
    assert receiver.recv().get(timeout=30) == "abc"


def test_each_call_has_its_own(shared: loom.Job, actors: Any) -> None:
    one = actors.slice(gpus=0)
    futures = []
    for i in range(100):
        if i % 3:
            with tracing.trace(f"t{i}"):
                futures.append((f"t{i}", one.here.call_one(i)))
        else:
            futures.append((None, one.here.call_one(i)))
    assert [future.get() for _, future in futures] == [expected for expected, _ in futures]


def test_an_actor_takes_it_to_the_actor_that_it_calls(tidied: loom.Job, actors: Any) -> None:
    first, second = actors.slice(gpus=0), actors.slice(gpus=1)
    apart = tidied.hosts.slice(hosts=1).spawn_procs(name="async").spawn("traced_async", TracedAsync)
    with tracing.trace("abc"):
        assert first.of.call_one(second).get() == "abc"
        assert apart.of.call_one(second).get() == "abc"
        assert first.of.call_one(apart).get() == "abc"
    assert apart.of.call_one(second).get() is None
    assert first.of.call_one(apart).get() is None


def test_a_function_in_the_driver_begins_in_it(shared: loom.Job, actors: Any) -> None:
    def function(mesh: Any) -> tuple[str | None, str | None]:
        return tracing.current_trace(), mesh.here.call_one().get()

    async def coroutine(mesh: Any) -> tuple[str | None, str | None]:
        return tracing.current_trace(), await mesh.here.call_one()

    one = actors.slice(gpus=0)
    with tracing.trace("abc"):
        assert shared.run(function, one) == ("abc", "abc")
        assert shared.run(coroutine, one) == ("abc", "abc")
    assert shared.run(function, one) == (None, None)


def test_a_driver_that_does_not_know_traces_gets_none(
    shared: loom.Job, actors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Calls = shared._calls
    monkeypatch.setattr(calls, "knows_traces", False)
    with tracing.trace("abc"):
        assert actors.slice(gpus=0).here.call_one().get() is None
        assert shared.run(tracing.current_trace) is None


def test_garbage_for_a_trace_id_is_none(shared: loom.Job, actors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = actors.slice(gpus=0)
    for garbage in ("x" * 1000, "a\nb", "", "ü"):
        monkeypatch.setattr("loom_proxy.mesh.endpoints.trace_here", lambda garbage=garbage: garbage)
        assert one.here.call_one(1).get() is None


def test_a_call_in_a_trace_is_a_span_here(shared: loom.Job, actors: Any) -> None:
    calls: queue.Queue[dict[str, Any]] = queue.Queue()
    end = listen(lambda span: calls.put(span) if span["name"] == "call" else None)
    try:
        with tracing.trace("abc"):
            actors.slice(gpus=0).here.call_one().get()
        call = calls.get(timeout=30)  # recorded when the answer is there, or soon after
    finally:
        end()
    assert (call["trace"], call["endpoint"], call["pid"]) == ("abc", "here", os.getpid())
    assert call["dur_ms"] >= call["rpc_ms"] > 0
