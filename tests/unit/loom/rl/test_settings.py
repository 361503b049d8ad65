"""What a run refuses before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import loom
from loom.rl import Generators, Orchestrator, Task, Trainers
from loom.rl.arithmetic import Characters


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
