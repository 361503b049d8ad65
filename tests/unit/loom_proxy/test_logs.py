"""Lines that arrive on the laptop."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

import pytest

from loom.wire.bodies import LogLines
from loom_proxy import logs
from loom_proxy.logs import LogReceiver, print_text

BOUND = 30.0


def test_lines_for_a_terminal_that_is_gone_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    import msgpack

    receiver, seen = LogReceiver(), threading.Event()
    receiver.add_callback(lambda line: seen.set())
    monkeypatch.setattr(sys, "stdout", None)
    lines = msgpack.packb([(0.0, "trainers", "", [0], "stdout", "text", 1)])
    receiver.receive(LogLines().message(parts=[lines]))
    assert seen.wait(BOUND)
    assert receiver.drain(BOUND)


@pytest.mark.parametrize(
    ("others", "shown"), [(False, "\x1b]0;title\x07text"), (True, "\\x1b]0;title\\x07text")], ids=["own", "others"]
)
def test_lines_of_another_user_are_made_fit_for_a_terminal(
    capsys: pytest.CaptureFixture[str], others: bool, shown: str
) -> None:
    import msgpack

    receiver, lines = LogReceiver(others), []
    receiver.add_callback(lines.append)
    packed = msgpack.packb([(0.0, "trainers", "", [0], "stdout", "\x1b]0;title\x07text", 1)])
    receiver.receive(LogLines().message(parts=[packed]))

    assert receiver.drain(BOUND)
    assert capsys.readouterr().out == f"[trainers] {shown}\n"
    assert [line.text for line in lines] == ["\x1b]0;title\x07text"]


class _Raises:
    encoding = "utf-8"

    def write(self, text: str) -> int:
        raise RuntimeError("not today")


def _closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


def _without_reader() -> TextIO:
    source, end = os.pipe()
    os.close(source)
    return open(end, "w", buffering=1)


@pytest.mark.parametrize("make", [_closed, _without_reader, _Raises, lambda: None, object])
def test_text_that_cannot_be_shown_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, make: Callable[[], Any]
) -> None:
    monkeypatch.setattr(logs, "_silent", set())
    stream = make()
    monkeypatch.setattr(sys, "stdout", stream)
    print_text("stdout", "text\n")
    print_text("stdout", "text\n")
    monkeypatch.undo()
    warnings = [record.getMessage() for record in caplog.records if "shows nothing" in record.getMessage()]
    assert len(warnings) == (stream is not None)
    with contextlib.suppress(Exception):
        stream.close()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_characters_that_a_stream_does_not_know_are_escaped(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    shown = io.BytesIO()
    stream = io.TextIOWrapper(shown, encoding=encoding, errors="strict", newline="")
    monkeypatch.setattr(sys, "stdout", stream)
    print_text("stdout", "a\N{SNOWMAN}\ud800\n")
    monkeypatch.undo()
    snowman = "\N{SNOWMAN}" if encoding == "utf-8" else "\\u2603"
    assert shown.getvalue().decode(encoding) == f"a{snowman}\\ud800\n"
