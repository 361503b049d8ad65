"""Operations that make one number of many: sums, means, variances and norms; and cumulative ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from math import prod as product
from typing import Any

from loom.tensors.dtypes import DType, Kind, bool_, dtype_named, int64, plain, real_of, uint8
from loom.tensors.metas import Meta, Shape, check_written, wrapped
from loom.tensors.op import Op, Rule, method
from loom.tensors.tensor import Tensor

Dims = int | Sequence[int] | None


def reduced_dims(shape: Shape, dim: Dims) -> set[int]:
    """Return the dimensions that a reduction removes: all for None or an empty sequence.

    Raises:
        IndexError: there is no such dimension.
        RuntimeError: one is named twice.
    """
    if dim is None or dim == ():
        return set(range(len(shape)))
    found: set[int] = set()
    for each in (dim,) if isinstance(dim, int) else dim:
        place = wrapped(each, len(shape))
        if place in found:
            raise RuntimeError(f"dim {place} appears multiple times in the list of dims")
        found.add(place)
    return found


def reduced_shape(shape: Shape, dim: Dims, keepdim: bool) -> Shape:
    gone = reduced_dims(shape, dim)
    return tuple([1 if place in gone else size for place, size in enumerate(shape) if keepdim or place not in gone])


def reduced_count(shape: Shape, dim: Dims) -> int:
    """Return of how many elements each one is made."""
    if not shape:
        return 1
    return product([shape[place] for place in reduced_dims(shape, dim)])


def reduction(dtype: Callable[[DType, Any], DType]) -> Rule:
    """Return the rule of a reduction, whose static arguments are ``dim``, ``keepdim`` and ``dtype`` if given."""

    def rule(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
        options = dict(static)
        (meta,) = metas
        kind = dtype(meta.dtype, options)
        return Meta(reduced_shape(meta.shape, options.get("dim"), options.get("keepdim", False)), kind)

    return rule


def restored(tensor: Tensor, shape: Shape, dim: Dims, keepdim: bool) -> Tensor:
    """Return the result of a reduction with the dimensions that it had removed, of size 1."""
    kept = tensor if keepdim or not shape else tensor.reshape(reduced_shape(shape, dim, True))
    return kept


def _restored(node: Any, tensor: Tensor) -> Tensor:
    options = dict(node.static)
    return restored(tensor, node.metas[0].shape, options.get("dim"), options.get("keepdim", False))


def _dims(dim: Dims) -> int | tuple[int, ...] | None:
    if dim is None or type(dim) is int:
        return dim
    dim = plain(dim)
    return dim if isinstance(dim, int) else tuple(dim)


def options(dim: Dims, keepdim: bool, dtype: Any = None) -> tuple[tuple[str, Any], ...]:
    """Return the static arguments of a reduction."""
    kind = () if dtype is None else (("dtype", dtype_named(dtype)),)
    dims = _dims(dim)
    if dims is None or dims == ():
        return (("dim", ()), ("keepdim", True), *kind) if keepdim else kind
    return (("dim", dims), ("keepdim", bool(keepdim)), *kind)


def summed(dtype: DType, options: Any) -> DType:
    """Return the dtype of a sum: that of integers is int64."""
    return options.get("dtype") or (dtype if dtype.kind >= Kind.FLOAT else int64)


def _averaged(dtype: DType, options: Any) -> DType:
    kind: DType = options.get("dtype") or dtype
    if kind.kind < Kind.FLOAT:
        what = "Input" if "dtype" not in options else "Optional"
        raise RuntimeError(
            f"mean(): could not infer output dtype. {what} dtype must be either a floating point or complex dtype. "
            f"Got: {kind.scalar_name}"
        )
    return kind


def _varied(dtype: DType, options: Any) -> DType:
    if dtype.kind < Kind.FLOAT:
        raise RuntimeError("std and var only support floating point and complex dtypes")
    return real_of(dtype)


def _normed(dtype: DType, options: Any) -> DType:
    if dtype.kind < Kind.FLOAT:
        raise RuntimeError(
            f"linalg.vector_norm: Expected a floating point or complex tensor as input. Got {dtype.scalar_name}"
        )
    return real_of(options.get("dtype") or dtype)


def _truth(dtype: DType, options: Any) -> DType:
    return uint8 if dtype is uint8 else bool_


def _spread(node: Any, grad: Tensor) -> tuple[Tensor]:
    """The gradient of a sum."""
    grad = _restored(node, grad)
    return (grad.expand(node.metas[0].shape),)


def _mean_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    count = reduced_count(node.metas[0].shape, dict(node.static).get("dim"))
    return _spread(node, grad.div(count))


def _prod_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    """Multiply, for each element, all others: a quotient would not do where one is 0."""
    x, shape = node[0], node.metas[0].shape
    dim = dict(node.static).get("dim")
    grad = _restored(node, grad)
    if not shape:
        return (grad.expand(shape),)
    if dim is None or dim == ():
        flat = _others(x.reshape(-1), 0) if x.numel() else x.reshape(-1)
        return (grad.mul(flat.reshape(shape)),)
    return (grad.mul(_others(x, wrapped(dim, len(shape)))),)


def _others(x: Tensor, dim: int) -> Tensor:
    """Return, for each element, the product of the others along a dimension."""
    size = x.shape[dim]
    if not size:
        return x
    one = x._home.ones(reduced_shape(x.shape, dim, True), dtype=x.dtype)
    before = x._home.cat([one, x.narrow(dim, 0, size - 1)], dim).cumprod(dim)
    turned = x.flip(dim)
    after = x._home.cat([one, turned.narrow(dim, 0, size - 1)], dim).cumprod(dim).flip(dim)
    return before.mul(after)  # type: ignore[no-any-return]


def _var_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    return (_of_variance(node, _restored(node, grad)),)


def _of_variance(node: Any, grad: Tensor) -> Tensor:
    x, given = node[0], dict(node.static)
    dim = given.get("dim")
    freedom = reduced_count(x.shape, dim) - given["correction"]
    factor = 2.0 / freedom if freedom else inf
    return grad.mul(factor).mul(x.sub(x.mean(dim, True)))  # type: ignore[no-any-return]


def _std_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    std = _restored(node, node.result())
    of_var = _restored(node, grad).div(std.mul(2)).masked_fill(std.eq(0), 0)
    return (_of_variance(node, of_var),)


def _norm_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    x, p = node[0], dict(node.static)["ord"]
    grad = _restored(node, grad)
    if p == 0:
        return (x.mul(0),)
    if p == 1:
        return (x.sign().mul(grad),)
    norm = _restored(node, node.result())
    if p == 2:
        return (x.mul(grad.div(norm).masked_fill(norm.eq(0), 0)),)
    size = x.abs()
    if p in (inf, -inf):
        largest = size.eq(norm)
        count = largest.sum(dict(node.static).get("dim"), True)
        return (x.sign().mul(largest).mul(grad.div(count)),)
    if p > 2:
        part = x.mul(size.pow(p - 2))
    else:
        part = x.sign().mul(size.pow(p - 1))
        part = part if p > 1 else part.masked_fill(x.eq(0), 0)
    return (part.mul(grad.div(norm.pow(p - 1)).masked_fill(norm.eq(0), 0)),)


_sum = Op("sum", reduction(summed), _spread)
_mean = Op("mean", reduction(_averaged), _mean_backward)
_prod = Op("prod", reduction(summed), _prod_backward, saves=(0,))
_var = Op("var", reduction(_varied), _var_backward, saves=(0,))
_std = Op("std", reduction(_varied), _std_backward, saves=(0,), saves_results=(0,))
_norm = Op("linalg.vector_norm", reduction(_normed), _norm_backward, saves=(0,), saves_results=(0,))
_any = Op("any", reduction(_truth))
_all = Op("all", reduction(_truth))
_count_nonzero = Op("count_nonzero", reduction(lambda dtype, options: int64))


@method
def sum(self: Tensor, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    plainly = dim is None and not keepdim and dtype is None
    return _sum((self,), (), () if plainly else options(dim, keepdim, dtype))


@method
def mean(self: Tensor, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return _mean((self,), (), options(dim, keepdim, dtype))


@method
def prod(self: Tensor, dim: int | None = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    if not (dim is None or isinstance(plain(dim), int)):
        raise TypeError(f"prod() takes one dimension, not {dim}")
    return _prod((self,), (), options(dim, keepdim, dtype))


@method
def var(
    self: Tensor,
    dim: Dims | bool = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    correction: float | None = None,
) -> Tensor:
    return _var((self,), (), _varied_options(dim, unbiased, keepdim, correction))


@method
def std(
    self: Tensor,
    dim: Dims | bool = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    correction: float | None = None,
) -> Tensor:
    return _std((self,), (), _varied_options(dim, unbiased, keepdim, correction))


@method
def var_mean(
    self: Tensor,
    dim: Dims | bool = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:
    dims = None if isinstance(dim, bool) else dim
    return var(self, dim, unbiased, keepdim, correction), mean(self, dims, keepdim)


@method
def std_mean(
    self: Tensor,
    dim: Dims | bool = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:
    dims = None if isinstance(dim, bool) else dim
    return std(self, dim, unbiased, keepdim, correction), mean(self, dims, keepdim)


def _varied_options(
    dim: Dims | bool, unbiased: bool | None, keepdim: bool, correction: float | None
) -> tuple[tuple[str, Any], ...]:
    """Return the static arguments; ``var(False)`` is ``var(unbiased=False)``."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    dims = _dims(dim)
    return (("dim", dims), ("correction", correction), ("keepdim", bool(keepdim)))


@method
def norm(
    self: Tensor, p: float | str | None = "fro", dim: Dims = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    order = 2.0 if p is None or p == "fro" else float(p)
    dims = _dims(dim)
    if p == "fro" and isinstance(dims, tuple) and len(dims) > 2:
        raise RuntimeError(f"linalg.matrix_norm: dim must be a 2-tuple. Got {' '.join(map(str, dims))}")
    kind = () if dtype is None else (("dtype", dtype_named(dtype)),)
    return _norm((self,), (), (("ord", order), ("dim", dims), ("keepdim", bool(keepdim)), *kind))


@method
def any(self: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _any((self,), (), options(dim, keepdim))


@method
def all(self: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _all((self,), (), options(dim, keepdim))


@method
def count_nonzero(self: Tensor, dim: Dims = None) -> Tensor:
    return _count_nonzero((self,), (), () if dim is None else options(dim, False)[:1])


def _cumulative(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    given = dict(static)
    (meta,) = metas
    wrapped(given["dim"], len(meta.shape))
    return Meta(meta.shape, summed(meta.dtype, given))


def _cumsum_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    if not grad.shape:
        return (grad,)
    dim = dict(node.static)["dim"]
    return (grad.flip(dim).cumsum(dim).flip(dim),)


def _cumprod_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    """Sum what each element does to each product after it; a quotient would not do where one is 0.

    That is the product of the elements before it, times a sum ``s[i] = grad[i] + x[i + 1] * s[i + 1]``, which is
    computed for windows of 2, 4, 8... elements.
    """
    x = node[0]
    if not x.shape:
        return (grad,)
    dim = wrapped(dict(node.static)["dim"], len(x.shape))
    size = x.shape[dim]
    if not size:
        return (grad,)
    one = node.home.ones(reduced_shape(x.shape, dim, True), dtype=x.dtype)
    before = node.home.cat([one, x.narrow(dim, 0, size - 1)], dim).cumprod(dim)
    sums, factors, step = grad, x.narrow(dim, 1, size - 1), 1
    while step < size:
        rest = size - step
        longer = sums.narrow(dim, 0, rest).add(factors.mul(sums.narrow(dim, step, rest)))
        sums = node.home.cat([longer, sums.narrow(dim, rest, step)], dim)
        if rest > step:
            factors = factors.narrow(dim, 0, rest - step).mul(factors.narrow(dim, step, rest - step))
        step *= 2
    return (before.mul(sums),)


_cumsum = Op("cumsum", _cumulative, _cumsum_backward)
_cumprod = Op("cumprod", _cumulative, _cumprod_backward, saves=(0,))


@method
def cumsum(self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return _cumsum((self,), (), _along(dim, dtype))


@method
def cumprod(self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return _cumprod((self,), (), _along(dim, dtype))


@method
def cumsum_(self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return _cumulated(_cumsum, self, dim, dtype)


@method
def cumprod_(self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return _cumulated(_cumprod, self, dim, dtype)


def _cumulated(op: Op, tensor: Tensor, dim: int, dtype: Any) -> Tensor:
    """Queue a cumulative operation in place, which never gives another dtype."""
    own = tensor.dtype
    wanted = own if dtype is None else dtype_named(dtype)
    if wanted is not own:
        raise RuntimeError(
            f"Bad in-place call: input tensor dtype {own.scalar_name} and output tensor dtype "
            f"{wanted.scalar_name} should match"
        )
    if own is bool_:
        raise NotImplementedError(f"\"{op.name}_out_cpu\" not implemented for 'Bool'")
    check_written(tensor.meta)
    return op.in_place((tensor,), (), _along(dim, own))


def _along(dim: int, dtype: Any) -> tuple[tuple[str, Any], ...]:
    return (("dim", dim),) if dtype is None else (("dim", dim), ("dtype", dtype_named(dtype)))
