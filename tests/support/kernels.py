"""A real Jupyter kernel, and pipes that its cells wait at."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from jupyter_client import BlockingKernelClient, KernelManager

BOUND = 60.0
"""Seconds that no cell may take."""
PATIENCE = 10.0
"""Seconds after which a user interrupts again."""


@dataclass
class Output:
    """What a cell printed, showed and returned."""

    stdout: str = ""
    stderr: str = ""
    error: str = ""
    """Class of the exception that it ended with."""
    traceback: str = ""
    """What it shows of that exception."""
    shown: list[dict[str, str]] = field(default_factory=list)
    """What was displayed, by MIME type, and each update of it."""
    value: dict[str, str] = field(default_factory=dict)
    """The last expression, by MIME type."""


class Kernel:
    """A kernel in a process of its own, and a client of it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._folder = TemporaryDirectory()  # two kernels would share the sockets that are files by default
        self.manager = KernelManager(transport="ipc", connection_file=f"{self._folder.name}/kernel.json")
        self.manager.start_kernel(env={**os.environ, **environment})
        self.client: BlockingKernelClient = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=BOUND)
        # An interrupt may come at an instruction that belongs to no line of source. IPython's usual traceback
        # fails on that one with an AssertionError of its own, and then the cell ends without naming its error.
        self.check("%xmode Plain")

    def run(self, code: str, until: Callable[[Output], bool] | None = None) -> Output:
        """Run a cell; with ``until``, interrupt it once that is true of what it has put out.

        Like a user it interrupts again if that shows no effect: Python loses an interrupt in a destructor.
        """
        cell = self.client.execute(code)
        output = Output()
        pressed = 0
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=PATIENCE if pressed else BOUND)
            except queue.Empty:
                assert 0 < pressed < BOUND / PATIENCE, output
                pressed += 1
                self.manager.interrupt_kernel()
                continue
            if message["parent_header"].get("msg_id") != cell:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                setattr(output, content["name"], getattr(output, content["name"]) + content["text"])
            elif kind in ("display_data", "update_display_data"):
                output.shown.append(content["data"])
            elif kind == "execute_result":
                output.value = content["data"]
            elif kind == "error":
                output.error, output.traceback = content["ename"], "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                return output
            if until is not None and until(output):
                until = None
                pressed = 1
                self.manager.interrupt_kernel()

    def check(self, code: str) -> Output:
        """Run a cell that must not raise."""
        output = self.run(code)
        assert output.error == "", output
        return output

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self._folder.cleanup()


def waits(output: Output) -> bool:
    return "waiting" in output.stdout


class Pipe:
    """A named pipe, from which everybody who wants to go on has to read a byte."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self.descriptor = os.open(path, os.O_RDWR)  # so that nobody who opens it waits for the other side

    def open(self) -> None:
        """Let everybody go on."""
        os.write(self.descriptor, bytes(1000))
