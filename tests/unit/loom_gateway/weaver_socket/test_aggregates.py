"""Aggregates of jobs: they say what their replicas say."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from loom_gateway.weaver_socket import replica_columns as module
from loom_gateway.weaver_socket.replica_columns import Aggregates, Roster
from tests.unit.loom_gateway.weaver_socket.replicas import info, reports


class Jobs:
    """A roster and the aggregates of it."""

    def __init__(self, *infos: dict[str, Any]) -> None:
        self.roster = Roster()
        self.aggregates = Aggregates(self.roster)
        self.at = 0
        self.describe(*infos)

    def describe(self, *infos: dict[str, Any]) -> None:
        self.at += 1
        for one in infos:
            self.roster.describe(one, self.at)

    def take(self, **replicas: dict[str, Any]) -> None:
        self.at += 1
        self.roster.take(reports(**replicas), self.at)

    async def since(self, at: int | None = None) -> dict[str, Any]:
        await self.aggregates.refresh(self.at)
        return {job: json.loads(text) for job, text in self.aggregates.since(at)}


@pytest.fixture(autouse=True)
def at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SHARE", math.inf)


async def test_an_aggregate_says_what_its_replicas_say() -> None:
    jobs = Jobs(
        info("a", session="s-1", step=4, step_time=1.0, metrics={"loss": 1.0}),
        info("b", session="s-1", step=7, step_time=2.0, metrics={"loss": 2.0}, connected=False),
        info("c", session="s-1", step=5, step_time=8.0, metrics={"loss": math.nan}),
        info("d", session="s-1", step=None, step_time=9.0, metrics={}, state="paused", max_step=200),
        info("e", session="s-1", step=9, step_time=9.0, metrics={"loss": 9.0}, state="failed"),
        info("f", group="idle", step=None, max_step=None, metrics={}, state="registering"),
    )

    assert await jobs.since() == {
        "train@s-1": {
            "group": "train",
            "session": "s-1",
            "user": "ann",
            "replicas": 5,
            "living": 4,
            "states": {"running": 3, "paused": 1, "failed": 1},
            "step": 9,
            "max_step": 200,
            "rate": 0.5,
            "loss": 1.5,
            "not_finite": 1,
        },
        "idle": {
            "group": "idle",
            "session": None,
            "user": "ann",
            "replicas": 1,
            "living": 1,
            "states": {"registering": 1},
            "step": None,
            "max_step": None,
            "rate": None,
            "loss": None,
            "not_finite": 0,
        },
    }


async def test_the_median_of_an_even_number_lies_between_the_two_in_the_middle() -> None:
    jobs = Jobs(*(info(f"r{pace}", step_time=pace) for pace in (1.0, 2.0, 6.0, 50.0)))

    assert (await jobs.since())["train"]["rate"] == 0.25


async def test_only_jobs_that_changed_come_and_one_that_is_gone_is_null() -> None:
    jobs = Jobs(info("a"), info("b", group="other"))
    await jobs.since()
    began = jobs.at
    jobs.take(a={"step": 2}, b={})

    assert list(await jobs.since(began)) == ["train"]
    assert await jobs.since(jobs.at) == {}
    jobs.at += 1
    jobs.roster.forget(["b"])
    assert await jobs.since(jobs.at - 1) == {"other": None}
    assert list(await jobs.since()) == ["train"]
    jobs.describe(info("b", group="other"))
    assert (await jobs.since(jobs.at - 1))["other"]["replicas"] == 1


async def test_jobs_that_are_gone_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GONE", 2)
    jobs = Jobs(*(info(f"r{number}", group=f"g{number}") for number in range(5)))
    await jobs.since()
    for number in range(4):
        jobs.roster.forget([f"r{number}"])
        await jobs.since()

    assert len(await jobs.since(0)) == 3


async def test_much_work_is_not_done_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(info("a"))
    monkeypatch.setattr(module, "MAX_SHARE", 1e-9)
    assert await jobs.aggregates.refresh(jobs.at)
    assert await jobs.aggregates.refresh(jobs.at)
    jobs.take(a={"step": 2})

    assert not await jobs.aggregates.refresh(jobs.at)
    assert [json.loads(text)["step"] for _, text in jobs.aggregates.since(None)] == [1]
