"""The reach of guests and admins: operations of a user's weaver, narrowed to a session or joined."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgpack

from loom.control import operations
from loom.control.arguments import check_name, text_or_none
from loom.control.commands import DEVICE_COMMANDS
from loom.control.operations import OPERATIONS, Operation, Reach
from loom.errors import Denied, NotFound, WrongArguments
from loom.weaver.commands import unknown_command
from loom.weaver.persistent_state import named
from loom.weaver.replicas import Replica
from loom.weaver.states import LIVING
from loom.weaver.views import DeviceInfo, GoodputRecord, WeaverEvent, WeaverStatus, few, to_json
from loom.weaver.weaver import Weaver

ALL_NUMBERS = 8 << 20
"""Bytes of the names and numbers of all users in one answer, far below the largest frame."""

MOST_NUMBERS = 4 << 20
"""Bytes of one user's among them: some 8,000 devices, or 8,000 replicas with 20 metrics each."""

ALL_ITEMS = 12 << 20
"""Bytes of a list of all users' replicas, devices, events or jobs, below the largest frame."""

MAX_GLOBS = 16
"""Globs in a target of several names."""

_LEAST_ITEM = 1024  # bytes of an item that is not shortened, however many there are
_LEFT_TEXT = 200  # characters that are left of a text


@dataclass(frozen=True)
class Asker:
    """The sender of a request, as its connection says."""

    by: str = "gateway"
    """The name of a token or a session, for events."""
    session: str | None = None
    admin: bool = False
    within: str | None = None
    """The only session whose runs the sender sees; None: those of all."""

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> Asker:
        by, session = text_or_none(arguments, "by"), text_or_none(arguments, "session")
        return cls(by or cls.by, session, arguments.get("admin") is True)


class Guest:
    """The operations on the replicas of one session. The user's other replicas do not exist here.

    Args:
        do: does an operation on all replicas of the user.
    """

    def __init__(self, session: str, weaver: Weaver, do: Callable[[Operation, Asker], Any]) -> None:
        self._session = session
        self._known = weaver.known
        self._do = do
        self._narrowed: dict[type[Operation], Callable[[Any, Asker], Any]] = {
            operations.GetStatus: self._status,
            operations.GetReplicas: lambda asked, asker: [
                self._do(operations.GetReplica(id), asker) for id in self._own
            ],
            operations.GetDevices: self._devices,
            operations.GetEvents: self._events,
            operations.GetGoodput: self._goodput,
            operations.GetRuns: self._do,
            operations.GiveCommand: self._command,
            operations.GetCommand: self._command_state,
        }

    def answer(self, operation: str, arguments: Mapping[str, Any]) -> Any:
        """Do an operation and return its result; the result of one that waits has to be awaited."""
        found = OPERATIONS.get(operation)
        if found is None or Reach.GUEST not in found.reach:
            raise Denied(
                f"{operation!r:.80} reaches beyond session {self._session!r}: only the session's user asks for it"
            )
        asked, asker = found.read(arguments), replace(Asker.read(arguments), within=self._session)
        if found.about:
            return self._do(self._about_own(asked, found.about), asker)
        if found.of_runs:
            return self._do(asked, asker)
        return self._narrowed[found](asked, asker)

    @property
    def _own(self) -> dict[str, Replica]:
        return {id: one for id, one in self._known.replicas.items() if one.session == self._session}

    def _about_own(self, asked: Operation, name: str) -> Operation:
        """Return an operation on the replica that an argument names by its id, or by a short name."""
        wanted, own = getattr(asked, name), self._own
        found = own.get(wanted) or named(wanted, own.values())
        if found is None:
            raise self._unknown(wanted, own)
        return replace(asked, **{name: found.id})  # type: ignore[type-var]

    def _unknown(self, wanted: object, own: Collection[str]) -> NotFound:
        return NotFound(
            f"no replica of session {self._session!r} is meant by {wanted!r:.80}; it has: {few(own)}",
            code="unknown_replica",
        )

    def _status(self, asked: operations.GetStatus, asker: Asker) -> WeaverStatus:
        own: Mapping[str, Replica] = self._own
        whole: WeaverStatus = self._do(asked, asker)
        return replace(
            whole,
            replicas=dict(Counter(one.state.value for one in own.values())),
            devices=len({device for id in own for device in self._known.devices.devices_of(id)}),
            commands=sum(
                not command.done and own.keys() >= {*command.replicas} for command in self._known.commands
            ),
            reports=sum(one.seq for one in own.values()),
        )

    def _devices(self, asked: operations.GetDevices, asker: Asker) -> list[DeviceInfo]:
        own, known = self._own, self._do(asked, asker)
        used = (replace(one, replicas=tuple(id for id in one.replicas if id in own)) for one in known)
        return [one for one in used if one.replicas]

    def _events(self, asked: operations.GetEvents, asker: Asker) -> Any:
        """Return the events about the session's replicas."""
        if asked.replica is not None:
            return self._do(self._about_own(asked, "replica"), asker)
        return self._do(replace(asked, replicas=list(self._own)), asker)

    def _goodput(self, asked: operations.GetGoodput, asker: Asker) -> list[GoodputRecord]:
        jobs = {one.job for one in self._own.values()}
        return [one for one in self._do(asked, asker) if one.job in jobs]

    def _command(self, asked: operations.GiveCommand, asker: Asker) -> Any:
        if asked.kind in DEVICE_COMMANDS:
            raise Denied(f"{asked.kind} is about a device, which other sessions may use, too")
        target = "*" if asked.target is None else asked.target
        means, own = _meaning([target] if isinstance(target, str) else target), self._own
        found = [one.id for one in own.values() if one.state in LIVING and means(one)]
        if not found:
            raise self._unknown(target, own)
        # No id of the guest's choice: it could be that of a command to other sessions' replicas.
        return self._do(replace(asked, target=found, id=None), asker)

    def _command_state(self, asked: operations.GetCommand, asker: Asker) -> Any:
        command = self._known.commands.get(asked.id)
        if command is not None and not self._own.keys() >= {*command.replicas}:
            raise unknown_command(command.id)
        return self._do(asked, asker)


def _meaning(wanted: Sequence[str]) -> Callable[[Replica], bool]:
    """Return what tells whether names mean a replica: its id, its short name, its group, or a glob over them."""
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise WrongArguments(f"a target is a name, a glob or a list of them, not {wanted!r:.80}")
    for name in wanted:
        check_name("a target", name)
    names, globs = set(wanted), [name for name in wanted if any(special in name for special in "*?[")]
    if len(globs) > MAX_GLOBS:
        raise WrongArguments(f"a target has at most {MAX_GLOBS} globs, not {len(globs)}")
    match = re.compile("|".join(map(fnmatch.translate, globs)) or r"(?!)").match

    def means(replica: Replica) -> bool:
        called = (replica.id, replica.short_name, replica.group)
        return not names.isdisjoint(called) or any(match(one) is not None for one in called)

    return means


class UserRequests(Protocol):
    """The operations on one user's weaver."""

    def do(self, asked: Operation, asker: Asker) -> Any: ...
    def check_stores(self, operation: str) -> None: ...


class OneUser(Protocol):
    """A user's weaver."""

    @property
    def requests(self) -> UserRequests: ...
    @property
    def weaver(self) -> Weaver: ...
    def commit_now(self) -> None: ...


class Everyone:
    """The operations on all users' weavers: the lists, the status, and the failure of a device.

    Args:
        users: returns the users by name, with their weavers.
    """

    def __init__(self, users: Callable[[], Iterable[tuple[str, OneUser]]]) -> None:
        self._users = users
        self._joined: dict[type[Operation], Callable[[Any, Asker], Any]] = {
            operations.GetStatus: self._status,
            operations.GetEvents: self._events,
            operations.FailDevice: self._fail_device,
            operations.GetNumbers: self._numbers,
            operations.GetUsers: lambda asked, asker: [user for user, _ in self._users()],
        }

    def do(self, asked: Operation, asker: Asker) -> Any:
        """Do an operation on all users' weavers; what it reports is stored when this returns."""
        if (joined := self._joined.get(type(asked))) is not None:
            return joined(asked, asker)
        lists = [name for name, one in OPERATIONS.items() if Reach.EVERYONE in one.reach]
        if asked.name in lists:
            return [one for found in self._lists(asked, asker).values() for one in found]
        known = dict.fromkeys([*lists, *(one.name for one in self._joined)])
        raise WrongArguments(
            f"{asked.name!r} is done for one user at a time; name the user. For all users there are "
            f"{', '.join(known)}"
        )

    def _each(self, asked: Operation, asker: Asker) -> dict[str, Any]:
        return {user: one.requests.do(asked, asker) for user, one in self._users()}

    def _lists(self, asked: Operation, asker: Asker) -> Lists:
        return bounded({user: to_json(found) for user, found in self._each(asked, asker).items()})

    def _status(self, asked: operations.GetStatus, asker: Asker) -> WeaverStatus:
        each: list[WeaverStatus] = list(self._each(asked, asker).values())
        replicas: Counter[str] = Counter()
        for one in each:
            replicas.update(one.replicas)
        return replace(
            next((one for one in each if one.undurable_since is not None), each[0]),
            replicas=dict(replicas),
            devices=sum(one.devices for one in each),
            commands=sum(one.commands for one in each),
            event=sum(one.event for one in each),
            reports=sum(one.reports for one in each),
        )

    def _events(self, asked: operations.GetEvents, asker: Asker) -> list[Mapping[str, Any]]:
        """Return the newest events of all, by time; their ids count for each user alone."""
        if asked.after is not None:
            raise WrongArguments("events are numbered for each user: name the user to read on after an event")
        each = self._lists(asked, asker)
        found: list[Mapping[str, Any]] = [
            {**event, "user": user} for user, events in each.items() for event in events
        ]
        found.sort(key=lambda event: event["time"])
        return found[-(asked.limit or 100) :]

    def _numbers(self, asked: operations.GetNumbers, asker: Asker) -> bytes:
        """Return the packed numbers of each user, for a reader that unpacks them on a thread of its own."""
        share = min(MOST_NUMBERS, ALL_NUMBERS // max(1, len(list(self._users()))))
        packed: bytes = msgpack.packb(self._each(replace(asked, bytes=share), asker))
        return packed

    def _fail_device(self, asked: operations.FailDevice, asker: Asker) -> WeaverEvent:
        """Record the failure for every user whose replicas use the device; return an event that lists them all."""
        device = asked.device
        using = {user: one for user, one in self._users() if device in one.weaver.known.devices}
        if not using:
            raise NotFound(f"no user's replicas have registered the device {device!r:.80}", code="unknown_device")
        for one in using.values():
            one.requests.check_stores(asked.name)
        events: dict[str, WeaverEvent] = {user: one.requests.do(asked, asker) for user, one in using.items()}
        for one in using.values():
            one.commit_now()
        replicas = [
            {**replica, "user": user} for user, event in events.items() for replica in event.data["replicas"]
        ]
        first = next(iter(events.values()))
        return replace(first, data={**first.data, "replicas": replicas})


Lists = Mapping[str, Sequence[Mapping[str, object]]]
"""The items of lists, as JSON, by user."""


def bounded(each: Lists) -> Lists:
    """Return lists of `ALL_ITEMS` bytes in all at most. Of users with small lists they are whole."""
    sizes = {user: len(msgpack.packb(found)) for user, found in each.items()}
    room, answer = ALL_ITEMS, dict(each)
    for number, user in enumerate(sorted(each, key=lambda user: sizes[user])):
        share = room // (len(each) - number)
        if sizes[user] > share:
            answer[user] = _cut(each[user], share)
        room -= min(sizes[user], share)
    return answer


def _cut(found: Sequence[Mapping[str, object]], share: int) -> list[Mapping[str, object]]:
    """Return the last items, without their largest members, so that they have at most so many bytes."""
    most, kept = max(_LEAST_ITEM, share // len(found)), []
    for item in reversed(found):
        item = _shortened(item, most)
        share -= len(msgpack.packb(item))
        if share < 0:
            break
        kept.append(item)
    return kept[::-1]


def _shortened(item: Mapping[str, Any], most: int) -> Mapping[str, object]:
    """Return an item, of which too large members are empty or cut, and named in ``left_out``."""
    sizes = {name: len(msgpack.packb(value)) for name, value in item.items()}
    size, left_out = sum(sizes.values()), []
    item = dict(item)
    for name in sorted(item, key=lambda name: -sizes[name]):
        if size <= most or sizes[name] <= _LEFT_TEXT or not isinstance(item[name], str | list | dict):
            break
        item[name] = item[name][:_LEFT_TEXT] if isinstance(item[name], str) else type(item[name])()
        size -= sizes[name]
        left_out.append(name)
    return {**item, "left_out": left_out} if left_out else item
