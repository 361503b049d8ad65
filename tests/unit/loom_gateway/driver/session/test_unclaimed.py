"""Answers that no program has received, and the room that they take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loom.errors import OperationFailed, ResultDropped
from loom.wire.bodies import OperationError, OperationResult
from loom.wire.frames import unpack_texts
from loom.wire.messages import Kind, Message
from loom_gateway.driver.clients.unread_results import StoredResults
from loom_gateway.driver.handlers.unclaimed import UnclaimedResults
from loom_gateway.driver.monarch.mesh_table import MeshEntry, MeshTable
from loom_gateway.driver.session.replies import Request

MIB = 1 << 20


class Answers:
    """A ledger of replies, all of which have been given."""

    def __init__(self) -> None:
        self.listed: list[Any] = []

    def pending(self) -> dict[Any, Any]:
        return {}

    def keep(self, answer: Message, call: Request) -> None: ...

    def succeed(self, ident: int, started: float, value: list[Any] | None) -> None:
        self.listed = value or []


def unclaimed_results(folder: Path, answers: Answers, sent: list[Message], limit: int = 0) -> UnclaimedResults:
    meshes = MeshTable()
    meshes.add(1, MeshEntry("actors", "trainers", None, 1, last_shape=((), 0, (), ())))
    context: Any = SimpleNamespace(
        meshes=meshes,
        replies=answers,
        results=StoredResults(str(folder), limit),
        send=sent.append,
        loop=None,
        caller_is_gone=lambda ident: False,
    )
    return UnclaimedResults(context)


def test_what_was_dropped_is_not_listed_again_when_its_answer_comes(tmp_path: Path) -> None:
    answers = Answers()
    unclaimed = unclaimed_results(tmp_path, answers, [])
    request = (Kind.CALL_ONE, (1, "step"))
    for ident in (1, 2):
        unclaimed.client_left([OperationResult(1.5).message(ident, [b"kept"])], {ident: request})
    drop = Message(Kind.DROP, 9, (1,))

    unclaimed.handlers[Kind.DROP](drop, 0.0)
    unclaimed.take(OperationResult(1.5).message(1, [b"late"]), request)

    unclaimed.handlers[Kind.UNDELIVERED](Message(Kind.UNDELIVERED, 10, ()), 0.0)
    assert [call[0] for call in answers.listed] == [2]
    with pytest.raises(OperationFailed, match="no undelivered call has the id 1"):
        unclaimed.handlers[Kind.DROP](drop, 0.0)


@pytest.mark.guarantees(
    "nothing lost", "Of the results that no program has claimed, the oldest make room, and are named"
)
def test_the_oldest_results_make_room_and_are_named(tmp_path: Path) -> None:
    sent: list[Message] = []
    answers = Answers()
    unclaimed = unclaimed_results(tmp_path, answers, sent, limit=2 * MIB + MIB // 2)

    for ident in range(1, 5):
        answer = OperationResult(1.5).message(ident, [bytes([ident]) * MIB])
        unclaimed.client_left([answer], {ident: (Kind.CALL_ONE, (1, f"step_{ident}"))})
        unclaimed._context.results.begin_anew()

    unclaimed.handlers[Kind.UNDELIVERED](Message(Kind.UNDELIVERED, 9, ()), 0.0)
    assert [call[2] for call in answers.listed] == ["step_1", "step_2", "step_3", "step_4"]
    for ident in range(1, 5):
        unclaimed.handlers[Kind.COLLECT](Message(Kind.COLLECT, 10 + ident, (ident,)), 0.0)
    assert [message.kind for message in sent] == [Kind.ERROR, Kind.ERROR, Kind.RESULT, Kind.RESULT]
    assert [bytes(message.parts[0][:1]) for message in sent[2:]] == [b"\3", b"\4"]
    error = OperationError.from_body(sent[0].body)
    assert (sent[0].id, error.code, error.rpc_ms) == (11, ResultDropped.code, 1.5)
    text = unpack_texts(sent[0].parts[0])["text"]
    assert text.startswith("the result of trainers.step_1.call_one(), 1,048,576 bytes, was not kept")


def test_small_results_are_not_dropped_for_large_ones(tmp_path: Path) -> None:
    sent: list[Message] = []
    unclaimed = unclaimed_results(tmp_path, Answers(), sent, limit=2 * MIB + MIB // 2)

    for ident, size in enumerate((10, MIB, 10, MIB, MIB, 10), 1):
        answer = OperationResult(1.5).message(ident, [bytes(size)])
        unclaimed.client_left([answer], {ident: (Kind.CALL_ONE, (1, "step"))})
        unclaimed._context.results.begin_anew()

    for ident in range(1, 7):
        unclaimed.handlers[Kind.COLLECT](Message(Kind.COLLECT, 10 + ident, (ident,)), 0.0)
    assert [message.id for message in sent if message.kind == Kind.ERROR] == [12]
