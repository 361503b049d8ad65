"""Runs whose task answers prompts by a coroutine of its own: in several turns, with a tool between them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.rl import Arithmetic, Characters, Generators, Orchestrator, RolloutStore, Trainers
from loom.rl.arithmetic import arithmetic_model
from loom.rl.prompts import Prompt
from loom.rl.task import RolloutPolicy
from tests.system.rl.runs import FINISHED_IN_TIME, WatchedRun, assert_exact

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BATCH, GROUP = 32, 8


class WithATool(Arithmetic):
    """The shipped task: the model writes a digit, a tool adds another one, and the model goes on."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._seen = folder / "seen.jsonl"

    async def rollout(self, prompt: Prompt, policy: RolloutPolicy) -> str:
        first = await policy.complete(prompt.content, max_tokens=1)
        if not first.text:  # the end, or padding, which an untrained model may draw
            return first.text
        digit = await asyncio.to_thread(lambda: str(len(first.text)))
        before = [*first.prompt_tokens, *first.tokens, *Characters().encode(digit)]
        second = await policy.complete(before)
        line = {"prompt": prompt.text, "turns": [first.text, digit, second.text]}
        with self._seen.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return first.text + digit + second.text


def orchestrator(folder: Path, steps: int, generators: int) -> Orchestrator:
    return Orchestrator(
        WithATool(folder),
        Generators(arithmetic_model, Characters(), count=generators, max_tokens=3),
        Trainers(arithmetic_model, Characters()),
        folder=folder,
        steps=steps,
        batch=BATCH,
        group=GROUP,
    )


def seen(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]


class MultiTurnRun(WatchedRun):
    def __init__(self, job: loom.Job, folder: Path, steps: int) -> None:
        self.job = job
        self.folder = folder
        self.run = job.run(orchestrator(folder, steps, generators=2).run, detach=True, name="rl")


def test_turns_are_drawn_from_a_pool_that_loses_a_generator(job: loom.Job, tmp_path: Path) -> None:
    run = MultiTurnRun(job, tmp_path, steps=8)
    run.await_step(1)
    run.kill_generator()
    summary = run.result()

    assert_exact(summary, 8)
    assert summary.lost_generators == 1
    assert {(one.rollouts + one.dropped, one.failed) for one in summary.steps} == {(BATCH, 0)}
    assert 0 < len(seen(tmp_path)) < 9 * BATCH
    store = RolloutStore(tmp_path)
    for step in store.steps():
        for one in store.read_all(step):
            tools = [token for token, drawn in zip(one.tokens, one.mask, strict=True) if not drawn]
            assert Characters().decode(tools) == ("1" if len(one.tokens) > 1 else ""), "it is not trained on"


class Runner(loom.Actor):
    """An actor whose thread runs an event loop while it makes a run."""

    @loom.endpoint
    async def run(self, folder: str, steps: int) -> tuple[list[int], int]:
        asyncio.get_running_loop()
        summary = orchestrator(Path(folder), steps, generators=1).run()
        return [one.step for one in summary.steps], summary.trained


@pytest.mark.guarantees("rl run", "It runs in `job.run`, in an actor, and in a program on a host of the cluster")
def test_turns_are_drawn_in_an_actor_whose_thread_runs_an_event_loop(job: loom.Job, tmp_path: Path) -> None:
    procs = job.hosts.slice(hosts=0).spawn_procs()
    runner = procs.spawn("runner", Runner)

    made = runner.run.call_one(str(tmp_path), 3).get(timeout=FINISHED_IN_TIME)

    assert made == ([0, 1, 2], 3 * BATCH)
    assert 0 < len(seen(tmp_path)) < 4 * BATCH
