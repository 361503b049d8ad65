"""The side of a session's calls that a future needs: waiting for an answer.

`Reads` are the answers of calls that the program has read. The driver keeps each until it is told so, in batches.
A message for each answer would slow every call, and a frame for each batch takes all processes on the way as long
as some calls. So many answers are told together, in the frame of the next operation; what is left is told by a
thread soon after, and what makes a large sum at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from loom.process.threads import keep_going
from loom.wire.sender import FrameSender
from loom.wire.stream import Stream
from loom_proxy.mesh.rank_states import MeshStates
from loom_proxy.session.read_loop import ReadLoop, Uninterrupted

TOGETHER = 64  # answers that are reported to the driver with the next operation
MOST = 1 << 10  # answers that are reported at once
MOST_BYTES = 4 << 20  # bytes of answers that are reported at once, so that the driver frees them
SOON = 0.2  # seconds after which it is told of whatever was read


class Reads:
    """The answers that were read and not told yet. Any thread may call any method.

    ``send`` sends the driver a `ReadAnswers`: with the next operation, or at once.
    """

    def __init__(self, send: Callable[[Sequence[Any], bool], None]) -> None:
        self._send = send
        self._answers: deque[Any] = deque()
        self._bytes = 0  # of the large ones of them; roughly, since threads may add at once
        self.due = False
        """True if the driver is to be told with the next operation."""
        self._awake = False  # whether the thread will tell the driver soon
        self._wake = threading.Semaphore(0)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None  # started with the first answer
        self._starting = threading.Lock()

    def __len__(self) -> int:
        return len(self._answers)

    def note(self, answer: Any, size: int = 0) -> None:
        """Note that an answer was read: the operation's id or, of several answers, the id and the number.

        ``size`` is in bytes if the answer is large.
        """
        answers = self._answers
        answers.append(answer)
        if size:
            self._bytes += size
        if len(answers) >= TOGETHER:
            self.due = True
        if len(answers) >= MOST or self._bytes >= MOST_BYTES:
            self.tell(at_once=True)
        elif not self._awake:
            if self._started():
                self._awake = True
                self._wake.release()
            else:
                self.tell(at_once=True)

    def tell(self, at_once: bool) -> None:
        """Tell the driver of all that were read, if there are some."""
        self.due, self._bytes = False, 0
        answers = []
        with contextlib.suppress(IndexError):  # other threads take and add some meanwhile
            while True:
                answers.append(self._answers.popleft())
        if answers and not self._over.is_set():
            self._send(answers, at_once)

    def close(self) -> None:
        """End the thread: the connection is over."""
        self._over.set()
        self._wake.release()

    def _started(self) -> bool:
        """Whether the thread runs. None can be started where there are too many, nor by a program that ends."""
        with self._starting:
            if self._thread is None and not self._over.is_set():
                telling = "tell what was read", self._tell_soon
                thread = threading.Thread(target=keep_going, args=telling, name="loom-reads", daemon=True)
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._thread = thread
            return self._thread is not None

    def _tell_soon(self) -> None:
        while not self._over.is_set():
            self._wake.acquire()
            if self._over.wait(SOON):
                return
            self._awake = False  # before the answers are taken, so that none is left behind
            self.tell(at_once=True)


class Waits:
    """A connection that brings answers, and that a thread can wait on."""

    read_loop: ReadLoop
    """The loop in which a thread that waits may read inline. The connection sets it."""

    reads: Reads
    """The answers that the program has read."""

    def __init__(self, stream: Stream, sender: FrameSender) -> None:
        self.states = MeshStates()
        """The known states of the meshes' elements."""
        self.progress: bool | None = None
        """True if long waits are shown; see `loom_proxy.progress.wanted`."""
        self.away = False
        """True if the connection is lost and reconnects."""
        self._stream = stream
        self._sender = sender

    def flush(self) -> None:
        """Send the gathered messages, as far as the socket takes them at once."""
        if self._stream.ready:
            with Uninterrupted():
                self._sender.flush()

    def moving(self) -> tuple[int, int, int]:
        """Return (bytes to send, bytes received of large results, their total size)."""
        return self._stream.outbox.pending_bytes, *self._stream.incoming()

    def withdraw(self, ident: int) -> bool:
        """Withdraw an operation that has not been started; return whether that was in time."""
        raise NotImplementedError
