"""Notices that a worker's host is about to be left, in files that the host's processes read.

A file's first line is the reason, for people. Whoever runs the host may make the first file, and remove it again;
the worker makes the second one when it is told to end.
"""

from __future__ import annotations

import os

DRAINING_VARIABLE = "LOOM_DRAINING_FILE"
"""The environment variable with the path of a file that is there while the host is drained: trainings leave it."""

ENDING_VARIABLE = "LOOM_ENDING_FILE"
"""The environment variable with the path of a file that is there once the host's worker was told to end."""

LONGEST = 500  # characters of a reason that are read


def draining_reason() -> str:
    """Return why the host is drained; empty if it is not."""
    return _read(DRAINING_VARIABLE)


def leaving_reason() -> str:
    """Return why the host is about to be left, because its worker ends or it is drained; empty if it is not."""
    return _read(ENDING_VARIABLE) or draining_reason()


def _read(variable: str) -> str:
    path = os.environ.get(variable)
    if path is None:
        return ""
    try:
        with open(path, errors="replace") as file:
            return file.readline(LONGEST).strip() or "whoever runs it drains it"
    except FileNotFoundError:
        return ""
    except OSError as error:  # it is there
        return f"whoever runs it drains it ({error})"
