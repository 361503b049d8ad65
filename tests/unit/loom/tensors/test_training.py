"""Losses of a training are torch's own, at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import to_torch


def digits(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    return images.to(dtype) / 16, labels


def losses_of(ns: Any, x: Any, y: Any, weights: list[Any], steps: int) -> list[Any]:
    """Train a network of two layers; return the losses."""
    w1, b1, w2, b2 = weights
    losses = []
    for step in range(steps):
        batch = slice(step % 40 * 32, step % 40 * 32 + 32)
        loss = ns.cross_entropy(x[batch].matmul(w1).add(b1).relu().matmul(w2).add(b2), y[batch])
        loss.backward()
        losses.append(loss.detach())
        for each in weights:
            each.detach().sub_(each.grad * 0.2)
            each.grad = None
    return losses


@pytest.mark.parametrize(("dtype", "steps"), [(torch.float64, 400), (torch.float32, 100)])
def test_a_network_of_digits(lt: Tensors, dtype: torch.dtype, steps: int) -> None:
    torch.manual_seed(0)
    x, y = digits(dtype)
    weights = [torch.randn(*size, dtype=dtype) * 0.1 for size in ((64, 128), (128,), (128, 10), (10,))]
    theirs = [each.clone().requires_grad_() for each in weights]
    ours = [lt.tensor(each, requires_grad=True) for each in weights]
    expected = torch.stack(losses_of(torch.nn.functional, x, y, theirs, steps))
    found = lt.stack(losses_of(lt, lt.tensor(x), lt.tensor(y), ours, steps))
    torch.testing.assert_close(to_torch(found), expected, rtol=1e-5, atol=0)


def block(nn: Any, width: int, dtype: Any) -> Any:
    """Return the parts of a transformer's layer, of torch or of lazy tensors."""
    return nn.ModuleList(
        [
            nn.LayerNorm(width, dtype=dtype),
            nn.MultiheadAttention(width, 2, batch_first=True, dtype=dtype),
            nn.LayerNorm(width, dtype=dtype),
            nn.Sequential(nn.Linear(width, 32, dtype=dtype), nn.GELU(), nn.Linear(32, width, dtype=dtype)),
            nn.Embedding(11, width, dtype=dtype),
            nn.Linear(width, 11, dtype=dtype),
        ]
    )


def transformer_losses(ns: Any, optim: Any, parts: Any, x: Any, y: Any, mask: Any) -> list[Any]:
    optimizer = optim.AdamW(parts.parameters(), lr=3e-3)  # as in the example: with 1e-2 rounding grows to 1e-3
    losses = []
    for _ in range(50):
        before, attention, between, wide, letters, scores = list(parts)
        h = letters(x)
        seen = before(h)
        h = h + attention(seen, seen, seen, need_weights=False, attn_mask=mask)[0]
        h = h + wide(between(h))
        loss = ns.cross_entropy(scores(h).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_transformer(lt: Tensors, dtype: str) -> None:
    lt.zeros(()).item()  # what was queued before may draw numbers in this process
    torch.manual_seed(0)
    text = torch.randint(11, (4, 9))
    kind = getattr(torch, dtype)
    theirs, ours = block(torch.nn, 16, kind), block(lt.nn, 16, dtype)
    ours.load_state_dict(theirs.state_dict())
    mask = torch.ones(8, 8).triu(1).bool()
    expected = transformer_losses(torch.nn.functional, torch.optim, theirs, text[:, :-1], text[:, 1:], mask)
    x, y = lt.tensor(text[:, :-1]), lt.tensor(text[:, 1:])
    found = transformer_losses(lt, lt.optim, ours, x, y, lt.tensor(mask))
    torch.testing.assert_close(to_torch(lt.stack(found)), torch.stack(expected), rtol=1e-5, atol=0)
    assert found[-1].item() < 0.5 * found[0].item()
