"""Operations that compare a tensor's elements: extremes, sorting, the largest few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from loom.tensors.dtypes import int64
from loom.tensors.metas import Meta, is_dense, pointwise_meta, wrapped
from loom.tensors.op import Op, Rule, method
from loom.tensors.ops.reductions import Dims, options, reduced_dims, reduced_shape, restored
from loom.tensors.tensor import Tensor


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


def _shared_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    """Share a gradient equally among the elements that are equal to the result."""
    given = dict(node.static)
    dim, keepdim = given.get("dim"), given.get("keepdim", False)
    shape = node.metas[0].shape
    chosen = node[0].eq(restored(node.result().detach(), shape, dim, keepdim))
    count = chosen.sum(dim, True) if dim else chosen.sum()
    return (restored(grad, shape, dim, keepdim).div(count).mul(chosen),)


def _selected_backward(node: Any, grads: Any) -> tuple[Tensor]:
    """Put a gradient where its element was."""
    grad, index = grads[0], node.result().detach()
    shape, given = node.metas[0].shape, dict(node.static)
    if not shape:
        return (grad,)
    dim = wrapped(given["dim"], len(shape))
    if len(grad.shape) < len(shape):
        grad, index = grad.unsqueeze(dim), index.unsqueeze(dim)
    return (node.home.zeros(shape, dtype=grad.dtype).scatter(dim, index, grad),)


def _whole(name: str) -> Op:
    return Op(name, _extreme(name), _shared_backward, saves=(0,), saves_results=(0,))


def _along(name: str) -> Op:
    return Op(name, _selection(name), _selected_backward, saves_results=(1,))


_max, _max_along, _min, _min_along = _whole("max"), _along("max"), _whole("min"), _along("min")
_amax, _amin = _whole("amax"), _whole("amin")
_median, _median_along = (
    Op("median", lambda m, n, s: Meta((), m[0].dtype), _shared_backward, (0,), (0,)),
    _along("median"),
)
_argmax, _argmin = Op("argmax", _place_of_extreme("argmax")), Op("argmin", _place_of_extreme("argmin"))
_sort = Op("sort", _sorted_rule, _selected_backward, saves_results=(1,))
_topk = Op("topk", _largest, _selected_backward, saves_results=(1,))


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
    return _median((self,)) if dim is None else _select(_median_along, self, dim, keepdim)


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
