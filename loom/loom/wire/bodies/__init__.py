"""What each kind of message says: a frozen dataclass a kind. Their docstrings are the protocol's documentation.

`BODIES` has the class of each kind. `Hello` and `Welcome` are in `loom.wire.handshake`.
"""

from __future__ import annotations

from loom.wire.bodies import answers, calls, connection, logs, meshes, ports, runs, sync
from loom.wire.bodies.answers import Notice, OperationError, OperationResult, SessionEnded
from loom.wire.bodies.base import Body, Id
from loom.wire.bodies.calls import (
    AskWeaver,
    Broadcast,
    Call,
    CallOne,
    CancelOperation,
    Choose,
    CollectAnswer,
    EndpointCall,
    ListUnclaimed,
    ReconfigureActors,
    SendToActors,
    StreamCall,
)
from loom.wire.bodies.connection import Chunk, OpenSession, Refuse
from loom.wire.bodies.logs import FlushLogs, LogLines, SetLogOptions
from loom.wire.bodies.meshes import (
    AwaitInitialized,
    ForgetMeshes,
    HostOf,
    ListMeshes,
    MakeView,
    RefreshHosts,
    SpawnActors,
    SpawnProcs,
    StopHosts,
    StopMesh,
    WithPython,
)
from loom.wire.bodies.ports import ClosePort, GrantCredit, OpenPort, PortMessage, PortMessages, SendToPort
from loom.wire.bodies.runs import AwaitRun, EndRun, EndSession, ListRuns, ReadRunOutput, RunChanged, StartRun
from loom.wire.bodies.sync import BeginSync, CommitSync, SendPieces
from loom.wire.messages import Kind

_MODULES = (answers, calls, connection, logs, meshes, ports, runs, sync)

BODIES: dict[Kind, type[Body]] = {
    cls.KIND: cls
    for module in _MODULES
    for cls in map(vars(module).__getitem__, module.__all__)
    if hasattr(cls, "KIND")
}
"""The class of each kind's body."""

__all__ = [
    "BODIES",
    "AskWeaver",
    "AwaitInitialized",
    "AwaitRun",
    "BeginSync",
    "Body",
    "Broadcast",
    "Call",
    "CallOne",
    "CancelOperation",
    "Choose",
    "Chunk",
    "ClosePort",
    "CollectAnswer",
    "CommitSync",
    "EndRun",
    "EndSession",
    "EndpointCall",
    "FlushLogs",
    "ForgetMeshes",
    "GrantCredit",
    "HostOf",
    "Id",
    "ListMeshes",
    "ListRuns",
    "ListUnclaimed",
    "LogLines",
    "MakeView",
    "Notice",
    "OpenPort",
    "OpenSession",
    "OperationError",
    "OperationResult",
    "PortMessage",
    "PortMessages",
    "ReadRunOutput",
    "ReconfigureActors",
    "RefreshHosts",
    "Refuse",
    "RunChanged",
    "SendPieces",
    "SendToActors",
    "SendToPort",
    "SessionEnded",
    "SetLogOptions",
    "SpawnActors",
    "SpawnProcs",
    "StartRun",
    "StopHosts",
    "StopMesh",
    "StreamCall",
    "WithPython",
]
