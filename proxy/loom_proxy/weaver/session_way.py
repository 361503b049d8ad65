"""`SessionWeaver`: requests to the weaver through a session, whose driver is connected to it."""

from __future__ import annotations

from typing import Any

from loom.errors import GatewayUnreachable, LoomError, WaitTimeout
from loom.rest import Gateway
from loom.weaver.serving.operations import OPERATIONS, takes
from loom.wire.bodies import AskWeaver
from loom_proxy.session.calls import Calls

ANSWER_TIMEOUT = 10.0
"""Seconds that an answer may take on top of those for which the operation itself waits."""

BY_GATEWAY = frozenset(("inject", "remove_fault"))
"""Operations that always go to the gateway, which injects faults of drivers and its own, and audits all faults."""


class SessionWeaver:
    """The weaver, asked through a session, or by REST when the session is over."""

    def __init__(self, caller: Calls, gateway: Gateway) -> None:
        self._caller = caller
        self._gateway = gateway

    def ask(self, operation: str, **arguments: Any) -> Any:
        """Ask for an operation and return its answer; see `loom.weaver.serving.operations.Ask`."""
        if operation in BY_GATEWAY or self._caller.error is not None:
            return self._gateway.ask(operation, **arguments)
        given = {name: value for name, value in arguments.items() if value is not None}
        timeout = ANSWER_TIMEOUT + takes(operation, given)
        try:
            # Without an order key, so that the request does not wait behind large calls.
            return self._caller.ask(AskWeaver(operation, given, timeout), key=None).get(timeout)
        except WaitTimeout:
            raise GatewayUnreachable(f"no answer from the weaver over the session within {timeout:g} s") from None
        except LoomError:
            # The session ended before the answer. A read is repeated by REST; a command might be given twice.
            if self._caller.error is None or OPERATIONS[operation].method != "GET":
                raise
            return self._gateway.ask(operation, **arguments)
