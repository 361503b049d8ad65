"""Waking a thread that polls."""

from __future__ import annotations

import select

import pytest

from loom.wire.sockets import Waker


@pytest.fixture
def waker() -> Waker:
    return Waker()


def readable(waker: Waker, milliseconds: float = 0) -> bool:
    poll = select.poll()
    poll.register(waker, select.POLLIN)
    return bool(poll.poll(milliseconds))


def test_a_new_waker_is_clear(waker: Waker) -> None:
    assert not waker.woken
    assert not readable(waker)


def test_a_waker_that_was_woken_can_be_polled_until_it_is_cleared(waker: Waker) -> None:
    waker.wake()
    assert waker.woken
    assert readable(waker, 1000)

    waker.clear()
    assert not waker.woken
    assert not readable(waker)


def test_a_clear_waker_may_be_cleared_again(waker: Waker) -> None:
    waker.clear()
    assert not readable(waker)


def test_a_waker_that_is_never_cleared_may_be_woken_more_often_than_its_pipe_has_room_for(waker: Waker) -> None:
    for _ in range(100_000):
        waker.wake()
    assert readable(waker, 1000)
