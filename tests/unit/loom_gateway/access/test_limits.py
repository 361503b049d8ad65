"""Counting how often something happens at an address, without remembering them all."""

from __future__ import annotations

import pytest

from loom_gateway.access.rate_limits import RateLimit, address_key


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_is_let_through_and_then_the_rate() -> None:
    clock = Clock()
    limit = RateLimit(burst=3, rate=0.5, clock=clock)

    for _ in range(3):
        assert limit.wait("a") == 0
        limit.count("a")
    assert limit.wait("a") == pytest.approx(2.0)
    clock.now += 1.5
    assert limit.wait("a") == pytest.approx(0.5)
    clock.now += 0.5
    assert limit.wait("a") == 0


def test_each_address_has_its_own_count() -> None:
    limit = RateLimit(burst=1, rate=1, clock=Clock())
    limit.count("a")

    assert limit.wait("a") > 0
    assert limit.wait("b") == 0


def test_counting_while_refused_does_not_make_the_wait_longer() -> None:
    limit = RateLimit(burst=1, rate=1, clock=Clock())
    for _ in range(100):
        limit.count("a")

    assert limit.wait("a") == pytest.approx(1.0)


def test_it_remembers_a_bounded_number_of_addresses() -> None:
    limit = RateLimit(burst=2, rate=0.001, addresses=100, clock=Clock())
    for number in range(10_000):
        limit.count(f"address {number}")
        limit.count("the one that comes all the time")
        limit.count("the one that comes all the time")

    assert len(limit) == 100
    assert limit.wait("the one that comes all the time") > 0


def test_no_burst_is_no_limit() -> None:
    limit = RateLimit(burst=0, rate=0)
    limit.count("a")

    assert limit.wait("a") == 0
    assert len(limit) == 0


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("10.0.0.5", "10.0.0.5"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("", ""),
        ("a socket", "a socket"),
    ],
)
def test_an_ipv6_network_counts_as_one_address(host: str, key: str) -> None:
    assert address_key(host) == key
