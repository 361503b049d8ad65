"""`Moves`: sessions go on on another session host when theirs is gone, as far as they have functions with restarts.

Each host leaves copies with the others of what its sessions' next drivers need. It keeps its sessions as long as
the weaver says so, or all the other hosts do: a host that takes sessions over needs that this host has been silent
to itself, and to the weaver. So no two hosts have a session. The copies are behind by `HOLD_EVERY` at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import signal
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from loom.control.operations import LEASE, HoldSessions, Operation, TakeSessions
from loom.errors import LimitReached, LoomError, ProtocolMismatch, WeaverUnavailable, WrongState
from loom.process import tasks
from loom.process.state_file import replace_file
from loom.weaver.client import WeaverClient
from loom.weaver.keys import EVERYONE
from loom_gateway.session_hosts.kept_line import KeptLine, KeptLines
from loom_gateway.session_hosts.line import Request, field_of, known_fields
from loom_gateway.sessions.ended_sessions import EndedSession
from loom_gateway.sessions.lease_file import LeaseFile, now
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.sessions.restarts import MOST_BYTES, MovedElsewhere
from loom_gateway.sessions.session import UserSession
from loom_gateway.sessions.state_dir import DriverRecord, open_regular
from loom_gateway.workers.sources import WorkerHosts

logger = logging.getLogger(__name__)

HOLD_EVERY = 2.0
"""Seconds between two times that a host says that it lives."""

ANSWERS_WITHIN = 3.0  # seconds for the answer
SLACK = 2.0  # seconds beyond the lease before another host's is over; as in `loom.weaver.server.session_leases`

LOOK_EVERY = 1.0
"""Seconds between two looks which hosts are silent."""

PART = 1 << 20
"""Bytes of a copy that are sent at once, so that what says that a host lives is not behind a large one."""

MOST_KEPT = 1 << 30
"""Bytes of the copies of one host."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,99}")


def own_name(folder: Path) -> str:
    """Return the name of the session host with a state folder."""
    path = folder / "host-name"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    replace_file(path, f"{secrets.token_hex(8)}\n")
    return path.read_text().strip()


class Copies:
    """Copies of the sessions of other hosts, in a folder: for each session its record, and what its driver left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._heard: dict[str, float] = {}
        self._since = now()

    def hosts(self) -> list[str]:
        """Return the names of the hosts that have left copies."""
        return [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []

    def hear(self, host: str, names: Collection[str]) -> None:
        """Note that a host lives, with those sessions that can move; forget its others."""
        self._heard[host] = now()
        for name, _, _ in self.of(host):
            if name not in names:
                self.drop(host, name)

    def silence(self, host: str) -> float:
        """Return the seconds for which a host, that could have said so, has not said that it lives."""
        return now() - max(self._heard.get(host, self._since), self._since)

    def note_held_up(self, seconds: float) -> None:
        """Note that this process listened to nobody for some seconds."""
        self._since += seconds
        self._heard = {host: at + seconds for host, at in self._heard.items()}

    def take(self, host: str, name: str, record: Mapping[str, Any], at: int, size: int, part: bytes) -> None:
        """Take a part of a copy, which begins at a byte of so many. The last one makes it good.

        Raises:
            LimitReached: the copies of the host have too many bytes.
            OSError: the disk does not take it.
        """
        folder = self._folder / host
        folder.mkdir(0o700, parents=True, exist_ok=True)
        if size > MOST_BYTES or size + sum(path.stat().st_size for path in folder.iterdir()) > MOST_KEPT:
            raise LimitReached(f"this session host keeps {MOST_KEPT >> 20} MiB at most of what another one leaves")
        unfinished = folder / f"{name}.part"
        with open(unfinished, "ab" if at else "wb") as file:
            if file.tell() != at:
                raise WrongState(f"the part of a copy begins at {at}, and {file.tell()} bytes are there")
            file.write(part)
            if at + len(part) < size:
                return
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, folder / f"{name}.restart")
        replace_file(folder / f"{name}.json", json.dumps(dict(record)))

    def of(self, host: str) -> list[tuple[str, DriverRecord, Path]]:
        """Return the sessions of a host: name, record, and the file that its driver left."""
        found = []
        for path in sorted((self._folder / host).glob("*.json")):
            left = path.with_suffix(".restart")
            with contextlib.suppress(OSError, ValueError, TypeError):
                record = known_fields(DriverRecord, json.loads(path.read_bytes()))
                if left.exists():
                    found.append((path.stem, record, left))
        return found

    def drop(self, host: str, name: str) -> None:
        """Forget a session of a host, and the host with its last one."""
        for ending in (".json", ".restart", ".part"):
            (self._folder / host / f"{name}{ending}").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self._folder / host).rmdir()

    def drop_all(self, host: str) -> None:
        """Forget a host."""
        shutil.rmtree(self._folder / host, ignore_errors=True)


class Partners:
    """The hosts that may have copies of this one's sessions, in a file, a name a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names = set(path.read_text().split()) if path.exists() else set()

    def add(self, name: str) -> None:
        if name not in self._names:
            replace_file(self._path, "".join(f"{one}\n" for one in sorted({*self._names, name})))
            self._names.add(name)

    def are_all_in(self, names: set[str]) -> bool:
        """Return whether there are any, and all of them are among names."""
        return bool(self._names) and self._names <= names


class Peer(KeptLine):
    """The line to another session host."""

    def __init__(self, address: str, key: str, name: str) -> None:
        super().__init__(address, key, Request("peer", {"host": name}))
        self.name = ""
        """The other host's own name."""
        self.copied: dict[str, object] = {}
        """What it has of each session: which record, and which version of the file."""

    def _take(self, news: Mapping[str, Any]) -> None:
        self.name = str(news["host"])
        self.copied = {}
        self.heard.set()


class Moves:
    """Keeps the sessions of a manager this host's, leaves copies of them, and takes over those of dead hosts."""

    def __init__(self, manager: SessionManager, weaver: WeaverClient, key: str, peers: WorkerHosts) -> None:
        folder = Path(manager.folder.path)
        self.name = own_name(folder)
        self._manager = manager
        self._weaver = weaver
        self._peers = KeptLines(peers, lambda address: Peer(address, key, self.name))
        self._copies = Copies(folder / "copies")
        self._partners = Partners(folder / "partners")
        manager.lease = str(folder / "lease")
        manager.may_go_on = self._await_right
        self._lease = LeaseFile(manager.lease, 0o644 if manager.folder.separate else 0o600)
        self._until = 0.0  # when the lease is over
        self._extending = asyncio.Lock()
        self._warned: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self.methods = {"hold": self._hear, "copy": self._take_copy}
        """What another host may ask for, by its name and arguments."""

    def start(self) -> None:
        self._peers.start()
        self._tasks = [
            tasks.keep_running("keep the sessions of this host", self._hold_on),
            tasks.keep_running("leave copies of sessions", self._copy_on),
            tasks.keep_running("take over sessions", self._watch_others),
        ]

    def close(self) -> None:
        """Ask the others for nothing any more; they take the sessions over when the lease is over."""
        for task in self._tasks:
            task.cancel()
        self._peers.close()

    def _others(self) -> list[Peer]:
        """Return the other hosts that answer. This one may be among the peers."""
        return [one for one in self._peers.heard() if one.name != self.name]

    def _movable(self) -> dict[str, UserSession]:
        return {one.name: one for one in self._manager.sessions() if one.driver.files.leaves_functions()}

    def _warn(self, about: str, why: object = None) -> None:
        """Log once that something does not work, until it works."""
        if why is None:
            self._warned.discard(about)
        elif about not in self._warned:
            self._warned.add(about)
            logger.warning("%s: %s", about, str(why) or repr(why))

    # What this host says to the others.

    async def _hold_on(self) -> None:
        while True:
            began, movable = now(), self._movable()
            for name in await self._hold({name: one.driver.record.moves for name, one in movable.items()}):
                if not (driver := movable[name].driver).exited.is_set():
                    driver.signal(signal.SIGKILL)  # it has not seen that the lease was over
            await asyncio.sleep(max(0.0, began + HOLD_EVERY - now()))

    async def _hold(self, sessions: Mapping[str, int]) -> set[str]:
        """Say that this host lives, with sessions and how often they have moved; return those that others have."""
        began, others = now(), self._others()
        weaver, *told = await asyncio.gather(
            self._ask_weaver(HoldSessions(self.name, list(sessions))),
            *(peer.ask("hold", ANSWERS_WITHIN, sessions=sessions) for peer in others),
            return_exceptions=True,
        )
        confirmed = {peer.name for peer, one in zip(others, told, strict=True) if isinstance(one, list)}
        if isinstance(weaver, list) or self._partners.are_all_in(confirmed):
            async with self._extending:
                self._until = max(self._until, began + LEASE)
                await asyncio.to_thread(self._lease.extend, self._until)
        self._warn(
            "the weaver does not confirm that this host has its sessions",
            None if isinstance(weaver, list) else weaver,
        )
        return {name for one in (weaver, *told) if isinstance(one, list) for name in one}.intersection(sessions)

    async def _ask_weaver(self, asked: Operation) -> Any:
        try:
            return await asyncio.wait_for(self._weaver.ask_for(asked, user=EVERYONE), ANSWERS_WITHIN)
        except asyncio.TimeoutError:
            raise WeaverUnavailable(f"it has not answered within {ANSWERS_WITHIN:g} s") from None

    async def _await_right(self, name: str, moves: int) -> None:
        """Return if this host may start a driver for a session.

        Raises:
            MovedElsewhere: another host has it.
            WeaverUnavailable: it is not known now.
        """
        if name in await self._hold({name: moves}):
            raise MovedElsewhere(name)
        if now() > self._until:
            raise WeaverUnavailable(
                "neither the weaver nor all other session hosts answer: one of them may have the session"
            )

    async def _copy_on(self) -> None:
        while True:
            await asyncio.sleep(HOLD_EVERY)
            movable = self._movable()
            await asyncio.gather(*(self._leave_copies(peer, movable) for peer in self._others()))

    async def _leave_copies(self, peer: Peer, movable: Mapping[str, UserSession]) -> None:
        about = f"the session host {peer.address} has no copies of sessions"
        peer.copied = {name: version for name, version in peer.copied.items() if name in movable}
        for name, session in movable.items():
            try:
                await self._leave_copy(peer, name, session)
                self._warn(about)
            except (LoomError, OSError) as error:
                self._warn(about, error)

    async def _leave_copy(self, peer: Peer, name: str, session: UserSession) -> None:
        record = session.driver.record
        with contextlib.suppress(FileNotFoundError), open_regular(session.driver.files.restart) as file:
            found = os.fstat(file.fileno())
            version = (record, found.st_mtime_ns, found.st_ino)
            if peer.copied.get(name) == version or now() > self._until:
                return
            await asyncio.to_thread(self._partners.add, peer.name)
            at, told = 0, asdict(record)
            while part := await asyncio.to_thread(file.read, PART):
                await peer.ask("copy", session=name, record=told, size=found.st_size, at=at, part=part)
                at += len(part)
            peer.copied[name] = version

    # What other hosts say to this one.

    async def _hear(self, host: str, about: Mapping[str, Any]) -> list[str]:
        sessions = field_of(about, "sessions", dict)
        await asyncio.to_thread(self._copies.hear, host, sessions.keys())
        return [str(name) for name, moves in sessions.items() if self._has(name, moves)]

    def _has(self, name: str, moves: int) -> bool:
        """Return whether this host has, or had until its end, a session that another one also seems to have."""
        found = self._manager.find(name)
        if isinstance(found, EndedSession):  # a user who could reach this host only has ended it here
            return found.moves > moves or not found.lost
        return found is not None and found.driver.record.moves > moves

    async def _take_copy(self, host: str, about: Mapping[str, Any]) -> None:
        name, record = field_of(about, "session", str), field_of(about, "record", dict)
        at, size, part = field_of(about, "at", int), field_of(about, "size", int), field_of(about, "part", bytes)
        if not _NAME.fullmatch(name) or record.get("session") != name:
            raise ProtocolMismatch(f"a copy of a session has the name {name!r:.80}")
        try:
            await asyncio.to_thread(self._copies.take, host, name, record, at, size, part)
        except OSError as error:
            raise WrongState(f"a copy of session {name!r} cannot be kept: {error.strerror or error}") from error

    # What this host takes over.

    async def _watch_others(self) -> None:
        before = now()
        while True:
            await asyncio.sleep(LOOK_EVERY)
            if (late := now() - before - 2 * LOOK_EVERY) > 0:  # what came meanwhile is not read yet
                self._copies.note_held_up(late)
            for host in await asyncio.to_thread(self._copies.hosts):
                if self._copies.silence(host) > LEASE + SLACK:
                    await self._take_over(host)
            before = now()

    async def _take_over(self, host: str) -> None:
        """Take over the sessions of a host that is silent, unless the weaver has heard of it."""
        left = await asyncio.to_thread(
            lambda: {name: (record, path) for name, record, path in self._copies.of(host)}
        )
        about = f"the sessions of host {host}, which is silent, are not taken over"
        try:
            given = await self._ask_weaver(TakeSessions(self.name, host, list(left)))
        except LoomError as error:
            return self._warn(about, error)
        self._warn(about)
        for name, (record, path) in left.items():
            if name in given and self._manager.find(name) is None:
                logger.warning("session %s goes on here: its host %s is silent", name, host)
                await self._manager.take_over(replace(record, moves=record.moves + 1), path)
        await asyncio.to_thread(self._copies.drop_all, host)


def host_of(request: Request) -> str:
    """Return the name of the host that opens a line as a peer. Raise `ProtocolMismatch` if it is none."""
    name: str = field_of(request.about, "host", str)
    if not _NAME.fullmatch(name):
        raise ProtocolMismatch(f"a session host has the name {name!r:.80}")
    return name
