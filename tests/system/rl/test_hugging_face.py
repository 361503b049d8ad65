"""Trainers of Hugging Face models: members that share the parameters learn what one process learns."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import loom
from loom.errors import TrainingFailed
from loom.rl import Generators, Lora, Orchestrator, Task, Trainer, Trainers
from loom.rl.generation import weight_files
from loom.train import LiveConfig
from tests.support.language_model import change_config, make_model
from tests.system.rl.rollouts_by_hand import RecordingTrainer, losses, train, write_rollouts

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 4


def trained(
    job: loom.Job, folder: Path, model: Path, *, until: tuple[int, ...] = (STEPS,), **settings: Any
) -> tuple[dict[int, float], dict[str, Any], Mapping[str, float]]:
    """Return the losses of a training, which is ended and goes on at some steps, its last weights and metrics."""
    members = settings.get("members", 1)
    write_rollouts(folder, STEPS, members)
    spec = Trainers(model=model, actor=RecordingTrainer, **settings)
    for steps in until:
        summary = job.run(functools.partial(train, folder, spec, steps))
        assert (summary.ending, summary.failures) == ("finished", 0)
    state, _ = weight_files.load(weight_files.path_of(folder / "weights", STEPS))
    return dict(losses(folder, members)), state, summary.metrics


@pytest.mark.parametrize("kind", ["plain", "tied", "lora"])
def test_members_that_share_the_parameters_learn_the_same_as_one(job: loom.Job, tmp_path: Path, kind: str) -> None:
    model = make_model(tmp_path / "model", tied=kind == "tied")
    adapters = {"lora": Lora(rank=4)} if kind == "lora" else {}

    alone, weights, metrics = trained(job, tmp_path / "alone", model, **adapters)
    together, shared, means = trained(
        job,
        tmp_path / "together",
        model,
        members=2,
        checkpoint_activations=True,
        until=(2, STEPS) if kind == "plain" else (STEPS,),
        **adapters,
    )
    assert alone.keys() == together.keys() == set(range(STEPS))
    assert together == pytest.approx(alone, abs=1e-4)
    assert len(set(alone.values())) == STEPS
    torch.testing.assert_close(shared, weights, rtol=0, atol=1e-4)
    for name in ("entropy", "mismatch_kl"):
        assert means[name] == pytest.approx(metrics[name], rel=1e-3), f"{name} is of all members' rollouts"


@pytest.mark.parametrize("members", [1, 2])
def test_a_model_that_cannot_be_trained_ends_the_job_at_once(job: loom.Job, tmp_path: Path, members: int) -> None:
    model = make_model(tmp_path / "model")
    change_config(model, hidden_size=48)  # the weights have another shape, which only their reader sees
    write_rollouts(tmp_path, 1, members)

    with pytest.raises(TrainingFailed, match=r"cannot train, in any attempt: WrongArguments: the model .*/model"):
        job.run(functools.partial(train, tmp_path, Trainers(model=model, members=members), 1))


class ReadingTrainer(Trainer):
    """A trainer that writes down how many of its parameters it has read."""

    def build(self) -> Any:
        model = super().build()
        read = [not one.is_meta for one in model.parameters()]
        (Path(self._run.folder) / f"read-{os.getpid()}").write_text(f"{sum(read)} of {len(read)}")
        return model


def test_of_the_members_that_share_a_model_one_reads_it(job: loom.Job, tmp_path: Path) -> None:
    write_rollouts(tmp_path, 1, 2)
    spec = Trainers(model=make_model(tmp_path / "model"), members=2, actor=ReadingTrainer)

    assert job.run(functools.partial(train, tmp_path, spec, 1)).ending == "finished"

    assert sorted(path.read_text() for path in tmp_path.glob("read-*")) == ["0 of 27", "27 of 27"]


class Varied(Task):
    """A task whose rewards differ among the completions of a prompt, also of a model that knows nothing."""

    def prompts(self, step: int, n: int) -> list[str]:
        return [f"{step} {number}" for number in range(n)]

    def reward(self, prompt: str, completion: str) -> float:
        return sum(map(ord, completion)) % 7 / 6


def test_trainers_see_the_policy_that_the_generators_sampled_with(job: loom.Job, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    config = LiveConfig(learning_rate=1e-3, optimizer="adam", accumulation=2)
    run = Orchestrator(
        Varied(),
        Generators(engine="transformers", model=model, max_tokens=4),
        Trainers(model=model, members=2, config=config, reference=model, kl=0.01),
        folder=tmp_path / "run",
        steps=4,
        batch=32,
        group=16,
        async_level=0,
    )

    summary = job.run(run.run)

    assert summary.trained == 4 * 32
    metrics = summary.training.metrics
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-6)  # in the last step: its weights have arrived
    assert metrics["kl"] > 1e-6
    assert metrics["clip_share"] == 0.0
