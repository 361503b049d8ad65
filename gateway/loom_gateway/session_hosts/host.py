"""`SessionHost`, which serves the sessions of its machine to gateways.

A gateway has a control line, on which it asks and is told what changes, and a line for each client and each reader
of a log. The driver and its host alone decide about a session: a gateway keeps nothing that another one lacks.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from types import NoneType
from typing import Any

from loom.errors import LoomError, ProtocolMismatch
from loom.process import tasks
from loom.wire.frames import decode_frame
from loom.wire.handshake import Hello, Welcome, refusal
from loom.wire.messages import Kind
from loom.wire.stream import unnumbered_frame
from loom_gateway.access.notes import Notes
from loom_gateway.relay.driver_lines import DriverLines
from loom_gateway.relay.endpoint import cancelled_by, read_hello
from loom_gateway.relay.links import DriverLink
from loom_gateway.session_hosts.line import Line, LineServer, LinkSink, Request, field_of, known_fields
from loom_gateway.session_hosts.moves import Moves, host_of
from loom_gateway.sessions.ended_sessions import EndedSession, SessionEnd
from loom_gateway.sessions.logs import LogQuery
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.sessions.session import UserSession

logger = logging.getLogger(__name__)

LOOK_EVERY = 0.1  # seconds between two looks at what has changed

PART = 100
"""Sessions that are told at once."""

MOST_ENDS = 1000
"""Ended sessions that no gateway has written into its audit. Beyond them, the oldest are forgotten."""

UNOPENED = 30.0  # seconds that a new session waits for its client

Method = Callable[[Mapping[str, Any]], Awaitable[object]]


class SessionHost:
    """Serves the sessions of a manager to the gateways that know the key."""

    def __init__(self, manager: SessionManager, key: str, moves: Moves | None = None) -> None:
        self._manager = manager
        self._moves = moves
        self._drivers = DriverLines(manager)
        self.server = LineServer(key, self._serve)
        self.draining = False
        """True if no gateway is to open a session here."""
        self._methods: dict[str, Method] = {
            "create": self._create,
            "find": self._find,
            "end": self._end,
            "share": self._share,
            "drive": self._drive,
            "kill": self._kill,
            "ask": self._ask,
            "note": self._note,
            "take": self._take,
            "audited": self._audited,
        }
        self._told: set[Changes] = set()
        self.notes = Notes()
        """What gateways tell each other."""
        self._ends: dict[str, SessionEnd] = {}  # those that no audit is known to have
        self._writers: dict[str, Changes] = {}  # the gateways that were told to write them
        manager.on_end = self._note_end

    async def start(self, listener: socket.socket) -> None:
        """Take lines on a socket from now on, and open those to other hosts."""
        await self.server.start(listener)
        if self._moves is not None:
            self._moves.start()

    async def close(self) -> None:
        """Tell the gateways how the last sessions have ended, and close all lines."""
        for changes in self._told:
            changes.push()
        await self.server.finish()

    async def _serve(self, line: Line, request: Request) -> None:
        if request.line == "control":
            await self._control(line)
        elif request.line == "attach":
            await self._attach(line, request.about)
        elif request.line == "peer" and self._moves is not None:
            await self._peer(line, self._moves, host_of(request))
        elif request.line == "logs":
            await self._logs(line, request.about)
        else:
            raise ProtocolMismatch(f"this session host has no line {request.line!r:.40}")

    async def _control(self, line: Line) -> None:
        changes = Changes(self, self._manager, line)
        self._told.add(changes)
        telling = tasks.keep_running("tell a gateway", changes.tell)
        try:
            await _answer_on(line, self._methods)
        finally:
            self._told.discard(changes)
            telling.cancel()  # what was asked goes on: its gateway may be told by another line

    async def _peer(self, line: Line, moves: Moves, host: str) -> None:
        line.send({"news": {"host": moves.name}})
        await _answer_on(line, {name: partial(method, host) for name, method in moves.methods.items()})

    async def _create(self, about: Mapping[str, Any]) -> object:
        owner, user, opening = (field_of(about, name, str) for name in ("owner", "user", "opening"))
        session = self._manager.opened_by(user, opening) or await self._manager.create(owner, user, opening)
        asyncio.get_running_loop().call_later(UNOPENED, self._drivers.left, session, True)
        return description_of(session)

    async def _find(self, about: Mapping[str, Any]) -> object:
        found = self._manager.find(field_of(about, "session", str))
        return description_of(found) if isinstance(found, UserSession) else None

    async def _end(self, about: Mapping[str, Any]) -> None:
        await self._manager.end(self._session(about), field_of(about, "reason", str))

    async def _share(self, about: Mapping[str, Any]) -> object:
        session = self._session(about)
        await self._manager.share(session, field_of(about, "user", str), field_of(about, "scope", str, NoneType))
        return description_of(session)

    async def _drive(self, about: Mapping[str, Any]) -> None:
        await self._manager.drive(self._session(about), field_of(about, "token", str))

    async def _kill(self, about: Mapping[str, Any]) -> None:
        self._session(about).driver.signal(signal.SIGKILL)

    async def _ask(self, about: Mapping[str, Any]) -> object:
        return await self._session(about).questions.ask(field_of(about, "subject", str))

    async def _note(self, about: Mapping[str, Any]) -> None:
        topic, lasts = field_of(about, "topic", str), field_of(about, "lasts", float)
        for key, value in field_of(about, "notes", dict).items():
            await self.notes.put(topic, str(key), value, lasts)

    async def _take(self, about: Mapping[str, Any]) -> Any:
        return await self.notes.take(field_of(about, "topic", str), field_of(about, "key", str))

    async def _audited(self, about: Mapping[str, Any]) -> None:
        self._forget_end(field_of(about, "session", str))

    def _note_end(self, end: SessionEnd) -> None:
        self._ends[end.session] = end
        if len(self._ends) > MOST_ENDS:
            oldest = next(iter(self._ends))
            logger.error("the end of session %s is in no audit: no gateway has written it", oldest)
            self._forget_end(oldest)

    def _forget_end(self, session: str) -> None:
        self._ends.pop(session, None)
        self._writers.pop(session, None)

    def ends_for(self, changes: Changes) -> list[SessionEnd]:
        """Return the ends of sessions that one gateway has to write into its audit from now on."""
        found = [name for name in self._ends if self._writers.get(name) not in self._told]
        self._writers.update(dict.fromkeys(found, changes))
        return [self._ends[name] for name in found]

    def _session(self, about: Mapping[str, Any]) -> UserSession:
        return self._manager.get(field_of(about, "session", str))

    async def _attach(self, line: Line, about: Mapping[str, Any]) -> None:
        """Connect a client of a gateway to its session's driver, until either side leaves."""
        frame, guest = field_of(about, "hello", bytes), field_of(about, "guest", str, NoneType)
        hello, session = read_hello(frame), self._session(about)
        link: DriverLink | None = None
        session.greeted += 1
        try:
            with cancelled_by(line.closed):
                link = await self._drivers.greet(session, hello, frame, guest)
            if await self._is_welcome(session, link, line):
                await self._pass_on(session, link, hello, line)
        except asyncio.CancelledError:
            if not line.closed.done():
                raise
        finally:
            if link is not None:
                link.close()
            session.greeted -= 1
            self._drivers.left(session, line.closed.done())

    async def _is_welcome(self, session: UserSession, link: DriverLink, line: Line) -> bool:
        if link.answer is None:
            await self._tell_loss(session, link, line)
            return False
        line.write(link.answer)
        answer = decode_frame(link.answer).messages[0]
        if answer.kind != Kind.WELCOME:
            return False
        if not Welcome.from_body(answer.body).linger:
            await self._manager.persist(session)
        return True

    async def _pass_on(self, session: UserSession, link: DriverLink, hello: Hello, line: Line) -> None:
        line.relay_to(LinkSink(link))
        link.relay_to(LinkSink(line))
        with ExitStack() as connected:
            if not hello.lane:  # the second connection of a client is not counted again
                connected.enter_context(self._manager.client(session))
            await asyncio.wait((link.closed, line.closed), return_when=asyncio.FIRST_COMPLETED)
        if not link.closed.done() or (link.last_word is not None and link.error is None):
            return
        await self._tell_loss(session, link, line)

    async def _tell_loss(self, session: UserSession, link: DriverLink, line: Line) -> None:
        """Tell the gateway why a driver has gone; nothing if it has a later connection of the client."""
        error = link.error or await self._drivers.loss(session, link)
        if error is not None:
            line.refuse(error)

    async def _logs(self, line: Line, about: Mapping[str, Any]) -> None:
        read = self._manager.logs.follow if field_of(about, "follow", bool) else self._manager.logs.read
        query = known_fields(LogQuery, field_of(about, "query", dict))
        lines = await read(field_of(about, "session", str), query, field_of(about, "user", str))
        line.send({"begun": True})
        async for some in lines:
            line.send({"lines": some})
            await line.drained()
            if line.closed.done():
                return
        line.send({"over": True})


def description_of(session: UserSession) -> dict[str, Any]:
    """Return what a gateway has to know of a session."""
    return {
        "record": asdict(session.driver.record),
        "state": session.state.value,
        "clients": session.clients,
        "why_not_yet": session.why_not_yet,
    }


async def _answer_on(line: Line, methods: Mapping[str, Method]) -> None:
    """Answer what comes on a line, until it is closed."""
    try:
        while True:
            number, method, about = await line.take()
            tasks.run("answer on a line", _answer(line, number, methods.get(method), method, about))
    except (TypeError, ValueError) as error:
        raise ProtocolMismatch(f"a request makes no sense: {error}") from error


async def _answer(line: Line, number: int, do: Method | None, method: str, about: Mapping[str, Any]) -> None:
    try:
        if do is None:
            raise ProtocolMismatch(f"this session host knows no {method!r:.40}")
        line.send({"answer": number, "value": await do(about)})
    except Exception as error:
        if not isinstance(error, LoomError):
            logger.exception("the request %r has failed", method)
            error = LoomError("the session host has an internal error, which its log shows")
        line.send({"answer": number, "error": b"".join(unnumbered_frame(refusal(error)))})


class Changes:
    """Tells one gateway of the sessions that there are, and what has changed since."""

    def __init__(self, host: SessionHost, manager: SessionManager, line: Line) -> None:
        self._host = host
        self._manager = manager
        self._line = line
        self._told: Mapping[str, tuple[object, ...]] = {}
        self._ended: dict[int, EndedSession] = {}
        self._about: object = None
        self._noted = 0  # the number of the last note that was told

    async def tell(self) -> None:
        while True:
            self.push()
            await self._line.drained()
            await asyncio.sleep(LOOK_EVERY)

    def push(self) -> None:
        """Send what has changed, at once: no answer about a newer session comes between."""
        for news in self._news():
            self._line.send({"news": news})

    def _news(self) -> list[dict[str, Any]]:
        """Return what has changed, in parts of a bounded size; the names of all sessions come last."""
        sessions = {session.name: session for session in self._manager.sessions()}
        now = {name: (one.driver.record, one.state, one.clients, one.why_not_yet) for name, one in sessions.items()}
        changed = [description_of(sessions[name]) for name, facts in now.items() if self._told.get(name) != facts]
        ended = {id(one): one for one in self._manager.ended.all()}
        new = [asdict(one) for key, one in ended.items() if key not in self._ended]
        about = self._about_host()
        found: list[dict[str, Any]] = [{"ended": new[at : at + PART]} for at in range(0, len(new), PART)]
        notes = self._host.notes.after(self._noted)
        self._noted = notes[-1].number if notes else self._noted
        told = [(note.topic, note.key, note.value) for note in notes]
        found += [{"notes": told[at : at + PART]} for at in range(0, len(told), PART)]
        found += [{"sessions": changed[at : at + PART]} for at in range(0, len(changed), PART)]
        last: dict[str, Any] = {}
        if about != self._about:
            last["host"] = about
        if audit := self._host.ends_for(self):
            last["audit"] = [asdict(end) for end in audit]
        if last or self._told.keys() != now.keys():
            found.append({**last, "names": list(now)})
        self._told, self._ended, self._about = now, ended, about
        return found

    def _about_host(self) -> dict[str, Any]:
        watch = self._manager.worker_watch
        return {
            "workers": list(watch.hosts.addresses),
            "missing": watch.missing,
            "spare_ready": self._manager.spare_ready,
            "isolation": list(self._manager.isolation),
            "draining": self._host.draining,
        }
