"""A gateway's memory of its token file.

What was revoked stays revoked when the file is gone, damaged or an old copy.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from threading import Lock

from loom.process.state_file import write_json
from loom.process.threads import DaemonExecutor
from loom.token_file import Token

logger = logging.getLogger(__name__)


class TokenMemory:
    """The memory, in a file of the state folder. Without a path it lasts as long as the gateway."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._writing = Lock()
        self.written: Future[None] = Future()
        """Done when the disk has the newest revocations."""
        self.written.set_result(None)
        self.any = False  # whether the token file has ever had a token
        self.revoked: set[str] = set()  # ids of tokens that were revoked
        if path is None:
            return
        try:
            found = json.loads(Path(path).read_bytes())
            self.revoked = {str(ident) for ident in found["revoked"]}
            self.any = True
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.error("%s cannot be read, so that older revocations are forgotten: %s", path, error)

    def note(self, tokens: Iterable[Token]) -> None:
        """Remember the revocations in a file that was read."""
        listed = list(tokens)
        revoked = self.revoked | {token.id for token in listed if token.revoked is not None}
        if not listed or (self.any and revoked == self.revoked):
            return
        self.any, self.revoked = True, revoked
        if self._path is not None:  # beside the event loop that relays, since the disk may be slow
            self.written = DaemonExecutor("known tokens").submit(self._write, self._path)

    def _write(self, path: str) -> None:
        with self._writing:
            try:
                write_json(path, {"revoked": sorted(self.revoked)})
            except OSError as error:
                logger.error("what was revoked cannot be remembered in %s: %s", path, error)
