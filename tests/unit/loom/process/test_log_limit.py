"""The lines of a process's log: few of a kind, and the next one says how many were left out."""

from __future__ import annotations

import logging

from loom.terminal_text import BURST, EVERY, LogLimit


def line(place: int, text: str = "a client did %s") -> logging.LogRecord:
    return logging.LogRecord("loom", logging.WARNING, "module.py", place, text, ("wrong",), None)


def test_lines_of_a_kind_are_bounded_and_those_left_out_are_counted() -> None:
    now = 0.0
    limit = LogLimit(lambda: now)

    written = sum(limit.filter(line(1)) for _ in range(100_000))
    assert written == BURST
    assert limit.filter(line(2))  # another kind

    now = EVERY
    late = line(1)
    assert limit.filter(late)
    assert late.getMessage() == f"a client did wrong ({100_000 - BURST} more such lines were left out)"
    assert not limit.filter(line(1))

    now = 1000 * EVERY
    assert sum(limit.filter(line(1)) for _ in range(100)) == BURST


def test_kinds_are_forgotten() -> None:
    limit = LogLimit(lambda: 0.0)
    for place in range(5000):
        assert limit.filter(line(place))
    assert len(limit._kinds) == 1000
