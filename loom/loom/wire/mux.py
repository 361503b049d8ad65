"""Sharing one connection: small messages together in a frame, large ones in chunks that take turns.

`ChunkOutbox` turns messages into the contents of frames. It cuts a message too large for a frame into chunks, and
sends small messages between two chunks, so that a small call does not wait while a gigabyte moves. Several large
messages take turns, chunk by chunk.

A message's *order key* says which messages it must not overtake. Messages of one key leave whole and in the order
in which they were put in; `BARRIER` keeps its place among all keys; None has no order. An `After` key holds a
message back until the one that makes what it is about has left whole. The proxy uses the id of the
called mesh as the key, since Monarch delivers the messages from one sender to one actor in order.

Chunks may also travel apart from the small messages, on a connection of their own. Then the order needs two more
rules. A small message that waits for a large one leaves when the other side has all of the large one
(`ChunkOutbox.settle`). The head of a large one ends with the number of the frame of small messages after which it
may be delivered.

The receiver puts chunks together with `ChunkInbox`. The first chunk of a message brings its head::

    [kind, id, body, [part length, …], [whether the part is read-only, …], after]

``after`` is left out if chunks do not travel apart. A read-only part arrives as ``bytes``, any other as a
``bytearray``; neither is copied once it is whole.

`ChunkOutbox` and `ChunkInbox` share a module, because each is the other's specification: one cuts, the other joins.
"""

from __future__ import annotations

import io
import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias, cast

from loom.errors import ProtocolMismatch, TooLarge
from loom.wire.frames import sealed
from loom.wire.messages import TURN, Buffer, Kind, Message


class After(int):
    """The order key of a message about what the message with this id makes: it overtakes that one only.

    A request about a run, for example, does not wait behind other large messages, only for the run's start.
    """


OrderKey: TypeAlias = int | None
"""The id of a mesh, a port or a place; `BARRIER`; an `After`; or None for no order."""

BARRIER = 0  # the order key of a message that overtakes no other and that no other overtakes
CHUNK_SIZE = 512 << 10  # bytes of payload in a chunk, and the most payload that goes into one frame
MAX_MESSAGE = 16 << 30  # bytes of the largest message that a `ChunkInbox` puts together by default
MAX_TRANSFERS = 64  # large messages that are on their way at once; more wait for their turn

_FRAME_MESSAGES = 256


class Pieces:
    """A part of a payload that lies in several buffers; ``read_only`` if it is so in its object."""

    def __init__(self, pieces: Sequence[Buffer], read_only: bool) -> None:
        self._pieces = pieces
        self._size = sum(map(len, pieces))
        self.read_only = read_only

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self._pieces)


def _views(part: Buffer | Pieces) -> Iterator[memoryview]:
    for piece in part if isinstance(part, Pieces) else (part,):
        yield memoryview(piece).cast("B")


def _joined(message: Message) -> Message:
    parts = [b"".join(part) if isinstance(part, Pieces) else part for part in message.parts]
    return message._replace(parts=parts)


class _Transfer:
    """A large message on its way out. The parts that have left are released, unless it has to stay ``whole``."""

    def __init__(self, number: int, message: Message, key: OrderKey, whole: bool = False) -> None:
        self.number = number
        self.message = message if whole else None
        self.ident = message.id
        self.key = key
        self.total = message.size
        self.offset = 0
        self.first = self.last = 0
        """Numbers of the message's first and last chunk, among all chunks; 0 until they have left."""
        parts = message.parts
        read_only = [part.read_only if isinstance(part, Pieces) else memoryview(part).readonly for part in parts]
        self._head: tuple[Any, ...] | None = (
            int(message.kind), message.id, message.body, [len(part) for part in parts], read_only
        )  # fmt: skip
        self._parts = deque(view for part in parts for view in _views(part))

    def next_chunk(self, after: Sequence[int]) -> Message:
        head, self._head = self._head, None
        if head is not None:
            head = (*head, *after)
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


class ChunkOutbox:
    """The queue of messages that one side has still to send; chunks may travel ``apart`` from small messages.

    With ``keeps_whole``, a large message is kept until all of it has been acknowledged, if chunks travel apart.
    """

    def __init__(self, apart: bool = False, keeps_whole: bool = False) -> None:
        self._apart = apart
        self._keeps_whole = apart and keeps_whole
        self._small: deque[Message | _Transfer] = deque()
        """Small messages, and large ones that may begin only when the small ones before them have left."""
        self._large: deque[_Transfer] = deque()
        """Large messages that have begun or may begin, in the order of their turns."""
        self._waiting: deque[tuple[Message, int, OrderKey]] = deque()
        """Messages that would overtake another of their key, with their sizes."""
        self._blocked: set[OrderKey] = set()
        """Keys of `_moving` and of `_waiting`. A further message of such a key must wait."""
        self._moving: set[OrderKey] = set()  # keys of large messages that have not left whole
        self._arriving: deque[_Transfer] = deque()
        """Large messages that have left whole and may not have arrived whole. Empty unless chunks travel apart."""
        self._unsettled: set[OrderKey] = set()
        self._transfers = 0
        """Large messages so far. Each one's number is the id of its chunks."""
        self._chunk_turn = False  # whether the next frame is a chunk's, although small messages wait
        self.chunks = 0
        self.pending_bytes = 0
        """Bytes of payload that have been put in and not yet taken out."""
        self.small_bytes = 0
        """Bytes of payload of small messages that wait only for their turn."""

    def __bool__(self) -> bool:
        return bool(self._small or self._large)

    def __len__(self) -> int:
        return len(self._small) + len(self._large) + len(self._waiting)

    def put(self, message: Message, key: OrderKey = None) -> None:
        """Queue a message; see the module's docstring for ``key``. Raise what `loom.wire.frames.sealed` raises."""
        parts = message.parts
        if type(message.body) is not tuple or len(parts) > 1:
            message = sealed(message)
            parts = message.parts
        if len(parts) <= 1:
            size = len(parts[0]) if parts else 0
            if size <= CHUNK_SIZE and not self._blocked and not self._unsettled:
                # The hot path, a small call while nothing large is on its way: `_admit` without the call.
                self.pending_bytes += size
                self.small_bytes += size
                self._small.append(message)
                return
        else:
            size = message.size
        self.pending_bytes += size
        self._queue(message, size, key)

    def _queue(self, message: Message, size: int, key: OrderKey) -> None:
        if self._must_wait(key, size):
            self._blocked.add(key)
            self._waiting.append((message, size, key))
        else:
            self._admit(message, size, key)

    def _must_wait(self, key: OrderKey, size: int) -> bool:
        if key is None:
            return False
        if isinstance(key, After):
            return self._is_under_way(key)
        # Chunks keep their order on the way, so a large message need not wait for one that has left.
        return _conflicts(key, self._blocked) or (size <= CHUNK_SIZE and _conflicts(key, self._unsettled))

    def _is_under_way(self, ident: int) -> bool:
        """Return whether the message with an id waits, or is large and has not arrived whole."""
        transfers = itertools.chain(self._small, self._large, self._arriving)
        return any(isinstance(item, _Transfer) and item.ident == ident for item in transfers) or any(
            message.id == ident for message, _, _ in self._waiting
        )

    def _admit(self, message: Message, size: int, key: OrderKey) -> None:
        if size <= CHUNK_SIZE:
            self.small_bytes += size
            self._small.append(_joined(message) if len(message.parts) > 1 else message)
            return
        self._transfers += 1
        transfer = _Transfer(self._transfers, message, key, self._keeps_whole)
        if key is None:
            self._large.append(transfer)
            return
        self._moving.add(key)
        self._blocked.add(key)
        # It begins after the small messages before it, one of which may have its key.
        (self._small if self._small else self._large).append(transfer)

    def next_frame(self) -> list[Message]:
        """Take the messages of the next frame, a chunk or small ones in turns; an empty list if there are none."""
        self._promote()
        if self._large and (self._chunk_turn or not self._small):
            self._chunk_turn = False
            return self.next_chunk()
        self._chunk_turn = bool(self._large)
        return self.next_small() if self._small else []

    def _promote(self) -> None:
        """Let large messages begin that have no small one before them now."""
        while self._small and isinstance(first := self._small[0], _Transfer):
            self._large.append(first)
            self._small.popleft()

    @property
    def has_small(self) -> bool:
        """True if a small message may be ready to leave. Also true if only large ones are in the same queue."""
        return bool(self._small)

    @property
    def has_chunks(self) -> bool:
        return bool(self._large) or bool(self._small and isinstance(self._small[0], _Transfer))

    def next_chunk(self, after: int = 0) -> list[Message]:
        """Take the next chunk, as a list, which may be empty; ``after`` is the last frame of small messages."""
        self._promote()
        if not self._large:
            return []
        transfer = self._large.popleft()
        self.chunks += 1
        transfer.first = transfer.first or self.chunks
        chunk = transfer.next_chunk([0 if transfer.key is None else after] if self._apart else [])
        if not transfer.done:
            self._large.insert(MAX_TRANSFERS - 1, transfer)  # the transfers behind have not begun
        else:
            self._left(transfer)
        self.pending_bytes -= chunk.size
        return [chunk]

    def _left(self, transfer: _Transfer) -> None:
        if self._apart:
            transfer.last = self.chunks
            self._arriving.append(transfer)
        if transfer.key is not None:
            self._moving.remove(transfer.key)
            self._release()

    def settle(self, chunks: int) -> None:
        """Note that the other side has so many chunks, and release messages that waited for these to arrive."""
        keyed = False
        while self._arriving and self._arriving[0].last <= chunks:
            keyed |= self._arriving.popleft().key is not None
        if keyed:
            self._release()

    @property
    def waits(self) -> bool:
        """True if something waits for a large message to leave, or to arrive."""
        return bool(self._waiting)

    def abandon(self) -> list[Message]:
        """Take all messages that have not arrived whole. Only if large ones are kept whole."""
        queues = (self._arriving, self._small, self._large, (message for message, _, _ in self._waiting))
        items = itertools.chain.from_iterable(queues)
        left = [item.message if isinstance(item, _Transfer) else item for item in items]
        for queue in (self._arriving, self._small, self._large, self._waiting):
            queue.clear()
        return [message for message in left if message is not None]

    @property
    def abandons_whole(self) -> bool:
        return self._keeps_whole

    def first_chunk(self, ident: int) -> int:
        """Return the number of a large message's first chunk, if it has left and may not have arrived; else 0."""
        begun = (*self._large, *self._arriving) if self._apart else ()
        return next((one.first for one in begun if one.ident == ident), 0)

    def next_small(self) -> list[Message]:
        """Take the small messages of the next frame; an empty list if there are none."""
        small = self._small
        if small and isinstance(small[0], _Transfer):
            self._promote()
        batch: list[Message] = []
        room = CHUNK_SIZE
        while small and len(batch) < _FRAME_MESSAGES:
            message = small[0]
            if isinstance(message, _Transfer):
                break
            parts = message.parts
            size = (len(parts[0]) if len(parts) == 1 else message.size) if parts else 0
            if size > room:
                break
            batch.append(message)
            small.popleft()
            room -= size
        self.pending_bytes -= CHUNK_SIZE - room
        self.small_bytes -= CHUNK_SIZE - room
        return batch

    def put_back(self, messages: Sequence[Message]) -> None:
        """Put the last messages of `next_small` back to where they were."""
        self._small.extendleft(reversed(messages))
        size = sum(message.size for message in messages)
        self.pending_bytes += size
        self.small_bytes += size

    def withdraw(self, ident: int) -> bool:
        """Withdraw the message with an id; return False if it is not queued or a chunk of it has left."""
        for queue in (self._small, self._large):
            for place, item in enumerate(queue):
                if isinstance(item, _Transfer):
                    if item.ident == ident and item.offset == 0:
                        del queue[place]
                        self.pending_bytes -= item.total
                        if item.key is not None:
                            self._moving.remove(item.key)
                            self._release()
                        return True
                elif item.id == ident:
                    del queue[place]
                    self.pending_bytes -= item.size
                    self.small_bytes -= item.size
                    return True
        for place, (message, size, _) in enumerate(self._waiting):
            if message.id == ident:
                del self._waiting[place]
                self.pending_bytes -= size
                return True
        return False

    @property
    def backlog(self) -> int:
        """The `pending_bytes` without the largest message, which alone, however large, is no reason to wait."""
        queued = itertools.chain(self._small, self._large)
        largest = max((item.total - item.offset for item in queued if isinstance(item, _Transfer)), default=0)
        waiting = max((size for _, size, _ in self._waiting), default=0)
        return self.pending_bytes - max(largest, waiting)

    def holds(self, ident: int) -> bool:
        """Return whether the message with an id, or a chunk of it, is still queued."""
        queued = itertools.chain(self._small, self._large, (message for message, _, _ in self._waiting))
        return any((item.ident if isinstance(item, _Transfer) else item.id) == ident for item in queued)

    def _release(self) -> None:
        """Release messages that waited for a large one, which has left whole, has arrived or was withdrawn."""
        self._blocked = set(self._moving)
        self._unsettled = {transfer.key for transfer in self._arriving} - {None}
        waiting, self._waiting = self._waiting, deque()
        for message, size, key in waiting:
            self._queue(message, size, key)


def _conflicts(key: int, keys: set[OrderKey]) -> bool:
    """Return whether a message with a key must not overtake messages with any of some keys."""
    return bool(keys) and (key == BARRIER or key in keys or BARRIER in keys)


class _Assembly:
    """A large message on its way in. It takes only the memory of its received bytes."""

    def __init__(self, head: Sequence[Any], total: int, in_pieces: Collection[int]) -> None:
        self.kind, self.ident, self.body, self.lengths, self.read_only, *rest = head
        self.after: int = rest[0] if rest else 0
        counts = (self.kind, self.ident, self.after, *self.lengths)
        countable = all(type(count) is int and count >= 0 for count in counts)
        if not countable or self.kind == Kind.CHUNK or type(self.body) is not tuple:
            raise ValueError("the head of a large message is not that of a message")
        if sum(self.lengths) != total or len(self.lengths) != len(self.read_only):
            raise ValueError("the parts of a large message do not add up to its size")
        self.total = total
        self.filled = 0
        """Bytes of the payload that have come."""
        self._in_pieces = self.kind in in_pieces
        self._parts: list[Buffer | Pieces] = []  # the parts that have come whole
        self._begin()

    def _begin(self) -> None:
        """Begin the next part, which is gathered in the one of three places that fits its kind."""
        self._pieces: list[Buffer] = []
        self._bytes = io.BytesIO()
        self._writable = bytearray()
        number = len(self._parts)
        self._missing: int = self.lengths[number] if number < len(self.lengths) else 0
        self._is_read_only = bool(self.read_only[number]) if number < len(self.read_only) else True

    def add(self, piece: Buffer) -> None:
        view = memoryview(piece)
        self.filled += len(view)
        while view:
            taken = view[: min(self._missing, TURN)]
            if self._in_pieces and self._parts:
                self._pieces.append(taken)
            elif self._is_read_only:
                self._bytes.write(taken)
            else:
                self._writable += taken
            self._missing -= len(taken)
            view = view[len(taken) :]
            if not self._missing:
                self._end()

    def _end(self) -> None:
        if self._in_pieces and self._parts:
            self._parts.append(Pieces(self._pieces, self._is_read_only))
        elif self._is_read_only:
            self._parts.append(self._bytes.getvalue())  # no copy, since nothing else holds the buffer
        else:
            # Not a view of a BytesIO: such a view in a cycle of objects crashes CPython's garbage collector.
            self._parts.append(self._writable)
        self._begin()

    def message(self) -> Message:
        while len(self._parts) < len(self.lengths):  # empty parts at the end
            self._end()
        return Message(self.kind, self.ident, self.body, cast("list[Buffer]", self._parts))


class ChunkInbox:
    """The inbox that puts the chunks of large messages together.

    Parts of messages of the kinds ``in_pieces``, except the first, stay `Pieces`, in order to be passed on.
    """

    def __init__(self, max_message: int = MAX_MESSAGE, in_pieces: Collection[int] = ()) -> None:
        self._in_pieces = in_pieces
        self._assemblies: dict[int, _Assembly] = {}
        self.max_message = max_message

    def incoming(self) -> tuple[int, int]:
        """Return (bytes received of large messages on their way in, their total size)."""
        assemblies = list(self._assemblies.copy().values())
        return sum(assembly.filled for assembly in assemblies), sum(assembly.total for assembly in assemblies)

    def expects(self, ident: int) -> bool:
        return any(assembly.ident == ident for assembly in self._assemblies.values())

    def receive(self, message: Message) -> Message | None:
        """Take a message from a frame; return a whole message, or None while chunks are missing."""
        if message.kind != Kind.CHUNK:
            return message
        complete = self.receive_chunk(message)
        return None if complete is None else complete[0]

    def receive_chunk(self, message: Message) -> tuple[Message, int] | None:
        """Take a chunk; return the message that it completes, and the frame that must be delivered before."""
        try:
            return self._chunk(message)
        except TooLarge:
            raise
        except (ValueError, TypeError) as error:
            raise ProtocolMismatch(f"not a chunk of Loom's protocol: {error}") from error

    def _chunk(self, message: Message) -> tuple[Message, int] | None:
        offset, total, head = message.body
        if type(offset) is not int or type(total) is not int:
            raise ValueError("offset and total must be numbers")
        if head is not None:
            if message.id in self._assemblies:
                raise ValueError(f"transfer {message.id} has begun already")
            if len(self._assemblies) >= MAX_TRANSFERS:
                raise ValueError(f"more than {MAX_TRANSFERS} transfers are under way")
            if total > self.max_message:
                raise TooLarge(f"a message of {total} bytes is over this side's limit of {self.max_message} bytes")
            assembly = self._assemblies[message.id] = _Assembly(head, total, self._in_pieces)
        elif message.id in self._assemblies:
            assembly = self._assemblies[message.id]
        else:
            raise ValueError(f"it belongs to transfer {message.id}, which has not begun")
        if offset != assembly.filled or offset + message.size > assembly.total:
            raise ValueError(f"it starts at {offset}, not at {assembly.filled}")
        for part in message.parts:
            assembly.add(part)
        if assembly.filled < assembly.total:
            return None
        del self._assemblies[message.id]
        return assembly.message(), assembly.after
