"""Tracebacks in IPython's form, from the cell's own code on."""

from __future__ import annotations

import linecache
import re
from typing import Any

from loom.notebook.execution import LARGEST, MOST_FRAMES, traceback_text

NAME = "<a cell>"


def raised(source: str) -> BaseException:
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    names: dict[str, Any] = {}
    try:
        exec(compile(source, NAME, "exec"), names)
    except Exception as error:  # noqa: BLE001 - whatever the source raises
        return error
    raise AssertionError("it raises nothing")


def test_frames_of_the_caller_are_left_out_and_lines_around_are_shown() -> None:
    assert traceback_text(raised("a = 1\nb = 2\nc = 3\n1 / 0\nd = 4\n"), NAME).splitlines()[1:] == [
        "ZeroDivisionError                         Traceback (most recent call last)",
        "<a cell>, line 4",
        "      2    b = 2",
        "      3    c = 3",
        "----> 4    1 / 0",
        "      5    d = 4",
        "",
        "ZeroDivisionError: division by zero",
    ]


def test_an_exception_in_the_handler_of_another_names_both() -> None:
    text = traceback_text(raised("try:\n    1 / 0\nexcept Exception:\n    {}['key']\n"), NAME)
    assert text.index("ZeroDivisionError: division by zero") < text.index("During handling of the above exception")
    assert text.endswith("KeyError: 'key'")
    hidden = traceback_text(
        raised("try:\n    1 / 0\nexcept Exception:\n    raise KeyError('key') from None\n"), NAME
    )
    assert "ZeroDivisionError" not in hidden


def test_an_exception_that_caused_itself_ends() -> None:
    error = raised("a = KeyError('a')\nb = KeyError('b')\na.__cause__ = b\nb.__cause__ = a\nraise a\n")
    assert traceback_text(error, NAME).endswith("KeyError: 'a'")


def test_a_deep_recursion_and_a_long_text_are_cut() -> None:
    deep = traceback_text(raised("def f():\n    f()\nf()\n"), NAME)
    assert deep.count("in f\n") <= MOST_FRAMES
    assert re.search(r"… \d+ frames left out …", deep)
    long = traceback_text(raised(f"raise ValueError('a' * {3 * LARGEST} + 'end')"), NAME)
    assert len(long) < LARGEST + 100
    assert long.endswith("end")


def test_an_exception_without_frames_of_the_cell_is_named() -> None:
    assert traceback_text(ValueError("from elsewhere"), NAME).splitlines()[1:] == ["ValueError: from elsewhere"]
