"""The report of an error: one sentence on standard error, and an exit code.

====  =====================================================
code  meaning
====  =====================================================
0     everything went well
1     the operation failed
2     the request is wrong (options, an address)
3     a port is in use
4     a dependency is missing
5     the gateway, its weaver or NATS is unreachable, or something else answers
6     the token is missing, wrong or lacks the scope; a fault's target is not marked as injectable
7     a worker is unreachable
8     the session does not exist
9     the replica, device or command does not exist
====  =====================================================

The processes of Loom (``loom``, the gateway, a worker) all use these.
"""

from __future__ import annotations

import sys

from loom import errors

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
    errors.UnknownReplica,
)
"""The class for each exit code that several share: the most likely one of a process of Loom."""


def error_for_exit_code(code: int) -> type[errors.LoomError]:
    """Return the class of the error that a process of Loom with exit code ``code`` has reported."""
    return next((cls for cls in _BY_EXIT_CODE if cls.exit_status == code), errors.LoomError)


def report(error: errors.LoomError) -> int:
    """Print an error on standard error and return its exit code."""
    print(f"error: {error}", file=sys.stderr)  # noqa: T201
    return error.exit_status
