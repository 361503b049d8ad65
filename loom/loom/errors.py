"""Every public exception of Loom.

All of them derive from `LoomError`, so that ``except loom.LoomError`` catches Loom's exceptions and nothing else.
If Monarch or Python raises a built-in class in the same situation (`IndexError` for a slice out of range,
`TimeoutError` for a wait that took too long), the exception derives from that class too, so that a program written
for Monarch keeps working.

A category groups exceptions by what a program can do: correct a name, wait for the other side, use another token.
It defines the HTTP status and the exit status of its exceptions, unless one of them has its own. Some cases are
only an alias of their category and differ in ``code``, which the constructor takes.

An error that crosses the wire carries its ``code``; `error_for_code` finds the class again on the other side. The
module is long because it is a list.
"""

from __future__ import annotations

import builtins
import functools
import re
import sys
from collections.abc import Mapping
from concurrent.futures import CancelledError
from importlib import import_module
from typing import TYPE_CHECKING, Any

from loom.in_cluster import be_base_of, time_out_with


class LoomError(Exception):
    """The base of every exception that Loom raises.

    Args:
        code: of a case without a class of its own.
    """

    __slots__ = ()  # as `be_base_of` needs; objects have attributes all the same, as every exception has

    code = "error"
    """Stable name of this kind of error on the wire and in REST answers."""

    http_status = 500
    """Status of the HTTP response that reports this error."""

    exit_status = 1
    """Exit code of a process that ends with this error; `SessionLost.exit_code` is that of another process."""

    def __init_subclass__(cls, code: str = "", http_status: int = 0, exit_status: int = 0) -> None:
        cls.code = code or cls.code
        cls.http_status = http_status or cls.http_status
        cls.exit_status = exit_status or cls.exit_status

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        if code:
            self.code = code

    __str__ = Exception.__str__  # KeyError's would put the text in quotes

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: those of the user's code, here and in the cluster."""
        from loom.remote_traceback import render

        cause = self.__cause__
        return render(self, describe_error(self), cause.text if isinstance(cause, RemoteException) else "")

    @classmethod
    def received(cls, message: str) -> LoomError:
        """Return the exception for a message that came over the wire."""
        return cls(message)


class Invalid(LoomError, ValueError, code="invalid"):
    """A value makes no sense; the text says which values would."""


class WrongArguments(LoomError, TypeError, code="wrong_arguments", http_status=422, exit_status=2):
    """Arguments do not fit the endpoint's or the constructor's signature. Raised before anything is sent."""


class NotFound(LoomError, KeyError, code="not_found", http_status=404, exit_status=9):
    """Nothing has the requested name or id; the text lists what exists."""


class Conflict(LoomError, code="conflict"):
    """Something else holds the requested resource."""


class NameTaken(Conflict, ValueError, code="name_taken"):
    """Something else has the requested name."""


class WrongState(LoomError, RuntimeError, code="wrong_state"):
    """The request is not possible now or here; the text says why."""


class Unavailable(LoomError, ConnectionError, code="unavailable"):
    """Nothing answers, or the connection to it broke."""


class Denied(LoomError, PermissionError, code="denied", http_status=403, exit_status=6):
    """The caller may not do this."""


class LimitReached(LoomError, code="limit_reached", http_status=429):
    """A limit of the gateway was reached; the text names it and its value. Nothing was begun."""


# Gateways, workers and pods


class GatewayUnreachable(Unavailable, code="gateway_unreachable", exit_status=5):
    """Nothing answered at the gateway's address (refused, timed out, name not found)."""


class IssuerUnreachable(GatewayUnreachable, code="issuer_unreachable", http_status=503):
    """The gateway does not know the key of an OpenID token, and the issuer does not give its keys now."""


class GatewayDraining(LoomError, code="gateway_draining", http_status=503):
    """The gateway is stopping and takes no new sessions; its existing ones go on until it ends."""


class AuditUnavailable(Unavailable, code="audit_unavailable", http_status=503):
    """The gateway must write down what it does (``--audit-required``) and cannot now; nothing was begun."""


class NotAGateway(Unavailable, code="not_a_gateway", exit_status=5):
    """Something answered at the address, but it is not a Loom gateway."""


class UntrustedGateway(NotAGateway, code="untrusted_gateway"):
    """The server's TLS certificate is not trusted: its authority is unknown, its host wrong, or it has expired."""


class AuthenticationError(Denied, code="authentication", http_status=401):
    """The gateway refused the token, or none was given."""


class TokenRevoked(AuthenticationError, code="token_revoked"):
    """The token was revoked, or has expired. Its connections are closed and its sessions end."""


class ScopeError(Denied, code="scope"):
    """The token is valid, but lacks the scope for this; the text names its scope and the required one."""


class OriginRefused(Denied, code="origin", exit_status=1):
    """A web page of another origin asked for a WebSocket, and the gateway does not allow that origin."""


class RateLimited(LimitReached, code="rate_limited"):
    """Too many connections or wrong tokens came from this address; the text says which, and when to try again.

    ``retry_after`` is the number of seconds to wait, or 0.0 if it is unknown.
    """

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TokenFileError(LoomError, OSError, code="token_file"):
    """The file with the gateway's tokens cannot be used; the text names it and says why."""


class UnknownToken(NotFound, code="unknown_token", http_status=500, exit_status=1):
    """The file of tokens has no token with that id."""


class ContextFileError(LoomError, OSError, code="context_file"):
    """The file with this user's contexts cannot be used; the text names it and says what to do."""


class UnknownContext(NotFound, code="unknown_context", http_status=500):
    """There is no context of that name, or none is the current one; the text lists those that exist."""


class KeyringUnavailable(LoomError, code="keyring_unavailable"):
    """The system's keyring did not store or return a token; the text says why and what to do."""


class ProtocolMismatch(LoomError, code="protocol_mismatch", http_status=400):
    """The two sides speak different major versions of Loom's protocol, or the peer does not speak it at all."""


class PythonVersionMismatch(LoomError, code="python_version"):
    """Code has to travel by value, but the cluster runs another minor version of Python than this process."""


class TooLarge(LoomError, ValueError, code="too_large", http_status=413):
    """A message is larger than a limit of the other side; the text names both sizes in bytes."""


class PortInUse(LoomError, OSError, code="port_in_use", exit_status=3):
    """A server could not listen because its port is taken."""


class UnsafeStateFolder(LoomError, code="unsafe_state_folder"):
    """The folder for a gateway's state cannot be used, or not safely; the text says why."""


class MissingDependency(LoomError, ImportError, code="missing_dependency", exit_status=4):
    """A package that this part of Loom needs is not installed; the text names the extra that brings it."""


class InvalidAddress(Invalid, code="invalid_address", exit_status=2):
    """An address is not of the form ``tcp://HOST:PORT``."""


class WorkerUnreachable(Unavailable, code="worker_unreachable", exit_status=7):
    """Nothing answers at a worker's address; the text names each address that was tried."""


class WorkersSilent(WorkerUnreachable, code="workers_silent"):
    """The workers accept connections, but do not answer a new session. `connect` tries again automatically."""


class DeploymentFailed(LoomError, code="deployment_failed"):
    """A job's pods were not deployed, or do not become ready; the text says which and why."""


class AllocationFailed(LoomError, code="allocation_failed"):
    """An allocation of Slurm was refused, or ended before its gateway answered; the text says why."""


class SchedulerAway(Unavailable, code="scheduler_away"):
    """Slurm's controller does not answer. Allocations go on meanwhile; a later attempt may succeed."""


class PodUnreachable(Unavailable, code="pod_unreachable"):
    """A pod of a job does not answer, or is no pod of the job."""


# Sessions, runs and synced folders


class UnknownSession(NotFound, code="unknown_session", exit_status=8):
    """No living session has the requested name."""


class DriverUnavailable(Unavailable, code="driver_unavailable", http_status=503):
    """The session's driver is starting, or too busy to say what it has. Ask again: the session goes on."""


class RunLives(Conflict, code="run_lives", http_status=409):
    """The run has processes that live: only an ended one is removed."""


class BranchRefused(Conflict, code="branch_refused", http_status=409):
    """A run cannot be branched in this way, or from here; the text says why, and what to call instead."""


class SessionInUse(Conflict, code="session_in_use"):
    """Another client is connected to the session."""


class SessionTakenOver(LoomError, code="session_taken_over"):
    """Another client has taken over the session from this one. The session lives on."""


class WatcherTooSlow(LoomError, code="watcher_too_slow"):
    """A watching client did not read fast enough; it may attach again."""


class ReadOnlySession(Denied, code="read_only_session", http_status=500, exit_status=1):
    """A watching client tried to change something."""


class SessionClosed(LoomError, code="session_closed"):
    """The session was closed or detached from here, so that its proxies are unusable."""


class InForkedChild(WrongState, code="in_forked_child"):
    """A job, or a mesh or future of it, was used in a forked child of the process that it belongs to."""


class SessionLost(LoomError, code="session_lost", http_status=410):
    """The session's driver process ended.

    ``exit_code`` is the process's exit code (negative: the signal that killed it), or None if it is unknown;
    ``output`` is the last lines that it printed.
    """

    def __init__(self, message: str, exit_code: int | None = None, output: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.output = output


class SessionRestarted(SessionLost, code="session_restarted"):
    """The session's driver process ended, and another one has started the session's functions with restarts again.

    The meshes of before and the calls that were not answered are gone. The session has kept its name: the job goes
    on when it is next used, ``job.runs()`` has the functions, and ``connect(session=NAME)`` attaches to it.
    """

    meshes: tuple[str, ...] = ()
    """The names of the meshes that this program had in the session."""
    unanswered: int = 0
    """The calls and other operations of this program that had no answer."""


class ConnectionLost(Unavailable, code="connection_lost", http_status=404):
    """The connection to the gateway broke while a caller was waiting for an answer."""


class SessionHostUnreachable(ConnectionLost, code="session_host_unreachable", http_status=503):
    """The gateway cannot reach the host that has the session, or may have it; clients try again by themselves."""


class WaitTimeout(LoomError, TimeoutError, code="timeout"):
    """`FutureProxy.get` waited for ``timeout`` seconds.

    The operation goes on, and a caller can wait for it again.
    """


class OperationCancelled(LoomError, CancelledError, code="cancelled"):
    """An operation was cancelled before it started, or a run was cancelled.

    It is a `concurrent.futures.CancelledError`, an ordinary `Exception`, not an ``asyncio.CancelledError``.
    """


class ResultDropped(LoomError, code="result_dropped"):
    """An operation has run, but its result was not kept for a program that was away; the text names the operation.

    The gateway limits the kept results by ``--keep-results``.
    """


class NoSuchRun(NotFound, code="no_such_run", http_status=500, exit_status=1):
    """The driver has no run with that id or name: it never existed, or was forgotten after it had finished."""


class TooManyRuns(LimitReached, code="too_many_runs", http_status=500):
    """The driver runs as many functions as it allows; the text has the number."""


class NotAFolder(LoomError, NotADirectoryError, code="not_a_folder"):
    """The argument of `Job.sync` is no folder."""


class UnreadableFile(Denied, code="unreadable_file", http_status=500, exit_status=1):
    """A file or folder in a folder to sync cannot be read, or its name is not UTF-8."""


class FileChanged(LoomError, code="file_changed"):
    """A file changed while it was being read. Nothing was synced; sync again."""


class SyncFailed(LoomError, code="sync_failed"):
    """A host could not store a synced folder, or no longer has it; the text says which host and why."""


class EnvironmentFailed(LoomError, code="environment_failed"):
    """A host could not make the environment of a project's packages; the text has the tool's last lines."""


# Meshes, endpoints and ports


class EndpointNotFound(LoomError, AttributeError, code="endpoint_not_found"):
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


# Failures in the cluster


class OperationFailed(LoomError, code="operation_failed"):
    """An operation failed in the driver, outside any actor; the text carries the remote traceback.

    If Monarch raised a built-in class there, such as `ValueError`, the exception is of that class too.
    """

    built_in = ""
    """Name of the built-in class, if there is one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return operation_failed, (str(self), self.built_in)


@functools.cache
def _operation_failed_as(name: str) -> type[OperationFailed]:
    base = getattr(builtins, name, None)
    if name not in _AS_MONARCH or base is None:
        return OperationFailed
    return type("OperationFailed", (OperationFailed, base), {"__module__": __name__, "built_in": name})


_AS_MONARCH = frozenset(
    ("ArithmeticError", "AssertionError", "AttributeError", "EOFError", "IndexError", "KeyError", "LookupError")
    + ("NotImplementedError", "OSError", "OverflowError", "RuntimeError", "TimeoutError", "TypeError")
    + ("ValueError", "ZeroDivisionError")
)
"""Built-in classes that take any text. Others need other arguments, or mean something to the interpreter."""


def operation_failed(text: str, like: BaseException | str = "") -> OperationFailed:
    """Return an `OperationFailed` that is also of an exception's built-in class.

    Args:
        like: the exception, or the name of its built-in class.
    """
    if isinstance(like, str):
        return _operation_failed_as(like)(text)
    names = (cls.__name__ for cls in type(like).__mro__ if cls.__module__ == "builtins")
    return _operation_failed_as(next((name for name in names if name in _AS_MONARCH), ""))(text)


class SupervisionError(LoomError, RuntimeError, code="supervision"):
    """Part of a mesh has died (a process, an actor or a host), so that a call on it cannot be answered.

    In the cluster it is also the base of what Monarch raises then.
    """

    __slots__ = ()


class RemoteException(LoomError, code="remote_exception"):
    """A stand-in for a remote exception whose class cannot be unpickled here.

    ``type_name`` is the qualified name of the original class, ``text`` what ``str()`` of it gave there, and
    ``unpickle_error`` why the original object could not be rebuilt. If a base class of the original is here, the
    exception is of that class too. It has the notes, the cause and the context of the original.
    """

    description: Mapping[str, Any] | None = None
    """The original, as `loom.wire.exceptions` describes it, for a process that has its class."""

    def __init__(self, type_name: str, text: str, unpickle_error: str = "") -> None:
        self.args = (f"{type_name}: {text}",)  # a base class's constructor may take something else
        self.type_name = type_name
        self.text = text
        self.unpickle_error = unpickle_error

    @classmethod
    def received(cls, message: str) -> RemoteException:
        return cls("unknown", message)

    def __reduce__(self) -> tuple[type[RemoteException], tuple[str, str, str]]:
        return RemoteException, (self.type_name, self.text, self.unpickle_error)


class ActorError(LoomError, code="actor_error"):
    """An endpoint raised an exception. The actor lives on.

    ``exception`` is the original exception object, or a `RemoteException` that stands in for it;
    ``message`` says which call failed; ``exception_formatted`` is the remote traceback. Monarch's
    ``monarch.actor.ActorError`` has the same attributes, and derives from this class in the cluster.
    """

    __slots__ = ()

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

    @classmethod
    def received(cls, message: str) -> ActorError:
        return cls(RemoteException("unknown", message), message)

    place = ""
    """The rank that raised it, such as ``rank 1 (hosts=0, gpus=1)``; "" if it is not known."""

    def __str__(self) -> str:
        return f"{self.message}\n {self.exception_formatted}"

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorError, (self.exception, self.message, self.exception_formatted), {"place": self.place}

    def _render_traceback_(self) -> list[str]:
        from loom.remote_traceback import head_of, render

        raised = self.exception
        name, _, text = ("", "", "") if not isinstance(raised, RemoteException) else raised.args[0].partition(": ")
        said = f"{name.rpartition('.')[2]}: {text}" if name else describe_error(raised)
        return render(self, head_of(self.place, self.message, said), self.exception_formatted)


# The weaver, training and failure injection


class WeaverUnavailable(Unavailable, code="weaver_unavailable", http_status=503, exit_status=5):
    """The weaver is away. A gateway restarts its own one; replicas go on meanwhile."""


class NatsUnreachable(Unavailable, code="nats_unreachable", exit_status=5):
    """No NATS server answers at the address that `loom bridge` got."""


class CommandIdTaken(Conflict, code="command_id_taken", http_status=409):
    """The id of a request is that of another command; the text says of which kind that is."""


class FaultRefused(LoomError, RuntimeError, code="fault_refused", http_status=409):
    """A fault is impossible on this machine or in this process; the text says why, and what to do."""


class ProfileFailed(LoomError, RuntimeError, code="profile_failed", http_status=409):
    """No profile of a replica can be had: its process is gone or silent, or another profile is being taken."""


class BadPlan(Invalid, code="bad_plan", http_status=422, exit_status=2):
    """A plan of faults makes no sense; the text says where, by line and column, and how to correct it."""


class ExpectationsFailed(LoomError, AssertionError, code="expectations_failed"):
    """A plan of faults was carried out, and not all held that it expects; the text is the report."""


class EmptyLog(LoomError, ValueError, code="empty_log"):
    """Logs have no event that an analysis could be about; the text says what was looked for."""


class PlanGoesOn(Conflict, code="plan_goes_on", http_status=409):
    """The gateway carries out another plan of faults for the user already."""


class CheckpointError(LoomError, code="checkpoint"):
    """A problem with a checkpoint."""


class CheckpointNotWritten(CheckpointError, OSError, code="checkpoint_not_written"):
    """A checkpoint could not be written: the disk is full, or refuses. Earlier checkpoints are unchanged."""


class CheckpointBroken(CheckpointError, code="checkpoint_broken"):
    """A checkpoint is not whole: one of its files is missing, or differs in size or hash from what was written."""


class UnstorableState(CheckpointError, TypeError, code="unstorable_state"):
    """A state holds something that a checkpoint cannot: neither a whole tensor nor plain data."""


class TrainingFailed(LoomError, code="training_failed"):
    """A training ended before its last step: no replica group is left, and none has another attempt."""


# Cases that have only a code: the name in small letters

EndpointNameTaken = NameTaken
HostRefused = Denied
HostsNotOwned = WrongState
LoginRefused = Denied
LoginUnreachable = Unavailable
MeshStopped = WrongState
NoOpenJob = WrongState
NoSuchMethod = EndpointNotFound
NotAnActor = Invalid
NotInjectable = Denied
NotOneActor = Invalid
ObjectNameTaken = NameTaken
PortForwardFailed = Unavailable
ReplicaTaken = Conflict
RunNameTaken = NameTaken
ServiceUnreachable = Unavailable
StateFolderInUse = Conflict
SyncNameTaken = NameTaken
UnknownAlert = NotFound
UnknownAllocation = NotFound
UnknownCommand = NotFound
UnknownDevice = NotFound
UnknownInjection = NotFound
UnknownReplica = NotFound
UnknownRun = NotFound
UnknownSelection = Invalid
UnknownTransport = Invalid
UnsafeLink = Invalid
WrongConnectionMode = Invalid

_classes = {
    name: value for name, value in vars().items() if isinstance(value, type) and issubclass(value, LoomError)
}
_by_code = {re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(): cls for name, cls in _classes.items()}
_by_code |= {cls.code: cls for cls in _classes.values()}

if not TYPE_CHECKING:  # a type checker takes every name of the module
    __all__ = [*sorted(_classes), "because", "describe_error", "error_for_code", "operation_failed"]


def because(what: str, reason: object) -> str:
    """Return ``what: reason``, or ``what`` alone if the reason is None or blank."""
    text = "" if reason is None else str(reason).strip()
    return f"{what}: {text}" if text else what


def describe_error(error: BaseException) -> str:
    """Return the class and the text of an exception as ``ValueError: no data``; the class alone without a text."""
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - a user's __str__ may raise
        text = f"<its __str__ raised {type(broken).__name__}>"
    return because(type(error).__name__, text)


def error_for_code(code: str, message: str) -> LoomError:
    """Return the exception for an error that came over the wire.

    Codes of a newer peer that this version does not know give a plain `LoomError` with the code in its text.
    """
    if code not in _by_code:
        return LoomError(f"{message} [{code}]")
    error = _by_code[code].received(message)
    error.code = code
    return error


def catch_monarchs() -> None:
    """Make `ActorError`, `SupervisionError` and `WaitTimeout` catch what Monarch raises in this process."""
    be_base_of(import_module("monarch.actor").ActorError, ActorError)
    supervision = import_module("monarch._rust_bindings.monarch_hyperactor.supervision")
    be_base_of(supervision.SupervisionError, SupervisionError)
    time_out_with(WaitTimeout)


if sys.modules.get("monarch"):  # as in an actor's process; `loom.actor` does it if Monarch comes later
    catch_monarchs()
