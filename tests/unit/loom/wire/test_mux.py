"""Sharing a connection: everything arrives whole and once, in order where order was asked for, and fairly."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from loom.errors import ProtocolMismatch, TooLarge
from loom.wire import mux
from loom.wire.frames import decode_frame, encode_frame
from loom.wire.messages import Buffer, Kind, Message
from loom.wire.mux import BARRIER, MAX_TRANSFERS, ChunkInbox, ChunkOutbox, OrderKey, Pieces

CHUNK = 16
"""Chunks of 16 bytes instead of half a megabyte, so that many fit into a fast test."""

FRAME_MESSAGES = 4

CALL = int(Kind.CALL)

repeatable = settings(derandomize=True, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def _small_frames() -> Iterator[None]:
    with patch.object(mux, "CHUNK_SIZE", CHUNK), patch.object(mux, "_FRAME_MESSAGES", FRAME_MESSAGES):
        yield


def payload(ident: int, size: int) -> bytes:
    return bytes((ident * 31 + position) % 251 for position in range(size))


def message(ident: int, size: int, cut: int = 0) -> Message:
    """A message whose payload is in two parts, one of them perhaps empty."""
    data = payload(ident, size)
    return Message(CALL, ident, (ident, "add"), [data[:cut], bytearray(data[cut:])] if size else [])


def take_frame(outbox: ChunkOutbox) -> list[Message]:
    """The next frame as the other side reads it."""
    messages = outbox.next_frame()
    return decode_frame(b"".join(encode_frame(1, 0, messages))).messages


def drain(outbox: ChunkOutbox, inbox: ChunkInbox) -> list[Message]:
    """Everything that is queued, in the order in which it arrives whole."""
    arrived = []
    while outbox:
        frame = take_frame(outbox)
        assert frame
        arrived += [whole for part in frame if (whole := inbox.receive(part)) is not None]
    return arrived


def idents(messages: Sequence[Message]) -> list[int]:
    return [one.id for one in messages]


class Connection(RuleBasedStateMachine):
    """Puts messages in, takes frames out, and knows what may arrive when."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = ChunkOutbox()
        self.inbox = ChunkInbox()
        self.under_way: dict[int, tuple[OrderKey, int, list[bytes]]] = {}
        self.next_ident = 1
        self.pending = 0

    @rule(
        size=st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]),
        key=st.sampled_from([None, BARRIER, 1, 2, 3]),
        cut=st.integers(0, 3 * CHUNK),
    )
    def put(self, size: int, key: OrderKey, cut: int) -> None:
        sent = message(self.next_ident, size, cut)
        self.under_way[self.next_ident] = key, size, [bytes(part) for part in sent.parts]
        self.next_ident += 1
        self.pending += size
        self.outbox.put(sent, key)

    @precondition(lambda self: self.under_way)
    @rule(frames=st.integers(1, 4))
    def take(self, frames: int) -> None:
        for _ in range(frames):
            self.take_one()

    def take_one(self) -> None:
        frame = take_frame(self.outbox)
        assert bool(frame) == bool(self.under_way)
        size = sum(part.size for part in frame)
        assert size <= CHUNK
        assert len(frame) <= FRAME_MESSAGES
        self.pending -= size
        for part in frame:
            whole = self.inbox.receive(part)
            if whole is not None:
                self.arrive(whole)

    def arrive(self, whole: Message) -> None:
        key, _, parts = self.under_way.pop(whole.id)
        assert (whole.kind, tuple(whole.body)) == (CALL, (whole.id, "add"))
        assert [bytes(part) for part in whole.parts] == parts
        overtaken = [
            ident
            for ident, (other, _, _) in self.under_way.items()
            if ident < whole.id
            and key is not None
            and other is not None
            and (key == other or BARRIER in (key, other))
        ]
        assert not overtaken, f"{whole.id} of key {key} arrived before {overtaken}"

    @invariant()
    def counts_what_it_holds(self) -> None:
        assert self.outbox.pending_bytes == self.pending
        assert bool(self.outbox) == bool(self.under_way)
        assert len(self.outbox) == len(self.under_way)

    def teardown(self) -> None:
        while self.under_way:
            self.take_one()
        self.counts_what_it_holds()
        assert self.pending == 0


def test_whatever_is_put_arrives_once_whole_and_in_its_order() -> None:
    run_state_machine_as_test(Connection, settings=settings(repeatable, max_examples=100, stateful_step_count=40))


@repeatable
@given(st.integers(0, CHUNK), st.integers(2, 6), st.integers(0, 5), st.sampled_from([None, 1]))
def test_a_small_message_leaves_before_a_large_one_that_moves(
    small: int, chunks: int, taken: int, key: OrderKey
) -> None:
    outbox, inbox = ChunkOutbox(), ChunkInbox()
    outbox.put(message(1, chunks * CHUNK), key)
    for _ in range(min(taken, chunks - 1)):
        assert [inbox.receive(part) for part in take_frame(outbox)] == [None]

    outbox.put(message(2, small))

    assert idents(drain(outbox, inbox)) == [2, 1]


def test_a_small_message_of_another_key_leaves_before_a_large_one_that_moves() -> None:
    outbox = ChunkOutbox()
    outbox.put(message(1, 3 * CHUNK), 1)

    outbox.put(message(2, 1), 2)

    assert idents(drain(outbox, ChunkInbox())) == [2, 1]


def test_a_small_message_never_overtakes_a_large_one_of_its_key() -> None:
    outbox = ChunkOutbox()
    outbox.put(message(1, 3 * CHUNK), 1)

    outbox.put(message(2, 1), 1)

    assert idents(drain(outbox, ChunkInbox())) == [1, 2]


def test_a_large_message_never_overtakes_small_ones_of_its_key() -> None:
    outbox = ChunkOutbox()
    for ident in range(1, 9):
        outbox.put(message(ident, CHUNK), 1)

    outbox.put(message(9, 2 * CHUNK), 1)

    assert idents(drain(outbox, ChunkInbox())) == list(range(1, 10))


def test_large_messages_take_turns() -> None:
    outbox = ChunkOutbox()
    outbox.put(message(1, 3 * CHUNK))
    outbox.put(message(2, 3 * CHUNK))

    transfers = [take_frame(outbox)[0].id for _ in range(6)]

    assert transfers == [1, 2, 1, 2, 1, 2]


def test_large_messages_move_while_small_ones_keep_coming() -> None:
    outbox, inbox = ChunkOutbox(), ChunkInbox()
    outbox.put(message(1, 3 * CHUNK))
    arrived = []
    for ident in range(2, 10):
        outbox.put(message(ident, 1))
        arrived += [whole for part in take_frame(outbox) if (whole := inbox.receive(part)) is not None]

    assert 1 in idents(arrived)


def test_small_messages_share_a_frame() -> None:
    outbox = ChunkOutbox()
    for ident in range(1, FRAME_MESSAGES + 1):
        outbox.put(message(ident, 1))

    assert idents(take_frame(outbox)) == list(range(1, FRAME_MESSAGES + 1))


def test_there_is_no_frame_when_nothing_is_queued() -> None:
    assert ChunkOutbox().next_frame() == []


# -- chunks that do not fit together ------------------------------------------------------------------------

HEAD = (CALL, 7, (1, "add"), (4, 6), (True, False))


def chunk(transfer: int, offset: Any, total: Any, head: Any, *parts: Buffer) -> Message:
    return Message(Kind.CHUNK, transfer, (offset, total, head), parts)


def test_chunks_are_put_together_into_the_parts_that_the_message_had() -> None:
    inbox = ChunkInbox()

    assert inbox.receive(chunk(1, 0, 10, HEAD, b"012", b"3")) is None
    whole = inbox.receive(chunk(1, 4, 10, None, b"456789"))

    assert whole is not None
    assert (whole.kind, whole.id, whole.body) == (CALL, 7, (1, "add"))
    assert [bytes(part) for part in whole.parts] == [b"0123", b"456789"]


def test_a_read_only_part_arrives_as_bytes_and_another_as_a_bytearray() -> None:
    inbox = ChunkInbox()

    whole = inbox.receive(chunk(1, 0, 10, HEAD, b"0123456789"))

    assert whole is not None
    first, second = whole.parts
    assert first == b"0123"
    assert type(first) is bytes
    assert second == b"456789"
    assert type(second) is bytearray


def test_a_part_in_pieces_arrives_as_one() -> None:
    outbox = ChunkOutbox()
    pieces = Pieces([payload(1, CHUNK), b"", payload(2, 5)], read_only=True)

    outbox.put(Message(CALL, 1, (), [b"head", pieces]))  # type: ignore[list-item]

    (whole,) = drain(outbox, ChunkInbox())
    assert list(whole.parts) == [b"head", payload(1, CHUNK) + payload(2, 5)]


def test_parts_may_be_left_in_pieces() -> None:
    outbox, inbox = ChunkOutbox(), ChunkInbox(in_pieces=[CALL])
    outbox.put(message(1, 3 * CHUNK, 5))

    (whole,) = drain(outbox, inbox)

    first, second = whole.parts
    assert first == payload(1, 3 * CHUNK)[:5]
    assert isinstance(second, Pieces)
    assert not second.read_only
    assert b"".join(second) == payload(1, 3 * CHUNK)[5:]


def test_a_large_message_takes_no_more_memory_than_what_has_come_of_it() -> None:
    inbox, gigabytes = ChunkInbox(max_message=2**40), 2**38
    tracemalloc.start()
    try:
        assert inbox.receive(chunk(1, 0, gigabytes, (CALL, 7, (), (gigabytes,), (True,)), bytes(CHUNK))) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 2**20
    assert inbox.incoming() == (CHUNK, gigabytes)


def test_more_large_messages_than_may_be_under_way_wait_for_their_turn() -> None:
    outbox, inbox = ChunkOutbox(), ChunkInbox()
    count = MAX_TRANSFERS + 10
    for ident in range(count):
        outbox.put(message(ident + 1, 3 * CHUNK))

    assert sorted(idents(drain(outbox, inbox))) == list(range(1, count + 1))


def test_more_transfers_than_may_be_under_way_are_refused() -> None:
    inbox = ChunkInbox()
    for transfer in range(MAX_TRANSFERS):
        inbox.receive(chunk(transfer, 0, 10, HEAD, b"0"))

    with pytest.raises(ProtocolMismatch, match=f"more than {MAX_TRANSFERS} transfers are under way"):
        inbox.receive(chunk(MAX_TRANSFERS, 0, 10, HEAD, b"0"))


@pytest.mark.parametrize(
    "chunks",
    [
        [Message(Kind.CHUNK, 1, ())],
        [Message(Kind.CHUNK, 1, (0, 10))],
        [chunk(1, "0", 10, HEAD)],
        [chunk(1, 0, 10.0, HEAD)],
        [chunk(1, 0, None, HEAD)],
        [chunk(1, 0, -10, (CALL, 7, (), (-10,), (True,)))],
        [chunk(1, 0, 10, "head")],
        [chunk(1, 0, 10, (CALL, 7, (), (10,)))],
        [chunk(1, 0, 10, (CALL, 7, (), (10,), ()))],
        [chunk(1, 0, 10, (CALL, 7, (), (10,), None))],
        [chunk(1, 0, 10, ("kind", 7, (), (10,), (True,)))],
        [chunk(1, 0, 10, (CALL, "id", (), (10,), (True,)))],
        [chunk(1, 0, 10, (CALL, 7, "body", (10,), (True,)))],
        [chunk(1, 0, 10, (CALL, 7, (), None, (True,)))],
        [chunk(1, 0, 10, (CALL, 7, (), (4, 7), (True, True)))],
        [chunk(1, 0, 10, (CALL, 7, (), (-5, 15), (True, True)))],
        [chunk(1, 0, 10, (CALL, 7, (), (5.0, 5.0), (True, True)))],
        [chunk(1, 0, 10, (int(Kind.CHUNK), 7, (), (10,), (True,)), b"0123456789")],
        [chunk(1, 1, 10, HEAD, b"0123")],
        [chunk(1, 0, 10, HEAD, b"0123456789+")],
        [chunk(1, 0, 10, None, b"0123")],
        [chunk(1, 0, 10, HEAD, b"0123"), chunk(1, 5, 10, None, b"56789")],
        [chunk(1, 0, 10, HEAD, b"0123"), chunk(1, 3, 10, None, b"3456789")],
        [chunk(1, 0, 10, HEAD, b"0123"), chunk(1, 4, 10, None, b"456789+")],
        [chunk(1, 0, 10, HEAD, b"0123"), chunk(2, 4, 10, None, b"456789")],
        [chunk(1, 0, 10, HEAD, b"0123"), chunk(1, 0, 10, HEAD, b"0123")],
        [chunk(1, 0, 10, HEAD, b"0123456789"), chunk(1, 10, 10, None)],
    ],
)
def test_chunks_that_do_not_fit_together_are_refused(chunks: list[Message]) -> None:
    inbox = ChunkInbox()
    for one in chunks[:-1]:
        inbox.receive(one)

    with pytest.raises(ProtocolMismatch, match="not a chunk of Loom's protocol"):
        inbox.receive(chunks[-1])


def test_a_message_over_the_limit_is_refused_before_room_is_made_for_it() -> None:
    inbox = ChunkInbox(max_message=100)

    with pytest.raises(TooLarge, match=f"a message of {2**62} bytes is over this side's limit of 100 bytes"):
        inbox.receive(chunk(1, 0, 2**62, (CALL, 7, (), (2**62,), (True,)), b"0"))


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-20, 20) | st.floats() | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)


@repeatable
@given(
    st.lists(
        st.builds(
            Message,
            st.just(Kind.CHUNK),
            st.integers(0, 2),
            json_like | st.tuples(json_like, json_like, st.just(HEAD) | json_like),
            st.lists(st.binary(max_size=10), max_size=2),
        ),
        max_size=5,
    )
)
def test_any_chunk_is_taken_or_refused(chunks: list[Message]) -> None:
    inbox = ChunkInbox(max_message=1000)
    for one in chunks:
        try:
            inbox.receive(one)
        except (ProtocolMismatch, TooLarge):
            return
