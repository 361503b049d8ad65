"""The report of an error: one sentence on standard error, and an exit code.

All processes of Loom (``loom``, the gateway, a worker) use the codes of ``docs/reference/exit-codes.md``.
"""

from __future__ import annotations

import sys
import traceback

from loom import errors
from loom.terminal_text import fit_lines

FAILURE = 1
USAGE = 2

_BY_EXIT_CODE = (
    errors.InvalidAddress,
    errors.PortInUse,
    errors.MissingDependency,
    errors.GatewayUnreachable,
    errors.AuthenticationError,
    errors.WorkerUnreachable,
    errors.UnknownSession,
    errors.NotFound,
)
"""The class for each exit code that several share: the most likely one of a process of Loom."""


def error_for_exit_code(code: int) -> type[errors.LoomError]:
    """Return the class of the error that a process of Loom with exit code ``code`` has reported."""
    return next((cls for cls in _BY_EXIT_CODE if cls.exit_status == code), errors.LoomError)


def warn(text: str) -> None:
    """Print a warning on standard error."""
    print(f"warning: {fit_lines(text)}", file=sys.stderr)  # noqa: T201


def report(error: errors.LoomError) -> int:
    """Print an error on standard error and return its exit code."""
    print(f"error: {fit_lines(str(error))}", file=sys.stderr)  # noqa: T201
    return error.exit_status


def report_bug(error: Exception) -> int:
    """Print the traceback of an error that is none of Loom's on standard error and return the exit code."""
    sys.stderr.write(fit_lines("".join(traceback.format_exception(error))))
    return FAILURE
