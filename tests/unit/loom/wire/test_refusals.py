"""Small promises of the wire that other tests meet only in other processes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

import loom
from loom.errors import UnpicklableError
from loom.wire.by_value import Missing, _slots
from loom.wire.frames import encode_frame
from loom.wire.length_prefix import behind_length
from loom.wire.messages import Kind, Message
from loom.wire.plain import exact_json, number
from loom.wire.sender import FrameSender
from loom.wire.stream import Stream
from loom.wire.unpicklable import _children


class Several:
    """Has methods of each kind."""

    __slots__ = (name for name in ("first", "second"))

    @staticmethod
    def still() -> None: ...

    @property
    def read(self) -> int:
        return 1

    def method(self) -> None: ...


def test_a_number_is_one_and_anything_else_is_refused_by_its_name() -> None:
    assert number(3, "limit") == 3
    with pytest.raises(loom.errors.WrongArguments, match="limit: a number has to be given"):
        number("3", "limit")


def test_each_use_of_a_global_that_could_not_travel_says_so() -> None:
    missing: Any = Missing("its module holds a lock")

    with pytest.raises(UnpicklableError, match="holds a lock"):
        missing.acquire()
    with pytest.raises(AttributeError):
        missing.__wrapped__


def test_the_parts_of_modules_methods_and_properties_are_found() -> None:
    members = vars(Several)

    assert (".pi", math.pi) in list(_children(math, lambda name: True))
    assert list(_children(math, lambda name: False)) == []
    assert ("", members["method"]) in list(_children(Several().method, bool))
    assert ("", Several.still) in list(_children(members["still"], bool))
    assert ("", members["read"].fget) in list(_children(members["read"], bool))


def test_slots_are_found_also_when_they_were_given_once_only() -> None:
    assert _slots(Several) == ("first", "second")
    assert _slots(type("Two", (), {"__slots__": ("a", "b")})) == ("a", "b")


def test_what_json_has_no_form_for_is_written_as_text() -> None:
    assert exact_json({"a": [1, {2}, float("inf")]}) == '{"a": [1, "{2}", "Infinity"]}'


class _Line:
    """Encodes as it is, and keeps what is sent."""

    def __init__(self) -> None:
        self.sent = b""

    def encode(self, frame: bytes) -> bytes:
        return frame


def test_a_frame_without_a_number_goes_behind_what_was_taken() -> None:
    sender = FrameSender(Stream(lanes=True), "sends")
    woken: list[str] = []
    sender._wake_writer = lambda: woken.append("writer")  # type: ignore[method-assign]

    sender.put_behind(lambda: b"nobody")
    sender.put_behind(lambda: b"nobody", bulk=True)
    sender._wire = _Line()  # type: ignore[assignment]
    sender.put_behind(lambda: b"here")
    bulk: Any = SimpleNamespace(raw=b"", wire=_Line(), wake=lambda: woken.append("bulk"))
    sender._bulk = bulk
    sender.put_behind(lambda: b"there", bulk=True)

    assert (bytes(sender._rest), bulk.raw, woken) == (b"here", b"there", ["writer", "bulk"])


def test_probes_are_taken_from_the_bulk_lanes_connection() -> None:
    probe = b"".join(encode_frame(0, 0, [Message(Kind.PROBE, 0, [1], [])]))
    lanes = Stream(lanes=True)

    assert not lanes.receive_bulk(probe)
    assert not Stream().receive_bulk(probe)
    assert lanes.bulk is not None
    assert [message.kind for message in lanes.bulk.probes] == [Kind.PROBE]
    assert behind_length([probe])[4:] == probe


def test_a_stream_without_lanes_has_nothing_on_the_bulk_lane() -> None:
    stream = Stream()

    assert stream.next_bulk_frame() is None
    assert not stream.expects(5)
    assert not stream.ready
    stream.again.append(b"a frame of before")
    assert stream.ready
    FrameSender(Stream(), "sends").flush()


def test_a_message_that_fits_into_no_header_is_refused() -> None:
    with pytest.raises(loom.TooLarge):
        Stream()._small_frame([Message(Kind.RESULT, 1, ["x" * (2 << 20)], [])])
