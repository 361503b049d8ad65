"""Trainers on rollouts that a test has written, without generators."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loom.rl.process_home import process_home
from loom.rl.rollouts import Rollout, RolloutStore, split
from loom.rl.settings import TrainerRun, Trainers, Weights
from loom.rl.trainer import Trainer, Training
from loom.train import Batch, JobSummary


class RecordingTrainer(Trainer):
    """A trainer that writes down its losses, a file for each process."""

    def loss(self, model: Any, batch: Batch) -> Any:
        loss = super().loss(model, batch)
        with (Path(self._run.folder) / f"losses-{batch.shard}.jsonl").open("a") as file:
            file.write(json.dumps([batch.step, float(loss)]) + "\n")
        return loss


def write_rollouts(folder: Path, steps: int, ranks: int, rollouts: int = 8, size: int = 200) -> None:
    """Write random rollouts of different lengths."""
    store = RolloutStore(folder)
    for step in range(steps):
        chance = random.Random(step)
        made = []
        for number in range(rollouts):
            prompt = [chance.randrange(size) for _ in range(chance.randint(1, 9))]
            tokens = [chance.randrange(size) for _ in range(chance.randint(1, 9))]
            logprobs = [-5.0 + chance.random() for _ in tokens]
            made.append(Rollout(f"{step}.{number}.0", prompt, tokens, logprobs, 1.0, chance.uniform(-1, 1), step))
        store.write(split(made, step, ranks))


def train(folder: Path, spec: Trainers, steps: int) -> JobSummary:
    """Train on the rollouts of a folder, in a session's driver."""
    run = TrainerRun(str(folder), steps, Weights.FILES, temperature=1.0, keep=steps, lines=False)
    training = Training(process_home(), spec, run)
    try:
        return training.result()
    finally:
        training.close()


def losses(folder: Path, shards: int) -> Mapping[int, float]:
    """Return the mean loss of all processes, by step."""
    found: dict[int, list[float]] = {}
    for shard in range(shards):
        for line in (folder / f"losses-{shard}.jsonl").read_text().splitlines():
            step, loss = json.loads(line)
            found.setdefault(step, []).append(loss)
    assert all(len(each) == shards for each in found.values())
    return {step: sum(each) / shards for step, each in found.items()}
