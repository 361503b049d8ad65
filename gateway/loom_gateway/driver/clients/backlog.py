"""Operations that have come and have not been started, which the client may still take back.

A client that sends faster than Monarch takes is read ahead of, a little: otherwise what it takes back would be
found out only when all that it sent before has been started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from loom.wire.bodies import CancelOperation, OperationResult
from loom.wire.codec import dumps
from loom.wire.messages import Kind, Message

MOST_MESSAGES = 16_384
"""Messages that are read ahead at most."""

MOST_BYTES = 8 << 20
"""Bytes of frames that are read ahead at most."""

PACE = 16
"""Messages that are started between one look ahead and the next."""


class Backlog:
    """The messages of one connection between the socket and the session. For its thread.

    Args:
        start: starts an operation.
        expects: whether a large message with an id has not come whole; with the id, the number of its first chunk
            if that may not have come.
        answer: sends an answer.
    """

    def __init__(
        self,
        start: Callable[[Message], None],
        expects: Callable[[int, int], bool],
        answer: Callable[[Message], object],
    ) -> None:
        self._start = start
        self._expects = expects
        self._answer = answer
        self._messages: deque[Message] = deque()
        self._withdrawn: set[int] = set()
        self._bytes = 0
        self._pace = PACE

    @property
    def full(self) -> bool:
        """Whether no more may be read ahead."""
        return len(self._messages) >= MOST_MESSAGES or self._bytes >= MOST_BYTES

    def add(self, messages: Sequence[Message], size: int) -> None:
        """Take the messages of a frame of so many bytes; one that takes back another is answered at once."""
        self._bytes += size
        for message in messages:
            if message.kind == Kind.CANCEL:
                self._cancel(message)
            elif self._withdrawn and message.id in self._withdrawn:
                self._withdrawn.remove(message.id)
            else:
                self._messages.append(message)

    def start_some(self) -> bool:
        """Start messages; True when it is time for a look ahead, False when there are no more."""
        messages = self._messages
        while messages:
            self._start(messages.popleft())
            self._pace -= 1
            if not self._pace:
                self._pace = PACE
                return True
        self._bytes = 0
        return False

    def _cancel(self, message: Message) -> None:
        cancel = CancelOperation.from_body(message.body)
        for place, waiting in enumerate(self._messages):
            if waiting.id == cancel.operation:
                del self._messages[place]
                in_time = True
                break
        else:
            in_time = self._expects(cancel.operation, cancel.first_chunk or 0)
            if in_time:
                self._withdrawn.add(cancel.operation)
        self._answer(OperationResult(0.0).message(message.id, dumps(in_time)))
