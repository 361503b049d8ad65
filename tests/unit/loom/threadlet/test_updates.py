"""How updates of the configuration apply in a training, and are answered."""

from __future__ import annotations

import enum
import threading

import pytest

from loom.errors import WrongArguments
from loom.threadlet import Deferred, Threadlet
from tests.unit.loom.threadlet.fake_weaver import (
    OK,
    FakeWeaver,
    Make,
    come,
    told,
)


class Schedule(enum.Enum):
    COSINE = "cos"


def test_an_update_applies_at_the_boundary_and_is_answered(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet(config={"learning_rate": 0.1})
    got: list[float] = []

    @made.handler("learning_rate")
    def handle(value: float) -> None:
        got.append(value)

    connection, _ = weaver.welcome()
    made.publish_status(step=3)
    ident = weaver.command(connection, "update_config", learning_rate="0.002")
    come(made)
    assert got == []

    assert made.check_and_apply_updates()

    assert got == [0.002]
    assert connection.ack(ident) == [
        3,
        {"ok": True, "reason": None, "changes": {"learning_rate": {"old": 0.1, "new": 0.002}}, "refused": {}},
    ]
    assert not made.check_and_apply_updates()


def test_many_updates_apply_in_order_each_answered(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    got: list[int] = []
    made.handler("n")(lambda value: got.append(value))
    connection, _ = weaver.welcome()
    idents = [weaver.command(connection, "update_config", n=number) for number in range(50)]
    come(made, 50)

    made.check_and_apply_updates()

    assert got == list(range(50))
    answers = [connection.ack(ident)[1]["changes"]["n"] for ident in idents]
    assert answers == [{"old": number - 1 if number else None, "new": number} for number in range(50)]


def test_of_an_update_each_key_is_applied_or_refused(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()

    @made.handler("schedule")
    def schedule(value: Schedule) -> None: ...

    @made.handler("batch_size")
    def batch_size(value: int) -> None:
        raise ValueError("it does not divide 64")

    @made.handler("dropout")
    def dropout(value: float) -> None: ...

    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "update_config", schedule="cos", batch_size=48, dropout="x", lr=1)
    come(made)
    made.check_and_apply_updates()

    step, answer = connection.ack(ident)
    assert step is None
    assert not answer["ok"]
    assert answer["changes"] == {"schedule": {"old": None, "new": "COSINE"}}
    assert answer["refused"] == {
        "batch_size": "batch_size: the handler raised ValueError: it does not divide 64",
        "dropout": "dropout: 'x' is not of type float",
        "lr": "lr: no handler for it in this replica; it has handlers for: batch_size, dropout, schedule",
    }
    assert all(text in answer["reason"] for text in answer["refused"].values())


class Deferring:
    """Handlers that accept values and apply them later."""

    def __init__(self, threadlet: Threadlet, *keys: str) -> None:
        self.accepted: dict[str, Deferred] = {}
        for key in keys:
            threadlet.handler(key)(lambda value, key=key: self.accept(key))

    def accept(self, key: str) -> Deferred:
        self.accepted[key] = Deferred()
        return self.accepted[key]


def test_a_deferred_value_is_answered_when_it_applies_with_that_step(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet(config={"lr": 0.1})
    later = Deferring(made, "lr")
    connection, _ = weaver.welcome()
    made.publish_status(step=3)
    deferred = weaver.command(connection, "update_config", lr=0.2)
    after = weaver.command(connection, "resume")
    come(made, 2)
    made.check_and_apply_updates()
    assert connection.expect("ack")[1] == after  # and not the one before, which nobody has applied

    later.accepted["lr"].applied(5)
    later.accepted["lr"].refuse("the first verdict counts")

    changes = {"lr": {"old": 0.1, "new": 0.2}}
    assert connection.ack(deferred) == [5, {"ok": True, "reason": None, "changes": changes, "refused": {}}]


def test_an_update_is_answered_when_all_its_deferred_values_are_decided(
    weaver: FakeWeaver, threadlet: Make
) -> None:
    made = threadlet()
    later = Deferring(made, "lr", "clip")
    made.handler("batch")(lambda value: None)
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "update_config", lr=0.2, clip=1.0, batch=8)
    come(made)
    made.check_and_apply_updates()

    later.accepted["clip"].refuse("another one was taken")
    later.accepted["lr"].applied(7)

    step, answer = connection.ack(ident)
    assert step == 7
    assert answer == {
        "ok": False,
        "reason": "clip: another one was taken",
        "changes": {"batch": {"old": None, "new": 8}, "lr": {"old": None, "new": 0.2}},
        "refused": {"clip": "clip: another one was taken"},
    }


def test_a_deferred_value_may_be_decided_before_the_handler_returns(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()

    @made.handler("lr")
    def handle(value: float) -> Deferred:
        known = Deferred()
        known.applied(2)
        return known

    connection, _ = weaver.welcome()
    made.publish_status(step=9)
    ident = weaver.command(connection, "update_config", lr=0.2)
    come(made)
    made.check_and_apply_updates()

    assert connection.ack(ident)[0] == 2


def test_a_value_that_is_never_applied_is_refused_at_the_end(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    Deferring(made, "lr")
    connection, _ = weaver.welcome()
    made.publish_status(step=3)
    ident = weaver.command(connection, "update_config", lr=0.2)
    come(made)
    made.check_and_apply_updates()

    closing = threading.Thread(target=made.close)
    closing.start()

    step, answer = connection.ack(ident)
    assert step == 3
    assert not answer["ok"]
    assert answer["refused"] == {"lr": "lr: the training ended before it was applied"}
    closing.join()


def test_the_old_value_is_the_one_published_last(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet(config={"lr": 0.1})
    made.handler("lr")(lambda value: None)
    connection, _ = weaver.welcome()
    made.publish_status(step=1, config={"lr": 0.05})
    ident = weaver.command(connection, "update_config", lr=0.2)
    come(made)
    made.check_and_apply_updates()

    assert connection.ack(ident)[1]["changes"] == {"lr": {"old": 0.05, "new": 0.2}}


def test_commands_can_be_taken_as_dicts(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet(config={"lr": 0.1})
    connection, _ = weaver.welcome()
    first = weaver.command(connection, "update_config", lr="0.2")
    pause = weaver.command(connection, "pause")
    second = weaver.command(connection, "update_config", lr=0.3, n=1)
    come(made, 3)

    assert made.get_config_update() == told("update_config", lr="0.2")
    assert not made.paused
    assert made.get_config_update() == told("pause")
    assert made.paused
    assert made.get_config_update() == told("update_config", lr=0.3, n=1)
    assert made.get_config_update() is None

    assert connection.ack(first)[1]["changes"] == {"lr": {"old": 0.1, "new": "0.2"}}
    assert connection.ack(second)[1] == {
        "ok": True,
        "reason": None,
        "changes": {"lr": {"old": "0.2", "new": 0.3}, "n": {"old": None, "new": 1}},
        "refused": {},
        "taken": ["lr", "n"],
    }
    assert connection.ack(pause) == [None, OK]  # the program waits: it asks again and again


def test_a_handler_may_look_for_updates_itself(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    got: list[int] = []

    @made.handler("n")
    def handle(value: int) -> None:
        got.append(value)
        made.check_and_apply_updates()

    connection, _ = weaver.welcome()
    idents = [weaver.command(connection, "update_config", n=number) for number in range(3)]
    come(made, 3)
    made.check_and_apply_updates()

    assert got == [0, 1, 2]
    assert {connection.expect("ack")[1] for _ in idents} == set(idents)


def test_an_interrupt_in_a_handler_ends_the_training_and_is_answered(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()

    @made.handler("n")
    def handle(value: int) -> None:
        raise KeyboardInterrupt("by hand")

    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "update_config", n=1)
    come(made)

    with pytest.raises(KeyboardInterrupt):
        made.check_and_apply_updates()
    assert connection.ack(ident)[1]["reason"] == "the training was interrupted: KeyboardInterrupt: by hand"


def test_a_handler_that_cannot_be_one_is_refused_where_it_is_made() -> None:
    made = Threadlet()
    with pytest.raises(WrongArguments):

        @made.handler("n")
        def handle(value: bytes) -> None: ...


def test_an_unknown_command_is_answered(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "dance")

    assert not made._pending
    assert connection.ack(ident)[1] == OK | {"ok": False, "reason": "this replica knows no command 'dance'"}


def test_a_loop_that_only_asks_whether_it_is_paused_has_updates_applied(
    weaver: FakeWeaver, threadlet: Make
) -> None:
    made = threadlet()
    got: list[int] = []
    made.handler("n")(lambda value: got.append(value))
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "update_config", n=1)
    come(made)

    made.wait_while_paused()

    assert got == [1]
    assert connection.ack(ident)[1]["ok"]
