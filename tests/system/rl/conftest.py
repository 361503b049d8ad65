"""The folder of a run with weights of two steps, for servers of the real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from loom.rl.arithmetic_model import write_arithmetic_model
from loom.rl.generation import weight_files as weights
from loom.rl.models import causal


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    write_arithmetic_model(made / "model")
    for step in (1, 2):
        model = causal.load(write_arithmetic_model(made / f"model_{step}", seed=step))
        weights.save(causal.weights_of(model), causal.config_of(model, "float32"), made / "weights", step)
    return made
