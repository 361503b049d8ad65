"""How a process ended, in words that fit on a terminal, whatever its agent says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.control.process_end import ProcessEnd, last_lines
from loom.terminal_text import fit_line, fit_lines

ANYTHING: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (ProcessEnd(), ""),
        (ProcessEnd(code=0), "exit code 0"),
        (ProcessEnd(code=7), "exit code 7"),
        (ProcessEnd(signal=11), "killed by SIGSEGV"),
        (ProcessEnd(signal=9), "killed by SIGKILL"),
        (ProcessEnd(signal=63), "killed by signal 63"),
        (
            ProcessEnd(signal=9, out_of_memory=True),
            "killed by SIGKILL, probably out of memory: the kernel counted a process killed for that",
        ),
    ],
)
def test_an_end_is_told_in_words(end: ProcessEnd, cause: str) -> None:
    assert end.cause == end.text == cause


def test_the_last_lines_follow() -> None:
    assert ProcessEnd(code=1, last_lines=("a", "b")).text == "exit code 1; its last lines:\na\nb"
    assert ProcessEnd(last_lines=("a",)).text == "its last lines:\na"


@given(st.lists(ANYTHING, max_size=6))
def test_whatever_an_agent_says_is_read(row: list[Any]) -> None:
    end = ProcessEnd.from_row(row)

    assert ProcessEnd.from_row(end.to_row()) == end == ProcessEnd.from_body(end.to_body())
    assert fit_lines(end.text) == end.text


@given(st.binary() | st.text().map(lambda text: text.encode(errors="replace")))
def test_last_lines_are_few_and_fit_for_a_terminal(data: bytes) -> None:
    lines = last_lines(data)

    assert len(lines) <= 10
    assert all(line and fit_line(line) == line and len(line) <= 300 for line in lines)


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", ()),
        (b"\n \n", ()),
        (b"one\ntwo", ("one", "two")),
        (b"10 %\r20 %\r\n", ("20 %",)),
        (b"\x1b[31mred\x1b[0m\n", ("red",)),
        (b"\x1b]0;title\x07\n", (r"\x1b]0;title\x07",)),
        ("schön \u202egnp\n".encode(), (r"schön \u202egnp",)),
        (b"\xff\n", ("\ufffd",)),
        (b"".join(b"%d\n" % n for n in range(20)), tuple(str(n) for n in range(10, 20))),
        (b"x" * 1000, ("x" * 300,)),
    ],
)
def test_last_lines_are_those_that_a_person_would_read(data: bytes, lines: tuple[str, ...]) -> None:
    assert last_lines(data) == lines
