"""Two users of one gateway at once: each works at random, and tries every name, session and token of the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loom_proxy.local import LocalCluster
from tests.support.two_users import Person
from tests.support.users import House


@pytest.fixture(scope="module")
def house(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    # The wrong tokens and the requests of this test would be too many.
    limits = ["--login-failures", "0", "--connection-rate", "0"]
    made = House(list(cluster.workers), tmp_path_factory.mktemp("two-users"), *limits)
    yield made
    made.gateway.close()


def live_together(house: House, seed: int, seconds: float) -> list[Person]:
    """Let two users work for so long. Raise what one of them saw or lost."""
    ann, bob = persons = [Person(house, user, seed, seconds) for user in ("ann", "bob")]
    ann.meet(bob)
    bob.meet(ann)
    for person in persons:
        person.begin()
    for person in persons:
        person.start()
    for person in persons:
        person.join(seconds + 120)
        assert not person.is_alive(), f"{person.user} hangs; done so far: {person.counts}"
        person.end()
    for person in persons:
        if person.failure is not None:
            raise person.failure
    return persons


def check_audit(house: House, persons: list[Person]) -> None:
    """Check that neither user has ever come into, or changed, a session of the other's."""
    for person, other in (persons, persons[::-1]):
        for line in house.audit(user=person.user):
            if line["event"] != "refused" and line.get("status", 200) < 300:
                assert line.get("session") not in other.names, line
        assert house.audit(event="refused", user=person.user, code="unknown_session"), person.counts


def test_two_users_see_and_change_nothing_of_each_others(house: House) -> None:
    persons = live_together(house, seed=21, seconds=8)

    assert all(sum(person.counts.values()) > 10 for person in persons), [person.counts for person in persons]
    check_audit(house, persons)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_users_see_and_change_nothing_of_each_others_for_minutes(house: House) -> None:
    persons = live_together(house, seed=22, seconds=300)

    assert all(len(person.counts) == 11 for person in persons), [person.counts for person in persons]
    check_audit(house, persons)
