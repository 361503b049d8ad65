"""`SmallTransformer`: the same with and without a cache, and with any padding."""

from __future__ import annotations

import pytest
import torch

from loom.rl.arithmetic import Characters
from loom.rl.transformer import SmallTransformer

TEXT = torch.tensor([[10, 3, 8, 11, 8, 3]])


@pytest.fixture
def model() -> SmallTransformer:
    torch.manual_seed(0)
    return SmallTransformer(Characters.size, Characters.pad, longest=16).eval()


def padded(tokens: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat((torch.full((1, count), Characters.pad), tokens), dim=1)


def test_a_cache_changes_nothing(model: SmallTransformer) -> None:
    whole, _ = model(TEXT)

    logits, cache = model(TEXT[:, :3])
    found = [logits]
    for position in range(3, TEXT.shape[1]):
        logits, cache = model(TEXT[:, position : position + 1], cache)
        found.append(logits)

    torch.testing.assert_close(torch.cat(found, dim=1), whole)


def test_padding_on_the_left_changes_nothing(model: SmallTransformer) -> None:
    whole, _ = model(TEXT)

    logits, cache = model(padded(TEXT[:, :4], 5))
    rest, _ = model(TEXT[:, 4:], cache)

    torch.testing.assert_close(torch.cat((logits[:, 5:], rest), dim=1), whole)


def test_zeros_in_front_of_a_cache_are_padding(model: SmallTransformer) -> None:
    whole, _ = model(TEXT)
    _, cache = model(TEXT[:, :4])
    grown = tuple(tuple(torch.nn.functional.pad(one, (0, 0, 3, 0)) for one in layer) for layer in cache)

    rest, _ = model(TEXT[:, 4:], grown)

    torch.testing.assert_close(rest, whole[:, 4:])


def test_no_position_sees_a_later_one(model: SmallTransformer) -> None:
    other = TEXT.clone()
    other[0, -1] = 1

    torch.testing.assert_close(model(TEXT)[0][:, :-1], model(other)[0][:, :-1])
