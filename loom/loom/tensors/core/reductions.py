"""Operations that make one number of many: sums, norms, extremes; and orders, cumulative sums and softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod as product
from typing import Any, NamedTuple

from loom.tensors.layouts import (
    DEFAULT,
    DType,
    DtypeKind,
    Meta,
    Shape,
    bool_,
    dtype_named,
    int64,
    is_dense,
    plain,
    pointwise_meta,
    real_of,
    uint8,
    wrapped,
)
from loom.tensors.learned import call
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
    return options.get("dtype") or (dtype if dtype.kind >= DtypeKind.FLOAT else int64)


def _averaged(dtype: DType, options: Any) -> DType:
    kind: DType = options.get("dtype") or dtype
    if kind.kind < DtypeKind.FLOAT:
        what = "Input" if "dtype" not in options else "Optional"
        raise RuntimeError(
            f"mean(): could not infer output dtype. {what} dtype must be either a floating point or complex dtype. "
            f"Got: {kind.scalar_name}"
        )
    return kind


def _varied(dtype: DType, options: Any) -> DType:
    if dtype.kind < DtypeKind.FLOAT:
        raise RuntimeError("std and var only support floating point and complex dtypes")
    return real_of(dtype)


def _normed(dtype: DType, options: Any) -> DType:
    if dtype.kind < DtypeKind.FLOAT:
        raise RuntimeError(
            f"linalg.vector_norm: Expected a floating point or complex tensor as input. Got {dtype.scalar_name}"
        )
    return real_of(options.get("dtype") or dtype)


def _truth(dtype: DType, options: Any) -> DType:
    return uint8 if dtype is uint8 else bool_


_sum = Op("sum", reduction(summed))
_mean = Op("mean", reduction(_averaged))
_prod = Op("prod", reduction(summed))
_var = Op("var", reduction(_varied))
_std = Op("std", reduction(_varied))
_norm = Op("linalg.vector_norm", reduction(_normed))
_any = Op("any", reduction(_truth))
_all = Op("all", reduction(_truth))


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
    if p == "nuc":
        return call(self._home, "norm", (self, p, dim, keepdim), {}, "1")  # type: ignore[no-any-return]
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


def _cumulative(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    given = dict(static)
    (meta,) = metas
    wrapped(given["dim"], len(meta.shape))
    return Meta(meta.shape, summed(meta.dtype, given))


_cumsum = Op("cumsum", _cumulative)


@method
def cumsum(self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return _cumsum((self,), (), _along(dim, dtype))


def _along(dim: int, dtype: Any) -> tuple[tuple[str, Any], ...]:
    return (("dim", dim),) if dtype is None else (("dim", dim), ("dtype", dtype_named(dtype)))


# Extremes and orders


class Selected(NamedTuple):
    """Elements, and where they were found along a dimension."""

    values: Tensor
    indices: Tensor


def _check_filled(name: str, meta: Meta, dim: Dims, kind: type[Exception]) -> None:
    """Raise what torch raises if there is no element to choose."""
    if dim is None or dim == ():
        if meta.numel == 0:
            raise kind(
                f"{name}(): Expected reduction dim to be specified for input.numel() == 0. "
                "Specify the reduction dim with the 'dim' argument."
            )
        return
    for place in sorted(reduced_dims(meta.shape, dim)) if meta.shape else ():
        if meta.shape[place] == 0:
            raise IndexError(f"{name}(): Expected reduction dim {place} to have non-zero size.")


def _extreme(name: str) -> Rule:
    """Return the rule of an extreme over dimensions; of all elements for none."""

    def rule(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
        given = dict(static)
        (meta,) = metas
        dim = given.get("dim")
        shape = reduced_shape(meta.shape, dim, given.get("keepdim", False))
        _check_filled(name, meta, dim, RuntimeError)
        return Meta(shape, meta.dtype)

    return rule


def _place_of_extreme(name: str) -> Rule:
    def rule(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
        given = dict(static)
        (meta,) = metas
        shape = reduced_shape(meta.shape, given["dim"], given["keepdim"])
        _check_filled(name, meta, given["dim"], IndexError)
        if meta.dtype.kind == 0:
            raise NotImplementedError(f"\"{name}_cpu\" not implemented for 'Bool'")
        return Meta(shape, int64)

    return rule


def _selection(name: str) -> Rule:
    """Return the rule of an extreme over one dimension, with its index."""

    def rule(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> tuple[Meta, Meta]:
        given = dict(static)
        (meta,) = metas
        shape = reduced_shape(meta.shape, given["dim"], given["keepdim"])
        _check_filled(name, meta, given["dim"], IndexError)
        return Meta(shape, meta.dtype), Meta(shape, int64)

    return rule


def _sorted_rule(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> tuple[Meta, Meta]:
    (meta,) = metas
    wrapped(dict(static)["dim"], len(meta.shape))
    made = meta if is_dense(meta.shape, meta.strides) else pointwise_meta([meta], meta.dtype)
    return made, made.of(int64)


def _largest(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> tuple[Meta, Meta]:
    given = dict(static)
    (meta,) = metas
    dim, k = wrapped(given["dim"], len(meta.shape)), given["k"]
    if not 0 <= k <= (meta.shape[dim] if meta.shape else 1):
        raise RuntimeError("selected index k out of range")
    shape = (*meta.shape[:dim], k, *meta.shape[dim + 1 :]) if meta.shape else ()
    return Meta(shape, meta.dtype), Meta(shape, int64)


_max, _max_along = Op("max", _extreme("max")), Op("max", _selection("max"), outs=2)
_min, _min_along = Op("min", _extreme("min")), Op("min", _selection("min"), outs=2)
_amax, _amin = Op("amax", _extreme("amax")), Op("amin", _extreme("amin"))
_argmax, _argmin = Op("argmax", _place_of_extreme("argmax")), Op("argmin", _place_of_extreme("argmin"))
_sort, _topk = Op("sort", _sorted_rule, outs=2), Op("topk", _largest, outs=2)


@method
def max(self: Tensor, dim: int | Tensor | None = None, keepdim: bool = False, other: Tensor | None = None) -> Any:
    """Return the largest element; with a dimension (values, indices); of two tensors the larger elements."""
    other = dim if isinstance(dim, Tensor) else other
    if other is not None:
        return self.maximum(other)
    return _max((self,)) if dim is None else _select(_max_along, self, dim, keepdim)


@method
def min(self: Tensor, dim: int | Tensor | None = None, keepdim: bool = False, other: Tensor | None = None) -> Any:
    """Return the smallest element; with a dimension (values, indices); of two tensors the smaller elements."""
    other = dim if isinstance(dim, Tensor) else other
    if other is not None:
        return self.minimum(other)
    return _min((self,)) if dim is None else _select(_min_along, self, dim, keepdim)


@method
def median(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the median, of two in the middle the lower; with a dimension (values, indices)."""
    return _middle("median", self, dim, keepdim)


@method
def nanmedian(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the median of the elements that are numbers; with a dimension (values, indices)."""
    return _middle("nanmedian", self, dim, keepdim)


def _middle(name: str, tensor: Tensor, dim: int | None, keepdim: bool) -> Any:
    if dim is None:
        return call(tensor._home, name, (tensor,), {}, "1")
    return call(tensor._home, name, (tensor, dim, keepdim), {}, "values,indices")


def _select(op: Op, tensor: Tensor, dim: Any, keepdim: bool) -> Selected:
    return Selected(*op.several((tensor,), (), (("dim", dim), ("keepdim", bool(keepdim)))))


@method
def amax(self: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    return _amax((self,), (), options(dim, keepdim))


@method
def amin(self: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    return _amin((self,), (), options(dim, keepdim))


@method
def argmax(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _argmax((self,), (), (("dim", dim), ("keepdim", bool(keepdim))))


@method
def argmin(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _argmin((self,), (), (("dim", dim), ("keepdim", bool(keepdim))))


@method
def sort(self: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Selected:
    static = (("dim", dim), ("descending", bool(descending)), ("stable", bool(stable)))
    return Selected(*_sort.several((self,), (), static))


@method
def argsort(self: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Tensor:
    return sort(self.detach(), dim, descending, stable).indices


@method
def topk(self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Selected:
    static = (("k", k), ("dim", dim), ("largest", bool(largest)), ("sorted", bool(sorted)))
    return Selected(*_topk.several((self,), (), static))


# Softmax


def _normalised(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    (meta,) = metas
    given = dict(static)
    wrapped(given["dim"], len(meta.shape))
    kind = given.get("dtype", meta.dtype)
    if kind.kind < DtypeKind.FLOAT:
        raise NotImplementedError(f"\"softmax_lastdim_kernel_impl\" not implemented for '{kind.scalar_name}'")
    return Meta(meta.shape, kind)


_softmax = Op("softmax", _normalised)
_log_softmax = Op("log_softmax", _normalised)
_logsumexp = Op("logsumexp", reduction(lambda dtype, options: dtype if dtype.kind >= DtypeKind.FLOAT else DEFAULT))


@method
def softmax(self: Tensor, dim: int | None = None, dtype: Any = None) -> Tensor:
    return _softmax((self,), (), _along(_softmax_dim(self, dim), dtype))


@method
def log_softmax(self: Tensor, dim: int | None = None, dtype: Any = None) -> Tensor:
    return _log_softmax((self,), (), _along(_softmax_dim(self, dim), dtype))


def _softmax_dim(tensor: Tensor, dim: int | None) -> int:
    return dim if dim is not None else 0 if tensor.dim() in (0, 1, 3) else 1


@method
def logsumexp(self: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    return _logsumexp((self,), (), options(dim, keepdim) or (("dim", ()), ("keepdim", False)))
