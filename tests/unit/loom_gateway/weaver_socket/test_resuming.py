"""What a page says of its lost socket, and the messages that are kept for it."""

from __future__ import annotations

import pytest

from loom_gateway.weaver_socket import subscribers
from loom_gateway.weaver_socket.subscribers import KeptMessages, Since


@pytest.mark.parametrize(
    ("text", "since"),
    [
        ("0a1b.17", Since("0a1b", 17)),
        ("0a1b.0", Since("0a1b", 0)),
        (None, None),
        ("", None),
        ("17", None),
        ("0a1b.-1", None),
        ("0a1b.1.2", None),
        ("0a1b.\u0663", None),
        ("no hex.1", None),
        ("0a1b." + "9" * 5000, None),
    ],
)
def test_an_address_says_what_came_last(text: str | None, since: Since | None) -> None:
    assert Since.read(text) == since


def test_the_messages_after_a_position_are_kept() -> None:
    kept = KeptMessages()
    kept.begin(3)
    for at in (4, 6, 7):
        kept.add(at, f"message {at}")

    assert kept.begins == 3
    assert list(kept.after(4)) == [(6, "message 6"), (7, "message 7")]
    assert list(kept.after(7)) == []


@pytest.mark.guarantees(
    "page data",
    "A page's subscription, its frames' rate, what is kept for resuming and a feed without pages are bounded",
)
def test_what_is_kept_is_bounded_by_number_and_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribers, "MAX_MESSAGES", 3)
    monkeypatch.setattr(subscribers, "MAX_SIZE", 20)
    kept = KeptMessages()
    for at in range(1, 6):
        kept.add(at, "text")
    assert (kept.begins, [at for at, _ in kept.after(0)]) == (2, [3, 4, 5])

    kept.add(6, "x" * 15)
    assert (kept.begins, [at for at, _ in kept.after(0)]) == (4, [5, 6])
    kept.add(7, "x" * 100)
    assert (kept.begins, list(kept.after(0))) == (7, [])
