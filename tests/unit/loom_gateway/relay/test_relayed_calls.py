"""The spans of the calls that a relay passes on, from their frames."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from loom.errors import LimitReached
from loom.tracing import clock
from loom.tracing.collecting import ProcessSpans
from loom.wire.bodies import Broadcast, CallOne, OperationError, OperationResult, StreamCall
from loom.wire.frames import encode_frame
from loom.wire.messages import Buffer, Kind, Message
from loom_gateway.relay import spans
from loom_gateway.relay.spans import RelayedCalls
from loom_gateway.sessions.session import Traffic

CHUNK = 512 << 10


class Relay:
    """The traffic of one session, whose clock the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.traffic = Traffic()
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)

    def passes(self, to_driver: bool, *messages: Message, stream: str = "one", after: float = 1.0) -> None:
        self.raw(to_driver, encode_frame(1, 0, messages), stream, after)

    def raw(self, to_driver: bool, pieces: Sequence[Buffer], stream: str = "one", after: float = 1.0) -> None:
        self.now += after
        assert self.traffic.observer is not None
        self.traffic.observer(stream, to_driver, pieces)


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> Relay:
    return Relay(monkeypatch)


def call(ident: int, payload: bytes = b"", trace: str | None = None) -> Message:
    return CallOne(1, "work", trace).message(ident, [payload])


def answer(ident: int, payload: bytes = b"") -> Message:
    return OperationResult.message_of(ident, [payload], 1.0)


def spans_of(calls: RelayedCalls) -> ProcessSpans:
    calls.stop()
    return calls.spans()


def test_a_span_lasts_from_a_call_to_its_answer(relay: Relay) -> None:
    calls = RelayedCalls(relay.traffic)
    relay.passes(True, call(7, b"12345", "abc"), call(8))
    relay.passes(False, answer(7, b"123"), after=0.25)
    relay.passes(False, OperationError(1.0, "actor_error").message(8), after=0.5)
    found = spans_of(calls)

    assert (found["name"], found["error"], found["problem"]) == ("gateway", 0.0, None)
    first, second = found["records"]
    assert (first["t"], first["dur_ms"], first["trace"], first["endpoint"]) == (101.0, 250.0, "abc", "work")
    assert (first["bytes_in"], first["bytes_out"]) == (5, 3)
    assert (second["dur_ms"], second["trace"]) == (750.0, None)
    assert relay.traffic.observer is None


def test_the_ids_of_two_clients_are_not_mixed_up(relay: Relay) -> None:
    calls = RelayedCalls(relay.traffic)
    relay.passes(True, call(7), stream="one")
    relay.passes(True, call(7), stream="two")
    relay.passes(False, answer(7), stream="one")
    relay.passes(False, answer(7), stream="two")
    assert [record["dur_ms"] for record in spans_of(calls)["records"]] == [2000.0, 2000.0]


def test_a_large_call_has_come_with_its_last_chunk(relay: Relay) -> None:
    calls = RelayedCalls(relay.traffic)
    large = call(7)
    head = (int(large.kind), large.id, large.body, [2 * CHUNK], [True])
    relay.passes(True, Message(Kind.CHUNK, 1, (0, 2 * CHUNK, head), [bytes(CHUNK)]))
    relay.passes(True, Message(Kind.CHUNK, 1, (CHUNK, 2 * CHUNK, None), [bytes(CHUNK)]))
    relay.passes(False, answer(7))
    (record,) = spans_of(calls)["records"]
    assert (record["t"], record["dur_ms"], record["bytes_in"]) == (102.0, 1000.0, 2 * CHUNK)


def test_each_answer_of_a_stream_has_a_span(relay: Relay) -> None:
    calls = RelayedCalls(relay.traffic)
    relay.passes(True, StreamCall(1, "work").message(7, [b""]))
    for index in range(3):
        relay.passes(False, OperationResult.message_of(7, [], 1.0, index))
    assert [record["dur_ms"] for record in spans_of(calls)["records"]] == [1000.0, 2000.0, 3000.0]


def test_a_frame_that_is_sent_again_changes_nothing(relay: Relay) -> None:
    calls = RelayedCalls(relay.traffic)
    for _ in range(2):
        relay.passes(True, call(7))
    for _ in range(2):
        relay.passes(False, answer(7))
    assert [record["dur_ms"] for record in spans_of(calls)["records"]] == [2000.0]


@pytest.mark.parametrize(
    "pieces",
    [
        [b"", b"\xff" * 100],
        encode_frame(1, 0, [Message(Kind.CALL, 7, ())]),
        encode_frame(1, 0, [Message(Kind.CALL, 7, (1, "work", {"a": []}))]),
        encode_frame(1, 0, [Message(Kind.CHUNK, 1, (0,))]),
        encode_frame(1, 0, [Message(Kind.CHUNK, 1, (0, "9", 5), [b"1"])]),
        encode_frame(1, 0, [Message(Kind.CHUNK, 1, (0, 9, ([], {}, 5)), [b"1"])]),
    ],
)
@pytest.mark.parametrize("to_driver", [False, True])
def test_what_makes_no_sense_disturbs_nothing(relay: Relay, pieces: list[Buffer], to_driver: bool) -> None:
    calls = RelayedCalls(relay.traffic)
    relay.raw(to_driver, pieces)
    relay.passes(True, call(9))
    relay.passes(False, answer(9))
    assert [record["dur_ms"] for record in spans_of(calls)["records"]] == [1000.0]


def test_it_remembers_little(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MOST_OPEN", 2)
    calls = RelayedCalls(relay.traffic)
    for ident in range(9):
        relay.passes(True, CallOne(1, "w" * 9999).message(ident, [bytes(99999)]))
        relay.passes(
            True, Message(Kind.CHUNK, ident, (0, CHUNK, (Kind.CALL, ident, (1, "w"), [CHUNK], [True])), [b"1"])
        )
    assert len(calls._calls) == len(calls._moving) == 2
    relay.passes(False, *map(answer, range(9)))
    found = spans_of(calls)
    assert [len(str(record["endpoint"])) for record in found["records"]] == [200, 200]
    assert found["left_out"] == 14


def test_broadcasts_take_no_room_from_calls(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MOST_OPEN", 2)
    calls = RelayedCalls(relay.traffic)
    relay.passes(True, *(Broadcast(1, "work").message(ident, [b""]) for ident in range(9)))
    relay.passes(True, call(9))
    relay.passes(False, answer(9))
    assert [record["dur_ms"] for record in spans_of(calls)["records"]] == [1000.0]


def test_a_second_observer_is_refused(relay: Relay) -> None:
    calls = RelayedCalls(relay.traffic)
    with pytest.raises(LimitReached):
        RelayedCalls(relay.traffic)
    calls.stop()
    RelayedCalls(relay.traffic).stop()
