"""Text that others wrote, made fit for a terminal: names, reasons and log lines of the cluster's programs.

A terminal obeys the control characters in what it shows: they move its cursor, set its title, write into its
clipboard. Characters that turn the direction of writing make one name look like another. Both are shown as escapes.
`fit_log_records` does so for all that Loom logs; what it prints is made fit where it is printed.

`limit_log` bounds the lines of a process's log, so that nobody who makes it complain fills the disk. Each kind of
line, told apart by the place in the code that writes it, has `BURST` lines at once and one every `EVERY` seconds
after that. The next line of the kind says how many were left out.
"""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

BURST = 30
"""Lines of one kind at once."""

EVERY = 2.0
"""Seconds between two lines of one kind, when it has had its burst."""

_KINDS = 1000  # kinds that are remembered; the one that was written longest ago is forgotten first


@dataclass
class _Kind:
    left: float
    at: float
    left_out: int = 0


class LogLimit(logging.Filter):
    """A filter that lets through so many lines of each kind.

    Args:
        clock: seconds, which never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: OrderedDict[tuple[str, int], _Kind] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        place = (record.pathname, record.lineno)
        kind = self._kinds.setdefault(place, _Kind(BURST, now))
        self._kinds.move_to_end(place)
        if len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        kind.left = min(kind.left + (now - kind.at) / EVERY, BURST)
        kind.at = now
        if kind.left < 1:
            kind.left_out += 1
            return False
        kind.left -= 1
        if kind.left_out:
            record.msg = f"{record.getMessage()} ({kind.left_out} more such lines were left out)"
            record.args = None
            kind.left_out = 0
        return True


def limit_log(*more: str) -> None:
    """Bound the lines of the process's log, and of further loggers with handlers of their own, given by name."""
    limit = LogLimit()
    for handler in logging.getLogger().handlers:
        handler.addFilter(limit)
    for name in more:
        logging.getLogger(name).addFilter(limit)


_UNFIT = (
    "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f"
)
"""C0 and C1 controls, line separators, turns of direction, invisible marks, and halves of surrogate pairs."""

_IN_A_LINE = re.compile(f"(?!\t)[{_UNFIT}]")
_IN_LINES = re.compile(f"(?![\n\t])[{_UNFIT}]")
_STYLES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def fit_line(text: str) -> str:
    """Return a text as one line without characters that a terminal would obey: each is shown as its escape."""
    return _IN_A_LINE.sub(_escape, text)


def fit_lines(text: str) -> str:
    """Return a text as `fit_line` does, with its line breaks kept."""
    return _IN_LINES.sub(_escape, text)


def fit_html(text: str) -> str:
    """Return a text as HTML of a notebook, made fit as by `fit_lines`: turns of direction work there, too."""
    return escape(fit_lines(text))


def without_styles(text: str) -> str:
    """Return a text without the sequences by which programs colour their lines and move the cursor."""
    return _STYLES.sub("", text) if "\x1b" in text else text


_OWN_LOGGERS = ("loom", "loom_proxy", "loom_gateway")

_formatter = logging.Formatter()


def fit_log_records() -> None:
    """Make every record fit for a terminal that one of Loom's loggers makes from now on. Idempotent.

    A filter of a logger does not see the records of the loggers below it, and a handler at the top would stand in
    for the program's own.
    """
    make = logging.getLogRecordFactory()
    if getattr(make, "makes_fit", False):
        return

    def make_fit(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.name.partition(".")[0] in _OWN_LOGGERS:
            _make_fit(record)
        return record

    make_fit.makes_fit = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_fit)


def _make_fit(record: logging.LogRecord) -> None:
    try:
        text = record.getMessage()
    except Exception:  # noqa: BLE001 - the handler reports it
        return
    # An ordinary record keeps its arguments, by which collectors of errors group.
    if (fit := fit_lines(text)) != text:
        record.msg, record.args = fit, None
    if record.exc_info and record.exc_info[0] is not None:
        record.exc_text = fit_lines(_formatter.formatException(record.exc_info))


def _escape(match: re.Match[str]) -> str:
    # JSON leaves this one character as it is, and knows no escape with x.
    return "\\u007f" if match[0] == "\x7f" else match[0].encode("unicode_escape").decode("ascii")
