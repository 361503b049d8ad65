"""Whether an operation of lazy tensors agrees with torch: values, gradients, shapes, dtypes, strides and errors.

A test writes the operation once, as a function of the namespace (torch, or lazy tensors) and of operands;
hypothesis draws the operands, among them views with strides of any kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from loom.tensors.layouts import dtype_named
from loom.tensors.placements import Replicate, Shard
from loom.tensors.tensor import Tensor
from loom.tensors.tensors import Tensors

Work = Callable[..., Any]

FLOATS = (torch.float32, torch.float64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ROUGH = (torch.float32, torch.float16, torch.bfloat16)
"""Of sums whose parts are added up on several processes, the last digits are others."""
ALL = (*FLOATS, *INTS, torch.bool, torch.float16, torch.bfloat16)


PROCESSES = int(os.environ.get("LOOM_PROCESSES", "1"))
"""Over so many the operands are spread; with several they are contiguous. .ci/slow has also 4."""

DEVICE = os.environ.get("LOOM_DEVICE", "cpu")
"""Where the lazy tensors of one process are, such as ``cuda``. torch, with which they agree, is on the CPU."""

of_the_cpu = pytest.mark.skipif(
    DEVICE != "cpu", reason="a GPU draws other numbers, orders equal elements otherwise, and ends at a wrong index"
)


@dataclass(frozen=True)
class Operand:
    """A tensor, as the memory and the layout in which both sides make it."""

    memory: torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    requires_grad: bool = False

    def of_torch(self) -> torch.Tensor:
        made = self.memory.clone().as_strided(self.size, self.stride, self.offset)
        if PROCESSES > 1:
            made = made.clone(memory_format=torch.contiguous_format)  # `contiguous` may keep strides of sizes of 1
        return made.detach().requires_grad_(self.requires_grad)

    def of_loom(self, lt: Tensors) -> Tensor:
        made: Tensor = lt.tensor(self.memory).as_strided(self.size, self.stride, self.offset).detach()
        if PROCESSES > 1:
            made = made.redistribute([self.placement]).detach()
        return made.requires_grad_() if self.requires_grad else made

    @property
    def placement(self) -> Shard | Replicate:
        """How it is spread over several processes: any dimension may be cut, or none."""
        pick = (sum(self.size) + self.offset) % (len(self.size) + 1)
        return Replicate() if pick == len(self.size) else Shard(pick)

    def __repr__(self) -> str:
        kind = str(self.memory.dtype).removeprefix("torch.")
        return f"{kind}{list(self.size)} strides {list(self.stride)}{' grad' if self.requires_grad else ''}"


SHRINK = os.environ.get("LOOM_SHRINK", "1") == "1"
"""Whether to look for the smallest operands with which an operation fails, which may take minutes."""

EXAMPLES = int(os.environ.get("LOOM_EXAMPLES", "4"))
"""Of each operation. There are hundreds of operations, so that with each commit they are few; .ci/slow has 50."""


def given(*drawn: Any, **named: Any) -> Callable[[Work], Work]:
    """Return hypothesis' decorator, for so many examples of an operation."""

    def decorate(test: Work) -> Work:
        check = hypothesis.given(*drawn, **named)(test)
        quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
        phases = (
            (Phase.explicit, Phase.generate) if PROCESSES > 1 or DEVICE != "cpu" or not SHRINK else tuple(Phase)
        )  # to shrink would take minutes
        decorated: Work = settings(
            max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=quiet, phases=phases
        )(check)
        return decorated

    return decorate


def plain(values: Any, requires_grad: bool = False) -> Operand:
    """Return an operand of the elements of a tensor of torch, or of a list, in row-major order."""
    made = torch.as_tensor(values).contiguous()
    return Operand(made.reshape(-1), tuple(made.shape), made.stride(), 0, requires_grad)


@st.composite
def shapes(draw: Any, least: int = 0, most: int = 4, largest: int = 4, smallest: int = 0) -> tuple[int, ...]:
    """Draw a shape, mostly without an empty dimension."""
    sizes = st.integers(max(1, smallest), largest)
    if smallest == 0:
        sizes = st.one_of(sizes, sizes, sizes, sizes, st.integers(0, largest))
    return tuple(draw(st.lists(sizes, min_size=least, max_size=most)))


@st.composite
def broadcastable(draw: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Draw a shape that is broadcast to a shape: without leading dimensions, and with some of size 1."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(1 if draw(st.booleans()) and draw(st.booleans()) else size for size in kept)


@st.composite
def operands(
    draw: Any,
    shape: tuple[int, ...] | None = None,
    dtypes: Sequence[torch.dtype] = FLOATS,
    grad: bool | None = None,
    low: float = -3.0,
    high: float = 3.0,
    views: bool = True,
) -> Operand:
    """Draw an operand.

    Args:
        shape: its shape; any if None.
        dtypes: one of them is its dtype.
        grad: whether its gradient is wanted; drawn if None. Only of floating point numbers.
        low, high: between which its elements are. They are distinct enough that no two are nearly equal.
        views: whether it may be transposed, a slice with steps, or expanded.
    """
    size = draw(shapes()) if shape is None else shape
    dtype = draw(st.sampled_from(list(dtypes)))
    order = list(range(len(size)))
    step = expand = 0
    if views and size:
        order = draw(st.permutations(order))
        step = draw(st.sampled_from([0, 0, 1]))
        expand = draw(st.sampled_from([0, 0, 0, 1]))
    strides = [0] * len(size)
    many = 1 + step
    for place in reversed(order):
        strides[place] = many
        many *= max(size[place], 1)
    if expand and size:
        strides[draw(st.integers(0, len(size) - 1))] = 0
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    memory = _memory(many + 2, dtype, low, high, generator)
    wanted = dtype.is_floating_point and (draw(st.booleans()) if grad is None else grad)
    return Operand(memory, tuple(size), tuple(strides), draw(st.integers(0, 2)) if views else 0, wanted)


def _memory(many: int, dtype: torch.dtype, low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.randint(0, 2, (many,), generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(
            max(int(low), 0 if dtype is torch.uint8 else -100), int(high) + 1, (many,), generator=generator
        ).to(dtype)
    # A random order of numbers with equal distances: an extreme is one element, in float16 too.
    grid = low + (high - low) * (torch.randperm(many, generator=generator).double() + 0.5) / many
    return grid.to(dtype)


def agree(
    lt: Tensors,
    work: Work,
    given: Sequence[Operand],
    *,
    second: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
    strides: bool = True,
) -> None:
    """Check that a function gives the same with torch and with lazy tensors.

    Args:
        work: a function of ``torch`` or of lazy tensors, and of the operands.
        second: whether to compare gradients of gradients as well, in float64.
        rtol, atol: as in `torch.testing.assert_close`.
        strides: whether to compare strides.
    """
    if PROCESSES > 1 and rtol is None and any(each.memory.dtype in ROUGH for each in given):
        rtol = atol = 1e-4 if all(each.memory.dtype not in ROUGH[1:] for each in given) else 2e-2
    theirs = [each.of_torch() for each in given]
    ours = [each.of_loom(lt) for each in given]
    try:
        expected = work(torch, *theirs)
    except Exception as error:  # noqa: BLE001 - whatever torch raises
        _raises_the_same(error, lt, work, ours)
        return
    found = work(lt, *ours)
    wanted, results = _several(expected), _several(found)
    assert len(wanted) == len(results)
    for one, other in zip(wanted, results, strict=True):
        _same(one, other, rtol, atol, strides)
    for one, other in zip(theirs, ours, strict=True):  # what was done in place
        if not one.requires_grad:
            _same(one, other, rtol, atol, strides)
    _gradients_agree(lt, theirs, ours, wanted, results, second, rtol, atol)


def agree_with_either_backward(lt: Tensors, work: Work, given: Sequence[Operand], **options: Any) -> None:
    """Check also the gradients without a graph, for which torch's own kernels may be called."""
    agree(lt, work, given, **options)
    if any(each.requires_grad for each in given):
        agree(lt, work, given, **{**options, "second": False})


def _raises_the_same(error: Exception, lt: Tensors, work: Work, ours: Sequence[Tensor]) -> None:
    try:
        settled((work(lt, *ours), *ours))
    except Exception as own:
        kind = next(
            each
            for each in (IndexError, ValueError, TypeError, NotImplementedError, RuntimeError, Exception)
            if isinstance(error, each)
        )
        if not isinstance(own, kind):
            raise AssertionError(f"torch raises {error!r}, this raises {own!r}") from own
        return
    raise AssertionError(f"torch raises {error!r}, this raises nothing")


def settled(value: Any) -> Any:
    """Read the lazy tensors of a value; return it. The errors of most functions come with a read."""
    if isinstance(value, Tensor):
        to_torch(value)
    elif isinstance(value, (tuple, list)):
        for each in value:
            settled(each)
    return value


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _same(one: Any, other: Any, rtol: float | None, atol: float | None, strides: bool = True) -> None:
    if not isinstance(one, torch.Tensor):
        assert one == other
        return
    assert isinstance(other, Tensor)
    assert other.shape == tuple(one.shape)
    assert other.dtype is dtype_named(one.dtype)
    if strides and one.numel() and one.stride() != other.stride():
        # Strides of dimensions of size 1 tell nothing.
        pairs = zip(one.shape, one.stride(), other.strides, strict=True)
        assert all(size == 1 or a == b for size, a, b in pairs), f"strides {one.stride()}, not {other.strides}"
    assert other.requires_grad == one.requires_grad
    torch.testing.assert_close(to_torch(other), one.detach(), rtol=rtol, atol=atol, equal_nan=True)


def to_torch(tensor: Tensor) -> torch.Tensor:
    """Read a lazy tensor."""
    (elements,) = tensor._home._values_of((tensor,))
    kind = getattr(torch, elements.dtype.name)
    if not elements.raw:
        return torch.empty(elements.shape, dtype=kind)
    return torch.frombuffer(bytearray(elements.raw), dtype=kind).reshape(elements.shape)


def _close(found: Tensor, expected: torch.Tensor, rtol: float | None, atol: float | None) -> None:
    """Compare a gradient: in float32 other formulas and orders of sums are further apart than an operation."""
    if rtol is None and atol is None and expected.dtype is torch.float32:
        rtol = atol = 1e-4
    torch.testing.assert_close(to_torch(found), expected.detach(), rtol=rtol, atol=atol)


def _gradients_agree(
    lt: Tensors,
    theirs: Sequence[torch.Tensor],
    ours: Sequence[Tensor],
    wanted: Sequence[Any],
    results: Sequence[Any],
    second: bool,
    rtol: float | None,
    atol: float | None,
) -> None:
    leaves = [place for place, each in enumerate(theirs) if each.requires_grad and each.is_leaf]
    # In float32 second derivatives differ by rounding: by how much, the formula decides.
    second = second and all(each.dtype is torch.float64 for each in theirs if each.is_floating_point())
    roots = [place for place, each in enumerate(wanted) if isinstance(each, torch.Tensor) and each.requires_grad]
    if not leaves or not roots:
        return
    generator = torch.Generator().manual_seed(len(leaves))
    seeds = [
        torch.rand(wanted[place].shape, generator=generator, dtype=torch.float64).to(wanted[place].dtype)
        for place in roots
    ]
    expected = torch.autograd.grad(
        [wanted[place] for place in roots],
        [theirs[place] for place in leaves],
        seeds,
        create_graph=second,
        allow_unused=True,
    )
    found = lt.grad(
        [results[place] for place in roots],
        [ours[place] for place in leaves],
        [lt.tensor(each) for each in seeds],
        create_graph=second,
        allow_unused=True,
    )
    for one, other in zip(expected, found, strict=True):
        if one is None or other is None:
            assert one is None or not one.any()
            assert other is None or not to_torch(other).any()
            continue
        assert (other.shape, other.dtype) == (tuple(one.shape), dtype_named(one.dtype))
        _close(other, one, rtol, atol)
    if not second:
        return
    one_sum = sum((each * each).sum() for each in expected if each is not None and each.requires_grad)
    if not isinstance(one_sum, torch.Tensor):
        return
    kept = [place for place, each in enumerate(expected) if each is not None and each.requires_grad]
    parts = [found[place] for place in kept]
    assert all(each is not None for each in parts)
    other_sum = parts[0].mul(parts[0]).sum()  # type: ignore[union-attr]
    for part in parts[1:]:
        other_sum = other_sum.add(part.mul(part).sum())  # type: ignore[union-attr]
    again = torch.autograd.grad(one_sum, [theirs[place] for place in leaves], allow_unused=True)
    if not other_sum.requires_grad:
        assert all(each is None or not each.any() for each in again)
        return
    also = lt.grad(other_sum, [ours[place] for place in leaves], allow_unused=True)
    for one, other in zip(again, also, strict=True):
        if one is None or other is None:
            assert one is None or one.abs().max() < 1e-10  # of a quotient of equal numbers, what rounding leaves
            assert other is None or not to_torch(other).any()
            continue
        _close(other, one, rtol, atol)
