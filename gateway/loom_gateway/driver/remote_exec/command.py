"""`RankCommand`: a command in the environment of a rank, with pipes or in a terminal. It ends with the rank.

A `Conduit` carries bytes in both directions between the driver and descriptors in the process of a rank. Each
direction has a thread, so that neither a program that reads nothing nor a driver that takes nothing holds up the
agent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import queue
import shutil
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loom.process.parent_pipe import killed_with_pipe

WINDOW = 1 << 20
"""Bytes of output that may be on their way. A program that prints more has to wait, as at a full pipe."""

_PIECE = 64 << 10  # bytes that are read at once


class Conduit:
    """Passes on what descriptors have to read, and writes to one of them.

    The messages to ``port`` are tuples: the handle, and ``("data", stream, bytes)`` for output, ``("wrote", size)``
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


LAST_OUTPUT = 0.5  # seconds for the output of what a command has left running; then that is killed

HANGUP_GRACE = 2.0  # seconds that a command has to end after SIGHUP; then it is killed


class Spec(NamedTuple):
    """The command to run."""

    command: Sequence[str]
    """The program and its arguments; empty for the user's shell."""
    terminal: tuple[int, int] | None
    """Rows and columns of the terminal in which it runs; None without one."""
    variables: Mapping[str, str]
    """Environment variables in addition to those of the rank."""


class RankCommand:
    """A running command, in a session and process group of its own.

    Args:
        on_end: called, on a thread, when it has ended.
    """

    def __init__(self, handle: str, port: Any, spec: Spec, on_end: Callable[[str], object]) -> None:
        self._handle = handle
        self._on_end = on_end
        self._terminal: int | None = None
        alive, self._parent_pipe = os.pipe()
        try:
            if spec.terminal is None:
                self._start_with_pipes(port, spec, alive)
            else:
                self._start_in_terminal(port, spec, spec.terminal, alive)
        except BaseException:
            os.close(self._parent_pipe)
            raise
        finally:
            os.close(alive)
        threading.Thread(target=self._await_end, name="loom rank", daemon=True).start()

    def resize(self, rows: int, columns: int) -> None:
        if self._terminal is not None:
            with contextlib.suppress(OSError):  # its programs have just ended
                _set_size(self._terminal, rows, columns)

    def signal(self, number: int) -> None:
        """Send a signal to the command and what it has started in its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def end(self) -> None:
        """Hang up, and kill what is left after `HANGUP_GRACE` seconds."""
        self.conduit.drop()
        self.signal(signal.SIGHUP)
        self.signal(signal.SIGCONT)
        timer = threading.Timer(HANGUP_GRACE, self._kill_all)
        timer.daemon = True
        timer.start()

    def _start_with_pipes(self, port: Any, spec: Spec, alive: int) -> None:
        (child_in, ours_in), (ours_out, child_out), (ours_err, child_err) = (os.pipe() for _ in range(3))
        self._start(spec, alive, "", (child_in, child_out, child_err), (ours_in, ours_out, ours_err))
        self.conduit = Conduit(self._handle, port, {"stdout": ours_out, "stderr": ours_err}, ours_in)

    def _start_in_terminal(self, port: Any, spec: Spec, size: tuple[int, int], alive: int) -> None:
        ours, theirs = pty.openpty()
        _set_size(ours, *size)
        self._start(spec, alive, os.ttyname(theirs), (theirs,) * 3, (ours,))
        self._terminal = ours
        self.conduit = Conduit(self._handle, port, {"stdout": ours}, os.dup(ours))

    def _start(
        self, spec: Spec, alive: int, terminal: str, streams: tuple[int, ...], ours: tuple[int, ...]
    ) -> None:
        try:
            self._process = self._popen(spec, alive, terminal, *streams)
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in set(streams):
                os.close(descriptor)

    def _popen(self, spec: Spec, alive: int, terminal: str, *streams: int) -> subprocess.Popen[bytes]:
        command = spec.command or [_shell()]
        return subprocess.Popen(
            killed_with_pipe(command, alive, terminal),
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            env={**os.environ, **spec.variables},
            start_new_session=True,
            pass_fds=[alive],
        )

    def _await_end(self) -> None:
        # Not reaped yet: as long as the kernel keeps its id, no other session has the same.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        if not self.conduit.wait_for_output(LAST_OUTPUT):
            self._kill_all()
            self.conduit.wait_for_output(LAST_OUTPUT)
        self._kill_all()
        code = self._process.wait()
        self.conduit.over(code if code >= 0 else 128 - code)
        self._terminal = None
        os.close(self._parent_pipe)
        self._on_end(self._handle)

    def _kill_all(self) -> None:
        """Kill all processes of the command's session, unless it is over."""
        if self._process.returncode is None:
            for pid in _members(self._process.pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def _members(session: int) -> Iterator[int]:
    """Yield the processes of a session, the first one included unless it has ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, _, of = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                yield int(path.parent.name)


def _set_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _shell() -> str:
    return os.environ.get("SHELL") or shutil.which("bash") or "/bin/sh"
