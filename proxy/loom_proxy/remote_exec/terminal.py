"""`Terminal`: this program's terminal as that of a command on a rank."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Sequence
from typing import Any

from loom.errors import LoomError, WrongState
from loom_proxy.remote_exec.rank import RankProcess

LEAVE = b"~."
"""Keys that leave the terminal at a line's beginning, as in ssh: also while the line to the cluster is down."""

LEFT = 255
"""The exit status of a terminal that was left."""

GOODBYE = 2.0  # seconds to end the command when its terminal is left; after a cut the driver ends it by itself

_WAITING = 1 << 20  # bytes typed that wait to be sent; more are not read

_UNIX_LINE_ENDS = (b"\r", b"\n")


class Escape:
    """Finds `LEAVE` in typed text. A tilde at the beginning of a line waits for the next key."""

    def __init__(self) -> None:
        self.left = False
        """True if the terminal is to be left."""
        self._at_start = True
        self._held = b""

    def typed(self, data: bytes) -> bytes:
        """Return the part of typed text that is sent on."""
        sent = b""
        for key in (data[i : i + 1] for i in range(len(data))):
            if self._held:
                if self._held + key == LEAVE:
                    self.left = True
                    return sent
                sent += self._held if key != self._held else b""  # two tildes are one
                self._held = b""
            elif self._at_start and key == LEAVE[:1]:
                self._held = key
                continue
            sent += key
            self._at_start = key in _UNIX_LINE_ENDS
        return sent


class Terminal:
    """A command on a rank that has this program's terminal: its keys, its signals, its size.

    Args:
        command: empty for the shell of the rank's environment.

    Raises:
        WrongState: this program's input or output is no terminal.
    """

    def __init__(self, process: RankProcess, command: Sequence[str], away: float) -> None:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise WrongState("a shell needs a terminal: run the command with exec instead, which needs none")
        self._process = process
        self._keys, self._screen = sys.stdin.fileno(), sys.stdout.fileno()
        variables = {name: os.environ[name] for name in ("TERM", "COLORTERM") if name in os.environ}
        self._handle = process.ask("shell", list(command), variables, self._size(), away).get()
        self._wake_out, self._wake = os.pipe()  # a byte in it is a new size; its end is the end of the keyboard
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()  # answers with output; None if the user has left
        self._to_send: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._unsent = 0
        self._sent = threading.Condition()  # guards `_unsent`

    def interact(self) -> int:
        """Connect the terminal until the command ends; return its exit status, or `LEFT`."""
        keyboard = threading.Thread(target=self._read_keys, name="loom keyboard", daemon=True)
        sender = threading.Thread(target=self._send, name="loom sender", daemon=True)
        with self._raw():
            keyboard.start()
            sender.start()
            try:
                return self._show()
            finally:
                os.close(self._wake)
                keyboard.join()
                os.close(self._wake_out)
                self._to_send.put(None)

    def _show(self) -> int:
        while True:
            self._process.ask("hear", self._handle).add_done_callback(self._news.put)
            answer = self._news.get()
            if answer is None:
                with contextlib.suppress(LoomError, TimeoutError):
                    self._process.ask("end", self._handle).get(GOODBYE)
                return LEFT
            pieces, end = answer.get()
            for _, data in pieces:
                _write(self._screen, data)
            if end is not None:
                return int(end[0])

    def _read_keys(self) -> None:
        try:
            self._pass_keys()
        finally:  # also when this program's terminal is gone
            self._news.put(None)

    def _pass_keys(self) -> None:
        escape = Escape()
        while True:
            with self._sent:
                full = self._unsent > _WAITING
            ready, _, _ = select.select([self._wake_out] if full else [self._wake_out, self._keys], [], [])
            if self._wake_out in ready:
                if not os.read(self._wake_out, 64):
                    return
                self._to_send.put(("resize", self._handle, *self._size()))
                continue
            typed = os.read(self._keys, 4096)
            data = escape.typed(typed)
            if data:
                with self._sent:
                    self._unsent += len(data)
                self._to_send.put(("write", self._handle, data))
            if escape.left or not typed:
                return

    def _send(self) -> None:
        with contextlib.suppress(LoomError):  # the command has ended
            while (asked := self._to_send.get()) is not None:
                if asked[0] == "write":
                    self._process.write(*asked[1:])
                    with self._sent:
                        self._unsent -= len(asked[2])
                else:
                    self._process.wait_for(*asked)

    @contextlib.contextmanager
    def _raw(self) -> Iterator[None]:
        before = termios.tcgetattr(self._keys)
        on_main = threading.current_thread() is threading.main_thread()
        handler = signal.signal(signal.SIGWINCH, self._size_changed) if on_main else None
        tty.setraw(self._keys, termios.TCSADRAIN)
        try:
            yield
        finally:
            termios.tcsetattr(self._keys, termios.TCSADRAIN, before)
            if on_main:
                signal.signal(signal.SIGWINCH, handler)

    def _size_changed(self, number: int, frame: object) -> None:
        # Nothing but this in a signal's handler: it may interrupt any other code.
        with contextlib.suppress(OSError):
            os.write(self._wake, b"s")

    def _size(self) -> tuple[int, int]:
        size = os.get_terminal_size(self._screen)
        return size.lines, size.columns


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
