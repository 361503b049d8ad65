"""Elements gathered and scattered by tensors of ints and masks."""

from __future__ import annotations

from typing import Any

from loom.tensors.commands import S, T
from loom.tensors.dtypes import int32, int64
from loom.tensors.metas import Meta, Shape, broadcast, pointwise_meta, wrapped
from loom.tensors.op import Op, method
from loom.tensors.ops.layouts.layout import Metas
from loom.tensors.tensor import Tensor

Number = bool | int | float | complex
Grads = tuple[Tensor | None, ...]


def _arguments(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the first tensor, the dimension, the other tensors and the numbers."""
    return (T(0), *static, *map(T, range(1, tensors)), *map(S, range(numbers))), {}


def _zeros(node: Any) -> Tensor:
    meta = node.metas[0]
    zeros: Tensor = node.home.zeros(meta.shape, dtype=meta.dtype)
    return zeros


def _flat(shape: Shape) -> Shape:
    return shape or (1,)


# By an index for each element


def _check_index(name: str, index: Meta) -> None:
    if index.dtype not in (int32, int64) and index.numel:
        raise RuntimeError(f"{name}(): Expected dtype int32/int64 for index")


def _check_sizes(own: Meta, index: Meta, dim: int, source: Meta | None = None) -> None:
    """Check that an index fits a tensor in all other dimensions, and what is scattered in all."""
    if not index.numel:
        return
    mine, its = _flat(own.shape), _flat(index.shape)
    if len(its) != len(mine):
        raise RuntimeError("Index tensor must have the same number of dimensions as input tensor")
    if source is not None and len(_flat(source.shape)) != len(its):
        raise RuntimeError("Index tensor must have the same number of dimensions as src tensor")
    fits = all(size <= mine[place] for place, size in enumerate(its) if place != dim)
    if source is not None and any(a > b for a, b in zip(its, _flat(source.shape), strict=True)):
        fits = False
    if not fits:
        end = f" and to be no larger size than src {list(source.shape)}" if source is not None else ""
        raise RuntimeError(
            f"Expected index {list(index.shape)} to be no larger than self {list(own.shape)} apart from dimension "
            f"{dim}{end}"
        )


def _gather_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    own, index = metas
    dim = wrapped(static[0], len(own.shape))
    _check_index("gather", index)
    _check_sizes(own, index, dim)
    return Meta(index.shape, own.dtype)


_gather = Op(
    "gather",
    _gather_rule,
    lambda node, grad: (scatter_add(_zeros(node), node.static[0], node[1], grad), None),
    (1,),
    arguments=_arguments,
)


@method
def gather(self: Tensor, dim: int, index: Tensor) -> Tensor:
    return _gather((self, index), (), (int(dim),))


def scatter_rule(name: str) -> Any:
    """Return the rule of what an index scatters along a dimension, which is the first static argument."""

    def rule(metas: Metas, numbers: Any, static: Any) -> Meta:
        own, index, *source = metas
        dim = wrapped(static[0], len(own.shape))
        _check_index(name, index)
        if source and source[0].dtype is not own.dtype:
            raise RuntimeError(f"{name}(): Expected self.dtype to be equal to src.dtype")
        _check_sizes(own, index, dim, *source)
        return Meta(own.shape, own.dtype)

    return rule


def _scatter_backward(node: Any, grad: Tensor) -> Grads:
    (dim,) = node.static
    return (
        _scatter_number((grad, node[1]), (0,), (dim,)) if node.needs(0) else None,
        None,
        gather(grad, dim, node[1]) if len(node.edges) > 2 and node.needs(2) else None,
    )[: len(node.edges)]


def _scatter_add_backward(node: Any, grad: Tensor) -> Grads:
    return grad, None, gather(grad, node.static[0], node[1]) if node.needs(2) else None


_scatter = Op("scatter", scatter_rule("scatter"), _scatter_backward, (1,), arguments=_arguments)
_scatter_number = Op("scatter", scatter_rule("scatter"), _scatter_backward, (1,), arguments=_arguments)
_scatter_add = Op("scatter_add", scatter_rule("scatter_add"), _scatter_add_backward, (1,), arguments=_arguments)


@method
def scatter(self: Tensor, dim: int, index: Tensor, src: Tensor | Number) -> Tensor:
    if isinstance(src, Tensor):
        return _scatter((self, index, src), (), (int(dim),))
    return _scatter_number((self, index), (src,), (int(dim),))


@method
def scatter_(self: Tensor, dim: int, index: Tensor, src: Tensor | Number) -> Tensor:
    if isinstance(src, Tensor):
        return _scatter.in_place((self, index, src), (), (int(dim),))
    return _scatter_number.in_place((self, index), (src,), (int(dim),))


@method
def scatter_add(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return _scatter_add((self, index, src), (), (int(dim),))


@method
def scatter_add_(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return _scatter_add.in_place((self, index, src), (), (int(dim),))


@method
def take_along_dim(self: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """Gather along a dimension, with the others broadcast; of all elements in a row if no dimension is given."""
    if indices.dtype is not int64:
        raise RuntimeError(
            f"torch.take_along_dim(): dtype of indices should be Long but got {indices.dtype.scalar_name}"
        )
    if dim is None:
        return gather(self.view(-1), 0, indices.view(-1))
    own, its = self.shape, indices.shape
    if len(own) != len(its):
        raise RuntimeError(
            "torch.take_along_dim(): input and indices should have the same number of dimensions, but got "
            f"{len(own)} dimensions for input, and {len(its)} dimensions for indices"
        )
    if not own:
        return gather(self, dim, indices)
    place = wrapped(dim, len(own))
    whole = broadcast((*own[:place], its[place], *own[place + 1 :]), its)
    mine = broadcast((*its[:place], own[place], *its[place + 1 :]), own)
    return gather(self.expand(mine), place, indices.expand(whole))


# By an index along a dimension


def _check_vector(name: str, index: Meta, error: type[Exception] = IndexError) -> None:
    if len(index.shape) > 1:
        raise error(f"{name}(): Index is supposed to be a vector, but got dim: {len(index.shape)}")


def _select_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    own, index = metas
    _check_vector("index_select", index)
    if index.dtype not in (int32, int64):
        raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")
    dim = wrapped(static[0], len(own.shape))
    if not own.shape:
        if index.numel != 1:
            raise RuntimeError(f"index_select(): Index to scalar can have only 1 value, got {index.numel} value(s)")
        return own
    return Meta((*own.shape[:dim], index.numel, *own.shape[dim + 1 :]), own.dtype)


def _select_backward(node: Any, grad: Tensor) -> Grads:
    return index_add(_zeros(node), node.static[0], node[1], grad), None


_select = Op("index_select", _select_rule, _select_backward, (1,), arguments=_arguments)


@method
def index_select(self: Tensor, dim: int, index: Tensor) -> Tensor:
    return _select((self, index), (), (int(dim),))


def _slices(meta: Meta, dim: int) -> Shape:
    return (*meta.shape[:dim], *meta.shape[dim + 1 :])


def _add_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    own, index, source = metas
    dim = wrapped(static[0], len(own.shape))
    if index.dtype not in (int32, int64):
        raise RuntimeError(f"index_add_(): Expected dtype int32/int64 for index but got: {index.dtype.scalar_name}")
    if own.dtype is not source.dtype:
        raise RuntimeError(
            f"index_add_(): self ({own.dtype.scalar_name}) and source ({source.dtype.scalar_name}) must have the "
            "same scalar type"
        )
    _check_vector("index_add_", index)
    if len(own.shape) != len(source.shape) or _slices(own, dim) != _slices(source, dim):
        raise RuntimeError(
            "source tensor shape must match self tensor shape, excluding the specified dimension. Got self.shape = "
            f"{list(own.shape)} source.shape = {list(source.shape)}"
        )
    many = _flat(source.shape)[dim]
    if index.numel != many:
        raise RuntimeError(
            f"index_add_(): Number of indices ({index.numel}) should be equal to source.size(dim): ({many}), for "
            f"dim: {dim}"
        )
    return Meta(own.shape, own.dtype)


def _add_backward(node: Any, grad: Tensor) -> Grads:
    source = None
    if node.needs(2):
        source = index_select(grad, node.static[0], node[1])
        source = source.mul(node.numbers[0]) if node.numbers else source
    return grad, None, source


def _add_arguments(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (T(0), *static, T(1), T(2)), {"alpha": S(0)} if numbers else {}


_add = Op("index_add", _add_rule, _add_backward, (1,), arguments=_add_arguments)


@method
def index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Number = 1) -> Tensor:
    return _add((self, index, source), () if alpha == 1 else (alpha,), (int(dim),))


@method
def index_add_(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Number = 1) -> Tensor:
    return _add.in_place((self, index, source), () if alpha == 1 else (alpha,), (int(dim),))


def _copy_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    own, index, source = metas
    dim = wrapped(static[0], len(own.shape))
    if len(index.shape) > 1:
        raise IndexError(f"index_copy_(): Index should have dimension 1 or 0 (got {len(index.shape)})")
    if not source.shape and index.numel != 1:
        raise IndexError(f"index_copy_(): When source is scalar, index should have one element (got {index.numel})")
    if source.shape and own.shape and len(source.shape) != len(own.shape):
        raise IndexError(
            "index_copy_(): When source and destination are not scalars, their dimensionality must match. Source "
            f"dimensionality ({len(source.shape)}), destination dimensionality ({len(own.shape)})"
        )
    if index.dtype is not int64:
        raise RuntimeError(f"index_copy_(): Expected a long tensor for index, but got {index.dtype.scalar_name}")
    if own.dtype is not source.dtype:
        raise RuntimeError(
            "index_copy_(): self and source expected to have the same dtype, but got (self) "
            f"{own.dtype.scalar_name} and (source) {source.dtype.scalar_name}"
        )
    if _slices(own, dim) != _slices(source, dim):
        raise RuntimeError(
            "index_copy_(): Source/destination tensor must have same slice shapes. Destination slice shape: "
            f"{' '.join(map(str, _slices(own, dim)))} at dimension {dim} and source slice shape: "
            f"{' '.join(map(str, _slices(source, dim)))} at dimension 0."
        )
    if source.shape and index.numel != source.shape[dim]:
        raise IndexError(
            f"index_copy_(): Number of indices ({index.numel}) should be equal to source.size(dim) "
            f"({source.shape[dim]})"
        )
    return Meta(own.shape, own.dtype)


def _copy_backward(node: Any, grad: Tensor) -> Grads:
    (dim,) = node.static
    return (
        index_fill(grad, dim, node[1], 0) if node.needs(0) else None,
        None,
        index_select(grad, dim, node[1]) if node.needs(2) else None,
    )


_copy = Op("index_copy", _copy_rule, _copy_backward, (1,), arguments=_arguments)


@method
def index_copy(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return _copy((self, index, source), (), (int(dim),))


@method
def index_copy_(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return _copy.in_place((self, index, source), (), (int(dim),))


def _fill_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    own, index, *value = metas
    if value and value[0].shape:
        raise RuntimeError(
            "index_fill_ only supports a 0-dimensional value tensor, but got tensor with "
            f"{len(value[0].shape)} dimension(s)."
        )
    if index.dtype is not int64:
        raise IndexError("index_fill_(): Expected dtype int64 for index.")
    wrapped(static[0], len(own.shape))
    if len(index.shape) > 1:
        raise RuntimeError("Index has to be a vector/scalar")
    return pointwise_meta([own], own.dtype)


def _fill_backward(node: Any, grad: Tensor) -> Grads:
    (dim,) = node.static
    return (
        index_fill(grad, dim, node[1], 0) if node.needs(0) else None,
        None,
        index_select(grad, dim, node[1]).sum() if len(node.edges) > 2 and node.needs(2) else None,
    )[: len(node.edges)]


_fill = Op("index_fill", _fill_rule, _fill_backward, (1,), arguments=_arguments)


@method
def index_fill(self: Tensor, dim: int, index: Tensor, value: Tensor | Number) -> Tensor:
    if isinstance(value, Tensor):
        return _fill((self, index, value), (), (int(dim),))
    return _fill((self, index), (value,), (int(dim),))


@method
def index_fill_(self: Tensor, dim: int, index: Tensor, value: Tensor | Number) -> Tensor:
    if isinstance(value, Tensor):
        return _fill.in_place((self, index, value), (), (int(dim),))
    return _fill.in_place((self, index), (value,), (int(dim),))
