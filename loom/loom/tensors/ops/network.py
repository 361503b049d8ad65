"""The layers of networks as functions: normalisation, dropout and attention."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from loom.tensors.commands import T
from loom.tensors.dtypes import Kind, bool_, float32, float64
from loom.tensors.grad_modes import grad_enabled
from loom.tensors.metas import Meta, Shape, pointwise_meta
from loom.tensors.op import Op, function
from loom.tensors.tensor import Tensor

EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
"""The distance from 1 to the next number, by dtype."""


def _check_normalized(meta: Meta, shape: Shape) -> None:
    own = meta.shape
    if not shape or own[len(own) - len(shape) :] != shape or len(own) < len(shape):
        wanted = ", ".join(map(str, ("*", *shape)))
        raise RuntimeError(
            f"Given normalized_shape={list(shape)}, expected input with shape [{wanted}], but got input of "
            f"size{list(own)}"
        )
    if meta.dtype.kind < Kind.FLOAT:
        raise NotImplementedError(f"\"LayerNormKernelImpl\" not implemented for '{meta.dtype.scalar_name}'")


def _check_parameters(metas: Sequence[Meta], names: Sequence[str], shape: Shape) -> None:
    for meta, name in zip(metas[1:], names, strict=True):
        if meta.shape != shape:
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape "
                f"{list(meta.shape)} and normalized_shape = {list(shape)}"
            )
        if meta.dtype is not metas[0].dtype and metas[0].dtype in (float32, float64):
            raise RuntimeError(
                f"mixed dtype (CPU): expect parameter to have scalar type of {metas[0].dtype.scalar_name}"
            )


def _layer_normed(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> tuple[Meta, ...]:
    shape, _, names = static
    meta = metas[0]
    _check_normalized(meta, shape)
    _check_parameters(metas, names, shape)
    kept = Meta((*meta.shape[: len(meta.shape) - len(shape)], *[1] * len(shape)), meta.dtype)
    return Meta(meta.shape, meta.dtype), kept, kept


def _parameters(names: Sequence[str], first: int) -> tuple[T | None, T | None]:
    """Return the holes of weight and bias, if there are such."""
    holes = {name: T(first + place) for place, name in enumerate(names)}
    return holes.get("weight"), holes.get("bias")


def _layer_norm_arguments(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    shape, eps, names = static
    return (T(0), shape, *_parameters(names, 1), eps), {}


def _kernel_arguments(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    shape, names, mask = static
    return (T(0), T(1), shape, T(2), T(3), *_parameters(names, 4), list(mask)), {}


def _kernel_rule(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> tuple[Meta, ...]:
    shape = static[0]
    own = Meta(shape, metas[1].dtype)
    return Meta(metas[1].shape, metas[1].dtype), own, own


_layer_norm_kernel = Op("ops.aten.native_layer_norm_backward.default", _kernel_rule, arguments=_kernel_arguments)


def _layer_norm_backward(node: Any, grads: Any) -> tuple[Tensor | None, ...]:
    shape, eps, names = node.static
    x, grad = node[0], grads[0]
    if not grad_enabled.get():
        parameters = [node[place] for place in range(1, len(node.edges))]
        needs = {name: node.needs(place) for place, name in enumerate(names, 1)}
        mask = node.needs(0), needs.get("weight", False), needs.get("bias", False)
        found = _layer_norm_kernel.several(
            (grad, x, node.result(0).detach(), node.result(1).detach(), *parameters), (), (shape, names, mask)
        )
        by_name = dict(zip(("weight", "bias"), found[1:], strict=True))
        return (found[0] if mask[0] else None, *[by_name[name] if needs[name] else None for name in names])
    dims = list(range(-len(shape), 0))
    apart = x.sub(x.mean(dims, True))
    scale = apart.mul(apart).mean(dims, True).add(eps).rsqrt()
    normed = apart.mul(scale)
    weighted = grad.mul(node[1]) if "weight" in names else grad
    of_input = scale.mul(
        weighted.sub(weighted.mean(dims, True)).sub(normed.mul(weighted.mul(normed).mean(dims, True)))
    )
    of = {"weight": grad.mul(normed), "bias": grad}
    return of_input, *[of[name] for name in names]


def _layer_norm_op(saves: tuple[int, ...]) -> Op:
    return Op(
        "native_layer_norm",
        _layer_normed,
        _layer_norm_backward,
        saves,
        saves_results=(1, 2),
        arguments=_layer_norm_arguments,
    )


_layer_norms = [_layer_norm_op(tuple(range(many))) for many in (1, 2, 3)]


@function
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise over the last dimensions, which have the given shape."""
    given = [(name, each) for name, each in (("weight", weight), ("bias", bias)) if each is not None]
    static = (tuple(normalized_shape), float(eps), tuple(name for name, _ in given))
    return _layer_norms[len(given)].several((input, *[each for _, each in given]), (), static)[0]


def _rms_normed(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    shape, _ = static
    _check_normalized(metas[0], shape)
    _check_parameters(metas, ["weight"] * (len(metas) - 1), shape)
    return Meta(metas[0].shape, metas[0].dtype)


def _rms_norm_backward(node: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    shape, eps = node.static
    x = node[0]
    dims = list(range(-len(shape), 0))
    small = EPSILON[x.dtype.name] if eps is None else eps
    scale = x.mul(x).mean(dims, True).add(small).rsqrt()
    normed = x.mul(scale)
    weighted = grad.mul(node[1]) if len(node.edges) > 1 else grad
    of_input = scale.mul(weighted.sub(normed.mul(weighted.mul(normed).mean(dims, True)))) if node.needs(0) else None
    return (of_input, grad.mul(normed)) if len(node.edges) > 1 else (of_input,)


def _rms_norm_op(saves: tuple[int, ...]) -> Op:
    return Op(
        "rms_norm",
        _rms_normed,
        _rms_norm_backward,
        saves,
        arguments=lambda tensors, numbers, static: (
            (T(0), static[0], T(1) if tensors > 1 else None, static[1]),
            {},
        ),
    )


_rms_norms = [_rms_norm_op((0,)), _rms_norm_op((0, 1))]


@function
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Divide by the root mean square over the last dimensions, which have the given shape."""
    static = (tuple(normalized_shape), None if eps is None else float(eps))
    return _rms_norms[0]((input,), (), static) if weight is None else _rms_norms[1]((input, weight), (), static)


def _check_groups(shape: Shape, groups: int) -> None:
    if len(shape) < 2:
        raise RuntimeError(f"Expected at least 2 dimensions for input tensor but received {len(shape)}")
    if groups <= 0:
        raise RuntimeError(f"Expected num groups to be greater than 0, got {groups}")
    if shape[1] % groups:
        raise RuntimeError(
            "Expected number of channels in input to be divisible by num_groups, but got input of shape "
            f"{list(shape)} and num_groups={groups}"
        )


def _of_channels(parameter: Tensor, dimensions: int) -> Tensor:
    """Return a parameter with one number for each channel, as it is broadcast."""
    return parameter.reshape((1, -1, *[1] * (dimensions - 2)))  # type: ignore[no-any-return]


@function
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise over groups of channels (dimension 1)."""
    shape = input.shape
    _check_groups(shape, num_groups)
    for name, each in (("weight", weight), ("bias", bias)):
        if each is not None and each.shape != shape[1:2]:
            raise RuntimeError(
                f"Expected {name} to be a vector of size equal to the number of channels in input, but got {name} "
                f"of shape {list(each.shape)} and input of shape {list(shape)}"
            )
    rows = input.numel() // max(shape[0] * num_groups, 1)
    result = layer_norm(input.reshape(shape[0], num_groups, rows), (rows,), eps=eps).reshape(shape)
    result = result if weight is None else result.mul(_of_channels(weight, len(shape)))
    return result if bias is None else result.add(_of_channels(bias, len(shape)))  # type: ignore[no-any-return]


@function
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise each channel (dimension 1); in training, the running statistics follow those of the batch."""
    shape = input.shape
    count = input.numel() // max(shape[1], 1) if len(shape) > 1 else 0
    if training and count <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size torch.Size({list(shape)})"
        )
    for name, each in (
        ("running_mean", running_mean), ("running_var", running_var), ("weight", weight), ("bias", bias)
    ):  # fmt: skip
        if each is not None and each.numel() != shape[1]:
            raise RuntimeError(f"{name} should contain {shape[1]} elements not {each.numel()}")
    if training:
        dims = [place for place in range(len(shape)) if place != 1]
        mean = input.mean(dims, True)
        apart = input.sub(mean)
        var = apart.mul(apart).mean(dims, True)
        if running_mean is not None:
            _follow(running_mean, mean, momentum)
        if running_var is not None:
            _follow(running_var, var.mul(count / (count - 1)), momentum)
    else:
        if running_mean is None or running_var is None:
            name = "running_mean" if running_mean is None else "running_var"
            raise RuntimeError(f"{name} must be defined in evaluation mode")
        apart = input.sub(_of_channels(running_mean, len(shape)))
        var = _of_channels(running_var, len(shape))
    scale = var.add(eps).rsqrt()
    result = apart.mul(scale if weight is None else scale.mul(_of_channels(weight, len(shape))))
    return result if bias is None else result.add(_of_channels(bias, len(shape)))  # type: ignore[no-any-return]


def _follow(running: Tensor, new: Tensor, momentum: float) -> None:
    running.mul_(1 - momentum).add_(new.detach().reshape(-1).mul(momentum))


def _dropped(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> tuple[Meta, Meta]:
    meta = pointwise_meta(metas, metas[0].dtype)
    if meta.dtype.kind < Kind.FLOAT:
        raise RuntimeError(f"result type Float can't be cast to the desired output type {meta.dtype.scalar_name}")
    return meta, meta.of(bool_)


_dropout_kernel = Op(
    "ops.aten.native_dropout_backward.default",
    lambda metas, numbers, static: pointwise_meta(metas, metas[0].dtype),
)


def _dropout_backward(node: Any, grads: Any) -> tuple[Tensor]:
    p = dict(node.static)["p"]
    scale = 0.0 if p == 1 else 1 / (1 - p)
    mask = node.result().detach()
    if grad_enabled.get():
        return (grads[0].mul(mask).mul(scale),)
    return (_dropout_kernel((grads[0], mask), (), (("scale", scale),)),)


_dropout = Op("native_dropout", _dropped, _dropout_backward, saves_results=(1,))


@function
def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Set a share ``p`` of the elements to 0, and divide the others by ``1 - p``."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if inplace:
        raise NotImplementedError("dropout in place is not supported: use its result")
    if not training or p == 0 or not input.numel():
        return input
    return _dropout.several((input,), (), (("p", float(p)), ("train", True)))[0]


@function
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return ``softmax(query @ key.T * scale + attn_mask) @ value``, of tensors [..., length, size]."""
    if attn_mask is not None and is_causal:
        raise RuntimeError(
            "_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True"
        )
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(repeats, -3) for each in (key, value))
    factor = 1 / sqrt(query.shape[-1]) if scale is None else scale
    scores = query.mul(factor).matmul(key.transpose(-2, -1))
    if is_causal:
        allowed = query._home.ones(scores.shape[-2:], dtype=bool_).tril()
        scores = scores.masked_fill(allowed.logical_not(), float("-inf"))
    elif attn_mask is not None and attn_mask.dtype is bool_:
        scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
    elif attn_mask is not None:
        scores = scores.add(attn_mask)
    weights = dropout(scores.softmax(-1), dropout_p) if dropout_p else scores.softmax(-1)
    return weights.matmul(value)  # type: ignore[no-any-return]
