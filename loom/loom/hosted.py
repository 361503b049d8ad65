"""Actors that hold a function or an object of a class that is no actor, and call it by name.

`loom.cls` and `loom.fn` spawn them. An actor may not mix ``def`` and ``async def`` endpoints, so there are two: one
holds objects whose methods are all ``def``, the other holds all others.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loom.actor import Actor, endpoint


class _Holder(Actor):
    """An actor that holds a function, or an object of a class."""

    def __init__(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._target = target
        self._args = args
        self._kwargs = kwargs
        self._object: Any = None

    def _make(self) -> None:
        # The actor's own constructor does not do this, because an exception there would kill the actor.
        if isinstance(self._target, type):
            self._object = self._target(*self._args, **self._kwargs)
        else:
            self._object = self._target

    def _method(self, name: str | None) -> Any:
        return self._object if name is None else getattr(self._object, name)


class Hosted(_Holder):
    """An actor that holds an object whose methods are ``def``, or such a function."""

    @endpoint
    def make(self) -> None:
        """Make the object; an exception of its constructor is raised to the caller."""
        self._make()

    @endpoint
    def run(self, name: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method, or the function, whose name is None."""
        return _returned(self._method(name)(*args, **kwargs))


class AsyncHosted(_Holder):
    """An actor that holds an object with ``async def`` methods, or such a function. ``def`` runs in a thread."""

    @endpoint
    async def make(self) -> None:
        """Make the object on the event loop; an exception of its constructor is raised to the caller."""
        self._make()

    @endpoint
    async def run(self, name: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method, or the function, whose name is None."""
        method = self._method(name)
        if inspect.iscoroutinefunction(method):
            return _returned(await method(*args, **kwargs))
        result = await asyncio.to_thread(method, *args, **kwargs)
        return _returned(await result if inspect.isawaitable(result) else result)


def _returned(result: Any) -> Any:
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError(f"{result.__qualname__} gave a generator, which cannot travel: return a list")
    return result


class HostedObject:
    """A remote object that was passed to code in the cluster: its methods are called there as on the laptop.

    A call on one object returns the method's result, on several a Monarch value mesh. With ``async_=True`` it
    returns an awaitable.
    """

    def __init__(self, mesh: Any, single: bool) -> None:
        self._mesh = mesh
        self._single = single

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(self._run, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(None, *args, **kwargs)

    def _run(self, name: str | None, /, *args: Any, async_: bool = False, **kwargs: Any) -> Any:
        run = self._mesh.run
        future = (run.call_one if self._single else run.call)(name, args, kwargs)
        return future if async_ else future.get()

    def __reduce__(self) -> Any:
        return HostedObject, (self._mesh, self._single)
