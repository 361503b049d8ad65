"""What a model of transformers says of the completions that a server drew."""

from __future__ import annotations

from pathlib import Path

import torch

from loom.rl.generation.completions import Completion
from loom.rl.models import causal


@torch.inference_mode()
def logprobs_of(model: Path, one: Completion, temperature: float) -> list[float]:
    """What the model alone says of a completion's tokens."""
    tokens = torch.tensor([[*one.prompt_tokens, *one.tokens]])
    logits = causal.load(model)(input_ids=tokens).logits[0, len(one.prompt_tokens) - 1 : -1]
    found = (logits.double() / temperature).log_softmax(-1)
    return [float(row[token]) for row, token in zip(found, one.tokens, strict=True)]
