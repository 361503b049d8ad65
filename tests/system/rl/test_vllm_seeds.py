"""Many seeded prompts at once, of which vLLM's scheduler would divide one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from loom.rl.arithmetic_model import LONGEST, write_arithmetic_model
from loom.rl.engines.vllm import VllmEngine, VllmOptions
from loom.rl.generation.completions import Sampling
from tests.support.real_vllm import needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(600)]

OF_A_STEP = 2048
"""Tokens that vLLM computes in one step."""


async def test_seeded_prompts_of_more_than_one_step_are_completed(tmp_path: Path) -> None:
    model = write_arithmetic_model(tmp_path / "model")
    options = {
        "dtype": "float32",
        "max_length": LONGEST,
        "arguments": ("--enforce-eager",),
        "environment": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    }
    engine = VllmEngine(str(model), VllmOptions.of(options), concurrency=256, folder=tmp_path)
    await engine.start()
    try:
        chance = random.Random(0)
        # At this length, some prompt begins in one step and would end in the next.
        prompts = [[chance.randrange(200) for _ in range(63)] for _ in range(3 * OF_A_STEP // 63)]
        found = await engine.complete(prompts, 1, Sampling(4, seed=7))
    finally:
        await engine.stop()

    assert [one.prompt_tokens for one in found] == prompts
