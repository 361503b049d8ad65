"""`Child`: a child process that announces when it is ready."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import IO, Any

from loom.errors import LoomError
from loom.process.error_exit import error_for_exit_code
from loom.process.parent_pipe import ParentPipe

KEPT_LINES = 50
LONGEST_LINE = 8192
"""Bytes of a line of a child's output. The last lines are kept for error messages; longer lines are split."""


_START = os.path.join(os.path.dirname(os.path.abspath(__file__)), "start.py")


class ProcessState(str, Enum):
    """The state of a supervised process that listens on a port when it runs."""

    STARTING = "starting"
    LISTENING = "listening"
    ENDED = "ended"  # the process is restarted after a while
    PORT_TAKEN = "port_taken"  # the process is not started, because another program listens on its port


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module by this process's interpreter, without the current folder's files."""
    return [sys.executable, _START, module, *arguments]


def announcement(line: str) -> Mapping[str, Any] | None:
    """Return the announcement that `loom.process.listen.announce` printed in a line, or None for another line."""
    with contextlib.suppress(ValueError):
        found = json.loads(line) if line.startswith("{") else None
        if isinstance(found, dict) and found.get("event") == "listening":
            return found
    return None


class Child:
    """A child process, in a session of its own: Ctrl-C in a terminal does not reach it.

    Args:
        parent_pipe: whether its standard input is a `ParentPipe` of this process, or empty. Held as this object:
            what is started in the child's place, as by an injected fault, may hold on to it too.
        errors: descriptor of a file for its standard error, which is kept with its other output by default.
        understand: returns the announcement in a line of its standard output, if the line says that it is ready.
        on_line: called with each other line that it prints, on a thread.
        user: the user id of the process, and the group id, without further groups; by default this process's.
        folder: in which it starts; by default this process's.
    """

    ready: Future[Mapping[str, Any]]
    """The announcement, or a `LoomError` with the reason why the child ended before it."""

    ended: Future[int]
    """The exit code; negative: the signal that ended it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        parent_pipe: bool = True,
        errors: int = subprocess.PIPE,
        understand: Callable[[str], Mapping[str, Any] | None] = announcement,
        on_line: Callable[[str], object] = lambda line: None,
        user: int | None = None,
        folder: str | None = None,
    ) -> None:
        self.name = name
        self.ready = Future()
        self.ended = Future()
        self._understand = understand
        self._on_line = on_line
        self._output: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._parent_pipe = ParentPipe() if parent_pipe else None
        try:
            self._process = subprocess.Popen(
                command,
                stdin=self._parent_pipe.child_end if self._parent_pipe else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=None if user is None else (),
                cwd=folder,
            )
        except BaseException:
            self.cut()
            raise
        finally:
            if self._parent_pipe:
                self._parent_pipe.given()
        streams = [stream for stream in (self._process.stdout, self._process.stderr) if stream]
        self._start(self._await_end, [self._start(self._read, stream) for stream in streams])

    def _start(self, function: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=function, args=arguments, name=f"watch {self.name}", daemon=True)
        thread.start()
        return thread

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        """The last lines that the child printed."""
        return "\n".join(list(self._output))

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def ask_to_end(self) -> None:
        self._process.terminate()

    def release(self) -> None:
        """Let the child go on if it waits in `loom.process.parent_pipe.parent_releases`."""
        if self._parent_pipe:
            self._parent_pipe.release()

    def cut(self) -> None:
        """Close the parent pipe, so that the child ends."""
        if self._parent_pipe:
            self._parent_pipe.close()

    def end(self, grace: float) -> None:
        """Wait ``grace`` seconds for the child's end, then kill it."""
        try:
            self.ended.result(grace)
        except concurrent.futures.TimeoutError:
            self._process.kill()
            self.ended.result()

    def _read(self, stream: IO[bytes]) -> None:
        # Read to the end, even if the output is not used: a full pipe would block the child.
        with stream:
            for line in _lines(stream):
                announced = None
                if stream is self._process.stdout and not self.ready.done():
                    announced = self._understand(line)
                if announced is not None:
                    self.ready.set_result(announced)  # keep it out of the output: it may contain a token
                else:
                    self._output.append(line)
                    self._on_line(line)

    def _await_end(self, readers: list[threading.Thread]) -> None:
        code = self._process.wait()
        for reader in readers:
            # The child's last lines say why it ended. The timeout is for a process of the child's that holds the
            # pipe open.
            reader.join(timeout=1.0)
        self.ended.set_result(code)
        if not self.ready.done():
            self.ready.set_exception(self._early_end(code))

    def _early_end(self, code: int) -> LoomError:
        lines = list(self._output)
        if lines and lines[-1].startswith("error: "):
            return error_for_exit_code(code)(f"{self.name}: {lines[-1].removeprefix('error: ')}")
        what = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        return LoomError(f"{self.name} ended {what} before it was ready; its last output:\n{self.output}")


def _lines(stream: IO[bytes]) -> Iterator[str]:
    while line := stream.readline(LONGEST_LINE):
        yield line.decode(errors="replace").rstrip("\n")
