"""The driver's port for process links: who does not know the key is not believed, costs nothing, and is cut off."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest

from loom.errors import ProtocolMismatch
from loom.mutual_auth import Exchange, Purpose, Side, new_nonce
from loom.wire.bodies import Challenge, ProcessEnded, Tie, Tied, Untied
from loom.wire.frames import encode_frame
from loom.wire.length_prefix import LENGTH, behind_length
from loom.wire.messages import Kind
from loom_gateway.driver.process_link import server as links
from loom_gateway.driver.process_link.link import Introduction, answer_of, asked_of, greeting
from tests.unit.loom_gateway.driver.process_link.processes import BOUND, Driver, Process
from tests.unit.loom_gateway.driver.process_link.strangers import challenged, connect, is_cut_off, message_of


def tie(key: str, challenge: str, again: bool = False, procs: int = 7, side: Side = Side.ASKS) -> Tie:
    """What a process says on a connection who knows a key."""
    exchange = Exchange(Purpose.PROCESS_LINK, key, new_nonce(), challenge)
    unproven = Tie(exchange.asking, "", "a name", procs, 0, again, 0)
    return replace(unproven, proof=exchange.proof(side, *unproven.said))


ENDED = behind_length(encode_frame(1, 0, [ProcessEnded().message()]))


@pytest.mark.guarantees(
    "process link", "What strangers send to the process links' port is not believed, whatever lengths it claims"
)
@pytest.mark.parametrize(
    "said",
    [
        b"[7, 0]\n",  # what an earlier version believed
        b'[7, 0, "logs"]\n',
        LENGTH.pack(0xFFFFFFFF),
        LENGTH.pack(4097),
        LENGTH.pack(8) + b"\0" * 8,
        greeting(ProcessEnded().message()),
        ENDED,
    ],
)
async def test_what_a_stranger_says_is_not_believed(said: bytes) -> None:
    async with Driver() as driver:
        with Process(driver.server.address) as process:
            process.tell("print before")
            await driver.until(lambda: (7, 0) in driver.printed)
            reader, writer, _ = await challenged(driver)
            writer.write(said)
            assert await is_cut_off(reader)
            writer.close()
            process.tell("print after")
            await driver.until(lambda: driver.printed[7, 0] == b"before\nafter\n")
            assert driver.gone == []
            assert driver.started == [(7, 0)]


WRONG: list[Callable[[str, str], Tie]] = [
    lambda key, challenge: tie("another key", challenge),
    lambda key, challenge: tie("", challenge),
    lambda key, challenge: tie("schlüssel", challenge),
    lambda key, challenge: tie(key, new_nonce()),
    lambda key, challenge: tie(key, challenge, side=Side.ANSWERS),
    lambda key, challenge: replace(tie(key, challenge), nonce=challenge),
    lambda key, challenge: replace(tie(key, challenge), nonce=f"2-{'0' * 64}"),
    lambda key, challenge: replace(tie(key, challenge), procs=8),
    lambda key, challenge: replace(tie(key, challenge), again=True),
    lambda key, challenge: replace(tie(key, challenge), proof=tie(key, challenge).proof[:-1]),
    lambda key, challenge: replace(tie(key, challenge), proof=tie(key, challenge).proof + "0"),
    lambda key, challenge: replace(tie(key, challenge), proof="0" * 4000),
]


@pytest.mark.guarantees(
    "process link",
    "Who does not prove to know the process links' key is not believed, and what was overheard on one "
    "connection opens no other",
)
@pytest.mark.parametrize("wrong", WRONG)
async def test_who_does_not_prove_to_know_the_key_is_not_believed(wrong: Callable[[str, str], Tie]) -> None:
    async with Driver() as driver:
        reader, writer, challenge = await challenged(driver)
        writer.write(greeting(wrong(driver.server.address.key, challenge).message()) + ENDED)
        assert await is_cut_off(reader)
        writer.close()
        assert driver.started == driver.gone == []


@pytest.mark.guarantees(
    "process link",
    "Who does not prove to know the process links' key is not believed, and what was overheard on one "
    "connection opens no other",
)
async def test_what_was_overheard_on_one_connection_opens_no_other() -> None:
    async with Driver() as driver:
        _, first, challenge = await challenged(driver)
        reader, second, _ = await challenged(driver)
        overheard = greeting(tie(driver.server.address.key, challenge).message())
        first.write(overheard)
        await driver.until(lambda: driver.started == [(7, 0)])
        second.write(overheard)
        assert await is_cut_off(reader)
        first.close()
        second.close()


def introduced(key: str = "a key") -> tuple[Introduction[Tied | Untied], Exchange]:
    """A process's end that awaits the driver's answer, and the driver's exchange."""
    introduction, challenge = Introduction("a key", Tie("", "", "a name", 7, 0, False, 0)), new_nonce()
    said = introduction.feed(greeting(Challenge(challenge).message()))
    return introduction, replace(asked_of(said[LENGTH.size :], "a key", challenge)[1], key=key)


def test_a_process_believes_the_answer_of_its_driver_and_leaves_what_follows() -> None:
    introduction, exchange = introduced()
    for byte in answer_of(exchange, Tied("", 3, "weaver")) + b"rest":
        if introduction.answer is None:
            assert introduction.feed(bytes([byte])) == b""
    assert isinstance(introduction.answer, Tied)
    assert introduction.answer.weaver == "weaver"


@pytest.mark.guarantees("process link", "A process believes nobody who has taken its driver's port")
@pytest.mark.parametrize("answer", [Tied("", 3, "weaver"), Untied("")])
def test_a_process_does_not_believe_who_has_taken_its_drivers_port(answer: Tied | Untied) -> None:
    own, exchange = introduced()
    for wrong in (
        answer_of(introduced("another key")[1], answer),
        answer_of(introduced()[1], answer),  # of another connection
        greeting(answer.message()),
        greeting(replace(answer, proof=exchange.proof(Side.ASKS, *answer.said)).message()),
        greeting(tie("a key", new_nonce()).message()),
    ):
        with pytest.raises(ProtocolMismatch):
            own.feed(wrong)
        assert own.answer is None

    with pytest.raises(ProtocolMismatch, match="no Loom, or another version"):
        Introduction("a key", Tie("", "", "", 7, 0, False, 0)).feed(greeting(Challenge("x").message()))
    with pytest.raises(ProtocolMismatch, match="begins with CHALLENGE"):
        Introduction("a key", Tie("", "", "", 7, 0, False, 0)).feed(answer_of(exchange, answer))


async def test_who_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "STRANGER_TIMEOUT", 0.05)
    async with Driver() as driver:
        reader, writer, challenge = await challenged(driver)
        writer.write(greeting(tie(driver.server.address.key, challenge).message())[:-1])
        assert await is_cut_off(reader)
        writer.close()
        assert driver.started == []


@pytest.mark.guarantees("process link", "A crowd of strangers keeps no process out")
async def test_a_crowd_of_strangers_keeps_no_process_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_STRANGERS", 8)
    async with Driver() as driver:
        crowd = [await connect(driver) for _ in range(40)]
        with Process(driver.server.address) as process:
            process.tell("print here")
            await driver.until(lambda: driver.printed.get((7, 0)) == b"here\n")
        for reader, _ in crowd[:30]:
            assert (await message_of(reader)).kind == Kind.CHALLENGE
            assert await is_cut_off(reader)
        for _, writer in crowd:
            writer.close()


async def test_a_process_that_the_driver_has_never_seen_cannot_come_back() -> None:
    async with Driver() as driver:
        reader, writer, challenge = await challenged(driver)
        writer.write(greeting(tie(driver.server.address.key, challenge, again=True).message()))
        assert (await message_of(reader)).kind == Kind.UNTIED
        writer.close()
        assert driver.started == []


def reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def test_a_process_that_ends_before_its_agent_holds_the_line_is_given_up_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "START_GRACE", 0.05)
    async with Driver(patience=10 * BOUND) as driver:
        for procs, end in ((7, asyncio.StreamWriter.close), (8, reset)):
            reader, writer, challenge = await challenged(driver)
            writer.write(greeting(tie(driver.server.address.key, challenge, procs=procs).message()))
            await message_of(reader)
            end(writer)
        await driver.until(lambda: driver.gone)
        assert driver.gone == [(7, 0)]  # a reset may be the network's, and the agent has the whole patience


async def test_a_process_whose_connection_is_closed_before_it_is_looked_at_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closed(sock: object, seconds: float) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(links, "break_after", closed)
    async with Driver(patience=0.1) as driver:
        _, writer, challenge = await challenged(driver)
        writer.write(greeting(tie(driver.server.address.key, challenge).message()))
        await driver.until(lambda: driver.gone)
        assert driver.gone == [(7, 0)]
        assert driver.server.connected() == []
        writer.close()


async def test_garbage_after_the_key_breaks_the_connection_and_nothing_else() -> None:
    async with Driver() as driver:
        with Process(driver.server.address) as process:
            process.tell("print before")
            await driver.until(lambda: (7, 0) in driver.printed)
            reader, writer, challenge = await challenged(driver)
            known = greeting(tie(driver.server.address.key, challenge, procs=8).message())
            writer.write(known + LENGTH.pack(0xFFFFFFFF))
            await asyncio.wait_for(reader.read(), BOUND)
            writer.close()
            process.tell("print after")
            await driver.until(lambda: driver.printed[7, 0] == b"before\nafter\n")
            assert driver.gone == []


async def test_a_connection_that_comes_just_before_the_end_is_closed() -> None:
    async with Driver() as driver:
        reader, writer = await connect(driver)
        driver.server.close()
        await is_cut_off(reader)  # it may have been challenged
        writer.close()
