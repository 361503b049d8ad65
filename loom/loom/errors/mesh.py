"""Exceptions about wrong uses of meshes, actors and ports. Nothing has been sent."""

from __future__ import annotations

from loom.errors.base import Invalid, LoomError, NameTaken, WrongArguments, WrongState


class EndpointNotFound(LoomError, AttributeError, code="endpoint_not_found", cases=("no_such_method",)):
    """The class has no endpoint or public method of that name. Raised before anything is sent."""


class NotAnEndpoint(EndpointNotFound, RuntimeError, code="not_an_endpoint"):
    """A method of the actor class is no endpoint; `loom.as_endpoint` makes it one. Nothing has been sent."""


class NotAMethod(WrongArguments, ValueError, code="not_a_method"):
    """The argument of `as_endpoint` is no method of a spawned actor, or is an endpoint already."""


class NotSupported(LoomError, TypeError, code="not_supported"):
    """Monarch supports this only with its tensor engine, which Loom does not have."""


class UnpicklableError(LoomError, TypeError, code="unpicklable"):
    """An object that has to travel cannot be pickled; the text names the attribute at fault."""


class PortClosed(LoomError, code="port_closed"):
    """The receiver of a port was closed here, so that it can receive nothing more."""


class OncePortUsed(LoomError, RuntimeError, ValueError, code="once_port_used"):
    """A port for one message was used again.

    In Monarch, this is a `RuntimeError` to send, a `ValueError` to receive.
    """


class NotOneProcess(LoomError, NotImplementedError, code="not_one_process"):
    """`host_mesh` needs a proc mesh of exactly one process, as Monarch's does."""


class SliceOutOfRange(LoomError, IndexError, ValueError, OverflowError, code="slice_out_of_range"):
    """A slice or a coordinate is outside of its dimension, or selects nothing.

    Monarch raises `IndexError`, `ValueError` or, for a negative coordinate, `OverflowError`.
    """


class NoSuchDimension(LoomError, TypeError, KeyError, ValueError, code="no_such_dimension"):
    """A mesh has no dimension of that name.

    Monarch raises `TypeError` in `slice`, `KeyError` in `size` and `ValueError` in points and extents.
    """


class InvalidLogOption(LoomError, ValueError, RuntimeError, code="invalid_log_option"):
    """An option of ``logging_option`` is impossible. Raised before anything is sent."""


class NoSuchRank(LoomError, IndexError, code="no_such_rank", http_status=404):
    """A mesh has fewer processes than the requested rank."""


class NoSuchMesh(LoomError, code="no_such_mesh", http_status=404):
    """The session has no mesh of the name, or not any more."""


EndpointNameTaken = NameTaken
HostsNotOwned = WrongState
MeshStopped = WrongState
NoSuchMethod = EndpointNotFound
NotAnActor = Invalid
NotOneActor = Invalid
ObjectNameTaken = NameTaken
UnknownSelection = Invalid
WrongConnectionMode = Invalid
