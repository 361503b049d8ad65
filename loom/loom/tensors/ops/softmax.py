"""Softmax, its logarithm, and the logarithm of a sum of exponentials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loom.tensors.commands import T
from loom.tensors.dtypes import DEFAULT, Kind, dtype_named
from loom.tensors.grad_modes import grad_enabled, no_grad
from loom.tensors.metas import Meta, wrapped
from loom.tensors.op import Op, function, method
from loom.tensors.ops.reductions import Dims, options, reduction, restored
from loom.tensors.tensor import Tensor


def _normalised(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    (meta,) = metas
    given = dict(static)
    wrapped(given["dim"], len(meta.shape))
    kind = given.get("dtype", meta.dtype)
    if kind.kind < Kind.FLOAT:
        raise NotImplementedError(f"\"softmax_lastdim_kernel_impl\" not implemented for '{kind.scalar_name}'")
    return Meta(meta.shape, kind)


def _as_result(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    return Meta(metas[1].shape, static[1])


def _kernel(name: str) -> Op:
    """Return torch's kernel of a gradient, of the gradient and the result; static are dim and the input's dtype."""
    return Op(name, _as_result, arguments=lambda tensors, numbers, static: ((T(0), T(1), *static), {}))


_softmax_kernel = _kernel("_softmax_backward_data")
_log_softmax_kernel = _kernel("_log_softmax_backward_data")


def _softmax_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    out, dim = node.result(), dict(node.static)["dim"]
    if not grad_enabled.get():
        return (_softmax_kernel((grad, out), (), (dim, out.dtype)),)
    weighted = grad.mul(out)
    return (weighted.sub(out.mul(weighted.sum(dim, True))),)


def _log_softmax_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    out, dim = node.result(), dict(node.static)["dim"]
    if not grad_enabled.get():
        return (_log_softmax_kernel((grad, out), (), (dim, out.dtype)),)
    return (grad.sub(out.exp().mul(grad.sum(dim, True))),)


def _logsumexp_backward(node: Any, grad: Tensor) -> tuple[Tensor]:
    shape = node.metas[0].shape
    dim, keepdim = (value for _, value in node.static)
    result = restored(node.result(), shape, dim, keepdim)
    return (restored(grad, shape, dim, keepdim).mul(node[0].sub(result).exp()),)


_softmax = Op("softmax", _normalised, _softmax_backward, saves_results=(0,))
_log_softmax = Op("log_softmax", _normalised, _log_softmax_backward, saves_results=(0,))
_logsumexp = Op(
    "logsumexp",
    reduction(lambda dtype, options: dtype if dtype.kind >= Kind.FLOAT else DEFAULT),
    _logsumexp_backward,
    saves=(0,),
    saves_results=(0,),
)


def _static(dim: int, dtype: Any) -> tuple[tuple[str, Any], ...]:
    return (("dim", dim),) if dtype is None else (("dim", dim), ("dtype", dtype_named(dtype)))


@method
def softmax(self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return _softmax((self,), (), _static(dim, dtype))


@method
def log_softmax(self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return _log_softmax((self,), (), _static(dim, dtype))


@method
def logsumexp(self: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    return _logsumexp((self,), (), options(dim, keepdim) or (("dim", ()), ("keepdim", False)))


@function
def gumbel_softmax(logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    """Return a sample of the Gumbel-softmax distribution; see ``torch.nn.functional.gumbel_softmax``.

    Args:
        tau: the temperature.
        hard: whether the sample is a one-hot vector, whose gradient is that of the soft one.
        eps: unused, as in torch.
    """
    home = logits._home
    with no_grad():
        noise = -home.empty_like(logits).exponential_().log()
    soft = softmax((logits + noise) / tau, dim)
    if not hard:
        return soft
    with no_grad():
        index = soft.max(dim, keepdim=True)[1]
        one_hot = home.zeros_like(logits).scatter_(dim, index, 1.0)
    found: Tensor = one_hot - soft.detach() + soft
    return found
