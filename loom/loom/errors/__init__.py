"""Every public exception of Loom.

All of them derive from `LoomError`, so that ``except loom.LoomError`` catches what Loom raises and nothing
else. If Monarch or Python raise a built-in class in the same situation (`IndexError` for a slice out of
range, `TimeoutError` for a wait that took too long), the exception derives from that class too, so that a
program written for Monarch keeps working.

An error that crosses the wire carries its ``code``; `error_for_code` finds the class again on the other side.
"""

# ruff: noqa: F403, F405

from loom.errors.base import *
from loom.errors.control import *
from loom.errors.gateway import *
from loom.errors.kubernetes import *
from loom.errors.mesh import *
from loom.errors.remote import *
from loom.errors.session import *
from loom.errors.sync import *
from loom.errors.training import *

__all__ = [
    "ActorError",
    "AuthenticationError",
    "BadPlan",
    "CheckpointBroken",
    "CheckpointError",
    "CheckpointNotWritten",
    "Conflict",
    "ConnectionLost",
    "Denied",
    "DeploymentFailed",
    "EndpointNameTaken",
    "EndpointNotFound",
    "FaultRefused",
    "FileChanged",
    "GatewayDraining",
    "GatewayUnreachable",
    "HostsNotOwned",
    "Invalid",
    "InvalidAddress",
    "InvalidLogOption",
    "LimitReached",
    "LoomError",
    "MeshStopped",
    "MissingDependency",
    "NameTaken",
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
    "NotFound",
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
    "Unavailable",
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
    "WrongState",
    "error_for_code",
    "operation_failed",
]
