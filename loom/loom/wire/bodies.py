"""The bodies of messages: a frozen dataclass for each kind, whose docstring documents that part of the protocol.

`BODIES` has the class of each kind. `Hello` and `Welcome` are in `loom.wire.handshake`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loom.wire.body import Body, Id, sendable_fields
from loom.wire.messages import Buffer, Kind, Message, new_message

# Bodies of messages around the numbered stream. `Hello` and `Welcome` are in `loom.wire.handshake`.


@dataclass(frozen=True, slots=True)
class Refuse(Body, kind=Kind.REFUSE):
    """Refuse the client and end the connection. From gateway or driver to client."""

    code: str
    """Code of the error in `loom.errors`."""
    text: str
    details: Mapping[str, Any]
    """``exit_code`` and ``output`` of a driver that has ended; otherwise empty."""


@dataclass(frozen=True, slots=True)
class OpenSession(Body, kind=Kind.OPEN):
    """Name the session that the connection is for. From gateway to driver, before the client's first frame."""

    session: str
    user: str
    """The user that the session belongs to."""
    weaver_key: str
    """The session's key to the weaver. It comes this way because a program can read its environment."""
    guest: str | None = None
    """The user of the client, if the session is another user's who shares it: a guest cannot end it."""

    def message_for_older(self) -> Message:
        """Return the message for a driver of before users, which knows of no field but the session."""
        return Message(self.KIND, 0, [self.session])


@dataclass(frozen=True, slots=True)
class Describe(Body, kind=Kind.DESCRIBE):
    """Ask for a description of the session. From gateway to driver, on a connection that carries no client.

    The answer is a `Description` or a `Refuse`, after which the gateway may ask again.
    """

    subject: str
    """``meshes``, ``runs``, ``tensors`` or ``life``."""


@dataclass(frozen=True, slots=True)
class Description(Body, kind=Kind.DESCRIPTION):
    """Describe the session. From driver to gateway.

    Payload: JSON, of `loom_gateway.sessions.descriptions`.
    """


@dataclass(frozen=True, slots=True)
class RestoreSession(Body, kind=Kind.RESTORE):
    """Open the session, and start the functions again that the session's driver before this one has left.

    From gateway to driver, behind `OpenSession` in place of a client's hello. The driver finds them in its file
    with the end ``.restart``, where the gateway has put what the earlier driver wrote. The answer is an empty
    `Description` when the session is open, or a `Refuse`.
    """

    persist: bool
    """True if the session never ends for lack of a client."""
    why: str
    """How the driver before this one ended, for clients of its that come back."""
    age: float
    """Seconds since the session was opened, which count for how long it lives at most."""


@dataclass(frozen=True, slots=True)
class Probe(Body, kind=Kind.PROBE):
    """Ask what the driver has received, outside the numbered stream; see `loom.wire.lost_frames`.

    From client to driver. Only to a driver with the capability ``probes``.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Probed(Body, kind=Kind.PROBED):
    """Answer a `Probe`, or tell of a gap, outside the numbered stream. From driver to client.

    Only to a client with the capability ``probes``. A number of a lane that the connection does not carry is 0.
    """

    number: int
    """That of the `Probe`; 0 if a frame has come behind a gap, and the driver gives up the connection."""
    received: int
    """Number of the last frame received."""
    received_bulk: int
    """Number of the last frame received of the bulk lane."""
    sent: int
    """Number of the last frame that was sent on this connection before the answer."""
    sent_bulk: int
    """The same of the bulk lane."""


@dataclass(frozen=True, slots=True)
class Chunk(Body, kind=Kind.CHUNK):
    """A piece of a message too large for one frame; see `loom.wire.mux`. In both directions.

    The message's id is the number of the transfer. Payload: bytes of the large message's payload.
    """

    offset: int
    """Bytes of the payload before this piece."""
    total: int
    """Bytes of the whole payload."""
    head: Sequence[Any] | None
    """The head of the message, see `loom.wire.mux`, in its first chunk; otherwise None."""


# Making, dividing, stopping and listing meshes. From client to driver; a new mesh gets the message's id.


@dataclass(frozen=True, slots=True)
class SpawnProcs(Body, kind=Kind.SPAWN_PROCS):
    """Spawn processes on the hosts of a mesh. Answered only if it fails.

    Payload: ``(bootstrap, proc_bind, bootstrap_command, *marks)``: Monarch's arguments of those names, and then
    maps of further environment variables for the processes, such as the one that marks them as injectable.
    """

    hosts: Id
    name: str
    per_host: Mapping[str, int]
    """Sizes of the dimensions on each host."""


@dataclass(frozen=True, slots=True)
class SpawnActors(Body, kind=Kind.SPAWN_ACTORS):
    """Spawn an actor in each process of a mesh. Answered only if it fails.

    Payload: ``(class, args, kwargs)``.
    """

    procs: Id
    name: str


@dataclass(frozen=True, slots=True)
class MakeView(Body, kind=Kind.VIEW):
    """Give a part of a mesh an id. Answered only if it fails."""

    mesh: Id
    """The whole mesh, or another part of it."""
    labels: Sequence[str]
    """Names of the part's dimensions."""
    offset: int
    """Rank, in the whole mesh, of the part's first element."""
    sizes: Sequence[int]
    """Elements of each dimension."""
    strides: Sequence[int]
    """Distance between neighbours of each dimension, in ranks of the whole mesh."""


@dataclass(frozen=True, slots=True)
class StopMesh(Body, kind=Kind.STOP):
    """Stop a proc or actor mesh. Result: None, when it has stopped."""

    mesh: Id
    reason: str


@dataclass(frozen=True, slots=True)
class AwaitInitialized(Body, kind=Kind.INITIALIZED):
    """Answer when a mesh has been created. Result: True."""

    mesh: Id


@dataclass(frozen=True, slots=True)
class WithPython(Body, kind=Kind.WITH_PYTHON):
    """Make a mesh of the same hosts, whose processes run another Python. Answered only if it fails."""

    hosts: Id
    executable: str
    """Path of the interpreter on the hosts."""


@dataclass(frozen=True, slots=True)
class HostOf(Body, kind=Kind.HOST_OF):
    """Make a host mesh of the host of a single process. Answered only if it fails."""

    procs: Id
    """A proc mesh of one process."""


@dataclass(frozen=True, slots=True)
class AllHosts(Body, kind=Kind.ALL_HOSTS):
    """Make a host mesh of the session's first hosts, also of those that joined it. Answered only if it fails."""

    count: int
    """How many."""


@dataclass(frozen=True, slots=True)
class LivingHosts(Body, kind=Kind.LIVING_HOSTS):
    """Make a host mesh of the session's hosts that are neither lost nor drained.

    Result: their numbers, in the order of the mesh.
    """


@dataclass(frozen=True, slots=True)
class StopHosts(Body, kind=Kind.STOP_HOSTS):
    """Stop every process of the session on all hosts; the hosts stay. Result: None."""


@dataclass(frozen=True, slots=True)
class RefreshHosts(Body, kind=Kind.REFRESH_HOSTS):
    """Use lost hosts again that have come back, and those that have joined.

    Result: the indexes of those that are used since a client last asked.
    """


@dataclass(frozen=True, slots=True)
class ListMeshes(Body, kind=Kind.MESHES):
    """List the meshes of the session.

    Result: a list of ``(id, kind, name, (labels, offset, sizes, strides), class, endpoints or None, stopped)``.
    """


@dataclass(frozen=True, slots=True)
class ForgetMeshes(Body, kind=Kind.FORGET):
    """Release meshes that came in results, and their parts, which no later message names. Never answered."""

    meshes: Sequence[int]
    """Ids of the meshes. The body is this list itself."""

    def to_body(self) -> list[Any]:
        return list(sendable_fields(self)["meshes"])

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> ForgetMeshes:
        return super(ForgetMeshes, cls).from_body([body])


# Calling endpoints. From client to driver.
#
# The name of an endpoint identifies it. A method that `as_endpoint` makes an endpoint has the name ``name()``, or
# ``name(port)`` if it gets the port to reply to. Payload: ``(args, kwargs)``.


@dataclass(frozen=True, slots=True)
class EndpointCall(Body):
    """A call of an endpoint with one of Monarch's adverbs."""

    mesh: Id
    """The actor mesh, or a part of one."""
    endpoint: str
    trace: str | None = None
    """The trace id of the call, for a driver with the capability ``traces``."""

    def message(self, ident: int = 0, parts: Sequence[Buffer] = ()) -> Message:
        # Written out for the hot path: every call is made here. A short ASCII name needs no check.
        name = self.endpoint
        if self.trace is None:
            body: Sequence[Any] = (self.mesh, name) if len(name) < 256 and name.isascii() else [self.mesh, name]
        else:
            body = [self.mesh, name, self.trace]
        return new_message(Message, (self.KIND, ident, body, parts))

    @staticmethod
    def fields(body: Sequence[Any]) -> tuple[int, str]:
        """Return ``mesh`` and ``endpoint`` of a peer's body, checked as by `from_body`.

        This is for the hot path: making a body for each call would take longer than the rest of the work.
        """
        if len(body) == 2:
            mesh, endpoint = body
            if type(mesh) is int and type(endpoint) is str:
                return mesh, endpoint
        call = Call.from_body(body)
        return call.mesh, call.endpoint


@dataclass(frozen=True, slots=True)
class Call(EndpointCall, kind=Kind.CALL):
    """Send to every actor. Result: all results, in the order of ranks."""


@dataclass(frozen=True, slots=True)
class CallOne(EndpointCall, kind=Kind.CALL_ONE):
    """Send to the only actor of the mesh. Result: its result."""


@dataclass(frozen=True, slots=True)
class Choose(EndpointCall, kind=Kind.CHOOSE):
    """Send to one actor, picked at random. Result: its result."""


@dataclass(frozen=True, slots=True)
class StreamCall(EndpointCall, kind=Kind.STREAM):
    """Send to every actor. Results: one for each actor, as they come, numbered in that order."""


@dataclass(frozen=True, slots=True)
class Broadcast(EndpointCall, kind=Kind.BROADCAST):
    """Send to every actor. Answered only if it fails."""


@dataclass(frozen=True, slots=True)
class SendToActors(Body, kind=Kind.SEND):
    """Send to actors; replies go to a port, or nowhere. Answered only if it fails."""

    mesh: Id
    endpoint: str
    selection: str
    """``all`` or ``choose``."""
    port: Any
    """A reference to the port for replies; None for none."""
    trace: str | None = None
    """As in `EndpointCall`."""


@dataclass(frozen=True, slots=True)
class CancelOperation(Body, kind=Kind.CANCEL):
    """Withdraw an operation that has not been started. Result: whether that was in time."""

    operation: Id
    first_chunk: int | None = None
    """Number of the operation's first chunk, when chunks travel in a lane of their own."""


@dataclass(frozen=True, slots=True)
class ReconfigureActors(Body, kind=Kind.RECONFIGURE):
    """Give the replicas in actors new configuration. Result: each replica's acknowledgement."""

    mesh: Id
    config: Mapping[str, Any]
    """New values by key."""


@dataclass(frozen=True, slots=True)
class AskWeaver(Body, kind=Kind.ASK_WEAVER):
    """Ask the weaver for an operation. Result: the weaver's answer."""

    operation: str
    """Name of an operation of `loom.weaver`, such as ``command``."""
    arguments: Mapping[str, Any]
    timeout: float
    """Seconds that the weaver has to answer."""


@dataclass(frozen=True, slots=True)
class Debug(Body, kind=Kind.DEBUG):
    """Ask the debugger of the session's actors for an operation. Result: the operation's."""

    operation: str
    """A method of `loom_gateway.driver.monarch.debugger.SessionDebugger`, of those in its ``OPERATIONS``."""
    arguments: Sequence[Any]


@dataclass(frozen=True, slots=True)
class ListUnclaimed(Body, kind=Kind.UNDELIVERED):
    """List the unclaimed results: calls of earlier clients whose answers none of them received.

    Result: a list of ``(operation, mesh's name, endpoint, adverb, (labels, offset, sizes, strides), answers)``.
    """


@dataclass(frozen=True, slots=True)
class AskLife(Body, kind=Kind.LIFE):
    """Ask until when the session lives once this client has left, of a driver with the capability ``life``.

    Result: the fields of `loom.session_alive.SessionLife`, with ``because`` as texts.
    """


@dataclass(frozen=True, slots=True)
class ReadAnswers(Body, kind=Kind.READ):
    """Tell which answers of calls the program has read, to a driver with the capability ``reads``.

    The driver keeps an answer until then: a program that dies without having read it leaves it to the next one. The
    message's id is one of the client's, which reads its own answers only.
    """

    answers: Sequence[Any]
    """The id of each operation; of a `StreamCall`, the id and the number of the answer."""


@dataclass(frozen=True, slots=True)
class CollectAnswer(Body, kind=Kind.COLLECT):
    """Claim the results of an earlier client's call. The answers are those of the call, when they come."""

    operation: Id


@dataclass(frozen=True, slots=True)
class DropAnswer(Body, kind=Kind.DROP):
    """Drop the results of an earlier client's call, of a driver with the capability ``drops``. Result: None.

    The call itself runs on; what it still answers is dropped when it comes.
    """

    operation: Id


# Ports: messages from actors to a client, and from a client to ports in the cluster.


@dataclass(frozen=True, slots=True)
class OpenPort(Body, kind=Kind.PORT_OPEN):
    """Open a port, whose id is this message's. Answered only if it fails. From client to driver."""

    once: bool
    """True if the port takes one message only."""
    messages: int
    """The number of messages that the driver may send at first; see `GrantCredit`."""
    size: int
    """Bytes that the driver may send at first."""


@dataclass(frozen=True, slots=True)
class SendToPort(Body, kind=Kind.PORT_SEND):
    """Send to a port. Payload: the object. From client to driver."""

    port: Id
    is_exception: bool
    """True if the receiver raises the object."""


@dataclass(frozen=True, slots=True)
class GrantCredit(Body, kind=Kind.PORT_CREDIT):
    """Allow the driver to send more messages of the port with this id. From client to driver."""

    messages: int
    """The number of further messages."""
    size: int
    """Bytes of further messages."""


@dataclass(frozen=True, slots=True)
class ClosePort(Body, kind=Kind.PORT_CLOSE):
    """Close the port with this id. From client to driver."""


@dataclass(frozen=True, slots=True)
class PortMessages(Body, kind=Kind.PORT_MESSAGES):
    """Small messages to the port with this id. From driver to client.

    Payload: one part, the pickles back to back.
    """

    sizes: bytes
    """Bytes of each pickle, four bytes each, big endian."""
    ranks: bytes
    """Rank of each sender, four bytes each, big endian; 0xffffffff for none. Empty if no message has a rank."""


@dataclass(frozen=True, slots=True)
class PortMessage(Body, kind=Kind.PORT_MESSAGE):
    """A message to the port with this id. From driver to client.

    Payload: the object; with a code, the payload of an `OperationError`. With the code ``exception`` the receiver
    raises the exception itself.
    """

    rank: int | None
    """Rank of the sender, if it has one."""
    code: str | None
    """Code of the error; None for an ordinary object."""


# Functions that run in the driver, printed lines, and the session's end.
#
# From client to driver, except `RunChanged` and `LogLines`.


STDOUT, STDERR, RECORD = 1, 2, 3
"""The streams of a run's output: its two texts, and the records of `loom.notebook.displays` between them."""


MOST_RESTARTS = 1_000_000
"""Times at most that a function is started again."""

AT_EACH = MOST_RESTARTS + 1
"""For `StartRun.restarts`: the function runs in each driver of its session, whether it ends well or not."""


@dataclass(frozen=True, slots=True)
class StartRun(Body, kind=Kind.RUN):
    """Run a function in the driver. Result: the function's result.

    Payload: ``(fn, args, kwargs)``. The message's id becomes the run's.
    """

    name: str
    """Name of the run, for lists and for lines of its output."""
    detached: bool
    """True if the run is detached: it is not answered, and only `RunChanged` reports its end."""
    trace: str | None = None
    """The trace id that the function begins with, for a driver with the capability ``traces``."""
    restarts: int | None = None
    """Times that the function is started again after it has raised, or its driver has died; `AT_EACH` for one that
    runs in each driver of the session before all others. For a driver with the capability ``restarts``."""


@dataclass(frozen=True, slots=True)
class ListRuns(Body, kind=Kind.RUNS):
    """List the runs of the session. Result: a list of ``(run, name, status, started, finished)``."""

    trainings: bool | None = None
    """True for a sixth item: ``(id, name)`` of each training's run that the function is of. Only for a driver with
    the capability ``trainings``."""


@dataclass(frozen=True, slots=True)
class AwaitRun(Body, kind=Kind.RUN_RESULT):
    """Wait for a run. The answer is the run's, when it has finished."""

    run: Id


@dataclass(frozen=True, slots=True)
class ReadRunOutput(Body, kind=Kind.RUN_OUTPUT):
    """Read the output of a run. Result: ``(position, ended, [(stream, text)])``.

    The position is the one after the text; the stream is `STDOUT`, `STDERR`, or `RECORD` for a whole record.
    """

    run: Id
    position: int
    """Position to read from."""
    wait: bool
    """True to answer only when there is more output, or the run has ended."""


@dataclass(frozen=True, slots=True)
class EndRun(Body, kind=Kind.RUN_END):
    """Cancel or forget a run."""

    run: Id
    how: str
    """``cancel``, with the result whether the run was going; or ``forget``, which is not answered."""


@dataclass(frozen=True, slots=True)
class EndSession(Body, kind=Kind.END):
    """End the session and stop its meshes. The driver sends `SessionEnded`."""


@dataclass(frozen=True, slots=True)
class RunChanged(Body, kind=Kind.RUN_STATE):
    """A run has begun or ended. From driver to client; the id is the run's."""

    status: str
    started: float
    """Seconds since the epoch."""
    finished: float | None
    """Seconds since the epoch; None while the run goes on."""


@dataclass(frozen=True, slots=True)
class SetLogOptions(Body, kind=Kind.LOG_OPTIONS):
    """Choose which of a proc mesh's log lines to send. Result: None. From client to driver."""

    procs: Id
    stream: bool
    """True to send lines at all."""
    window: float | None
    """Seconds over which identical lines become one; None sends each at once."""
    level: int
    """Level of the root logger."""


@dataclass(frozen=True, slots=True)
class FlushLogs(Body, kind=Kind.FLUSH_LOGS):
    """Answer when all lines that were printed until now have been sent. Result: None. From client to driver."""


@dataclass(frozen=True, slots=True)
class LogLines(Body, kind=Kind.LOG):
    """Lines that processes have printed. From driver to client. Payload: msgpack, a list of lines.

    Each line is ``[time, mesh, place, ranks, stream, text, count]``: seconds since the epoch, the mesh's name, the
    place of the first rank that printed it (``hosts=0,gpus=1``), all such ranks, ``stdout`` or ``stderr``, the
    text, and the number of times that it was printed.
    """


# Syncing a folder to every host. From client to driver.


@dataclass(frozen=True, slots=True)
class BeginSync(Body, kind=Kind.SYNC):
    """Begin to sync a folder. Result: the digests that the cluster lacks.

    Payload: a packed `loom.manifest.Manifest`. An earlier sync that was not committed is given up.
    """

    sync: Id
    """Id of the sync, for the messages that follow."""


@dataclass(frozen=True, slots=True)
class SendPieces(Body, kind=Kind.SYNC_PIECES):
    """Send pieces of contents. Payload: a part for each piece. Result: None."""

    sync: Id
    pieces: Sequence[Any]
    """``[digest, offset, length, compressed]`` of each piece."""


@dataclass(frozen=True, slots=True)
class CommitSync(Body, kind=Kind.SYNC_COMMIT):
    """Give the folder to every host, and to meshes that are spawned later.

    Result: ``missing``, digests that the cluster lacks after all, and ``warnings``.
    """

    sync: Id


# Bodies of messages about the processes of ranks.


@dataclass(frozen=True, slots=True)
class AskRank(Body, kind=Kind.RANK):
    """Ask for an operation in the process of a rank, such as running a command. Result: the operation's.

    Payload: the operation's arguments, a tuple.
    """

    operation: str
    """An operation of `loom_gateway.driver.handlers.remote_exec.RankOperations`."""
    mesh: Id
    """A proc mesh, or an actor mesh, whose processes are meant."""
    rank: int
    """The rank of the process in its proc mesh."""


# Clocks and spans; see `loom.tracing`. From client to driver, which has the capability ``traces``.


@dataclass(frozen=True, slots=True)
class ReadClock(Body, kind=Kind.CLOCK):
    """Read the driver's clock, the session's time line. Result: its seconds."""


@dataclass(frozen=True, slots=True)
class CollectSpans(Body, kind=Kind.COLLECT_SPANS):
    """Collect the spans of the session's processes for a while. Result: a list of `ProcessSpans`.

    The driver asks the client that drives with the notice ``collect_spans``, if it is the same user's.
    """

    seconds: float
    kernels: bool
    """True to run torch's profiler in processes that have loaded torch."""


@dataclass(frozen=True, slots=True)
class SendSpans(Body, kind=Kind.SPANS):
    """Answer the notice ``collect_spans``. Not answered. Payload: `ProcessSpans` as JSON."""

    collection: int
    """The notice's ``collection``."""


# Answers and notices. From driver to client.


@dataclass(frozen=True, slots=True)
class OperationResult(Body, kind=Kind.RESULT):
    """An operation succeeded. Payload: the result."""

    rpc_ms: float
    """Milliseconds from the operation's arrival at the driver to its answer."""
    index: int | None = None
    """The number of this answer among several, for a `StreamCall`."""

    # For the hot path: making a body for each answer would take longer than the rest of the work.

    @classmethod
    def message_of(cls, ident: int, parts: Sequence[Buffer], rpc_ms: float, index: int | None = None) -> Message:
        body = (rpc_ms,) if index is None else (rpc_ms, index)
        return new_message(Message, (cls.KIND, ident, body, parts))

    @classmethod
    def fields(cls, body: Sequence[Any]) -> tuple[float, int | None]:
        """Return ``rpc_ms`` and ``index`` of a peer's body, checked as by `from_body`."""
        if len(body) == 1 and type(body[0]) is float and body[0] >= 0:
            return body[0], None
        result = cls.from_body(body)
        return result.rpc_ms, result.index


@dataclass(frozen=True, slots=True)
class OperationError(Body, kind=Kind.ERROR):
    """An operation failed.

    Payload: `loom.wire.frames` with ``text``, ``formatted``, ``type`` and ``original``, then the pickled exception
    if there is one.
    """

    rpc_ms: float
    """Milliseconds from the operation's arrival at the driver to its failure."""
    code: str
    """Code of the error in `loom.errors`."""
    index: int | None = None
    """The number of this answer among several, for a `StreamCall`."""


@dataclass(frozen=True, slots=True)
class Notice(Body, kind=Kind.EVENT):
    """An event happened. Payload: the event's details, packed by `loom.wire.frames`."""

    name: str
    """Name of the event: ``actors_lost``, ``gateway_draining``, …"""


@dataclass(frozen=True, slots=True)
class SessionEnded(Body, kind=Kind.ENDED):
    """The session is over, and its meshes have been stopped."""

    reason: str


# Bodies of messages between a driver and the processes that it started; see `loom_gateway.driver.process_link`.


@dataclass(frozen=True, slots=True)
class Challenge(Body, kind=Kind.CHALLENGE):
    """Ask who connects for a proof. From the driver; outside the numbered stream, as the next five."""

    nonce: str
    """The driver's part of what the proofs are over; see `loom.mutual_auth`."""
    clock: float | None = None
    """The driver's clock, by which the process corrects its own; see `loom.tracing.clock`."""


@dataclass(frozen=True, slots=True)
class Tie(Body, kind=Kind.TIE):
    """Answer the driver's challenge."""

    nonce: str
    """The process's part of what the proofs are over."""
    proof: str
    """That the process's end knows the driver's key, and says the rest."""
    name: str
    """A name that the process's end has chosen at random, by which its later connections resume the line."""
    procs: Id
    """Id of the process's proc mesh."""
    rank: int
    again: bool
    """True if the driver has answered this process before, and must know it."""
    received: int
    """Number of the last frame that this end has received."""
    master: str | None = None
    """``HOST PORT``, where the processes of the mesh may meet, from the first of them; empty from one that asks for
    it; None from one that needs none."""

    @property
    def said(self) -> tuple[str, ...]:
        """The purpose of the proof."""
        return self.name, *map(str, (self.procs, self.rank, self.again, self.received)), self.master or ""


@dataclass(frozen=True, slots=True)
class Tied(Body, kind=Kind.TIED):
    """Accept the process's end. From the driver."""

    proof: str
    received: int
    """Number of the last frame that the driver has received."""
    weaver: str
    """The weaver's address, perhaps empty."""
    master: str | None = None
    """The content of the `Tie` of the proc mesh's first process; None if that is gone."""

    @property
    def said(self) -> tuple[str, ...]:
        """The purpose of the proof."""
        return "tied", str(self.received), self.weaver, self.master or ""


@dataclass(frozen=True, slots=True)
class Untied(Body, kind=Kind.UNTIED):
    """Refuse the process's end: the session has given up the process, which ends at once. From the driver."""

    proof: str

    @property
    def said(self) -> tuple[str, ...]:
        """The purpose of the proof."""
        return ("untied",)


@dataclass(frozen=True, slots=True)
class Watch(Body, kind=Kind.WATCH):
    """Ask which processes of a proc mesh are gone, now and later. The first one answers the driver's challenge."""

    nonce: str
    """The asking process's part of what the proofs are over; empty in a later one, as is the proof."""
    proof: str
    """That who asks knows the driver's key, and says the rest."""
    procs: Id
    """Id of the proc mesh."""

    @property
    def said(self) -> tuple[str, ...]:
        """The purpose of the proof."""
        return "watch", str(self.procs)


@dataclass(frozen=True, slots=True)
class ProcessesGone(Body, kind=Kind.PROCESSES_GONE):
    """Answer a `Watch`, perhaps with no rank, or report that more processes are gone. From the driver."""

    proof: str
    """Empty in all but the first on a connection."""
    procs: Id
    ranks: Sequence[int]

    @property
    def said(self) -> tuple[str, ...]:
        """The purpose of the proof."""
        return "gone", str(self.procs), *map(str, self.ranks)


@dataclass(frozen=True, slots=True)
class LineHeld(Body, kind=Kind.LINE_HELD):
    """Report that the process's agent holds the line from now on, and will report the process's end."""


@dataclass(frozen=True, slots=True)
class ProcessOutput(Body, kind=Kind.PROCESS_OUTPUT):
    """Report what a process has printed. Payload: the bytes."""

    stream: int
    """1: standard output; 2: standard error."""
    time: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class OutputSkipped(Body, kind=Kind.OUTPUT_SKIPPED):
    """Report that a process printed more than is sent."""

    stream: int
    time: float
    size: int
    """Bytes that were left out."""
    lines: int


@dataclass(frozen=True, slots=True)
class FlushOutput(Body, kind=Kind.FLUSH_OUTPUT):
    """Send all output so far, then `OutputFlushed`. From the driver."""


@dataclass(frozen=True, slots=True)
class OutputFlushed(Body, kind=Kind.OUTPUT_FLUSHED):
    """Report that all output before a `FlushOutput` has been sent."""


@dataclass(frozen=True, slots=True)
class TellEnd(Body, kind=Kind.TELL_END):
    """Tell in `ProcessEnded` how the process has ended. From the driver; older agents ignore it."""

    leaving: bool = False
    """Whether to send `HostLeaving`, too."""


@dataclass(frozen=True, slots=True)
class HostLeaving(Body, kind=Kind.HOST_LEAVING):
    """Report that the process's host is about to be left, because its worker ends or it is drained."""

    reason: str
    """Why, for people; empty if it is not left any more."""


@dataclass(frozen=True, slots=True)
class ProcessEnded(Body, kind=Kind.PROCESS_ENDED):
    """Report that the process has ended. Output of its children may follow."""

    end: Sequence[Any] | None = None
    """The fields of `loom.control.process_end.ProcessEnd`, in their order; None for a driver without `TellEnd`."""
