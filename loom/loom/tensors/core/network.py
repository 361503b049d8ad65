"""The functions of networks that are used in each step of a training: layers and losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from loom.tensors.core.elementwise import result_dtype
from loom.tensors.core.shapes import positional
from loom.tensors.layouts import DtypeKind, Meta, broadcast, float32, float64, int32, int64, pointwise_meta
from loom.tensors.learned import call
from loom.tensors.op import Op, function
from loom.tensors.sending.encoding import T
from loom.tensors.tensor import Tensor

Metas = Sequence[Meta]


# Layers


def _embedding_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    index, weight = metas
    if len(weight.shape) != 2:
        raise RuntimeError("'weight' must be 2-D")
    if index.dtype not in (int32, int64):
        raise RuntimeError(
            "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but "
            f"got torch.{index.dtype.scalar_name}Tensor instead (while checking arguments for embedding)"
        )
    return Meta((*index.shape, weight.shape[1]), weight.dtype)


_embedding = Op("nn.functional.embedding", _embedding_rule)


@function
def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """Return rows of a table, as `torch.nn.functional.embedding`.

    Args:
        input: the numbers of the rows.
        weight: the table.
        padding_idx: a row that gets no gradient.
        args, kwargs: torch's further arguments.
    """
    if args or kwargs:
        return call(  # type: ignore[no-any-return]
            input._home, "nn.functional.embedding", (input, weight, padding_idx, *args), kwargs, "1"
        )
    if padding_idx is not None and not -weight.shape[0] <= padding_idx < weight.shape[0]:
        raise AssertionError("Padding_idx must be within num_embeddings")
    static = () if padding_idx is None else (("padding_idx", padding_idx),)
    return _embedding((input, weight), (), static)


def _one_hot_rule(metas: Metas, numbers: Any, static: Any) -> Meta | None:
    (meta,) = metas
    if meta.dtype is not int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if static[0] == -1:
        return None
    if static[0] <= 0:
        raise RuntimeError("Class values must be smaller than num_classes.")
    return Meta((*meta.shape, static[0]), int64)


_one_hot = Op("nn.functional.one_hot", _one_hot_rule, positional)


@function
def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Return ones at the numbers of classes, and zeros elsewhere, in a new last dimension.

    Args:
        tensor: the numbers.
        num_classes: how many classes there are; -1 for as many as the largest number needs.
    """
    return _one_hot((tensor,), (), (int(num_classes),))


def _layer_normed(metas: Metas, numbers: Any, static: Any) -> Meta:
    shape, _, names = static
    meta = metas[0]
    own = meta.shape
    if not shape or own[len(own) - len(shape) :] != shape or len(own) < len(shape):
        wanted = ", ".join(map(str, ("*", *shape)))
        raise RuntimeError(
            f"Given normalized_shape={list(shape)}, expected input with shape [{wanted}], but got input of "
            f"size{list(own)}"
        )
    if meta.dtype.kind < DtypeKind.FLOAT:
        raise NotImplementedError(f"\"LayerNormKernelImpl\" not implemented for '{meta.dtype.scalar_name}'")
    for each, name in zip(metas[1:], names, strict=True):
        if each.shape != shape:
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape "
                f"{list(each.shape)} and normalized_shape = {list(shape)}"
            )
        if each.dtype is not meta.dtype and meta.dtype in (float32, float64):
            raise RuntimeError(
                f"mixed dtype (CPU): expect parameter to have scalar type of {meta.dtype.scalar_name}"
            )
    return Meta(own, meta.dtype)


def _layer_norm_arguments(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    shape, eps, names = static
    holes = {name: T(1 + place) for place, name in enumerate(names)}
    return (T(0), shape, holes.get("weight"), holes.get("bias"), eps), {}


_layer_norm = Op("nn.functional.layer_norm", _layer_normed, _layer_norm_arguments)


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
    return _layer_norm((input, *[each for _, each in given]), (), static)


def _dropped(metas: Metas, numbers: Any, static: Any) -> Meta:
    if metas[0].dtype.kind < DtypeKind.FLOAT:
        name = metas[0].dtype.scalar_name
        raise RuntimeError(f"result type Float can't be cast to the desired output type {name}")
    return pointwise_meta(metas, metas[0].dtype)


_dropout = Op("nn.functional.dropout", _dropped)


@function
def dropout(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Set a share ``p`` of the elements to 0, and divide the others by ``1 - p``."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0 or not input.numel():
        return input
    return _dropout((input,), (), (("p", float(p)),))


def _pool(name: str) -> Callable[..., Any]:
    place = 1 if "adaptive" in name else 5

    def pool(input: Tensor, *args: Any, return_indices: bool = False, **kwargs: Any) -> Any:
        if len(args) > place:
            *before, return_indices = args
            args = tuple(before)
        if not return_indices:
            return call(input._home, f"nn.functional.{name}", (input, *args), kwargs, "1")
        return call(input._home, f"nn.functional.{name}", (input, *args), {**kwargs, "return_indices": True}, "2")

    pool.__name__ = pool.__qualname__ = name
    pool.__doc__ = f"See ``torch.nn.functional.{name}``."
    return pool


for _name in ("max_pool", "adaptive_max_pool"):
    for _dimensions in (1, 2, 3):
        function(_pool(f"{_name}{_dimensions}d"))

# Losses

_REDUCTIONS = ("none", "mean", "sum")


def _reduced(losses: Meta, reduction: str) -> Meta:
    return losses if reduction == "none" else Meta((), losses.dtype)


def _check_reduction(reduction: str) -> str:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return reduction


def _compared(name: str, same_shape: bool = False) -> Op:
    """Return a loss of a prediction and a target of the same shape.

    Args:
        name: the function's under ``torch.nn.functional``.
        same_shape: whether the shapes have to be the same, and are not broadcast.
    """

    def rule(metas: Metas, numbers: Any, static: Any) -> Meta:
        one, other = metas
        if same_shape and one.shape != other.shape:
            raise ValueError(
                f"Target size (torch.Size({list(other.shape)})) must be the same as input size "
                f"(torch.Size({list(one.shape)}))"
            )
        dtype = other.dtype if same_shape else result_dtype(metas, ())
        if same_shape and one.dtype.kind is not DtypeKind.FLOAT:
            raise NotImplementedError(f"\"log_sigmoid_cpu\" not implemented for '{one.dtype.scalar_name}'")
        if same_shape and dtype.kind < DtypeKind.FLOAT:
            raise RuntimeError(
                f"result type {one.dtype.scalar_name} can't be cast to the desired output type {dtype.scalar_name}"
            )
        if dtype.kind is not DtypeKind.FLOAT and not same_shape:
            raise NotImplementedError(f"\"{name}_cpu\" not implemented for '{dtype.scalar_name}'")
        broadcast(one.shape, other.shape)
        return _reduced(pointwise_meta(metas, dtype), dict(static)["reduction"])

    return Op(f"nn.functional.{name}", rule)


def _compared_function(name: str, op: Op) -> Callable[..., Tensor]:
    def loss(input: Tensor, target: Tensor, *args: Any, reduction: str = "mean", **kwargs: Any) -> Tensor:
        if args or any(each is not None for each in kwargs.values()):
            return call(  # type: ignore[no-any-return]
                input._home,
                f"nn.functional.{name}",
                (input, target, *args),
                {**kwargs, "reduction": reduction},
                "1",
            )
        return op((input, target), (), (("reduction", _check_reduction(reduction)),))

    loss.__name__ = loss.__qualname__ = name
    loss.__doc__ = f"See ``torch.nn.functional.{name}``."
    return loss


function(_compared_function("mse_loss", _compared("mse_loss")))
function(
    _compared_function(
        "binary_cross_entropy_with_logits", _compared("binary_cross_entropy_with_logits", same_shape=True)
    )
)


def _of_classes(metas: Metas, numbers: Any, static: Any) -> Meta:
    """The rule of the losses of classes along dimension 1."""
    log, target, *_ = metas
    shape, its = log.shape, target.shape
    if not shape:
        raise RuntimeError("input tensor should be 1D or 2D")
    if log.dtype.kind is not DtypeKind.FLOAT:
        raise NotImplementedError(f"\"nll_loss_out_frame\" not implemented for '{log.dtype.scalar_name}'")
    if len(shape) > 1 and shape[0] != (its[0] if its else 1):
        raise ValueError(
            f"Expected input batch_size ({shape[0]}) to match target batch_size ({its[0] if its else 1})."
        )
    expected = (shape[0], *shape[2:]) if len(shape) > 1 else ()
    dtype = log.dtype
    if its == shape and target.dtype.kind is DtypeKind.FLOAT:
        its, dtype = expected, result_dtype((log, target), ())  # probabilities of classes
    elif its != expected and not (len(shape) == 1 and its == (1,)):
        if len(shape) < 3:
            raise RuntimeError("0D or 1D target tensor expected, multi-target not supported")
        raise RuntimeError(f"Expected target size {list(expected)}, got {list(its)}")
    return Meta(its if dict(static)["reduction"] == "none" else (), dtype)


def _of_classes_arguments(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    weight = {"weight": T(2)} if tensors > 2 else {}
    return (T(0), T(1)), {**weight, **dict(static)}


_cross_entropy = Op("nn.functional.cross_entropy", _of_classes, _of_classes_arguments)
_nll_loss = Op("nn.functional.nll_loss", _of_classes, _of_classes_arguments)


@function
def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the negative log-likelihood of classes, whose log-probabilities are along dimension 1."""
    static = (("ignore_index", int(ignore_index)), ("reduction", _check_reduction(reduction)))
    return _nll_loss((input, target, *(() if weight is None else (weight,))), (), static)


@function
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy of logits along dimension 1, and of classes or probabilities."""
    if not 0 <= label_smoothing <= 1:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    static = (
        ("ignore_index", int(ignore_index)),
        ("reduction", _check_reduction(reduction)),
        ("label_smoothing", float(label_smoothing)),
    )
    return _cross_entropy((input, target, *(() if weight is None else (weight,))), (), static)
