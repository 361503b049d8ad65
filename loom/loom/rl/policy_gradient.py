"""The policy gradient of GRPO, on completions that a somewhat older policy has sampled.

A module of its own, because it needs torch, and a program that names `Trainer` may lack it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loom.rl.models.causal import is_causal, logits_of
from loom.rl.rollouts import Rollout

CLIP = 0.2
"""The share by which a token's probability may move from the sampler's before its gradient ends (PPO's)."""

AT_ONCE = 1 << 24
"""Logits of which the entropy is computed at a time."""


@dataclass(frozen=True)
class PolicyBatch:
    """Rollouts as tensors; prompts are padded on the left, completions on the right."""

    tokens: Tensor
    """[rollouts, prompt and completion positions]."""
    seen: Tensor
    """True if a position has a token of the rollout, False for padding, as `tokens`."""
    completion: int
    """The first position of the completions."""
    mask: Tensor
    """True if a position of the completions has a token that was sampled, [rollouts, completion positions]."""
    logprobs: Tensor
    """Of the sampler for each token, as `mask`."""
    advantages: Tensor
    """[rollouts]."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], pad: int) -> PolicyBatch:
        before = max(len(one.prompt_tokens) for one in rollouts)
        after = max(len(one.tokens) for one in rollouts)
        rows, seen, logprobs, mask = [], [], [], []
        for one in rollouts:
            left, right = before - len(one.prompt_tokens), after - len(one.tokens)
            rows.append([pad] * left + one.prompt_tokens + one.tokens + [pad] * right)
            seen.append([False] * left + [True] * (before - left + after - right) + [False] * right)
            logprobs.append(one.logprobs + [0.0] * right)
            mask.append((one.mask or [True] * len(one.tokens)) + [False] * right)
        tokens = torch.tensor(rows)
        return cls(
            tokens=tokens,
            seen=torch.tensor(seen),
            completion=before,
            mask=torch.tensor(mask),
            logprobs=torch.tensor(logprobs),
            advantages=torch.tensor([one.advantage for one in rollouts]),
        )

    def to(self, device: str) -> PolicyBatch:
        moved = {name: one.to(device) for name, one in vars(self).items() if isinstance(one, Tensor)}
        return PolicyBatch(completion=self.completion, **moved)


def completion_logits(
    model: Any, batch: PolicyBatch, temperature: float = 1.0, *, bfloat16: bool = False
) -> Tensor:
    """Return a model's logits for each position of the completions, [rollouts, completion positions, size].

    Args:
        model: one of transformers, or one for `loom.rl.Generator`.
        batch: the rollouts.
        temperature: by which logits are divided.
        bfloat16: whether the model computes in it, on a GPU.
    """
    before = batch.tokens[:, :-1]
    with torch.autocast("cuda", torch.bfloat16, enabled=bfloat16):
        if is_causal(model):
            logits = logits_of(model, before, batch.seen[:, :-1], batch.mask.shape[1])
        else:
            logits = model(before)[0][:, batch.completion - 1 :]
    return logits.float() / temperature


def logprobs_of(logits: Tensor, batch: PolicyBatch) -> Tensor:
    """Return the log-probability of each token of the completions by `completion_logits`, as `PolicyBatch.mask`."""
    chosen = batch.tokens[:, batch.completion :, None]
    taken: Tensor = logits.log_softmax(dim=-1).gather(2, chosen)[:, :, 0]
    return taken


def token_logprobs(model: Any, batch: PolicyBatch, temperature: float = 1.0, *, bfloat16: bool = False) -> Tensor:
    """Return a model's log-probability of each token of the completions; see `completion_logits`."""
    return logprobs_of(completion_logits(model, batch, temperature, bfloat16=bfloat16), batch)


def policy_loss(logprobs: Tensor, batch: PolicyBatch, clip: float = CLIP) -> Tensor:
    """Return the sum over all tokens of the clipped policy loss (https://arxiv.org/abs/1707.06347, equation 7)."""
    ratio = torch.exp(logprobs - batch.logprobs)
    advantages = batch.advantages[:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -(gain * batch.mask).sum()


def divergence(logprobs: Tensor, others: Tensor) -> Tensor:
    """Return an estimate of how far a policy is from another, in nats for each token, from their log-probabilities.

    It is never negative, and its mean over tokens of the policy is the Kullback-Leibler divergence
    (http://joschu.net/blog/kl-approx.html, ``k3``).
    """
    distance = others - logprobs
    return torch.expm1(distance) - distance


@torch.no_grad()  # type: ignore[untyped-decorator]
def measured(logits: Tensor, logprobs: Tensor, batch: PolicyBatch, clip: float) -> dict[str, float]:
    """Return sums over the tokens of a batch: how many there are, and of what `Trainer` reports of each.

    ``mismatch_kl`` is the divergence of the sampler's policy from the trainer's, ``entropy`` the policy's, in nats,
    and ``clip_share`` counts the tokens whose gradient `policy_loss` has ended.
    """
    mask = batch.mask
    ratio, better = torch.exp(logprobs - batch.logprobs), batch.advantages[:, None] > 0
    clipped = torch.where(better, ratio > 1 + clip, ratio < 1 - clip) & (batch.advantages[:, None] != 0)
    rows = max(1, AT_ONCE // logits[0].numel())
    entropy = torch.cat([-(part.softmax(-1) * part.log_softmax(-1)).sum(-1) for part in logits.split(rows)])
    return {
        "tokens": float(mask.sum()),
        "mismatch_kl": float((divergence(batch.logprobs, logprobs) * mask).sum()),
        "entropy": float((entropy * mask).sum()),
        "clip_share": float((clipped & mask).sum()),
    }
