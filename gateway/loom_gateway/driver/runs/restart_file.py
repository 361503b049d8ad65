"""The file of what has to be started again if a driver dies: its functions with restarts, and its synced folders.

The driver writes it as a whole whenever that changes, and removes it when no function is left. If the driver dies,
the gateway, this one or the next, hands the file to another driver of the session; see
`loom_gateway.sessions.restarts`.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
from pathlib import Path

from loom.errors import LoomError, WrongArguments
from loom.process.state_file import replace_file
from loom.wire.bodies import AT_EACH, StartRun
from loom.wire.frames import decode_frame
from loom.wire.length_prefix import LENGTH, behind_length
from loom.wire.messages import Kind, Message
from loom.wire.stream import unnumbered_frame

logger = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
"""Bytes of a function and its arguments, and of the whole file."""


class RestartFile:
    """What a driver leaves to the next driver of its session. Safe on any thread.

    Args:
        path: of the file, in which an earlier driver's messages may be already.
        mode: of the file, which a session host reads while the driver lives.
    """

    def __init__(self, path: str, mode: int = 0o600) -> None:
        self._path = Path(path)
        self._mode = mode
        self._messages: dict[tuple[int, int], bytes] = {}
        """The encoded messages, by kind and id, in the order in which they came."""
        self._functions: set[tuple[int, int]] = set()  # those of them for which a driver is started
        self._lock = threading.Lock()  # held while the file is written

    def take_over(self) -> list[Message]:
        """Return what an earlier driver has left, and keep it, up to what makes no sense."""
        try:
            data = self._path.read_bytes()
        except OSError:
            return []
        found: list[Message] = []
        position = 0
        try:
            while position < len(data):
                (length,) = LENGTH.unpack_from(data, position)
                position += LENGTH.size
                (message,) = decode_frame(data[position : position + length]).messages
                self._note(message, data[position - LENGTH.size : position + length])
                found.append(message)
                position += length
        except (LoomError, ValueError, struct.error) as error:
            logger.error("what an earlier driver of the session has left makes no sense: %s", error)
        return found

    def keep(self, message: Message) -> None:
        """Keep an operation for the next driver, in place of an earlier one of its kind and id.

        Raises:
            WrongArguments: it is too large.
            OSError: the disk does not take it. It is not kept.
        """
        encoded = behind_length(unnumbered_frame(message))
        with self._lock:
            kept = {key: one for key, one in self._messages.items() if key != (message.kind, message.id)}
            if sum(map(len, kept.values())) + len(encoded) > MOST_BYTES:
                raise WrongArguments(
                    f"functions with restarts, their arguments and the lists of synced folders may have "
                    f"{MOST_BYTES >> 20} MiB in a session: put large data into a file, and give its path"
                )
            before = self._messages, self._functions.copy()
            self._messages = kept
            self._note(message, encoded)
            try:
                self._write()
            except OSError:
                self._messages, self._functions = before
                raise

    def drop(self, message: Message) -> None:
        """Keep an operation no longer. A disk that is full does not hold that up."""
        with self._lock:
            if self._messages.pop((message.kind, message.id), None) is not None:
                self._functions.discard((message.kind, message.id))
                with contextlib.suppress(OSError):
                    self._write()

    def _note(self, message: Message, encoded: bytes) -> None:
        self._messages[message.kind, message.id] = encoded
        if message.kind == Kind.RUN and StartRun.from_body(message.body).restarts != AT_EACH:
            self._functions.add((message.kind, message.id))

    def _write(self) -> None:
        if self._functions:
            replace_file(self._path, b"".join(self._messages.values()), self._mode)
        else:
            self._path.unlink(missing_ok=True)
