"""Who reads: a thread that waits reads by itself, the reader thread everything else, and nothing is left unread."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from loom.wire.sockets import Waker
from loom_proxy.session import read_loop as reading
from loom_proxy.session.read_loop import ReadLoop
from tests.unit.loom_proxy.session.test_interrupts import SignalAt

BOUND = 20.0


class Bytes:
    """A source of single bytes, over a real socket, that notes who read each."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.taken: list[tuple[int, str]] = []
        self.seen: set[int] = set()
        self.changed = threading.Condition()
        self.reads_in: threading.Event = threading.Event()
        """Set whenever somebody begins to read and would wait."""

    def fileno(self) -> int:
        return self.near.fileno()

    def read(self, wait: bool) -> bool:
        if wait:
            self.reads_in.set()
        try:
            data = self.near.recv(1, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        with self.changed:
            self.seen.update(data)
            self.taken += [(byte, threading.current_thread().name) for byte in data]
            self.changed.notify_all()
        return bool(data)

    away = False

    def reconnect(self) -> bool:
        raise AssertionError("it was never away")

    def has(self, byte: int) -> Callable[[], bool]:
        return lambda: byte in self.seen

    def until(self, byte: int) -> str:
        """Wait, without reading, until a byte was read; by which thread?"""
        with self.changed:
            assert self.changed.wait_for(self.has(byte), BOUND)
        return dict(self.taken)[byte]


@pytest.fixture
def source() -> Iterator[Bytes]:
    source = Bytes()
    yield source
    source.far.close()
    source.near.close()


@pytest.fixture
def started(source: Bytes) -> Iterator[ReadLoop]:
    """A reading whose reader thread runs; it ends with the source."""
    started = ReadLoop(source)
    thread = threading.Thread(target=started.run, name="reader")
    thread.start()
    assert source.reads_in.wait(BOUND)
    yield started
    source.far.close()
    started.add_waiter("the end")
    thread.join(BOUND)
    assert not thread.is_alive()


def until_resting(started: ReadLoop, source: Bytes) -> None:
    """Have a thread that waits turned away and answered, after which the reader thread rests."""
    assert started.read_inline(source.has(1), BOUND) is None
    source.far.send(b"\x01")
    assert source.until(1) == "reader"
    deadline = time.monotonic() + BOUND
    while not started._resting:
        assert time.monotonic() < deadline


def test_a_thread_that_waits_reads_by_itself(source: Bytes) -> None:
    alone = ReadLoop(source)
    source.far.send(b"\x01\x02")
    assert alone.read_inline(source.has(2), BOUND) is True
    assert source.taken == [(1, "MainThread"), (2, "MainThread")]


def test_a_wait_that_is_too_long_is_given_up_and_reads_nothing(source: Bytes) -> None:
    alone = ReadLoop(source)
    assert alone.read_inline(source.has(1), 0.01) is False
    source.far.send(b"\x01")
    assert alone.read_inline(source.has(1), BOUND) is True


def test_a_wait_of_no_time_does_not_wait(source: Bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LOOK", float("nan"))  # not a time that can be waited for
    assert ReadLoop(source).read_inline(source.has(1), 0.0) is False


def test_a_bell_ends_the_wait(source: Bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LOOK", BOUND)
    waker, arrived = Waker(), threading.Event()
    alone = ReadLoop(source, waker)

    def ring() -> None:
        arrived.set()
        waker.wake()

    timer = threading.Timer(0.01, ring)
    timer.start()
    assert alone.read_inline(arrived.is_set, 10 * BOUND) is True
    timer.join()


def test_what_came_already_is_not_waited_for(source: Bytes) -> None:
    assert ReadLoop(source).read_inline(lambda: True, BOUND) is True


def test_what_comes_without_reading_ends_the_wait(source: Bytes) -> None:
    cancelled = threading.Event()
    timer = threading.Timer(0.01, cancelled.set)
    timer.start()
    assert ReadLoop(source).read_inline(cancelled.is_set, BOUND) is True
    timer.join(BOUND)


def test_while_somebody_else_waits_the_reader_thread_reads(source: Bytes, started: ReadLoop) -> None:
    started.add_waiter("a future")
    assert started.read_inline(source.has(1), BOUND) is None
    source.far.send(b"\x01")
    assert source.until(1) == "reader"


def test_the_reader_thread_leaves_the_reading_to_a_thread_that_waits(
    source: Bytes, started: ReadLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "REST", BOUND)
    until_resting(started, source)
    for byte in (2, 3, 4):
        source.far.send(bytes([byte]))
        assert started.read_inline(source.has(byte), BOUND) is True
    assert [name for _, name in source.taken] == ["reader", "MainThread", "MainThread", "MainThread"]


def test_when_nobody_comes_the_reader_thread_reads_again(
    source: Bytes, started: ReadLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "REST", 1.0)  # long enough for a test on a busy machine to see it
    until_resting(started, source)
    source.far.send(b"\x02")
    assert source.until(2) == "reader"


def test_the_reader_thread_comes_at_once_when_somebody_else_waits(
    source: Bytes, started: ReadLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "REST", 2 * BOUND)
    until_resting(started, source)
    started.add_waiter("a future")
    source.far.send(b"\x02")
    assert source.until(2) == "reader"


def test_after_a_long_visit_the_reader_thread_reads(source: Bytes, started: ReadLoop) -> None:
    until_resting(started, source)
    looks: list[bool] = []

    def arrived() -> bool:
        looks.append(started._resting)
        return not looks[-1]  # stays until the reader thread waits for the turn

    assert started.read_inline(arrived, BOUND) in (True, None)  # None: it was back before the visit
    source.far.send(b"\x02")
    assert source.until(2) == "reader"


def test_the_end_ends_the_wait_and_the_reader_thread(source: Bytes) -> None:
    alone = ReadLoop(source)
    source.far.close()
    assert alone.read_inline(source.has(1), BOUND) is False
    assert alone.read_inline(source.has(1), BOUND) is None
    alone.run()  # returns


def test_a_source_that_raises_is_over(source: Bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = ReadLoop(source)
    monkeypatch.setattr(source, "read", lambda wait: 1 / 0)
    source.far.send(b"\x01")
    with pytest.raises(ZeroDivisionError):
        alone.read_inline(source.has(1), BOUND)
    assert alone.read_inline(source.has(1), BOUND) is None


def test_an_interrupt_ends_a_wait(source: Bytes) -> None:
    alone = ReadLoop(source)
    main = threading.main_thread().ident
    assert main is not None
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT))

    def arrived() -> bool:  # once it is asked, the wait has begun
        if timer.ident is None:
            timer.start()
        return False

    try:
        with pytest.raises(KeyboardInterrupt):
            alone.read_inline(arrived, BOUND)
    finally:
        timer.join(BOUND)
        signal.signal(signal.SIGINT, previous)
    source.far.send(b"\x01")
    assert alone.read_inline(source.has(1), BOUND) is True


def test_an_interrupt_at_any_line_loses_no_turn_and_nothing_that_came(
    source: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = ("/loom_proxy/session/read_loop.py", "/test_reading.py")
    monkeypatch.setattr("tests.unit.loom_proxy.session.test_interrupts.WATCHED", watched)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    alone = ReadLoop(source)
    interrupted = line = 0
    try:
        while True:
            line += 1
            source.far.send(bytes([line]))
            trace = SignalAt(line)
            arrived = source.has(line)
            interrupted += _interrupted(trace, alone, arrived)
            assert alone.read_inline(arrived, BOUND) is True
            if trace.left > 0:
                break  # the whole of it ran through
    finally:
        signal.signal(signal.SIGINT, previous)
    assert [byte for byte, _ in source.taken] == list(range(1, line + 1))
    assert interrupted == line - 1 > 15


def _interrupted(trace: SignalAt, alone: ReadLoop, arrived: Callable[[], bool]) -> bool:
    sys.settrace(trace)
    try:
        alone.read_inline(arrived, BOUND)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False
