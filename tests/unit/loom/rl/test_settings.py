"""What a run refuses before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.rl import Generators, Orchestrator, Task, Trainers
from loom.rl.arithmetic import Characters


def gpu_run(folder: Path, **changed: Any) -> Orchestrator:
    generators = {"engine": "vllm", "gpus": 1, "colocated": True, **changed.pop("generators", {})}
    settings: dict[str, Any] = {"steps": 1, "batch": 4, "group": 2, "async_level": 0, **changed}
    return Orchestrator(
        Task(),
        Generators(model="some/model", tokenizer=Characters(), **generators),
        Trainers(lambda: None, Characters(), gpus=settings.pop("trained_on_gpus", True)),
        folder=folder,
        **settings,
    )


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"generators": {"engine": "transformers"}}, "engine"),
        ({"generators": {"gpus": 0}}, "gpus"),
        ({"trained_on_gpus": False}, "gpus"),
        ({"async_level": 1}, "async_level"),
        ({"inflight": 8}, "inflight"),
        ({"weights": "transfer"}, "weights"),
    ],
)
def test_colocated_generators_take_turns_with_trainers(
    tmp_path: Path, settings: dict[str, Any], found: str
) -> None:
    with pytest.raises(loom.WrongArguments, match=f"take turns with trainers on their GPUs, and {found} does not"):
        gpu_run(tmp_path, **settings)
    run = gpu_run(tmp_path)
    with pytest.raises(loom.WrongArguments, match="and async_level does not allow that"):
        run.check_turns(replace(run.options, async_level=2))


def run_of(folder: Path, weights: str, engine: str = "vllm", gpus: int = 0, **generators: Any) -> Orchestrator:
    return Orchestrator(
        Task(),
        Generators(engine=engine, model="some/model", tokenizer=Characters(), gpus=gpus, **generators),
        Trainers(lambda: None, Characters()),
        folder=folder,
        steps=1,
        batch=1,
        group=1,
        weights=weights,
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weights": "nccl"}, "weights is one of files, messages, transfer, not 'nccl'"),
        ({"weights": "messages"}, "weights='messages' sends tensors to the generator's process, and engine='vllm'"),
        (
            {"weights": "transfer", "engine": "transformers"},
            "weights='transfer' is for the workers of a vLLM server, and engine='transformers' has none",
        ),
        ({"weights": "transfer", "gpus": 1}, "goes to GPUs by NCCL, which trainers without GPUs have not"),
    ],
)
def test_weights_go_only_ways_that_both_sides_have(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(loom.WrongArguments, match=said):
        run_of(tmp_path, **settings)
    run_of(tmp_path, "transfer")
