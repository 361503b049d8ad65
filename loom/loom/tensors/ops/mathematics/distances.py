"""Distances of vectors, and losses of pairs and triples."""

from __future__ import annotations

from math import log, pi

from loom.tensors.dtypes import DEFAULT, Kind, promote
from loom.tensors.metas import broadcast
from loom.tensors.op import function, method
from loom.tensors.ops.losses import check_cast, reduce, reduction_number
from loom.tensors.tensor import Tensor


@function
def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """Divide vectors along a dimension by their norms, which are at least ``eps``."""
    return input / input.norm(p, dim, True).clamp_min(eps)  # type: ignore[no-any-return]


@function
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Return the cosines of the angles between vectors along a dimension."""
    kind = promote(x1.dtype, x2.dtype)
    if kind.kind is not Kind.FLOAT:
        raise RuntimeError(f"expected common dtype to be floating point, yet common dtype is {kind.scalar_name}")
    shape = broadcast(x1.shape, x2.shape)
    one, other = (each.to(kind).expand(shape) for each in (x1, x2))
    lengths = (each.norm(2, dim, True).clamp_min(eps) for each in (one, other))
    return (one / next(lengths) * (other / next(lengths))).sum(dim)  # type: ignore[no-any-return]


@function
def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """Return the distances of vectors along the last dimension."""
    return (x1 - x2 + eps).norm(p, -1, keepdim)  # type: ignore[no-any-return]


@function
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0) -> Tensor:
    """Return the distance of each row of one matrix to each row of another."""
    for name, each in (("X1", x1), ("X2", x2)):
        if each.dim() < 2:
            raise RuntimeError(f"cdist only supports at least 2D tensors, {name} got: {each.dim()}D")
        if each.dtype.kind is not Kind.FLOAT:
            raise RuntimeError(f"cdist only supports floating-point dtypes, {name} got: {each.dtype.scalar_name}")
    if x1.shape[-1] != x2.shape[-1]:
        raise RuntimeError(f"X1 and X2 must have the same number of columns. X1: {x1.shape[-1]} X2: {x2.shape[-1]}")
    if p < 0:
        raise RuntimeError("cdist only supports non-negative p values")
    return (x1.unsqueeze(-2) - x2.unsqueeze(-3)).norm(p, -1)  # type: ignore[no-any-return]


@method
def dist(self: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """Return the norm of the difference."""
    return (self - other).norm(p)  # type: ignore[no-any-return]


@function
def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0, reduction: str = "mean"
) -> Tensor:
    """Return how far pairs are from the order that the target names, 1 or -1, and a margin."""
    if not input1.dim() == input2.dim() == target.dim():
        raise RuntimeError(
            "margin_ranking_loss : All input tensors should have same dimension but got sizes: "
            f"input1: {list(input1.shape)}, input2: {list(input2.shape)}, target: {list(target.shape)} "
        )
    reduction_number(reduction)
    return reduce((-target * (input1 - input2) + float(margin)).clamp_min(0), reduction)


@function
def hinge_embedding_loss(input: Tensor, target: Tensor, margin: float = 1.0, reduction: str = "mean") -> Tensor:
    """Return distances of pairs that belong together, and what others lack to a margin."""
    reduction_number(reduction)
    most = margin if input.dtype.kind >= Kind.FLOAT else int(margin)  # torch makes it one of the input's dtype
    apart = (most - input).clamp_min(0).masked_fill(target.eq(1), 0)
    return reduce(apart + input.masked_fill(target.eq(-1), 0), reduction)


@function
def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0, reduction: str = "mean"
) -> Tensor:
    """Return ``1 - cos`` of pairs that belong together, and what the cosine of others is above a margin."""
    reduction_number(reduction)
    if target.dim() + 1 != input1.dim() or input1.dim() != input2.dim():
        if target.dim() == 0:
            raise RuntimeError("0D target tensor expects 1D input tensors")
        raise RuntimeError("1D target tensor expects 2D input tensors")
    products, one, other = ((a * b).sum(-1) for a, b in ((input1, input2), (input1, input1), (input2, input2)))
    cosine = products / ((one + 1e-12) * (other + 1e-12)).sqrt()
    together = (1 - cosine).masked_fill(target.ne(1), 0)
    return reduce(together + (cosine - margin).clamp_min(0).masked_fill(target.ne(-1), 0), reduction)


@function
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """Return what an anchor lacks of being nearer to the positive than to the negative by a margin."""
    reduction_number(reduction)
    near = pairwise_distance(anchor, positive, p, eps)
    far = pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = far.minimum(pairwise_distance(positive, negative, p, eps))
    return reduce((near - far + margin).clamp_min(0), reduction)


@function
def soft_margin_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Return ``log(1 + exp(-target * input))``, which has the input's dtype as in torch."""
    reduction_number(reduction)
    product = -input * target
    check_cast(product.dtype if product.dtype.kind >= Kind.FLOAT else DEFAULT, input.dtype)
    return reduce(product.to(input.dtype).exp().log1p(), reduction)


@function
def multilabel_soft_margin_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """Return the mean over classes of each one's loss as a class of its own."""
    reduction_number(reduction)
    losses = -(target * input.logsigmoid() + (1 - target) * (-input).logsigmoid())
    losses = losses if weight is None else losses * weight
    return reduce(losses.sum(-1) / input.shape[-1], reduction)


@function
def poisson_nll_loss(
    input: Tensor,
    target: Tensor,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Tensor:
    """Return the negative log-likelihood of counts under a Poisson distribution."""
    reduction_number(reduction)
    losses = input.exp() - target * input if log_input else input - target * (input + eps).log()
    if full:
        stirling = target * target.log() - target + 0.5 * (2 * pi * target).log()
        losses = losses + stirling.masked_fill(target <= 1, 0)
    return reduce(losses, reduction)


@function
def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Return the negative log-likelihood under a normal distribution; the variance is at least ``eps``."""
    if not isinstance(var, Tensor):
        if var < 0:
            raise ValueError("var has negative entry/entries")
        spread: Tensor = input._home.full(input.shape, var, dtype=input.dtype)
    else:
        spread = var
    if spread.shape != input.shape:
        if input.shape[:-1] == spread.shape:
            spread = spread.unsqueeze(-1)
        elif input.shape[:-1] != spread.shape[:-1] or spread.shape[-1] != 1:
            raise ValueError("var is of incorrect size")
    reduction_number(reduction)
    if spread.dtype.kind < Kind.FLOAT:
        check_cast(DEFAULT, spread.dtype)
    least = spread + (spread.detach().clamp_min(eps) - spread.detach())  # the bound has no part in the gradient
    losses = 0.5 * (least.log() + (input - target) ** 2 / least)
    return reduce(losses + 0.5 * log(2 * pi) if full else losses, reduction)
