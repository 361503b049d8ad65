"""`einsum` and `tensordot`, by products of two tensors at a time."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from loom.tensors.commands import T
from loom.tensors.metas import Meta, Shape, contiguous_strides, pointwise_meta
from loom.tensors.op import Op, function, method
from loom.tensors.ops.elementwise import result_dtype
from loom.tensors.tensor import Tensor


@cache
def _parse(equation: str, dimensions: tuple[int, ...]) -> tuple[tuple[str, ...], str]:
    """Return the letters of each operand and of the result; an ellipsis becomes letters of its own.

    Raises:
        RuntimeError: the equation does not fit, in torch's words.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if len(parts) != len(dimensions):
        what = "fewer" if len(parts) > len(dimensions) else "more"
        raise RuntimeError(f"einsum(): {what} operands were provided than specified in the equation")
    spare = "".join(each for each in string.ascii_letters if each not in equation)
    hidden = 0
    for place, (part, many) in enumerate(zip(parts, dimensions, strict=True)):
        named = part.replace("...", "", 1)
        for each in named:
            if each not in string.ascii_letters:
                raise RuntimeError(
                    f"einsum(): invalid subscript given at index {equation.find(each)} in the equation string, "
                    "subscripts must be in [a-zA-Z]"
                )
        if len(named) > many or ("..." not in part and len(named) != many):
            end = "but no ellipsis was given" if "..." not in part else "even with an ellipsis"
            raise RuntimeError(
                f"einsum(): the number of subscripts in the equation ({len(named)}) does not match the number of "
                f"dimensions ({many}) for operand {place} {end}"
            )
        hidden = max(hidden, many - len(named))
    every = spare[:hidden]
    inputs = []
    for part, many in zip(parts, dimensions, strict=True):
        gone = many - len(part.replace("...", "", 1))
        inputs.append(part.replace("...", every[hidden - gone :]))
    counts = Counter("".join(inputs))
    if not arrow:
        single = sorted(each for each in counts if counts[each] == 1 and each not in every)
        return tuple(inputs), every + "".join(single)
    out = right.replace("...", every)
    for each in out:
        if each not in counts:
            raise RuntimeError(
                f"einsum(): output subscript {each} does not appear in the equation for any input operand"
            )
        if out.count(each) > 1:
            raise RuntimeError(f"einsum(): output subscript {each} appears more than once in the output")
    return tuple(inputs), out


def _check_sizes(inputs: Sequence[str], shapes: Sequence[Shape]) -> None:
    seen: dict[str, int] = {}
    for place, (letters, shape) in enumerate(zip(inputs, shapes, strict=True)):
        own: dict[str, int] = {}
        for letter, size in zip(letters, shape, strict=True):
            if own.setdefault(letter, size) != size:
                raise RuntimeError(
                    f"einsum(): subscript {letter} is repeated for operand {place} but the sizes don't match, "
                    f"{size} != {own[letter]}"
                )
        for letter, size in own.items():
            before = seen.get(letter, 1)
            if before != 1 and size not in (1, before):
                raise RuntimeError(
                    f"einsum(): subscript {letter} has size {size} for operand {place} which does not broadcast "
                    f"with previously seen size {before}"
                )
            seen[letter] = size if before == 1 else before


def _pair(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    """The rule of a product of two tensors without repeated letters: torch's `sumproduct_pair`, strides and all."""
    one, other, out = static
    sizes = [dict(zip(letters, meta.shape, strict=True)) for letters, meta in zip((one, other), metas, strict=True)]
    every = out + "".join(sorted((set(one) | set(other)) - set(out)))
    in_one, in_other = ({each for each in every if own.get(each, 1) != 1} for own in sizes)
    shape = tuple([sizes[0].get(each, 1) if each in in_one else sizes[1].get(each, 1) for each in out])
    summed = [each for each in every if each not in out and each in in_one and each in in_other]
    if not summed:
        return _without_sum(metas, sizes, (one, other), every, len(out))
    if metas[0].dtype is not metas[1].dtype:
        raise RuntimeError(
            f"expected scalar type {metas[0].dtype.scalar_name} but found {metas[1].dtype.scalar_name}"
        )
    rest = [each for each in every if each not in summed]
    both = [each for each in rest if each in in_one and each in in_other]
    left = [each for each in rest if each in in_one and each not in in_other]
    right = [each for each in rest if each not in in_one]
    if left and right and every.index(right[-1]) < every.index(left[0]):
        left, right = right, left
    order = [each for each in both + left + right if each in out]
    steps = dict(zip(order, contiguous_strides(tuple(shape[out.index(each)] for each in order)), strict=True))
    return Meta(shape, metas[0].dtype, tuple(steps[each] for each in out))


def _without_sum(
    metas: Sequence[Meta], sizes: Sequence[dict[str, int]], inputs: Sequence[str], every: str, many: int
) -> Meta:
    """Return what a product gives of tensors whose dimensions are put in one order, the result's first."""
    laid = []
    for meta, own, letters in zip(metas, sizes, inputs, strict=True):
        shape = tuple(own.get(each, 1) for each in every[:many]) + (1,) * (len(every) - many)
        if any(own.get(each, 1) != 1 for each in every[many:]):
            strides = contiguous_strides(shape)  # summed first
        else:
            steps = dict(zip(letters, meta.strides, strict=True))
            strides = tuple(steps.get(each, 1) for each in every)
        laid.append(Meta(shape, meta.dtype, strides))
    product = pointwise_meta(laid, result_dtype(laid, ()))
    return Meta(product.shape[:many], product.dtype, product.strides[:many])


def _pair_backward(node: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    one, other, out = node.static
    return (
        _gradient(grad, out, node[1], other, one, node.metas[0]) if node.needs(0) else None,
        _gradient(grad, out, node[0], one, other, node.metas[1]) if node.needs(1) else None,
    )


def _gradient(grad: Tensor, out: str, factor: Tensor, letters: str, wanted: str, meta: Meta) -> Tensor:
    """Return the gradient of an operand: along letters that only it has, it is the same everywhere."""
    known = "".join(each for each in wanted if each in out or each in letters)
    found = _pair_op((grad, factor), (), (out, letters, known))
    sizes = dict(zip(known, found.shape, strict=True))
    if known != wanted:
        found = found.reshape([sizes.get(each, 1) for each in wanted])
    shape = tuple(
        [size if sizes.get(each, 1) == 1 else sizes[each] for each, size in zip(wanted, meta.shape, strict=True)]
    )
    return found if found.shape == shape else found.expand(shape)


_pair_op = Op(
    "einsum",
    _pair,
    _pair_backward,
    saves=(0, 1),
    arguments=lambda tensors, numbers, static: (("{},{}->{}".format(*static), T(0), T(1)), {}),
)


@function
def einsum(equation: str, *operands: Any) -> Tensor:
    """Multiply and sum along the letters of an equation, such as ``"bik,bkj->bij"``."""
    tensors = list(operands[0]) if len(operands) == 1 and not isinstance(operands[0], Tensor) else list(operands)
    inputs, out = _parse(equation, tuple(each.dim() for each in tensors))
    _check_sizes(inputs, [each.shape for each in tensors])
    parts = [_diagonal(letters, each) for letters, each in zip(inputs, tensors, strict=True)]
    letters, result = parts[0]
    if len(parts) == 1:
        return _single(letters, result, out)
    for place, (its, each) in enumerate(parts[1:], 2):
        later = out + "".join(more for more, _ in parts[place:])
        kept = out if place == len(parts) else "".join(dict.fromkeys(a for a in letters + its if a in later))
        result = _pair_op((result, each), (), (letters, its, kept))
        letters = kept
    return result


def _diagonal(letters: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Return an operand whose letters are different: of two dimensions with the same letter, the diagonal."""
    for letter in dict.fromkeys(letters):
        while letters.count(letter) > 1:
            first = letters.index(letter)
            second = letters.index(letter, first + 1)
            tensor = tensor.diagonal(0, first, second)
            letters = letters[:first] + letters[first + 1 : second] + letters[second + 1 :] + letter
    return letters, tensor


def _single(letters: str, tensor: Tensor, out: str) -> Tensor:
    rest = [each for each in letters if each not in out]
    tensor = tensor.permute([letters.index(each) for each in [*out, *rest]])
    return tensor.sum(tuple(range(len(out), len(letters)))) if rest else tensor


@method
def tensordot(self: Tensor, other: Tensor, dims: Any = 2) -> Tensor:
    """Sum products over the last dimensions of one tensor and the first of the other, or over two lists of them."""
    many, its = self.dim(), other.dim()
    if isinstance(dims, int):
        if dims < 0:
            raise RuntimeError(f"tensordot expects dims >= 0, but got dims={dims}")
        if dims > min(many, its):
            raise RuntimeError(f"tensordot expects dims < ndim_a or ndim_b, but got {dims=}")
        first, second = list(range(many - dims, many)), list(range(dims))
    else:
        first, second = ([each] if isinstance(each, int) else list(each) for each in dims)
    if len(first) != len(second):
        raise RuntimeError("both dimension lists should have same length")
    for one, another in zip(first, second, strict=True):
        if self.shape[one] != other.shape[another] and 1 not in (self.shape[one], other.shape[another]):
            raise RuntimeError(
                f"contracted dimensions need to match, but first has size {self.shape[one]} in dim {one} and "
                f"second has size {other.shape[another]} in dim {another}"
            )
    letters = string.ascii_letters
    own, theirs = list(letters[:many]), list(letters[many : many + its])
    for one, another in zip(first, second, strict=True):
        theirs[another] = own[one]
    out = [each for each in own if each not in theirs] + [each for each in theirs if each not in own]
    return einsum(f"{''.join(own)},{''.join(theirs)}->{''.join(out)}", self, other)
