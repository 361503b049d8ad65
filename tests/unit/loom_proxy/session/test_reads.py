"""The driver is told of answers that were read: of many together, of few soon, of large ones at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from loom_proxy.session import waits as module
from loom_proxy.session.waits import MOST, MOST_BYTES, TOGETHER, Reads

BOUND = 30.0


class Driver:
    """Takes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[list[Any], bool]] = []
        self.news = threading.Event()

    def __call__(self, answers: Sequence[Any], at_once: bool) -> None:
        self.told.append((list(answers), at_once))
        self.news.set()


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def reads(driver: Driver) -> Iterator[Reads]:
    made = Reads(driver)
    yield made
    made.close()


def test_many_are_told_together_with_the_next_operation(
    reads: Reads, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SOON", BOUND)
    for number in range(TOGETHER):
        assert not reads.due
        reads.note(number)
    assert reads.due
    assert driver.told == []
    reads.tell(at_once=False)
    assert driver.told == [(list(range(TOGETHER)), False)]
    assert not reads.due


def test_very_many_are_told_at_once(reads: Reads, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOON", BOUND)
    for number in range(MOST + 1):
        reads.note(number)
    assert driver.told == [(list(range(MOST)), True)]
    assert len(reads) == 1


def test_a_few_are_told_soon(reads: Reads, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOON", 0.01)
    for answer in (1, (2, 0)):
        driver.news.clear()
        reads.note(answer)
        assert driver.news.wait(BOUND)
    assert driver.told == [([1], True), ([(2, 0)], True)]


def test_large_ones_are_told_at_once_with_what_is_left(
    reads: Reads, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SOON", BOUND)
    reads.note(1)
    reads.note(2, MOST_BYTES - 1)
    assert driver.told == []
    reads.note(3, 1)
    assert driver.told == [([1, 2, 3], True)]


def test_none_is_lost_or_told_twice_when_threads_read(reads: Reads, driver: Driver) -> None:
    def read(first: int) -> None:
        for number in range(first, first + 1000):
            reads.note(number)

    threads = [threading.Thread(target=read, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)
    reads.tell(at_once=True)
    assert sorted(one for answers, _ in driver.told for one in answers) == list(range(4000))


def test_nothing_is_told_and_no_thread_is_left_after_the_end(driver: Driver) -> None:
    reads = Reads(driver)
    reads.note(1)
    reads.close()
    assert reads._thread is not None
    reads._thread.join(BOUND)
    assert not reads._thread.is_alive()
    reads.note(2, MOST_BYTES)
    assert driver.told == []


def test_the_driver_is_told_at_once_while_no_thread_can_be_started(
    reads: Reads, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "SOON", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        reads.note(1)
        reads.note(2)
    assert driver.told == [([1], True), ([2], True)]
    driver.news.clear()
    reads.note(3)
    assert driver.news.wait(BOUND)
    assert driver.told[2:] == [([3], True)]
