"""Losses of a prediction and a target of the same shape; those of classes are in `loom.tensors.ops.entropy`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from loom.tensors.dtypes import DType, Kind
from loom.tensors.grad_modes import grad_enabled
from loom.tensors.metas import Meta, broadcast, pointwise_meta
from loom.tensors.op import Op, function
from loom.tensors.ops.elementwise import result_dtype
from loom.tensors.tensor import Tensor

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def reduction_number(reduction: str) -> int:
    """Return torch's number of a reduction.

    Raises:
        ValueError: there is none of this name.
    """
    number = _REDUCTIONS.get(reduction)
    if number is None:
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return number


def reduce(losses: Tensor, reduction: str) -> Tensor:
    """Return the losses, their mean or their sum."""
    number = reduction_number(reduction)
    return losses if number == 0 else losses.mean() if number == 1 else losses.sum()


def check_cast(found: DType, wanted: DType) -> None:
    """Check that what is computed fits where torch puts it.

    Raises:
        RuntimeError: it is of a higher kind.
    """
    if found.kind > wanted.kind:
        raise RuntimeError(
            f"result type {found.scalar_name} can't be cast to the desired output type {wanted.scalar_name}"
        )


def _loss(name: str, like_input: bool = False) -> Callable[..., Meta]:
    """Return the rule of a loss.

    Args:
        name: of torch's kernel, in its error.
        like_input: whether the losses have the layout and the dtype of the prediction, whatever the target's.
    """

    def rule(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
        kind, found = metas[0].dtype, result_dtype(metas, ())
        if like_input:
            check_cast(found, kind)
        else:
            kind = found
        if kind.kind < Kind.FLOAT:
            raise NotImplementedError(f"\"{name}\" not implemented for '{kind.scalar_name}'")
        losses = pointwise_meta(metas[:1] if like_input else metas[:2], kind)
        return losses if not dict(static)["reduction"] else Meta((), kind)

    return rule


def _contiguous(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    """The rule of most kernels of gradients, of the gradient, the prediction and the target."""
    return Meta(metas[1].shape, metas[1].dtype)


def scaled(node: Any, grad: Tensor) -> Tensor:
    """Return a loss's gradient as that of each of the losses of which it is the mean."""
    if dict(node.static)["reduction"] != 1:
        return grad
    count = 1
    for size in broadcast(node.metas[0].shape, node.metas[1].shape):
        count *= size
    return grad.div(count)  # type: ignore[no-any-return]


def _symmetric(name: str, slope: Any, like_input: bool = False) -> Op:
    """Return a loss of the difference of two tensors.

    Args:
        slope: its derivative by the difference, from this and the static arguments.
        like_input: see `_loss`.
    """
    fused = Op(f"ops.aten.{name}_backward.default", _contiguous)

    def backward(node: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        one, other = node[0], node[1]
        if grad_enabled.get() or one.dtype is not other.dtype:
            found = scaled(node, grad).mul(slope(one.sub(other), dict(node.static)))
        else:
            found = fused((grad, one, other), (), node.static)
        return found if node.needs(0) else None, found.neg() if node.needs(1) else None

    return Op(f"ops.aten.{name}.default", _loss(f"{name}_cpu", like_input), backward, saves=(0, 1))


_mse = _symmetric("mse_loss", lambda apart, static: apart.mul(2))
_smooth_l1 = _symmetric("smooth_l1_loss", lambda apart, static: apart.div(static["beta"]).clamp(-1.0, 1.0))
_huber = _symmetric(
    "huber_loss", lambda apart, static: apart.clamp(-static["delta"], static["delta"]), like_input=True
)


def _expanded(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    if one.shape == other.shape:
        return one, other
    shape = broadcast(one.shape, other.shape)
    return one.expand(shape), other.expand(shape)


@function
def mse_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    if weight is None:
        return _mse(_expanded(input, target), (), (("reduction", reduction_number(reduction)),))
    _check_weight(input, weight)
    losses = mse_loss(input, target, "none").mul(weight)
    return reduce(losses, reduction) if reduction != "mean" else losses.sum().div(weight.sum())


@function
def l1_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    losses = input.sub(target).abs()
    if weight is None:
        return reduce(losses, reduction)
    _check_weight(input, weight)
    losses = losses.mul(weight)
    return reduce(losses, reduction) if reduction != "mean" else losses.sum().div(weight.sum())


@function
def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor:
    if beta < 0:
        raise RuntimeError("smooth_l1_loss does not support negative values for beta.")
    if beta == 0:
        return l1_loss(input, target, reduction)
    return _smooth_l1(
        _expanded(input, target), (), (("reduction", reduction_number(reduction)), ("beta", float(beta)))
    )


@function
def huber_loss(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    if delta <= 0:
        raise RuntimeError("huber_loss does not support non-positive values for delta.")
    number = reduction_number(reduction) if weight is None else 0
    losses = _huber(_expanded(input, target), (), (("reduction", number), ("delta", float(delta))))
    if weight is None:
        return losses
    _check_weight(input, weight)
    return reduce(losses.mul(weight), reduction)


def _check_weight(tensor: Tensor, weight: Tensor) -> None:
    if weight.shape != tensor.shape:
        raise ValueError("Weights and input must have the same size.")


def _of_probabilities(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    if metas[0].dtype is not metas[1].dtype:
        names = metas[0].dtype.scalar_name, metas[1].dtype.scalar_name
        raise RuntimeError(f"Found dtype {names[1]} but expected {names[0]}")
    return _loss("binary_cross_entropy", like_input=True)(metas, numbers, static)


_bce_kernel = Op(
    "ops.aten.binary_cross_entropy_backward.default",
    lambda metas, numbers, static: pointwise_meta(metas[1:2], metas[1].dtype),
)


def _bce_backward(node: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, target = node[0], node[1]
    weighted = len(node.edges) > 2
    of_input = of_target = None
    if node.needs(0) and not grad_enabled.get():
        of_input = _bce_kernel((grad, x, target, *([node[2]] if weighted else [])), (), node.static)
    grad = scaled(node, grad)
    grad = grad.mul(node[2]) if weighted else grad
    if node.needs(0) and of_input is None:
        of_input = grad.mul(x.sub(target)).div(x.mul(x.neg().add(1)).clamp(1e-12))
    if node.needs(1):
        of_target = grad.mul(x.neg().log1p().sub(x.log()))
    return (of_input, of_target, *([None] if weighted else []))


_bce = Op("ops.aten.binary_cross_entropy.default", _of_probabilities, _bce_backward, saves=(0, 1))
_bce_weighted = Op("ops.aten.binary_cross_entropy.default", _of_probabilities, _bce_backward, saves=(0, 1, 2))


@function
def binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    if target.shape != input.shape:
        raise ValueError(
            f"Using a target size (torch.Size({list(target.shape)})) that is different to the input size "
            f"(torch.Size({list(input.shape)})) is deprecated. Please ensure they have the same size."
        )
    static = (("reduction", reduction_number(reduction)),)
    if weight is None:
        return _bce((input, target), (), static)
    return _bce_weighted((input, target, weight.expand(broadcast(input.shape, weight.shape))), (), static)


def _of_logits(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    """The rule of torch's ``(1 - target).mul_(input).sub_(log_sigmoid(input))``: the losses are like the target."""
    prediction, target = metas
    if prediction.dtype.kind is not Kind.FLOAT:
        raise NotImplementedError(f"\"log_sigmoid_cpu\" not implemented for '{prediction.dtype.scalar_name}'")
    if target.dtype.kind is Kind.BOOL:
        raise RuntimeError(
            "Subtraction, the `-` operator, with two bool tensors is not supported. Use the `^` or `logical_xor()` "
            "operator instead."
        )
    check_cast(prediction.dtype, target.dtype)
    return Meta((), target.dtype) if dict(static)["reduction"] else pointwise_meta([target], target.dtype)


def _logits_backward(node: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, target = node[0], node[1]
    grad = scaled(node, grad)
    return (
        grad.mul(x.sigmoid().sub(target)) if node.needs(0) else None,
        grad.mul(x).neg() if node.needs(1) else None,
    )


_logits = Op(
    "ops.aten.binary_cross_entropy_with_logits.default",
    _of_logits,
    _logits_backward,
    saves=(0, 1),
)


@function
def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    if target.shape != input.shape:
        raise ValueError(
            f"Target size (torch.Size({list(target.shape)})) must be the same as input size "
            f"(torch.Size({list(input.shape)}))"
        )
    number = reduction_number(reduction)
    if weight is None and pos_weight is None:
        return _logits((input, target), (), (("reduction", number),))
    negative = target.neg().add(1)
    rest = input.logsigmoid().neg()  # its gradient is also right at 0
    if pos_weight is not None:
        rest = rest.mul(pos_weight.sub(1).mul(target).add(1))
    losses = negative.mul(input).add(rest)
    return reduce(losses if weight is None else losses.mul(weight), reduction)


@function
def kl_div(
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    """Return the divergence from a target to a prediction, which is given as logarithms."""
    kinds = input.dtype.kind, target.dtype.kind
    if Kind.COMPLEX in kinds or min(kinds) < Kind.FLOAT:
        raise RuntimeError(f"kl_div: {'Complex' if Kind.COMPLEX in kinds else 'Integral'} inputs not supported.")
    if log_target:
        losses = target.exp().mul(target.sub(input))
    else:
        logarithm = target.masked_fill(target.eq(0), 1).log()  # of 0 it is not used, nor may it be infinite
        losses = target.mul(logarithm).sub(target.mul(input))
    if reduction == "batchmean":
        total = losses.sum()
        return total.div(input.shape[0]) if input.shape else total  # type: ignore[no-any-return]
    return reduce(losses, reduction)
