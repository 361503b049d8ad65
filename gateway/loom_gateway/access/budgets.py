"""`Budgets`: how much of the gateway each user may have at once, and how much all users together.

Each amount is taken before it is spent, whatever the scope of the token, and given back when it is free again. A
user who would exceed a budget is refused with `LimitReached`, which names the budget; nothing was begun.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from loom.errors import LimitReached

MAX_BODIES = (32 << 20, 256 << 20)
"""Bytes of requests' bodies that are not handled yet: of one user, and in all."""

MAX_ANSWERS = (64 << 20, 512 << 20)
"""Bytes of answers that clients have not read: of one user, and in all."""

MAX_TUNNELS = (256, 2048)
"""HTTP tunnels: of one user, and in all."""

MAX_WATCHERS = (256, 2048)
"""WebSockets that watch replicas, such as pages: of one user, and in all."""


class Budget:
    """An amount of which each user has a part.

    Args:
        what: the name in errors: ``bytes of unfinished bodies``.
        of_user: the amount of one user; 0: no limit.
        in_all: the amount of all users; 0: no limit.
        advice: what to do about it, for errors.
    """

    def __init__(self, what: str, of_user: int, in_all: int, advice: str) -> None:
        self.what = what
        self.of_user = of_user
        self.in_all = in_all
        self._advice = advice
        self._of: Counter[str] = Counter()
        self.taken = 0
        """The amount that all users have."""
        self._waiting: dict[str, list[Callable[[], object]]] = {}

    def of(self, user: str) -> int:
        """Return the amount that a user has."""
        return self._of[user]

    def by_user(self) -> list[tuple[str, int]]:
        """Return the amount of each user that has any."""
        return sorted(self._of.items())

    def is_full(self, user: str) -> bool:
        """Return whether a user may take nothing more for now."""
        return bool(self.of_user and self._of[user] >= self.of_user) or bool(
            self.in_all and self.taken >= self.in_all
        )

    def take(self, user: str, amount: int = 1) -> None:
        """Take an amount. Raise `LimitReached`, and take nothing, if the user or all users would have too much."""
        if self.of_user and self._of[user] + amount > self.of_user:
            raise LimitReached(f"the gateway allows a user {self.of_user} {self.what}: {self._advice}")
        if self.in_all and self.taken + amount > self.in_all:
            raise LimitReached(f"the gateway has room for {self.in_all} {self.what} of all users: {self._advice}")
        self.add(user, amount)

    def add(self, user: str, amount: int) -> None:
        """Add an amount that is there already. An adder has to stop while `is_full`."""
        self._of[user] += amount
        self.taken += amount

    def give_back(self, user: str, amount: int = 1) -> None:
        """Give back an amount that was taken."""
        self.taken -= amount
        self._of[user] -= amount
        if not self._of[user]:
            del self._of[user]
        for waiting in list(self._waiting) if self._waiting else ():
            if not self.is_full(waiting):
                for resume in self._waiting.pop(waiting):
                    resume()

    def when_room(self, user: str, resume: Callable[[], object]) -> None:
        """Call ``resume`` once, when `is_full` is over."""
        self._waiting.setdefault(user, []).append(resume)

    @contextmanager
    def held(self, user: str, amount: int = 1) -> Iterator[None]:
        """Have an amount for as long as the context lasts. Raise as `take`."""
        self.take(user, amount)
        try:
            yield
        finally:
            self.give_back(user, amount)


@dataclass(frozen=True)
class Budgets:
    """The budgets of a gateway."""

    connections: Budget
    """Connections with a request under way, or a WebSocket."""
    bodies: Budget
    answers: Budget
    tunnels: Budget
    watchers: Budget

    @classmethod
    def of(cls, connections: int = 0) -> Budgets:
        """Return budgets of which nothing is taken, with a number of connections of a user."""
        read = "read answers, and send again"
        return cls(
            Budget("connections at once (--max-connections-per-user)", connections, 0, "close some of them"),
            Budget("bytes of unfinished bodies", *MAX_BODIES, "finish those that were begun, and send again"),
            Budget("bytes of answers that are not read", *MAX_ANSWERS, read),
            Budget("tunnels", *MAX_TUNNELS, "close some of them, or wait until they are closed as idle"),
            Budget("WebSockets that watch replicas", *MAX_WATCHERS, "close some of them"),
        )

    def all(self) -> list[Budget]:
        """Return the budgets, in the order of the fields."""
        return [getattr(self, field.name) for field in fields(self)]
