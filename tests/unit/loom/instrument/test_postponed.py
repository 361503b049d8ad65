"""Commands that a library carries out later than at the boundary at which they come."""

from __future__ import annotations

from loom.instrument.postponed import Postponed
from loom.threadlet.handlers import Settlement


def test_an_action_is_applied_at_the_step_at_which_it_was_done() -> None:
    postponed = Postponed()
    first, second = postponed.ask("save"), postponed.ask("save")
    assert postponed.wanted("save")

    postponed.done("save")
    assert not postponed.wanted("save")
    assert first.verdict is None
    postponed.settle(7, "passed over")

    assert first is second
    assert first.verdict == Settlement(7)


def test_an_action_that_the_library_has_passed_over_is_refused() -> None:
    postponed = Postponed()
    saved, evaluated = postponed.ask("save"), postponed.ask("evaluate")

    postponed.done("evaluate")
    postponed.settle(7, "passed over")

    assert saved.verdict == Settlement(None, "passed over")
    assert evaluated.verdict == Settlement(7)
    assert not postponed.wanted("save")


def test_an_action_that_has_failed_is_refused_with_its_reason() -> None:
    postponed = Postponed()
    saved = postponed.ask("save")

    postponed.refuse("save", "the disk is full")
    postponed.refuse("save", "again")
    postponed.settle(7)

    assert saved.verdict == Settlement(None, "the disk is full")


def test_a_value_is_applied_when_it_fits() -> None:
    postponed, batches, applied = Postponed(), [4], list[int]()
    changed = postponed.change("accumulation", lambda: batches[0] % 3 == 0, lambda: applied.append(3))

    postponed.look(2)
    assert (changed.verdict, applied) == (None, [])
    batches[0] = 6
    postponed.look(3)
    postponed.look(4)

    assert (changed.verdict, applied) == (Settlement(3), [3])


def test_a_later_value_takes_the_place_of_one_that_waits_and_the_end_refuses_the_rest() -> None:
    postponed = Postponed()
    first = postponed.change("accumulation", lambda: False, lambda: None)
    second = postponed.change("accumulation", lambda: False, lambda: None)
    saved = postponed.ask("save")

    postponed.close(9)

    assert first.verdict == Settlement(None, "a later value took its place")
    assert second.verdict == saved.verdict == Settlement(None, "the training ended before that")
