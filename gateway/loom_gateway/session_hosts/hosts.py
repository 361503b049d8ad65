"""`SessionHosts`, the sessions of session hosts as a gateway serves them.

A gateway knows them by asking: each host tells it what there is when a line begins, and then what changes. Nothing
is kept that a host has not told, so that gateways agree, and one that starts knows as much as the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from loom.errors import ConnectionLost, LoomError, SessionHostUnreachable, UnknownSession
from loom.process import tasks
from loom.wire.frames import decode_frame
from loom.wire.handshake import Hello, error_from_refusal
from loom.wire.messages import Kind
from loom_gateway.relay.driver_lines import DriverLines
from loom_gateway.relay.links import DriverLink
from loom_gateway.session_hosts.kept_line import ANSWER_TIMEOUT, KeptLine, KeptLines
from loom_gateway.session_hosts.line import Line, Request, known_fields, open_line
from loom_gateway.session_hosts.shared_notes import SharedNotes
from loom_gateway.sessions.driver_process import DriverProcess
from loom_gateway.sessions.ended_sessions import EndedSession, EndedSessions, OnEnd, SessionEnd
from loom_gateway.sessions.logs import LogQuery
from loom_gateway.sessions.session import DriverQuestions, SessionState, UserSession
from loom_gateway.sessions.state_dir import DriverFiles, DriverRecord
from loom_gateway.workers.sources import WorkerHosts

logger = logging.getLogger(__name__)

OPEN_TIMEOUT = 120.0  # seconds that it has to open a session: it waits for workers
FIND_TIMEOUT = 5.0  # seconds that it has to say whether it has a session
END_TIMEOUT = 60.0  # seconds that it has to end one
FIRST_NEWS = 5.0  # seconds that a new gateway waits for its hosts


class HostedDriver(DriverProcess):
    """A driver on another machine, as its session host tells of it."""

    def __init__(self, host: HostConnection, record: DriverRecord) -> None:
        super().__init__(DriverFiles(""), record)
        self._host = host

    def signal(self, number: int) -> None:
        """Have the host kill it; the host sends no other signal."""
        if number == signal.SIGKILL:
            tasks.run("kill a driver", self._host.tell("kill", session=self.record.session))

    def abandon(self) -> None:
        """Do nothing: it is its host's."""

    def went(self, ended: EndedSession | None) -> None:
        """Note that it has ended; None: how is not known, or another driver goes on with its session."""
        if ended is not None:
            self.exit_code = ended.exit_code
            self.reason = "" if ended.lost else ended.reason
            self.output = ended.output.splitlines()
        self.exited.set()


class HostedQuestions(DriverQuestions):
    """Asks a driver by its session host."""

    def __init__(self, host: HostConnection, driver: HostedDriver) -> None:
        super().__init__(driver)
        self._host = host

    async def _exchange(self, subject: str) -> bytes:
        return bytes(await self._host.ask("ask", session=self._driver.record.session, subject=subject))


class HostConnection(KeptLine):
    """The control line to one session host, and what the host has told."""

    def __init__(self, address: str, key: str, all: SessionHosts) -> None:
        super().__init__(address, key, Request("control", {}))
        self._all = all
        self.sessions: dict[str, UserSession] = {}
        self.opening = 0
        """Sessions that this gateway opens there now."""
        self.about: Mapping[str, Any] = {}

    def _take(self, news: Mapping[str, Any]) -> None:
        for told in news.get("ended", ()):
            one = known_fields(EndedSession, told)
            if self._all.ended.get(one.name) is None:
                self._all.ended.add(one)
        for description in news.get("sessions", ()):
            self.learn(description)
        if "names" in news:
            for name in set(self.sessions).difference(news["names"]):
                self.forget(name)
        self.about = news.get("host", self.about)
        if "names" in news and not self.heard.is_set():
            self.heard.set()
            if self._all.shared is not None:
                tasks.run("tell a session host", self._all.shared.tell_all(self))
        if "notes" in news and self._all.shared is not None:
            tasks.run("learn from other gateways", self._all.shared.learn(news["notes"]))
        for end in news.get("audit", ()):
            tasks.run("audit the end of a session", self._audit(known_fields(SessionEnd, end)))

    async def _audit(self, end: SessionEnd) -> None:
        """Write a session's end into the audit, and tell the host, which else would ask another gateway."""
        if (written := self._all.on_end(end)) is not None:
            await asyncio.wrap_future(written)
        await self.tell("audited", session=end.session)

    def learn(self, description: Mapping[str, Any]) -> UserSession:
        """Take what the host tells of a session; return it."""
        record, state = known_fields(DriverRecord, description["record"]), SessionState(description["state"])
        if (newer := self._all.forget_older(self, record)) is not None:
            return newer
        session = self.sessions.get(record.session)
        if session is None or session.pid != record.pid:
            driver = HostedDriver(self, record)
            if session is None:
                session = self.sessions[record.session] = UserSession(driver)
            else:
                assert isinstance(session.driver, HostedDriver)
                session.driver.leaves_functions = True
                session.driver.went(None)
                session.driver = driver
            session.questions = HostedQuestions(self, driver)
        session.driver.record = record
        session.clients, session.why_not_yet = description["clients"], description["why_not_yet"]
        session.state = state
        if session.is_ending:
            session.ends.set()
        return session

    def forget(self, name: str) -> None:
        """Note that the host has a session no more."""
        session = self.sessions.pop(name, None)
        if session is None:
            return
        session.state = SessionState.ENDED
        session.ends.set()
        ended = self._all.ended.get(name)
        assert isinstance(session.driver, HostedDriver)
        session.driver.went(ended)
        session.over.set()

    @property
    def takes_sessions(self) -> bool:
        return self.heard.is_set() and not self.about.get("draining", False)

    @property
    def has_ended(self) -> bool:
        """True if the host was told to stop and has gone without a session: it is not missed."""
        return not self.heard.is_set() and self.about.get("draining", False) and not self.sessions


class HostedLogs:
    """The logs on the session hosts."""

    def __init__(self, all: SessionHosts) -> None:
        self._all = all
        self._following: set[Line] = set()

    async def read(self, session: str, query: LogQuery, user: str) -> AsyncIterator[bytes]:
        """Do as `ReadableLogs.read`."""
        return await self._lines(session, query, user, follow=False)

    async def follow(self, session: str, query: LogQuery, user: str) -> AsyncIterator[bytes]:
        """Do as `ReadableLogs.follow`."""
        return await self._lines(session, query, user, follow=True)

    def stop_following(self) -> None:
        """Do as `ReadableLogs.stop_following`."""
        for line in list(self._following):
            line.close()

    async def _lines(self, session: str, query: LogQuery, user: str, follow: bool) -> AsyncIterator[bytes]:
        about = {"session": session, "query": asdict(query), "user": user, "follow": follow}
        refused: LoomError | None = None
        for host in self._all.hosts_of(session):
            try:
                line = await self._all.open_line(host, Request("logs", about))
            except SessionHostUnreachable as error:
                refused = error
                continue
            try:
                await line.take(ANSWER_TIMEOUT)
            except UnknownSession as error:  # it ended on another host
                refused = refused or error
                line.close()
            except BaseException:
                line.close()
                raise
            else:
                return self._following_lines(line)
        raise refused or UnknownSession(f"no log of a session named {session!r} is kept any more")

    async def _following_lines(self, line: Line) -> AsyncIterator[bytes]:
        self._following.add(line)
        try:
            while "over" not in (said := await line.take()):
                yield bytes(said["lines"])
        except ConnectionLost:
            return  # the gateway ends, or the host: the reader sees the end, and may come again
        finally:
            self._following.discard(line)
            line.close()


class SessionHosts:
    """The sessions of several session hosts. A `SessionDirectory`.

    Args:
        hosts: where the session hosts are.
        key: what they know, too.
    """

    unready = "no_session_host"

    def __init__(self, hosts: WorkerHosts, key: str) -> None:
        self.end_sessions = False
        self._hosts = KeptLines(hosts, lambda address: HostConnection(address, key, self))
        self._key = key
        self.on_end: OnEnd = lambda end: None
        self.shared: SharedNotes | None = None
        self._sharing: asyncio.Task[None] | None = None
        self.ended = EndedSessions()
        self.logs = HostedLogs(self)

    def secret_of(self, purpose: str) -> bytes:
        """Return a secret that all gateways of the hosts have, and nobody else."""
        return hmac.digest(self._key.encode(), f"loom {purpose}".encode(), hashlib.sha256)

    async def adopt(self, user_of: Callable[[str], str]) -> None:
        """Learn of the sessions that there are; hosts that do not answer soon tell of theirs later."""
        self._hosts.start()
        if self.shared is not None:
            self._sharing = tasks.keep_running("tell other gateways", self.shared.share_on)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._hosts.all_heard(), FIRST_NEWS)

    @property
    def isolation(self) -> tuple[bool, bool]:
        """True for what is so on every host that answers."""
        told = [one.about["isolation"] for one in self._hosts.all() if "isolation" in one.about]
        return bool(told) and all(ids for ids, _ in told), bool(told) and all(leases for _, leases in told)

    @property
    def spare_ready(self) -> bool:
        return any(one.takes_sessions and one.about.get("spare_ready") for one in self._hosts.all())

    @property
    def workers(self) -> Sequence[str]:
        """The workers of all hosts, each once."""
        return list(dict.fromkeys(at for one in self._hosts.all() for at in one.about.get("workers", ())))

    @property
    def workers_missing(self) -> str:
        """What the hosts miss, and which hosts do not answer."""
        missing = [one.about["missing"] for one in self._hosts.all() if one.about.get("missing")]
        silent = [f"the session host {one.address} does not answer: {one.why}" for one in self._silent()]
        return "; ".join(dict.fromkeys(missing + silent))

    async def cannot_open(self) -> str:
        """Return why no session can be opened; empty if one can."""
        if any(one.takes_sessions for one in self._hosts.all()):
            return ""
        silent = [f"{one.address}: {one.why}" for one in self._silent()]
        return "no session host takes sessions: " + ("; ".join(silent) or "all of them were told to stop")

    def _silent(self) -> list[HostConnection]:
        return [one for one in self._hosts.heard(False) if not one.has_ended]

    def sessions(self) -> list[UserSession]:
        return [session for one in self._hosts.all() for session in one.sessions.values()]

    def awaited(self) -> list[UserSession]:
        """Return none: they outlive their gateways."""
        return []

    def find(self, name: str) -> UserSession | EndedSession | None:
        """Return a session. Raise `SessionHostUnreachable` if it may be on a host that does not answer now."""
        found = next((one.sessions[name] for one in self._hosts.all() if name in one.sessions), None)
        known = found or self.ended.get(name)
        if known is None and (silent := self._silent()):
            why = "; ".join(f"{one.address}: {one.why}" for one in silent)
            raise SessionHostUnreachable(f"session {name!r} may be on a session host that does not answer: {why}")
        return known

    async def look_up(self, name: str) -> None:
        """Ask all hosts for a session that none has told of: what one tells may be on its way, and the line cut.

        Raises:
            SessionHostUnreachable: a host does not answer, which may have it.
        """
        if self.find(name) is None:
            asked = [self._has(host, name) for host in self._hosts.heard()]
            found = await asyncio.gather(*asked, return_exceptions=True)
            failed = [one for one in found if isinstance(one, BaseException)]
            if failed and True not in found:
                raise failed[0]

    async def _has(self, host: HostConnection, name: str) -> bool:
        description = await host.ask("find", FIND_TIMEOUT, session=name)
        if description is not None:
            host.learn(description)
        return description is not None

    def get(self, name: str) -> UserSession:
        found = self.find(name)
        if isinstance(found, EndedSession):
            raise found.error()
        if found is None:
            raise UnknownSession(f"no session named {name!r}")
        if found.is_ending:
            raise UnknownSession(f"session {name!r} is ending")
        return found

    def host_of(self, session: UserSession) -> HostConnection:
        """Return the host of a session. Raise `UnknownSession` if it has ended."""
        for one in self._hosts.all():
            if one.sessions.get(session.name) is session:
                return one
        raise UnknownSession(f"session {session.name!r} has ended")

    def forget_older(self, host: HostConnection, record: DriverRecord) -> UserSession | None:
        """Return a session if another host has it since it has moved from this one; else it is this one's."""
        for other in self._hosts.all():
            if other is not host and (found := other.sessions.get(record.session)) is not None:
                if found.driver.record.moves > record.moves:
                    return found
                other.forget(record.session)
        return None

    def hosts_of(self, name: str) -> list[HostConnection]:
        """Return the host of a session, or if it has ended all hosts that may have its log."""
        living = [one for one in self._hosts.all() if name in one.sessions]
        return living or self._hosts.all()

    async def open_line(self, host: HostConnection, request: Request, session: UserSession | None = None) -> Line:
        return await open_line(host.address, self._key, request, None if session is None else session.traffic)

    def opened_by(self, user: str, opening: str) -> UserSession | None:
        for session in self.sessions():
            record = session.driver.record
            if opening and record.opening == opening and record.user == user and not session.is_ending:
                return session
        return None

    async def create(self, owner: str, user: str, opening: str) -> UserSession:
        """Open a session on the host that has the fewest.

        Raises:
            SessionHostUnreachable: no host answers that was not told to stop.
        """
        hosts = [one for one in self._hosts.all() if one.takes_sessions]
        refused: LoomError | None = None
        for host in sorted(hosts, key=lambda one: len(one.sessions) + one.opening):
            host.opening += 1
            try:
                return host.learn(await host.ask("create", OPEN_TIMEOUT, owner=owner, user=user, opening=opening))
            except ConnectionLost as error:
                refused = error
            finally:
                host.opening -= 1
        raise refused or SessionHostUnreachable(await self.cannot_open())

    async def share(self, session: UserSession, user: str, scope: str | None) -> None:
        host = self.host_of(session)
        host.learn(await host.ask("share", session=session.name, user=user, scope=scope))

    async def drive(self, session: UserSession, token: str) -> None:
        if token not in session.tokens:
            await self.host_of(session).ask("drive", session=session.name, token=token)

    async def persist(self, session: UserSession) -> None:
        """Do nothing: the host sees the welcome, too."""

    @contextlib.contextmanager
    def client(self, session: UserSession) -> Iterator[None]:
        """Count nothing: the host does, for all gateways."""
        yield

    async def end(self, session: UserSession, reason: str) -> None:
        await self.host_of(session).ask("end", END_TIMEOUT, session=session.name, reason=reason)

    def answering(self) -> Sequence[HostConnection]:
        """Return the lines to the hosts that answer."""
        return self._hosts.heard()

    def prepare_spare(self) -> None:
        """Do nothing: the hosts do."""

    async def end_all(self) -> None:
        """End nothing: sessions outlive their gateways."""

    async def close(self) -> None:
        if self._sharing is not None:
            self._sharing.cancel()
        self._hosts.close()

    def abandon(self) -> None:
        """Do nothing: the lines end with this process."""


def _knows_no_session(answer: bytes) -> bool:
    message = decode_frame(answer).messages[0]
    return message.kind == Kind.REFUSE and isinstance(error_from_refusal(message), UnknownSession)


class HostedLines(DriverLines):
    """Lead from a gateway's clients to drivers on session hosts."""

    def __init__(self, hosts: SessionHosts) -> None:
        self._hosts = hosts

    async def greet(self, session: UserSession, hello: Hello, hello_frame: bytes, guest: str | None) -> DriverLink:
        """Do as `DriverLines.greet`, on the session's host; also raise `SessionHostUnreachable`."""
        about = {"session": session.name, "hello": hello_frame, "guest": guest}
        line = await self._hosts.open_line(self._hosts.host_of(session), Request("attach", about), session)
        try:
            line.answer = await line.next()
        except BaseException:
            line.close()
            raise
        if line.answer is None and line.error is None:
            line.close()
            raise SessionHostUnreachable(f"the line to the host of session {session.name!r} was cut")
        if line.answer is not None and _knows_no_session(line.answer):  # which the gateway learns soon, too
            line.close()
            raise SessionHostUnreachable(f"session {session.name!r} is not on its host any more")
        return line

    async def loss(self, session: UserSession, link: DriverLink) -> LoomError | None:
        """Return None: the host has said why, or the line was cut, and the client comes back on another."""
        return None

    def left(self, session: UserSession, gone: bool) -> None:
        """Do nothing: the host ends a session that nobody opens."""
