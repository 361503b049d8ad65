"""A TCP proxy that cuts, stalls, delays, truncates and duplicates connections, as a seed has it."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
import threading
from collections import Counter
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

from tests.support.network.delay_proxy import DelayProxy, Link, Passed

__all__ = ["CUTS", "Action", "ChaosProxy", "Schedule"]

OPENING = 8 << 10
"""Bytes that are kept of what a client says first."""

REPLAY_HELD = 0.5
"""Seconds after which a replayed connection is dropped, if the server does not end it before."""


class Action(enum.Enum):
    """What happens to a connection."""

    RESET = "reset"
    """The piece is passed on, and both ends are reset (RST)."""
    FINISH = "finish"
    """The piece is passed on, and both ends are closed in good form (FIN)."""
    TRUNCATE = "truncate"
    """Part of the piece is passed on, and both ends are reset."""
    STALL = "stall"
    """Nothing passes for a while, in either direction."""
    DELAY = "delay"
    """Everything is late from then on."""
    DUPLICATE = "duplicate"
    """What the client said first is said again, to the server, on a connection of its own."""


CUTS = (Action.RESET, Action.FINISH, Action.TRUNCATE)


@dataclass
class Schedule:
    """What happens when: the same for the same seed.

    Args:
        cuts: connections that are cut, after which all is calm.
        gap: bytes that are forwarded, in both directions of all connections, between one action and the next: at
            least and at most. On a new connection they count the handshake.
        others: share of the actions that cut nothing.
        stall: seconds of a stall.
        delay: seconds of a delay.
    """

    seed: int
    cuts: int
    gap: tuple[int, int] = (500, 20_000)
    others: float = 0.2
    stall: float = 0.2
    delay: float = 0.02

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._others = [action for action in Action if action not in CUTS]

    def next(self) -> tuple[int, Action] | None:
        """Bytes until the next action, and the action; None when there are no more."""
        if not self.cuts:
            return None
        gap = self._random.randint(*self.gap)
        if self._random.random() < self.others:
            return gap, self._random.choice(self._others)
        self.cuts -= 1
        return gap, self._random.choice(CUTS)


class ChaosProxy(DelayProxy):
    """Forwards connections to ``port`` of this machine; once told to `attack`, not always faithfully."""

    def __init__(self, port: int) -> None:
        super().__init__(port, delay=0)
        self._schedule: Schedule | None = None
        self._left = 0
        self._action: Action | None = None
        self._openings: WeakKeyDictionary[Link, bytearray] = WeakKeyDictionary()
        self._answered: WeakKeyDictionary[Link, int] = WeakKeyDictionary()
        self._replays: set[asyncio.Task[None]] = set()
        self.done: Counter[Action] = Counter()
        """How often each thing was done."""
        self.links = 0
        """Connections of clients that were forwarded."""
        self.forwarded = 0
        """Bytes that came to be forwarded, in both directions."""
        self.calm = threading.Event()
        """Set when nothing more is going to happen."""

    @property
    def cuts(self) -> int:
        """Connections that were cut."""
        return sum(self.done[action] for action in CUTS)

    def attack(self, schedule: Schedule) -> None:
        """Begin, with the next byte."""
        self.calm.clear()
        self._loop.call_soon_threadsafe(self._begin, schedule)

    def _begin(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._draw()

    def _draw(self) -> None:
        following = self._schedule.next() if self._schedule is not None else None
        if following is None:
            self._action = None
            self.calm.set()
        else:
            self._left, self._action = following

    def _passed(self, link: Link, data: bytes, to_server: bool) -> Passed:
        self._remember(link, data, to_server)
        self.forwarded += len(data)
        if self._action is None:
            return data, None
        self._left -= len(data)
        if self._left > 0:
            return data, None
        action, end = self._action, len(data) + self._left
        self._draw()
        self.done[action] += 1
        if action is Action.TRUNCATE:
            data = data[:end]
        return data, partial(self._do, action, link)

    def _remember(self, link: Link, data: bytes, to_server: bool) -> None:
        """Keep what a client says before the server has answered twice: its upgrade and its hello."""
        if link not in self._openings:
            self.links += 1
            self._openings[link] = bytearray()
            self._answered[link] = 0
        if not to_server:
            self._answered[link] += 1
        elif self._answered[link] < 2 and len(self._openings[link]) < OPENING:
            self._openings[link] += data

    def _do(self, action: Action, link: Link) -> None:
        schedule = self._schedule
        assert schedule is not None
        if action is Action.FINISH:
            link.finish()
        elif action in CUTS:
            link.reset()
        elif action is Action.STALL:
            link.stall(schedule.stall)
        elif action is Action.DELAY:
            link.delay = schedule.delay
        else:
            replay = self._loop.create_task(self._replay(bytes(self._openings[link])))
            self._replays.add(replay)
            replay.add_done_callback(self._replays.discard)

    async def _replay(self, opening: bytes) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                writer.write(opening)
                await asyncio.wait_for(_discard(reader), REPLAY_HELD)
            finally:
                writer.transport.abort()


async def _discard(reader: asyncio.StreamReader) -> None:
    while await reader.read(64 << 10):
        pass
