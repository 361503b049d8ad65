"""Whatever a user passes to a method of a session is taken plainly or refused there, and the session goes on."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.errors import (
    ConnectionLost,
    LoomError,
    ProtocolMismatch,
    SessionClosed,
    WeaverUnavailable,
)
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter
from tests.support.odd_values import LONE, ODD, PLAIN

ENDED = (ProtocolMismatch, ConnectionLost, SessionClosed, WeaverUnavailable)
"""Errors that say that a connection is over."""

LONG = ("wide", "many", "endless")
"""Values that are looked at for long."""

SMALL = {name: value for name, value in ODD.items() if name not in (*LONG, "deep", "itself", "uint64")}
"""Values whose ``repr`` any code may make, and which no one waits for when they are seconds."""

Place = Callable[[Any], object]


def weaver_places(weaver: Any) -> Iterator[tuple[str, Place]]:
    """Yield each parameter of each method of a weaver, as a function of the value to pass."""
    needed = {"kind": "update_config", "fault": "slow_step", "action": "pause"}
    for name, method in inspect.getmembers(type(weaver), callable):
        if name.startswith("_") or name in ("on_respawn", "watch"):
            continue
        parameters = list(inspect.signature(method).parameters.values())[1:]
        base = {
            one.name: needed.get(one.name, "nobody")
            for one in parameters
            if one.default is one.empty and one.kind is not one.VAR_KEYWORD
        }
        for one in parameters:
            key = "lr" if one.kind is one.VAR_KEYWORD else one.name

            def call(value: Any, name: str = name, key: str = key, base: dict[str, Any] = base) -> object:
                found = getattr(weaver, name)(**{**base, key: value})
                return list(itertools.islice(found, 3)) if inspect.isgenerator(found) else found

            if key != "follow":
                yield f"weaver.{name}({key}=)", call


def session_places(job: loom.Job, procs: Any, counters: Any, folder: Path) -> Iterator[tuple[str, Place]]:
    yield "hosts.spawn_procs(name=)", lambda value: job.hosts.spawn_procs(name=value).initialized and None
    yield "hosts.with_python_executable()", job.hosts.with_python_executable
    yield "mesh.slice()", lambda value: counters.slice(gpus=value).value.call()
    yield "mesh.slice(slice())", lambda value: counters.slice(gpus=slice(value, None)).value.call()
    yield "mesh.flatten()", lambda value: counters.flatten(value).value.call()
    yield "mesh.split()", lambda value: counters.split(gpus=("a", "b"), a=value).value.call()
    yield "mesh.stop()", lambda value: procs.spawn("short", Counter).stop(value)
    yield "mesh.logging_option(level=)", lambda value: procs.logging_option(True, None, value)
    yield "mesh.logging_option(window=)", lambda value: procs.logging_option(True, value)
    yield "actors.reconfigure()", lambda value: counters.reconfigure(lr=value)
    yield "procs.spawn()", lambda value: procs.spawn(value, Counter).value.call()
    yield "future.get()", lambda value: counters.value.call().get(value)
    yield "run(name=)", lambda value: job.run(int, name=value, detach=True).result(20)
    yield "run().result()", lambda value: job.run(int, detach=True).result(value)
    # Without a bound, infinity and 2**70 are waited for.
    bounded = (int, float)
    yield (
        "job.events()",
        lambda value: next(job.events(min(value, 0.05) if isinstance(value, bounded) else value), None),
    )
    yield "job.share()", job.share
    yield "job.sync(name=)", lambda value: job.sync(folder, name=value)
    yield "job.sync(exclude=)", lambda value: job.sync(folder, exclude=[value])
    yield "procs.exec()", lambda value: list(procs.exec(["true", value], 0).results())
    yield "procs.exec(rank=)", lambda value: list(procs.exec("true", value).results())
    yield "procs.exec(env=)", lambda value: list(procs.exec("true", 0, env={"A": value}).results())
    yield "procs.forward(local_port=)", lambda value: procs.forward(9, 0, local_port=value).close()


def check_all(job: loom.Job, counters: Any, places: Iterator[tuple[str, Place]], values: dict[str, Any]) -> None:
    for place, call in places:
        begun = [(name, outcome(f"{name} for {place}", lambda: call(value))) for name, value in values.items()]  # noqa: B023
        for name, found in begun:
            if isinstance(found, loom.Future):  # they are waited for together
                outcome(f"{name} for {place}", lambda: found.get(20))  # noqa: B023
        assert counters.value.call().get(20), place
        assert job.weaver.status()["weaver"], place


def outcome(told: str, call: Callable[[], object]) -> object:
    """Call a function; return its result, or None if a value was refused; fail if a connection has ended."""
    try:
        return call()
    except ENDED as error:
        pytest.fail(f"{told}: {error}")
    except (TypeError, ValueError, LoomError, LookupError, AttributeError, OSError, RuntimeError):
        return None  # also torch's own, what the system says of names, and what a value's own methods raise


@pytest.fixture(scope="module")
def procs(shared: loom.Job) -> Any:
    return shared.hosts.slice(hosts=0).spawn_procs({"gpus": 2}, name="procs")


@pytest.fixture(scope="module")
def counters(procs: Any) -> Any:
    return procs.spawn("counters", Counter)


@pytest.mark.slow
def test_nothing_that_is_passed_to_a_method_of_the_weaver_ends_anything(shared: loom.Job, counters: Any) -> None:
    values = {name: value for name, value in ODD.items() if name not in LONG}

    check_all(shared, counters, weaver_places(shared.weaver), values)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_that_is_passed_to_a_method_of_the_session_ends_it(
    shared: loom.Job, procs: Any, counters: Any, tmp_path: Path
) -> None:
    (tmp_path / "code.py").write_text("ANSWER = 42\n")

    check_all(shared, counters, session_places(shared, procs, counters, tmp_path), SMALL)


@pytest.mark.parametrize(
    "name", ["float32", "path", "enum", "decimal", "2**70", "lone surrogate", "2 MiB", "number key"]
)
def test_after_any_value_for_the_weaver_the_session_goes_on(shared: loom.Job, name: str, counters: Any) -> None:
    taken = name in PLAIN
    with contextlib.nullcontext() if taken else pytest.raises(LoomError, match=r"config\.lr|2,097,"):
        shared.weaver.update_config("nobody", lr=ODD[name])

    assert len(list(shared.weaver.events(limit=ODD["int64"]))) <= 3
    assert shared.run(sum, [1, 2]) == 3
    assert len(counters.value.call().get(20)) == 2


def test_a_name_with_a_lone_surrogate_is_refused_at_its_line(shared: loom.Job, counters: Any) -> None:
    for use in (
        lambda: shared.hosts.spawn_procs(name=LONE),
        lambda: shared.run(int, name=LONE),
        lambda: shared.weaver.pause(LONE),
        lambda: counters.stop(LONE),
    ):
        with pytest.raises(loom.WrongArguments, match="lone surrogate"):
            use()
    assert LONE not in shared.meshes
    assert len(counters.value.call().get(20)) == 2


def test_numpys_numbers_are_taken_for_sizes_places_and_timeouts(shared: loom.Job) -> None:
    two = ODD["int64"] - 1

    procs = shared.hosts.slice(hosts=0).spawn_procs({"gpus": two}, name="counted")
    counters = procs.spawn("counted_actors", Counter)

    assert counters.slice(gpus=two - 1).value.call_one().get(ODD["float32"] + 60) == 0
    assert dict(procs.extent) == {"gpus": 2}
    procs.stop().get(60)


@pytest.mark.parametrize(
    ("name", "value"), [("session", LONE), ("session", 5), ("token", LONE), ("mode", LONE), ("timeout", "5")]
)
def test_an_argument_of_connect_that_cannot_be_sent_is_refused_by_its_name(
    cluster: LocalCluster, name: str, value: Any
) -> None:
    with pytest.raises(loom.WrongArguments, match=rf"^{name}\b"):
        loom.connect(cluster.url, **{"token": cluster.token, name: value})


def test_numpys_numbers_are_taken_for_the_arguments_of_connect(cluster: LocalCluster) -> None:
    timeouts = {"timeout": ODD["float32"] + 30, "reconnect_timeout": ODD["int64"]}

    with pytest.raises(loom.UnknownSession):
        loom.connect(cluster.url, cluster.token, "nobody", persist=ODD["bool_"], **timeouts)
