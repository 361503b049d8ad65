"""What the bridge needs of its connection to NATS, with a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import nats
import pytest
import trustme
from nats.aio.client import Client
from nats.aio.msg import Msg

from loom.nats.bridge import Bridge
from loom.nats.message_counts import Tally
from loom.nats.nats_link import NatsAway, NatsLink, NatsLogin, flush
from loom.nats.state import BridgeState
from loom.nats.subjects import EnvelopeKind, Format
from tests.integration.nats.bridges import until
from tests.integration.nats.nats_server import BOUND, NatsServer, Said

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


async def test_a_client_that_nats_py_has_closed_is_replaced(server: NatsServer) -> None:
    """As after an error of the server's. The client says nothing when its last data could not be sent."""
    is_back = asyncio.Event()
    lost: list[str] = []

    async def came() -> None:
        is_back.set()

    link = NatsLink(server.url, NatsLogin(), lambda: lost.append("lost"), came, Tally())
    await link.open()
    keeping = asyncio.ensure_future(link.keep())

    await link.check()._close(Client.CLOSED, do_cbs=False)
    with pytest.raises(NatsAway):
        link.check()

    await asyncio.wait_for(is_back.wait(), BOUND)
    await link.flush()
    assert lost == ["lost"]
    keeping.cancel()
    await link.close()


async def test_a_server_with_a_certificate_of_nobody_is_tried_until_it_has_a_good_one(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    pem = tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
    lost, back = asyncio.Event(), asyncio.Event()

    async def came() -> None:
        back.set()

    with NatsServer("--tls", "--tlscert", str(pem), "--tlskey", str(pem)) as server:
        url = server.url.replace("nats://", "tls://")
        link = NatsLink(url, NatsLogin(ca=str(tmp_path / "ca.pem")), lost.set, came, Tally())
        await link.open()

        server.kill()
        stranger.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
        server.start()
        await asyncio.wait_for(lost.wait(), BOUND)
        await until(lambda: "certificate verify failed" in str(link._last_error))
        assert not back.is_set()

        server.kill()
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
        server.start()
        await asyncio.wait_for(back.wait(), BOUND)
        await link.close()


class OneEvent:
    """A gateway whose weaver has had one event."""

    url = "http://gateway"
    event: ClassVar[dict[str, object]] = {"id": 1, "kind": "paused", "replica": "train_0"}

    def status(self) -> dict[str, str]:
        return {}

    def ask(self, operation: str, **values: Any) -> Any:
        answers = {"status": {"event": 0}, "devices": [], "events": [] if values.get("after") else [self.event]}
        return answers[operation]


async def test_an_event_of_a_lost_connection_is_not_confirmed_by_the_next_one(server: NatsServer) -> None:
    async def messages() -> AsyncIterator[dict[str, Any]]:
        yield {"type": "event", "event": OneEvent.event}
        await asyncio.Event().wait()

    bridge = Bridge(
        OneEvent(),
        messages(),
        server.url,
        NatsLogin(),
        "torchLoom",
        Format.JSON,
        BridgeState(None),  # type: ignore[arg-type]
    )
    await bridge.open()
    monitors: list[Said] = []
    flush_link = bridge._nats.flush

    async def flush_on_the_next_connection() -> None:
        if not monitors:
            server.kill()
            await until(lambda: not bridge._is_whole)
            server.start()
            monitors.append(await Said.on(await nats.connect(server.url), EnvelopeKind.UI_UPDATE))
            await until(lambda: bridge._nats._is_up)
        await flush_link()

    bridge._nats.flush = flush_on_the_next_connection  # type: ignore[method-assign]
    running = asyncio.ensure_future(bridge.run())

    await until(lambda: bool(monitors))
    said = await asyncio.wait_for(monitors[0].next(type="event"), BOUND)

    assert said["data"]["id"] == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await bridge.close()
