"""What actors, objects, functions and runs raise: it arrives as it was, and they live on."""

from __future__ import annotations

import asyncio
import builtins
import concurrent.futures
import sys
import threading
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import loom
from loom import Actor, concurrent_endpoint, endpoint
from loom.wire.exceptions import last_lines
from tests.support.standard_exceptions import instance, standard_exceptions

BOUND = 60.0

STANDARD = [f"{kind.__module__}:{kind.__qualname__}" for kind in standard_exceptions()]

STOPS = {"StopIteration", "StopAsyncIteration"}  # Python turns them into a RuntimeError in a coroutine


class Keyword(Exception):
    def __init__(self, *, number: int) -> None:
        super().__init__(f"number {number}")
        self.number = number


class Locked(ValueError):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()
        self.kept = 5


class NoText(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("no text")

    __repr__ = __str__


@dataclass(frozen=True)
class Frozen(Exception):
    number: int


class Leaves(BaseException):
    pass


class BadGetattr(Exception):
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def local() -> Exception:
    class Local(KeyError):
        pass

    return Local("local")


def large() -> Exception:
    return ValueError(bytes(20 << 20))


def chained() -> Exception:
    error = Keyword(number=7)
    error.__cause__ = Locked()
    error.__cause__.__cause__ = urllib.error.HTTPError("http://x", 404, "Not Found", {}, None)  # type: ignore[arg-type]
    vars(error)["__notes__"] = ["noted"]
    return error


def several() -> Exception:
    if sys.version_info < (3, 11):
        return Keyword(number=1)
    group: Exception = vars(builtins)["ExceptionGroup"]("several", [Locked(), Keyword(number=2)])
    return group


MAKERS: dict[str, Callable[[], BaseException]] = {
    "keyword": lambda: Keyword(number=3),
    "locked": Locked,
    "frozen": lambda: Frozen(3),
    "no text": NoText,
    "bad getattr": BadGetattr,
    "local": local,
    "large": large,
    "chained": chained,
    "several": several,
    "HTTPError without a file": lambda: urllib.error.HTTPError("http://x", 404, "Not Found", {}, None),  # type: ignore[arg-type]
    "CancelledError": asyncio.CancelledError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "BaseException": lambda: Leaves("gone"),
    "BrokenExecutor": lambda: concurrent.futures.BrokenExecutor("broken"),
}


def recurse(depth: int = 0) -> int:
    return recurse(depth + 1) + 1


class Raises(Actor):
    @endpoint
    def standard(self, name: str) -> None:
        raise instance(name)

    @endpoint
    def made(self, make: Callable[[], BaseException]) -> None:
        raise make()

    @endpoint
    def recurse(self) -> None:
        recurse()

    @endpoint
    def alive(self) -> int:
        return 1


class RaisesAsync(Actor):
    @endpoint
    async def standard(self, name: str) -> None:
        raise instance(name)

    @endpoint
    async def made(self, make: Callable[[], BaseException]) -> None:
        raise make()

    @endpoint
    async def cancel_itself(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(BOUND)

    @concurrent_endpoint
    async def at_once(self, make: Callable[[], BaseException]) -> None:
        raise make()

    @endpoint
    async def wait(self) -> None:
        await asyncio.sleep(10 * BOUND)

    @endpoint
    async def alive(self) -> int:
        return 1


class Plain:
    def made(self, make: Callable[[], BaseException]) -> None:
        raise make()

    def alive(self) -> int:
        return 1


class Mixed:
    def made(self, make: Callable[[], BaseException]) -> None:
        raise make()

    async def alive(self) -> int:
        return 1


class PlainAsync:
    async def made(self, make: Callable[[], BaseException]) -> None:
        raise make()

    async def alive(self) -> int:
        return 1


@pytest.fixture(scope="module", params=[Raises, RaisesAsync], ids=["def", "async def"])
def raises(request: pytest.FixtureRequest, procs: loom.ProcMeshProxy) -> Any:
    mesh = procs.slice(hosts=0, gpus=0).spawn(f"raises_{request.param.__name__}", request.param)
    yield mesh
    assert mesh.alive.call_one().get(timeout=BOUND) == 1  # whatever was raised before


def failure(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        call()
    return caught.value


def test_every_exception_of_the_standard_library_arrives(raises: Any) -> None:
    wrong = []
    calls = [(name, raises.standard.call_one(name)) for name in STANDARD if name != "builtins:SystemExit"]
    for name, call in calls:
        error = failure(lambda: call.get(timeout=BOUND))  # noqa: B023
        original = getattr(error, "exception", error)
        right = type(original) is type(instance(name))
        if name.partition(":")[2] in STOPS and isinstance(original, RuntimeError):
            right = True
        elif right:
            right = last_lines(original) == last_lines(instance(name))
        if not right or not isinstance(error, loom.ActorError) or "instance(name)" not in error.exception_formatted:
            wrong.append((name, error, original))
    assert wrong == []


def check(kind: str, original: BaseException) -> None:
    assert type(original).__name__ == type(MAKERS[kind]()).__name__
    if not kind.startswith("local"):
        assert type(original) is type(MAKERS[kind]())
    if kind == "locked":
        assert isinstance(original, Locked)
        assert (original.kept, str(original)) == (5, "locked")
        assert "lock" in repr(original.lock)
    elif kind == "large":
        assert original.args == (bytes(20 << 20),)
    elif kind == "chained":
        cause = original.__cause__
        assert isinstance(cause, Locked)
        assert isinstance(cause.__cause__, urllib.error.HTTPError)
        assert (cause.__cause__.code, vars(original)["__notes__"]) == (404, ["noted"])
    elif kind == "several" and sys.version_info >= (3, 11):
        assert [type(member) for member in original.exceptions] == [Locked, Keyword]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", MAKERS)
def test_what_an_endpoint_raises_arrives(raises: Any, kind: str) -> None:
    error = failure(lambda: raises.made.call_one(MAKERS[kind]).get(timeout=BOUND))

    assert isinstance(error, loom.ActorError)
    check(kind, error.exception)
    assert "raise make()" in error.exception_formatted
    assert isinstance(failure(lambda: raises.made.call(MAKERS[kind]).get(timeout=BOUND)), loom.ActorError)
    assert raises.alive.call_one().get(timeout=BOUND) == 1


@pytest.mark.parametrize("kind", MAKERS)
def test_what_a_run_raises_arrives(shared: loom.Job, kind: str) -> None:
    async def on_a_loop(make: Callable[[], BaseException]) -> None:
        raise make()

    def plainly(make: Callable[[], BaseException]) -> None:
        raise make()

    for function in (plainly, on_a_loop):
        error = failure(lambda: shared.run(function, MAKERS[kind]))  # noqa: B023
        if isinstance(MAKERS[kind](), Exception):
            check(kind, error)
        else:
            assert isinstance(error, loom.OperationFailed)
            assert type(MAKERS[kind]()).__name__ in str(error)
        last = error
        while last.__cause__ is not None:
            last = last.__cause__
        assert "raise make()" in str(last)


@pytest.mark.parametrize("kind", [Plain, PlainAsync, Mixed])
def test_what_a_method_raises_arrives(tidied: loom.Job, kind: type) -> None:
    with loom.cls(kind).to(tidied) as remote:
        for name, make in MAKERS.items():
            error = failure(lambda: remote.made(make, timeout=BOUND))  # noqa: B023
            if isinstance(make(), Exception):
                check(name, error)
            else:
                assert isinstance(error, loom.ActorError)
                check(name, error.exception)
            assert remote.alive() == 1
        for stop in (StopIteration, StopAsyncIteration):
            assert isinstance(failure(lambda: remote.made(stop, timeout=BOUND)), RuntimeError | loom.ActorError)  # noqa: B023
            assert remote.alive() == 1


def test_what_a_function_raises_arrives(tidied: loom.Job) -> None:
    def raising(make: Callable[[], BaseException]) -> None:
        raise make()

    with loom.fn(raising).to(tidied) as function:
        for kind in ("keyword", "locked", "chained", "HTTPError without a file"):
            check(kind, failure(lambda: function(MAKERS[kind])))  # noqa: B023


@pytest.mark.parametrize("kind", MAKERS)
def test_what_a_concurrent_endpoint_raises_arrives(procs: loom.ProcMeshProxy, kind: str) -> None:
    mesh = procs.slice(hosts=0, gpus=0).spawn("at_once", RaisesAsync)

    error = failure(lambda: mesh.at_once.call_one(MAKERS[kind]).get(timeout=BOUND))

    assert isinstance(error, loom.ActorError)
    check(kind, error.exception)
    assert mesh.alive.call_one().get(timeout=BOUND) == 1


def test_an_actor_lives_on_when_a_method_cancels_itself(procs: loom.ProcMeshProxy) -> None:
    mesh = procs.slice(hosts=0, gpus=0).spawn("cancels_itself", RaisesAsync)
    for _ in range(3):
        error = failure(lambda: mesh.cancel_itself.call_one().get(timeout=BOUND))
        assert isinstance(error, loom.ActorError)
        assert isinstance(error.exception, asyncio.CancelledError)
        assert mesh.alive.call_one().get(timeout=BOUND) == 1


def test_an_actor_that_is_stopped_ends_its_method(procs: loom.ProcMeshProxy) -> None:
    mesh = procs.slice(hosts=0, gpus=0).spawn("stopped", RaisesAsync)
    waiting = mesh.wait.call_one()

    mesh.stop().get(timeout=BOUND)

    assert isinstance(failure(lambda: waiting.get(timeout=BOUND)), loom.SupervisionError)


def test_a_deep_recursion_arrives(procs: loom.ProcMeshProxy) -> None:
    mesh = procs.slice(hosts=0, gpus=0).spawn("recurses", Raises)

    error = failure(lambda: mesh.recurse.call_one().get(timeout=BOUND))

    assert isinstance(error, loom.ActorError)
    assert isinstance(error.exception, RecursionError)
    assert mesh.alive.call_one().get(timeout=BOUND) == 1


def test_what_an_actor_raises_arrives_in_a_run(shared: loom.Job, procs: loom.ProcMeshProxy) -> None:
    mesh = procs.slice(hosts=0, gpus=0).spawn("raises_to_a_run", Raises)

    def catch(mesh: Any, make: Callable[[], BaseException]) -> tuple[str, dict[str, Any]]:
        try:
            mesh.made.call_one(make).get()
        except loom.ActorError as error:
            original = error.exception
            return type(original).__name__, {name: str(value) for name, value in vars(original).items()}
        raise AssertionError("nothing was raised")

    name, attributes = shared.run(catch, mesh, MAKERS["locked"])

    assert (name, attributes["kept"], "left out" in attributes["lock"]) == ("Locked", "5", True)
