"""Which session host the weaver lets have a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from loom.control.operations import LEASE, HoldSessions, TakeSessions
from loom.errors import Conflict, WrongState
from loom.weaver.keys import EVERYONE
from loom.weaver.server import session_leases
from loom.weaver.server.session_leases import SLACK, SessionLeases
from tests.unit.loom.weaver.running import running


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_host_that_speaks_keeps_its_sessions(clock: Clock) -> None:
    leases = SessionLeases(clock)
    clock.now += LEASE + SLACK
    assert leases.hold(HoldSessions("a", ["s"])) == []
    clock.now += LEASE
    with pytest.raises(WrongState, match="host a may live: it has been silent for 10"):
        leases.take(TakeSessions("b", "a", ["s"]))
    clock.now += SLACK
    assert leases.take(TakeSessions("b", "a", ["s"])) == ["s"]
    assert leases.hold(HoldSessions("a", ["s", "t"])) == ["s"]
    assert leases.hold(HoldSessions("b", ["s"])) == []


def test_a_session_goes_to_one_host_which_may_ask_again(clock: Clock) -> None:
    leases = SessionLeases(clock)
    clock.now += LEASE + SLACK
    assert leases.take(TakeSessions("b", "a", ["s"])) == ["s"]
    assert leases.take(TakeSessions("c", "a", ["s", "t"])) == ["t"]
    assert leases.take(TakeSessions("b", "a", ["s"])) == ["s"]
    # With b gone it is c's, and with c gone its first host's again.
    assert leases.take(TakeSessions("c", "b", ["s"])) == ["s"]
    assert leases.take(TakeSessions("a", "c", ["s"])) == ["s"]
    assert leases.hold(HoldSessions("a", ["s"])) == []


def test_a_weaver_that_starts_or_was_held_up_counts_from_then(clock: Clock) -> None:
    leases = SessionLeases(clock)
    clock.now += LEASE
    with pytest.raises(WrongState):
        leases.take(TakeSessions("b", "a", ["s"]))
    leases.hold(HoldSessions("a", []))
    clock.now += 60
    leases.note_held_up(55)
    with pytest.raises(WrongState, match=r"silent for 5\.0 s"):
        leases.take(TakeSessions("b", "a", ["s"]))


def test_the_next_weaver_knows_who_has_what(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "moved.json"
    leases = SessionLeases(clock, path)
    clock.now += LEASE + SLACK
    leases.take(TakeSessions("b", "a", ["s"]))
    assert SessionLeases(clock, path).hold(HoldSessions("a", ["s"])) == ["s"]


def test_what_another_weaver_decides_is_given_to_nobody(clock: Clock, tmp_path: Path) -> None:
    def check() -> None:
        raise Conflict("another weaver has the folder")

    leases = SessionLeases(clock, tmp_path / "moved.json", check)
    clock.now += LEASE + SLACK
    with pytest.raises(Conflict):
        leases.take(TakeSessions("b", "a", ["s"]))
    assert leases.hold(HoldSessions("a", ["s"])) == []


def test_the_first_moves_are_forgotten_beyond_the_bound(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_leases, "MOST_TAKEN", 2)
    leases = SessionLeases(clock)
    clock.now += LEASE + SLACK
    leases.take(TakeSessions("b", "a", ["s", "t", "u"]))
    assert leases.hold(HoldSessions("a", ["s", "t", "u"])) == ["t", "u"]


async def test_session_hosts_ask_with_the_gateways_key() -> None:
    async with running() as weaver:
        assert await weaver.client.ask_for(HoldSessions("a", ["s"]), user=EVERYONE) == []
        with pytest.raises(WrongState, match="may live"):
            await weaver.client.ask_for(TakeSessions("b", "a", ["s"]), user=EVERYONE)
