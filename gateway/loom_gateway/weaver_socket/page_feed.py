"""`PageFeed`: what the pages of one user get, from a snapshot of the weaver until the weaver is away.

Events, and changes that are rare, go to every page, and are kept for a page whose socket was lost. Replicas'
reports go into the roster. In rounds each page is sent what of its subscription has changed since the last time.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from loom.process import tasks
from loom.process.tasks import Turns
from loom.wire.plain import exact_json
from loom_gateway.weaver_socket.columns import encode_frame
from loom_gateway.weaver_socket.subscribers import KeptMessages, SubscribingReader
from loom_gateway.weaver_socket.user_replicas import STATES, Aggregates, Roster


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
        handlers = {id: {"handlers": one["handlers"]} for id, one in more.get("replicas", {}).items()}
        rest = {name: value for name, value in more.items() if name != "replicas"}
        if handlers or rest:
            self._publish({"type": "delta", "replicas": handlers, "devices": {}, **rest})

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
