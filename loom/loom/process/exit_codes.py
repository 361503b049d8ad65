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

__all__ = ["FAILURE", "USAGE", "error_for_exit_code", "exit_code", "report"]

FAILURE = 1
USAGE = 2

_CODES: dict[type[errors.LoomError], int] = {
    errors.InvalidAddress: USAGE,
    errors.WrongArguments: USAGE,
    errors.PortInUse: 3,
    errors.MissingDependency: 4,
    errors.GatewayUnreachable: 5,
    errors.NotAGateway: 5,
    errors.AuthenticationError: 6,
    errors.ScopeError: 6,
    errors.WorkerUnreachable: 7,
    errors.UnknownSession: 8,
    errors.WeaverUnavailable: 5,
    errors.NatsUnreachable: 5,
    errors.UnknownReplica: 9,
    errors.UnknownDevice: 9,
    errors.UnknownCommand: 9,
    errors.UnknownInjection: 9,
    errors.BadPlan: USAGE,
    errors.NotInjectable: 6,
}


def exit_code(error: errors.LoomError) -> int:
    """The exit code for an error."""
    return next((code for cls, code in _CODES.items() if isinstance(error, cls)), FAILURE)


def error_for_exit_code(code: int) -> type[errors.LoomError]:
    """The class of error that a process of Loom which ended with ``code`` has reported."""
    return next((cls for cls, known in _CODES.items() if known == code), errors.LoomError)


def report(error: errors.LoomError) -> int:
    """Say on standard error what went wrong and return the exit code for it."""
    print(f"error: {error}", file=sys.stderr)  # noqa: T201
    return exit_code(error)
