"""Exceptions about meshes, actors and ports that a program uses in a wrong way. Nothing has been sent."""

from __future__ import annotations

from loom.errors.base import Invalid, LoomError, NameTaken, WrongArguments, WrongState


class EndpointNotFound(LoomError, AttributeError, code="endpoint_not_found", cases=("no_such_method",)):
    """The class has no endpoint or public method of that name. Raised before anything is sent."""


class NotAnEndpoint(EndpointNotFound, RuntimeError, code="not_an_endpoint"):
    """A method of the actor class is no endpoint; `loom.as_endpoint` makes it one. Nothing has been sent."""


class NotAMethod(WrongArguments, ValueError, code="not_a_method"):
    """`as_endpoint` was given something that is no method of a spawned actor, or an endpoint already."""


class NotSupported(LoomError, TypeError, code="not_supported"):
    """Monarch has it, but not without its tensor engine, which Loom does not carry."""


class UnpicklableError(LoomError, TypeError, code="unpicklable"):
    """Something that has to travel cannot be pickled; the text names the attribute that is in the way."""


class PortClosed(LoomError, code="port_closed"):
    """The receiver of a port was closed here, so that nothing can be received from it any more."""


class OncePortUsed(LoomError, RuntimeError, ValueError, code="once_port_used"):
    """A port for one message was used again. In Monarch, a `RuntimeError` to send and a `ValueError` to receive."""


class NotOneProcess(LoomError, NotImplementedError, code="not_one_process"):
    """`host_mesh` needs a proc mesh of exactly one process, as Monarch's does."""


class SliceOutOfRange(LoomError, IndexError, ValueError, OverflowError, code="slice_out_of_range"):
    """A slice or a coordinate asks for what the dimension does not have, or for nothing.

    Monarch raises `IndexError`, `ValueError` or, for a negative coordinate, `OverflowError`.
    """


class NoSuchDimension(LoomError, TypeError, KeyError, ValueError, code="no_such_dimension"):
    """A mesh has no dimension of that name.

    Monarch raises `TypeError` in `slice`, `KeyError` in `size` and `ValueError` in points and extents.
    """


class InvalidLogOption(LoomError, ValueError, RuntimeError, code="invalid_log_option"):
    """``logging_option`` was asked for something it cannot do. Raised before anything is sent."""


class NoSuchRank(LoomError, IndexError, code="no_such_rank", http_status=404):
    """A mesh has fewer processes than the rank that was asked for."""


class NoSuchMesh(LoomError, code="no_such_mesh", http_status=404):
    """A mesh that an operation names does not exist (any more) in the session."""


EndpointNameTaken = NameTaken
HostsNotOwned = WrongState
MeshStopped = WrongState
NoSuchMethod = EndpointNotFound
NotAnActor = Invalid
NotOneActor = Invalid
ObjectNameTaken = NameTaken
UnknownSelection = Invalid
WrongConnectionMode = Invalid
