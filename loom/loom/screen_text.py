"""Text that others wrote, made fit for a terminal: names, reasons and log lines of the cluster's programs.

A terminal obeys the control characters in what it shows: they move its cursor, set its title, write into its
clipboard. Characters that turn the direction of writing make one name look like another. Both are shown as escapes.
"""

from __future__ import annotations

import re

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


def without_styles(text: str) -> str:
    """Return a text without the sequences by which programs colour their lines and move the cursor."""
    return _STYLES.sub("", text) if "\x1b" in text else text


def _escape(match: re.Match[str]) -> str:
    # JSON leaves this one character as it is, and knows no escape with x.
    return "\\u007f" if match[0] == "\x7f" else match[0].encode("unicode_escape").decode("ascii")
