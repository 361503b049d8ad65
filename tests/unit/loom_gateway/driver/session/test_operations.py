"""An answer that cannot be given becomes an error, and the thread that had it goes on to the next."""

from __future__ import annotations

import asyncio

from loom.wire.messages import Kind, Message
from loom_gateway.driver.session.operations import Operations
from loom_gateway.driver.weaver_link import WeaverLink


def refuse(value: object) -> object:
    raise RuntimeError(f"{value} is not to be had")


async def test_an_answer_that_cannot_be_given_is_an_error() -> None:
    sent: list[Message] = []

    def send(message: Message, eager: bool = True, key: int | None = None) -> None:
        sent.append(message)

    loop = asyncio.get_running_loop()
    operations = Operations([], [], ("127.0.0.1", 1), WeaverLink(None, "", loop), loop, send, lambda: None)
    first = operations.expect(Message(Kind.CALL, 1, [1, "give"]), 0.0, convert=refuse)
    second = operations.expect(Message(Kind.CALL, 2, [1, "give"]), 0.0)

    operations.answer(first, "this", None, True)
    operations.answer(second, "that", None, True)

    assert [(message.kind, message.id) for message in sent] == [(Kind.ERROR, 1), (Kind.RESULT, 2)]
    assert "this is not to be had" in repr(sent[0])
