"""`SessionWeaver`: asks the weaver through a session, whose driver has a connection with it."""

from __future__ import annotations

from typing import Any

from loom.errors import GatewayUnreachable, LoomError, WaitTimeout
from loom.rest import Gateway
from loom.weaver.serving.operations import OPERATIONS, takes
from loom.wire.bodies import AskWeaver
from loom_proxy.session.caller import Caller

ANSWER_TIMEOUT = 10.0
"""Seconds that an answer may take, besides those of what is asked."""

BY_GATEWAY = frozenset(("inject", "remove_fault"))
"""Operations that a session does not pass on: faults of drivers and of the gateway are the gateway's to inject, and
its audit names who injected what."""


class SessionWeaver:
    """The weaver, asked through a session; when that is over, by REST.

    Args:
        caller: sends the session's operations.
        gateway: the REST interface of the session's gateway.
    """

    def __init__(self, caller: Caller, gateway: Gateway) -> None:
        self._caller = caller
        self._gateway = gateway

    def ask(self, operation: str, **arguments: Any) -> Any:
        """See `loom.weaver.serving.operations.AsksWeaver`.

        Raises:
            GatewayUnreachable: no answer comes, for instance while the session's connection is lost.
        """
        if operation in BY_GATEWAY or self._caller.error is not None:
            return self._gateway.ask(operation, **arguments)
        given = {name: value for name, value in arguments.items() if value is not None}
        timeout = ANSWER_TIMEOUT + takes(operation, given)
        try:
            # Without an order key: it does not wait behind large calls.
            return self._caller.ask(AskWeaver(operation, given, timeout), key=None).get(timeout)
        except WaitTimeout:
            raise GatewayUnreachable(f"no answer from the weaver over the session within {timeout:g} s") from None
        except LoomError:
            # A question that the end of the session cut off is asked again; a command would be given twice.
            if self._caller.error is None or OPERATIONS[operation].method != "GET":
                raise
            return self._gateway.ask(operation, **arguments)
