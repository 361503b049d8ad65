"""What an exchange takes as a rule, which is a part of the step."""

from __future__ import annotations

from loom.train.loop.baseline import LEAST, REMEMBERED, TIMES, UsualTime


def test_nothing_is_usual_before_some_are_known() -> None:
    usual = UsualTime()

    for _ in range(LEAST - 1):
        usual.add(0.5)
    assert usual.seconds == 0.0
    usual.add(0.5)
    assert usual.seconds == TIMES * 0.5


def test_a_few_that_took_long_do_not_change_what_is_usual() -> None:
    usual = UsualTime()

    for number in range(REMEMBERED):
        usual.add(30.0 if number % 3 == 0 else 0.1)

    assert usual.seconds == TIMES * 0.1


def test_what_takes_long_for_ever_becomes_usual() -> None:
    usual = UsualTime()

    for seconds in (0.1, 0.2):
        for _ in range(REMEMBERED):
            usual.add(seconds)

    assert usual.seconds == TIMES * 0.2
