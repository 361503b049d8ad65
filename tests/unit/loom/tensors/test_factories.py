"""Tensors made like others, of sequences, and of random numbers agree with torch."""

from __future__ import annotations

from typing import Any

import torch

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import agree, of_the_cpu, plain, to_torch


def test_made_like_others(lt: Tensors) -> None:
    for x in (plain([[1.0, -2.0], [0.5, 3.0]], True), plain([1, 2]), plain([True])):
        agree(
            lt, lambda ns, x: (x.new_zeros(2, 3), x.new_ones((2,)), x.new_full((2, 2), 1), x.new_tensor([1])), [x]
        )
        agree(lt, lambda ns, x: (ns.full_like(x, 1), ns.full_like(x, 2, dtype=torch.float32)), [x])
        agree(lt, lambda ns, x: (x.nelement(), x.ndimension(), x.element_size(), x.itemsize, x.nbytes), [x])
        agree(lt, lambda ns, x: (x.is_floating_point(), x.is_complex(), x.cpu().shape), [x])
    assert (lt.empty_like(lt.zeros(2, 3)).shape, lt.rand_like(lt.zeros(2)).dtype) == ((2, 3), lt.float32)


def test_sequences(lt: Tensors) -> None:
    for work in (
        lambda ns: (ns.linspace(0, 1, 5), ns.linspace(3, -1, 4, dtype=torch.float64), ns.linspace(0, 1, 0)),
        lambda ns: (ns.logspace(0, 2, 3), ns.logspace(0, 2, 3, 2.0)),
        lambda ns: (ns.tril_indices(3, 4), ns.tril_indices(4, 3, -1), ns.tril_indices(2, 3, 2)),
        lambda ns: (ns.triu_indices(3, 4), ns.triu_indices(4, 3, -1), ns.triu_indices(2, 3, 2)),
        lambda ns: ns.linspace(0, 1, -1),
        lambda ns: ns.randint(3, 3, (2,)),
        lambda ns: ns.as_tensor([1, 2]),
    ):
        agree(lt, work, [])


@of_the_cpu
def test_random_numbers_are_torchs(lt: Tensors) -> None:
    def work(ns: Any) -> Any:
        x = ns.zeros(50)
        with ns.no_grad():
            found = [x.normal_(1, 2) * 1, x.uniform_(-1, 1) * 1, x.exponential_(2) * 1]
        return [
            *found,
            ns.randint(2, 9, (20,)),
            ns.randint(9, (20,)),
            ns.randperm(9),
            ns.bernoulli(ns.full((9,), 0.5)),
        ]

    torch.manual_seed(3)
    expected = work(torch)
    lt.seed(3)
    for one, other in zip(expected, work(lt), strict=True):
        torch.testing.assert_close(to_torch(other), one)
