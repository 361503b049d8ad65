"""The audit: JSON lines about clients' entry, commands and refusals.

The file holds ids and names of tokens, never a token.
"""

from __future__ import annotations

import io
import json
import logging.handlers
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from loom.errors import LoomError, WrongArguments
from loom.token_file import Token
from loom_gateway.access.rate_limits import RateLimit

KEPT_FILES = 5  # the number of full files to keep, as ``FILE.1`` (the newest) to ``FILE.5``
PERIOD = 60.0  # seconds over which refusals of one kind to one user at one address share one line
KINDS = 1000  # the number of kinds of refusal, by address and user, that are counted apart from the others
LINES = 5.0  # refusals a second that get a line at once, so that a flood of addresses does not fill the file


class Audit:
    """Writes the events at a gateway's access control.

    Args:
        path: the file; None writes nothing.
        max_bytes: size at which the file is rotated.
    """

    def __init__(
        self, path: Path | None, max_bytes: int = 64 << 20, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._handler: _PrivateFile | None = None
        self._clock = clock
        # By address, user and kind of refusal: the number since the last line, and that line's time.
        self._refused: dict[tuple[str, str, str], tuple[int, float]] = {}
        self._lines = RateLimit(LINES * 4, LINES, clock=clock)  # limits the lines for single refusals
        if path is not None:
            try:
                self._handler = _PrivateFile(path, maxBytes=max_bytes, backupCount=KEPT_FILES, encoding="utf-8")
            except OSError as error:
                raise WrongArguments(f"cannot write the audit file {path}: {error.strerror or error}") from error

    def write(self, event: str, who: Token | None, peer: str, **details: object) -> None:
        if self._handler is None:
            return
        when = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        token = {} if who is None else {"token": who.id, "name": who.name, "user": who.user, "scope": who.scope}
        line = json.dumps({"time": when, "event": event, **token, "peer": peer, **details})
        self._handler.emit(logging.LogRecord("audit", logging.INFO, "", 0, line, None, None))

    def refused(self, error: LoomError, who: Token | None, peer: str) -> None:
        """Note a refusal. Refusals in quick succession share one line, which has their number."""
        if self._handler is None:
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
        self.write("refused", who, key[0], code=error.code, message=str(error), **more)

    def tick(self, period: float = PERIOD) -> None:
        """Write a line for each kind of refusal that has gone on, once its last line is ``period`` seconds old."""
        now = self._clock()
        for key, (count, last) in list(self._refused.items()):
            if now - last >= period:
                del self._refused[key]
                if count:
                    peer, user, code = key
                    known = {"user": user} if user else {}
                    self.write("refused", None, peer, code=code, earlier=count, **known)

    def close(self) -> None:
        self.tick(0.0)
        if self._handler is not None:
            self._handler.close()
            self._handler = None


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """A rotating file that only its owner may read."""

    def _open(self) -> io.TextIOWrapper:
        handle = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.fchmod(handle, 0o600)
        return io.TextIOWrapper(io.FileIO(handle, "ab"), encoding=self.encoding, write_through=True)
