"""The gateway's sessions: one driver process each, and a warm spare for the next session.

Ports for drivers, none given twice.

A worker keeps trying to deliver its messages for a dead driver (see ``UNDELIVERABLE_AFTER`` in
`loom_gateway.workers.host`). It numbers the messages to an address from the first that it ever sent there. If
another driver got the same port, it would wait for numbers that never come, and its attach would fail (torchmonarch
0.7). The kernel chooses ports at random, and one of a hundred sessions met a used one. A driver of another gateway
on this machine would even end the worker: it refuses the numbers, and Monarch ends a process that is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from loom.errors import DriverUnavailable, LoomError, SessionHostUnreachable, UnknownSession, WrongState
from loom.process import tasks
from loom.process.child import python
from loom.process.state_file import write_json
from loom.token_file import ADMIN
from loom.weaver.keys import Keys
from loom.wire.bodies import OpenSession, RestoreSession
from loom_gateway.sessions import restarts
from loom_gateway.sessions.driver_ids import DriverIds, clear_away, make_folder
from loom_gateway.sessions.driver_process import AdoptedDriver, DriverProcess, NotOurDriver, OwnDriver
from loom_gateway.sessions.ended_sessions import EndedSession, EndedSessions, OnEnd
from loom_gateway.sessions.logs import SessionLogs
from loom_gateway.sessions.restarts import MOVED, DepartedDriver, MovedElsewhere
from loom_gateway.sessions.session import SessionState, UserSession
from loom_gateway.sessions.state_dir import DriverFiles, DriverRecord, StateFolder
from loom_gateway.workers.sources import WorkerHosts, WorkerList
from loom_gateway.workers.watcher import Lease, WorkerLeases, WorkerWatch

TRIES = 64  # the number of ports to try at once before used ones may be given again

HELD = 256  # the number of ports that were given last and that the kernel gives to no other program


def _bind_any() -> socket.socket:
    sock = socket.socket()
    sock.bind(("", 0))
    return sock


class FreshPorts:
    """Free TCP ports of this machine. When hardly any new ones are left, all may be given again.

    It keeps a given port bound, without listening: a driver that asks for this very port can listen on it, before
    and after another one did; the kernel chooses it for nobody.

    Args:
        path: a file of the given ports for the next gateway, which has the same workers.
        bind: returns a socket that is bound to a port of the kernel's choice.
    """

    def __init__(self, path: str, bind: Callable[[], socket.socket] = _bind_any) -> None:
        self._bind = bind
        self._path = Path(path)
        given = self._path.read_text().split() if self._path.exists() else []
        self._given = {int(port) for port in given if port.isdecimal()}
        self._held: deque[socket.socket] = deque()

    def take(self) -> int:
        """Return a port that was not given before, on which a socket with ``SO_REUSEADDR`` can listen."""
        tried: list[socket.socket] = []  # a port that is bound here is not chosen again
        try:
            while (sock := self._bind()).getsockname()[1] in self._given:
                tried.append(sock)
                if len(tried) == TRIES:
                    self._given.clear()
                    self._path.unlink(missing_ok=True)
        finally:
            for one in tried:
                one.close()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.append(sock)
        if len(self._held) > HELD:
            self._held.popleft().close()
        port = int(sock.getsockname()[1])
        self._given.add(port)
        with self._path.open("a") as file:
            file.write(f"{port}\n")
        return port

    def close(self) -> None:
        """Let other programs have the ports."""
        while self._held:
            self._held.popleft().close()


logger = logging.getLogger(__name__)

MOST_TOKENS = 16  # tokens with which a session was driven that count for how long it lives, the newest

STOPPED = "the gateway was stopped"


class SessionManager:
    """Starts, finds and ends sessions.

    Args:
        linger: seconds that a session lives when nothing goes on in it; its driver measures them.
        folder: the state folder, in which the next gateway finds the drivers; a temporary one by default.
        patience: seconds that a new session waits for missing workers.
        leases: the users' workers; by default all sessions share all workers.
        ids: the user ids for drivers, for which the folder is ``separate``; by default drivers have the gateway's.
    """

    def __init__(
        self,
        workers: WorkerHosts | Sequence[str],
        linger: float = 3600.0,
        folder: StateFolder | None = None,
        exit_with_gateway: bool = False,
        driver_options: Sequence[str] = (),
        patience: float = 60.0,
        ids: DriverIds | None = None,
        leases: WorkerLeases | None = None,
    ) -> None:
        self._linger = linger
        self._patience = patience
        self.folder = StateFolder.make_temporary() if folder is None else folder
        hosts = workers if isinstance(workers, WorkerHosts) else WorkerHosts.of(workers)
        self.worker_watch = WorkerWatch(hosts, os.path.join(self.folder.path, "workers.json"), self.folder.separate)
        self.exit_with_gateway = exit_with_gateway or self.folder.temporary
        """True if the gateway's drivers end with it, however it ends."""
        self._driver_options = list(driver_options)
        self._ids = ids
        self._uncleared: list[tuple[DriverFiles, int]] = []  # of ended drivers, with ids that nobody gets meanwhile
        self._leases = leases
        self.worker_watch.on_change = self._publish_leased
        self._sessions: dict[str, UserSession] = {}
        self._ports = FreshPorts(os.path.join(self.folder.path, "ports"))  # for the Monarchs of the drivers
        self._spare: asyncio.Task[OwnDriver] | None = None
        self._closing = False
        self.on_end: OnEnd = lambda end: None
        self.weaver_key: Callable[[str, str], str] = lambda user, session: ""
        """Returns the key to the weaver of a user's session."""
        self.weaver = os.path.join(self.folder.weaver, "weaver.sock")
        """The place of the weaver, as for `WeaverClient`."""
        self.lease: str | None = None
        """The path of the `LeaseFile`; None if sessions stay here."""
        self.may_go_on: Callable[[str, int], Awaitable[None]] = _always
        """Returns if another driver may have a session that has moved so often; raises `MovedElsewhere` if not."""
        self.end_sessions = self.exit_with_gateway
        """True if `close` ends the sessions too, or leaves them to the next gateway."""
        self.logs = SessionLogs()
        self.ended = EndedSessions(os.path.join(self.folder.path, "ended.json"))

    def use(self, weaver: str, keys: Callable[[], Keys]) -> None:
        """Have the drivers use the weaver at a place, as for `WeaverClient`, with keys of their sessions."""
        self.weaver = weaver
        self.weaver_key = lambda user, session: keys().of(user, session)

    @property
    def spare_ready(self) -> bool:
        return self._spare is not None and self._spare.done() and not _is_of_no_use(self._spare)

    @property
    def isolation(self) -> tuple[bool, bool]:
        """True if drivers have user ids of their own, and whether users have workers of their own."""
        return self._ids is not None, self._leases is not None

    @property
    def workers(self) -> Sequence[str]:
        return list(self.worker_watch.hosts.addresses)

    @property
    def workers_missing(self) -> str:
        return self.worker_watch.missing

    unready = "state_not_writable"

    async def cannot_open(self) -> str:
        """Return why no session can be opened now; empty if one can."""
        if await asyncio.to_thread(is_writable, self.folder.path):
            return ""
        return f"the state folder {self.folder.path} cannot be written"

    def sessions(self) -> list[UserSession]:
        return list(self._sessions.values())

    def awaited(self) -> list[UserSession]:
        """Return the sessions that a gateway waits for before it ends."""
        return self.sessions()

    def find(self, name: str) -> UserSession | EndedSession | None:
        """Return a session, one that lives before one that has ended. `AccessControl` decides on access."""
        return self._sessions.get(name) or self.ended.get(name)

    async def look_up(self, name: str) -> None:
        """Do nothing: all of its sessions are known."""

    def get(self, name: str) -> UserSession:
        """Return a living session. Raise `SessionLost` if its driver died, `UnknownSession` if there is none."""
        session = self._sessions.get(name)
        if session is None or session.is_ending:
            ended = self.ended.get(name)
            if ended is not None:
                raise ended.error()
            if session is not None:
                raise UnknownSession(f"session {name!r} is ending")
            raise UnknownSession(f"no session named {name!r}")
        return session

    async def share(self, session: UserSession, user: str, scope: str | None) -> None:
        """Share a session with a user, or with ``None`` not any more."""

        def change(record: DriverRecord) -> dict[str, object]:
            others = {one: has for one, has in record.shared.items() if one != user}
            return {"shared": others if scope is None else {**others, user: scope}}

        await session.driver.note(change)

    async def adopt(self, user_of: Callable[[str], str] = lambda owner: ADMIN) -> None:
        """Take over the drivers that an earlier gateway left in the folder, and remove the files of dead ones.

        Args:
            user_of: returns the user of a token, given its id; the records of an older gateway have no users.
        """
        for ended in self.ended.all():
            self.logs.ended(ended.name, ended.log, ended.user)
        known = {ended.log for ended in self.ended.all()}
        spares = []
        found: list[AdoptedDriver] = []
        departed: list[DepartedDriver] = []
        for files in self.folder.drivers():
            if files.log in known:  # nothing but the log is left
                continue
            try:
                driver = AdoptedDriver.adopt(files)
            except NotOurDriver as reason:
                if (gone := self._departed(files)) is not None:
                    departed.append(gone)
                else:
                    self._clear_away(files, str(reason), user_of)
                continue
            self._watch_id(driver)
            if driver.record.session:
                if not driver.record.user:
                    await driver.note(lambda record: {"user": user_of(record.owner)})
                found.append(driver)
            else:
                spares.append(driver.end("its gateway has ended"))
        self._adopt_all([*found, *_without_successor(departed, found)])
        await asyncio.gather(*spares)

    def _adopt_all(self, found: Sequence[DriverProcess]) -> None:
        if found:
            self.worker_watch.take_over()
        for driver in sorted(found, key=lambda driver: driver.record.created):
            state = SessionState.RESTARTING if driver.leaves_functions else SessionState.OPEN
            session = UserSession(driver, state)
            if self._leases is not None:
                # One without a lease, of a gateway that had none, may be on every host.
                hosts = driver.record.hosts or range(len(self.worker_watch.hosts.addresses))
                self._leases.adopt(session.user, hosts)
            self._add(session)
            if driver.unreachable:
                tasks.run("end a session", self.end_unreachable(session, driver.unreachable))
            elif not driver.leaves_functions:
                logger.info("session %s goes on: driver %d", driver.record.session, driver.pid)

    async def take_over(self, record: DriverRecord, left: Path) -> None:
        """Go on with a session of another session host.

        Args:
            record: of its driver there.
            left: the file that this has left.

        Raises:
            OSError: the disk does not take it.
        """
        record = replace(record, boot=MOVED, uid=None, address="")

        def bring() -> DriverFiles:
            files = DriverFiles(self.folder.new_driver().base)
            shutil.copyfile(left, files.restart)
            files.write_record(record)
            return files

        self._adopt_all([DepartedDriver(await asyncio.to_thread(bring), record)])

    def _departed(self, files: DriverFiles) -> DepartedDriver | None:
        """Return a driver that has died and left functions for the session's next driver; None if it has not."""
        with contextlib.suppress(OSError, ValueError):
            record = files.read_record()
            if record.session and not files.read_last_words().reason and files.leaves_functions():
                gone = DepartedDriver(files, record)
                self._clear_folder(files)
                return gone
        return None

    def _clear_away(self, files: DriverFiles, reason: str, user_of: Callable[[str], str]) -> None:
        record = None
        with contextlib.suppress(OSError, ValueError):
            record = files.read_record()
        if record is not None and record.session:
            logger.warning("session %s is not adopted: %s", record.session, reason)
            how = "ended while no gateway ran; its exit code is not known"
            words, output = files.read_last_words(), files.last_output()
            self._clear_folder(files)
            record = replace(record, user=record.user or user_of(record.owner))
            self._note_end(EndedSession.of(record, words, how, output, files.log))
            files.remove()
        else:
            self._clear_folder(files)
            files.remove(log=True)

    def _clear_folder(self, files: DriverFiles) -> None:
        """End what a driver that has ended left behind, if it had a user id of its own."""
        with contextlib.suppress(OSError):
            uid = os.geteuid() if files.folder is None else os.stat(files.folder).st_uid
            if uid != os.geteuid() and not clear_away(files, uid) and self._ids is not None:
                self._ids.adopt(uid)
                self._uncleared.append((files, uid))

    def prepare_spare(self) -> None:
        """Start a warm driver for the next session, unless there is one."""
        self.worker_watch.start()
        if self._spare is None and not self._closing:
            self._spare = asyncio.ensure_future(self._start_driver())

    async def _start_driver(self) -> OwnDriver:
        workers = await self.worker_watch.there()
        files = await asyncio.to_thread(self.folder.new_driver)
        arguments = ["--socket", files.socket]
        arguments += [arg for worker in workers.addresses for arg in ("--worker", worker)]
        workers_file = self.worker_watch.path if self._leases is None else files.workers
        arguments += ["--workers-file", workers_file]
        port = await asyncio.to_thread(self._ports.take)
        arguments += ["--port", str(port), "--linger", str(self._linger), *self._driver_options]
        arguments += ["--weaver", self.weaver]
        if self.lease is not None:
            arguments += ["--lease", self.lease]
        if self.exit_with_gateway:
            arguments.append("--exit-with-gateway")
        if self.folder.temporary:
            arguments.append("--remove-folder")
        arguments += ["--gateway-uid", str(os.geteuid())]
        uid = None if self._ids is None else await self._ids.take_clean()
        driver = await self._launch(files, python("loom_gateway.driver", *arguments), uid)
        try:
            await driver.come_up()
        except asyncio.CancelledError:
            tasks.run("end a driver", driver.end("nobody waits for it any more"))
            raise
        return driver

    async def _launch(self, files: DriverFiles, command: Sequence[str], uid: int | None) -> OwnDriver:
        if self._ids is None or files.folder is None or uid is None:
            return await OwnDriver.start("the driver", files, command)
        try:
            await asyncio.to_thread(make_folder, files.folder, uid)
            driver = await OwnDriver.start("the driver", files, command, uid)
        except BaseException:
            self._ids.give_back(uid)
            raise
        self._watch_id(driver)
        return driver

    def _watch_id(self, driver: DriverProcess) -> None:
        """Let another driver have a driver's user id when no process has it any more."""
        uid, ids = driver.record.uid, self._ids
        if uid is None or ids is None:
            return

        async def await_end() -> None:
            await driver.exited.wait()
            if driver.cleared:
                ids.give_back(uid)
                for files, kept in list(self._uncleared):  # what kept an id may have been this driver's
                    if await asyncio.to_thread(clear_away, files, kept):
                        self._uncleared.remove((files, kept))
                        ids.give_back(kept)
            else:
                self._uncleared.append((driver.files, uid))

        ids.adopt(uid)
        tasks.run_to_end("wait for a driver's end", await_end)

    def opened_by(self, user: str, opening: str) -> UserSession | None:
        """Return the session of a user that an earlier hello with the same made-up name has opened, or None."""
        for session in self._sessions.values():
            record = session.driver.record
            if opening and record.opening == opening and record.user == user and not session.is_ending:
                return session
        return None

    async def create(self, owner: str = "gateway", user: str = ADMIN, opening: str = "") -> UserSession:
        """Give the spare driver to a new session of a user, opened with the token with the id ``owner``."""
        self.worker_watch.start()
        workers = await self.worker_watch.there(self._patience)
        lease = None if self._leases is None else await self._leases.acquire(user, workers, self._patience)
        driver: OwnDriver | None = None
        try:
            driver = await self._take_spare()
            name, hosts = f"session-{secrets.token_hex(4)}", () if lease is None else lease.hosts
            about = {"owner": owner, "user": user, "hosts": hosts, "opening": opening}
            await driver.note(lambda _: {"session": name, "created": time.time(), **about})
            if lease is not None:
                part = lease.part_of(workers)
                await asyncio.to_thread(write_json, driver.files.workers, part, driver.files.mode)
        except BaseException as error:
            if self._leases is not None:
                self._leases.release(user)
            if driver is not None:  # nobody would ever find it
                tasks.run("end a driver", driver.end("its session could not be opened"))
            if isinstance(error, OSError) and not isinstance(error, LoomError):
                raise self._not_opened(error) from error
            raise
        session = UserSession(driver)
        self._add(session)
        return session

    def _not_opened(self, error: OSError) -> LoomError:
        """Return the error for a client whose session could not be opened. The log has it, too."""
        advice = ""
        if isinstance(error, PermissionError) and self._ids is not None:
            advice = f"; with --driver-uids other user ids have to be able to run {sys.executable}"
        logger.error("no session can be opened: %s%s", error, advice)
        return WrongState(f"the gateway cannot open a session: {error}{advice}")

    async def _publish_leased(self, workers: WorkerList) -> None:
        """Tell each session where its leased workers are now."""
        for session in self.sessions():
            if hosts := session.driver.record.hosts:
                part = Lease(tuple(hosts)).part_of(workers)
                await asyncio.to_thread(write_json, session.driver.files.workers, part, session.driver.files.mode)

    def _add(self, session: UserSession) -> None:
        self._sessions[session.name] = session
        self.logs.add(session.name, session.driver.files.log)
        tasks.run_to_end("watch a session", lambda: self._watch(session))

    async def _take_spare(self) -> OwnDriver:
        if self._spare is not None and self._spare.done() and _is_of_no_use(self._spare):
            self._spare = None  # why it failed, perhaps hours ago, need not hold now
        self.prepare_spare()
        spare, self._spare = self._spare, None
        assert spare is not None
        try:
            return await asyncio.shield(spare)
        except asyncio.CancelledError:  # the client is gone, and the next one can have the driver
            if self._spare is None:
                self._spare = spare
            else:
                tasks.run("end a driver", _end_spare(spare))
            raise

    async def _watch(self, session: UserSession) -> None:
        while True:
            await session.driver.exited.wait()
            session.questions.close()
            if session.is_ending or not session.driver.leaves_functions or not await self._start_again(session):
                break
        if self._closing and not session.is_ending and session.driver.leaves_functions:
            return  # the next gateway goes on with it
        if session.driver.leaves_functions:
            await asyncio.to_thread(session.driver.files.remove, session.moved)
        if session.state is not SessionState.ENDED:  # else this has died since, and is at it again
            session.move_to(SessionState.ENDED)
            self._sessions.pop(session.name, None)
            if self._leases is not None:
                self._leases.release(session.user)
        if session.moved:
            self.logs.forget(session.name)
            session.over.set()
            return
        if self.ended.get(session.name) is None:
            self._note_end(session.ended())
            await self.ended.write()
        self.on_end(session.end())
        session.over.set()

    async def _start_again(self, session: UserSession) -> bool:
        """Have another driver go on with a session whose driver has died; return whether one does.

        It is tried for the linger time, as long as a session lives in which nothing goes on.
        """
        if session.state is not SessionState.RESTARTING:
            session.move_to(SessionState.RESTARTING)
        gone, until = session.driver, time.monotonic() + max(self._linger, self._patience)
        logger.warning("session %s: its driver %s; another one is to go on", session.name, gone.how_it_ended)
        ends = asyncio.ensure_future(session.ends.wait())
        try:
            for wait in restarts.AGAIN:
                trying = asyncio.ensure_future(self._succeed(session, gone))
                await asyncio.wait((trying, ends), return_when=asyncio.FIRST_COMPLETED)
                if session.is_ending:
                    trying.cancel()
                    trying.add_done_callback(_end_unwanted)
                    return False
                try:
                    session.go_on_with(trying.result())
                except MovedElsewhere:
                    logger.warning("session %s goes on on another session host", session.name)
                    session.moved = True
                    return False
                except (LoomError, OSError, NotOurDriver) as error:
                    session.why_not_yet = str(error)
                    logger.warning("session %s cannot go on yet: %s", session.name, error)
                else:
                    await asyncio.to_thread(self._move_log, gone.files, session.driver.files)
                    self.logs.add(session.name, session.driver.files.log)
                    return True
                await asyncio.wait((ends,), timeout=wait)
                if session.is_ending or self._closing or time.monotonic() > until:
                    return False
        finally:
            ends.cancel()
        raise AssertionError("the attempts do not end")

    async def settled(self, session: UserSession) -> None:
        """Wait until another driver has a session that is restarting.

        Raises:
            DriverUnavailable: it takes long; the session is still restarting.
            SessionHostUnreachable: it goes on on another session host.
            SessionLost, UnknownSession: it has ended.
        """
        driver = session.driver
        if driver.exited.is_set() and driver.leaves_functions and session.state is SessionState.OPEN:
            session.move_to(SessionState.RESTARTING)
        try:
            await asyncio.wait_for(session.settled.wait(), self._patience)
        except asyncio.TimeoutError:
            raise DriverUnavailable(
                f"session {session.name!r} is restarting, as its driver {session.driver.how_it_ended}: "
                f"{session.why_not_yet or 'another driver starts'}. Attach again later, or end it"
            ) from None
        if session.moved:
            raise SessionHostUnreachable(f"session {session.name!r} goes on on another session host")
        if session.is_ending:
            raise session.ended().error()

    async def _succeed(self, session: UserSession, gone: DriverProcess) -> OwnDriver:
        """Start a driver that goes on in place of one that has died, and note that it has the session."""
        before = gone.record
        await self.may_go_on(session.name, before.moves)
        workers = await self.worker_watch.there(self._patience)
        driver = await self._take_spare()
        try:
            await asyncio.to_thread(restarts.pass_on, gone.files, driver)
            if before.hosts:
                part = Lease(tuple(before.hosts)).part_of(workers)
                await asyncio.to_thread(write_json, driver.files.workers, part, driver.files.mode)
            opening = OpenSession(session.name, session.user, self.weaver_key(session.user, session.name))
            await restarts.take_up(
                driver,
                opening,
                RestoreSession(before.persist, gone.how_it_ended, max(0.0, time.time() - before.created)),
            )
            own = {name: getattr(driver.record, name) for name in ("pid", "started", "uid", "boot", "address")}
            await driver.note(lambda _: {**vars(before), **own})
        except BaseException:
            tasks.run("end a driver", driver.end("it could not go on with a session"))
            raise
        return driver

    @staticmethod
    def _move_log(earlier: DriverFiles, files: DriverFiles) -> None:
        """Put the log of a driver that has died before that of its successor, and remove its other files."""
        with contextlib.suppress(OSError):  # it has printed nothing
            os.replace(earlier.log, f"{files.log}.1")
        earlier.remove(log=True)

    def _note_end(self, ended: EndedSession) -> None:
        self.logs.ended(ended.name, ended.log, ended.user)
        self.ended.add(ended)
        logger.info("session %s ended: %s (exit code %s)", ended.name, ended.reason, ended.exit_code)

    async def drive(self, session: UserSession, token: str) -> None:
        """Note that a session's user drives it with a token of that id, which keeps it when others are revoked."""
        if token not in session.tokens:
            await session.driver.note(lambda _: {"driven_with": (*session.tokens[1:], token)[-MOST_TOKENS:]})

    async def persist(self, session: UserSession) -> None:
        """Note that a session never ends for lack of a client."""
        if not session.persist:
            await session.driver.note(lambda _: {"persist": True})

    @contextlib.contextmanager
    def client(self, session: UserSession) -> Iterator[None]:
        """Count a client of a session. It keeps the session alive."""
        logger.info("session %s: client connected", session.name)
        session.clients += 1
        if session.state is SessionState.STARTING:  # else another client has opened the session, or it is ending
            session.move_to(SessionState.OPEN)
        # Start the spare only after the session is open: warming a driver takes a core for some time.
        asyncio.get_running_loop().call_later(0.5, self.prepare_spare)
        try:
            yield
        finally:
            session.clients -= 1
            logger.info("session %s: client disconnected", session.name)

    async def end_unreachable(self, session: UserSession, why: str) -> None:
        """End a session whose driver lives, but takes no connections: nobody would ever find it."""
        await self.end(session, f"its driver could not be reached any more: {why}")

    async def end(self, session: UserSession, reason: str) -> None:
        if session.state is SessionState.RESTARTING:
            session.driver.reason = reason  # it is dead, and the session ends for this
            session.begin_to_end()
            await session.over.wait()
            return
        session.begin_to_end()
        await session.driver.end(reason)
        await session.over.wait()

    async def close(self) -> None:
        """End the spare. End every session if `end_sessions` is set, else leave them to the next gateway."""
        await self.end_all()
        if self._spare is not None:
            await _end_spare(self._spare)
        self._ports.close()
        self.folder.remove()

    async def end_all(self) -> None:
        """End every session if `end_sessions` is set, while the clients can still be notified."""
        self._closing = True
        self.worker_watch.close()
        if self.end_sessions:
            ending = {session.name: self.end(session, STOPPED) for session in self.sessions()}
            found = await asyncio.gather(*ending.values(), return_exceptions=True)
            for name, error in zip(ending, found, strict=True):
                if error is not None:  # the others, and the weaver, end all the same
                    logger.error("session %s does not end: %r", name, error)

    def abandon(self) -> None:
        """Do the immediate part of `close` when this process ends with its parent. Safe on any thread."""
        for session in self.sessions():
            session.driver.abandon()
        self.folder.remove()


async def _always(session: str, moves: int) -> None:
    """Let another driver have the session: it can be nowhere else."""


def is_writable(folder: str) -> bool:
    """Return whether a file can be written in a folder, to its end."""
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=folder, prefix=".ready-") as file:
        file.write(bytes(4096))
        file.flush()
        return True
    return False


def _without_successor(departed: Sequence[DepartedDriver], found: Sequence[DriverProcess]) -> list[DepartedDriver]:
    """Return the dead drivers whose sessions no later driver has; the files of the others are removed."""
    last = {gone.record.session: gone for gone in sorted(departed, key=lambda gone: gone.left_at)}
    for driver in found:
        last.pop(driver.record.session, None)
    for gone in departed:
        if last.get(gone.record.session) is not gone:
            gone.files.remove(log=True)
    return list(last.values())


def _end_unwanted(trying: asyncio.Future[OwnDriver]) -> None:
    """End a driver whose session has ended at the moment when it was to have it."""
    if not trying.cancelled() and trying.exception() is None:
        tasks.run("end a driver", trying.result().end("its session has ended"))


async def _end_spare(spare: asyncio.Task[OwnDriver]) -> None:
    with contextlib.suppress(LoomError, OSError):  # it has ended, or never began
        await (await spare).end(STOPPED)


def _is_of_no_use(spare: asyncio.Task[OwnDriver]) -> bool:
    """Return whether a spare, which is done, could not be started, or has died since."""
    return spare.cancelled() or spare.exception() is not None or spare.result().exited.is_set()
