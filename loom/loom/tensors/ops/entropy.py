"""Losses of classes: the negative log-likelihood and the cross entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loom.tensors.commands import T
from loom.tensors.dtypes import Kind, int64, uint8
from loom.tensors.grad_modes import grad_enabled
from loom.tensors.metas import Meta
from loom.tensors.op import Op, function
from loom.tensors.ops.losses import reduce, reduction_number
from loom.tensors.tensor import Tensor


def _likelihood(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> tuple[Meta, Meta]:
    """The rule of the loss of rows, and of the sum of the weights."""
    log, target, *weights = metas
    if target.dtype not in (int64, uint8):
        raise RuntimeError(f"expected target dtype to be Long or Byte, but got {target.dtype.scalar_name}")
    if log.dtype.kind < Kind.FLOAT:
        raise NotImplementedError(f"\"nll_loss_out_frame\" not implemented for '{log.dtype.scalar_name}'")
    if len(target.shape) > 1:
        raise RuntimeError("0D or 1D target tensor expected, multi-target not supported")
    for weight in weights:
        if weight.shape != log.shape[1:]:
            raise RuntimeError(
                f"weight tensor should be defined either for all {log.shape[1]} classes or no classes but got "
                f"weight tensor of shape: {list(weight.shape)}"
            )
        if weight.dtype is not log.dtype:
            raise RuntimeError(f"expected scalar type {log.dtype.scalar_name} but found {weight.dtype.scalar_name}")
    shape = log.shape[:1] if dict(static)["reduction"] == 0 else ()
    return Meta(shape, log.dtype), Meta((), log.dtype)


def _kernel_arguments(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    grad, log, target, total, *weight = map(T, range(tensors))
    given = dict(static)
    rest = (weight[0] if weight else None, given["reduction"], given["ignore_index"], total)
    return (grad, log, target, *rest), {}


_kernel = Op(
    "ops.aten.nll_loss_backward.default",
    lambda metas, numbers, static: Meta(metas[1].shape, metas[1].dtype),
    arguments=_kernel_arguments,
)


def _likelihood_backward(node: Any, grads: Any) -> tuple[Tensor | None, ...]:
    grad, target, total = grads[0], node[1], node.result().detach()
    weights = [node[2]] if len(node.edges) > 2 else []
    given = dict(node.static)
    nothing = [None] * (1 + len(weights))
    if not grad_enabled.get():
        return (_kernel((grad, node[0], target, total, *weights), (), node.static), *nothing)
    # It is linear in the gradient, whose graph therefore is all that gradients of this gradient need.
    ignored = target.eq(given["ignore_index"])
    index = target.to(int64).masked_fill(ignored, 0)
    each = weights[0].detach().gather(0, index) if weights else node.home.ones(index.shape, dtype=grad.dtype)
    if given["reduction"] == 1:
        each = each.div(total)
    spread = grad.mul(each.masked_fill(ignored, 0)).neg()
    zeros = node.home.zeros(node.metas[0].shape, dtype=grad.dtype)
    return (zeros.scatter(1, index.unsqueeze(1), spread.unsqueeze(1)), *nothing)


def _likelihood_arguments(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    weight = {} if tensors > 2 else {"weight": None}
    return tuple(map(T, range(tensors))), {**weight, **dict(static)}


def _likelihood_op(saves: tuple[int, ...]) -> Op:
    return Op(
        "ops.aten.nll_loss_forward.default",
        _likelihood,
        _likelihood_backward,
        saves,
        saves_results=(1,),
        arguments=_likelihood_arguments,
    )


_nll, _nll_weighted = _likelihood_op((0, 1)), _likelihood_op((0, 1, 2))


def _check_target(input: Tensor, target: Tensor) -> None:
    shape, its = input.shape, target.shape
    if len(shape) == 1:
        if its not in ((), (1,)):
            raise RuntimeError("0D or 1D target tensor expected, multi-target not supported")
        return
    if shape[0] != (its[0] if its else 1):
        raise ValueError(
            f"Expected input batch_size ({shape[0]}) to match target batch_size ({its[0] if its else 1})."
        )
    if len(shape) == 2 and len(its) > 1:
        raise RuntimeError("0D or 1D target tensor expected, multi-target not supported")
    expected = (shape[0], *shape[2:])
    if its and its != expected:
        raise RuntimeError(f"Expected target size {list(expected)}, got {list(its)}")


@function
def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Return the negative log-likelihood of classes, whose log-probabilities are along dimension 1."""
    number = reduction_number(reduction)
    many = input.dim()
    if many < 1:
        raise RuntimeError("input tensor should be 1D or 2D")
    if many != 2 or target.dim() != 1 or input.shape[0] != target.shape[0]:
        _check_target(input, target)
    rows, its = input, target
    if many == 1:
        rows, its = input.unsqueeze(0), target.reshape(1)
    elif many > 2:
        rows, its = input.movedim(1, -1).reshape(-1, input.shape[1]), target.reshape(-1)
    static = (("reduction", number), ("ignore_index", int(ignore_index)))
    loss: Tensor = (
        _nll.several((rows, its), (), static)
        if weight is None
        else _nll_weighted.several((rows, its, weight), (), static)
    )[0]
    return loss.reshape(target.shape) if number == 0 and many != 2 else loss


@function
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy of logits along dimension 1, and of classes or probabilities."""
    if not 0 <= label_smoothing <= 1:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    classes = 0 if input.dim() == 1 else 1
    if input.shape == target.shape:
        if target.dtype.kind is not Kind.FLOAT:
            raise RuntimeError(
                f"Expected floating point type for target with class probabilities, got {target.dtype.scalar_name}"
            )
        return _of_probabilities(input, target, weight, classes, reduction, label_smoothing)
    log = input.log_softmax(classes)
    loss = nll_loss(log, target, weight, ignore_index, reduction)
    if not label_smoothing:
        return loss
    smooth = _smoothed(log, target, weight, ignore_index, reduction, classes)
    return loss.mul(1 - label_smoothing).add(smooth.mul(label_smoothing / input.shape[classes]))  # type: ignore[no-any-return]


def _smoothed(
    log: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, classes: int
) -> Tensor:
    """Return the loss of classes that are all equally likely."""
    weighted = log if weight is None else log.mul(_along(weight, log, classes))
    ignored = target.eq(ignore_index)
    losses = weighted.sum(classes).neg().masked_fill(ignored, 0)
    if reduction != "mean":
        return reduce(losses, reduction)
    if weight is None:
        return losses.sum().div(ignored.logical_not().sum())  # type: ignore[no-any-return]
    index = target.to(int64).masked_fill(ignored, 0).reshape(-1)
    return losses.sum().div(weight.gather(0, index).masked_fill(ignored.reshape(-1), 0).sum())  # type: ignore[no-any-return]


def _of_probabilities(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    number = reduction_number(reduction)
    if weight is not None and weight.shape != (input.shape[classes],):
        raise RuntimeError(
            "cross_entropy: weight tensor should be defined either for all "
            f"{input.shape[classes]} classes or no classes but got weight tensor of shape: {list(weight.shape)}"
        )
    if label_smoothing:
        target = target.mul(1 - label_smoothing).add(label_smoothing / input.shape[classes])
    product = input.log_softmax(classes).mul(target)
    if weight is not None:
        product = product.mul(_along(weight, input, classes))
    if number == 0:
        return product.sum(classes).neg()  # type: ignore[no-any-return]
    total = product.sum().neg()
    if number == 2:
        return total  # type: ignore[no-any-return]
    return total.div(input.numel() / input.shape[classes])  # type: ignore[no-any-return]


def _along(weight: Tensor, tensor: Tensor, classes: int) -> Tensor:
    """Return weights of classes as they are broadcast."""
    return weight.reshape([-1 if place == classes else 1 for place in range(tensor.dim())])  # type: ignore[no-any-return]
