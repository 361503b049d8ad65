"""Requests of HTTP tunnels that come to another gateway than the one that has the tunnel. Lines are real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.responses import Response

from loom.errors import ConnectionLost, InvalidAddress, ProtocolMismatch, WrongArguments
from loom.process.listen import listen
from loom_gateway.server import _others
from loom_gateway.session_hosts import other_gateways
from loom_gateway.session_hosts.hosts import SessionHosts
from loom_gateway.session_hosts.other_gateways import OtherGateways, TunnelRequest
from loom_gateway.settings import GatewaySettings
from loom_gateway.workers.sources import WorkerHosts

KEY = "k" * 64


async def answer(asked: TunnelRequest, body: bytes) -> Response:
    if asked.number == 7:
        raise ProtocolMismatch("batch 7 is none")
    return Response(body[::-1], 409, {"loom-ended": asked.token})


def gateway(key: str = KEY) -> OtherGateways:
    made = OtherGateways(listen("127.0.0.1", 0), key)
    made.answer = answer
    return made


@pytest.fixture
async def here() -> AsyncIterator[OtherGateways]:
    here = gateway()
    yield here
    here._listener.close()


@pytest.fixture
async def there() -> AsyncIterator[OtherGateways]:
    there = gateway()
    await there.start()
    yield there
    there.close()


def asked(there: OtherGateways, number: int = 1) -> TunnelRequest:
    return TunnelRequest("up", there.new_name(), "token-id", number)


@pytest.mark.parametrize(
    ("given", "hosted", "why"),
    [
        ("127.0.0.1:0", False, "--gateways-listen needs --session-host"),
        ("0.0.0.0:8473", True, "leads other gateways nowhere"),
        ("127.0.0.1", True, "write --gateways-listen HOST:PORT"),
    ],
)
def test_an_address_that_makes_no_sense_is_refused(given: str, hosted: bool, why: str) -> None:
    hosts = SessionHosts(WorkerHosts([]), KEY) if hosted else None

    with pytest.raises((WrongArguments, InvalidAddress), match=why):
        _others(GatewaySettings(gateways_listen=given), hosts)


async def test_a_name_leads_other_gateways_to_its_own(here: OtherGateways, there: OtherGateways) -> None:
    assert here.place_of(there.new_name()) == there._here
    assert here.place_of(here.new_name()) is None
    assert here.new_name() != here.new_name()


@pytest.mark.guarantees("ports", "A client cannot have a gateway connect to where no gateway is")
async def test_a_name_that_no_gateway_made_leads_nowhere(here: OtherGateways) -> None:
    forger = gateway("another key" * 6)

    for name in ("", "x", "a.b.c", "é.b.c", "...", forger.new_name()):
        assert here.place_of(name) is None
    forger._listener.close()


async def test_a_request_is_passed_on_and_its_answer_back(here: OtherGateways, there: OtherGateways) -> None:
    found = await here.ask(there._here, asked(there), b"frames" * 100_000)

    assert (found.status_code, found.body) == (409, b"semarf" * 100_000)
    assert found.headers["loom-ended"] == "token-id"
    assert found.headers["content-length"] == "600000"


async def test_an_error_of_the_other_gateway_is_raised_here(here: OtherGateways, there: OtherGateways) -> None:
    with pytest.raises(ProtocolMismatch, match="batch 7 is none"):
        await here.ask(there._here, asked(there, 7), b"")


async def test_a_gateway_that_is_away_or_has_another_key_is_a_lost_connection(
    here: OtherGateways, there: OtherGateways
) -> None:
    stranger = gateway("another key" * 6)
    await stranger.start()
    why = "which has this tunnel, does not answer"

    with pytest.raises(ConnectionLost, match=why):
        await here.ask(stranger._here, asked(there), b"")
    with pytest.raises(ConnectionLost, match=why):
        await here.ask("tcp://127.0.0.1:1", asked(there), b"")
    stranger.close()


async def test_a_tunnel_that_the_other_gateway_has_not_is_a_lost_connection(
    here: OtherGateways, there: OtherGateways
) -> None:
    async def has_none(asked: TunnelRequest, body: bytes) -> Response:
        raise ConnectionLost("this gateway has no such tunnel")

    there.answer = has_none

    with pytest.raises(ConnectionLost, match="this gateway has no such tunnel"):
        await here.ask(there._here, asked(there), b"")


async def test_a_gateway_that_says_nothing_is_a_lost_connection(
    here: OtherGateways, there: OtherGateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_gateways, "ANSWER_TIMEOUT", 0.1)
    over = asyncio.Event()

    async def wait(asked: TunnelRequest, body: bytes) -> Response:
        await over.wait()
        return Response()

    there.answer = wait

    with pytest.raises(ConnectionLost):
        await here.ask(there._here, asked(there), b"")
    over.set()
