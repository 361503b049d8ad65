"""The signatures of an actor class's endpoints, for checking a call before it is sent.

An endpoint is recognised by its attributes (Monarch's ``EndpointProperty`` and Loom's stand-in have the same), so
that the driver, a laptop with Monarch and a laptop without it all describe a class in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
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
    found = {}
    for name in dir(cls):
        value = inspect.getattr_static(cls, name, None)
        # Monarch's concurrent_endpoint makes a subclass, whose method takes a port.
        if any(base.__name__ == "EndpointProperty" for base in type(value).__mro__):
            method, explicit_port = value._method, value._explicit_response_port
            found[name] = CallSignature.of(f"{cls.__name__}.{name}", method, 2 if explicit_port else 1)
    return found


def constructor(cls: type) -> CallSignature:
    """Return the signature of an actor class's constructor."""
    function = inspect.getattr_static(cls, "__init__")
    if function is object.__init__:
        return CallSignature(cls.__name__, [])
    return CallSignature.of(cls.__name__, function, 1)


def check_actor(cls: type) -> None:
    """Raise `NotAnActor` if Monarch would not accept a class, by the rules of its ``ProcMesh.spawn``."""
    from loom.actor import Actor  # with torchmonarch installed, this takes a second

    if not issubclass(cls, Actor):
        raise Invalid(
            f"{cls.__module__}.{cls.__qualname__} is no actor: derive it from loom.Actor", code="not_an_actor"
        )
    kinds: dict[bool, list[str]] = {False: [], True: []}
    for name in endpoints(cls):
        kinds[inspect.iscoroutinefunction(inspect.getattr_static(cls, name)._method)].append(name)
    if kinds[False] and kinds[True]:
        raise Invalid(
            f"{cls.__name__} mixes endpoints that are def ({', '.join(kinds[False])}) and async def "
            f"({', '.join(kinds[True])}): an actor has either, since a blocking one would hold up the others",
            code="not_an_actor",
        )
    for hook in ("__cleanup__", "__supervise__"):
        method = getattr(cls, hook, None)
        if method is None or getattr(method, "_monarch_doc_stub", False):
            continue
        is_async = inspect.iscoroutinefunction(method)
        if kinds[False] and is_async:
            raise Invalid(f"{cls.__name__}.{hook} is async def, but its endpoints are def", code="not_an_actor")
        if kinds[True] and not is_async and hook == "__cleanup__":
            raise Invalid(f"{cls.__name__}.{hook} is def, but its endpoints are async def", code="not_an_actor")
