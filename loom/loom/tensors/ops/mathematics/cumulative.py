"""Operations along a dimension in which each result is made of neighbours, or of all elements before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from loom.tensors.commands import T
from loom.tensors.dtypes import bool_, int64
from loom.tensors.metas import Meta, wrapped
from loom.tensors.op import Op, method, methods
from loom.tensors.tensor import Tensor


class Extremes(NamedTuple):
    """The extremes so far, and where they were found."""

    values: Tensor
    indices: Tensor


def _extremes_rule(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> tuple[Meta, Meta]:
    (meta,) = metas
    if meta.numel:  # of nothing, torch looks at no dimension
        wrapped(static[0], len(meta.shape))
    return Meta(meta.shape, meta.dtype), Meta(meta.shape, int64)


def _extremes_backward(node: Any, grads: Any) -> tuple[Tensor]:
    shape, (dim,) = node.metas[0].shape, node.static
    if not shape or not node.metas[0].numel:
        return (grads[0],)
    index = node.result().detach()
    return (node.home.zeros(shape, dtype=grads[0].dtype).scatter_add(dim, index, grads[0]),)


def _extremes(name: str) -> Any:
    op = Op(
        name,
        _extremes_rule,
        _extremes_backward,
        saves_results=(1,),
        arguments=lambda tensors, numbers, static: ((T(0), *static), {}),
    )

    def call(self: Tensor, dim: int) -> Extremes:
        return Extremes(*op.several((self,), (), (int(dim),)))

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"See ``torch.{name}``."
    return call


for _name in ("cummax", "cummin"):
    methods[_name] = _extremes(_name)


@method
def diff(
    self: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    """Return the differences of neighbours along a dimension, and of these so many times."""
    if not self.dim():
        raise RuntimeError("diff expects input to be at least one-dimensional")
    if n < 0:
        raise RuntimeError(f"order must be non-negative but got {n}")
    parts = [each for each in (prepend, self, append) if each is not None]
    if n == 0 and len(parts) == 1:
        return self.clone()  # type: ignore[no-any-return]
    place = wrapped(dim, self.dim())
    found = self if len(parts) == 1 else self._home.cat(parts, place)
    for _ in range(min(n, found.shape[place])):
        rest = max(found.shape[place] - 1, 0)
        after, before = found.narrow(place, found.shape[place] - rest, rest), found.narrow(place, 0, rest)
        found = after.logical_xor(before) if found.dtype is bool_ else after - before
    return found


@method
def msort(self: Tensor) -> Tensor:
    """Return the elements in order along the first dimension."""
    return self.sort(0).values  # type: ignore[no-any-return]


def _trapezoid(name: str, y: Tensor, x: Tensor | None, dx: float, dim: int) -> tuple[Tensor, int]:
    """Return the areas between neighbours along a dimension, and that dimension."""
    if bool_ in (y.dtype, y.dtype if x is None else x.dtype):
        raise RuntimeError(f"{name}: received a bool input for `x` or `y`, but bool is not supported")
    place = wrapped(dim, y.dim())
    rest = y.shape[place] - 1
    sums = y.narrow(place, 0, rest) + y.narrow(place, 1, rest)
    if x is None:
        return sums * dx, place
    steps = x.diff(dim=place if x.dim() == y.dim() else -1)
    if x.dim() == 1:
        steps = steps.reshape([-1 if at == place else 1 for at in range(y.dim())])
    return sums * steps, place


@method
def trapezoid(self: Tensor, x: Tensor | None = None, *, dx: float = 1, dim: int = -1) -> Tensor:
    """Return the integral along a dimension by the trapezoidal rule."""
    if not self.shape[wrapped(dim, self.dim())]:
        return self.sum(dim)  # type: ignore[no-any-return]
    areas, place = _trapezoid("trapezoid", self, x, dx, dim)
    return areas.sum(place) / 2  # type: ignore[no-any-return]


@method
def cumulative_trapezoid(self: Tensor, x: Tensor | None = None, *, dx: float = 1, dim: int = -1) -> Tensor:
    """Return the integrals from the begin along a dimension by the trapezoidal rule."""
    areas, place = _trapezoid("cumulative_trapezoid", self, x, dx, dim)
    return areas.cumsum(place) / 2  # type: ignore[no-any-return]


methods["trapz"] = trapezoid
