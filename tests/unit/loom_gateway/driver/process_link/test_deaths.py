"""Processes that watch others: they are told what is gone, by the driver alone, and across cuts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from loom.errors import ProtocolMismatch
from loom.mutual_auth import Exchange, Purpose, Side, new_nonce
from loom.wire.bodies import Challenge, ProcessEnded, ProcessesGone, Tied, Watch
from loom.wire.length_prefix import LENGTH
from loom.wire.messages import Kind
from loom_gateway.driver.process_link import deaths
from loom_gateway.driver.process_link.deaths import Watchers
from loom_gateway.driver.process_link.link import Introduction, answer_of, asked_of, greeting
from tests.support.network.gate import Gate
from tests.unit.loom_gateway.driver.process_link.processes import BOUND, Driver, Process
from tests.unit.loom_gateway.driver.process_link.strangers import challenged, is_cut_off, message_of


def watch(key: str, challenge: str, procs: int = 7, side: Side = Side.ASKS) -> Watch:
    """What a process asks on a connection who knows a key."""
    exchange = Exchange(Purpose.PROCESS_LINK, key, new_nonce(), challenge)
    unproven = Watch(exchange.asking, "", procs)
    return replace(unproven, proof=exchange.proof(side, *unproven.said))


async def test_a_process_is_told_what_was_gone_before_and_what_is_later() -> None:
    async with Driver() as driver:
        driver.watchers.lose(8, 1)
        driver.watchers.lose(8, 0)
        driver.watchers.lose(9, 0)
        with Process(driver.server.address) as process:
            process.tell("watch 8")
            await driver.until_printed("gone 8 0\ngone 8 1\n")
            driver.watchers.lose(9, 1)
            driver.watchers.lose(8, 2)
            await driver.until_printed("gone 8 0\ngone 8 1\ngone 8 2\n")
            process.tell("watch 9")
            await driver.until_printed("gone 8 0\ngone 8 1\ngone 8 2\ngone 9 0\ngone 9 1\n")


@pytest.mark.parametrize("shut", [False, True], ids=["a reset", "a network that is away"])
async def test_a_process_is_told_after_a_cut_what_it_has_missed(shut: bool) -> None:
    async with Driver() as driver:
        address = driver.server.address
        with Gate(address.port) as gate, Process(address._replace(port=gate.port)) as process:
            driver.watchers.lose(8, 0)
            driver.watchers.lose(9, 0)
            process.tell("watch 8")
            process.tell("watch 9")
            before = "gone 8 0\ngone 9 0\n"
            await driver.until_printed(before)
            if shut:
                gate.shut()
                assert await asyncio.to_thread(gate.knocked.wait, BOUND)
            else:
                gate.cut()
            driver.watchers.lose(9, 1)
            gate.open()
            # All is said again on each connection.
            await driver.until(lambda: b"gone 9 1\n" in driver.printed[7, 0])


async def test_a_mesh_that_was_stopped_is_not_remembered() -> None:
    async with Driver() as driver:
        with Process(driver.server.address) as process:
            driver.watchers.lose(8, 0)
            process.tell("watch 8")
            await driver.until_printed("gone 8 0\n")
            driver.watchers.lose(8, 1, later=False)
            await driver.until_printed("gone 8 0\ngone 8 1\n")
            assert driver.watchers.gone(8) == [0]


def test_the_last_meshes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "MOST_MESHES", 2)
    known = Watchers()
    for procs, rank in ((1, 0), (2, 0), (1, 1), (3, 0)):
        known.lose(procs, rank)
    assert [known.gone(procs) for procs in (1, 2, 3)] == [[0, 1], [], [0]]


async def test_a_process_watches_only_so_many_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "MOST_WATCHED", 2)
    async with Driver() as driver:
        with Process(driver.server.address) as process:
            for procs in (8, 9, 10):
                driver.watchers.lose(procs, 0)
                process.tell(f"watch {procs}")
            await driver.until_printed("gone 8 0\ngone 9 0\ngone 10 0\n")
            for procs in (8, 9, 10):
                driver.watchers.lose(procs, 1)
            await driver.until_printed("gone 8 0\ngone 9 0\ngone 10 0\ngone 9 1\ngone 10 1\n")


async def test_who_does_not_know_the_key_is_told_nothing() -> None:
    async with Driver() as driver:
        driver.watchers.lose(7, 0)
        key = driver.server.address.key
        for wrong in (
            lambda challenge: watch("another key", challenge),
            lambda challenge: watch(key, new_nonce()),
            lambda challenge: watch(key, challenge, side=Side.ANSWERS),
            lambda challenge: replace(watch(key, challenge, procs=8), procs=7),
            lambda challenge: Watch("", "", 7),  # what a process says that has shown the key
        ):
            reader, writer, challenge = await challenged(driver)
            writer.write(greeting(wrong(challenge).message()))
            assert await is_cut_off(reader)
            writer.close()


@pytest.mark.parametrize("garbage", [LENGTH.pack(4097), greeting(ProcessEnded().message())])
async def test_garbage_after_the_key_is_cut_off(garbage: bytes) -> None:
    async with Driver() as driver:
        driver.watchers.lose(7, 0)
        reader, writer, challenge = await challenged(driver)
        writer.write(greeting(watch(driver.server.address.key, challenge).message()) + garbage)
        assert (await message_of(reader)).kind == Kind.PROCESSES_GONE
        assert await is_cut_off(reader)
        writer.close()
        driver.watchers.lose(7, 1)
        assert driver.gone == []


def introduced(key: str = "a key") -> tuple[Introduction[ProcessesGone], Exchange]:
    """A process's end that awaits the driver's answer, and the driver's exchange."""
    introduction: Introduction[ProcessesGone] = Introduction("a key", Watch("", "", 7))
    said = introduction.feed(greeting(Challenge(new_nonce()).message()))
    asked, exchange = _asked(said, introduction)
    assert isinstance(asked, Watch)
    return introduction, replace(exchange, key=key)


def _asked(said: bytes, introduction: Introduction[ProcessesGone]) -> tuple[object, Exchange]:
    assert introduction._exchange is not None
    return asked_of(said[LENGTH.size :], "a key", introduction._exchange.answering)


def test_a_process_believes_its_driver_alone() -> None:
    own, exchange = introduced()
    gone = ProcessesGone("", 7, [0, 1])
    for wrong in (
        answer_of(introduced("another key")[1], gone),
        answer_of(introduced()[1], gone),  # of another connection
        greeting(gone.message()),
        answer_of(exchange, Tied("", 3, "weaver")),
        greeting(replace(gone, proof=exchange.proof(Side.ANSWERS, *replace(gone, ranks=[1]).said)).message()),
    ):
        with pytest.raises(ProtocolMismatch):
            own.feed(wrong)
        assert own.answer is None
    own.feed(answer_of(exchange, gone))
    assert own.answer is not None
    assert list(own.answer.ranks) == [0, 1]
