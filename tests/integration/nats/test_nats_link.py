"""What the bridge needs of its connection to NATS, with a real server."""

from __future__ import annotations

import asyncio

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from loom.nats.nats_link import NatsLink, NatsLogin, flush
from loom.nats.tally import Tally
from tests.integration.nats.nats_server import BOUND, NatsServer

TIMES = 1000
"""`Client.flush` alone comes back before the server has the subscriptions in about 20 of them."""


async def test_who_is_asked_after_a_flush_is_there(server: NatsServer, client: Client) -> None:
    async def answer(message: Msg) -> None:
        await message.respond(b"here")

    asked = await nats.connect(server.url)
    for number in range(TIMES):
        for subject in ("first", "second", "last"):
            await asked.subscribe(f"{number}.{subject}", "queue", cb=answer)
        await flush(asked, 10)

        assert (await client.request(f"{number}.last", timeout=10)).data == b"here"
    await asked.close()


async def test_a_client_that_does_not_say_that_it_is_closed_is_found_out(server: NatsServer) -> None:
    is_back = asyncio.Event()

    async def came() -> None:
        is_back.set()

    link = NatsLink(server.url, NatsLogin(), came, Tally())
    await link.open()
    link.check()._closed_cb = None  # as when its last data cannot be sent
    keeping = asyncio.ensure_future(link.keep())

    server.kill()
    server.start()

    await asyncio.wait_for(is_back.wait(), BOUND)
    keeping.cancel()
    await link.close()
