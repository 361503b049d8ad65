"""The laptop's background threads go on after an error, whether it is Loom's own or of a user's function."""

from __future__ import annotations

import threading
from typing import Any

import msgpack
import pytest

import loom
from loom.process import tasks
from loom.process.backoff import Backoff
from loom.wire.messages import Kind, Message
from loom_proxy import logs
from loom_proxy.logs import LogLine, LogReceiver
from loom_proxy.session import events
from loom_proxy.session.events import Event, FailureCallbacks, FaultHook, SessionEvents
from loom_proxy.session.waits import Reads

BOUND = 30.0  # seconds

FAILURE = Event("failure", {"mesh": "m", "report": "broken"})


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "AGAIN", Backoff(0.001, 0.01))


def _once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException) -> None:
    """Make a function raise an error at its first call."""
    plain, called = getattr(owner, name), threading.Event()

    def raising(*args: Any, **kwargs: Any) -> Any:
        if called.is_set():
            return plain(*args, **kwargs)
        called.set()
        raise error

    monkeypatch.setattr(owner, name, raising)


ERRORS = [ValueError("of Loom's own"), MemoryError(), SystemExit(1)]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize(("owner", "name"), [(events, "failure_of"), (SessionEvents, "read")], ids=str)
def test_failures_are_called_back_after_an_error(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException
) -> None:
    _once(monkeypatch, owner, name, error)
    log, called = SessionEvents(), threading.Semaphore(0)
    FailureCallbacks(log).add(lambda failure: called.release())
    log.add(FAILURE)
    log.add(FAILURE)

    assert called.acquire(timeout=BOUND)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_callback_for_failures_that_raises_is_called_again(error: BaseException) -> None:
    log, called = SessionEvents(), threading.Semaphore(0)

    def callback(failure: object) -> None:
        called.release()
        raise error

    FailureCallbacks(log).add(callback)
    for _ in range(3):
        log.add(FAILURE)
        assert called.acquire(timeout=BOUND)


def _lines() -> Message:
    line = (0.0, "m", "hosts=0", (0,), "stdout", "text", 1)
    return Message(Kind.LOG_OPTIONS, 0, [], [msgpack.packb([line])])


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("name", ["LogLine", "print_text"])
def test_log_lines_are_shown_after_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException
) -> None:
    _once(monkeypatch, logs, name, error)
    receiver, shown = LogReceiver(), threading.Semaphore(0)
    receiver.add_callback(lambda line: shown.release())
    receiver.receive(_lines())
    receiver.receive(_lines())

    assert shown.acquire(timeout=BOUND)
    assert receiver.drain(BOUND)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_callback_for_log_lines_that_raises_is_called_again(error: BaseException) -> None:
    receiver, called = LogReceiver(), threading.Semaphore(0)
    receiver.printing = False

    def callback(line: LogLine) -> None:
        called.release()
        raise error

    receiver.add_callback(callback)
    for _ in range(3):
        receiver.receive(_lines())
        assert called.acquire(timeout=BOUND)
    assert receiver.drain(BOUND)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("name", ["_interrupt_main", "_last_words"])
def test_the_hook_for_failures_is_called_after_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException
) -> None:
    called, interrupted = threading.Semaphore(0), threading.Semaphore(0)

    def hook(failure: object) -> None:
        called.release()
        raise ValueError("of the user's own")

    monkeypatch.setattr(loom, "unhandled_fault_hook", hook)
    monkeypatch.setattr(events, "_interrupt_main", interrupted.release)
    _once(monkeypatch, events, name, error)
    fault = FaultHook()
    for _ in range(3):
        fault.handle(FAILURE)
        assert called.acquire(timeout=BOUND)
    for _ in range(2):
        assert interrupted.acquire(timeout=BOUND)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_the_driver_is_told_of_what_was_read_after_an_error(error: BaseException) -> None:
    told = threading.Event()
    errors = iter([error])

    def send(answers: object, at_once: bool) -> None:
        if (first := next(errors, None)) is not None:
            raise first
        told.set()

    reads = Reads(send)
    reads.note(1)
    while not told.wait(0.05):
        reads.note(1)
    reads.close()
