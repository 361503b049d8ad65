"""The sans-IO part of a process link: messages arrive once and in order, wherever connections are cut."""

from __future__ import annotations

import random

import pytest

from loom.errors import ProtocolMismatch
from loom.wire.bodies import FlushOutput, ProcessOutput
from loom.wire.length_prefix import LENGTH, FrameSplitter
from loom.wire.messages import Message
from loom_gateway.driver.process_link.link import LinkEnd


def printed(number: int) -> Message:
    return ProcessOutput(1, 0.0).message(parts=[b"%d" % number * (number % 50)])


def contents(messages: list[Message]) -> list[bytes]:
    return [b"".join(bytes(part) for part in message.parts) for message in messages]


@pytest.mark.parametrize("seed", range(20))
def test_messages_arrive_once_and_in_order_wherever_connections_are_cut(seed: int) -> None:
    chance = random.Random(seed)
    process, driver = LinkEnd(), LinkEnd()
    sent: list[Message] = []
    arrived: list[Message] = []
    flushes = 0
    for _ in range(100):
        driver.connected(process.received)
        process.connected(driver.received)
        there, back = b"", b""
        for _ in range(chance.randint(1, 5)):
            for _ in range(chance.randint(0, 10)):
                sent.append(printed(len(sent)))
                process.put(sent[-1])
            driver.put(FlushOutput().message())
            there += process.to_send(acknowledge=chance.random() < 0.5)
            back += driver.to_send(acknowledge=chance.random() < 0.5)
            come, there = there[: (cut := chance.randint(0, len(there)))], there[cut:]
            arrived += driver.feed(come)
            come, back = back[: (cut := chance.randint(0, len(back)))], back[cut:]
            flushes += len(list(process.feed(come)))
    driver.connected(process.received)
    process.connected(driver.received)
    arrived += driver.feed(process.to_send())
    flushes += len(list(process.feed(driver.to_send(acknowledge=True))))
    assert contents(arrived) == contents(sent)
    assert flushes > 0
    assert process.settled
    assert process.kept_bytes == 0


def test_what_waits_is_counted_until_it_is_acknowledged() -> None:
    process, driver = LinkEnd(), LinkEnd()
    process.put(ProcessOutput(1, 0.0).message(parts=[b"x" * 1000]))
    assert 1000 <= process.kept_bytes < 1200
    process.connected(0)
    driver.connected(0)
    list(driver.feed(process.to_send()))
    assert 1000 <= process.kept_bytes < 1200
    assert not process.settled
    list(process.feed(driver.to_send(acknowledge=True)))
    assert process.kept_bytes == 0
    assert process.settled


def test_a_length_over_the_limit_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(ProtocolMismatch, match="limit is 100"):
        list(FrameSplitter(100).feed(LENGTH.pack(101)))


def test_frames_are_found_however_the_bytes_are_cut() -> None:
    data = b"".join(LENGTH.pack(size) + b"x" * size for size in range(20))
    splitter = FrameSplitter(1000)
    frames = [frame for byte in data for frame in splitter.feed(bytes([byte]))]
    assert [len(frame) for frame in frames] == list(range(20))
    assert list(FrameSplitter(1000).feed(data)) == frames
    assert splitter.rest == b""
