"""The text of a profile: what is counted, in which order, and what is left out."""

from __future__ import annotations

from loom.control.profiles import FoldedStacks


def test_the_most_frequent_stack_is_the_first() -> None:
    stacks = FoldedStacks()
    for stack in ("a;b", "a;c", "a;c"):
        stacks.add(stack)

    assert stacks.text == "a;c 2\na;b 1\n"
    assert (stacks.samples, stacks.left_out) == (3, 0)


def test_stacks_without_room_are_counted_and_known_ones_go_on() -> None:
    stacks = FoldedStacks(most=30)
    for stack in ("short", "one;that;is;too;long", "short"):
        stacks.add(stack)

    assert stacks.text == "short 2\n"
    assert stacks.left_out == 1


def test_lines_are_read_and_others_ignored() -> None:
    stacks = FoldedStacks()
    stacks.add_lines(["main (a b.py:1);train (c.py:2) 12", "", "no number", "a -1", "a 12345678901", " 3"])

    assert stacks.text == "main (a b.py:1);train (c.py:2) 12\n"
