"""Which operations are started aside, and what waits for them."""

from __future__ import annotations

import sys
import threading

import psutil
import pytest

from loom.wire.messages import Kind, Message
from loom_gateway.driver.session import dispatcher
from loom_gateway.driver.session.dispatcher import LARGE, MOST, LargeCalls

DATA = bytes(LARGE)
ROOTS = {1: 1, 2: 1, 3: 3, 4: 4}
"""Mesh 2 is a part of mesh 1."""


class Driver:
    """Starts operations as a driver does: those of held meshes not before they are let go."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.gates: dict[int, threading.Event] = {}
        self.starts = LargeCalls(self.start, ROOTS.__getitem__)

    def start(self, message: Message) -> None:
        if message.id in self.gates:
            assert self.gates[message.id].wait(30)
        self.started.append(message.id)

    def hold(self, ident: int) -> threading.Event:
        self.gates[ident] = threading.Event()
        return self.gates[ident]

    def receive(self, message: Message) -> None:
        if not (self.starts.under_way or message.size >= LARGE) or not self.starts.take(message):
            self.start(message)


def call(ident: int, mesh: int, large: bool = False, kind: Kind = Kind.CALL_ONE) -> Message:
    return Message(kind, ident, (mesh, "echo"), [b"pickle", DATA] if large else [b"pickle"])


def held_up(driver: Driver, message: Message) -> threading.Thread:
    """Receive a message on a thread of its own, which has to wait."""
    thread = threading.Thread(target=driver.receive, args=(message,), daemon=True)
    thread.start()
    return thread


def test_a_small_call_to_other_actors_does_not_wait_for_a_large_one() -> None:
    driver = Driver()
    gate = driver.hold(1)
    driver.receive(call(1, mesh=1, large=True))

    driver.receive(call(2, mesh=3))

    assert driver.started == [2]
    gate.set()


def test_a_small_call_to_the_same_actors_waits_for_a_large_one() -> None:
    driver = Driver()
    gate = driver.hold(1)
    driver.receive(call(1, mesh=1, large=True))

    waiting = held_up(driver, call(2, mesh=2))
    gate.set()

    waiting.join(30)
    assert driver.started == [1, 2]


def test_what_is_no_call_waits_for_every_large_one() -> None:
    driver = Driver()
    gates = [driver.hold(1), driver.hold(2)]
    driver.receive(call(1, mesh=1, large=True))
    driver.receive(call(2, mesh=3, large=True))

    waiting = held_up(driver, Message(Kind.STOP, 3, (4, "")))
    for gate in gates:
        gate.set()

    waiting.join(30)
    assert driver.started == [1, 2, 3]


def test_no_more_than_a_few_large_calls_are_taken_at_once() -> None:
    driver = Driver()
    gate = driver.hold(1)
    for ident in range(1, MOST + 1):
        driver.receive(call(ident, mesh=1, large=True))

    waiting = held_up(driver, call(MOST + 1, mesh=1, large=True))
    waiting.join(0.05)
    assert waiting.is_alive()
    gate.set()

    waiting.join(30)
    driver.receive(Message(Kind.STOP, 9, (4, "")))
    assert driver.started == [*range(1, MOST + 2), 9]


def test_a_call_to_a_mesh_that_there_is_not_is_started_too() -> None:
    started: list[int] = []
    starts = LargeCalls(lambda message: started.append(message.id), lambda ident: ident)

    assert starts.take(call(1, mesh=77, large=True))

    assert not starts.take(call(2, mesh=77))
    assert started == [1]


def test_memory_is_given_back_when_no_other_large_call_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = threading.Semaphore(0)
    monkeypatch.setattr(dispatcher, "QUIET", 0.01)
    monkeypatch.setattr(dispatcher, "give_back_memory", given_back.release)
    driver = Driver()

    for ident in (1, 2):
        driver.receive(call(ident, mesh=1, large=True))
        assert given_back.acquire(timeout=30)

    assert driver.started == [1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_the_heap_is_smaller_after_its_memory_was_given_back() -> None:
    process = psutil.Process()
    pieces = [b"x" * (64 << 10) for _ in range(2000)]
    last = b"x" * 1000  # behind them: without it the heap would shrink by itself
    with_pieces = process.memory_info().rss
    del pieces

    dispatcher.give_back_memory()

    assert process.memory_info().rss < with_pieces - (64 << 20)
    del last
