"""`PageFeed`: what the pages of one user get, from a snapshot of the weaver until the weaver is away.

Events, and changes that are rare, go to every page, and are kept for a page whose socket was lost. Replicas'
reports go into the roster. In rounds each page is sent what of its subscription has changed since the last time.
The gateway's own part is the sessions that a page's principal may see, and the workers.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel

from loom.process import tasks
from loom.process.tasks import Turns
from loom.wire.plain import exact_json
from loom_gateway.access.control import AccessControl
from loom_gateway.access.sessions import Principal
from loom_gateway.rest.sessions import SessionInfo
from loom_gateway.sessions.directory import SessionDirectory
from loom_gateway.sessions.session import UserSession, ask_lives
from loom_gateway.weaver_socket.replica_columns import STATES, Aggregates, Roster, encode_frame
from loom_gateway.weaver_socket.subscribers import KeptMessages, Since, SubscribingReader
from loom_gateway.workers.watcher import answers

SESSIONS_EVERY = 1.0
"""Seconds between two comparisons of the sessions with those that a page has."""

OPERATIONS_EVERY = 5
"""Comparisons between two pushes of sessions in which only the number of operations has changed."""

LIVES_EVERY = 3.0
"""Seconds between two questions to the sessions' drivers until when they live."""

WORKERS_EVERY = 5.0
"""Seconds between two checks of the workers, while there is a page."""


class WorkerInfo(BaseModel):
    """A worker host."""

    address: str
    reachable: bool
    """True if the worker answers now."""


async def check_workers(addresses: Sequence[str]) -> list[WorkerInfo]:
    """Return each worker with whether it answers now."""
    reachable = await asyncio.gather(*map(answers, addresses))
    return [WorkerInfo(address=address, reachable=one) for address, one in zip(addresses, reachable, strict=True)]


class GatewayFeed:
    """Pushes changes of sessions and workers to pages."""

    def __init__(self, manager: SessionDirectory, access: AccessControl) -> None:
        self._manager = manager
        self._access = access
        self._pages: dict[PageReader, None] = {}
        self._workers: list[Mapping[str, object]] | None = None
        """The workers at the last check; None before it."""
        self._described: dict[str, Mapping[str, object]] = {}
        """The sessions that pages see, by name, as they were at the last comparison."""
        self._tasks: list[asyncio.Task[Any]] = []

    def reader(self, principal: Principal, since: Since | None = None) -> PageReader:
        """Return a reader whose snapshots have the sessions that a principal may see, and the workers."""
        return PageReader(self, principal, since)

    @contextmanager
    def reading(self, page: PageReader) -> Iterator[None]:
        """Push each change to a reader, once it has a snapshot."""
        self._pages[page] = None
        if not self._tasks:
            self._tasks = [
                tasks.keep_running("compare sessions", self._compare_sessions),
                tasks.keep_running("ask until when sessions live", self._ask_lives),
                tasks.keep_running("check workers", self._check_workers),
            ]
        try:
            yield
        finally:
            del self._pages[page]
            if not self._pages:
                for task in self._tasks:
                    task.cancel()
                self._tasks = []
                self._workers = None
                self._described = {}

    @property
    def workers(self) -> list[Mapping[str, object]]:
        return self._workers or []

    def sessions(self, principal: Principal) -> list[Mapping[str, object]]:
        """Return the living sessions that a principal may see, as they were a moment ago."""
        return [self._described.get(one.name) or _describe(one) for one in self._access.sessions(principal)]

    async def look_at_sessions(self, principal: Principal) -> None:
        """Describe the sessions for a page that comes, in turns: this loop relays every session's calls."""
        turns = Turns()
        for session in self._access.sessions(principal):
            self._described[session.name] = self._describe_again(session, also_operations=True)
            await turns.rest()

    async def compare_sessions(self, also_operations: bool) -> None:
        """Push the sessions that have changed; numbers of operations count only with ``also_operations``."""
        turns = Turns()
        described: dict[str, Mapping[str, object]] = {}
        shown: dict[tuple[str, bool], list[Mapping[str, object]]] = {}
        for page in list(self._pages):
            whose = (page.principal.user, page.principal.is_admin)
            if whose in shown:
                continue
            found = shown[whose] = []
            for session in self._access.sessions(page.principal):
                if session.name not in described:
                    described[session.name] = self._describe_again(session, also_operations)
                    await turns.rest()
                found.append(described[session.name])
        self._described = described
        for page in list(self._pages):
            sessions = shown.get((page.principal.user, page.principal.is_admin))
            if sessions is not None:
                page.push_sessions(sessions)
            await turns.rest()

    def _describe_again(self, session: UserSession, also_operations: bool) -> Mapping[str, object]:
        """Return a session's description; the same object as before if it has not changed."""
        new, before = _describe(session), self._described.get(session.name)
        if before is None:
            return new
        compared = new if also_operations else {**new, "operations": before["operations"]}
        return before if compared == before else new

    async def _compare_sessions(self) -> None:
        rounds = 0
        while True:
            await asyncio.sleep(SESSIONS_EVERY)
            rounds += 1
            await self.compare_sessions(also_operations=rounds % OPERATIONS_EVERY == 0)

    async def _ask_lives(self) -> None:
        while True:
            shown = {one.name: one for page in self._pages for one in self._access.sessions(page.principal)}
            await ask_lives(shown.values())
            await asyncio.sleep(LIVES_EVERY)

    async def _check_workers(self) -> None:
        while True:
            found = await check_workers(self._manager.workers)
            workers: list[Mapping[str, object]] = [worker.model_dump() for worker in found]
            if workers != self._workers:
                self._workers = workers
                for page in list(self._pages):
                    page.push(workers=workers)
            await asyncio.sleep(WORKERS_EVERY)


class PageReader(SubscribingReader):
    """The reader of a page, with the changes of the gateway."""

    def __init__(self, feed: GatewayFeed, principal: Principal, since: Since | None) -> None:
        super().__init__(since)
        self._feed = feed
        self.principal = principal
        self._sessions: list[Mapping[str, object]] | None = None
        """The sessions that the page has; None before its first snapshot."""

    def own_part(self) -> Mapping[str, object]:
        self._sessions = self._feed.sessions(self.principal)
        return {"sessions": self._sessions, "workers": self._feed.workers}

    def push_sessions(self, sessions: list[Mapping[str, object]]) -> None:
        """Push the sessions if the page has others."""
        if self._sessions is not None and sessions != self._sessions:
            self._sessions = sessions
            self.push(sessions=sessions)

    def push(self, **changed: Any) -> None:
        """Push what has changed in the gateway, to a page that has a snapshot."""
        if self._sessions is not None:
            self.add(exact_json({"type": "delta", "replicas": {}, "devices": {}, **changed, "at": self.at}))


def _describe(session: UserSession) -> Mapping[str, object]:
    return SessionInfo.model_validate(session).model_dump(mode="json")


class Statuses:
    """Statuses by the devices' uuids, each with the position at which it changed last."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Any]] = {}

    def take(self, changes: Mapping[str, Any], at: int) -> None:
        """Take statuses. An unchanged one is no change."""
        for uuid, status in changes.items():
            known = self._known.get(uuid)
            if known is None or known[1] != status:
                self._known[uuid] = at, status

    def forget(self, uuids: Iterator[str]) -> None:
        for uuid in uuids:
            self._known.pop(uuid, None)

    def changed(self, sent: Mapping[str, int | None]) -> Iterator[tuple[str, str]]:
        """Yield the uuid and the JSON of each status that changed after the position beside its uuid; None: any."""
        for uuid, since in sent.items():
            known = self._known.get(uuid)
            if known is not None and (since is None or known[0] > since):
                yield uuid, exact_json(known[1])


ROUND = 0.5
"""Seconds between two rounds, and between two frames of one page."""

SOONEST_TEXT = 0.1
"""Seconds between two texts to one page with what it subscribes to."""

MAX_RATE = 150_000
"""Bytes a second of one page's frames, on average, and characters a second of these texts."""

_DESCRIBED = ("handlers", "links", "cohort", "not_offered")
"""The fields of a replica that a change of its description may have."""


class PageFeed:
    """The feed of one user's pages."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.readers: dict[SubscribingReader, None] = {}
        """The pages that have a snapshot."""
        self.begun = False
        """True if there was a snapshot."""
        self._at = 0
        self._roster = Roster()
        self._aggregates = Aggregates(self._roster)
        self._statuses = Statuses()
        self._kept = KeptMessages()
        self._changing = asyncio.Lock()
        """Held while the roster changes, or is read in several turns."""
        self._wake = asyncio.Event()
        self._next_round = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None

    async def take_snapshot(self, replicas: list[Mapping[str, Any]]) -> str:
        """Take the replicas of a snapshot; return, as JSON, what pages' snapshots have in addition."""
        async with self._changing:
            self._at += 1
            if not self.begun:
                self.begun = True
                self._kept.begin(self._at)
            turns = Turns()
            numbers = []
            for info in replicas:
                # A known replica may have changed, which will be pushed too.
                number = self._roster.numbers.get(info["id"])
                numbers.append(self._roster.describe(info, self._at) if number is None else number)
                await turns.rest()
            return exact_json({"numbers": numbers, "states": STATES, "feed": self.id, "at": self._at})

    async def take(self, body: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        """Take a push of the weaver's, and send pages of it what does not depend on subscriptions."""
        async with self._changing:
            self._at += 1
            if "event" in body:
                message = {"type": "event", "event": body["event"], **more}
                if "info" in more:
                    message["number"] = self._roster.describe(more["info"], self._at)
                self._publish(message)
            else:
                self._take_changes(body["changes"], more)
        self._wake_at(self._next_round)

    def resume(self, reader: SubscribingReader) -> bool:
        """Send a reader what it has missed, if it had a socket of this feed before and everything is known."""
        since = reader.since
        if since is None or since.feed != self.id or not self._kept.begins <= since.at <= self._at:
            return False
        reader.add_at(since.at, exact_json({"type": "resumed", "feed": self.id, "at": since.at}))
        for at, text in self._kept.after(since.at):
            reader.add_at(at, text)
        own = {"type": "delta", "replicas": {}, "devices": {}, **reader.own_part(), "at": self._at}
        reader.add_at(self._at, exact_json(own))
        self._admit(reader)
        return True

    def begin_for(self, reader: SubscribingReader, snapshot: str) -> None:
        """Send a reader a snapshot, and from then on everything that comes."""
        reader.shown.forget()
        reader.add_at(self._at, snapshot, is_snapshot=True)
        self._admit(reader)

    def leave(self, reader: SubscribingReader) -> None:
        self.readers.pop(reader, None)

    def close(self) -> list[SubscribingReader]:
        """Send nothing more; return the readers."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self.begun = False
        readers, self.readers = list(self.readers), {}
        return readers

    def _admit(self, reader: SubscribingReader) -> None:
        self.readers[reader] = None
        reader.wake = self._wake.set
        if self._task is None:
            self._task = tasks.keep_running("send pages what they subscribe to", self._send_rounds)
        self._wake.set()

    def _take_changes(self, changes: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        self._roster.take(changes["replicas"], self._at)
        self._roster.forget(more.get("forgotten", []))
        self._statuses.take(changes["devices"], self._at)
        states = more.get("device_states", {})
        self._statuses.forget(uuid for uuid, state in states.items() if state is None)
        described = {
            id: {name: one[name] for name in _DESCRIBED if name in one}
            for id, one in more.get("replicas", {}).items()
        }
        rest = {name: value for name, value in more.items() if name != "replicas"}
        if described or rest:
            self._publish({"type": "delta", "replicas": described, "devices": {}, **rest})

    def _publish(self, message: Mapping[str, object]) -> None:
        text = exact_json({**message, "at": self._at})
        self._kept.add(self._at, text)
        for reader in self.readers:
            reader.add_at(self._at, text)

    def _wake_at(self, when: float) -> None:
        if self._timer is None and self.readers:
            self._timer = asyncio.get_running_loop().call_at(when, self._wake_now)

    def _wake_now(self) -> None:
        self._timer = None
        self._wake.set()

    async def _send_rounds(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            now = loop.time()
            if now >= self._next_round:
                self._next_round = now + ROUND
                all_sent = await self._send_round(list(self.readers), now)
            else:
                all_sent = await self._send_round([one for one in self.readers if one.shown.changed], now)
            if not all_sent:
                self._wake_at(self._next_round)

    async def _send_round(self, readers: Iterable[SubscribingReader], now: float) -> bool:
        """Send readers what they lack of their subscriptions; return whether they lack nothing now."""
        subscribed = [reader for reader in readers if reader.shown]
        if not subscribed:
            return True
        async with self._changing:
            all_sent = True
            if any(reader.shown.aggregates for reader in subscribed):
                all_sent = await self._aggregates.refresh(self._at)
            turns = Turns()
            for reader in subscribed:
                await turns.rest()
                if reader in self.readers:  # it may have left meanwhile
                    all_sent &= self._send_state(reader, now)
            return all_sent

    def _send_state(self, reader: SubscribingReader, now: float) -> bool:
        """Send a reader what it lacks, unless it is too early or the reader is too slow; return whether it was."""
        shown = reader.shown
        if reader.is_behind:
            return False
        frame_is_due, text_is_due = now >= reader.frame_due, now >= reader.text_due
        shown.changed = False
        if frame_is_due and (frame := self._frame(reader)):
            reader.add_state(frame)
            reader.frame_due = now + max(ROUND, len(frame) / MAX_RATE)
        if text_is_due and (text := self._text(reader)):
            reader.at = self._at
            reader.add_state(text)
            reader.text_due = now + max(SOONEST_TEXT, len(text) / MAX_RATE)
        return frame_is_due and text_is_due

    def _frame(self, reader: SubscribingReader) -> bytes | None:
        columns = reader.shown.columns
        sections = [self._roster.section(column, since) for column, since in columns.items()]
        columns.update(dict.fromkeys(columns, self._at))
        there = [section for section in sections if section is not None]
        return encode_frame(self._at, there) if there else None

    def _text(self, reader: SubscribingReader) -> str | None:
        """Return a delta with what the reader lacks of aggregates, rows and devices."""
        shown = reader.shown
        rows = dict(self._roster.rows(shown.rows))
        shown.rows.update(dict.fromkeys(rows, self._at))
        jobs = dict(self._aggregates.since(shown.aggregates_at)) if shown.aggregates else {}
        shown.aggregates_at = self._at
        devices = dict(self._statuses.changed(shown.devices))
        shown.devices.update(dict.fromkeys(devices, self._at))
        if not rows and not jobs and not devices:
            return None
        aggregates = f', "aggregates": {_object(jobs)}' if jobs else ""
        parts = f'"replicas": {_object(rows)}, "devices": {_object(devices)}{aggregates}'
        return f'{{"type": "delta", {parts}, "at": {self._at}}}'


def _object(items: dict[str, str]) -> str:
    """Return the JSON of an object whose values are JSON already."""
    return "{" + ", ".join(f"{exact_json(name)}: {value}" for name, value in items.items()) + "}"
