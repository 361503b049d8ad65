"""The parent's end of a caller's process."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

import psutil

from tests.support.paths import ROOT

__all__ = ["CallerError", "CallerProcess"]


TIMEOUT = 120.0
"""Seconds that a caller has to start, and for each measurement."""

GRACE = 15.0
"""Seconds that a caller has to end what it started."""


class CallerError(Exception):
    """A caller failed, or did not answer in time; its last output is in the text."""


class CallerProcess:
    """A module of this package that runs `caller.serve`, as a child process; a context manager.

    Args:
        name: what error messages call it.
        module: its full name.
        arguments: of its command line.
        python: the interpreter that runs it; that of this process if None.
    """

    def __init__(self, name: str, module: str, arguments: tuple[str, ...] = (), python: str | None = None) -> None:
        self.name = name
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            [python or sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            start_new_session=True,
        )
        assert self._process.stdin
        assert self._process.stdout
        self._questions: IO[bytes] = self._process.stdin
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=[self._process.stdout], name=f"read {name}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self, answers: IO[bytes]) -> None:
        for line in answers:
            self._answers.put(line)
        self._answers.put(b"")

    def await_ready(self) -> None:
        """Wait until the caller is set up.

        Raises:
            CallerError: it could not be set up, or not within `TIMEOUT` seconds.
        """
        self._next_answer("start", TIMEOUT)

    def ask(self, do: str, **parameters: object) -> Any:
        """Have the caller run the method ``do`` of `caller.Caller`; what it returns.

        Raises:
            CallerError: the method failed, or took longer than `TIMEOUT` seconds.
        """
        self._write({"do": do, "with": parameters})
        return self._next_answer(do, TIMEOUT)

    def _write(self, question: object) -> None:
        # If the caller has ended, the missing answer says so.
        with contextlib.suppress(BrokenPipeError):
            self._questions.write(json.dumps(question).encode() + b"\n")
            self._questions.flush()

    def _next_answer(self, what: str, timeout: float) -> Any:
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise CallerError(self._describe(f"did not {what} within {timeout:g} s")) from None
        if not line:
            raise CallerError(self._describe(f"ended when asked to {what}"))
        return json.loads(line)

    def _describe(self, what: str) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        return "\n".join([f"{self.name} {what}; its last output:", *lines[-20:]])

    def cpu_seconds(self) -> float:
        """CPU time that the caller and all its descendants have used so far."""
        process = psutil.Process(self.pid)
        times = []
        for member in [process, *process.children(recursive=True)]:
            try:
                times.append(member.cpu_times())
            except psutil.NoSuchProcess:
                continue
        return sum(time.user + time.system for time in times)

    def close(self) -> None:
        """End the caller with what it started, by asking, and by force if that takes too long."""
        self._write({"do": "close"})
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            with contextlib.suppress(BrokenPipeError):
                self._questions.close()
            self._output.close()

    def __enter__(self) -> CallerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
