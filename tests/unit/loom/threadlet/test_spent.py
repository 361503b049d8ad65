"""What a training spends its time on: by a clock of the test's own, and once told over a link."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from loom.control.handshake import PROTOCOL
from loom.control.reports import MAX_REASONS, TimeAccount
from loom.errors import WrongArguments
from loom.threadlet import Threadlet, time_accounting
from loom.threadlet import step as module
from tests.unit.loom.threadlet.fake_weaver import FakeWeaver

Make = Callable[..., Threadlet]


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time_accounting, "monotonic", made)
    monkeypatch.setattr(module, "monotonic", made)
    return made


@pytest.fixture
def t(clock: Clock) -> Threadlet:
    """A threadlet without a weaver, at the beginning of its time."""
    return Threadlet("train_0", weaver="", devices=[])


def told(threadlet: Threadlet) -> TimeAccount:
    """Its account as it is read, the reasons for which nothing was spent left out."""
    found = threadlet._account()
    by_reason = {reason: round(seconds, 6) for reason, seconds in found.by_reason.items() if seconds > 1e-9}
    return TimeAccount(found.seconds, found.first_at, found.first, found.highest, round(found.open, 6), by_reason)


def test_time_in_steps_is_useful(clock: Clock, t: Threadlet) -> None:
    clock.passes(5)
    for number in (7, 8, 9):
        with t.step(number):
            clock.passes(2)
        clock.passes(1)

    assert told(t) == TimeAccount(14.0, 5.0, 7, 9, 0.0, {"waiting": 5.0, "compute": 6.0})


def test_before_the_first_step_it_waits(clock: Clock, t: Threadlet) -> None:
    clock.passes(1)
    with t.spent("checkpoint"):
        clock.passes(2)
    clock.passes(1)

    assert told(t) == TimeAccount(4.0, None, None, None, 0.0, {"waiting": 2.0, "checkpoint": 2.0})


def test_a_step_that_is_being_made_is_told_apart(clock: Clock, t: Threadlet) -> None:
    clock.passes(1)
    with t.step(1):
        clock.passes(2)
        assert told(t) == TimeAccount(3.0, 1.0, None, None, 2.0, {"waiting": 1.0})
    with t.step(2):
        clock.passes(3)
        assert told(t) == TimeAccount(6.0, 1.0, 1, 1, 3.0, {"waiting": 1.0, "compute": 2.0})


def test_a_step_that_was_made_before_is_lost(clock: Clock, t: Threadlet) -> None:
    for number in (1, 2, 3, 2, 3, 4):
        with t.step(number):
            clock.passes(1)

    assert told(t) == TimeAccount(6.0, 0.0, 1, 4, 0.0, {"compute": 4.0, "lost": 2.0})


def test_a_step_that_raises_is_lost_and_may_be_made_again(clock: Clock, t: Threadlet) -> None:
    with t.step(1):
        clock.passes(1)
    with contextlib.suppress(ZeroDivisionError), t.step(2):
        clock.passes(2)
        1 / 0
    with t.step(2):
        clock.passes(4)

    assert told(t) == TimeAccount(7.0, 0.0, 1, 2, 0.0, {"compute": 5.0, "lost": 2.0})


def test_other_time_in_a_step_is_not_the_steps(clock: Clock, t: Threadlet) -> None:
    with t.step(1):
        clock.passes(1)
        with t.spent("waiting"):
            clock.passes(2)
            with t.spent("checkpoint"):
                clock.passes(4)
                assert told(t) == TimeAccount(7.0, 0.0, None, None, 1.0, {"waiting": 2.0, "checkpoint": 4.0})
            clock.passes(8)
        clock.passes(16)
    with t.step(2):
        clock.passes(1)

    assert told(t) == TimeAccount(32.0, 14.0, 1, 2, 0.0, {"compute": 18.0, "waiting": 10.0, "checkpoint": 4.0})


def test_what_is_usual_belongs_to_the_step(clock: Clock, t: Threadlet) -> None:
    with t.step(1):
        clock.passes(1)
        with t.spent("waiting", beyond=3):
            clock.passes(2)
            assert told(t) == TimeAccount(3.0, 0.0, None, None, 3.0, {})
        with t.spent("waiting", beyond=3):
            clock.passes(8)
            assert told(t) == TimeAccount(11.0, 0.0, None, None, 6.0, {"waiting": 5.0})
        clock.passes(16)

    assert told(t) == TimeAccount(27.0, 5.0, 1, 1, 0.0, {"compute": 22.0, "waiting": 5.0})


def test_a_block_within_one_of_which_a_part_is_usual(clock: Clock, t: Threadlet) -> None:
    with t.step(1), t.spent("waiting", beyond=3):
        clock.passes(2)
        with t.spent("checkpoint"):
            clock.passes(4)
        clock.passes(2)

    assert told(t).by_reason == {"compute": 3.0, "waiting": 1.0, "checkpoint": 4.0}


def test_what_is_discarded_is_lost(clock: Clock, t: Threadlet) -> None:
    with t.step(1):
        clock.passes(1)
    with t.step(2) as step:
        clock.passes(2)
        with t.spent("waiting"):
            clock.passes(4)
        step.discard()
        clock.passes(8)
        with t.spent("checkpoint"):
            clock.passes(16)
            step.discard()
            clock.passes(32)
        clock.passes(64)

    assert told(t) == TimeAccount(
        127.0, 0.0, 1, 2, 0.0, {"compute": 65.0, "lost": 10.0, "waiting": 4.0, "checkpoint": 48.0}
    )


def test_what_is_discarded_before_the_first_step_is_a_wait_for_it(clock: Clock, t: Threadlet) -> None:
    with t.step(1) as step:
        clock.passes(2)
        step.discard()
        clock.passes(1)

    assert told(t) == TimeAccount(3.0, 2.0, 1, 1, 0.0, {"waiting": 2.0, "compute": 1.0})


def test_other_time_that_raises_is_counted(clock: Clock, t: Threadlet) -> None:
    with t.step(1):
        pass
    with contextlib.suppress(ZeroDivisionError), t.spent("evaluation"):
        clock.passes(3)
        1 / 0

    assert told(t).by_reason == {"evaluation": 3.0}


def test_a_loop_without_steps_makes_them_from_its_first_report_on(clock: Clock, t: Threadlet) -> None:
    clock.passes(2)
    assert told(t).by_reason == {"waiting": 2.0}
    t.publish_status(step=10)
    assert told(t).first_at == 2.0

    clock.passes(3)
    with t.spent("checkpoint"):
        clock.passes(1)
    t.publish_status(step=15)

    assert told(t) == TimeAccount(6.0, 2.0, 10, 15, 0.0, {"waiting": 2.0, "compute": 3.0, "checkpoint": 1.0})


@pytest.mark.parametrize("number", [None, "7", 1.5, -3, 1 << 60, object()])
def test_the_number_of_a_step_may_be_anything(clock: Clock, t: Threadlet, number: Any) -> None:
    for _ in range(2):
        with t.step(number):
            clock.passes(1)

    assert sum(told(t).by_reason.values()) == 2.0


def test_many_reasons_are_one(clock: Clock, t: Threadlet) -> None:
    for number in range(MAX_REASONS + 5):
        with t.spent(f"reason {number}"):
            clock.passes(1)

    spent = told(t).by_reason
    assert len(spent) == MAX_REASONS + 1
    assert spent["other"] == 5.0


@pytest.mark.parametrize("reason", ["", "a\n", "a" * 41, None, "compute", "idle", "detection"])
def test_a_reason_has_to_be_a_short_text_that_is_free(t: Threadlet, reason: Any) -> None:
    with pytest.raises(WrongArguments):
        t.spent(reason)


@pytest.mark.parametrize("beyond", [-1, float("nan"), float("inf"), "1", None, True])
def test_what_is_usual_is_a_number_of_seconds(t: Threadlet, beyond: Any) -> None:
    with pytest.raises(WrongArguments, match="beyond is a number of seconds"):
        t.spent("waiting", beyond)


# -- over a link --------------------------------------------------------------------------------------------


def test_it_is_told_with_heartbeats_and_at_the_end(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.accept()
    connection.send("welcome", {"protocol": PROTOCOL, "beat": 60.0, "weaver": "w", "seq": 0, "spent": True})
    connection.expect("beat")
    assert TimeAccount.from_body(connection.expect("spent")).highest is None
    with made.step(1):
        pass
    connection.expect("status")
    connection.send("stored", 1)

    made.close()

    assert TimeAccount.from_body(connection.expect("spent")).highest == 1
    assert connection.expect("bye")


def test_a_weaver_that_does_not_ask_is_not_told(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    with made.step(1):
        pass
    connection.expect("status")
    connection.expect("beat")
    connection.send("stored", 1)

    made.close()

    connection.expect("bye")
    assert "spent" not in [frame[0] for frame in connection.skipped]
