"""`Everyone`: the requests of an admin that are about all users."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgpack

from loom.errors import NotFound, WrongArguments
from loom.weaver.serving.users import Users

ALL_NUMBERS = 8 << 20
"""Bytes of the names and numbers of all users in one answer, far below the largest frame."""

MOST_NUMBERS = 4 << 20
"""Bytes of one user's among them: some 8,000 devices, or 8,000 replicas with 20 metrics each."""

ALL_ITEMS = 12 << 20
"""Bytes of a list of all users' replicas, devices, events or jobs, below the largest frame."""

_LEAST_ITEM = 1024  # bytes of an item that is not shortened, however many there are
_LEFT_TEXT = 200  # characters that are left of a text


class Everyone:
    """The operations on all users' weavers: the lists, the status, and the failure of a device."""

    def __init__(self, users: Users) -> None:
        self._users = users
        self._operations: dict[str, Callable[[dict[str, Any]], Any]] = {
            "status": self._status,
            "replicas": lambda arguments: self._joined("replicas", arguments),
            "devices": lambda arguments: self._joined("devices", arguments),
            "events": self._events,
            "goodput": lambda arguments: self._joined("goodput", arguments),
            "numbers": self._numbers,
            "users": lambda arguments: [user for user, _ in self._users.items()],
            "fail_device": self._fail_device,
        }

    def answer(self, operation: str, arguments: dict[str, Any]) -> Any:
        """Do an operation on all users' weavers; what it reports is stored when this returns."""
        found = self._operations.get(operation)
        if found is None:
            raise WrongArguments(
                f"{operation!r:.80} is done for one user at a time; name the user. For all users there are "
                f"{', '.join(self._operations)}"
            )
        return found(arguments)

    def _each(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {user: one.requests.answer(operation, arguments) for user, one in self._users.items()}

    def _joined(self, operation: str, arguments: dict[str, Any]) -> list[Any]:
        return [one for found in bounded(self._each(operation, arguments)).values() for one in found]

    def _status(self, arguments: dict[str, Any]) -> dict[str, Any]:
        each = list(self._each("status", arguments).values())
        replicas: Counter[str] = Counter()
        for one in each:
            replicas.update(one["replicas"])
        sums = {name: sum(one[name] for one in each) for name in ("devices", "commands", "event", "reports")}
        first = next((one for one in each if one["undurable_since"] is not None), each[0])
        return {**first, **sums, "replicas": dict(replicas)}

    def _events(self, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the newest events of all, by time; their ids count for each user alone."""
        if arguments.get("after") is not None:
            raise WrongArguments("events are numbered for each user: name the user to read on after an event")
        each = bounded(self._each("events", arguments))
        found = [{**event, "user": user} for user, events in each.items() for event in events]
        found.sort(key=lambda event: event["time"])
        return found[-(arguments.get("limit") or 100) :]

    def _numbers(self, arguments: dict[str, Any]) -> bytes:
        """Return the packed numbers of each user, for a reader that unpacks them on a thread of its own."""
        share = min(MOST_NUMBERS, ALL_NUMBERS // max(1, len(list(self._users.items()))))
        packed: bytes = msgpack.packb(self._each("numbers", {**arguments, "bytes": share}))
        return packed

    def _fail_device(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Record the failure for every user whose replicas use the device; return an event that lists them all."""
        device = arguments.get("device")
        using = {user: one for user, one in self._users.items() if str(device) in one.weaver.known.devices}
        if not using:
            raise NotFound(f"no user's replicas have registered the device {device!r:.80}", code="unknown_device")
        for one in using.values():
            one.requests.check_stores("fail_device")
        events = {user: one.requests.answer("fail_device", arguments) for user, one in using.items()}
        for one in using.values():
            one.commit_now()
        replicas = [{**replica, "user": user} for user, event in events.items() for replica in event["replicas"]]
        return {**next(iter(events.values())), "replicas": replicas}


def bounded(each: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Return lists of `ALL_ITEMS` bytes in all at most. Of users with small lists they are whole."""
    sizes = {user: len(msgpack.packb(found)) for user, found in each.items()}
    room, answer = ALL_ITEMS, dict(each)
    for number, user in enumerate(sorted(each, key=lambda user: sizes[user])):
        share = room // (len(each) - number)
        if sizes[user] > share:
            answer[user] = _cut(each[user], share)
        room -= min(sizes[user], share)
    return answer


def _cut(found: list[dict[str, Any]], share: int) -> list[dict[str, Any]]:
    """Return the last items, without their largest members, so that they have at most so many bytes."""
    most, kept = max(_LEAST_ITEM, share // len(found)), []
    for item in reversed(found):
        item = _shortened(item, most)
        share -= len(msgpack.packb(item))
        if share < 0:
            break
        kept.append(item)
    return kept[::-1]


def _shortened(item: dict[str, Any], most: int) -> dict[str, Any]:
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
