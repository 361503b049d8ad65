"""The audit: JSON lines about clients' entry, commands and refusals.

The file holds ids and names of tokens, never a token. A thread writes the lines, in the order of their events: a
disk that stalls holds up those who wait for their line, and not the event loop that relays.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging.handlers
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime, timezone
from pathlib import Path
from queue import SimpleQueue

from loom.control.operations import ReadAudit
from loom.errors import AuditUnavailable, LoomError, WrongArguments
from loom.process.threads import keep_going, start_thread
from loom.token_file import Token
from loom.weaver.client import WeaverClient
from loom.weaver.keys import EVERYONE
from loom_gateway.access.rate_limits import RateLimit

logger = logging.getLogger(__name__)

KEPT_FILES = 5  # the number of full files to keep, as ``FILE.1`` (the newest) to ``FILE.5``
PERIOD = 60.0  # seconds over which refusals of one kind to one user at one address share one line
KINDS = 1000  # the number of kinds of refusal, by address and user, that are counted apart from the others
LINES = 5.0  # refusals a second that get a line at once, so that a flood of addresses does not fill the file

STALLED = 10.0
"""Seconds after which a line that the disk has not taken counts as one that cannot be written. It still may be."""

MAX_LINES = 50_000
"""Lines that wait for the disk. More are lost, and a line with their number follows."""


class Audit:
    """Writes the events at a gateway's access control.

    Args:
        path: the file; None writes nothing.
        max_bytes: size at which the file is rotated.
        required: whether `ask` refuses what cannot be written down.
    """

    def __init__(
        self,
        path: Path | None,
        max_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.monotonic,
        required: bool = False,
    ) -> None:
        self._file: _PrivateFile | None = None
        self._queue: SimpleQueue[tuple[str, Future[None]] | None] = SimpleQueue()
        """The lines that wait for the disk; None after the last."""
        self.last: Future[None] = Future()
        """Done when the last line that was put in is written, or is refused by the disk."""
        self.last.set_result(None)
        self._lost = 0
        """Lines for which there was no room in the queue, and of which no line tells yet."""
        self._unwritten = 0
        """Lines that the disk has refused, and of which no line tells yet. For the thread."""
        self._required = required
        self.refusals: Counter[str] = Counter()
        """The number of refusals since the gateway started, by code of the error, and of `Unheard` connections."""
        self.failure = ""  # why the last line could not be written; empty if it could
        self._clock = clock
        # By address, user and kind of refusal: the number since the last line, and that line's time.
        self._refused: dict[tuple[str, str, str], tuple[int, float]] = {}
        self._lines = RateLimit(LINES * 4, LINES, clock=clock)  # limits the lines for single refusals
        if path is not None:
            try:
                self._file = _PrivateFile(path, maxBytes=max_bytes, backupCount=KEPT_FILES, encoding="utf-8")
            except OSError as error:
                raise WrongArguments(f"cannot write the audit file {path}: {error.strerror or error}") from error
            self._over: Future[None] = Future()
            start_thread("audit", self._write_lines, self._file)
        elif required:
            raise WrongArguments("--audit-required needs --audit FILE")

    @property
    def refuses(self) -> bool:
        """True if everything that has to be written down is refused now."""
        return self._required and bool(self.failure)

    async def ask(self, who: Token, peer: str, **details: object) -> None:
        """Write down what is asked for before it is done, if the audit is required.

        Raises:
            AuditUnavailable: it cannot be written down, so it must not be done.
        """
        if self._required:
            await self.write("asked", who, peer, **details)
            if self.failure:
                raise AuditUnavailable(
                    f"nothing was begun, because the gateway cannot write it into its audit (--audit-required): "
                    f"{self.failure}"
                )

    async def write(self, event: str, who: Token | None, peer: str, **details: object) -> None:
        """Write a line. Return when the disk has it, or has refused it, or has stalled for `STALLED` seconds."""
        written = self.put(event, who, peer, **details)
        if not written.done() and not (await asyncio.wait([asyncio.wrap_future(written)], timeout=STALLED))[0]:
            self._fail(f"the disk has not taken a line for {STALLED:g} s")

    def put(self, event: str, who: Token | None, peer: str, **details: object) -> Future[None]:
        """Have a line written after those before it; return what is done once the disk has, or refuses, it."""
        written = Future[None]()
        if self._file is None:
            written.set_result(None)
            return written
        if self._queue.qsize() >= MAX_LINES:
            self._lost += 1
            self._fail(f"{MAX_LINES} lines wait for the disk")
            written.set_result(None)
            return written
        if self._lost:
            lost, self._lost = self._lost, 0
            self.put("lines were lost", None, "", lines=lost)
        token = {} if who is None else {"token": who.id, "name": who.name, "user": who.user, "scope": who.scope}
        self.last = written
        self._queue.put((_line(event, **token, peer=peer, **details), written))
        return written

    def _write_lines(self, file: _PrivateFile) -> None:
        """Write what the queue has. On the thread."""
        keep_going("audit", lambda: self._write_on(file))
        file.close()
        self._over.set_result(None)

    def _write_on(self, file: _PrivateFile) -> None:
        while (item := self._queue.get()) is not None:
            line, written = item
            try:
                if self._unwritten:
                    file.write_line(_line("lines were lost", peer="", lines=self._unwritten))
                    self._unwritten = 0
                file.write_line(line)
            except OSError as error:
                self._unwritten += 1
                self._fail(error.strerror or str(error))
            else:
                self.failure = ""
            finally:
                written.set_result(None)

    def _fail(self, why: str) -> None:
        if not self.failure:
            logger.error("the audit cannot be written: %s", why)
        self.failure = why

    def refused(self, error: LoomError, who: Token | None, peer: str) -> None:
        """Note a refusal. Refusals in quick succession share one line, which has their number."""
        self.refusals[error.code] += 1
        if self._file is None:
            return
        now = self._clock()
        user = "" if who is None else who.user
        key = (peer, user, error.code)
        if key not in self._refused and len(self._refused) >= KINDS:
            key = ("others", "", error.code)
        count, last = self._refused.get(key, (0, None))
        if last is not None and now - last < PERIOD:
            self._refused[key] = (count + 1, last)
            return
        if self._lines.wait(""):
            self._refused[key] = (count + 1, now)
            return
        self._lines.count("")
        self._refused[key] = (0, now)
        more = {"earlier": count} if count else {}
        self.put("refused", who, key[0], code=error.code, message=str(error), **more)

    def tick(self, period: float = PERIOD) -> None:
        """Write a line for each kind of refusal that has gone on, once its last line is ``period`` seconds old."""
        now = self._clock()
        if self.refuses and self.last.done():
            self.put("audit goes on", None, "")
        for key, (count, last) in list(self._refused.items()):
            if now - last >= period:
                del self._refused[key]
                if count:
                    peer, user, code = key
                    known = {"user": user} if user else {}
                    self.put("refused", None, peer, code=code, earlier=count, **known)

    async def close(self) -> None:
        """Write what waits, for at most `STALLED` seconds. Later lines are not written."""
        self.tick(0.0)
        file, self._file = self._file, None
        if file is not None:
            self._queue.put(None)
            if not (await asyncio.wait([asyncio.wrap_future(self._over)], timeout=STALLED))[0]:
                logger.error("the audit lacks its last %d lines: the disk does not take them", self._queue.qsize())


def _line(event: str, **members: object) -> str:
    when = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return json.dumps({"time": when, "event": event, **members})


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """A rotating file that only its owner may read."""

    _torn = False  # whether the last line in the file has no end, because the disk was full

    def write_line(self, line: str) -> None:
        """Write a line, or raise `OSError`."""
        if self.shouldRollover(logging.LogRecord("audit", logging.INFO, "", 0, line, None, None)):
            self.doRollover()
        assert self.stream is not None
        data = (b"\n" if self._torn else b"") + line.encode() + b"\n"
        while data:
            written = os.write(self.stream.fileno(), data)  # a disk that is nearly full takes a part
            self._torn = not data[:written].endswith(b"\n")
            data = data[written:]

    def _open(self) -> io.TextIOWrapper:
        handle = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.fchmod(handle, 0o600)
        return io.TextIOWrapper(io.FileIO(handle, "ab"), encoding=self.encoding, write_through=True)


BETWEEN_ATTEMPTS = 1.0  # seconds between two attempts to reach a weaver that is away


async def audit_session_commands(weaver: WeaverClient, audit: Audit) -> None:
    """Write a line for each, and tell the weaver with the next request that it is written. Never returns."""
    trail, last = "", 0
    while True:
        await weaver.available()
        try:
            found = await weaver.ask_for(ReadAudit(trail, last), user=EVERYONE)
        except LoomError:
            await asyncio.sleep(BETWEEN_ATTEMPTS)
            continue
        written = [audit.put("commanded", None, "", **entry) for entry in found["entries"]]
        await asyncio.gather(*map(asyncio.wrap_future, written))
        trail, last = found["trail"], found["last"]
