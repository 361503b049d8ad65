"""`FutureProxy.cancel`: what has not been started is taken back, wherever it is; what has been goes on."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loom
from loom import Actor, endpoint
from loom.wire.codec import loads
from loom.wire.length_prefix import LENGTH
from loom.wire.messages import Buffer, Kind, Message
from loom.wire.mux import BARRIER, CHUNK_SIZE, ChunkInbox, ChunkOutbox, OrderKey
from loom.wire.sender import FrameSender
from loom.wire.stream import Stream
from loom_gateway.driver.clients.client import PACE, Backlog
from tests.support.actors import Counter

IN_TIME = 30.0
"""Seconds that no wait may take."""

# -- on the laptop: the outbox ------------------------------------------------------------------------------


def call(ident: int, size: int = 10) -> Message:
    return Message(Kind.CALL, ident, (1, "add"), [bytes([ident % 256]) * size])


def sent(outbox: ChunkOutbox) -> list[int]:
    """Ids of the messages that leave an outbox, in the order in which they are whole on the other side."""
    inbox = ChunkInbox()
    idents = []
    while messages := outbox.next_frame():
        whole = [inbox.receive(message) for message in messages]
        idents += [message.id for message in whole if message is not None]
    assert outbox.pending_bytes == 0
    return idents


def test_a_message_that_has_not_left_is_taken_back() -> None:
    outbox = ChunkOutbox()
    for ident in (1, 2, 3):
        outbox.put(call(ident), BARRIER)

    assert outbox.withdraw(2)
    assert not outbox.withdraw(2)
    assert not outbox.withdraw(7)
    assert sent(outbox) == [1, 3]


def test_a_large_message_is_taken_back_before_its_first_chunk_only() -> None:
    outbox = ChunkOutbox()
    outbox.put(call(1, 3 * CHUNK_SIZE), 5)
    outbox.put(call(2, 3 * CHUNK_SIZE), 6)
    outbox.next_frame()

    assert not outbox.withdraw(1)
    assert outbox.withdraw(2)

    outbox.put(call(3), 6)
    while outbox.next_frame():
        pass
    assert outbox.pending_bytes == 0


def test_what_waits_for_a_large_message_goes_when_that_is_taken_back() -> None:
    outbox = ChunkOutbox()
    outbox.put(call(1, 3 * CHUNK_SIZE), 5)
    outbox.put(call(2), 5)
    outbox.put(call(3), BARRIER)
    outbox.put(call(4), 5)

    assert outbox.withdraw(1)
    assert outbox.withdraw(3)
    assert sent(outbox) == [2, 4]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from([None, BARRIER, 5, 6]), st.sampled_from([1, CHUNK_SIZE + 1])),
        st.tuples(st.just("withdraw"), st.integers(1, 20), st.just(0)),
        st.tuples(st.just("send"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(steps)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_whatever_is_taken_back_the_rest_arrives_in_order(steps: Sequence[tuple[str, Any, int]]) -> None:
    outbox, inbox = ChunkOutbox(), ChunkInbox()
    keys: dict[int, OrderKey] = {}
    withdrawn: set[int] = set()
    arrived: list[int] = []

    def send() -> bool:
        messages = outbox.next_frame()
        whole = [inbox.receive(message) for message in messages]
        arrived.extend(message.id for message in whole if message is not None)
        return bool(messages)

    for what, value, size in steps:
        if what == "put":
            ident = len(keys) + 1
            keys[ident] = value
            outbox.put(call(ident, size), value)
        elif what == "withdraw":
            if outbox.withdraw(value):
                assert value in keys
                withdrawn.add(value)
        else:
            send()
    while send():
        pass

    assert sorted(arrived) == sorted(set(keys) - withdrawn)
    assert outbox.pending_bytes == 0
    for key in (5, 6):
        ordered = [ident for ident in arrived if keys[ident] in (key, BARRIER)]
        assert ordered == sorted(ordered)


class FullWire:
    """A socket that takes nothing until it is told to."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.frames: list[bytes] = []

    def encode(self, frame: bytes) -> bytes:
        return frame[LENGTH.size :]

    def try_send(self, data: Buffer) -> int:
        return 0

    def send_all(self, data: Buffer) -> None:
        assert self.open.wait(IN_TIME)
        self.frames.append(bytes(data))


def test_a_sender_takes_back_what_the_socket_has_no_room_for() -> None:
    wire = FullWire()
    sender = FrameSender(Stream(), "test-writer")
    sender.attach(wire)
    try:
        sender.put(call(1))  # leaves for the writer thread, which waits
        for ident in (2, 3, 4):
            sender.put(call(ident))

        assert sender.withdraw(3)
        assert not sender.withdraw(3)

        wire.open.set()
        assert sender.drain(IN_TIME)
    finally:
        wire.open.set()
        sender.close()
    stream = Stream()
    assert [message.id for frame in wire.frames for message in stream.receive(frame)] == [1, 2, 4]


# -- in the driver: the backlog -----------------------------------------------------------------------------


class Session:
    """What a backlog needs: takes what is started and what is answered."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.answers: dict[int, bool] = {}
        self.coming: set[int] = set()
        self.backlog = Backlog(
            lambda message: self.started.append(message.id),
            lambda ident, first_chunk: ident in self.coming,
            self._answer,
        )

    def _answer(self, message: Message) -> None:
        assert message.kind == Kind.RESULT
        self.answers[message.id] = loads(message.parts)


def cancel(ident: int, target: int) -> Message:
    return Message(Kind.CANCEL, ident, (target,))


def test_what_is_behind_others_is_taken_back() -> None:
    session = Session()
    session.backlog.add([call(ident) for ident in range(1, 41)], 400)
    assert session.backlog.start_some()
    assert session.started == list(range(1, PACE + 1))

    session.backlog.add([cancel(100, 30), cancel(101, 3), cancel(102, 30), cancel(103, 99)], 40)
    while session.backlog.start_some():
        pass

    assert session.answers == {100: True, 101: False, 102: False, 103: False}
    assert session.started == [ident for ident in range(1, 41) if ident != 30]


def test_messages_that_come_one_by_one_are_looked_past_too() -> None:
    session = Session()
    looks = 0
    for ident in range(1, 4 * PACE + 1):
        session.backlog.add([call(ident)], 10)
        looks += session.backlog.start_some()

    assert looks == 4


def test_what_has_come_in_part_is_taken_back() -> None:
    session = Session()
    session.coming.add(7)
    session.backlog.add([cancel(100, 7)], 10)
    assert session.answers == {100: True}

    session.backlog.add([call(7), call(8)], 20)
    session.backlog.start_some()

    assert session.started == [8]


def test_what_is_read_ahead_is_bounded() -> None:
    session = Session()
    session.backlog.add([call(1)], 9 << 20)
    assert session.backlog.full
    assert not session.backlog.start_some()
    assert not session.backlog.full


# -- with a session -----------------------------------------------------------------------------------------


class Gate:
    """An argument that keeps the driver busy, where it is unpickled, until a file is there, or some seconds.

    It is a number when it arrives.
    """

    def __init__(self, path: Path, number: int, longest: float) -> None:
        self.arguments = str(path), number, longest

    def __reduce__(self) -> tuple[Any, ...]:
        return _passed, self.arguments


def _passed(path: str, number: int, longest: float) -> int:
    _is_there(path, longest)
    return number


def _is_there(path: str, longest: float) -> bool:
    deadline = time.monotonic() + longest
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Listener(Actor):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    @endpoint
    def hear(self, what: Any) -> Any:
        self.heard.append(what if isinstance(what, int) else len(what))
        return what if isinstance(what, int) else len(what)

    @endpoint
    def wait_for(self, path: str) -> str:
        if not _is_there(path, IN_TIME):
            raise TimeoutError(path)
        return path

    @endpoint
    def all_heard(self) -> list[Any]:
        return self.heard


def test_calls_that_wait_behind_others_are_taken_back(tidied: loom.Job, tmp_path: Path) -> None:
    listener = tidied.hosts.slice(hosts=0).spawn_procs(name="procs").spawn("listener", Listener)
    listener.hear.call_one(-1).get(IN_TIME)
    numbers = range(1, 4001)
    # The driver gets on slowly, and looks ahead between one gate and the next, until it has answered the last.
    slowly = {number: Gate(tmp_path / "answered", number, 0.3) for number in numbers[:-20:40]}
    calls = [listener.hear.call_one(slowly.get(number, number)) for number in numbers]
    last = calls[-20:]

    with ThreadPoolExecutor(20) as pool:
        in_time = list(pool.map(lambda future: future.cancel(), last, timeout=IN_TIME))
    (tmp_path / "answered").touch()

    assert all(in_time)
    for future in last:
        assert future.done()
        assert future.cancelled()
        assert future.cancel()
        with pytest.raises(loom.OperationCancelled, match="taken back before it was started"):
            future.get(IN_TIME)
        assert isinstance(future.exception(), CancelledError)
    assert [future.get(IN_TIME) for future in calls[:-20]] == list(range(1, 3981))
    assert listener.all_heard.call_one().get(IN_TIME) == [-1, *range(1, 3981)]


def test_a_large_argument_on_its_way_is_taken_back_or_arrives(tidied: loom.Job) -> None:
    listener = tidied.hosts.slice(hosts=0).spawn_procs(name="procs").spawn("listener", Listener)
    listener.hear.call_one(-1).get(IN_TIME)
    size = 64 << 20
    future = listener.hear.call_one(bytes(size))

    in_time = future.cancel()

    heard = listener.all_heard.call_one().get(IN_TIME)
    assert heard == ([-1] if in_time else [-1, size])
    assert future.cancelled() == in_time
    if not in_time:
        assert future.get(IN_TIME) == size


def test_what_has_been_started_goes_on(tidied: loom.Job, tmp_path: Path) -> None:
    listener = tidied.hosts.slice(hosts=0).spawn_procs(name="procs").spawn("listener", Listener)
    listener.hear.call_one(-1).get(IN_TIME)
    path = tmp_path / "go"
    future = listener.wait_for.call_one(str(path))
    tidied.run(lambda: None)  # so that the driver has come this far

    assert not future.cancel()
    assert not future.cancelled()
    path.touch()

    assert future.get(IN_TIME) == str(path)
    assert not future.cancel()


def test_results_of_a_stream_are_not_taken_back(tidied: loom.Job) -> None:
    counters = tidied.hosts.spawn_procs(name="procs").spawn("counters", Counter, 10)
    futures = list(counters.add.stream(1))

    assert not any(future.cancel() for future in futures)
    assert [future.get(IN_TIME) for future in futures] == [11, 11]


def test_whoever_waits_is_told(tidied: loom.Job, tmp_path: Path) -> None:
    listener = tidied.hosts.slice(hosts=0).spawn_procs(name="procs").spawn("listener", Listener)
    listener.hear.call_one(-1).get(IN_TIME)
    slow = Gate(tmp_path / "answered", 0, 0.3)
    gate = listener.hear.call_one(slow)
    for number in range(4000):
        listener.hear.broadcast(slow if number % 40 == 0 else 1)
    future = listener.hear.call_one(2)

    async def wait() -> None:
        waiting = future.as_asyncio()
        assert await asyncio.get_running_loop().run_in_executor(None, future.cancel)
        (tmp_path / "answered").touch()
        with pytest.raises(loom.OperationCancelled):
            await waiting
        with pytest.raises(loom.OperationCancelled):
            await future

    asyncio.run(wait())
    assert gate.get(IN_TIME) == 0
    assert list(loom.as_completed([future, gate], IN_TIME))
    assert loom.wait([future, gate], IN_TIME, "FIRST_EXCEPTION") == ({future, gate}, set())


def test_when_the_session_is_over_there_is_nothing_to_take_back(job: loom.Job, tmp_path: Path) -> None:
    listener = job.hosts.slice(hosts=0).spawn_procs(name="procs").spawn("listener", Listener)
    future = listener.wait_for.call_one(str(tmp_path / "never"))
    job.close()

    assert not future.cancel()
    assert isinstance(future.exception(IN_TIME), loom.LoomError)
    assert not future.cancelled()
