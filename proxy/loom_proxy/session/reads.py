"""`Reads`: the answers of calls that the program has read. The driver keeps each until it is told so, in batches.

A message for each answer would slow every call. So many answers are told together, with the next operation; what is
left is told by a thread soon after, and a large answer at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

TOGETHER = 64  # answers of which the driver is told together
SOON = 0.2  # seconds after which it is told of fewer


class Reads:
    """The answers that were read and not told yet. Any thread may call any method.

    ``send`` sends the driver a `ReadAnswers`: with the next operation, or at once.
    """

    def __init__(self, send: Callable[[Sequence[Any], bool], None]) -> None:
        self._send = send
        self._answers: deque[Any] = deque()
        self._awake = False  # whether the thread will tell the driver soon
        self._wake = threading.Semaphore(0)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None  # started with the first answer
        self._starting = threading.Lock()

    def __len__(self) -> int:
        return len(self._answers)

    def note(self, answer: Any, large: bool) -> None:
        """Note that an answer was read: the operation's id or, of several answers, the id and the number."""
        self._answers.append(answer)
        if large or len(self._answers) >= TOGETHER:
            self.tell(at_once=large)
        elif not self._awake:
            if self._started():
                self._awake = True
                self._wake.release()
            else:
                self.tell(at_once=True)

    def tell(self, at_once: bool) -> None:
        """Tell the driver of all that were read, if there are some."""
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
                thread = threading.Thread(target=self._tell_soon, name="loom-reads", daemon=True)
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
