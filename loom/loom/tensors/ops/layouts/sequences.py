"""Further functions of `Tensors` that make tensors: sequences, random ints, and indices of triangles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from operator import index as to_int
from typing import Any

from loom.tensors.commands import Form, S
from loom.tensors.dtypes import DEFAULT, DType, dtype_named, int64, plain
from loom.tensors.metas import Meta
from loom.tensors.tensor import Tensor

MAKERS: dict[str, Callable[..., Any]] = {}
"""Methods of `Tensors`, by name."""


def _maker(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def make(lt: Any, *args: Any, **kwargs: Any) -> Any:
        return function(lt, *plain(args), **{name: plain(each) for name, each in kwargs.items()})

    MAKERS[function.__name__] = make
    return function


def _kind(dtype: Any, default: DType) -> DType:
    return default if dtype is None else dtype_named(dtype)


def _steps(lt: Any, name: str, ends: tuple[Any, Any], steps: int, dtype: Any, needs: bool, *more: Any) -> Tensor:
    if steps < 0:
        raise RuntimeError("number of steps must be non-negative")
    kind = _kind(dtype, DEFAULT)
    form = Form(".made", (name, S(0), S(1), int(to_int(steps)), *more), (("dtype", kind),), numbers=2)
    return lt._made(form, Meta((int(steps),), kind), needs, ends)  # type: ignore[no-any-return]


@_maker
def linspace(
    lt: Any, start: float, end: float, steps: int, *, dtype: Any = None, requires_grad: bool = False
) -> Tensor:
    """Make so many numbers from ``start`` to ``end``, at equal distances."""
    return _steps(lt, "linspace", (start, end), steps, dtype, requires_grad)


@_maker
def logspace(
    lt: Any,
    start: float,
    end: float,
    steps: int,
    base: float = 10.0,
    *,
    dtype: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """Make so many powers of ``base``, with exponents from ``start`` to ``end`` at equal distances."""
    return _steps(lt, "logspace", (start, end), steps, dtype, requires_grad, float(base))


@_maker
def randint(lt: Any, low: int, high: Any = None, size: Sequence[int] | None = None, *, dtype: Any = None) -> Tensor:
    """Make random ints from ``low``, 0 if it is left out, below ``high``."""
    if size is None:
        low, high, size = (0, low, high) if not isinstance(high, int) else (low, high, None)
    if size is None or high is None:
        raise TypeError("randint() takes a bound and a size, or two bounds and a size")
    if low >= high:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    meta = Meta(tuple(size), _kind(dtype, int64))
    form = Form(".made", ("randint", S(0), S(1), meta.shape), (("dtype", meta.dtype),), numbers=2)
    return lt._made(form, meta, False, (int(low), int(high)))  # type: ignore[no-any-return]


@_maker
def randperm(lt: Any, n: int, *, dtype: Any = None) -> Tensor:
    """Make the ints below ``n`` in a random order."""
    if n < 0:
        raise RuntimeError(f"n must be non-negative, got {n}")
    meta = Meta((int(n),), _kind(dtype, int64))
    return lt._made(Form(".made", ("randperm", int(n)), (("dtype", meta.dtype),)), meta, False)  # type: ignore[no-any-return]


@_maker
def as_tensor(lt: Any, data: Any, dtype: Any = None) -> Tensor:
    """Make a tensor of data; a tensor is returned itself if it has the dtype."""
    if isinstance(data, Tensor):
        return data if dtype is None else data.to(dtype)
    return lt.tensor(data, dtype)  # type: ignore[no-any-return]


def _triangle(name: str, upper: bool) -> None:
    def indices(lt: Any, row: int, col: int, offset: int = 0, *, dtype: Any = None) -> Tensor:
        if row < 0 or col < 0:
            raise RuntimeError(f"row and col must be non-negative, got {row} and {col}")
        below = sum(min(max(place + (offset if upper else offset + 1), 0), col) for place in range(row))
        meta = Meta((2, row * col - below if upper else below), _kind(dtype, int64))
        form = Form(".made", (name, int(row), int(col), int(offset)), (("dtype", meta.dtype),))
        return lt._made(form, meta, False)  # type: ignore[no-any-return]

    indices.__name__ = indices.__qualname__ = name
    indices.__doc__ = f"See ``torch.{name}``."
    _maker(indices)


_triangle("tril_indices", upper=False)
_triangle("triu_indices", upper=True)
