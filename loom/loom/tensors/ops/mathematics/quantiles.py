"""Statistics beside means and variances: quantiles, and those that leave out what is no number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from loom.tensors.commands import T
from loom.tensors.dtypes import DEFAULT, Kind, float32, float64, int32, int64
from loom.tensors.metas import Meta, wrapped
from loom.tensors.op import Op, function, method
from loom.tensors.ops.mathematics.complexes import check_no_complex
from loom.tensors.ops.ordering import Selected
from loom.tensors.ops.reductions import Dims
from loom.tensors.tensor import Tensor


class Extremes(NamedTuple):
    """The smallest and the largest element."""

    min: Tensor
    max: Tensor


def _kth_rule(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> tuple[Meta, Meta]:
    (meta,) = metas
    k, dim, keepdim = static
    place = wrapped(dim, len(meta.shape))
    if meta.shape and not meta.shape[place]:
        raise IndexError(f"kthvalue(): Expected reduction dim {place} to have non-zero size.")
    if not 1 <= k <= (meta.shape[place] if meta.shape else 1):
        raise RuntimeError(f"kthvalue(): selected number k out of range for dimension {place}")
    shape = (*meta.shape[:place], *([1] if keepdim else []), *meta.shape[place + 1 :]) if meta.shape else ()
    return Meta(shape, meta.dtype), Meta(shape, int64)


def _kth_backward(node: Any, grads: Any) -> tuple[Tensor]:
    grad, index = grads[0], node.result().detach()
    shape = node.metas[0].shape
    if not shape:
        return (grad,)
    _, dim, keepdim = node.static
    if not keepdim:
        grad, index = grad.unsqueeze(dim), index.unsqueeze(dim)
    return (node.home.zeros(shape, dtype=grad.dtype).scatter(dim, index, grad),)


_kth = Op(
    "kthvalue",
    _kth_rule,
    _kth_backward,
    saves_results=(1,),
    arguments=lambda tensors, numbers, static: ((T(0), *static), {}),
)


@method
def kthvalue(self: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Selected:
    """Return the k-th smallest element along a dimension, counted from 1, and its index."""
    place = wrapped(dim, self.dim())
    return Selected(*_kth.several((self,), (), (int(k), place, bool(keepdim))))


_INTERPOLATIONS = ("linear", "lower", "higher", "midpoint", "nearest")


@method
def quantile(
    self: Tensor,
    q: float | Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Tensor:
    """Return quantiles along a dimension, or of all elements.

    Args:
        self: the tensor.
        q: the share of elements below, from 0 to 1; of a tensor in one dimension, several.
        dim: the dimension; None for all.
        keepdim: whether the dimension stays, with size 1.
        interpolation: what to take between two elements.
    """
    if self.dtype not in (float32, float64):
        raise RuntimeError("quantile() input tensor must be either float or double dtype")
    if not isinstance(q, Tensor) and not 0 <= q <= 1:
        raise RuntimeError(f"quantile() q must be in the range [0, 1] but got {q:g}")
    shares: Tensor = q if isinstance(q, Tensor) else self._home.tensor(float(q), dtype=self.dtype)
    if shares.dim() > 1:
        raise RuntimeError(f"quantile() q must be a scalar or 1D tensor, but got dimension: {shares.dim()}")
    if shares.dtype is not self.dtype:
        raise RuntimeError("quantile() q tensor must be same dtype as the input tensor")
    if interpolation not in _INTERPOLATIONS:
        raise RuntimeError(
            f"quantile() interpolation must be one of {', '.join(_INTERPOLATIONS)}, but got {interpolation}"
        )
    if not self.numel():
        raise RuntimeError("quantile() input tensor must be non-empty")
    many = self.dim()
    place = 0 if dim is None else wrapped(dim, many)
    rows = self.flatten() if dim is None else self.unsqueeze(-1).transpose(place, -1).squeeze(place)
    found = _interpolated(rows.sort(-1).values, shares.reshape(-1), interpolation)
    if keepdim:
        found = found.reshape((*(1,) * many, -1)) if dim is None else found.unsqueeze(place)
    return found.movedim(-1, 0) if shares.dim() else found.squeeze(-1)  # type: ignore[no-any-return]


def _interpolated(ordered: Tensor, q: Tensor, how: str) -> Tensor:
    """Return quantiles along the last dimension, in that dimension."""
    last = ordered.shape[-1] - 1
    ranks = (q * last).expand((*ordered.shape[:-1], q.shape[0]))
    # A row with something that is no number has this at its end.
    ranks = ranks.masked_fill(ordered.isnan().any(-1, True), last)
    match how:
        case "lower":
            ranks = ranks.floor()
        case "higher":
            ranks = ranks.ceil()
        case "nearest":
            ranks = ranks.round()
    below = ranks.to(int64)
    found: Tensor = ordered.gather(-1, below)
    if how not in ("linear", "midpoint"):
        return found
    weights = ranks - below if how == "linear" else (ranks - below).mul(0).add(0.5)
    return found.lerp(ordered.gather(-1, ranks.ceil().to(int64)), weights)  # type: ignore[no-any-return]


@method
def nansum(self: Tensor, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """Return the sum of the elements that are numbers."""
    if self.dtype.kind is Kind.COMPLEX:
        raise RuntimeError("nansum on CPU does not support complex inputs")
    return self.masked_fill(self.isnan(), 0).sum(dim, keepdim, dtype)  # type: ignore[no-any-return]


@method
def nanmean(self: Tensor, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """Return the mean of the elements that are numbers."""
    if self.dtype.kind < Kind.FLOAT:
        raise RuntimeError(
            f"nanmean(): expected input to have floating point or complex dtype but got {self.dtype.scalar_name}"
        )
    return nansum(self, dim, keepdim, dtype) / self.isnan().logical_not().sum(dim, keepdim)  # type: ignore[no-any-return]


@method
def aminmax(self: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Extremes:
    """Return the smallest and the largest element, of all or along a dimension."""
    dims = () if dim is None else dim
    return Extremes(self.amin(dims, keepdim), self.amax(dims, keepdim))


@method
def cov(self: Tensor, *, correction: int = 1) -> Tensor:
    """Return the covariances of variables, whose observations are rows."""
    if self.dim() > 2:
        raise RuntimeError(f"cov(): expected input to have two or fewer dimensions but got {self.dim()}")
    if self.dtype.kind is Kind.BOOL:
        raise RuntimeError("cov(): bool dtype is not supported for input")
    rows = self if self.dim() == 2 else self.reshape(1, -1)
    rows = rows if rows.dtype.kind >= Kind.FLOAT else rows.to(DEFAULT)
    apart = rows - rows.mean(1, True)
    found = apart.matmul(apart.t().conj()) / max(rows.shape[1] - correction, 0)
    return found if self.dim() == 2 else found.reshape(())  # type: ignore[no-any-return]


@method
def corrcoef(self: Tensor) -> Tensor:
    """Return the correlations of variables, whose observations are rows."""
    check_no_complex("corrcoef", self)
    found = cov(self)
    if not found.dim():
        return found / found
    scale = found.diagonal().sqrt()
    return (found / scale.unsqueeze(1) / scale.unsqueeze(0)).clamp(-1, 1)  # type: ignore[no-any-return]


# Counts and places, which have no gradient


def _counted(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> None:
    if len(metas[0].shape) != 1 or metas[0].dtype.kind != Kind.INT:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")


_bincount = Op("bincount", _counted)
_searchsorted = Op(
    "searchsorted",
    lambda metas, numbers, static: Meta(metas[1].shape, int32 if dict(static)["out_int32"] else int64),
)


@method
def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Return how often each number is there, or the sums of their weights."""
    given = (self,) if weights is None else (self, weights.detach())
    return _bincount(given, (), (("minlength", int(minlength)),))


@function
def searchsorted(sorted_sequence: Tensor, input: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """Return where elements belong in rows that are in order."""
    rows, own = sorted_sequence.shape, input.shape
    if len(rows) != 1 and rows[:-1] != own[:-1]:
        raise RuntimeError(
            "torch.searchsorted(): boundaries tensor should be 1 dimension or the first N-1 dimensions of "
            f"boundaries tensor and input value tensor must match, but we got boundaries tensor {list(rows)} and "
            f"input value tensor {list(own)}"
        )
    static = (("out_int32", bool(out_int32)), ("right", bool(right)))
    return _searchsorted((sorted_sequence.detach(), input.detach()), (), static)


@function
def bucketize(input: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """Return between which of the boundaries elements are."""
    if boundaries.dim() != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})")
    return searchsorted(boundaries, input, out_int32=out_int32, right=right)
