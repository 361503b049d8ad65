"""What an actor class is written with: `Actor`, `endpoint`, `current_rank`, `current_size`.

Where torchmonarch is installed these are Monarch's own. Elsewhere (a laptop with Loom's base dependencies)
they are stand-ins with the same names and signatures, good for defining a class and sending it: a class that
travels by value names them as ``loom.actor.…``, and so finds Monarch's in the cluster.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["Actor", "current_rank", "current_size", "endpoint", "has_monarch"]

has_monarch: bool = importlib.util.find_spec("monarch") is not None
"""Whether torchmonarch is installed here, so that the names of this module are Monarch's own."""

if has_monarch and not TYPE_CHECKING:
    from monarch.actor import Actor, current_rank, current_size, endpoint
else:

    class Actor:
        """Base class of every actor. Stands in for ``monarch.actor.Actor`` where torchmonarch is missing."""

    class EndpointProperty:
        """An actor method marked by `endpoint`; becomes Monarch's own when it is unpickled in the cluster."""

        def __init__(
            self,
            method: Callable[..., Any],
            propagator: Any = None,
            explicit_response_port: bool = False,
            instrument: bool = True,
        ) -> None:
            self._method = method
            self._propagator = propagator
            self._explicit_response_port = explicit_response_port
            self._instrument = instrument

        def __reduce__(self) -> tuple[Any, ...]:
            options = (self._propagator, self._explicit_response_port, self._instrument)
            return _rebuild_endpoint, (self._method, *options)

    def endpoint(
        method: Any = None,
        *,
        propagate: Any = None,
        explicit_response_port: bool = False,
        instrument: bool = True,
    ) -> Any:
        """Mark a method of an `Actor` as callable through a mesh, as ``monarch.actor.endpoint`` does."""
        if method is None:
            return functools.partial(
                endpoint,
                propagate=propagate,
                explicit_response_port=explicit_response_port,
                instrument=instrument,
            )
        return EndpointProperty(method, propagate, explicit_response_port, instrument)

    def current_rank() -> Any:
        """The rank of the actor that is running, as a Point. Only inside an actor, in the cluster."""
        raise RuntimeError("current_rank() is known inside an actor in the cluster, not on this machine")

    def current_size() -> dict[str, int]:
        """The size of each dimension of the mesh that was called. Only inside an actor, in the cluster."""
        raise RuntimeError("current_size() is known inside an actor in the cluster, not on this machine")


def _rebuild_endpoint(
    method: Callable[..., Any], propagate: Any, explicit_response_port: bool, instrument: bool
) -> Any:
    """Unpickle an endpoint that a stand-in pickled."""
    return endpoint(
        method,
        propagate=propagate,
        explicit_response_port=explicit_response_port,
        instrument=instrument,
    )
