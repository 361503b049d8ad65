"""Every public exception of Loom.

All of them derive from `LoomError`, so that ``except loom.LoomError`` catches what Loom raises and nothing
else. Where Monarch or Python raise a built-in class in the same situation (`IndexError` for a slice out of
range, `TimeoutError` for a wait that took too long), the exception derives from that class too, so that a
program written for Monarch keeps working.

An error that crosses the wire carries its ``code``; `error_for_code` finds the class again on the other side.
"""

from __future__ import annotations

__all__ = [
    "ActorError",
    "AuthenticationError",
    "ConnectionLost",
    "EndpointNameTaken",
    "EndpointNotFound",
    "GatewayUnreachable",
    "InvalidAddress",
    "LoomError",
    "MissingDependency",
    "NoSuchDimension",
    "NoSuchMesh",
    "NotAGateway",
    "NotOneActor",
    "OperationFailed",
    "PortInUse",
    "ProtocolMismatch",
    "PythonVersionMismatch",
    "RemoteException",
    "SessionClosed",
    "SessionInUse",
    "SessionLost",
    "SliceOutOfRange",
    "SupervisionError",
    "TooLarge",
    "UnknownSession",
    "UnpicklableError",
    "WaitTimeout",
    "WorkerUnreachable",
    "WrongArguments",
    "error_for_code",
]


class LoomError(Exception):
    """Base of every exception that Loom raises."""

    code = "error"
    """Stable name of this kind of error on the wire and in REST answers."""


# -- reaching a gateway -------------------------------------------------------------------------------------


class GatewayUnreachable(LoomError, ConnectionError):
    """Nothing answered at the gateway's address (refused, timed out, name not found)."""

    code = "gateway_unreachable"


class NotAGateway(LoomError, ConnectionError):
    """Something answered at the address, but it is not a Loom gateway."""

    code = "not_a_gateway"


class AuthenticationError(LoomError, PermissionError):
    """The gateway refused the token, or none was given."""

    code = "authentication"


class ProtocolMismatch(LoomError):
    """The two sides speak different major versions of Loom's protocol, or what came is not Loom's protocol."""

    code = "protocol_mismatch"


class PythonVersionMismatch(LoomError):
    """Code has to travel by value, but the cluster runs another minor version of Python than this process."""

    code = "python_version"


class TooLarge(LoomError, ValueError):
    """A message is larger than a limit of the other side; the text names both sizes in bytes."""

    code = "too_large"


# -- sessions -----------------------------------------------------------------------------------------------


class UnknownSession(LoomError, KeyError):
    """No living session has the name that was asked for."""

    code = "unknown_session"

    def __str__(self) -> str:
        return Exception.__str__(self)


class SessionInUse(LoomError):
    """Another client is connected to the session."""

    code = "session_in_use"


class SessionClosed(LoomError):
    """The session was closed or detached from here; its proxies cannot be used any more."""

    code = "session_closed"


class SessionLost(LoomError):
    """The session's driver process ended.

    ``exit_code`` is its exit code (negative: the signal that killed it), or None where it is not known;
    ``output`` is the last lines that it printed.
    """

    code = "session_lost"

    def __init__(self, message: str, exit_code: int | None = None, output: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.output = output


class ConnectionLost(LoomError, ConnectionError):
    """The connection to the gateway broke while something was waiting for an answer."""

    code = "connection_lost"


# -- workers ------------------------------------------------------------------------------------------------


class WorkerUnreachable(LoomError, ConnectionError):
    """Nobody answers at a worker's address; the text names each address that was tried."""

    code = "worker_unreachable"


class InvalidAddress(LoomError, ValueError):
    """An address is not of the form ``tcp://HOST:PORT``."""

    code = "invalid_address"


class PortInUse(LoomError, OSError):
    """A server could not listen because its port is taken."""

    code = "port_in_use"


class MissingDependency(LoomError, ImportError):
    """A package that this part of Loom needs is not installed; the text names the extra that brings it."""

    code = "missing_dependency"


# -- programs -----------------------------------------------------------------------------------------------


class EndpointNotFound(LoomError, AttributeError):
    """The actor class has no endpoint of that name. Raised before anything is sent."""

    code = "endpoint_not_found"


class EndpointNameTaken(LoomError, ValueError):
    """An endpoint has the name of something that every actor mesh has, such as ``slice``."""

    code = "endpoint_name_taken"


class WrongArguments(LoomError, TypeError):
    """Arguments do not fit the endpoint's or the constructor's signature. Raised before anything is sent."""

    code = "wrong_arguments"


class UnpicklableError(LoomError, TypeError):
    """Something that has to travel cannot be pickled; the text names the attribute that is in the way."""

    code = "unpicklable"


class NotOneActor(LoomError, ValueError):
    """`call_one` needs a mesh of exactly one actor. Raised before anything is sent."""

    code = "not_one_actor"


class SliceOutOfRange(LoomError, IndexError, ValueError):
    """A slice asks for what the dimension does not have, or for nothing: Monarch's `IndexError` or `ValueError`."""

    code = "slice_out_of_range"


class NoSuchDimension(LoomError, TypeError, KeyError):
    """A mesh has no dimension of that name. A `TypeError` for `slice` and a `KeyError` for `size`, as Monarch's."""

    code = "no_such_dimension"

    def __str__(self) -> str:
        return Exception.__str__(self)


class NoSuchMesh(LoomError):
    """A mesh that an operation names does not exist (any more) in the session."""

    code = "no_such_mesh"


class OperationFailed(LoomError):
    """An operation failed in the driver, outside any actor; the text carries the remote traceback."""

    code = "operation_failed"


class WaitTimeout(LoomError, TimeoutError):
    """`FutureProxy.get` waited for ``timeout`` seconds. The operation goes on and can be waited for again."""

    code = "timeout"


class SupervisionError(LoomError, RuntimeError):
    """Part of a mesh has died (a process, an actor or a host), so that a call on it cannot be answered."""

    code = "supervision"


class RemoteException(LoomError):
    """Stands in for a remote exception whose class cannot be unpickled here.

    ``type_name`` is the qualified name of the original class, ``text`` what ``str()`` of it gave there, and
    ``unpickle_error`` why the original object could not be rebuilt.
    """

    code = "remote_exception"

    def __init__(self, type_name: str, text: str, unpickle_error: str = "") -> None:
        super().__init__(f"{type_name}: {text}")
        self.type_name = type_name
        self.text = text
        self.unpickle_error = unpickle_error

    def __reduce__(self) -> tuple[type[RemoteException], tuple[str, str, str]]:
        return RemoteException, (self.type_name, self.text, self.unpickle_error)


class ActorError(LoomError):
    """An endpoint raised an exception. The actor lives on.

    ``exception`` is the original exception object, or a `RemoteException` that stands in for it;
    ``message`` says which call failed; ``exception_formatted`` is the remote traceback. Monarch's
    ``monarch.actor.ActorError`` has the same attributes.
    """

    code = "actor_error"

    def __init__(
        self,
        exception: BaseException,
        message: str = "A remote actor call has failed.",
        exception_formatted: str = "",
    ) -> None:
        super().__init__(message)
        self.exception = exception
        self.message = message
        self.exception_formatted = exception_formatted

    def __str__(self) -> str:
        return f"{self.message}\n {self.exception_formatted}"

    def __reduce__(self) -> tuple[type[ActorError], tuple[BaseException, str, str]]:
        return ActorError, (self.exception, self.message, self.exception_formatted)


def _subclasses(cls: type[LoomError]) -> dict[str, type[LoomError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found.update(_subclasses(sub))
    return found


_BY_CODE = _subclasses(LoomError)


def error_for_code(code: str, message: str) -> LoomError:
    """The exception for an error that came over the wire.

    Codes of a newer peer that this version does not know give a plain `LoomError` with the code in its text.
    """
    cls = _BY_CODE.get(code)
    if cls is None:
        return LoomError(f"{message} [{code}]")
    if cls is RemoteException:
        return RemoteException("unknown", message)
    if cls is ActorError:
        return ActorError(RemoteException("unknown", message), message)
    return cls(message)
