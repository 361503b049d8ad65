"""`SharedNotes`, by which the gateways of session hosts tell each other what they have to agree on.

Sign-outs and revocations last, and each host has them. Counts are noted on one host for a moment, and so is a code
until it is used: that host decides who was the first to use it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loom.errors import ProtocolMismatch
from loom.process import tasks
from loom_gateway.access.control import AccessControl
from loom_gateway.access.notes import Notes
from loom_gateway.access.sign_ins import LASTS
from loom_gateway.session_hosts.kept_line import KeptLine

logger = logging.getLogger(__name__)

SHARE_EVERY = 0.2  # seconds between two looks at what this gateway has for the others

COUNTS_LAST = 2.0  # seconds for which a session host tells of counts

ASK_TIMEOUT = 5.0  # seconds that a session host has to keep a code, or to say whether it has one

MOST_AT_ONCE = 500
"""Notes in one request."""


@dataclass(frozen=True)
class Lasting:
    """Facts that stay true, such as sign-outs."""

    known: Callable[[], Mapping[str, Any]]
    learn: Callable[[Mapping[str, Any]], Awaitable[None]]


class SharedNotes(Notes):
    """Keeps one gateway in agreement with the others, and its notes, such as codes, where the others find them.

    Args:
        hosts: returns the lines to the session hosts that answer.
    """

    def __init__(self, access: AccessControl, hosts: Callable[[], Sequence[KeptLine]]) -> None:
        super().__init__()
        self._hosts = hosts
        self._name = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._lasting = {
            "signed out": Lasting(lambda: access.sign_ins.ended, access.sign_ins.learn),
            "revoked": Lasting(access.revoked, access.learn_revoked),
        }
        self._told: dict[str, set[str]] = {topic: set() for topic in self._lasting}
        """The keys that all hosts were told, or that one has told."""
        self._counts = access.allowances.shared

    async def share_on(self) -> None:
        """Tell the hosts what is new at this gateway. Never returns."""
        while True:
            for topic, lasting in self._lasting.items():
                new = {key: value for key, value in lasting.known().items() if key not in self._told[topic]}
                self._told[topic].update(new)
                for host in self._hosts() if new else ():
                    tasks.run("tell a session host", self._note(host, topic, new, LASTS))
            for topic, limit in self._counts.items():
                if (counts := limit.fresh()) and (hosts := self._hosts()):
                    noted = {f"{self._name} {next(self._numbers)}": counts}
                    tasks.run("tell a session host", self._note(hosts[0], topic, noted, COUNTS_LAST))
            await asyncio.sleep(SHARE_EVERY)

    async def tell_all(self, host: KeptLine) -> None:
        """Tell a host that answers again what lasts."""
        for topic, lasting in self._lasting.items():
            await self._note(host, topic, lasting.known(), LASTS)

    async def _note(self, host: KeptLine, topic: str, notes: Mapping[str, Any], lasts: float) -> None:
        left = list(notes.items())
        while left:
            await host.tell("note", topic=topic, notes=dict(left[:MOST_AT_ONCE]), lasts=lasts)
            del left[:MOST_AT_ONCE]

    async def learn(self, notes: Sequence[Sequence[Any]]) -> None:
        """Take notes that a host tells: topic, key and value of each."""
        for topic, lasting in self._lasting.items():
            if found := {key: value for of, key, value in notes if of == topic}:
                self._told[topic].update(found)
                await lasting.learn(found)
        for topic, key, value in notes:
            if topic in self._counts and not key.startswith(self._name):
                self._counts[topic].learn(value)

    async def put(self, topic: str, key: str, value: Any, lasts: float) -> None:
        """Keep a note on one session host, or here if none answers, or all are older.

        Raises:
            SessionHostUnreachable: the host may have the note, so nobody else can have it.
        """
        for host in self._hosts():
            try:
                await host.ask("note", ASK_TIMEOUT, topic=topic, notes={key: value}, lasts=lasts)
                return
            except ProtocolMismatch as error:
                logger.warning("the other gateways do not learn of a %s: %s", topic, error)
        await super().put(topic, key, value, lasts)

    async def take(self, topic: str, key: str) -> Any:
        """Return the value of a note that nobody has taken before; None if there is none."""
        own = await super().take(topic, key)
        asked = [host.ask("take", ASK_TIMEOUT, topic=topic, key=key) for host in self._hosts()]
        found = [own, *await asyncio.gather(*asked, return_exceptions=True)]
        return next((one for one in found if one is not None and not isinstance(one, BaseException)), None)
