"""Elements that are put together where an index sends them: sums, products, means and extremes."""

from __future__ import annotations

from typing import Any

from loom.tensors.commands import T
from loom.tensors.metas import Meta, check_written
from loom.tensors.op import Op, method
from loom.tensors.ops.layouts.gathering import scatter_rule
from loom.tensors.ops.layouts.layout import Metas
from loom.tensors.tensor import Tensor

REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")

_fits = scatter_rule("scatter")


def _rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    dim, reduce, _ = static
    if reduce not in REDUCTIONS:
        raise RuntimeError(f"reduce argument must be either sum, prod, mean, amax or amin, got {reduce}.")
    found: Meta = _fits(metas, numbers, (dim,))
    return found


def _arguments(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dim, reduce, include_self = static
    return (T(0), dim, T(1), T(2), reduce), {"include_self": include_self}


def _of_product(node: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a product. Of two factors 0 in one place, the source's are 0; torch's too."""
    dim, reduce, include_self = node.static
    own, index, source = node[0], node[1], node[2]
    without = own.masked_fill(own == 0, 1)
    of_self = grad * scatter_reduce(without, dim, index, source, reduce, include_self=include_self) / without
    zero = source == 0
    zeros = own._home.zeros_like(own).scatter_add(dim, index, zero.to(own.dtype)).gather(dim, index)
    single = zero & (zeros == 1)
    others = scatter_reduce(own, dim, index, source.masked_fill(single, 1), reduce, include_self=include_self)
    of_source = own._home.where(
        single,
        (grad * others).gather(dim, index),
        (grad * node.result()).gather(dim, index) / source.masked_fill(zero, 1),
    )
    return of_self, of_source


def _of_mean(node: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    dim, _, include_self = node.static
    home, index = node.home, node[1]
    count = home.ones_like(grad) if include_self else home.zeros_like(grad)
    count = count.scatter_add(dim, index, home.ones(node.metas[2].shape, dtype=grad.dtype))
    count = count.masked_fill(count == 0, 1)
    return grad / count, grad.gather(dim, index) / count.gather(dim, index)


def _of_extreme(node: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of an extreme: equal ones share it."""
    dim, index = node.static[0], node[1]
    result = node.result()
    own = (node[0] == result).to(grad.dtype)
    source = (node[2] == result.gather(dim, index)).to(grad.dtype)
    shared = grad / own.scatter_add(dim, index, source)
    return own * shared, source * shared.gather(dim, index)


def _backward(node: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dim, reduce, include_self = node.static
    match reduce:
        case "sum":
            of_self, of_source = grad, grad.gather(dim, node[1])
        case "prod":
            of_self, of_source = _of_product(node, grad)
        case "mean":
            of_self, of_source = _of_mean(node, grad)
        case _:
            of_self, of_source = _of_extreme(node, grad)
    if not include_self:
        of_self = of_self.scatter(dim, node[1], 0)
    return of_self, None, of_source


_scatter_reduce = Op("scatter_reduce", _rule, _backward, (0, 1, 2), (0,), _arguments)


@method
def scatter_reduce(
    self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Return the elements, each put together with those of ``src`` that an index sends there.

    Args:
        reduce: "sum", "prod", "mean", "amax" or "amin".
        include_self: whether the element itself is one of them, where something is sent.
    """
    return _scatter_reduce((self, index, src), (), (int(dim), reduce, bool(include_self)))


@method
def scatter_reduce_(
    self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """See `scatter_reduce`; in place."""
    check_written(self.meta)
    return _scatter_reduce.in_place((self, index, src), (), (int(dim), reduce, bool(include_self)))
