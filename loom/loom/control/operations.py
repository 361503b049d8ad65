"""The operations of the weaver: each one's arguments, REST route, reach and result, declared once.

The gateway's router, the weaver's checks, the reach of guests and admins, and the clients are made of them. A new
one is a class here, a handler in `loom.weaver.server.handlers` and a method in `loom_proxy.weaver.methods`. Those
at the end have no route: only Loom's own processes ask for them.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum, Flag, auto
from functools import cache, partial
from string import Formatter
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from loom.control import arguments as check
from loom.control.commands import CommandKind
from loom.control.fault_kinds import MAX_DURATION
from loom.control.frame import MAX_NAME
from loom.control.latencies import BOUNDS
from loom.control.profiles import DEFAULT_SECONDS, LEAST_SECONDS, MOST_SECONDS
from loom.control.torchloom_names import ALIASES, translate
from loom.errors import WrongArguments
from loom.weaver.alert_views import Alert, AlertKind, AlertRule, WebhookForm
from loom.weaver.device_failures import Action
from loom.weaver.run_views import RunComparison, RunCurves, RunDetails, RunRecord, RunsPlace
from loom.weaver.views import (
    CommandState,
    DeviceInfo,
    GoodputRecord,
    InjectionState,
    MetricPoint,
    NewPoints,
    ProfileInfo,
    QueryResult,
    ReplicaInfo,
    WeaverEvent,
    WeaverStatus,
)

Op = TypeVar("Op", bound="Operation")

Ask = Callable[..., Any]
"""A function that does an operation and returns its result, as `loom.weaver.views` describes it.

It takes the operation's name, and its arguments by name; ``wait`` is the seconds to wait for acknowledgements. One
that is None counts as not given.
"""

MAX_WAIT = 300.0
"""Seconds that one request may wait for acknowledgements."""

QUERY_TIMEOUT = 10.0
"""Seconds that a query of the history may take."""

MAX_SQL = 8000
"""Characters of a query, which travels in a URL."""

STACK_WAIT = 30.0
"""Seconds that getting a stack or a profile may take, in addition to those that it is taken for."""


@dataclass(frozen=True)
class ArgumentBounds:
    """Bounds of an argument, in pydantic's words, which reads them where there is pydantic.

    The weaver checks types, signs and patterns alone. It takes ``le`` for more, as programs of a session rely on.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None

    __is_annotated_types_grouped_metadata__: ClassVar[Literal[True]] = True

    def __iter__(self) -> Iterator[object]:
        import annotated_types  # only pydantic asks, which needs it
        from pydantic import StringConstraints

        bounds = {
            "ge": annotated_types.Ge,
            "gt": annotated_types.Gt,
            "le": annotated_types.Le,
            "lt": annotated_types.Lt,
        }
        yield from (bound(value) for name, bound in bounds.items() if (value := getattr(self, name)) is not None)
        if self.min_length is not None:
            yield annotated_types.MinLen(self.min_length)
        if self.max_length is not None:
            yield annotated_types.MaxLen(self.max_length)
        if self.pattern is not None:
            yield from StringConstraints(pattern=self.pattern)


Name = Annotated[str, ArgumentBounds(max_length=200)]
Id = Annotated[str, ArgumentBounds(pattern=f"^{check.IDENTITY}$")]
Count = Annotated[int, ArgumentBounds(ge=0, lt=1 << 53)]
Wait = Annotated[float, ArgumentBounds(ge=0, le=MAX_WAIT)]
Target = str | list[str]


class Reach(Flag):
    """The askers of an operation, beside a user by REST."""

    NONE = 0
    GUEST = auto()
    """A guest of a session, or a user about one session: it is about the session's replicas."""
    EVERYONE = auto()
    """An admin about all users at once."""
    SESSION = auto()
    """A session's driver, about the session itself."""


class RestRoute(NamedTuple):
    """The REST route of an operation, under ``/api/v1/weaver/``, or under ``/api/v1`` if it begins with a slash.

    Arguments that are not in the path are in the query of a GET, and else in the posted object.
    """

    method: str
    path: str
    """A name in braces stands for an argument."""
    key: str = ""
    """The key of the response's object that holds the result; empty: the object is the result."""
    echo: tuple[str, ...] = ()
    """Arguments that the response's object repeats."""
    refusals: Mapping[int, str] = {}
    """Meanings of this route's own HTTP statuses."""
    needs: tuple[str, ...] = ()
    """The scope that it needs, if it is not ``view`` for a GET and ``operate`` for the others, and for what."""

    called: str = ""
    """OpenAPI's name of the argument ``id`` in the path."""

    @property
    def full_path(self) -> str:
        """The path under ``/api/v1``."""
        return self.path if self.path.startswith("/") else f"/weaver/{self.path}"

    @property
    def shown_path(self) -> str:
        """The path under ``/api/v1`` as OpenAPI shows it."""
        return self.full_path.replace("{id}", f"{{{self.called}}}") if self.called else self.full_path

    @property
    def named(self) -> list[str]:
        """The arguments in the path."""
        return [name for _, name, _, _ in Formatter().parse(self.path) if name]


INTERNAL_ROUTE = RestRoute("", "")
"""The route of an operation that has none."""


class Storing(Enum):
    """What an operation's answer says of the disk."""

    NOTHING = 0
    """It changes nothing that has to be stored."""
    STORED = 1
    """The change is stored, and refused while the disk takes nothing."""
    LATER = 2
    """The change is taken while the disk takes nothing, too, and answered once it is stored."""


class Operation:
    """An operation with its arguments. Subclasses are frozen dataclasses.

    Class arguments:
        name: the operation's name between processes.
        route: its REST route.
        result: the type of its result, as OpenAPI describes it.
        reach: who asks for it beside a user.
        about: the argument that names the one replica that it is about.
        of_runs: the arguments that name the runs that it is about.
        gives: whether it gives a command, whose state is the result.
        waits: whether the weaver answers later than at once.
        storing: what its answer says of the disk; by default `Storing.NOTHING` for a GET, else `Storing.STORED`.
        large: whether the weaver answers at once, perhaps after much work, if the result is no list.
    """

    name: ClassVar[str]
    route: ClassVar[RestRoute]
    result: ClassVar[Any]
    reach: ClassVar[Reach]
    about: ClassVar[str]
    of_runs: ClassVar[tuple[str, ...]]
    gives: ClassVar[bool]
    waits: ClassVar[bool]
    storing: ClassVar[Storing]
    large: ClassVar[bool]

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "forbid"}

    def __init_subclass__(
        cls,
        name: str,
        route: RestRoute = INTERNAL_ROUTE,
        result: Any = None,
        reach: Reach = Reach.NONE,
        about: str = "",
        of_runs: tuple[str, ...] = (),
        gives: bool = False,
        waits: bool = False,
        storing: Storing | None = None,
        large: bool = False,
    ) -> None:
        cls.name, cls.route, cls.result, cls.reach = name, route, result, reach
        cls.about, cls.of_runs, cls.gives, cls.waits = about, of_runs, gives, waits
        cls.storing = storing or (Storing.NOTHING if route.method in ("GET", "") else Storing.STORED)
        cls.large = large or typing.get_origin(result) is list
        (INTERNAL if route is INTERNAL_ROUTE else OPERATIONS)[name] = cls

    @classmethod
    def reads(cls) -> bool:
        """Return whether it changes nothing."""
        return cls.storing is Storing.NOTHING

    @classmethod
    def read(cls: type[Op], arguments: Mapping[str, Any]) -> Op:
        """Return the operation with checked arguments. Unknown ones are ignored: a newer program may send them.

        Raises:
            WrongArguments: an argument is missing, or makes no sense.
        """
        given = cls.in_own_words(arguments)
        checked = ((one, fits(given, one.name)) for one, fits in _checks(cls))  # type: ignore[arg-type]
        return cls(**{one.name: value for one, value in checked if value is not None or is_required(one)})

    @classmethod
    def in_own_words(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments in Loom's names, if they may be in others."""
        return arguments

    @classmethod
    def takes(cls, arguments: Mapping[str, Any]) -> float:
        """Return the seconds that it may take because of its arguments."""
        wait: float = arguments.get("wait", 0.0)
        return wait

    def given(self) -> dict[str, Any]:
        """Return the arguments, without those that are not given."""
        values = ((one, getattr(self, one.name)) for one in fields(self))  # type: ignore[arg-type]
        return {one.name: value for one, value in values if is_required(one) or value not in (None, one.default)}

    def noted(self) -> tuple[str, Mapping[str, object]]:
        """Return a change's event and details for the audit. Values stay out of it: they may be secrets."""
        raise NotImplementedError


OPERATIONS: dict[str, type[Operation]] = {}
"""The operations of users, by name."""

INTERNAL: dict[str, type[Operation]] = {}
"""The operations of Loom's own processes, by name."""


def known_operation(name: str) -> type[Operation] | None:
    """Return the operation with a name, of a user or of Loom's own; None if there is none."""
    return OPERATIONS.get(name) or INTERNAL.get(name)


def find_operation(name: str) -> type[Operation]:
    """Return an operation as `known_operation`. Raise `WrongArguments` if there is none."""
    found = known_operation(name)
    if found is None:
        known = ", ".join([*OPERATIONS, *INTERNAL])
        raise WrongArguments(f"the weaver knows no operation {name!r:.80}; it knows {known}")
    return found


def takes(operation: str, arguments: Mapping[str, Any]) -> float:
    """Return the seconds that an operation may take because of its arguments."""
    found = OPERATIONS.get(operation)
    return 0.0 if found is None else found.takes(arguments)


INNER = MappingProxyType({"inner": True})
"""The metadata of an argument that only Loom's own processes give."""

LISTED, SHOWN = Reach.GUEST | Reach.EVERYONE, Reach.GUEST


@dataclass(frozen=True)
class GetStatus(
    Operation, name="status", route=RestRoute("GET", "status"), result=WeaverStatus, reach=LISTED, large=True
):
    """The weaver at a glance, as far as the caller's replicas go; for an admin, ``user=*`` is everyone's."""


@dataclass(frozen=True)
class GetReplicas(
    Operation,
    name="replicas",
    route=RestRoute("GET", "replicas", "replicas"),
    result=list[ReplicaInfo],
    reach=LISTED,
):
    """All known replicas of the caller, including failed and finished ones, in the order in which they came."""


@dataclass(frozen=True)
class GetDevices(
    Operation, name="devices", route=RestRoute("GET", "devices", "devices"), result=list[DeviceInfo], reach=LISTED
):
    """Every device that the caller's replicas use, with those replicas and its state."""


@dataclass(frozen=True)
class GetEvents(
    Operation, name="events", route=RestRoute("GET", "events", "events"), result=list[WeaverEvent], reach=LISTED
):
    """Past events, at times since the epoch if wanted: the first ones after an event, or else the newest."""

    after: Count | None = None
    limit: Annotated[int, ArgumentBounds(ge=1, le=check.MOST_EVENTS)] = 100
    kind: Name | None = None
    replica: Name | None = None
    since: float | None = None
    until: float | None = None
    replicas: list[str] | None = field(default=None, metadata=INNER)
    """The only replicas whose events are wanted."""


@dataclass(frozen=True)
class GetGoodput(
    Operation, name="goodput", route=RestRoute("GET", "goodput", "jobs"), result=list[GoodputRecord], reach=LISTED
):
    """The time accounting of each job, or of one: how much of its time went to steps that count."""

    job: Name | None = None


@dataclass(frozen=True)
class GetMetrics(
    Operation,
    name="metrics",
    route=RestRoute("GET", "replicas/{replica}/metrics", "metrics"),
    result=list[str],
    reach=SHOWN,
    about="replica",
):
    """The names of the metrics that a replica reports."""

    replica: str


@dataclass(frozen=True)
class GetHistory(
    Operation,
    name="history",
    route=RestRoute("GET", "replicas/{replica}/metrics/{metric}", "points", echo=("replica", "metric")),
    result=list[MetricPoint],
    reach=SHOWN,
    about="replica",
):
    """The history of a metric between two times. If it has more points than requested, it is averaged.

    A point has the time in seconds since the epoch, the step and the value. The oldest comes first.
    """

    replica: str
    metric: str
    since: float | None = None
    until: float | None = None
    points: Annotated[int, ArgumentBounds(ge=1, le=20_000)] = 500


@dataclass(frozen=True)
class GetPoints(
    Operation,
    name="points",
    route=RestRoute("GET", "replicas/{replica}/points"),
    result=NewPoints,
    reach=SHOWN,
    about="replica",
    large=True,
):
    """The points of all metrics of a replica that came after a cursor, each in one answer of a chain of cursors.

    They are stored when the answer comes, so that no restart makes another point of one.
    """

    replica: str
    cursor: Annotated[str, ArgumentBounds(max_length=15_000)] = ""
    """That of the answer before; empty to begin with the oldest points."""
    since: float | None = None
    """The time of the last point so far, if there is one: of points that were made coarser before they were asked
    for, only later ones come."""
    limit: Annotated[int, ArgumentBounds(ge=1, le=20_000)] = 5000
    """Points in the answer, about."""


@dataclass(frozen=True)
class QueryHistory(
    Operation,
    name="query",
    route=RestRoute("GET", "query", refusals={429: "It takes too much, or too many run; the text says what."}),
    result=QueryResult,
    waits=True,
    large=True,
):
    """The result of a SELECT statement over the history of the caller's replicas, in SQLite's words.

    Its tables are replicas, metrics, runs, steps, events, config_changes and commands.
    """

    sql: Annotated[str, ArgumentBounds(min_length=1, max_length=MAX_SQL)]

    @classmethod
    def takes(cls, arguments: Mapping[str, Any]) -> float:
        return QUERY_TIMEOUT


@dataclass(frozen=True)
class GetStacks(
    Operation,
    name="stacks",
    route=RestRoute("GET", "replicas/{replica}/stacks"),
    result=str,
    reach=SHOWN,
    about="replica",
    waits=True,
):
    """The stack of each of a replica's threads, as text."""

    replica: str

    @classmethod
    def takes(cls, arguments: Mapping[str, Any]) -> float:
        return STACK_WAIT


@dataclass(frozen=True)
class GetProfile(
    Operation,
    name="profile",
    route=RestRoute(
        "GET", "replicas/{replica}/profile", refusals={409: "There is no profile of it; the text says why."}
    ),
    result=ProfileInfo,
    reach=SHOWN,
    about="replica",
    waits=True,
):
    """A profile of a replica's process: the number of times that each stack is seen within some seconds.

    One profile of a replica is taken at a time, two of a user's replicas, and four in all.
    """

    replica: str
    seconds: Annotated[float, ArgumentBounds(ge=LEAST_SECONDS, le=MOST_SECONDS)] = DEFAULT_SECONDS

    @classmethod
    def takes(cls, arguments: Mapping[str, Any]) -> float:
        seconds = arguments.get("seconds")
        wanted = float(seconds) if isinstance(seconds, (int, float)) else DEFAULT_SECONDS
        return STACK_WAIT + min(wanted, MOST_SECONDS)


@dataclass(frozen=True)
class GetReplica(
    Operation,
    name="replica",
    route=RestRoute("GET", "replicas/{id}", called="replica"),
    result=ReplicaInfo,
    reach=SHOWN,
    about="id",
):
    """A replica."""

    id: str


@dataclass(frozen=True)
class GetAddress(
    Operation,
    name="address",
    route=RestRoute("GET", "address", "address", needs=("operate", "to add replicas")),
    result=str,
):
    """The address for training processes that Loom did not spawn. Needs a token of scope operate.

    It is the value of ``LOOM_WEAVER``, and contains a key of the caller's: a process that registers with it is a
    replica of the caller. Keep it like a token.
    """


@dataclass(frozen=True)
class GetPolicies(
    Operation, name="policies", route=RestRoute("GET", "policies", "policies"), result=dict[str, Action]
):
    """The action for each group that has one when a device fails. The other groups are notified."""


@dataclass(frozen=True)
class GetCommand(
    Operation,
    name="command_state",
    route=RestRoute("GET", "commands/{id}", called="command"),
    result=CommandState,
    reach=SHOWN,
    waits=True,
):
    """The acknowledgements of a command; with ``wait``, once all replicas have answered or it has expired."""

    id: str
    wait: Wait = 0.0
    timeout: float = field(default=10.0, metadata=INNER)
    """Seconds to wait, as Loom's own processes say them."""
    after: Count | None = field(default=None, metadata=INNER)
    """A count: only the acknowledgements that came after the first so many, once there is one."""


UserCommandKind = Literal[
    CommandKind.UPDATE_CONFIG,
    CommandKind.PAUSE,
    CommandKind.RESUME,
    CommandKind.STOP,
    CommandKind.DRAIN,
    CommandKind.SAVE,
    CommandKind.EVALUATE,
    CommandKind.DEACTIVATE_DEVICE,
    CommandKind.REACTIVATE,
]
"""The kinds of command that users give. The other kinds follow from a failure or a fault."""


@dataclass(frozen=True)
class GiveCommand(
    Operation,
    name="command",
    route=RestRoute("POST", "commands"),
    result=CommandState,
    reach=Reach.GUEST,
    gives=True,
):
    """Give a command to replicas. With ``wait``, answer once all have acknowledged it or it has expired.

    Its kind may also be one of torchLoom's names, such as ``pause_training``.
    """

    kind: UserCommandKind
    target: Target | None = None
    """A replica's id, a group, a glob over both, ``*`` for all, or a list of ids; among the caller's replicas.
    Without it all are meant; of a command about devices, those on them."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """For update_config, keys and their values; for deactivate_device and reactivate, ``device`` with the device's
    uuid, or ``group`` with the name of a group or replica, whose devices are meant; those on them are told."""
    wait: Wait = 0.0
    """Seconds to wait for acknowledgements before the answer."""
    id: Id | None = None
    """An id for the command, of the caller's choice: a second request with the same id gives no second command."""
    announced: bool = False
    """True if an update_config is news of a configuration and nobody's command: a training that takes updates by
    ``get_config_update`` gets the values alone, without ``_is_weaver_command``."""

    @classmethod
    def in_own_words(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        params, kind = arguments.get("params") or {}, arguments.get("kind")
        if not isinstance(kind, str) or not isinstance(params, dict):
            return arguments
        plain = kind.value if isinstance(kind, CommandKind) else kind
        kind, target, params = translate(plain, arguments.get("target"), params)
        kinds = [one.value for one in typing.get_args(UserCommandKind)]
        if kind not in kinds:
            raise WrongArguments(
                f"there is no command {kind!r:.80}; kind is one of {', '.join((*kinds, *ALIASES))}"
            )
        return {**arguments, "kind": kind, "target": target, "params": params}

    def noted(self) -> tuple[str, Mapping[str, object]]:
        target = "*" if self.target is None else self.target
        return "commanded", {"kind": str(self.kind), "target": target, "keys": list(self.params)}


@dataclass(frozen=True)
class LinkReplica(
    Operation,
    name="link",
    route=RestRoute("POST", "links/{replica}", "links"),
    result=dict[str, str],
    about="replica",
):
    """Show the address of a replica's run in a tracker with the replica; an empty one takes it away."""

    replica: str
    tracker: Annotated[str, ArgumentBounds(min_length=1, max_length=40)]
    url: Annotated[str, ArgumentBounds(max_length=2000)] = ""
    """Of http or https, or ``file://HOST/PATH`` for files."""

    def noted(self) -> tuple[str, Mapping[str, object]]:
        return "commanded", {"replica": self.replica, "tracker": self.tracker}


@dataclass(frozen=True)
class InjectFault(
    Operation,
    name="inject",
    route=RestRoute(
        "POST",
        "inject",
        refusals={403: "The target is not marked as injectable.", 409: "It cannot have this fault."},
    ),
    result=InjectionState,
    gives=True,
):
    """Inject a fault into replicas or components of Loom that are marked as injectable.

    A fault that lasts ends by itself, or by DELETE. A fault that strikes the gateway, the weaver or a
    host on which another user has processes needs scope admin.
    """

    fault: Name
    """The kind of fault, such as sigkill; `loom inject list` shows all kinds."""
    target: Annotated[str, ArgumentBounds(min_length=1, max_length=500)] | list[str]
    """The replicas, as for a command; for dead_driver a session; for dead_gateway and dead_weaver `*`."""
    params: Mapping[str, Any] = field(default_factory=dict)
    duration: Annotated[float, ArgumentBounds(gt=0, le=MAX_DURATION)] | None = None
    """Seconds until the fault is removed; without it, as long as its kind lasts."""
    wait: Wait = 0.0
    """Seconds to wait for acknowledgements before the answer."""
    id: Id | None = None
    """An id for the fault, of the caller's choice: a second request with the same id injects no second fault.
    A fault of the gateway, the weaver or a driver has none."""

    def noted(self) -> tuple[str, Mapping[str, object]]:
        return "injected", {"fault": self.fault, "target": self.target, "duration": self.duration}


@dataclass(frozen=True)
class RemoveFault(
    Operation, name="remove_fault", route=RestRoute("DELETE", "inject/{injection}"), result=CommandState, gives=True
):
    """Remove a fault before its time is over. The replicas on its host are asked; one of them removes it."""

    injection: str

    def noted(self) -> tuple[str, Mapping[str, object]]:
        return "injected", {"removed": self.injection[:200]}


@dataclass(frozen=True)
class FailDevice(
    Operation,
    name="fail_device",
    route=RestRoute("POST", "devices/{device}/failure"),
    result=WeaverEvent,
    reach=Reach.EVERYONE,
):
    """Report a failed device. Its replicas are notified, and the policies of their groups are applied.

    An admin who names no user reports it for every user whose replicas use the device. The answer is the
    resulting event: the device, the replicas, and the action for each.
    """

    device: str
    reason: Annotated[str, ArgumentBounds(max_length=2000)] = ""
    report: Id | None = None
    """An id for the report, of the caller's choice: a second request with the same id changes nothing."""

    def noted(self) -> tuple[str, Mapping[str, object]]:
        return "injected", {"device": self.device[:200], "reason": self.reason[:200]}


@dataclass(frozen=True)
class SetPolicy(
    Operation, name="policy", route=RestRoute("POST", "policies", "policies"), result=dict[str, Action]
):
    """Set the action for a group when a device fails."""

    group: Annotated[str, ArgumentBounds(min_length=1, max_length=200)]
    """A group, or a glob; ``*`` for all."""
    action: Action

    def noted(self) -> tuple[str, Mapping[str, object]]:
        return "commanded", {"group": self.group, "action": str(self.action.value)}


@dataclass(frozen=True)
class GetRuns(
    Operation, name="runs", route=RestRoute("GET", "/runs", "runs"), result=list[RunRecord], reach=LISTED
):
    """Runs, the latest first, without what is large of their configurations and summaries."""

    run: Name | None = None
    """A name, an id, or a glob over both."""
    state: Name | None = None
    """``running``, or the state of an ended run."""
    tag: Name | None = None
    since: float | None = None
    """Only those that began at this time or later, in seconds since the epoch."""
    until: float | None = None
    archived: bool = False
    """True for the archived runs alone, which are left out otherwise."""
    sort: Name = "-began"
    """``began``, ``ended``, ``name``, ``state``, ``step``, ``summary.METRIC`` or ``config.KEY``; from large to
    small with ``-`` in front. Runs without it come last."""
    limit: Annotated[int, ArgumentBounds(ge=1, le=1000)] = 100


@dataclass(frozen=True)
class CompareRuns(
    Operation,
    name="compare_runs",
    route=RestRoute("GET", "/runs/{run}/compare/{other}"),
    result=RunComparison,
    reach=SHOWN,
    of_runs=("run", "other"),
    large=True,
):
    """The differences of two runs: of starts, configurations and summaries, and of the metrics at a step."""

    run: str
    other: str
    step: Count | None = None


@dataclass(frozen=True)
class GetRunHistory(
    Operation,
    name="run_history",
    route=RestRoute("GET", "/runs/{run}/metrics/{metric}", "points", echo=("run", "metric")),
    result=list[MetricPoint],
    reach=SHOWN,
    of_runs=("run",),
):
    """The history of a metric in a run, in the order of time. If it has more points than requested, it is averaged.

    After a restart from a checkpoint, steps come again.
    """

    run: str
    metric: str
    replica: Name | None = None
    """One of the run's replicas; by default the one with the lowest rank that has the metric."""
    points: Annotated[int, ArgumentBounds(ge=1, le=20_000)] = 500


@dataclass(frozen=True)
class GetRunCurves(
    Operation,
    name="run_curves",
    route=RestRoute("GET", "/runs/{run}/curves/{metric}"),
    result=RunCurves,
    reach=SHOWN,
    of_runs=("run",),
    large=True,
):
    """A metric of a run as curves over steps or time: of its lowest rank, a band of all ranks, or of each."""

    run: str
    metric: str
    by: Name = "step"
    """``step`` or ``time``; the unit of ``since`` and ``until``."""
    since: float | None = None
    until: float | None = None
    points: Annotated[int, ArgumentBounds(ge=1, le=20_000)] = 500
    ranks: Name = "one"
    """``one``, ``band`` or ``each``."""
    replica: Name | None = None
    """The one whose curve is wanted with ``one``; by default as for the history."""


@dataclass(frozen=True)
class GetRun(
    Operation,
    name="run",
    route=RestRoute("GET", "/runs/{id}", called="run"),
    result=RunDetails,
    reach=SHOWN,
    of_runs=("id",),
    large=True,
):
    """A run with its start, its ranks and its timeline. Of several runs with a name the latest is meant."""

    id: str


@dataclass(frozen=True)
class NoteRun(
    Operation, name="note_run", route=RestRoute("POST", "/runs/{run}/note"), result=RunRecord, of_runs=("run",)
):
    """Set the note of a run, in Markdown."""

    run: str
    text: Annotated[str, ArgumentBounds(max_length=32_768)] = ""

    def noted(self) -> tuple[str, Mapping[str, object]]:
        return "commanded", {"run": self.run[:MAX_NAME], "do": self.name}


@dataclass(frozen=True)
class TagRun(
    Operation, name="tag_run", route=RestRoute("POST", "/runs/{run}/tags"), result=RunRecord, of_runs=("run",)
):
    """Add tags to a run, and remove others."""

    run: str
    add: Annotated[list[str], ArgumentBounds(max_length=32)] = field(default_factory=list)
    remove: Annotated[list[str], ArgumentBounds(max_length=32)] = field(default_factory=list)

    def noted(self) -> tuple[str, Mapping[str, object]]:
        return "commanded", {"run": self.run[:MAX_NAME], "do": self.name}


BRANCH_WITHIN = 300.0
"""Seconds that a branch may take to begin; as long again for the end of the run whose place it takes."""


@dataclass(frozen=True)
class BranchRun(
    Operation,
    name="branch_run",
    route=RestRoute(
        "POST",
        "/runs/{run}/branch",
        refusals={409: "Nothing here can start it; the text says why, and the `loom branch` line to call."},
    ),
    result=RunRecord,
    of_runs=("run",),
    waits=True,
):
    """Start the command of a living run again from one of its checkpoints, where and as it was started.

    The answer is the new run, once it has registered.
    """

    run: str
    step: Count | None = None
    """The branch begins with the last checkpoint at or before it; without it, with the last one."""
    set: Mapping[str, Any] = field(default_factory=dict)
    """Values to change before the first step. ``"0.5x"`` is half of the run's value at that step."""
    replace: bool = False
    """Whether the run saves a checkpoint, is stopped, and gives its place to the branch."""

    @classmethod
    def takes(cls, arguments: Mapping[str, Any]) -> float:
        return 2 * BRANCH_WITHIN if arguments.get("replace") else BRANCH_WITHIN

    def noted(self) -> tuple[str, Mapping[str, object]]:
        return "commanded", {"run": self.run[:MAX_NAME], "do": self.name, "keys": list(self.set)}


@dataclass(frozen=True)
class ArchiveRun(
    Operation,
    name="archive_run",
    route=RestRoute("POST", "/runs/{run}/archive"),
    result=RunRecord,
    of_runs=("run",),
):
    """Leave a run out of the list, or take it in again with ``back``."""

    run: str
    back: bool = False

    def noted(self) -> tuple[str, Mapping[str, object]]:
        return "commanded", {"run": self.run[:MAX_NAME], "do": self.name, "back": self.back}


@dataclass(frozen=True)
class RemoveRun(
    Operation,
    name="remove_run",
    route=RestRoute("DELETE", "/runs/{run}", refusals={409: "It lives."}),
    result=RunRecord,
    of_runs=("run",),
):
    """Remove an ended run with its points."""

    run: str

    def noted(self) -> tuple[str, Mapping[str, object]]:
        return "commanded", {"run": self.run[:MAX_NAME], "do": self.name}


@dataclass(frozen=True)
class GetAlerts(
    Operation,
    name="alerts",
    route=RestRoute("GET", "/alerts", "alerts"),
    result=list[AlertRule],
    reach=Reach.EVERYONE,
):
    """The rules of alerts, without the secret parts of webhooks' addresses."""


@dataclass(frozen=True)
class GetAlertLog(
    Operation,
    name="alert_log",
    route=RestRoute("GET", "/alerts/log", "alerts"),
    result=list[Alert],
    reach=Reach.EVERYONE,
):
    """The last alerts, the latest first, each with what became of its deliveries."""

    alert: Name | None = None
    """Only those of the rule with this id."""
    run: Name | None = None
    """Only those about the run with this id or name."""
    limit: Annotated[int, ArgumentBounds(ge=1, le=500)] = 100


@dataclass(frozen=True)
class SetAlert(Operation, name="set_alert", route=RestRoute("POST", "/alerts"), result=AlertRule):
    """Set a rule: its condition, the runs that it is about, and where its alerts are sent."""

    rule: AlertKind
    id: Id | None = None
    """Of the rule that this one replaces, or of the caller's choice for a new one."""
    run: Name | None = None
    """The id or the name of runs, or a glob over both; without it and ``group`` all runs are meant."""
    group: Name | None = None
    """The group of runs, or a glob."""
    metric: Name | None = None
    """For not_a_number and diverged: the metric, or a glob."""
    factor: float | None = None
    """For diverged: the multiple of the best value that is far above it."""
    window: float | None = None
    """For diverged and goodput: seconds for which it has to be so."""
    seconds: float | None = None
    """For no_progress: seconds without a step."""
    steps: float | None = None
    """For no_progress: median step times without a step. With ``seconds`` both have to be over."""
    below: float | None = None
    """For goodput: its bound, from 0 to 1."""
    above: float | None = None
    """For disk: the part that may be used, from 0 to 1."""
    rearm: float | None = None
    """Seconds for which the condition must not hold before the rule fires again; by default 60."""
    webhook: Annotated[str, ArgumentBounds(max_length=2000)] | None = None
    """The address that each alert is posted to. A rule that is replaced keeps its own without one."""
    form: WebhookForm | None = None
    """``json``, or ``slack``, which Slack's own addresses have without it."""
    email: Annotated[list[str], ArgumentBounds(max_length=10)] = field(default_factory=list)
    """Addresses, if the gateway's operator allows an e-mail command."""
    quiet: bool = False
    """True for no notice on the page."""

    def noted(self) -> tuple[str, Mapping[str, object]]:
        kind = str(self.rule.value if isinstance(self.rule, Enum) else self.rule)[:MAX_NAME]
        return "commanded", {"do": self.name, "rule": kind, "run": self.run, "group": self.group}


@dataclass(frozen=True)
class RemoveAlert(Operation, name="remove_alert", route=RestRoute("DELETE", "/alerts/{alert}"), result=AlertRule):
    """Remove a rule, by its id or the beginning of it. Its alerts that are not delivered are given up."""

    alert: str

    def noted(self) -> tuple[str, Mapping[str, object]]:
        return "commanded", {"do": self.name, "alert": self.alert[:MAX_NAME]}


@dataclass(frozen=True)
class TryAlert(
    Operation, name="test_alert", route=RestRoute("POST", "/alerts/{alert}/test"), result=Alert, waits=True
):
    """Send a test alert of a rule. With ``wait``, answer once it is delivered or the seconds are over."""

    alert: str
    wait: Wait = 0.0
    """Seconds to wait for the outcome."""

    def noted(self) -> tuple[str, Mapping[str, object]]:
        return "commanded", {"do": self.name, "alert": self.alert[:MAX_NAME]}


Procs = int | str | None
"""The id of a proc mesh, in its session."""


@dataclass(frozen=True)
class ReportSpawned(Operation, name="spawned", reach=Reach.SESSION, storing=Storing.LATER):
    """Log that a driver has started processes, whose threadlets will say hello."""

    session: str
    procs: Procs = None
    mesh: str | None = None
    rank: int | None = None
    host: Procs = None
    what: str | None = None


@dataclass(frozen=True)
class ReportEnded(Operation, name="supervision", result=list[str], reach=Reach.SESSION, storing=Storing.LATER):
    """Take a driver's report that processes of its meshes have ended; return the ids of their replicas."""

    session: str
    procs: Procs = None
    mesh: str | None = None
    """The name of the proc mesh."""
    rank: int | None = None
    """None: all ranks."""
    host: Procs = None
    what: str | None = None
    """``stopped`` if the processes were meant to end."""
    reason: str = ""
    lost: bool = False
    """True if their host is gone."""
    exit: Mapping[str, Any] | None = None
    """As in `loom.weaver.views.ReplicaInfo`."""


MAX_WORKERS = 10_000
"""Workers of one session."""


MAX_PLACES = 10_000
"""Places of a session in one question."""


@dataclass(frozen=True)
class ReportCalls(Operation, name="calls", reach=Reach.SESSION):
    """Take a driver's report of its calls, and return what the user's other sessions use of the user's limits.

    ``idle`` in the result is the seconds for which no replica of the session made a step; None if it has none.
    """

    session: str
    counts: Annotated[list[int], ArgumentBounds(min_length=len(BOUNDS) + 1, max_length=len(BOUNDS) + 1)]
    """How many calls took as long as each bucket of `loom.control.latencies.BOUNDS` says."""
    sum: float = 0.0
    """Seconds of all calls."""
    workers: Annotated[list[str], ArgumentBounds(max_length=MAX_WORKERS)] = field(default_factory=list)
    """Addresses of the workers that the session uses."""
    in_flight: int = 0
    """Operations of the session without an answer."""
    kept: int = 0
    """Bytes of results that the session keeps."""
    tasks_died: int = 0
    """Background tasks of the driver that have died."""


@dataclass(frozen=True)
class AddEvent(Operation, name="note", result=int, reach=Reach.SESSION, storing=Storing.STORED):
    """Log an event of a training's own; return its id."""

    kind: str
    data: Mapping[str, Any]
    """What the event says beside id, time, kind and replica."""
    replica: str | None = None


@dataclass(frozen=True)
class GetReplicasIn(Operation, name="replicas_in", reach=Reach.SESSION, waits=True):
    """Return (rank, id) of the replicas in a proc mesh, once each of its ``ranks`` has one or the time is over."""

    session: str
    procs: Procs = 0
    ranks: list[int] = field(default_factory=list)
    timeout: float = 0.0
    """Seconds."""


@dataclass(frozen=True)
class GetRunsBegun(Operation, name="runs_begun", result=list[RunsPlace], reach=Reach.SESSION):
    """Return where and when processes of the session's runs began, as far as in one of some places."""

    session: str
    places: Annotated[list[str], ArgumentBounds(max_length=MAX_PLACES)] = field(default_factory=list)
    """As in `loom.weaver.run_views.RunsPlace`."""


@dataclass(frozen=True)
class NoteReached(Operation, name="reached", reach=Reach.SESSION, storing=Storing.LATER):
    """Write down, for the gateway's audit, what a client of a session does in the process of a rank."""

    does: str
    mesh: str | None = None
    rank: int | None = None
    what: str | None = None
    """A command, a path or a port."""
    guest: str | None = None
    """The user, if the session is another user's."""


@dataclass(frozen=True)
class GetNumbers(Operation, name="numbers", reach=Reach.EVERYONE, large=True):
    """Return a user's numbers for ``/metrics``; those of all users as packed bytes."""

    bytes: int | None = None
    """The most that the answer may have."""


@dataclass(frozen=True)
class GetUsers(Operation, name="users", result=list[str], reach=Reach.EVERYONE):
    """Return the names of the users that the weaver knows."""


@dataclass(frozen=True)
class ReadAudit(Operation, name="audit", waits=True):
    """Drop the audit's entries up to one of a trail, which are written; return those after it, or wait for some."""

    trail: str | None = None
    last: int = 0


LEASE = 10.0
"""Seconds for which a session host has its sessions after it has said that it lives."""

Sessions = Annotated[list[str], ArgumentBounds(max_length=10_000)]


@dataclass(frozen=True)
class HoldSessions(Operation, name="hold_sessions", result=list[str]):
    """Note that a session host lives, and return those of its sessions that another host has taken meanwhile."""

    host: str
    """The name that the host has given to itself."""
    sessions: Sessions = field(default_factory=list)


@dataclass(frozen=True)
class TakeSessions(Operation, name="take_sessions", result=list[str]):
    """Give sessions of a host that has been silent for `LEASE` to another one; return those that this one has now.

    It may be asked again: what a host has, it gets.
    """

    host: str
    of: str
    sessions: Sessions = field(default_factory=list)


@dataclass(frozen=True)
class WatchFully(Operation, name="watch_full"):
    """Make the following watches of the connection full ones, as `loom.weaver.server.pushes.FullWatch` says.

    It is no part of the watch's own frame, so that an older weaver refuses it and watches all the same.
    """


@dataclass(frozen=True)
class DoInSession(Operation, name="in_session"):
    """Do an operation on the replicas of one session only."""

    session: str
    do: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AsJson(Operation, name="as_json"):
    """Do an operation, and write its result as JSON.

    The gateway passes the text on. It would take long to read and write it on the event loop that relays.
    """

    do: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


Check = Callable[[Mapping[str, Any], str], Any]


@cache
def _checks(operation: Any) -> list[tuple[Any, Check]]:
    hints = typing.get_type_hints(operation, include_extras=True)
    return [(one, _check(hints[one.name], is_required(one))) for one in fields(operation)]


def is_required(one: Field[Any]) -> bool:
    """Return whether an argument has no default."""
    return one.default is MISSING and one.default_factory is MISSING


def _check(hint: Any, required: bool) -> Check:
    """Return the check of an argument with a type hint. A type without one here is checked by its handler."""
    if typing.get_origin(hint) in (typing.Union, UnionType):
        options = [one for one in typing.get_args(hint) if one is not NoneType]
        hint = options[0] if len(options) == 1 else Any
    kind, *limits = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    bounds: ArgumentBounds = limits[0] if limits else ArgumentBounds()
    if kind is str and bounds.pattern:
        return check.identity
    if kind is str:
        return check.text if required else check.text_or_none
    if kind in _NUMBERS:
        return _NUMBERS[kind]
    if typing.get_origin(kind) is list:
        (item,) = typing.get_args(kind)
        return partial(
            check.items, kind=item, least=bounds.min_length or 0, most=bounds.max_length, required=required
        )
    return check.given if required and kind is not Any else lambda given, name: given.get(name)


_NUMBERS: dict[Any, Check] = {
    int: check.count_or_none,
    float: check.seconds_or_none,
    bool: lambda given, name: given.get(name) is True or None,
}
