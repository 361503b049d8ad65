"""Actors that hold a function or an object of a class that is no actor, and call it by name.

`loom.cls` and `loom.fn` spawn them. An actor may not mix ``def`` and ``async def`` endpoints, so there are two: one
holds objects whose methods are all ``def``, the other holds all others. `Method` describes what they call, so that
a call can be checked before it is sent.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from loom.actor import Actor, endpoint
from loom.errors import EndpointNotFound, NotFound, WrongArguments
from loom.signatures import CallSignature


@dataclass(frozen=True)
class Method:
    """A method of a class, or a function."""

    title: str  # the name for error messages, such as ``Trainer.step``
    signature: CallSignature | None = None  # None if it is not known; then no call is checked
    is_async: bool = False
    yields: bool = False

    @classmethod
    def of(cls, title: str, function: Any, skip: int) -> Method:
        yields = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        return cls(title, _signature(title, function, skip), inspect.iscoroutinefunction(function), yields)

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise `WrongArguments` if the arguments do not fit."""
        if self.signature is not None:
            self.signature.check(args, kwargs)

    def check_returns(self, instead: str) -> None:
        """Raise `WrongArguments`, with what to do instead, if the method yields."""
        if self.yields:
            raise WrongArguments(f"{self.title} yields, and a generator cannot travel from there: {instead}")

    def has(self, parameter: str) -> bool:
        """Return whether the method has a parameter of that name itself."""
        return self.signature is not None and any(name == parameter for name, _, _ in self.signature.parameters)


def methods_of(cls: type) -> dict[str, Method]:
    """Return the methods of a class that are not private, by name."""
    found = {}
    for name in dir(cls):
        value = inspect.getattr_static(cls, name, None)
        if name.startswith("_") or isinstance(value, type):
            continue
        title = f"{cls.__name__}.{name}"
        if isinstance(value, (staticmethod, classmethod)):
            found[name] = Method.of(title, value.__func__, int(isinstance(value, classmethod)))
        elif callable(value):
            found[name] = Method.of(title, value, 1)
    return found


def function_of(function: Any) -> Method:
    """Return the description of a function."""
    return Method.of(getattr(function, "__name__", "the function"), function, 0)


def constructor_of(cls: type) -> CallSignature | None:
    """Return the signature of a class's constructor, if it is known."""
    return _signature(cls.__name__, cls, 0)


def _signature(title: str, function: Any, skip: int) -> CallSignature | None:
    """Return a signature; None if Python cannot tell, as for some C functions."""
    try:
        return CallSignature.of(title, function, skip)
    except (TypeError, ValueError):
        return None


def no_method(class_name: str, name: str, methods: Mapping[str, Method] | None, exists: bool) -> NoReturn:
    """Raise `NoSuchMethod` for a name that cannot be called.

    Args:
        methods: the existing methods; None if they are not known here.
        exists: whether the class has another attribute of that name.
    """
    if name.startswith("_"):
        raise EndpointNotFound(
            f"{class_name}.{name} is private: only public methods can be called from here", code="no_such_method"
        )
    near = difflib.get_close_matches(name, methods or (), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    known = ", ".join(methods or ()) or "none"
    what = "is no method, and attributes cannot be read from here: write a method that returns it" if exists else ""
    text = f"{class_name}.{name} {what}" if exists else f"{class_name} has no method {name!r}"
    raise EndpointNotFound(f"{text}{hint} Its methods: {known}", code="no_such_method")


MOST_GENERATORS = 256
"""Generators that an object holds; beyond it, the one that was advanced the longest ago is closed."""


@dataclass(frozen=True)
class Generated:
    """The result of a method that gave a generator, which stays in the actor."""

    title: str
    number: int  # in the actor


class HostedStep:
    """The result of advancing a generator: an item, or its end with the generator's return value."""

    def __init__(self, value: Any, over: bool) -> None:
        self.value = value
        self.over = over

    def __reduce__(self) -> Any:
        return HostedStep, (self.value, self.over)


class _Generators:
    """The generators of one object that callers have not come to the end of."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, Any] = OrderedDict()  # the one that was advanced last is last
        self._begun = 0

    def keep(self, generator: Any) -> tuple[Generated, Any]:
        """Return what travels instead of a generator, and a generator to close for it, or None."""
        self._begun += 1
        self._held[self._begun] = generator
        surplus = self._held.popitem(last=False)[1] if len(self._held) > MOST_GENERATORS else None
        return Generated(generator.__qualname__, self._begun), surplus

    def find(self, number: int) -> Any:
        if number not in self._held:
            raise NotFound(
                f"this generator is closed in the cluster: an object holds {MOST_GENERATORS}, and newer ones took "
                "its place"
            )
        self._held.move_to_end(number)
        return self._held[number]

    def drop(self, number: int) -> Any:
        return self._held.pop(number, None)


def _is_generator(result: Any) -> bool:
    return inspect.isgenerator(result) or inspect.isasyncgen(result)


def _next(generator: Any) -> HostedStep:
    try:
        return HostedStep(next(generator), over=False)
    except StopIteration as end:
        return HostedStep(end.value, over=True)


class _Holder(Actor):
    """An actor that holds a function, or an object of a class."""

    def __init__(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._target = target
        self._args = args
        self._kwargs = kwargs
        self._object: Any = None
        self._generators = _Generators()

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
        """Call a method, or the function, whose name is None. A generator stays here, see `advance`."""
        result = self._method(name)(*args, **kwargs)
        if not _is_generator(result):
            return result
        generated, surplus = self._generators.keep(result)
        if surplus is not None:
            surplus.close()
        return generated

    @endpoint
    def advance(self, number: int) -> HostedStep:
        """Return the next item of a generator that `run` gave, or its end."""
        try:
            step = _next(self._generators.find(number))
        except BaseException:
            self._generators.drop(number)
            raise
        if step.over:
            self._generators.drop(number)
        return step

    @endpoint
    def drop(self, number: int) -> None:
        """Close a generator that `run` gave, if it is not over."""
        generator = self._generators.drop(number)
        if generator is not None:
            generator.close()


class AsyncHosted(_Holder):
    """An actor that holds an object with ``async def`` methods, or such a function. ``def`` runs in a thread."""

    @endpoint
    async def make(self) -> None:
        """Make the object on the event loop; an exception of its constructor is raised to the caller."""
        self._make()

    @endpoint
    async def run(self, name: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method, or the function, whose name is None. A generator stays here, see `advance`."""
        method = self._method(name)
        if inspect.iscoroutinefunction(method):
            result = await method(*args, **kwargs)
        else:
            result = await _in_thread(method, *args, **kwargs)
            result = await result if inspect.isawaitable(result) else result
        if not _is_generator(result):
            return result
        generated, surplus = self._generators.keep(result)
        if surplus is not None:
            await _close(surplus)
        return generated

    @endpoint
    async def advance(self, number: int) -> HostedStep:
        """Return the next item of a generator that `run` gave, or its end."""
        try:
            generator = self._generators.find(number)
            if inspect.isasyncgen(generator):
                step = await _next_of_async(generator)
            else:
                step = await _in_thread(_next, generator)
        except BaseException:
            self._generators.drop(number)
            raise
        if step.over:
            self._generators.drop(number)
        return step

    @endpoint
    async def drop(self, number: int) -> None:
        """Close a generator that `run` gave, if it is not over."""
        generator = self._generators.drop(number)
        if generator is not None:
            await _close(generator)


async def _in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in a thread, and raise its exception in the task.

    No future could carry a `StopIteration`, and none a `GeneratorExit` into a task.
    """

    def call() -> tuple[Any, BaseException | None]:
        try:
            return function(*args, **kwargs), None
        except BaseException as error:  # noqa: BLE001 - raised below
            return None, error

    result, error = await asyncio.to_thread(call)
    if error is not None:
        raise error
    return result


async def _next_of_async(generator: Any) -> HostedStep:
    try:
        return HostedStep(await anext(generator), over=False)
    except StopAsyncIteration:
        return HostedStep(None, over=True)


async def _close(generator: Any) -> None:
    if inspect.isasyncgen(generator):
        await generator.aclose()
    else:
        await asyncio.to_thread(generator.close)


class HostedObject:
    """A remote object that was passed to code in the cluster: its methods are called there as on the laptop.

    A call on one object returns the method's result, on several a Monarch value mesh. With ``async_=True`` it
    returns an awaitable, which gives no generator's items.
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
        if async_:
            return future
        result = future.get()
        return self._items(result) if isinstance(result, Generated) else result

    def _items(self, generated: Generated) -> Iterator[Any]:
        step = None
        try:
            while not (step := self._mesh.advance.call_one(generated.number).get()).over:
                yield step.value
        finally:
            if step is not None and not step.over:
                self._mesh.drop.broadcast(generated.number)

    def __reduce__(self) -> Any:
        return HostedObject, (self._mesh, self._single)
