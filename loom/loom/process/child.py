"""A child process that says when it is ready and does not outlive this process."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import IO, Any

from loom.errors import LoomError
from loom.process.exit_codes import error_for_exit_code

__all__ = ["Child"]

KEPT_LINES = 50
LONGEST_LINE = 8192
"""Bytes. What a child prints is kept for error messages only: the last lines, longer ones in pieces."""

_children: weakref.WeakSet[Child] = weakref.WeakSet()


class Child:
    """A module of Loom that runs as a child process of this one.

    The module prints a line of JSON with ``"event": "listening"`` when it is ready, and ends when its standard
    input is closed. This process holds the other end, so that the kernel closes it however this process ends. The
    child has a session of its own: Ctrl-C in a terminal does not reach it.

    Args:
        name: what error messages call it.
        module: run as ``python -m module`` by the interpreter of this process.
        arguments: of its command line; ``--exit-with-parent`` is added.
        environment: all of its environment variables.
    """

    ready: Future[dict[str, Any]]
    """The announcement, or the `LoomError` that says why the child ended before it made one."""

    ended: Future[int]
    """The exit code; negative: the signal that ended it."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.ready = Future()
        self.ended = Future()
        self._output: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        theirs, ours = os.pipe()
        self._lifeline = io.FileIO(ours, "wb")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--exit-with-parent"],
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environment),
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        _children.add(self)
        assert self._process.stdout
        assert self._process.stderr
        readers = [
            self._start(self._read_announcement, self._process.stdout),
            self._start(self._keep, self._process.stderr),
        ]
        self._start(self._await_end, readers)

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

    def ask_to_end(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def end(self, grace: float) -> None:
        """Wait ``grace`` seconds for the child's end, then kill it."""
        try:
            self.ended.result(grace)
        except concurrent.futures.TimeoutError:
            self._process.kill()
            self.ended.result()
        self._lifeline.close()

    def _read_announcement(self, stdout: IO[bytes]) -> None:
        for line in _lines(stdout):
            announcement = None
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    announcement = json.loads(line)
            if isinstance(announcement, dict) and announcement.get("event") == "listening":
                self.ready.set_result(announcement)
                self._keep(stdout)
                return
            self._output.append(line)

    def _keep(self, stream: IO[bytes]) -> None:
        # Read on for as long as anyone writes: at a full pipe the child would stop.
        self._output.extend(_lines(stream))

    def _await_end(self, readers: list[threading.Thread]) -> None:
        code = self._process.wait()
        self.ended.set_result(code)
        for reader in readers:
            # What the child printed last says why it ended. A process that it started may hold the pipe open.
            reader.join(timeout=1.0)
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


def _release_lifelines() -> None:
    """In a forked copy of this process: the children are to end with the original, not with the copy."""
    for child in list(_children):
        child._lifeline.close()


os.register_at_fork(after_in_child=_release_lifelines)
