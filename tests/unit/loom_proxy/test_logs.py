"""Lines that arrive on the laptop."""

from __future__ import annotations

import sys
import threading

import pytest

from loom.wire.bodies import LogLines
from loom_proxy.logs import LogReceiver

BOUND = 30.0


def test_lines_for_a_terminal_that_is_gone_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    import msgpack

    receiver, seen = LogReceiver(), threading.Event()
    receiver.add_callback(lambda line: seen.set())
    monkeypatch.setattr(sys, "stdout", None)
    lines = msgpack.packb([(0.0, "trainers", "", [0], "stdout", "text", 1)])
    receiver.take(LogLines().message(parts=[lines]))
    assert seen.wait(BOUND)
    assert receiver.drain(BOUND)
