"""When what was recorded is written."""

import queue
import threading
from types import SimpleNamespace

import pytest

from loom.tracing import files


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(files, "EVERY", 100.0)
    written: list[int] = []
    one = files.Writer(written.extend)
    one.put(0)
    for number in range(1, files.MOST + 1):
        one.put(number)
    assert written == [0]
    one.put(files.MOST + 1)
    assert written == list(range(files.MOST + 2))


def test_where_no_thread_can_start_an_event_is_written_at_once(monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    written: list[int] = []
    one = files.Writer(written.extend)
    one.put(1)
    one.put(2)
    assert written == [1, 2]


def test_the_first_of_a_burst_is_written_at_once_and_the_others_by_a_thread(monkeypatch):
    seconds, came = queue.Queue(), queue.Queue()
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=lambda _: seconds.get(timeout=30)))
    one = files.Writer(lambda entries: came.put((threading.current_thread().name, entries)))
    here = threading.current_thread().name
    for _ in range(3):
        for number in range(3):
            one.put(number)
        assert came.get_nowait() == (here, [0])
        seconds.put(1)
        assert came.get(timeout=30) == ("loom-timing", [1, 2])
        (thread,) = [each for each in threading.enumerate() if one._run in getattr(each, "_args", ())]
        seconds.put(1)  # nothing has come
        thread.join(30)
    assert came.empty()


def test_an_interruption_while_its_thread_starts_leaves_no_writer_that_waits_for_ever(monkeypatch):
    start = threading.Thread.start

    def interrupt(self: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupt)
    written: list[int] = []
    one = files.Writer(written.extend)
    with pytest.raises(KeyboardInterrupt):
        one.put(1)
    one.put(2)
    assert written == [1, 2]
