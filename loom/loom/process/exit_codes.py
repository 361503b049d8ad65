"""How an error becomes one sentence on standard error and an exit code.

====  =====================================================
code  meaning
====  =====================================================
0     everything went well
1     it failed
2     it was asked for in a wrong way (options, an address)
3     a port is in use
4     a dependency is missing
5     the gateway, its weaver or NATS is unreachable, or something else answers
6     the token is missing, wrong or not for this; what was to be struck is not marked as injectable
7     a worker is unreachable
8     there is no such session
9     there is no such replica, device or command
====  =====================================================

The processes of Loom (``loom``, the gateway, a worker) all use these.
"""

from __future__ import annotations

import sys

from loom import errors

FAILURE = 1
USAGE = 2

_TOLD_BY = (
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
    return next((cls for cls in _TOLD_BY if cls.exit_status == code), errors.LoomError)


def report(error: errors.LoomError) -> int:
    """Print an error on standard error and return its exit code."""
    print(f"error: {error}", file=sys.stderr)  # noqa: T201
    return error.exit_status
