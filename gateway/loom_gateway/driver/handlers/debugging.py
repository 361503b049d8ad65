"""The handler for a client's talk with the debugger of the session's actors."""

from __future__ import annotations

from typing import Any

from loom.errors import ProtocolMismatch
from loom.wire.bodies import Debug
from loom.wire.messages import Kind, Message
from loom_gateway.driver.monarch.debugger import OPERATIONS, find_debugger
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.driver.session.replies import Handler


class Debugging:
    """The operations of one session that its debugger answers."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self.handlers: dict[int, Handler] = {Kind.DEBUG: self._ask}

    def _ask(self, message: Message, started: float) -> None:
        request = Debug.from_body(message.body)
        if request.operation not in OPERATIONS:
            raise ProtocolMismatch(f"this driver's debugger knows no operation {request.operation!r:.40}")
        self._context.replies.answer_with(message, started, self._answer(request))

    async def _answer(self, request: Debug) -> Any:
        debugger = await find_debugger()
        return await getattr(debugger, request.operation).call_one(*request.arguments).as_asyncio()
