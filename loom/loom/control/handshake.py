"""The beginning and the end of a connection between a threadlet and the weaver.

Nothing of a connection's `FirstFrame` is kept or unpacked before its key is good. It is ``["hello", key]``, or
``["hello", {"protocol": 1, "key": key, …}]`` from a threadlet. The key is at its beginning, so `MAX_HEAD` bytes are
enough to find it. Until then no length in the frame is believed: only the kind, the names in front of the key, and
the key are unpacked; other values are passed over without making them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

import msgpack

from loom.control.commands import FaultRemoved
from loom.control.frame import MAX_NAME, MAX_VALUES, Frame, check_count, optional_text, printable, values
from loom.control.run_start import START, RunParent
from loom.errors import ProtocolMismatch
from loom.wire.length_prefix import LENGTH

PROTOCOL = 1  # the protocol version in the first frame of both sides
MAX_APPLIED = 1024  # applied commands that a threadlet remembers, and lists in its hello

MAX_KEY = 4096
"""Characters of the longest key."""

MAX_DEVICES = 1024
"""Devices of one process, at most."""

TAKEN_ADVICE = "give each process a replica_id of its own"
"""The end of the refusal of a process whose replica another process is. Those of ``loom run`` say another."""

MAX_RANKS = 1_000_000
"""Ranks of the largest cohort."""

MAX_COMMANDS = 64
"""Kinds of commands of which a threadlet says why it refuses them, at most."""

MAX_OFFER_REASON = 500
"""Characters of such a reason; longer ones are cut."""

COMES_BACK_WITHIN = 15.0
"""Seconds for which a process that ends waits with its goodbye for a weaver that it has lost lately: one that was
killed is there again in one or two, with its gateway and on a busy machine in ten."""

_LONGEST_BEAT = 3600.0

_TAKES = (
    "spent",
    "changes",
    "health",
    "endings",
    "status_types",
    "exits",
    "cohorts",
    "offers",
    "start",
    "goodbyes",
)


class Activity(str, Enum):
    """The activity of a training loop when its threadlet connects."""

    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"


class TrainingEnding(str, Enum):
    """The way in which a training ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    EVICTED = "evicted"
    """The worker, or the scheduler, told the process to end."""
    EARLY = "early"
    """The process ended in order, within its training: nobody has told the threadlet to stop."""

    @property
    def plain(self) -> TrainingEnding:
        """The ending for a weaver that knows only the first three."""
        return TrainingEnding.STOPPED if self in (TrainingEnding.EVICTED, TrainingEnding.EARLY) else self


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or the CPU slot of a host that has none."""

    uuid: str
    """NVML's uuid of a GPU, ``CPU-host-slot`` for a CPU slot: the same after a restart."""
    kind: str
    """``gpu`` or ``cpu``."""
    server: str
    """Name of the host."""
    type: str
    """The model, such as ``NVIDIA H100 80GB HBM3``."""
    memory: int
    """Bytes; 0 if unknown."""

    def to_body(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_body(cls, body: Any) -> Device:
        if type(body) is not dict:
            raise ProtocolMismatch(f"a device is described by a map, not {body!r:.80}")
        kind = printable(body, "kind")
        if kind not in ("gpu", "cpu"):
            raise ProtocolMismatch(f"a device is a gpu or a cpu, not {kind!r:.80}")
        server, model = optional_text(body, "server") or "", optional_text(body, "type") or ""
        return cls(printable(body, "uuid"), kind, server, model, check_count("memory", body.get("memory")) or 0)


@dataclass(frozen=True, slots=True)
class CohortPlace(Frame, kind="cohort"):
    """``["cohort", id, rank, world]``, from a threadlet: the place of its process among the ranks of its job.

    The ranks of a cohort apply a command at one step. A ``world`` of 0: the process is in none any more.
    """

    id: str
    """Id of the cohort, on which its ranks have agreed."""
    rank: int
    world: int
    """The number of ranks."""

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> CohortPlace:
        match body:
            case [_, str(id), int(rank), int(world)] if len(id) <= MAX_NAME and 0 <= rank < MAX_RANKS:
                if 0 <= world <= MAX_RANKS:
                    return cls(id, rank, world)
        raise cls.mismatch(body)


@dataclass(frozen=True, slots=True)
class Offers(Frame, kind="offers"):
    """``["offers", {command: reason}, any key]``, from a threadlet: what it refuses."""

    refused: dict[str, str]
    """Why nothing in the process carries out a command now, by the command's kind."""
    any_key: bool
    """True if the program may take a configuration key without a handler, too."""

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> Offers:
        match body:
            case [_, dict(refused), bool(any_key)] if len(refused) <= MAX_COMMANDS:
                if all(type(kind) is type(why) is str and len(kind) <= MAX_NAME for kind, why in refused.items()):
                    return cls({kind: why[:MAX_OFFER_REASON] for kind, why in refused.items()}, any_key)
        raise cls.mismatch(body)


EVERYTHING_OFFERED = Offers({}, True)
"""What is said of a process before it is known what it refuses."""


@dataclass(frozen=True, slots=True)
class ThreadletHello(Frame, kind="hello"):
    """``["hello", {…}]``, the first frame from a threadlet: its identity, and the key that authenticates it.

    The map has ``protocol`` and the fields of this class. The key is the first of them: the weaver looks for it at
    the beginning of the frame (`loom.control.handshake`). Fields of newer versions are ignored.
    """

    key: str
    replica: str
    """Id of the replica, unique in the weaver."""
    instance: str
    """Id of the process, to tell it from earlier processes with the replica's name."""
    group: str
    """The group; the replica's id if it has none."""
    pid: int
    host: str
    procs: str | None
    """The proc mesh of a process that a session spawned; ``rank`` is the process's rank in it."""
    rank: int | None
    actors: str | None
    session: str | None
    devices: tuple[Device, ...]
    handlers: dict[str, str]
    """Configuration keys that can be changed, and the names of their types."""
    config: Mapping[str, Any]
    state: Activity | None
    """None if the threadlet leaves the state open."""
    step: int | None
    injectable: bool
    """True if failures may be injected into the process."""
    removed: dict[str, Mapping[str, Any]]
    """Injected faults that are gone, with the evidence: the weaver may not have heard of them."""
    applied: tuple[str, ...] = ()
    """Ids of the last applied commands, the oldest first."""
    mesh: str | None = None
    """The name of the proc mesh ``procs``."""
    respawns: bool = False
    """True if something starts another process in this one's place when it dies."""
    announced: bool = False
    """True if the threadlet tells commands from what is only `Command.announced`."""
    asks: bool = False
    """True to register nothing: the answer, a `Refusal`, says whether replicas of the group live."""
    cohort: CohortPlace | None = None
    """The place of the process among the ranks of its job; None if it has none yet."""
    hears: bool = False
    """True if the threadlet takes `AppliedByOthers`."""
    restarted: int = 0
    """The number of ranks of a job that its launcher has started again, of which this process is one; 0 if it has
    not."""
    offers: Offers = EVERYTHING_OFFERED
    start: str | None = None
    """Id of the start that the process belongs to, which is that of its run; None if nothing has given one."""
    parent: RunParent | None = None
    """The run that the start continues; on the link its text, left out with the next field if
    there is none."""
    branch_config: Mapping[str, Any] = field(default_factory=dict)
    """Of a branch: the values that the process applies by itself before its first step."""
    place: str | None = None
    """Where in its session a process began that is none of a proc mesh, as `loom.control.run_start.own_place` says;
    left out on the link if it is None."""
    patient: bool = False
    """True if the threadlet takes `loom.control.reports.AccountPause`, and ends without waiting for a last
    `loom.control.reports.Stored`: a `GoodbyeStored` tells it as much."""

    def to_body(self) -> list[Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["devices"] = [device.to_body() for device in self.devices]
        fields["state"] = None if self.state is None else self.state.value
        fields["cohort"] = None if self.cohort is None else self.cohort.to_body()[1:]
        fields["offers"] = self.offers.to_body()[1:]
        if self.parent is None:  # as for most
            del fields["parent"], fields["branch_config"]
        else:
            fields["parent"] = str(self.parent)
        if self.place is None:
            del fields["place"]
        return [self.KIND, {"protocol": PROTOCOL, **fields}]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> ThreadletHello:
        if body[0] != cls.KIND or len(body) != 2 or type(body[1]) is not dict:
            raise ProtocolMismatch(f"the first frame on the link is a hello, not {body[0]!r:.40}")
        fields = body[1]
        if fields.get("protocol") != PROTOCOL:
            raise ProtocolMismatch(
                f"the threadlet speaks version {fields.get('protocol')!r:.20}, the weaver {PROTOCOL}"
            )
        procs, devices, applied = fields.get("procs"), fields.get("devices", []), fields.get("applied", [])
        if procs is not None and type(procs) not in (int, str):
            raise ProtocolMismatch(f"procs is a name or a number, not {procs!r:.80}")
        if type(devices) is not list or len(devices) > MAX_DEVICES:
            raise ProtocolMismatch(f"devices is a list of at most {MAX_DEVICES}, not {devices!r:.80}")
        cohort = fields.get("cohort")
        if cohort is not None and type(cohort) is not list:
            raise ProtocolMismatch(f"cohort is a place in one, not {cohort!r:.80}")
        offers = fields.get("offers", EVERYTHING_OFFERED.to_body()[1:])
        if type(offers) is not list:
            raise ProtocolMismatch(f"offers are refused commands and a flag, not {offers!r:.80}")
        state = optional_text(fields, "state")
        removed = [
            FaultRemoved.from_body([FaultRemoved.KIND, *one])
            for one in values("removed", fields.get("removed", {})).items()
        ]
        replica, start = printable(fields, "replica"), optional_text(fields, "start")
        if start is not None and not START.fullmatch(start):
            raise ProtocolMismatch(f"start is an id of letters, digits, dots, - and _, not {start!r:.80}")
        return cls(
            key=_key(fields),
            replica=replica,
            instance=printable(fields, "instance"),
            group=optional_text(fields, "group") or replica,
            pid=check_count("pid", fields.get("pid")) or 0,
            host=optional_text(fields, "host") or "",
            procs=None if procs is None else str(procs),
            rank=check_count("rank", fields.get("rank")),
            actors=optional_text(fields, "actors"),
            session=optional_text(fields, "session"),
            devices=tuple(map(Device.from_body, devices)),
            handlers=Handlers.from_body([Handlers.KIND, fields.get("handlers", {})]).types,
            config=values("config", fields.get("config", {})),
            state=Activity(state) if state in list(Activity) else None,
            step=check_count("step", fields.get("step")),
            injectable=fields.get("injectable") is True,
            removed={one.injection: one.evidence for one in removed},
            applied=tuple(applied) if type(applied) is list else (),
            mesh=optional_text(fields, "mesh"),
            respawns=fields.get("respawns") is True,
            announced=fields.get("announced") is True,
            asks=fields.get("asks") is True,
            cohort=None if cohort is None else CohortPlace.from_body([CohortPlace.KIND, *cohort]),
            hears=fields.get("hears") is True,
            restarted=check_count("restarted", fields.get("restarted")) or 0,
            offers=Offers.from_body([Offers.KIND, *offers]),
            start=start,
            parent=RunParent.read(optional_text(fields, "parent") or ""),
            branch_config=values("branch_config", fields.get("branch_config", {})),
            place=optional_text(fields, "place"),
            patient=fields.get("patient") is True,
        )


def group_question(key: str, group: str) -> ThreadletHello:
    """Return the hello that asks whether replicas of a group live."""
    return ThreadletHello(
        key=key,
        replica=f"{group}_0",
        instance="asks",
        group=group,
        pid=0,
        host="",
        procs=None,
        rank=None,
        actors=None,
        session=None,
        devices=(),
        handlers={},
        config={},
        state=None,
        step=None,
        injectable=False,
        removed={},
        asks=True,
    )


def _key(fields: Mapping[str, object]) -> str:
    key = fields.get("key")
    if type(key) is not str or not 0 < len(key) <= MAX_KEY:
        raise ProtocolMismatch(f"key is a text of 1 to {MAX_KEY} characters")
    return key


@dataclass(frozen=True, slots=True)
class Handlers(Frame, kind="handlers"):
    """``["handlers", {key: type name}]``, from a threadlet: the configuration keys that can be changed now."""

    types: dict[str, str]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> Handlers:
        match body:
            case [_, dict(types)] if len(types) <= MAX_VALUES:
                if all(type(key) is type(name) is str and len(key) <= MAX_NAME for key, name in types.items()):
                    return cls(types)
        raise cls.mismatch(body)


@dataclass(frozen=True, slots=True)
class ThreadletWelcome(Frame, kind="welcome"):
    """``["welcome", {…}]``, to a threadlet: the answer to its hello.

    The map has the fields of this class and ``protocol``.
    """

    beat: float
    """Seconds between two heartbeats."""
    weaver: str
    """Id of the weaver's process, to tell it from earlier ones."""
    seq: int
    """The number of this instance's last status report that is stored."""
    spent: bool = False
    """True if the weaver takes time accounts."""
    changes: bool = False
    """True if the weaver takes changes of the devices, and drains, from a process that runs."""
    health: bool = False
    """True if the weaver takes the health of devices, and their failures."""
    endings: bool = False
    """True if the weaver knows every `TrainingEnding`."""
    status_types: bool = False
    """True if the weaver takes what a status is about, the eighth item of a report."""
    exits: bool = False
    """True if the weaver takes `Leaving`, `ExitCode` and `Silent`."""
    cohorts: bool = False
    """True if the weaver takes `CohortPlace`."""
    offers: bool = False
    """True if the weaver takes `Offers`."""
    start: bool = False
    """True if the weaver takes `loom.control.run_start.StartFacts`, and has none of the process's run."""
    goodbyes: bool = False
    """True if the weaver answers `Bye` and `Leaving` with `GoodbyeStored`."""

    def to_body(self) -> list[Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return [self.KIND, {"protocol": PROTOCOL, **fields}]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> ThreadletWelcome:
        match body:
            case [_, {"protocol": int(), "beat": int() | float() as beat, "seq": int(seq)} as fields]:
                if 0 < beat < _LONGEST_BEAT:
                    takes = {name: fields.get(name) is True for name in _TAKES}
                    return cls(beat, str(fields.get("weaver")), seq, **takes)
        raise cls.mismatch(body)


@dataclass(frozen=True, slots=True)
class Refusal(Frame, kind="refuse"):
    """``["refuse", code, text]``, to a threadlet: why the weaver closes the connection now."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Bye(Frame, kind="bye"):
    """``["bye", reason, ending]``, the last frame from a threadlet. The weaver then closes the connection."""

    reason: str
    """A text for users."""
    ending: TrainingEnding

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> Bye:
        match body:
            case [_, (str() | None) as reason, str(ending)] if ending in list(TrainingEnding):
                return cls(reason or ending, TrainingEnding(ending))
        raise cls.mismatch(body)


@dataclass(frozen=True, slots=True)
class Leaving(Frame, kind="leaving"):
    """``["leaving", reason, ending]``: a goodbye before it is known how the process ends.

    An `ExitCode` follows, or the end of the connection if the process does not come to tell it.
    """

    reason: str
    """A text for users."""
    ending: TrainingEnding
    """The ending if the exit code is 0."""

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> Leaving:
        bye = Bye.from_body(body)
        return cls(bye.reason, bye.ending)


@dataclass(frozen=True, slots=True)
class GoodbyeStored(Frame, kind="goodbye_stored"):
    """``["goodbye_stored"]``, to a threadlet: its `Bye` or `Leaving` is committed, with its reports before that."""


@dataclass(frozen=True, slots=True)
class ExitCode(Frame, kind="exit"):
    """``["exit", code]``, after `Leaving`: four bytes, little endian, because libc writes them."""

    code: bytes

    @property
    def number(self) -> int:
        """The exit code as the process's parent gets it."""
        return int.from_bytes(self.code[:1], "little")


@dataclass(frozen=True, slots=True)
class Silent(Frame, kind="silent"):
    """``["silent", seconds]``, the last frame for a replica of whose process nothing was heard for so long."""

    seconds: float


MAX_HEAD = MAX_KEY + 512
"""Bytes of a first frame in which its key has to end."""

_MAX_FIELDS = 8  # fields of a threadlet's hello up to its key

G = TypeVar("G")


class FirstFrame(Generic[G]):
    """The bytes of a connection up to the key in its first frame.

    Args:
        limit: bytes of the largest first frame.
        read: returns what a key grants; raises `AuthenticationError` if the key is wrong.
    """

    def __init__(self, limit: int, read: Callable[[str], G]) -> None:
        self._limit = limit
        self._read = read
        self._head = b""  # what has come; `MAX_HEAD` bytes at most between two calls of `feed`
        self.missing = 0
        """Bytes of the frame that have not come, as far as its length has."""
        self.asks = False
        """True if the frame whose key has come is ``["hello", key]``."""

    def feed(self, data: bytes) -> tuple[G, bytes] | None:
        """Return what the key grants, and every byte of the connection until now; None until the key has come.

        Raises:
            ProtocolMismatch: the frame is no hello, is too large, or has no key at its beginning.
            AuthenticationError: the key is wrong.
        """
        data = self._head + data
        if len(data) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data)
            if length > self._limit:
                raise ProtocolMismatch(f"the first frame claims {length} bytes; the limit is {self._limit}")
            end = LENGTH.size + length
            self.missing = max(end - len(data), 0)
            found = _key_in(data[LENGTH.size : min(end, MAX_HEAD)], whole=end <= min(len(data), MAX_HEAD))
            if found is not None:
                self._head = b""
                key, self.asks = found
                return self._read(key), data
            if len(data) >= MAX_HEAD:
                raise ProtocolMismatch(f"the first frame has no key in its first {MAX_HEAD} bytes")
        self._head = data
        return None


def _key_in(head: bytes, whole: bool) -> tuple[str, bool] | None:
    """Return the key in the beginning of a frame, and whether it stands alone; None if more has to come."""
    unpacker = msgpack.Unpacker(
        max_buffer_size=MAX_HEAD, max_array_len=0, max_map_len=0, max_bin_len=0, max_ext_len=0
    )
    unpacker.feed(head)
    try:
        length, kind = unpacker.read_array_header(), unpacker.unpack()
        if kind != "hello" or length != 2:
            raise ProtocolMismatch(f"the first frame on the link is a hello, not {kind!r:.40}")
        alone = _is_text(head, unpacker.tell())
        key = unpacker.unpack() if alone else _key_of_map(unpacker)
    except msgpack.OutOfData:
        if whole:
            raise ProtocolMismatch("the first frame on the link is a hello; this one ends within") from None
        return None
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolMismatch(f"the first frame on the link is a hello, not this: {error}") from error
    if type(key) is not str or len(key) > MAX_KEY:
        raise ProtocolMismatch(f"key is a text of at most {MAX_KEY} characters")
    return key, alone


def _is_text(head: bytes, position: int) -> bool:
    if position >= len(head):
        raise msgpack.OutOfData
    first = head[position]
    return 0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB


def _key_of_map(unpacker: msgpack.Unpacker) -> str:
    for _ in range(min(unpacker.read_map_header(), _MAX_FIELDS)):
        name = unpacker.unpack()
        if name == "key":
            key: str = unpacker.unpack()
            return key
        if name != "protocol":
            unpacker.skip()
        elif (protocol := unpacker.unpack()) != PROTOCOL:
            raise ProtocolMismatch(f"the threadlet speaks version {protocol!r:.20}, the weaver {PROTOCOL}")
    raise ProtocolMismatch("the first frame on the link has no key at its beginning")
