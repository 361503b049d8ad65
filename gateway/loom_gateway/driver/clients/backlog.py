"""Operations that were received and are not started yet. The client may still withdraw them.

The driver reads a little ahead of what it starts. Without that, it would see a withdrawal only after it had started
everything that the client sent before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from loom.wire.bodies import CancelOperation, OperationResult
from loom.wire.codec import dumps
from loom.wire.messages import Kind, Message

MOST_MESSAGES = 16_384  # maximum number of messages to read ahead
MOST_BYTES = 8 << 20  # maximum number of bytes of frames to read ahead
PACE = 16  # number of messages to start before the connection reads ahead again


class Backlog:
    """The queue of messages between one connection's socket and the session. The connection's thread uses it.

    If that thread still starts an operation when the connection is lost, the next one's thread adds meanwhile.

    ``expects`` returns whether a large message is still incomplete, by its operation's id and the number of its
    first chunk (0 if unknown).
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
        self._withdrawn: set[int] = set()  # ids withdrawn before all of their message had arrived
        self._bytes = 0  # of the frames in `_messages`
        self._pace = PACE  # messages until the next read-ahead

    @property
    def full(self) -> bool:
        return len(self._messages) >= MOST_MESSAGES or self._bytes >= MOST_BYTES

    @property
    def empty(self) -> bool:
        return not self._messages

    def add(self, messages: Sequence[Message], size: int) -> None:
        """Add the messages of a frame of ``size`` bytes. Answer a withdrawal at once."""
        self._bytes += size
        for message in messages:
            if message.kind == Kind.CANCEL:
                self._cancel(message)
            elif self._withdrawn and message.id in self._withdrawn:
                self._withdrawn.remove(message.id)
            else:
                self._messages.append(message)

    def start_some(self) -> bool:
        """Start up to `PACE` messages. Return True when it is time to read ahead, False when the queue is empty."""
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
        # Another connection's thread may take messages meanwhile.
        waiting = next((message for message in self._messages.copy() if message.id == cancel.operation), None)
        try:
            if waiting is None:
                raise ValueError
            self._messages.remove(waiting)
            in_time = True
        except ValueError:
            in_time = self._expects(cancel.operation, cancel.first_chunk or 0)
            if in_time:
                self._withdrawn.add(cancel.operation)
        self._answer(OperationResult(0.0).message(message.id, dumps(in_time)))
