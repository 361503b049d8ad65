"""Results of methods of remote objects: values, exceptions of the methods' own, and generators."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from loom.errors import ActorError, LoomError, RemoteException, WaitTimeout, WrongArguments
from loom.remote_objects import Generated, HostedStep
from loom_proxy.futures.future import FutureProxy
from loom_proxy.futures.results import add_cause
from loom_proxy.mesh.actors import ActorMeshProxy
from loom_proxy.mesh.values import ValueMeshProxy

_STAYS_AN_ACTOR_ERROR = (RemoteException, StopIteration, StopAsyncIteration)
"""Exceptions that stay inside the `ActorError`: a stand-in, and exceptions that would end a loop of the caller."""


def own_error(error: ActorError) -> BaseException:
    """Return a method's exception, whose chain of causes ends with the `ActorError`.

    Return the `ActorError` if the exception cannot be raised here.
    """
    original = error.exception
    if not isinstance(original, Exception) or isinstance(original, _STAYS_AN_ACTOR_ERROR):
        return error
    add_cause(original, error)
    return original


class Results:
    """The results of the calls on one remote object, whose generators stay in its actor."""

    def __init__(self, mesh: ActorMeshProxy) -> None:
        self._mesh = mesh
        self._abandoned: deque[int] = deque()  # generators that nobody here holds any more

    def wait(self, future: FutureProxy[Any], timeout: float | None) -> Any:
        try:
            return self._made(future.get(timeout), timeout)
        except ActorError as error:
            raised = own_error(error)
        raise raised  # here, since an `except` would take the place of its context

    async def awaited(self, future: FutureProxy[Any], timeout: float | None) -> Any:
        try:
            return self._made(await asyncio.wait_for(future.as_asyncio(), timeout), timeout)
        except ActorError as error:
            raised = own_error(error)
        except (TimeoutError, asyncio.TimeoutError) as error:
            if isinstance(error, LoomError):
                raise
            raise WaitTimeout(f"no answer within {timeout:g} s; the method goes on") from error
        raise raised

    def advance(self, generated: Generated) -> FutureProxy[HostedStep]:
        """Ask for the next item of a generator."""
        future: FutureProxy[HostedStep] = self._mesh.advance.call_one(generated.number)
        return future

    def abandon(self, number: int) -> None:
        self._abandoned.append(number)

    def drop_abandoned(self) -> None:
        """Close the generators that nobody here holds any more.

        The garbage collector only notes them, since it may run in the middle of any other code.
        """
        while self._abandoned:
            self._mesh.drop.broadcast(self._abandoned.popleft())

    def _made(self, result: Any, timeout: float | None) -> Any:
        if isinstance(result, Generated):
            return RemoteGenerator(self, result, timeout)
        if isinstance(result, ValueMeshProxy):
            for value in result.values():
                if isinstance(value, Generated):
                    raise WrongArguments(f"{value.title} gave a generator on each of many objects: call one object")
        return result


class RemoteGenerator:
    """A generator in the cluster, for ``for`` and ``async for``. Each item is asked for when it is wanted.

    Each item may take as long as the call may. After a `WaitTimeout` the same item can be waited for again.
    """

    def __init__(self, results: Results, generated: Generated, timeout: float | None) -> None:
        self._results = results
        self._generated = generated
        self._timeout = timeout
        self._asked: FutureProxy[HostedStep] | None = None  # an item that was asked for and not taken yet
        self._over = False
        self._abandon = weakref.finalize(self, results.abandon, generated.number)
        self._abandon.atexit = False

    def __iter__(self) -> RemoteGenerator:
        return self

    def __aiter__(self) -> RemoteGenerator:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        with self._asking() as future:
            step = self._results.wait(future, self._timeout)
        if step.over:
            self._end()
            raise StopIteration(step.value)
        return step.value

    async def __anext__(self) -> Any:
        if self._over:
            raise StopAsyncIteration
        with self._asking() as future:
            step = await self._results.awaited(future, self._timeout)
        if step.over:
            self._end()
            raise StopAsyncIteration
        return step.value

    def close(self) -> None:
        """Close the generator in the cluster, if it is not over. This waits for nothing."""
        if not self._over:
            self._over = True
            self._abandon()
            self._results.drop_abandoned()

    async def aclose(self) -> None:
        """Close the generator, exactly as `close` does."""
        self.close()

    @contextlib.contextmanager
    def _asking(self) -> Iterator[FutureProxy[HostedStep]]:
        if self._asked is None:
            self._asked = self._results.advance(self._generated)
        future = self._asked
        try:
            yield future
        except BaseException:
            if future.done():  # the generator raised; otherwise the wait was given up, and its item is not lost
                self._end()
            raise
        self._asked = None

    def _end(self) -> None:
        self._over = True
        self._abandon.detach()

    def __repr__(self) -> str:
        return f"<remote generator {self._generated.title}{', over' if self._over else ''}>"
