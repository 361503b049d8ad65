"""The inbox: each command is applied once, however often it comes."""

from __future__ import annotations

import threading

import pytest

from loom.control.commands import Acknowledged, Acknowledgement, Command, CommandKind
from loom.threadlet import inbox as module
from loom.threadlet.inbox import CommandInbox
from tests.unit.loom.threadlet.fake_weaver import BOUND


def command(ident: str, kind: CommandKind = CommandKind.UPDATE_CONFIG) -> Command:
    return Command(ident, kind, {})


def applied(ident: str) -> Acknowledged:
    return Acknowledged(ident, Acknowledgement(True, 1))


def test_commands_are_taken_in_the_order_they_came() -> None:
    inbox = CommandInbox()
    for ident in "abc":
        assert inbox.receive(command(ident)) is None

    assert [one.id for one in iter(inbox.pop, None)] == ["a", "b", "c"]
    assert not inbox.pending


def test_a_command_that_waits_or_is_being_applied_is_not_taken_again() -> None:
    inbox = CommandInbox()
    inbox.receive(command("a"))
    inbox.receive(command("a"))
    taken = inbox.pop()
    assert taken is not None

    assert inbox.receive(command("a")) is None
    assert inbox.pop() is None

    inbox.finish(applied("a"))
    assert inbox.receive(command("a")) == applied("a")
    assert inbox.pop() is None


def test_updates_can_be_left_where_they_are() -> None:
    inbox = CommandInbox()
    for ident, kind in (
        ("a", CommandKind.UPDATE_CONFIG),
        ("b", CommandKind.PAUSE),
        ("c", CommandKind.UPDATE_CONFIG),
    ):
        inbox.receive(command(ident, kind))

    assert inbox.pop(updates=False) == command("b", CommandKind.PAUSE)
    assert inbox.pop(updates=False) is None
    assert [one.id for one in inbox.pending] == ["a", "c"]


def test_so_many_answers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_APPLIED", 2)
    inbox = CommandInbox()
    for ident in "abc":
        inbox.receive(command(ident))
        inbox.pop()
        inbox.finish(applied(ident))

    assert inbox.applied() == ["b", "c"]
    assert inbox.receive(command("b")) is not None


def test_a_wait_ends_with_the_next_command_and_with_the_inbox() -> None:
    inbox = CommandInbox()
    ended: list[bool] = []

    def wait() -> None:
        arrived = inbox.arrived
        began.set()
        ended.append(inbox.wait(arrived))
        ended.append(inbox.wait(inbox.arrived))

    began = threading.Event()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert began.wait(BOUND)

    inbox.receive(command("a"))
    inbox.close()
    thread.join(BOUND)

    assert len(ended) == 2
    assert not ended[-1]
