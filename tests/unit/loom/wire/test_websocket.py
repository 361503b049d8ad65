"""WebSocket frames, against those that `websockets` writes and reads."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN, Protocol, Side

from loom.errors import TooLarge
from loom.wire.websocket import WebSocketFrames, apply_mask, joined, message_head

LIMIT = 200_000
SIZES = st.sampled_from([0, 1, 125, 126, 127, 65535, 65536, 70_000])
KINDS = st.sampled_from([(Opcode.BINARY, True), (Opcode.BINARY, False), (Opcode.CONT, True), (Opcode.PING, True)])
FRAMES = st.lists(st.tuples(KINDS, SIZES, st.booleans()), max_size=6)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(frames=FRAMES, cuts=st.lists(st.integers(min_value=1, max_value=100_000), max_size=12))
def test_frames_are_found_however_their_bytes_are_cut(
    frames: list[tuple[tuple[Opcode, bool], int, bool]], cuts: list[int]
) -> None:
    data, expected = b"", []
    for (opcode, fin), size, mask in frames:
        payload = bytes(index % 251 for index in range(min(size, 125) if opcode is Opcode.PING else size))
        raw = Frame(opcode, payload, fin).serialize(mask=mask)
        data += raw
        expected.append((True, payload) if opcode is Opcode.BINARY and fin else (False, raw))
    splitter, found = WebSocketFrames(LIMIT), []
    for cut in [*cuts, len(data) + 1]:
        found += [(is_message, joined(pieces)) for is_message, pieces in splitter.receive(data[:cut])]
        data = data[cut:]
    assert found == expected


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 100_000])
@pytest.mark.parametrize("mask", [b"", b"\x01\x02\x03\x04"], ids=["server", "client"])
def test_messages_are_read_by_websockets(size: int, mask: bytes) -> None:
    payload = bytes(size)
    peer = Protocol(Side.SERVER if mask else Side.CLIENT, state=OPEN, max_size=LIMIT)
    peer.receive_data(message_head(size, mask) + (apply_mask(payload, mask) if mask else payload))
    (frame,) = peer.events_received()
    assert isinstance(frame, Frame)
    assert (frame.opcode, bytes(frame.data), frame.fin) == (Opcode.BINARY, payload, True)


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(TooLarge, match=str(LIMIT)):
        list(WebSocketFrames(LIMIT).receive(message_head(LIMIT + 1)))
