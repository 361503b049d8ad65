"""An answer that cannot be given becomes an error, and the thread that had it goes on to the next."""

from __future__ import annotations

import asyncio
import time

import pytest

from loom.wire.codec import Encoder
from loom.wire.messages import Kind, Message
from loom_gateway.driver.monarch.mesh_table import MeshEntry
from loom_gateway.driver.session import replies as ledger
from loom_gateway.driver.session.replies import Replies


class Sent(list[Message]):
    """What was sent, and how often it was flushed."""

    def __init__(self) -> None:
        self.flushed = 0
        self.came = asyncio.Event()

    def __call__(self, message: Message, eager: bool = True, key: int | None = None) -> None:
        self.append(message)
        self.came.set()

    def flush(self) -> None:
        self.flushed += 1


def refuse(value: object) -> object:
    raise RuntimeError(f"{value} is not to be had")


def call(ident: int) -> Message:
    return Message(Kind.CALL, ident, [1, "give"])


def replies_of(sent: Sent, why_silent: str | None = None) -> Replies:
    loop = asyncio.get_running_loop()
    return Replies(loop, Encoder(), sent, sent.flush, lambda entry: why_silent)


async def test_an_answer_that_cannot_be_given_is_an_error() -> None:
    sent = Sent()
    replies = replies_of(sent)
    first = replies.expect(call(1), 0.0, convert=refuse)
    second = replies.expect(call(2), 0.0)

    replies.answer(first, "this", None, True)
    replies.answer(second, "that", None, True)

    assert [(message.kind, message.id) for message in sent] == [(Kind.ERROR, 1), (Kind.RESULT, 2)]
    assert "this is not to be had" in repr(sent[0])
    assert replies.in_flight == 0


async def test_an_operation_is_answered_once() -> None:
    sent = Sent()
    replies = replies_of(sent)
    reply = replies.expect(call(1), 0.0)
    forgotten = replies.expect(call(2), 0.0)

    replies.answer(reply, "this", None, True)
    replies.answer(reply, "again", None, True)
    replies.forget(forgotten)
    replies.answer(forgotten, "never", None, True)

    assert [message.id for message in sent] == [1]
    assert replies.pending() == {}


async def test_a_coroutine_s_error_is_the_answer() -> None:
    sent = Sent()
    replies = replies_of(sent)

    async def fail() -> None:
        raise RuntimeError("not now")

    replies.answer_with(call(1), 0.0, fail())
    await sent.came.wait()

    assert (sent[0].kind, sent[0].id) == (Kind.ERROR, 1)
    assert "not now" in repr(sent[0])


async def test_a_call_to_what_is_gone_already_fails_after_a_grace() -> None:
    sent = Sent()
    replies = replies_of(sent, why_silent="process 0 is gone")
    entry = MeshEntry("actors", "counters", None, 1, procs=2, ranks=(0,))

    replies.expect(call(1), 0.0, entry)
    answered_by_monarch = replies.expect(call(2), 0.0, entry)
    replies.answer(answered_by_monarch, "in time", None, True)
    await asyncio.sleep(2 * ledger.GRACE)

    assert [(message.kind, message.id) for message in sent] == [(Kind.RESULT, 2), (Kind.ERROR, 1)]
    assert "process 0 is gone" in repr(sent[1])


async def test_answers_that_come_together_go_out_together() -> None:
    sent = Sent()
    replies = replies_of(sent)
    expected = [replies.expect(call(ident), 0.0) for ident in range(3)]
    replies.gathered(more=False)  # from here on others are close behind

    for reply in expected[:2]:
        replies.answer(reply, None, None, False)
        replies.gathered(more=True)
    in_between = sent.flushed
    replies.answer(expected[2], None, None, False)
    replies.gathered(more=False)

    assert len(sent) == 3
    assert in_between <= sent.flushed - 1


async def test_only_the_calls_to_a_dead_mesh_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "GRACE", 0.01)
    sent = Sent()
    replies = replies_of(sent)
    dead, alive = (MeshEntry("actors", name, None, 1, procs=2, ranks=(0,)) for name in ("dead", "alive"))
    replies.expect(call(1), 0.0, alive)
    replies.expect(call(2), 0.0, dead)
    replies.expect(call(3), 0.0)

    replies.fail_calls(lambda entry: entry is dead)
    await sent.came.wait()
    await asyncio.sleep(10 * ledger.GRACE)

    assert [(message.kind, message.id) for message in sent] == [(Kind.ERROR, 2)]
    assert "mesh 'dead' was stopped" in repr(sent[0])
    assert set(replies.pending()) == {(1, None), (3, None)}


async def test_the_durations_are_those_of_calls() -> None:
    replies = replies_of(Sent())
    spawn = Message(Kind.SPAWN_PROCS, 1, [1])

    for message in (spawn, call(2)):
        replies.answer(replies.expect(message, 0.0), None, None, True)

    assert sum(replies.latencies.counts) == 1


def actors() -> MeshEntry:
    return MeshEntry("actors", "counters", None, 1)


async def test_answers_are_counted_for_the_whole_mesh_of_the_endpoint_that_was_called() -> None:
    sent = Sent()
    replies = replies_of(sent)
    whole = actors()
    part = MeshEntry("actors", "counters", None, 1, calls=whole.calls)
    first = replies.expect(call(1), time.perf_counter(), whole)
    second = replies.expect(call(2), time.perf_counter(), part)
    third = replies.expect(call(3), time.perf_counter(), part)
    assert replies.calls_in_flight() == {(1, "give"): 3}

    replies.answer(first, "this", None, True)
    replies.answer(second, None, ValueError("that"), True)

    assert replies.calls_in_flight() == {(1, "give"): 1}
    assert whole.calls["give"].summary(time.perf_counter())[:2] == (2, 1)
    replies.forget(third)
    assert not replies.calls_in_flight()


async def test_what_is_no_call_is_not_counted() -> None:
    replies = replies_of(Sent())
    entry = actors()
    stop = replies.expect(Message(Kind.STOP, 1, [1, "reason"]), 0.0, entry)
    assert not replies.calls_in_flight()
    replies.answer(stop, None, None, True)
    assert entry.calls == {}
