"""The policy loss, on numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from loom.rl.policy_gradient import PolicyBatch, divergence, measured, policy_loss, token_logprobs
from loom.rl.rollouts import Rollout, split

PAD = 9


def rollout(prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float) -> Rollout:
    return Rollout("0.0.0", prompt, tokens, logprobs, 0.0, advantage, 0)


def batch_of(*rows: tuple[list[float], float]) -> PolicyBatch:
    return PolicyBatch.of([rollout([1], [2] * len(row), row, advantage) for row, advantage in rows], PAD)


def test_prompts_are_padded_on_the_left_and_completions_on_the_right() -> None:
    batch = PolicyBatch.of([rollout([1, 2], [3], [-1.0], 1.0), rollout([4], [5, 6], [-2.0, -3.0], -1.0)], PAD)

    assert batch.tokens.tolist() == [[1, 2, 3, PAD], [PAD, 4, 5, 6]]
    assert batch.mask.tolist() == [[True, False], [True, True]]
    assert batch.logprobs.tolist() == [[-1.0, 0.0], [-2.0, -3.0]]
    assert batch.completion == 2


def test_the_loss_of_the_policy_that_sampled_is_minus_the_advantage_of_each_token() -> None:
    batch = batch_of(([-1.0, -2.0], 0.5), ([-0.5], -2.0))

    assert float(policy_loss(batch.logprobs, batch)) == pytest.approx(-(0.5 + 0.5 - 2.0))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.1, 1.0, -1.1),  # within the clip
        (1.5, 1.0, -1.2),  # a better token gains no more than 1.2
        (0.5, 1.0, -0.5),  # one that became too rare counts in full
        (0.5, -1.0, 0.8),  # a worse token gains no more once it is rare enough
        (1.5, -1.0, 1.5),
    ],
)
def test_the_ratio_is_clipped(ratio: float, advantage: float, loss: float) -> None:
    batch = batch_of(([-1.0], advantage))

    assert float(policy_loss(torch.tensor([[-1.0 + math.log(ratio)]]), batch)) == pytest.approx(loss)


def test_a_clipped_token_has_no_gradient() -> None:
    batch = batch_of(([-1.0], 1.0))
    logprobs = torch.tensor([[-0.1]], requires_grad=True)

    policy_loss(logprobs, batch).backward()

    assert logprobs.grad is not None
    assert float(logprobs.grad.abs().sum()) == 0.0


def test_padding_has_no_loss() -> None:
    batch = batch_of(([-1.0], 1.0), ([-1.0, -1.0], 1.0))
    logprobs = batch.logprobs.clone()
    logprobs[0, 1] = 5.0

    assert float(policy_loss(logprobs, batch)) == pytest.approx(-3.0)


def test_logprobs_are_those_of_the_tokens_after_their_position() -> None:
    class Fixed(torch.nn.Module):
        """A stand-in for a model: the next token is twice as likely to be one more than this."""

        def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
            logits = torch.zeros(*tokens.shape, 10)
            logits.scatter_(2, tokens[:, :, None] + 1, math.log(2.0))
            return logits, None

    batch = PolicyBatch.of([rollout([1], [2, 5], [0.0, 0.0], 1.0)], PAD)

    found = token_logprobs(Fixed(), batch)

    assert found.tolist() == [pytest.approx([math.log(2 / 11), math.log(1 / 11)])]


def test_tokens_between_turns_have_no_gradient() -> None:
    turns = Rollout("0.0.0", [1, 2], [3, 4, 5], [-1.0, 0.0, -1.0], 1.0, 1.0, 0, [True, False, True])
    other = Rollout("0.0.1", [1], [3], [-1.0], 1.0, -1.0, 0)

    batch = PolicyBatch.of([turns, other], pad=0)

    assert batch.mask.tolist() == [[True, False, True], [True, False, False]]
    assert split([turns, other], 0, 1)[0].tokens == 3


def test_the_mean_divergence_is_that_of_the_two_distributions() -> None:
    one, other = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])

    found = (one * divergence(one.log(), other.log())).sum()

    assert float(found) == pytest.approx(float((one * (one / other).log()).sum()))
    assert float(divergence(one.log(), one.log()).abs().sum()) == 0.0


def test_metrics_are_sums_over_the_tokens_without_padding() -> None:
    batch = batch_of(([-1.0], 1.0), ([-1.0, -1.0], -1.0))
    logits = torch.zeros(2, 2, 4)
    logprobs = torch.tensor([[-0.5, 9.0], [-1.5, -1.0]])  # a better token became likelier, a worse one rarer

    found = measured(logits, logprobs, batch, clip=0.2)

    mismatch = sum(math.exp(one) - 1 - one for one in (0.5, -0.5, 0.0))
    expected = {"tokens": 3, "mismatch_kl": mismatch, "entropy": 3 * math.log(4), "clip_share": 2}
    assert found == pytest.approx(expected)


def test_a_token_without_advantage_is_not_counted_as_clipped() -> None:
    batch = batch_of(([-1.0], 0.0))

    assert measured(torch.zeros(1, 1, 4), torch.tensor([[1.0]]), batch, clip=0.2)["clip_share"] == 0
