"""Challenges over HTTP are used once, and not for long, and a flood of them stays bounded."""

from __future__ import annotations

import pytest

from loom.mutual_auth import Exchange, Purpose, Side, new_nonce, over_http
from loom.mutual_auth.over_http import CHALLENGE_HEADER, LIFETIME, NONCE_HEADER, PROOF_HEADER, Challenges

KEY, REQUEST = "the key", ("GET", "127.0.0.1:1", "/pod")


def proven(challenge: str, key: str = KEY) -> dict[str, str]:
    exchange = Exchange(Purpose.POD, key, new_nonce(), challenge)
    return {
        CHALLENGE_HEADER: challenge,
        NONCE_HEADER: exchange.asking,
        PROOF_HEADER: exchange.proof(Side.ASKS, *REQUEST),
    }


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.guarantees(
    "ports", "A request between pods or training groups that was overheard is refused when it is sent again"
)
def test_a_challenge_is_good_for_one_request() -> None:
    challenges = Challenges(Purpose.POD)
    headers = proven(challenges.new())

    assert challenges.check(KEY, headers, *REQUEST) is not None
    assert challenges.check(KEY, headers, *REQUEST) is None
    assert len(challenges) == 0


def test_a_challenge_that_was_tried_with_a_wrong_key_is_used_up() -> None:
    challenges = Challenges(Purpose.POD)
    challenge = challenges.new()

    assert challenges.check(KEY, proven(challenge, "wrong"), *REQUEST) is None
    assert challenges.check(KEY, proven(challenge), *REQUEST) is None


def test_a_challenge_is_not_good_for_long() -> None:
    clock = Clock()
    challenges = Challenges(Purpose.POD, clock)
    early, late = challenges.new(), challenges.new()

    clock.now += LIFETIME - 0.1
    assert challenges.check(KEY, proven(early), *REQUEST) is not None
    clock.now += 0.2
    assert challenges.check(KEY, proven(late), *REQUEST) is None


def test_nobody_makes_a_challenge_up_or_uses_another_ones() -> None:
    challenges, others = Challenges(Purpose.POD), Challenges(Purpose.POD)

    assert challenges.check(KEY, proven(new_nonce()), *REQUEST) is None
    assert challenges.check(KEY, proven(others.new()), *REQUEST) is None
    assert challenges.check(KEY, {}, *REQUEST) is None


def test_a_flood_of_challenges_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_http, "MOST", 10)
    challenges = Challenges(Purpose.POD)
    first = challenges.new()
    for _ in range(100):
        last = challenges.new()

    assert len(challenges) == 10
    assert challenges.check(KEY, proven(first), *REQUEST) is None
    assert challenges.check(KEY, proven(last), *REQUEST) is not None
