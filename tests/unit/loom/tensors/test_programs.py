"""Random programs of many operations agree with torch: results, and gradients of leaves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from loom.tensors.tensors import Tensors
from tests.support.near_tensors import near_tensors
from tests.support.torch_agreement import to_torch

UNARY: list[Callable[[Any], Any]] = [
    lambda x: x.tanh(),
    lambda x: x.sigmoid(),
    lambda x: x.relu(),
    lambda x: x.abs().add(0.1).log(),
    lambda x: x.mul(0.1).exp(),
    lambda x: x.transpose(0, 1),
    lambda x: x.softmax(1),
    lambda x: x.mean(0, keepdim=True).add(x),
    lambda x: x.sum(1, keepdim=True).mul(0.2).expand(4, 4),
    lambda x: x.flatten().view(4, 4),
    lambda x: x.var(1, keepdim=True).add(x),
    lambda x: x[1:].sum(0) + x,
    lambda x: x[:, [2, 0, 1, 3]],
    lambda x: x.clamp(-1.0, 1.0),
    lambda x: x.tril() + 0.5,
    lambda x: x.max(1, keepdim=True)[0] - x,
    lambda x: x / (x * x + 1.0).sqrt(),
    lambda x: x.unsqueeze(0).squeeze(0).contiguous(),
]
BINARY: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: x - y * 0.5,
    lambda x, y: (x @ y) * 0.25,
    lambda x, y: x.where(x > y, y),
    lambda x, y: x.maximum(y),
    lambda x, y: x / (y * y + 2.0),
]


def run(seed: int, leaves: list[Any]) -> Any:
    """Run the program of a seed: thirty operations on what there is, some of them in place."""
    chosen = random.Random(seed)
    found = list(leaves)
    for _ in range(30):
        pick = chosen.random()
        if pick < 0.5:
            made = chosen.choice(UNARY)(chosen.choice(found))
        else:
            made = chosen.choice(BINARY)(chosen.choice(found), chosen.choice(found))
        if pick > 0.92:
            made = made.clone().mul_(0.5).add_(1.0)
        found.append(made)
        if len(found) > 8:
            del found[chosen.randrange(len(found) - 1)]
    total = found[0].sum()
    for each in found[1:]:
        total = total + each.mean()
    return total


def check(lt: Tensors, seed: int) -> None:
    torch.manual_seed(seed)
    data = [torch.randn(4, 4, dtype=torch.float64) for _ in range(3)]
    theirs = [each.clone().requires_grad_() for each in data]
    ours = [lt.tensor(each, requires_grad=True) for each in data]
    expected, found = run(seed, theirs), run(seed, ours)
    torch.testing.assert_close(to_torch(found), expected.detach())
    if not expected.requires_grad:
        assert not found.requires_grad
        return
    expected.backward()
    found.backward()
    for one, other in zip(theirs, ours, strict=True):
        if one.grad is None:
            assert other.grad is None
        else:
            torch.testing.assert_close(to_torch(other.grad), one.grad)


def test_random_programs(lt: Tensors) -> None:
    for seed in range(100):
        check(lt, seed)


@pytest.mark.slow
def test_more_random_programs(lt: Tensors) -> None:
    for seed in range(100, 500):
        check(lt, seed)


def test_a_loop_with_temporary_tensors_leaves_none() -> None:
    lt = near_tensors()
    x = lt.tensor([[1.0, -2.0], [0.5, 3.0]], requires_grad=True)
    for _ in range(300):
        loss = (x @ x).relu().sum()
        loss.backward()
        x.grad = None
    del loss
    lt.synchronize()
    held = len(lt._dispatcher.held)
    known = len(lt._dispatcher._workers.values.tensors)
    for _ in range(300):
        loss = (x @ x).relu().sum()
        loss.backward()
        x.grad = None
    del loss
    lt.synchronize()
    assert (len(lt._dispatcher.held), len(lt._dispatcher._workers.values.tensors)) == (held, known)
