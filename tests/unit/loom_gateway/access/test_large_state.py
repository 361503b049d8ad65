"""No route holds the event loop that relays for longer because there are more sessions or replicas."""

from __future__ import annotations

import pytest

from loom.process import tasks
from loom_gateway.weaver_socket import page_feed
from tests.benchmarks.routes import READS, SNAPSHOT, large_house, most_calls

FEW = 20

CHEAP = 8
"""Calls for each session or replica in one round: a look at whose it is, and not its description."""


@pytest.mark.parametrize("many", [120, pytest.param(220, marks=pytest.mark.slow)])
async def test_more_sessions_and_replicas_make_no_round_much_longer(
    monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    monkeypatch.setattr(tasks, "TURN", 0.0)
    monkeypatch.setattr(page_feed, "SESSIONS_EVERY", 0.05)
    calls: dict[str, list[int]] = {}
    for count in (FEW, many):
        async with large_house(sessions=count, replicas=count) as house:
            for name in (*READS, SNAPSHOT):
                await most_calls(house, name)  # what happens once in a process
                calls.setdefault(name, []).append(await most_calls(house, name))

    grown = {name: most - least for name, (least, most) in calls.items()}
    assert len(grown) > 25
    assert {name: more for name, more in grown.items() if more > CHEAP * (many - FEW)} == {}
