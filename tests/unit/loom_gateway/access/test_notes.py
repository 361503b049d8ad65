"""Notes: each is taken once, is over after its time, and all have a bound."""

from __future__ import annotations

import pytest

from loom.errors import TooLarge
from loom_gateway.access.notes import MAX_NOTE, MAX_NOTES, Notes


async def test_a_note_is_taken_once_within_its_time() -> None:
    now = 0.0
    notes = Notes(lambda: now)
    await notes.put("code", "a", 1, 60.0)
    await notes.put("code", "b", 2, 60.0)

    assert await notes.take("count", "a") is None
    assert await notes.take("code", "a") == 1
    assert await notes.take("code", "a") is None
    now = 60.0
    assert await notes.take("code", "b") is None


async def test_who_asks_again_gets_what_has_come_since() -> None:
    now = 0.0
    notes = Notes(lambda: now)
    for number in range(3):
        await notes.put("count", f"{number}", number, 60.0)
    (_, first, _) = notes.after(0)
    await notes.put("count", "0", 7, 90.0)

    assert [note.value for note in notes.after(first.number)] == [2, 7]
    now = 60.0
    assert [note.value for note in notes.after(0)] == [7]


@pytest.mark.guarantees(
    "strangers", "What gateways note on a session host is bounded, and one topic displaces no other"
)
async def test_the_oldest_of_a_topic_make_room() -> None:
    notes = Notes()
    await notes.put("signed out", "a", 1.0, 60.0)
    size = MAX_NOTE - 1000
    for number in range(MAX_NOTES // size + 1):
        await notes.put("count", f"{number}", bytes(size), 60.0)

    assert await notes.take("count", "0") is None
    assert await notes.take("count", "1") is not None
    assert await notes.take("signed out", "a") == 1.0
    with pytest.raises(TooLarge, match="over the limit"):
        await notes.put("count", "x", bytes(MAX_NOTE), 60.0)
