"""Waking a thread that polls."""

from __future__ import annotations

import select

import pytest

from loom.wire.waker import Bell


@pytest.fixture
def bell() -> Bell:
    return Bell()


def readable(bell: Bell, milliseconds: float = 0) -> bool:
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    return bool(poll.poll(milliseconds))


def test_a_new_bell_is_silent(bell: Bell) -> None:
    assert not bell.rung
    assert not readable(bell)


def test_a_bell_that_was_rung_can_be_polled_until_it_is_silenced(bell: Bell) -> None:
    bell.ring()
    assert bell.rung
    assert readable(bell, 1000)

    bell.silence()
    assert not bell.rung
    assert not readable(bell)


def test_a_silent_bell_may_be_silenced_again(bell: Bell) -> None:
    bell.silence()
    assert not readable(bell)


def test_a_bell_that_nobody_silences_may_be_rung_more_often_than_its_pipe_has_room_for(bell: Bell) -> None:
    for _ in range(100_000):
        bell.ring()
    assert readable(bell, 1000)
