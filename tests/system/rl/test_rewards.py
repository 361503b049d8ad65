"""A run whose prompts are a file and whose rewards are functions, some of which fail."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.rl import (
    Arithmetic,
    Characters,
    DatasetTask,
    Generators,
    Orchestrator,
    RolloutStore,
    RunSummary,
    Trainers,
)
from loom.rl.arithmetic import arithmetic_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BOUND = 60.0
BATCH = 64


def write(path: Path, count: int, seed: int) -> Path:
    task, chance = Arithmetic(), random.Random(seed)
    rows = [{"question": task._sum(chance)} for _ in range(count)]
    path.write_text("".join(f"{json.dumps({**row, 'answer': task.answer(row['question'])})}\n" for row in rows))
    return path


def orchestrator(folder: Path, rewards: list[Any], **settings: Any) -> Orchestrator:
    path = write(folder / "train.jsonl", 100, 0)
    task = DatasetTask(path, rewards, prompt="question", evaluation=write(folder / "test.jsonl", 10, 1))
    return Orchestrator(
        task,
        Generators(arithmetic_model, Characters(), max_tokens=3),
        Trainers(arithmetic_model, Characters()),
        folder=folder,
        batch=BATCH,
        group=8,
        **settings,
    )


@pytest.mark.guarantees("rl run", "A reward function that fails costs its completion alone, and is counted")
def test_rewards_that_fail_are_counted_and_their_completions_not_trained_on(
    job: loom.Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def share(completion: str, answer: str) -> float:
        if completion.startswith("r"):
            raise ValueError("no digit")
        hits = sum(one == other for one, other in zip(completion, answer))  # noqa: B905
        return hits / max(len(completion), len(answer))

    async def brief(completion: str) -> float:
        return float(len(completion) < 3)

    made = orchestrator(tmp_path, [share, brief], steps=9, evaluate_every=4, async_level=0)
    summary: RunSummary = job.run(made.run)

    assert "progress.step=4, ckpt_step=3, async_level=0" in "".join(capfd.readouterr())
    failed = sum(one.failed for one in summary.steps)
    assert failed > 0
    assert summary.trained + failed == 9 * BATCH
    assert [one.rollouts + one.failed for one in summary.steps] == [BATCH] * 9
    assert [one.evaluation is not None for one in summary.steps] == [True, *[False] * 3] * 2 + [True]
    store = RolloutStore(tmp_path)
    texts = [Characters().decode(one.tokens) for step in store.steps() for one in store.read_all(step)]
    assert texts
    assert not [one for one in texts if one.startswith("r")]


@pytest.mark.guarantees("rl run", "The weights of reward functions change while the run goes on")
def test_the_weights_of_rewards_change_at_a_step_boundary(job: loom.Job, tmp_path: Path) -> None:
    def one(completion: str) -> float:
        return 1.0

    def two(completions: list[str]) -> list[float]:
        return [2.0] * len(completions)

    run = job.run(orchestrator(tmp_path, [one, two], steps=100_000).run, detach=True, name="rl")
    until = time.monotonic() + BOUND
    while not ((steps := tmp_path / "steps.jsonl").exists() and steps.read_text()):
        assert time.monotonic() < until, "the first step never came"
        time.sleep(0.05)
    answer = job.weaver.update_config("orchestrator", reward_weights=[10.0, 1.0]).get(BOUND)["orchestrator"]
    refused = job.weaver.update_config("orchestrator", reward_weights=[1.0]).get(BOUND)["orchestrator"]
    job.weaver.stop("orchestrator").get(BOUND)
    summary: RunSummary = run.result(BOUND)

    assert answer.ok
    assert not refused.ok
    assert "reward_weights has 1 values, for one, two" in str(refused)
    rewards = [one.reward for one in summary.steps]
    assert rewards == [3.0] * answer.step + [12.0] * (len(rewards) - answer.step)


def test_a_reward_that_never_works_ends_the_run_with_its_reason(job: loom.Job, tmp_path: Path) -> None:
    def broken(completion: str) -> float:
        raise KeyError("missing")

    with pytest.raises(loom.LoomError, match=r"no completion of step 0 has a reward, .* broken raised KeyError"):
        job.run(orchestrator(tmp_path, [broken], steps=3).run)
