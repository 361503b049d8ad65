"""`Offload`: does long work in another process, because the gateway's relays everybody's frames.

Python runs one thread of a process at a time, so a thread is no way out: reading a text of megabytes as JSON, or
writing the page for Prometheus, would hold up every call meanwhile. The other process starts with the first work,
does one piece after the other, has no rights and no secrets, and ends with the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from importlib import import_module
from typing import IO, Any

import msgpack

from loom.errors import LimitReached, LoomError, Unavailable, error_for_code
from loom.process.child import python
from loom.process.linux_capabilities import keep_only

logger = logging.getLogger(__name__)

MAX_WAITING_WORK = 64
"""Pieces of work that wait. One more is refused."""

SMALL_WORK = 16 << 10
"""Bytes of a text up to which reading it takes under a millisecond, and is done where it is."""

LONGEST_WORK = 30.0
"""Seconds that a piece of work may take, after which the process is ended."""

_LENGTH = struct.Struct(">I")


class Work(Enum):
    """The work that can be done there: a function of plain values that returns bytes."""

    METRICS = "loom_gateway.rest.metrics:page"
    DESCRIPTION = "loom_gateway.sessions.session:check_description"

    @property
    def function(self) -> Callable[..., bytes]:
        module, _, name = self.value.partition(":")
        function: Callable[..., bytes] = getattr(import_module(module), name)
        return function


class Offload:
    """The gateway's other process. Before `enable`, as in tests of a part, work is done on a thread of this one."""

    def __init__(self) -> None:
        self._enabled = False
        self._waiting = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, "offload")  # waits for the process

    def enable(self) -> None:
        """Use another process from now on."""
        self._enabled = True

    async def do(self, work: Work, *arguments: Any) -> bytes:
        """Return what the work's function returns.

        Raises:
            LimitReached: too much work waits.
            Unavailable: the process has ended, or the work took too long.
            Other errors of Loom: what the function raises.
        """
        if not self._enabled:
            return await asyncio.to_thread(work.function, *arguments)
        if self._waiting >= MAX_WAITING_WORK:
            raise LimitReached(
                f"{MAX_WAITING_WORK} requests wait for the gateway's second process: ask again later"
            )
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._exchange, work, arguments)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the process. The next work starts another."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.kill()
            process.wait()
            process.stdout.close()

    def _exchange(self, work: Work, arguments: tuple[Any, ...]) -> bytes:
        """Have a piece of work done. On the thread."""
        try:
            process = self._process = self._process or _start()
            answer = _ask(process, msgpack.packb([work.name, arguments]))
        except (OSError, EOFError) as error:
            self.close()
            raise Unavailable(f"the gateway's second process could not do this: {error}; ask again") from None
        if answer[:1] == b"\1":
            return answer[1:]
        code, text = msgpack.unpackb(answer[1:])
        raise error_for_code(code, text)


OFFLOAD = Offload()
"""The second process of this gateway."""


def _start() -> subprocess.Popen[bytes]:
    command = python("loom_gateway.offload")
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def _ask(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(_LENGTH.pack(len(request)))
    process.stdin.write(request)
    process.stdin.flush()
    until = time.monotonic() + LONGEST_WORK
    (size,) = _LENGTH.unpack(_read(process.stdout, _LENGTH.size, until))
    return _read(process.stdout, size, until)


def _read(pipe: IO[bytes], size: int, until: float) -> bytes:
    parts = []
    while size:
        ready, _, _ = select.select([pipe], [], [], max(until - time.monotonic(), 0.0))
        if not ready:
            raise OSError(f"it took more than {LONGEST_WORK:g} s")
        part = os.read(pipe.fileno(), min(size, 1 << 20))
        if not part:
            raise EOFError("it has ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def main() -> int:
    """Do what standard input says, until its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.geteuid() == 0:
        keep_only()
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what something prints is no answer
    while head := requests.read(_LENGTH.size):
        name, arguments = msgpack.unpackb(requests.read(*_LENGTH.unpack(head)))
        try:
            answer = b"\1" + Work[name].function(*arguments)
        except LoomError as error:
            answer = b"\0" + msgpack.packb([error.code, str(error)])
        except Exception as error:
            logger.exception("%s cannot be done", name)
            answer = b"\0" + msgpack.packb([LoomError.code, f"the gateway failed: {error!r:.500}"])
        answers.write(_LENGTH.pack(len(answer)))
        answers.write(answer)
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
