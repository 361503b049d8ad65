"""The log of a session's events: every reader sees every event that is kept, until the session ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from loom.errors import SessionClosed
from loom_proxy.session import events
from loom_proxy.session.events import Event, SessionEvents, failure_of

ENDED = Event("ended", {}, SessionClosed("over"))


def event(number: int) -> Event:
    return Event("failure", {"number": number})


def numbers(seen: list[Event]) -> list[int]:
    return [one.details["number"] for one in seen if one.name == "failure"]


@pytest.fixture
def log() -> SessionEvents:
    return SessionEvents()


def read_all(log: SessionEvents) -> list[Event]:
    return list(log.read())


def test_old_events_are_read_first(log: SessionEvents) -> None:
    for number in range(3):
        log.add(event(number))
    log.close(ENDED)

    assert numbers(read_all(log)) == [0, 1, 2]


def test_the_last_event_ends_the_reading(log: SessionEvents) -> None:
    log.add(event(0))
    log.close(ENDED)

    assert read_all(log)[-1] is ENDED


def test_every_reader_sees_every_event(log: SessionEvents) -> None:
    log.add(event(0))
    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read_all, log) for _ in range(4)]
        for number in range(1, 200):
            log.add(event(number))
        log.close(ENDED)

        for reader in readers:
            assert numbers(reader.result(10)) == list(range(200))


def test_a_reader_is_woken_by_a_new_event(log: SessionEvents) -> None:
    reading = log.read(timeout=10)
    threading.Timer(0.05, log.add, [event(7)]).start()

    assert next(reading).details == {"number": 7}


def test_a_waiting_reader_ends_with_the_session(log: SessionEvents) -> None:
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read_all, log)
        log.close(ENDED)

        assert reader.result(10) == [ENDED]


def test_a_reader_stops_after_its_timeout_without_an_event(log: SessionEvents) -> None:
    log.add(event(0))
    started = time.monotonic()

    seen = list(log.read(timeout=0.05))

    assert numbers(seen) == [0]
    assert 0.04 < time.monotonic() - started < 5


def test_a_timeout_of_zero_reads_what_is_there(log: SessionEvents) -> None:
    assert list(log.read(timeout=0)) == []
    log.add(event(0))
    assert numbers(list(log.read(timeout=0))) == [0]


def test_a_session_ends_once(log: SessionEvents) -> None:
    log.close(ENDED)
    log.close(Event("ended", {"reason": "again"}))

    assert read_all(log) == [ENDED]


@pytest.fixture
def short_log(monkeypatch: pytest.MonkeyPatch) -> SessionEvents:
    """A log that keeps three events."""
    monkeypatch.setattr(events, "KEEP", 3)
    return SessionEvents()


def read_some(reading: Iterator[Event], count: int) -> list[Event]:
    return [next(reading) for _ in range(count)]


def test_the_oldest_events_are_dropped(short_log: SessionEvents) -> None:
    for number in range(10):
        short_log.add(event(number))

    assert numbers(list(short_log.read(timeout=0))) == [7, 8, 9]


def test_a_slow_reader_goes_on_with_what_is_left(short_log: SessionEvents) -> None:
    reading = short_log.read(timeout=0)
    short_log.add(event(0))
    assert numbers(read_some(reading, 1)) == [0]
    for number in range(1, 10):
        short_log.add(event(number))

    assert numbers(list(reading)) == [7, 8, 9]


def test_a_reader_that_is_up_to_date_misses_nothing_of_a_full_log(short_log: SessionEvents) -> None:
    reading = short_log.read()
    for number in range(10):
        short_log.add(event(number))
        assert numbers(read_some(reading, 1)) == [number]
    short_log.close(ENDED)

    assert list(reading) == [ENDED]


@pytest.mark.parametrize(
    ("more", "told"),
    [({"reason": "its worker has ended"}, ": its worker has ended"), ({}, "")],
    ids=["why", "not why"],
)
def test_a_lost_host_is_a_failure_that_says_why_if_the_gateway_does(more: dict[str, str], told: str) -> None:
    failure = failure_of(Event("host_lost", {"host": 1, "address": "tcp://a:1", **more}))

    assert failure is not None
    assert failure.report() == f"worker host 1 at tcp://a:1 is gone, and its processes with it{told}"
