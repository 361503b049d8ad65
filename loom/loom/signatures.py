"""The signatures of an actor class's endpoints, for checking a call before it is sent.

An endpoint is recognised by its attributes (Monarch's ``EndpointProperty`` and Loom's stand-in have the same), so
that the driver, a laptop with Monarch and a laptop without it all describe a class in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loom.errors import Invalid, WrongArguments

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Default:
    """A stand-in for a default value, which does not travel."""

    def __repr__(self) -> str:
        return "..."


_DEFAULT = _Default()


class CallSignature:
    """The parameters of an endpoint or a constructor, without ``self`` and without annotations."""

    def __init__(self, name: str, parameters: Sequence[tuple[str, int, bool]]) -> None:
        self.name = name  # the name for error messages, such as ``Counter.add``
        # Name, kind (of `inspect.Parameter`) and whether there is a default, of each parameter.
        self.parameters = tuple((str(label), int(kind), bool(default)) for label, kind, default in parameters)
        positional = [default for _, kind, default in self.parameters if kind in _POSITIONAL]
        self._simple = len(positional) == len(self.parameters)
        self._required = positional.count(False)
        self._most = len(positional)

    @classmethod
    def of(cls, name: str, function: Any, skip: int) -> CallSignature:
        """Return the signature of a function, without its first ``skip`` parameters."""
        parameters = list(inspect.signature(function).parameters.values())[skip:]
        empty = inspect.Parameter.empty
        return cls(name, [(p.name, int(p.kind), p.default is not empty) for p in parameters])

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise `WrongArguments`, which has the signature, if arguments do not fit."""
        if self._simple and not kwargs and self._required <= len(args) <= self._most:
            return
        signature = self._signature()
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise WrongArguments(f"{self.name}{signature}: {error}") from None

    def _signature(self) -> inspect.Signature:
        empty = inspect.Parameter.empty
        return inspect.Signature(
            [
                inspect.Parameter(label, inspect._ParameterKind(kind), default=_DEFAULT if default else empty)
                for label, kind, default in self.parameters
            ]
        )

    def __str__(self) -> str:
        return f"{self.name}{self._signature()}"


def endpoints(cls: type) -> dict[str, CallSignature]:
    """Return the endpoints of an actor class, by name."""
    return {
        name: CallSignature.of(f"{cls.__name__}.{name}", prop._method, 2 if prop._explicit_response_port else 1)
        for name, prop in _endpoint_properties(cls)
    }


def _endpoint_properties(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the endpoints of a class, by name, also those that a descriptor or a metaclass of the user's gives."""
    for name in dir(cls):
        value = getattr(cls, name, None)
        # Monarch's concurrent_endpoint makes a subclass, whose method takes a port.
        if any(base.__name__ == "EndpointProperty" for base in type(value).__mro__):
            yield name, value


def constructor(cls: type) -> CallSignature:
    """Return the signature of an actor class's constructor."""
    function = inspect.getattr_static(cls, "__init__")
    if function is object.__init__:
        return CallSignature(cls.__name__, [])
    return CallSignature.of(cls.__name__, function, 1)


def check_actor(cls: type) -> None:
    """Raise `NotAnActor`, with Monarch's text, if Monarch's ``spawn`` would not accept a class."""
    from loom.actor import Actor  # with torchmonarch installed, this takes a second

    if not issubclass(cls, Actor):
        raise _refused(f"{cls} must subclass monarch.service.Actor to spawn it. Derive it from loom.Actor")
    kinds: dict[bool, list[str]] = {False: [], True: []}
    for name, prop in _endpoint_properties(cls):
        kinds[inspect.iscoroutinefunction(prop._method)].append(name)
    sync, async_ = kinds[False], kinds[True]
    if sync and async_:
        raise _refused(f"{cls} mixes both async and sync endpoints.{_DEADLOCK}sync: {sync} async: {async_}")
    is_async = {hook: inspect.iscoroutinefunction(getattr(cls, hook)) for hook in _HOOKS if _overrides(cls, hook)}
    if sync and is_async.get("__cleanup__"):
        raise _refused(
            f"{cls} has sync endpoints, but an async __cleanup__. Make sure __cleanup__ is also synchronous."
            f"{_DEADLOCK}sync: {sync}"
        )
    if async_ and is_async.get("__cleanup__") is False:
        raise _refused(
            f"{cls} has async endpoints, but a synchronous __cleanup__. Make sure __cleanup__ is also async."
            f"{_DEADLOCK}async: {async_}"
        )
    for hook in ("__supervise__", "_handle_undeliverable_message"):
        if sync and is_async.get(hook):
            raise _refused(
                f"{cls} has sync endpoints, but an async {hook}. Make sure {hook} is also synchronous. sync: {sync}"
            )


_HOOKS = ("__cleanup__", "__supervise__", "_handle_undeliverable_message")
"""Methods that Monarch calls on an actor, and that have to be as its endpoints are."""

_DEADLOCK = (
    "Synchronous endpoints cannot be mixed with async endpoints because they can cause the asyncio loop to "
    "deadlock if they wait."
)
"""A sentence of Monarch's, on which programs may match."""


def _overrides(cls: type, hook: str) -> bool:
    """Return whether a class has a hook of its own, besides the stub in Monarch's ``Actor``."""
    method = getattr(cls, hook, None)
    return method is not None and not getattr(method, "_monarch_doc_stub", False)


def _refused(text: str) -> Invalid:
    return Invalid(text, code="not_an_actor")
