"""Text that others wrote comes to no terminal or notebook with characters that those would obey."""

from __future__ import annotations

import ast
import logging
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import loom
import loom_proxy
from loom.process.error_exit import report_bug
from loom.terminal_text import fit_html, fit_line, fit_lines, fit_log_records
from loom_proxy.notebook.cells import _shown_as
from loom_proxy.progress import WaitStep, bar_html
from tests.support.gateways import BOUND

SEQUENCES = (
    "\x1b[2J", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\", "\x1b]52;c;aGk=\x07", "\x1bP+q\x1b\\", "\x1bc",
    "\x9b31m", "\x9d0;t\x9c", "\r", "\x08\x08", "\x85", "\u2028", "\u2029", "\u202e", "\u2066", "\u061c",
    "\u200f", "\ud800", "\udfff", "\x7f", "\x00", "\x0b", "\x0c", "\u2060", "\U000e0041",
)  # fmt: skip
LINE = st.lists(st.one_of(st.sampled_from(SEQUENCES), st.text(), st.characters()), max_size=8).map("".join)
LOGGERS = ("loom", "loom.weaver", "loom_proxy", "loom_proxy.session.calls", "loom_gateway.relay.endpoint")


def obeyed(text: str) -> list[str]:
    """Return the characters of a text that a terminal obeys, or that turn its direction; line breaks are none."""
    kinds = {"Cc", "Zl", "Zp", "Cs"}
    turns = {"RLO", "LRO", "RLE", "LRE", "PDF", "RLI", "LRI", "FSI", "PDI"}
    return [
        each
        for each in text
        if each not in "\n\t" and (unicodedata.category(each) in kinds or unicodedata.bidirectional(each) in turns)
    ]


class Kept(logging.Handler):
    """A handler that keeps what a program's own handler would write."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


def logged(name: str, *args: object, error: BaseException | None = None) -> str:
    """Return what a handler of the root logger writes of a record."""
    kept = Kept()
    logging.root.addHandler(kept)
    try:
        logging.getLogger(name).error(*args, exc_info=error)
    finally:
        logging.root.removeHandler(kept)
    (text,) = kept.texts
    return text


@given(LINE)
def test_text_is_fit_and_what_is_fit_stays_as_it_is(text: str) -> None:
    assert obeyed(fit_line(text)) == []
    assert "\n" not in fit_line(text)
    assert obeyed(fit_lines(text)) == []
    assert fit_lines(fit_lines(text)) == fit_lines(text)
    fit_lines(text).encode()


@given(st.sampled_from(LOGGERS), LINE)
def test_what_loom_logs_is_fit_wherever_the_text_is_in_the_record(name: str, text: str) -> None:
    error = ValueError(text)
    error.__cause__ = KeyError(text)

    for line in (
        logged(name, "the replica %s is gone", text),
        logged(name, "the replica %(name)s is gone", {"name": text}),
        logged(name, "%s", error),
        logged(name, "it failed", error=error),
        logged(name, text.replace("%", "")),
    ):
        assert obeyed(line) == []


def test_a_record_without_such_text_keeps_its_arguments() -> None:
    kept: list[logging.LogRecord] = []
    handler = Kept()
    handler.emit = kept.append  # type: ignore[method-assign]
    logging.root.addHandler(handler)
    try:
        logging.getLogger("loom_proxy.x").warning("%s of %d", "näme", 3)
    finally:
        logging.root.removeHandler(handler)

    assert (kept[0].msg, kept[0].args) == ("%s of %d", ("näme", 3))


def test_records_of_a_programs_own_loggers_are_untouched() -> None:
    assert logged("loomis", "%s", "\x1b[31mred") == "\x1b[31mred"
    assert logged("mine", "\x1b[31mred") == "\x1b[31mred"


def test_a_record_whose_arguments_do_not_fit_its_text_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)

    logging.getLogger("loom_proxy.x").error("%d", "no number")


def test_the_factory_of_a_program_goes_on_to_be_used() -> None:
    before = logging.getLogRecordFactory()

    fit_log_records()

    assert logging.getLogRecordFactory() is before


@pytest.mark.parametrize(
    "module", ["loom_proxy", "loom_proxy.job", "loom_gateway", "loom_gateway.driver", "loom.threadlet"]
)
def test_each_side_of_loom_logs_fit_records_from_its_first_import(module: str) -> None:
    program = f"""
import {module}, logging, logging.config
logging.getLogger("loom.some").warning("%s", {SEQUENCES[1]!r})
logging.config.dictConfig({{
    "version": 1, "disable_existing_loggers": False, "handlers": {{"h": {{"class": "logging.StreamHandler"}}}},
    "root": {{"handlers": ["h"]}}, "loggers": {{"loom_proxy": {{"level": "INFO"}}}},
}})
logging.getLogger("loom_proxy.some").info("%s", {SEQUENCES[1]!r})
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=BOUND)

    assert said.stderr.split() == [b"\\x1b]0;title\\x07"] * 2


@given(LINE)
def test_a_notebook_gets_fit_text(text: str) -> None:
    assert obeyed(bar_html(WaitStep(text), 1.0)) == []
    assert obeyed(fit_html(text)) == []
    lines = _shown_as(loom.LoomError(text))._render_traceback_()  # type: ignore[attr-defined]
    assert obeyed("".join(lines)) == []


def test_the_traceback_of_an_error_that_is_none_of_looms_is_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_bug(ValueError("".join(SEQUENCES))) == 1

    said = capsys.readouterr().err
    assert "ValueError" in said
    assert obeyed(said) == []


MADE_FIT = re.compile(
    r"fit_lines?\(|json\.dumps\(|progress\.files|\\r\\x1b\[K|error\.code|describe_error\(|__doc__|repr\("
)
PRINTS = re.compile(r"\b(?:print|warn|echo|std(?:err|out)\.write)\(")


def test_what_is_printed_goes_through_the_functions_that_make_it_fit() -> None:
    found = []
    for package in (loom, loom_proxy):
        folder = Path(package.__file__).parent
        for path in folder.rglob("*.py"):
            source = path.read_text()
            if path.name == "loom_vllm.py":  # of vLLM's process, without Loom; what it prints has no free text
                continue
            if "output.py" in path.name or not PRINTS.search(source):
                continue
            for node in ast.walk(ast.parse(source)):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
                    continue
                called = ast.unparse(node.func)
                if called in ("print", "warnings.warn", "typer.echo", "sys.stderr.write", "sys.stdout.write"):
                    text = ast.unparse(node)
                    if MADE_FIT.search(text) is None:
                        found.append(f"{path.relative_to(folder)}: {text}")

    assert found == []
