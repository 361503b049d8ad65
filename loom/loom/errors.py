"""Every public exception of Loom.

All of them derive from `LoomError`, so that ``except loom.LoomError`` catches what Loom raises and nothing
else. Where Monarch or Python raise a built-in class in the same situation (`IndexError` for a slice out of
range, `TimeoutError` for a wait that took too long), the exception derives from that class too, so that a
program written for Monarch keeps working.

An error that crosses the wire carries its ``code``; `error_for_code` finds the class again on the other side.
"""

from __future__ import annotations

import builtins
import functools
from concurrent.futures import CancelledError
from typing import Any

__all__ = [
    "ActorError",
    "AuthenticationError",
    "BadPlan",
    "CheckpointBroken",
    "CheckpointError",
    "CheckpointNotWritten",
    "ConnectionLost",
    "DeploymentFailed",
    "EndpointNameTaken",
    "EndpointNotFound",
    "FaultRefused",
    "FileChanged",
    "GatewayDraining",
    "GatewayUnreachable",
    "HostsNotOwned",
    "InvalidAddress",
    "InvalidLogOption",
    "LimitReached",
    "LoomError",
    "MeshStopped",
    "MissingDependency",
    "NatsUnreachable",
    "NoOpenJob",
    "NoSuchDimension",
    "NoSuchMesh",
    "NoSuchMethod",
    "NoSuchRank",
    "NoSuchRun",
    "NotAFolder",
    "NotAGateway",
    "NotAMethod",
    "NotAnActor",
    "NotAnEndpoint",
    "NotInjectable",
    "NotOneActor",
    "NotOneProcess",
    "NotSupported",
    "ObjectNameTaken",
    "OncePortUsed",
    "OperationCancelled",
    "OperationFailed",
    "OriginRefused",
    "PodUnreachable",
    "PortClosed",
    "PortForwardFailed",
    "PortInUse",
    "ProtocolMismatch",
    "PythonVersionMismatch",
    "RateLimited",
    "ReadOnlySession",
    "RemoteException",
    "RunNameTaken",
    "ScopeError",
    "ServiceUnreachable",
    "SessionClosed",
    "SessionInUse",
    "SessionLost",
    "SessionTakenOver",
    "SliceOutOfRange",
    "StateFolderInUse",
    "SupervisionError",
    "SyncFailed",
    "SyncNameTaken",
    "TokenFileError",
    "TokenRevoked",
    "TooLarge",
    "TooManyRuns",
    "TrainingFailed",
    "UnknownCommand",
    "UnknownDevice",
    "UnknownInjection",
    "UnknownReplica",
    "UnknownSelection",
    "UnknownSession",
    "UnknownToken",
    "UnknownTransport",
    "UnpicklableError",
    "UnreadableFile",
    "UnsafeLink",
    "UnsafeStateFolder",
    "UnstorableState",
    "UntrustedGateway",
    "WaitTimeout",
    "WatcherTooSlow",
    "WeaverUnavailable",
    "WorkerUnreachable",
    "WorkersSilent",
    "WrongArguments",
    "WrongConnectionMode",
    "error_for_code",
    "operation_failed",
]


class LoomError(Exception):
    """Base of every exception that Loom raises."""

    code = "error"
    """Stable name of this kind of error on the wire and in REST answers."""


# -- reaching a gateway -------------------------------------------------------------------------------------


class GatewayUnreachable(LoomError, ConnectionError):
    """Nothing answered at the gateway's address (refused, timed out, name not found)."""

    code = "gateway_unreachable"


class GatewayDraining(LoomError):
    """The gateway was told to stop and takes no new sessions; the ones that it has go on until it ends."""

    code = "gateway_draining"


class NotAGateway(LoomError, ConnectionError):
    """Something answered at the address, but it is not a Loom gateway."""

    code = "not_a_gateway"


class AuthenticationError(LoomError, PermissionError):
    """The gateway refused the token, or none was given."""

    code = "authentication"


class UntrustedGateway(NotAGateway):
    """TLS does not vouch for what answered: its certificate is of an unknown authority, another host or too old."""

    code = "untrusted_gateway"


class TokenRevoked(AuthenticationError):
    """The token was revoked, or has expired. Its connections are closed and its sessions end."""

    code = "token_revoked"


class ScopeError(LoomError, PermissionError):
    """The token is good, but not for this; the text names the scope that it has and the one that is needed."""

    code = "scope"


class OriginRefused(LoomError, PermissionError):
    """A web page of another origin asked for a WebSocket, and the gateway does not allow that origin."""

    code = "origin"


class LimitReached(LoomError):
    """A limit of the gateway's was reached; the text names it and its value. Nothing was begun."""

    code = "limit_reached"


class RateLimited(LimitReached):
    """Too many connections or wrong tokens came from this address; the text says which, and when to try again.

    ``retry_after`` is in how many seconds, or 0.0 where it is not known.
    """

    code = "rate_limited"

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TokenFileError(LoomError, OSError):
    """The file with the gateway's tokens cannot be used; the text names it and says why."""

    code = "token_file"


class UnknownToken(LoomError, KeyError):
    """The file of tokens has none with that id."""

    code = "unknown_token"

    def __str__(self) -> str:
        return Exception.__str__(self)


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


class SessionTakenOver(LoomError):
    """Another client has taken the place of this one in the session, which lives on."""

    code = "session_taken_over"


class WatcherTooSlow(LoomError):
    """A client that watches did not take what it was sent; it may attach again."""

    code = "watcher_too_slow"


class ReadOnlySession(LoomError, PermissionError):
    """A client that watches tried to change something."""

    code = "read_only_session"


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


class WorkersSilent(WorkerUnreachable):
    """The workers accept connections, but do not answer a new session. `connect` tries again by itself."""

    code = "workers_silent"


class InvalidAddress(LoomError, ValueError):
    """An address is not of the form ``tcp://HOST:PORT``."""

    code = "invalid_address"


class UnknownTransport(LoomError, ValueError):
    """`connect` was asked to use something else than ``auto``, ``websocket`` or ``http``."""

    code = "unknown_transport"


class PortInUse(LoomError, OSError):
    """A server could not listen because its port is taken."""

    code = "port_in_use"


class StateFolderInUse(LoomError):
    """Another gateway uses the folder that a gateway was to keep its state in."""

    code = "state_folder_in_use"


class UnsafeStateFolder(LoomError):
    """The folder that a gateway was to keep its state in cannot be used, or not safely; the text says why."""

    code = "unsafe_state_folder"


class MissingDependency(LoomError, ImportError):
    """A package that this part of Loom needs is not installed; the text names the extra that brings it."""

    code = "missing_dependency"


# -- programs -----------------------------------------------------------------------------------------------


class EndpointNotFound(LoomError, AttributeError):
    """The actor class has no endpoint of that name. Raised before anything is sent."""

    code = "endpoint_not_found"


class NotAnEndpoint(EndpointNotFound, RuntimeError):
    """A method of the actor class is no endpoint; `loom.as_endpoint` makes it one. Nothing has been sent."""

    code = "not_an_endpoint"


class NoSuchMethod(LoomError, AttributeError):
    """A remote object has no public method of that name; the text names those there are. Nothing has been sent."""

    code = "no_such_method"


class ObjectNameTaken(LoomError, ValueError):
    """A mesh of the session has the name that was asked for a remote object."""

    code = "object_name_taken"


class WrongConnectionMode(LoomError, ValueError):
    """``connection_mode`` is not what the job is connected with, or neither ``"websocket"`` nor ``"http"``."""

    code = "wrong_connection_mode"


class ServiceUnreachable(LoomError, ConnectionError):
    """No pod server of Kubetorch that serves the class or function answers at a URL."""

    code = "service_unreachable"


class NotSupported(LoomError, TypeError):
    """Monarch has it, but not without its tensor engine, which Loom does not carry."""

    code = "not_supported"


class UnknownSelection(LoomError, ValueError):
    """`loom.send` goes to ``"all"`` actors or to one that is chosen, ``"choose"``. Nothing has been sent."""

    code = "unknown_selection"


class NoOpenJob(LoomError, RuntimeError):
    """`loom.Channel.open` was not told which job it is for, and the program has none open, or several."""

    code = "no_open_job"


class PortClosed(LoomError):
    """The receiver of a port was closed here, so that nothing can be received from it any more."""

    code = "port_closed"


class OncePortUsed(LoomError, RuntimeError, ValueError):
    """A port for one message was used again. In Monarch, a `RuntimeError` to send and a `ValueError` to receive."""

    code = "once_port_used"


class EndpointNameTaken(LoomError, ValueError):
    """An endpoint has the name of something that every actor mesh has, such as ``slice``."""

    code = "endpoint_name_taken"


class WrongArguments(LoomError, TypeError):
    """Arguments do not fit the endpoint's or the constructor's signature. Raised before anything is sent."""

    code = "wrong_arguments"


class NotAMethod(WrongArguments, ValueError):
    """`as_endpoint` was given something that is no method of a spawned actor, or an endpoint already."""

    code = "not_a_method"


class UnpicklableError(LoomError, TypeError):
    """Something that has to travel cannot be pickled; the text names the attribute that is in the way."""

    code = "unpicklable"


class NotOneActor(LoomError, ValueError):
    """`call_one` needs a mesh of exactly one actor. Raised before anything is sent."""

    code = "not_one_actor"


class NotOneProcess(LoomError, NotImplementedError):
    """`host_mesh` needs a proc mesh of exactly one process, as Monarch's does."""

    code = "not_one_process"


class HostsNotOwned(LoomError, RuntimeError):
    """Hosts cannot be shut down from a session: they belong to the gateway, and other sessions may use them.

    A part of the hosts cannot be stopped either, as with Monarch.
    """

    code = "hosts_not_owned"


class NotAnActor(LoomError, ValueError):
    """A class that is to be spawned is no `Actor`, or mixes ``def`` and ``async def``, which Monarch refuses."""

    code = "not_an_actor"


class MeshStopped(LoomError, RuntimeError):
    """A mesh that was stopped cannot be entered as a context manager."""

    code = "mesh_stopped"


class SliceOutOfRange(LoomError, IndexError, ValueError, OverflowError):
    """A slice or a coordinate asks for what the dimension does not have, or for nothing.

    Monarch raises `IndexError`, `ValueError` or, for a negative coordinate, `OverflowError`.
    """

    code = "slice_out_of_range"


class NoSuchDimension(LoomError, TypeError, KeyError, ValueError):
    """A mesh has no dimension of that name.

    Monarch raises `TypeError` in `slice`, `KeyError` in `size` and `ValueError` in points and extents.
    """

    code = "no_such_dimension"

    def __str__(self) -> str:
        return Exception.__str__(self)


class InvalidLogOption(LoomError, ValueError, RuntimeError):
    """``logging_option`` was asked for something it cannot do. Raised before anything is sent."""

    code = "invalid_log_option"


class NoSuchRank(LoomError, IndexError):
    """A mesh has fewer processes than the rank that was asked for."""

    code = "no_such_rank"


class NoSuchMesh(LoomError):
    """A mesh that an operation names does not exist (any more) in the session."""

    code = "no_such_mesh"


class OperationFailed(LoomError):
    """An operation failed in the driver, outside any actor; the text carries the remote traceback.

    Where Monarch raised a built-in class there, such as `ValueError`, the exception is of that class too.
    """

    code = "operation_failed"

    built_in = ""
    """Name of that class, if there is one."""

    def __str__(self) -> str:
        return Exception.__str__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return operation_failed, (str(self), self.built_in)


@functools.cache
def _operation_failed_as(name: str) -> type[OperationFailed]:
    base = getattr(builtins, name, None)
    if name not in _AS_MONARCH or base is None:
        return OperationFailed
    return type("OperationFailed", (OperationFailed, base), {"__module__": __name__, "built_in": name})


_AS_MONARCH = frozenset(
    {
        "ArithmeticError",
        "AssertionError",
        "AttributeError",
        "EOFError",
        "IndexError",
        "KeyError",
        "LookupError",
        "NotImplementedError",
        "OSError",
        "OverflowError",
        "RuntimeError",
        "TimeoutError",
        "TypeError",
        "ValueError",
        "ZeroDivisionError",
    }
)
"""Classes that take any text. The others would not make sense of it, or mean something to the interpreter."""


def operation_failed(text: str, like: BaseException | str = "") -> OperationFailed:
    """An `OperationFailed` that is of an exception's built-in class, too.

    Args:
        like: the exception, or the name of its built-in class.
    """
    if isinstance(like, str):
        return _operation_failed_as(like)(text)
    names = (cls.__name__ for cls in type(like).__mro__ if cls.__module__ == "builtins")
    return _operation_failed_as(next((name for name in names if name in _AS_MONARCH), ""))(text)


class OperationCancelled(LoomError, CancelledError):
    """An operation was taken back before it was started, or a run was cancelled.

    A `concurrent.futures.CancelledError`, which is an ordinary `Exception`; it is not ``asyncio.CancelledError``.
    """

    code = "cancelled"


class NoSuchRun(LoomError, KeyError):
    """The driver has no run of that id or name: it never had, or has forgotten it since it finished."""

    code = "no_such_run"

    def __str__(self) -> str:
        return Exception.__str__(self)


class RunNameTaken(LoomError, ValueError):
    """Another run of the name that was asked for is still going."""

    code = "run_name_taken"


class TooManyRuns(LoomError):
    """As many functions run in the driver as it allows; the text has the number."""

    code = "too_many_runs"


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


# -- synced folders -----------------------------------------------------------------------------------------


class NotAFolder(LoomError, NotADirectoryError):
    """`Job.sync` was given a path that is no folder."""

    code = "not_a_folder"


class UnreadableFile(LoomError, PermissionError):
    """A file or a folder inside a folder that is to be synced cannot be read, or has a name that is not UTF-8."""

    code = "unreadable_file"


class UnsafeLink(LoomError, ValueError):
    """A symbolic link in a folder that is to be synced leads outside of it, or round in circles."""

    code = "unsafe_link"


class FileChanged(LoomError):
    """A file was changed while it was being read. Nothing was synced; sync again."""

    code = "file_changed"


class SyncNameTaken(LoomError, ValueError):
    """Another folder was synced under the name already; give this one another with ``name=``."""

    code = "sync_name_taken"


class SyncFailed(LoomError):
    """A host could not take a synced folder, or no longer has it; the text says which host and why."""

    code = "sync_failed"


# -- the weaver ---------------------------------------------------------------------------------------------


class WeaverUnavailable(LoomError, ConnectionError):
    """The gateway's weaver is away. It is started again by itself; replicas go on meanwhile."""

    code = "weaver_unavailable"


class NatsUnreachable(LoomError, ConnectionError):
    """No server of NATS answers where `loom bridge` was told."""

    code = "nats_unreachable"


class UnknownReplica(LoomError, KeyError):
    """The weaver knows no replica with that id."""

    code = "unknown_replica"

    def __str__(self) -> str:
        return Exception.__str__(self)


class UnknownDevice(LoomError, KeyError):
    """No replica has ever registered a device with that uuid."""

    code = "unknown_device"

    def __str__(self) -> str:
        return Exception.__str__(self)


class UnknownCommand(LoomError, KeyError):
    """The weaver has given no command with that id, or has forgotten it: it was done long ago."""

    code = "unknown_command"

    def __str__(self) -> str:
        return Exception.__str__(self)


# -- failure injection --------------------------------------------------------------------------------------


class NotInjectable(LoomError, PermissionError):
    """A fault was to strike what was not marked as injectable."""

    code = "not_injectable"


class FaultRefused(LoomError, RuntimeError):
    """A fault that this machine or process cannot have; the text says why, and what to do."""

    code = "fault_refused"


class UnknownInjection(LoomError, KeyError):
    """No fault with that id is there: there never was, or it has been removed."""

    code = "unknown_injection"

    def __str__(self) -> str:
        return Exception.__str__(self)


class BadPlan(LoomError, ValueError):
    """A plan of faults makes no sense; the text says where, by line and column, and what would."""

    code = "bad_plan"


# -- training -----------------------------------------------------------------------------------------------


class CheckpointError(LoomError):
    """Something about a checkpoint."""

    code = "checkpoint"


class CheckpointNotWritten(CheckpointError, OSError):
    """A checkpoint could not be written: the disk is full, or refuses. Those before it are as they were."""

    code = "checkpoint_not_written"


class CheckpointBroken(CheckpointError):
    """A checkpoint is not whole: a file of it is missing, or has another size or hash than when it was written."""

    code = "checkpoint_broken"


class UnstorableState(CheckpointError, TypeError):
    """A state holds something that a checkpoint cannot: neither a whole tensor nor plain data."""

    code = "unstorable_state"


class TrainingFailed(LoomError):
    """A training has ended before its last step: no replica group is left, and none may be tried again."""

    code = "training_failed"


# -- Kubernetes ---------------------------------------------------------------------------------------------


class DeploymentFailed(LoomError):
    """A job's pods were not deployed, or do not become ready; the text says which and why."""

    code = "deployment_failed"


class PodUnreachable(LoomError, ConnectionError):
    """A pod of a job does not answer, or is no pod of the job."""

    code = "pod_unreachable"


class PortForwardFailed(LoomError, ConnectionError):
    """``kubectl port-forward`` does not run, or ends at once."""

    code = "port_forward_failed"


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
