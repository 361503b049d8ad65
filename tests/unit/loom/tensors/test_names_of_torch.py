"""What code for torch asks of a namespace and of tensors, beside operations; and the modules that are functions."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from loom.tensors import names
from loom.tensors.tensors import Tensors
from tests.support import tensor_names
from tests.support.torch_agreement import agree, plain

WORKS: dict[str, Callable[[Any], Any]] = {
    "Tensor": lambda m: isinstance(m.ones(2), m.Tensor),
    "is_tensor": lambda m: (m.is_tensor(m.ones(2)), m.is_tensor(2)),
    "numel": lambda m: m.numel(m.ones(2, 3)),
    "constants": lambda m: (m.pi, m.e, m.inf, math.isnan(m.nan)),
    "to a device": lambda m: m.ones(2).to("cpu").tolist(),
    "to a device by name": lambda m: m.ones(2).to(device="cpu", dtype=m.float64).dtype is m.float64,
    "to a device and a dtype": lambda m: m.ones(2).to("cpu", m.float64, True).dtype is m.float64,
    "to a dtype": lambda m: m.ones(2).to(m.int64).tolist(),
    "to a tensor": lambda m: m.ones(2).to(m.ones(2, dtype=m.int64)).tolist(),
    "copy_ of a number": lambda m: m.ones(2).copy_(3).tolist(),
    "a copy": lambda m: copy.copy(m.ones(2)).tolist(),
    "a copy's gradient": lambda m: copy.copy(m.ones(2, requires_grad=True) * 2).requires_grad,
    "grad_fn": lambda m: (m.ones(2).grad_fn, (m.ones(2, requires_grad=True) * 2).grad_fn is None),
    "detach_": lambda m: (m.ones(2, requires_grad=True) * 2).detach_().requires_grad,
    "is_grad_enabled": lambda m: m.is_grad_enabled(),
    "in no_grad": lambda m: in_block(m, m.no_grad()),
    "in inference_mode": lambda m: in_block(m, m.inference_mode()),
    "in set_grad_enabled": lambda m: in_block(m, m.set_grad_enabled(False)),
    "the size of complex numbers": lambda m: m.tensor([3 + 4j]).abs().tolist(),
    "their norm": lambda m: str(m.tensor([3 + 4j]).norm().dtype).rpartition(".")[2],
    "their deviation": lambda m: str(m.tensor([3 + 4j, 1j]).std().dtype).rpartition(".")[2],
}


def in_block(m: Any, block: Any) -> tuple[bool, bool, bool]:
    with block:
        within = m.is_grad_enabled(), (m.ones(2, requires_grad=True) * 2).requires_grad
    return (*within, m.is_grad_enabled())


@pytest.mark.parametrize("name", WORKS)
def test_a_name_is_as_in_torch(lt: Tensors, name: str) -> None:
    assert WORKS[name](lt) == WORKS[name](torch)


def test_a_grad_mode_that_is_set_stays(lt: Tensors) -> None:
    for m in (torch, lt):
        m.set_grad_enabled(False)
        try:
            assert not m.ones(2, requires_grad=True).mul(2).requires_grad
        finally:
            m.set_grad_enabled(True)
        assert m.ones(2, requires_grad=True).mul(2).requires_grad


def test_a_view_cannot_be_detached_in_place(lt: Tensors) -> None:
    for m in (torch, lt):
        with pytest.raises(RuntimeError, match="Can't detach views in-place"):
            m.ones(4, requires_grad=True).mul(2).view(2, 2).detach_()


MODULES: dict[str, tuple[tuple[Any, ...], Callable[[Any], tuple[Any, ...]]]] = {
    "CosineSimilarity": ((), lambda m: (m.tensor([[0.5, -1.0]]), m.tensor([[1.0, 2.0]]))),
    "Fold": (((3, 3), 2), lambda m: (m.arange(16).view(1, 4, 4).float(),)),
    "Hardsigmoid": ((True,), lambda m: (m.tensor([0.5, -1.0, 4.0]),)),
    "PairwiseDistance": ((1.0,), lambda m: (m.tensor([[0.5, -1.0]]), m.tensor([[1.0, 2.0]]))),
    "PixelShuffle": ((2,), lambda m: (m.arange(16).view(1, 4, 2, 2).float(),)),
    "PixelUnshuffle": ((2,), lambda m: (m.arange(16).view(1, 1, 4, 4).float(),)),
    "TripletMarginLoss": ((2.0,), lambda m: (m.zeros(1, 2), m.ones(1, 2), m.tensor([[1.0, 2.0]]))),
    "Unfold": ((2,), lambda m: (m.arange(16).view(1, 1, 4, 4).float(),)),
    "Upsample": ((4,), lambda m: (m.arange(8).view(1, 1, 8).float(),)),
}
"""The modules of functions that are not in torch's database."""


@pytest.mark.parametrize("name", MODULES)
def test_a_function_is_a_module(lt: Tensors, name: str) -> None:
    arguments, operands = MODULES[name]
    found = getattr(lt.nn, name)(*arguments)(*operands(lt))
    wanted = getattr(torch.nn, name)(*arguments)(*operands(torch))
    assert torch.allclose(torch.tensor(found.tolist()), wanted)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
def test_gradients_are_clipped_by_their_norm(lt: Tensors, max_norm: float, norm_type: float) -> None:
    def clipped(m: Any) -> list[Any]:
        one, other, without = (m.tensor([1.0, -2.0], requires_grad=True) for _ in range(3))
        ((one * 3).sum() + (other * other).sum()).backward()
        norm = m.nn.utils.clip_grad_norm_([one, other, without], max_norm, norm_type)
        assert without.grad is None
        return [norm.tolist(), *one.grad.tolist(), *other.grad.tolist()]

    assert clipped(lt) == pytest.approx(clipped(torch))


def test_gradients_are_clipped_by_their_elements(lt: Tensors) -> None:
    def clipped(m: Any) -> Any:
        x = m.tensor([1.0, -2.0, 0.1], requires_grad=True)
        (x * x).sum().backward()
        m.nn.utils.clip_grad_value_(x, 1.0)
        return x.grad.tolist()

    assert clipped(lt) == pytest.approx(clipped(torch))


def test_without_gradients_there_is_nothing_to_clip(lt: Tensors) -> None:
    for m in (torch, lt):
        assert m.nn.utils.clip_grad_norm_([m.ones(2, requires_grad=True)], 1.0).item() == 0.0
    with pytest.raises(ValueError, match="empty parameter list"):
        lt.nn.utils.clip_grad_norm_([], 1.0)


@pytest.mark.parametrize("value", [torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.Generator()])
def test_an_object_of_torch_is_refused_at_its_line(lt: Tensors, value: Any) -> None:
    with pytest.raises(TypeError, match="of torch is no argument of lazy tensors"):
        lt.cov(lt.ones(2, 2), aweights=value)
    assert lt.ones(2, 2).cov().tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_layouts_and_formats_of_torch_are_arguments(lt: Tensors) -> None:
    made = lt.bartlett_window(3, layout=torch.strided)
    assert made.clamp_max(1).tolist() == torch.bartlett_window(3).tolist()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
@pytest.mark.parametrize("bounds", [(0.5, 2.7, 1), (-1.5, 3.2, 2), (5, 1.5, -1.5), (0, 2.5, 0.5)])
def test_a_range_of_a_dtype_is_as_long_as_in_torch(lt: Tensors, bounds: Any, dtype: torch.dtype) -> None:
    try:
        wanted = torch.arange(*bounds, dtype=dtype)
    except (RuntimeError, ValueError) as error:
        with pytest.raises((RuntimeError, ValueError), match=str(error)):
            lt.arange(*bounds, dtype=dtype)
        return
    made = lt.arange(*bounds, dtype=dtype)
    assert (made.shape, made.tolist()) == (tuple(wanted.shape), wanted.tolist())


def test_the_table_of_names_is_that_of_the_torch_that_is_installed() -> None:
    if torch.__version__.partition("+")[0] == names.TORCH:
        assert tensor_names.tables() == (names.FUNCTIONS, names.METHODS, names.SWITCHES)
    else:
        pytest.fail(f"loom.tensors.names is of torch {names.TORCH}: run python -m tests.support.tensor_names")


BY_NAME: list[Callable[..., Any]] = [
    lambda ns, x, y: ns.add(input=x, other=y, alpha=2),
    lambda ns, x, y: ns.where(condition=x > y, input=x, other=y),
    lambda ns, x, y: ns.clamp(x, min=0, max=2.5),
    lambda ns, x, y: x.masked_fill(mask=x > y, value=3),
    lambda ns, x, y: ns.sum(x, axis=1, keepdims=True),
    lambda ns, x, y: x.sum(dim=(0, 1), dtype=ns.float64),
    lambda ns, x, y: x.max(dim=1, keepdim=True).values,
    lambda ns, x, y: x.std(unbiased=False),
    lambda ns, x, y: x.squeeze(dim=0),
    lambda ns, x, y: ns.permute(x, dims=(1, 0)),
    lambda ns, x, y: ns.transpose(x, dim0=0, dim1=1),
    lambda ns, x, y: ns.reshape(x, shape=(3, 2)),
    lambda ns, x, y: x.view(size=(3, 2)),
    lambda ns, x, y: x.expand(size=(2, 2, 3)),
    lambda ns, x, y: ns.broadcast_to(x, size=(2, 2, 3)),
    lambda ns, x, y: x.repeat(repeats=(2, 1)),
    lambda ns, x, y: x.split(split_size=2, dim=1),
    lambda ns, x, y: ns.split(x, split_size_or_sections=[1, 2], dim=1),
    lambda ns, x, y: ns.chunk(x, chunks=2, dim=1),
    lambda ns, x, y: ns.cat(tensors=(x, y), dim=1),
    lambda ns, x, y: ns.mm(x, mat2=y.t()),
    lambda ns, x, y: ns.bmm(x[None], mat2=y.t()[None]),
    lambda ns, x, y: ns.matmul(input=x, other=y.t()),
    lambda ns, x, y: x.index_select(dim=1, index=ns.tensor([2, 0])),
    lambda ns, x, y: x.gather(dim=1, index=ns.tensor([[2], [0]])),
    lambda ns, x, y: x.topk(k=2, dim=1).indices,
    lambda ns, x, y: ns.nn.functional.linear(input=x, weight=y, bias=None),
    lambda ns, x, y: ns.nn.functional.cross_entropy(input=x, target=ns.tensor([0, 2]), reduction="none"),
]


@pytest.mark.parametrize("work", BY_NAME)
def test_arguments_are_given_by_torchs_names(lt: Tensors, work: Callable[..., Any]) -> None:
    agree(lt, work, [plain([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]], True), plain([[2.0, 1.0, 0.0], [1.0, 1.5, 2.0]])])
