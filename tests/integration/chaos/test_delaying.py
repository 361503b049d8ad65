"""Frames that are on their way for a time, without any network."""

from __future__ import annotations

from loom.chaos.host.delay import DelayQueue


def test_a_frame_arrives_after_its_time_and_not_before() -> None:
    line = DelayQueue(2.0)
    line.put(b"a", 10.0)
    line.put(b"b", 10.5)

    assert line.wait(10.5) == 1.5
    assert line.arrived(11.9) is None
    assert line.arrived(12.0) == b"a"
    line.take()
    assert line.arrived(12.0) is None
    assert line.wait(13.0) == 0.0


def test_an_empty_line_is_waited_for_without_end() -> None:
    assert DelayQueue(2.0).wait(10.0) is None


def test_what_has_no_room_is_dropped_and_counted() -> None:
    line = DelayQueue(1.0, room=1000)

    for number in range(4):
        line.put(bytes([number]) * 300, 0.0)

    assert line.dropped == 2
    assert line.arrived(1.0) == bytes(300)
    line.take()
    line.put(b"\4" * 300, 1.0)
    assert line.dropped == 2
    assert line.arrived(1.0) == b"\1" * 300
