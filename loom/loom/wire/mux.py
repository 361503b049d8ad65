"""Sharing one connection: small messages together in a frame, large ones in chunks that take turns.

`Outbox` turns messages into the contents of frames. A message too large for a frame is cut into chunks, and
between two chunks goes what small there is, so that a small call made while a gigabyte moves does not wait for
it. Several large messages take turns, chunk by chunk.

What must not overtake is told by a message's *order key*. Messages of one key leave whole and in the order in
which they were put in; `BARRIER` keeps its place among all keys; None keeps none. The proxy uses the mesh that a
call goes to as the key, since Monarch delivers the messages from one sender to one actor in order.

The receiver puts chunks together with `Inbox`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

from loom.errors import ProtocolMismatch, TooLarge
from loom.wire.messages import Buffer, Kind, Message

__all__ = ["BARRIER", "CHUNK_SIZE", "MAX_MESSAGE", "Inbox", "OrderKey", "Outbox"]

OrderKey: TypeAlias = int | None

BARRIER = 0
"""The order key of a message that nothing overtakes and that overtakes nothing."""

CHUNK_SIZE = 512 << 10
"""Bytes of payload in a chunk, and the most payload that goes into one frame."""

MAX_MESSAGE = 16 << 30
"""Bytes of the largest message that an `Inbox` puts together, unless it is told otherwise."""

_FRAME_MESSAGES = 256


class _Transfer:
    """A large message on its way out."""

    def __init__(self, number: int, message: Message, key: OrderKey) -> None:
        self.number = number
        self.key = key
        self.message = message
        self.total = message.size
        self.offset = 0
        self._parts = deque(memoryview(part).cast("B") for part in message.parts)

    def next_chunk(self) -> Message:
        head: tuple[Any, ...] | None = None
        if self.offset == 0:
            kind, ident, body, parts = self.message
            head = (int(kind), ident, body, [len(part) for part in parts])
        pieces: list[Buffer] = []
        room = CHUNK_SIZE
        while room and self._parts:
            part = self._parts.popleft()
            if len(part) > room:
                self._parts.appendleft(part[room:])
                part = part[:room]
            pieces.append(part)
            room -= len(part)
        body = (self.offset, self.total, head)
        self.offset += CHUNK_SIZE - room
        return Message(Kind.CHUNK, self.number, body, pieces)

    @property
    def done(self) -> bool:
        return self.offset >= self.total


class Outbox:
    """What one side has still to send."""

    def __init__(self) -> None:
        self._small: deque[Message | _Transfer] = deque()
        self._large: deque[_Transfer] = deque()
        self._waiting: deque[tuple[Message, int, OrderKey]] = deque()
        self._blocked: set[OrderKey] = set()
        self._moving: set[OrderKey] = set()
        self._transfers = 0
        self._chunk_turn = False
        self.pending_bytes = 0
        """Bytes of payload that have been put in and not yet taken out."""

    def __bool__(self) -> bool:
        return bool(self._small or self._large)

    def __len__(self) -> int:
        return len(self._small) + len(self._large) + len(self._waiting)

    def put(self, message: Message, key: OrderKey = None) -> None:
        """Queue a message; see the module's text for ``key``."""
        size = message.size if message.parts else 0
        self.pending_bytes += size
        if self._blocked and self._must_wait(key):
            self._blocked.add(key)
            self._waiting.append((message, size, key))
        else:
            self._admit(message, size, key)

    def _must_wait(self, key: OrderKey) -> bool:
        if key is None:
            return False
        return key == BARRIER or key in self._blocked or BARRIER in self._blocked

    def _admit(self, message: Message, size: int, key: OrderKey) -> None:
        if size <= CHUNK_SIZE:
            self._small.append(message)
            return
        self._transfers += 1
        transfer = _Transfer(self._transfers, message, key)
        if key is None:
            self._large.append(transfer)
            return
        self._moving.add(key)
        self._blocked.add(key)
        # It begins when the small messages before it have left: one of them may be of its key.
        (self._small if self._small else self._large).append(transfer)

    def next_frame(self) -> list[Message]:
        """The messages of the next frame; an empty list when there is nothing to send."""
        while self._small and isinstance(first := self._small[0], _Transfer):
            self._large.append(first)
            self._small.popleft()
        if self._large and (self._chunk_turn or not self._small):
            self._chunk_turn = False
            transfer = self._large.popleft()
            chunk = transfer.next_chunk()
            if not transfer.done:
                self._large.append(transfer)
            elif transfer.key is not None:
                self._moving.remove(transfer.key)
                self._release()
            self.pending_bytes -= chunk.size
            return [chunk]
        self._chunk_turn = bool(self._large)
        batch: list[Message] = []
        room = CHUNK_SIZE
        small = self._small
        while small and len(batch) < _FRAME_MESSAGES:
            message = small[0]
            if isinstance(message, _Transfer):
                break
            size = message.size if message.parts else 0
            if size > room:
                break
            batch.append(message)
            small.popleft()
            room -= size
        self.pending_bytes -= CHUNK_SIZE - room
        return batch

    def _release(self) -> None:
        """A large message with a key has gone out whole: let go what waited for it."""
        self._blocked = set(self._moving)
        waiting, self._waiting = self._waiting, deque()
        for message, size, key in waiting:
            if self._blocked and self._must_wait(key):
                self._blocked.add(key)
                self._waiting.append((message, size, key))
            else:
                self._admit(message, size, key)


class _Assembly:
    """A large message on its way in."""

    def __init__(self, head: Sequence[Any], total: int) -> None:
        self.kind, self.ident, self.body, self.lengths = head
        counts = (self.kind, self.ident, *self.lengths)
        countable = all(type(count) is int and count >= 0 for count in counts)
        if not countable or self.kind == Kind.CHUNK or type(self.body) is not tuple:
            raise ValueError("the head of a large message is not that of a message")
        if sum(self.lengths) != total:
            raise ValueError("the parts of a large message do not add up to its size")
        self.data = bytearray(total)
        self.filled = 0

    def message(self) -> Message:
        view = memoryview(self.data)
        parts: list[Buffer] = []
        position = 0
        for length in self.lengths:
            parts.append(view[position : position + length])
            position += length
        return Message(self.kind, self.ident, self.body, parts)


class Inbox:
    """Puts the chunks of large messages together."""

    def __init__(self, max_message: int = MAX_MESSAGE) -> None:
        self._assemblies: dict[int, _Assembly] = {}
        self.max_message = max_message

    def receive(self, message: Message) -> Message | None:
        """Take a message from a frame; return a whole message, or None while chunks are missing.

        Raises:
            TooLarge: the message is larger than ``max_message`` bytes.
            ProtocolMismatch: the chunks do not fit together.
        """
        if message.kind != Kind.CHUNK:
            return message
        try:
            return self._chunk(message)
        except TooLarge:
            raise
        except (ValueError, TypeError) as error:
            raise ProtocolMismatch(f"not a chunk of Loom's protocol: {error}") from error

    def _chunk(self, message: Message) -> Message | None:
        offset, total, head = message.body
        if type(offset) is not int or type(total) is not int:
            raise ValueError("offset and total must be numbers")
        if head is not None:
            if message.id in self._assemblies:
                raise ValueError(f"transfer {message.id} has begun already")
            if total > self.max_message:
                raise TooLarge(f"a message of {total} bytes is over this side's limit of {self.max_message} bytes")
            assembly = self._assemblies[message.id] = _Assembly(head, total)
        elif message.id in self._assemblies:
            assembly = self._assemblies[message.id]
        else:
            raise ValueError(f"it belongs to transfer {message.id}, which has not begun")
        if offset != assembly.filled or offset + message.size > len(assembly.data):
            raise ValueError(f"it starts at {offset}, not at {assembly.filled}")
        for part in message.parts:
            end = assembly.filled + len(part)
            assembly.data[assembly.filled : end] = part
            assembly.filled = end
        if assembly.filled < len(assembly.data):
            return None
        del self._assemblies[message.id]
        return assembly.message()
