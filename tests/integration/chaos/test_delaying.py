"""Frames that are on their way for a time, without any network."""

from __future__ import annotations

from loom.chaos.host.network import DelayQueue


def test_a_frame_arrives_after_its_time_and_not_before() -> None:
    queue = DelayQueue(2.0)
    queue.put(b"a", 10.0)
    queue.put(b"b", 10.5)

    assert queue.wait(10.5) == 1.5
    assert queue.arrived(11.9) is None
    assert queue.arrived(12.0) == b"a"
    queue.pop()
    assert queue.arrived(12.0) is None
    assert queue.wait(13.0) == 0.0


def test_an_empty_queue_is_waited_for_without_end() -> None:
    assert DelayQueue(2.0).wait(10.0) is None


def test_what_has_no_room_is_dropped_and_counted() -> None:
    queue = DelayQueue(1.0, room=1000)

    for number in range(4):
        queue.put(bytes([number]) * 300, 0.0)

    assert queue.dropped == 2
    assert queue.arrived(1.0) == bytes(300)
    queue.pop()
    queue.put(b"\4" * 300, 1.0)
    assert queue.dropped == 2
    assert queue.arrived(1.0) == b"\1" * 300
