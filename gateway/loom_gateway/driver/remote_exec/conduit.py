"""`Conduit`: bytes in both directions between the driver and descriptors in the process of a rank.

Each direction has a thread, so that neither a program that reads nothing nor a driver that takes nothing holds up
the agent.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

WINDOW = 1 << 20
"""Bytes of output that may be on their way. A program that prints more has to wait, as at a full pipe."""

_PIECE = 64 << 10  # bytes that are read at once


class Conduit:
    """Passes on what descriptors have to read, and writes to one of them.

    What is sent to ``port`` are tuples: the handle, and ``("data", stream, bytes)`` for output, ``("wrote", size)``
    for input that was taken, or ``("over", status, text)`` at the end.

    Args:
        outputs: the descriptors to read, by the name of the stream. They are closed after the last output.
        inputs: the descriptor to write to. It is closed after the last input.
        before_close: called before that.
    """

    def __init__(
        self,
        handle: str,
        port: Any,
        outputs: Mapping[str, int],
        inputs: int,
        before_close: Callable[[], object] = lambda: None,
    ) -> None:
        self._handle = handle
        self._port = port
        self._inputs = inputs
        self._before_close = before_close
        self._room = WINDOW
        self._more_room = threading.Condition()  # guards `_room` and `_dropped`; notified when they change
        self._dropped = False  # whether nobody takes the output any more
        self._to_write: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._readers = [self._start(self._read, stream, descriptor) for stream, descriptor in outputs.items()]
        self._start(self._write)

    def write(self, data: bytes | None) -> None:
        """Write input, later; None closes the input."""
        self._to_write.put(data)

    def grant(self, size: int) -> None:
        """Let so many more bytes of output be on their way."""
        with self._more_room:
            self._room += size
            self._more_room.notify_all()

    def drop(self) -> None:
        """Read on, so that no writer waits, and send nothing more."""
        with self._more_room:
            self._dropped = True
            self._more_room.notify_all()

    def wait_for_output(self, seconds: float | None) -> bool:
        """Wait until all output was read; return whether it was within some seconds."""
        until = None if seconds is None else time.monotonic() + seconds
        for reader in self._readers:
            reader.join(None if until is None else max(0.0, until - time.monotonic()))
        return not any(reader.is_alive() for reader in self._readers)

    def over(self, status: int | None, text: str = "") -> None:
        """Say that nothing follows, with the exit status of a command, or why there is none."""
        self._to_write.put(None)
        self._send("over", status, text)

    def _start(self, function: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=function, args=arguments, name="loom rank", daemon=True)
        thread.start()
        return thread

    def _send(self, *event: object) -> None:
        self._port.send((self._handle, event))

    def _read(self, stream: str, descriptor: int) -> None:
        # An error: a terminal whose programs have ended, or a connection that broke.
        with contextlib.suppress(OSError):
            while data := os.read(descriptor, _PIECE):
                with self._more_room:
                    self._more_room.wait_for(lambda: self._room > 0 or self._dropped)
                    self._room -= len(data)
                if not self._dropped:
                    self._send("data", stream, data)
        os.close(descriptor)

    def _write(self) -> None:
        while (data := self._to_write.get()) is not None:
            view = memoryview(data)
            with contextlib.suppress(OSError):  # the program has closed its input, or ended
                while view:
                    view = view[os.write(self._inputs, view) :]
            self._send("wrote", len(data))
        with contextlib.suppress(OSError):
            self._before_close()
        os.close(self._inputs)
