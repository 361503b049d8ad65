"""The layouts of the functions that people write every day; of the others the workers tell them.

Names, parameters and meanings are torch's. A rule raises `Misfit`, or whatever Python raises, if it does not know a
call: then the workers' torch says at once what is wrong with it, or the layout. What a kernel of torch's does not
have, such as the softmax of integers, comes with the next read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from math import prod as product
from operator import index as to_int
from typing import Any, NamedTuple

from loom.tensors.call import ELEMENTWISE, RULES, Function, call, call_asked, method_named
from loom.tensors.layouts import (
    DEFAULT,
    PLAIN,
    DType,
    DtypeKind,
    Meta,
    Misfit,
    Shape,
    bool_,
    broadcast,
    dtype_named,
    fits,
    int64,
    is_dense,
    of_scalar,
    plain,
    pointwise_meta,
    real_of,
    result_type,
    uint8,
    wrapped,
)
from loom.tensors.placements import WHOLE, Placement, packed, spread
from loom.tensors.tensor import Tensor

methods: dict[str, Callable[..., Any]] = {}
"""The methods of tensors that are written here; they are functions, too."""

functions: dict[str, Callable[..., Any]] = {}
"""The functions that are written here, and are no methods."""


def rule(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of layouts the rule of torch's function of its name."""
    RULES[function.__name__] = function
    return function


def method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of tensors a method of theirs."""
    methods[function.__name__] = function
    return function


# Elementwise

Dtypes = Callable[[Sequence[Meta], Sequence[Any]], DType]
"""The dtype of a result, of the layouts of tensors and of numbers."""

APART = frozenset(("alpha", "decimals", "inplace", "memory_format", "negative_slope", "non_blocking", "value"))
"""The arguments that have no part in a result's layout."""


def promoted(metas: Sequence[Meta], numbers: Sequence[Any]) -> DType:
    """Return the dtype to which tensors and numbers are promoted."""
    if not numbers and all(each.dtype is metas[0].dtype for each in metas):
        return metas[0].dtype
    return result_type(
        [each.dtype for each in metas if each.shape],
        [each.dtype for each in metas if not each.shape],
        [of_scalar(each) for each in numbers],
    )


def floating(metas: Sequence[Meta], numbers: Sequence[Any]) -> DType:
    """Return the dtype of a function that makes floating point numbers of integers."""
    dtype = promoted(metas, numbers)
    return dtype if dtype.kind >= DtypeKind.FLOAT else DEFAULT


def pointwise(dtype: Dtypes, *args: Any, **named: Any) -> Meta:
    """Return the layout of what tensors and numbers give, element by element."""
    metas: list[Meta] = []
    numbers: list[Any] = []
    for each in (*args, *[value for name, value in named.items() if name not in APART]):
        if isinstance(each, Meta):
            metas.append(each)
        elif type(each) in PLAIN:
            numbers.append(each)
        else:
            fits(each is None)
    return pointwise_meta(metas, dtype(metas, numbers))


def elementwise(dtype: Dtypes, names: str) -> None:
    """Note functions that are computed element by element."""
    for name in names.split():
        ELEMENTWISE.add(name)
        RULES[name] = partial(pointwise, dtype)


elementwise(
    promoted,
    "add addcdiv addcmul bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor "
    "ceil clamp clamp_max clamp_min clip clone floor floor_divide fmod gelu leaky_relu lerp maximum minimum mul "
    "multiply neg negative pow relu remainder round rsub sign silu sub subtract trunc where",
)
elementwise(
    floating,
    "acos acosh arccos arcsin arctan asin asinh atan atan2 atanh cos cosh div divide erf erfc exp exp2 expm1 log "
    "log10 log1p log2 reciprocal rsqrt sigmoid sin sinh sqrt tan tanh true_divide",
)
elementwise(
    lambda metas, numbers: bool_,
    "eq ge gt isfinite isinf isnan le logical_and logical_not logical_or logical_xor lt ne",
)
elementwise(lambda metas, numbers: metas[0].dtype, "copy fill masked_fill zero")
elementwise(lambda metas, numbers: real_of(metas[0].dtype), "abs absolute")
elementwise(lambda metas, numbers: int64 if metas[0].dtype is bool_ else metas[0].dtype, "square")
ELEMENTWISE.add("to")


@rule
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Meta:
    return pointwise(promoted if rounding_mode else floating, input, other)


RULES["divide"] = div


@rule
def pow(input: Any, exponent: Any) -> Meta:
    meta = pointwise(promoted, input, exponent)
    return meta if isinstance(input, Meta) else Meta(meta.shape, meta.dtype)


@rule
def gelu(input: Meta, *, approximate: str = "none") -> Meta:
    return pointwise(promoted, input)


@rule
def clone(input: Meta, *, memory_format: Any = None) -> Meta | None:
    if memory_format is None:
        return pointwise(promoted, input)
    return Meta(input.shape, input.dtype) if memory_format.name == "contiguous_format" else None


@rule
def to(input: Meta, dtype: DType) -> Meta:
    return pointwise_meta([input], dtype)


@rule
def where(condition: Meta, input: Any = None, other: Any = None) -> Meta | None:
    if input is None:
        return None
    kinds = [each for each in (input, other) if isinstance(each, Meta)]
    dtype = promoted(kinds, [each for each in (input, other) if not isinstance(each, Meta)])
    return pointwise_meta([condition, *kinds], dtype)


RULES["Tensor.where"] = lambda self, condition, other: where(condition, self, other)


@rule
def masked_fill(input: Meta, mask: Meta, value: Any) -> Meta:
    return Meta(broadcast(input.shape, mask.shape), input.dtype)


# Reductions


class Selected(NamedTuple):
    """Elements, and where they were found along a dimension."""

    values: Any
    indices: Any


def reduced(shape: Shape, dim: Any, keepdim: bool = False) -> Shape:
    """Return a shape without some dimensions: without any for None or an empty sequence."""
    gone = range(len(shape)) if dim is None or dim in ((), []) else wrapped_dims(whole(dim), len(shape))
    return tuple([1 if place in gone else size for place, size in enumerate(shape) if keepdim or place not in gone])


def reduction(dtype: Callable[[DType], DType], names: str) -> None:
    """Note functions that make one element of many along dimensions."""

    def along(input: Meta, dim: Any = None, keepdim: bool = False, *, dtype: DType | None = None) -> Meta:
        return Meta(reduced(input.shape, dim, keepdim), kind_of(input.dtype) if dtype is None else dtype)

    kind_of = dtype
    for name in names.split():
        RULES[name] = along


def averaged(dtype: DType) -> DType:
    """Return the dtype of a mean, of which integers have none."""
    fits(dtype.kind >= DtypeKind.FLOAT)
    return dtype


def summed(dtype: DType) -> DType:
    """Return the dtype of a sum: that of integers is int64."""
    return dtype if dtype.kind >= DtypeKind.FLOAT else int64


reduction(summed, "sum prod")
reduction(averaged, "mean")
reduction(lambda dtype: dtype if dtype.kind >= DtypeKind.FLOAT else DEFAULT, "logsumexp")
reduction(lambda dtype: uint8 if dtype is uint8 else bool_, "any all")
reduction(lambda dtype: dtype, "amax amin")
reduction(lambda dtype: int64, "argmax argmin")


@rule
def var(
    input: Meta, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Meta:
    return Meta(reduced(input.shape, None if isinstance(dim, bool) else dim, keepdim), real_of(input.dtype))


RULES["std"] = var


@rule
def norm(
    input: Meta, p: Any = "fro", dim: Any = None, keepdim: bool = False, *, dtype: DType | None = None
) -> Meta:
    return Meta(reduced(input.shape, dim, keepdim), real_of(dtype or input.dtype))


@rule
def max(input: Meta, dim: Any = None, keepdim: bool = False, *, other: Meta | None = None) -> Any:
    other = dim if isinstance(dim, Meta) else other
    if other is not None:
        return pointwise(promoted, input, other)
    if dim is None:
        return Meta((), input.dtype)
    shape = reduced(input.shape, dim, keepdim)
    return Selected(Meta(shape, input.dtype), Meta(shape, int64))


RULES["min"] = max


@rule
def cumsum(input: Meta, dim: int, *, dtype: DType | None = None) -> Meta:
    wrapped(dim, len(input.shape))
    return Meta(input.shape, dtype or summed(input.dtype))


@rule
def sort(input: Meta, dim: int = -1, descending: bool = False, stable: bool | None = False) -> Selected:
    wrapped(dim, len(input.shape))
    made = input if is_dense(input.shape, input.strides) else pointwise(promoted, input)
    return Selected(made, made.of(int64))


@rule
def argsort(input: Meta, dim: int = -1, descending: bool = False, stable: bool = False) -> Meta:
    return sort(input, dim).indices  # type: ignore[no-any-return]


@rule
def topk(input: Meta, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Selected:
    place = wrapped(dim, len(input.shape))
    fits(0 <= k <= (input.shape[place] if input.shape else 1))
    shape = (*input.shape[:place], k, *input.shape[place + 1 :]) if input.shape else ()
    return Selected(Meta(shape, input.dtype), Meta(shape, int64))


@rule
def softmax(input: Meta, dim: int | None = None, *more: Any, dtype: DType | None = None) -> Meta:
    wrapped(dim or 0, len(input.shape))
    return Meta(input.shape, dtype or next((each for each in more if isinstance(each, DType)), input.dtype))


RULES["log_softmax"] = softmax

# Products


@rule
def matmul(input: Meta, other: Meta) -> Meta:
    one, two = input.shape, other.shape
    fits(one[-1] == two[-2 if len(two) > 1 else 0] and input.dtype is other.dtype)
    lead = broadcast(one[:-2], two[:-2])
    return Meta(lead + one[-2:-1] * (len(one) > 1) + two[-1:] * (len(two) > 1), input.dtype)


def _of_dimensions(name: str, one: int, other: int) -> None:
    """Note a product of tensors with so many dimensions."""

    def multiplied(input: Meta, *others: Meta, **named: Meta) -> Meta:
        (second,) = (*others, *named.values())
        fits(len(input.shape) == one and len(second.shape) == other)
        fits(one < 3 or input.shape[0] == second.shape[0])
        return matmul(input, second)  # type: ignore[no-any-return]

    RULES[name] = multiplied


for _name, _one, _other in (("mm", 2, 2), ("bmm", 3, 3), ("mv", 2, 1), ("dot", 1, 1)):
    _of_dimensions(_name, _one, _other)


@rule
def addmm(input: Meta, mat1: Meta, mat2: Meta, *, beta: Any = 1, alpha: Any = 1) -> Meta:
    return _added(input, RULES["mm"](mat1, mat2))


@rule
def baddbmm(input: Meta, batch1: Meta, batch2: Meta, *, beta: Any = 1, alpha: Any = 1) -> Meta:
    return _added(input, RULES["bmm"](batch1, batch2))


@rule
def linear(input: Meta, weight: Meta, bias: Meta | None = None) -> Meta:
    fits(len(weight.shape) in (1, 2))
    result = matmul(input, Meta(weight.shape[::-1], weight.dtype))
    return result if bias is None else _added(bias, result)


def _added(input: Meta, result: Meta) -> Meta:
    fits(input.dtype is result.dtype)
    expand(input, result.shape)
    return result


# Together, and apart


@rule
def cat(tensors: Sequence[Meta], dim: int = 0) -> Meta | None:
    fits(tensors and all(each.shape for each in tensors))
    dtype = promoted(tensors, ())
    parts = [each for each in tensors if each.shape != (0,)] or tensors
    place = wrapped(dim, len(parts[0].shape))
    ((before, after),) = {(each.shape[:place], each.shape[place + 1 :]) for each in parts}
    if len(parts[0].shape) in (4, 5) and not parts[0].contiguous:
        return None  # channels may be the last ones in memory
    return Meta((*before, sum([each.shape[place] for each in parts]), *after), dtype)


RULES["concat"] = RULES["concatenate"] = cat


@rule
def stack(tensors: Sequence[Meta], dim: int = 0) -> Meta:
    (shape,) = {each.shape for each in tensors}
    place = wrapped(dim, len(shape) + 1)
    return Meta((*shape[:place], len(tensors), *shape[place:]), promoted(tensors, ()))


@rule
def split(tensor: Meta, split_size_or_sections: Any, dim: int = 0) -> tuple[Meta, ...]:
    fits(tensor.shape)
    place = wrapped(dim, len(tensor.shape))
    size, part = tensor.shape[place], split_size_or_sections
    if isinstance(part, int):
        fits(part > 0 or (part == 0 and not size))
        sizes = [min(part, size - start) for start in range(0, size, part)] if size else [0]
    else:
        sizes = list(whole(part))
        fits(min(sizes, default=0) >= 0 and sum(sizes) == size)
    return tuple([resized(tensor, place, each) for each in sizes])


RULES["Tensor.split"] = lambda self, split_size, dim=0: split(self, split_size, dim)


@rule
def chunk(input: Meta, chunks: int, dim: int = 0) -> tuple[Meta, ...]:
    fits(chunks > 0)
    size = input.shape[wrapped(dim, len(input.shape))] if input.shape else 0
    return split(input, -(-size // chunks) if size else [0] * chunks, dim)  # type: ignore[no-any-return]


@rule
def unbind(input: Meta, dim: int = 0) -> tuple[Meta, ...]:
    fits(input.shape)
    place = wrapped(dim, len(input.shape))
    part = picked(input, [each for each in range(len(input.shape)) if each != place])
    return (part,) * input.shape[place]


def resized(meta: Meta, place: int, size: int) -> Meta:
    """Return a layout with another size of a dimension, and the same strides."""
    return Meta((*meta.shape[:place], size, *meta.shape[place + 1 :]), meta.dtype, meta.strides)


# Views


def whole(given: Any) -> Shape:
    """Return sizes, or dimensions, as a tuple of ints: those of ``f(2, 3)``, of ``f((2, 3))`` and of ``f(2)``."""
    if isinstance(given, (tuple, list)):
        if len(given) == 1 and isinstance(given[0], (tuple, list)):
            given = given[0]
        return tuple([each if type(each) is int else int(to_int(each)) for each in given])
    return (int(to_int(given)),)


def wrapped_dims(dims: Sequence[int], dimensions: int) -> list[int]:
    """Return dimensions counted from the front, of which none may be there twice."""
    found = [wrapped(each, dimensions) for each in dims]
    fits(len(set(found)) == len(found))
    return found


def picked(meta: Meta, places: Sequence[int]) -> Meta:
    """Return the layout of some dimensions, in their order."""
    shape, strides = meta.shape, meta.strides
    return Meta(tuple([shape[each] for each in places]), meta.dtype, tuple([strides[each] for each in places]))


def inferred(size: Shape, numel: int) -> Shape:
    """Return a shape of so many elements with the size instead of -1."""
    known = product(each for each in size if each != -1)
    fits(min(size, default=0) >= -1 and size.count(-1) < 2)
    if -1 not in size:
        fits(known == numel)
        return size
    fits(known and numel % known == 0)
    return tuple(numel // known if each == -1 else each for each in size)


def viewed(old: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Return the strides of a view with another shape; None if there is none. As `computeStride` of ATen."""
    if not old:
        return (1,) * len(new)
    if 0 in old:
        if old == new:
            return strides
        found = [1] * len(new)
        for place in range(len(new) - 2, -1, -1):
            found[place] = found[place + 1] * (new[place + 1] or 1)
        return tuple(found)
    found = [0] * len(new)
    at = len(new) - 1
    base, chunk, done = strides[-1], 1, 1
    for place in range(len(old) - 1, -1, -1):
        chunk *= old[place]
        if place and (old[place - 1] == 1 or strides[place - 1] == chunk * base):
            continue
        while at >= 0 and (done < chunk or new[at] == 1):
            found[at] = done * base
            done *= new[at]
            at -= 1
        if done != chunk:
            return None
        if place:
            base, chunk, done = strides[place - 1], 1, 1
    return tuple(found) if at == -1 else None


@lru_cache(maxsize=4096)
def _reshaped(meta: Meta, size: Shape) -> tuple[Shape, Shape | None]:
    shape = inferred(size, meta.numel)
    return shape, viewed(meta.shape, meta.strides, shape)


@rule
def view(input: Meta, *sizes: Any, size: Any = ()) -> Meta:
    size = sizes or size
    shape, strides = _reshaped(input, whole(size))
    fits(strides is not None)
    return Meta(shape, input.dtype, strides)


RULES["reshape"] = view
RULES[".reshaped"] = lambda input, size: Meta(_reshaped(input, size)[0], input.dtype)
RULES["view_as"] = lambda input, other: view(input, other.shape)

_RESHAPE, _RESHAPED = Function("Tensor.reshape"), Function(".reshaped")


@method
def reshape(self: Tensor, *sizes: Any, shape: Any = ()) -> Tensor:
    """Return the elements with another shape: a view if the strides allow one, else a copy."""
    size = whole(sizes or shape)
    copies = False
    with suppress(Misfit):
        copies = _reshaped(self.meta, size)[1] is None
    return call(self._home, _RESHAPED if copies else _RESHAPE, (self, size))  # type: ignore[no-any-return]


@method
def reshape_as(self: Tensor, other: Tensor) -> Tensor:
    return reshape(self, other.shape)  # type: ignore[no-any-return]


@method
def ravel(self: Tensor) -> Tensor:
    """Return the elements in one dimension: a view if they lie in memory in their order, else a copy."""
    return reshape(contiguous(self), -1)  # type: ignore[no-any-return]


@method
def flatten(self: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Return the elements with one dimension for several."""
    shape = self.shape
    with suppress(IndexError, Misfit):
        start, end = wrapped(start_dim, len(shape)), wrapped(end_dim, len(shape))
        fits(start <= end)
        if shape and start == end:
            return self
        return reshape(self, (*shape[:start], product(shape[start : end + 1]), *shape[end + 1 :]))  # type: ignore[no-any-return]
    return call_asked(self._home, "Tensor.flatten", (self, start_dim, end_dim))  # type: ignore[no-any-return]


@rule
def expand(input: Meta, *sizes: Any, size: Any = ()) -> Meta:
    size, old = whole(sizes or size), input.shape
    lead = len(size) - len(old)
    fits(lead >= 0)
    shape, strides = list(size), [0] * len(size)
    for place in range(len(size) - 1, -1, -1):
        wanted, have = size[place], old[place - lead] if place >= lead else 1
        if wanted in (-1, have) and (wanted != -1 or place >= lead):
            shape[place] = have
            if place >= lead:
                strides[place] = input.strides[place - lead]
            elif old:
                strides[place] = shape[place + 1] * strides[place + 1]
        else:
            fits(have == 1 and wanted >= 0)
    return Meta(tuple(shape), input.dtype, tuple(strides))


RULES["broadcast_to"] = expand
RULES["expand_as"] = lambda input, other: expand(input, other.shape)


@rule
def unsqueeze(input: Meta, dim: int) -> Meta:
    shape, strides = input.shape, input.strides
    place = wrapped(dim, len(shape) + 1)
    stride = shape[place] * strides[place] if place < len(shape) else 1
    return Meta((*shape[:place], 1, *shape[place:]), input.dtype, (*strides[:place], stride, *strides[place:]))


@rule
def squeeze(input: Meta, dim: Any = None) -> Meta:
    dims = range(len(input.shape)) if dim is None else wrapped_dims(whole(dim), len(input.shape))
    return picked(input, [place for place, size in enumerate(input.shape) if size != 1 or place not in dims])


@rule
def permute(input: Meta, *order: Any, dims: Any = ()) -> Meta:
    order = whole(order or dims)
    fits(len(order) == len(input.shape))
    return picked(input, wrapped_dims(order, len(order)))


@rule
def transpose(input: Meta, dim0: int, dim1: int) -> Meta:
    one, other = wrapped(dim0, len(input.shape)), wrapped(dim1, len(input.shape))
    order = list(range(len(input.shape)))
    if order:
        order[one], order[other] = other, one
    return picked(input, order)


RULES["swapaxes"] = lambda input, axis0, axis1: transpose(input, axis0, axis1)
RULES["swapdims"] = lambda input, dim0, dim1: transpose(input, dim0, dim1)


@rule
def t(input: Meta) -> Meta:
    many = len(input.shape)
    fits(many <= 2)
    return transpose(input, 0, many - 1 if many else 0)  # type: ignore[no-any-return]


# Parts by an index for each element, and copies


@rule
def repeat(input: Meta, *size: Any, repeats: Any = ()) -> Meta:
    times = whole(size or repeats)
    lead = len(times) - len(input.shape)
    fits(lead >= 0 and min(times, default=0) >= 0)
    shape = (1,) * lead + input.shape
    return Meta(tuple([size * many for size, many in zip(shape, times, strict=True)]), input.dtype)


RULES["tril"] = RULES["triu"] = lambda input, diagonal=0: Meta(input.shape, input.dtype)
RULES["gather"] = lambda input, dim, index, sparse_grad=False: Meta(index.shape, input.dtype)


@rule
def index_select(input: Meta, dim: int, index: Meta) -> Meta:
    place = wrapped(dim, len(input.shape))
    return Meta((*input.shape[:place], index.numel, *input.shape[place + 1 :]) if input.shape else (), input.dtype)


# Networks


@rule
def embedding(input: Meta, weight: Meta, *more: Any, **options: Any) -> Meta:
    fits(len(weight.shape) == 2)
    return Meta((*input.shape, weight.shape[1]), weight.dtype)


@rule
def one_hot(tensor: Meta, num_classes: int = -1) -> Meta | None:
    return None if num_classes <= 0 else Meta((*tensor.shape, num_classes), int64)


@rule
def layer_norm(input: Meta, normalized_shape: Any, *more: Any, **options: Any) -> Meta:
    shape = tuple(normalized_shape)
    fits(shape and input.shape[-len(shape) :] == shape)
    return Meta(input.shape, input.dtype)


RULES["nn.functional.dropout"] = lambda input, p=0.5, training=True, inplace=False: pointwise(promoted, input)
_DROPOUT = Function("nn.functional.dropout")
_DROPOUT_ = Function("nn.functional.dropout", in_place=True)


@method
def dropout(self: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Set a share ``p`` of the elements to 0, and divide the others by ``1 - p``."""
    if inplace:
        return call(self._home, _DROPOUT_, (self, p, training, True))  # type: ignore[no-any-return]
    if not training or p == 0 or not self.numel():
        return self
    return call(self._home, _DROPOUT, (self, p, training))  # type: ignore[no-any-return]


_GELU = Function("nn.functional.gelu")


@method
def gelu_(self: Tensor, approximate: str = "none") -> Tensor:
    """Return each element times the normal distribution's share below it; "tanh" approximates that."""
    return call(self._home, _GELU, (self,), {"approximate": approximate})  # type: ignore[no-any-return]


methods["gelu"] = methods.pop("gelu_")


def _lossy(rule_of_all: Callable[..., Meta]) -> Callable[..., Meta]:
    """Return the rule of a loss, of the rule of the losses of elements."""

    def loss(
        input: Meta,
        target: Meta,
        *,
        reduction: str = "mean",
        weight: Any = None,
        pos_weight: Any = None,
        ignore_index: int = 0,
        label_smoothing: float = 0.0,
    ) -> Meta:
        fits(reduction in ("none", "mean", "sum"))
        found = rule_of_all(input, target)
        return found if reduction == "none" else Meta((), found.dtype)

    return loss


def _of_same_shape(input: Meta, target: Meta) -> Meta:
    fits(input.shape == target.shape)
    return pointwise_meta([input, target], target.dtype)


def _of_classes(input: Meta, target: Meta) -> Meta:
    shape = input.shape
    expected = (shape[0], *shape[2:]) if len(shape) > 1 else ()
    fits(len(shape) < 2 or target.shape[:1] == shape[:1])
    of_probabilities = target.shape == shape and target.dtype.kind is DtypeKind.FLOAT
    return Meta(
        expected if of_probabilities else target.shape,
        promoted([input, target], ()) if of_probabilities else input.dtype,
    )


for _name in ("cross_entropy", "nll_loss"):
    RULES[f"nn.functional.{_name}"] = _lossy(_of_classes)
RULES["nn.functional.mse_loss"] = _lossy(partial(pointwise, promoted))
RULES["nn.functional.binary_cross_entropy_with_logits"] = _lossy(_of_same_shape)

# Other dtypes, and copies

DEVICES = ("cpu", "cuda", "loom", "meta")
"""Names of devices, which code of torch may ask for."""

_TO, _CLONE = Function("Tensor.to"), Function("clone")


@method
def to_(
    self: Tensor, *wanted: Any, dtype: Any = None, device: Any = None, copy: bool = False, **options: Any
) -> Tensor:
    """Return the tensor with a dtype, or with that of another tensor; itself, if it has it.

    Args:
        self: the tensor.
        wanted: the dtype, or a tensor that has it. A device makes no difference: a tensor stays in its workers.
        dtype: the same by name.
        device: makes no difference.
        copy: whether to return a copy in any case.
        options: ``memory_format``, the order of the dimensions in memory; ``non_blocking`` makes no difference.
    """
    for each in wanted:
        of_device = not isinstance(each, Tensor) and str(each).partition(":")[0] in DEVICES
        dtype = dtype if of_device or isinstance(each, bool) else each
    kind = self.dtype if dtype is None else dtype.dtype if isinstance(dtype, Tensor) else dtype_named(dtype)
    found = self if kind is self.dtype else call(self._home, _TO, (self, kind))
    order = {name: each for name, each in options.items() if name == "memory_format" and each is not None}
    return call(self._home, _CLONE, (found,), order) if order or (copy and found is self) else found


methods["to"] = methods.pop("to_")


@method
def type_as(self: Tensor, other: Tensor) -> Tensor:
    """Return the tensor with the dtype of another."""
    return to_(self, other)  # type: ignore[no-any-return]


@method
def contiguous(self: Tensor, memory_format: Any = None) -> Tensor:
    """Return the tensor with its elements in row-major order, or in that of a format; itself, if they are."""
    if memory_format is None and self.meta.contiguous:
        return self
    how = memory_format or self._home.contiguous_format
    return call(self._home, _CLONE, (self,), {"memory_format": how})  # type: ignore[no-any-return]


def _cast(name: str, dtype: str) -> Callable[..., Tensor]:
    kind = dtype_named(dtype)

    def cast(self: Tensor, memory_format: Any = None) -> Tensor:
        return to_(self, kind, memory_format=memory_format)  # type: ignore[no-any-return]

    cast.__name__ = cast.__qualname__ = name
    cast.__doc__ = f"Return the tensor with dtype {dtype}."
    return cast


for _name in ("float", "double", "half", "bfloat16", "long", "int", "short", "bool", "cfloat", "cdouble"):
    methods[_name] = _cast(_name, _name)
methods["char"], methods["byte"] = _cast("char", "int8"), _cast("byte", "uint8")

# Spread over processes

LARGE = 1 << 32
"""Multiplications from which on a product of matrices is computed by all processes, each some rows."""

RULES[".spread"] = RULES[".rows"] = lambda input, **how: Meta(input.shape, input.dtype)
_SPREAD, _ROWS, _MATMUL, _MM = map(Function, (".spread", ".rows", "matmul", "mm"))


@method
def redistribute(self: Tensor, placements: Sequence[Any]) -> Tensor:
    """Return the same tensor, spread over the processes in another way.

    Args:
        self: the tensor.
        placements: `loom.tensors.Shard` or `loom.tensors.Replicate`, one for each dimension of the mesh.

    Raises:
        ValueError: there are more or fewer placements than the mesh has dimensions.
    """
    how = packed(placements, self._home.mesh, self.dim())
    if any(each != WHOLE for each in how):
        self._home._join()
    return call(self._home, _SPREAD, (self,), {"placements": how})  # type: ignore[no-any-return]


@method
def full_tensor(self: Tensor) -> Tensor:
    """Return the same tensor, all of it in each process."""
    how = (WHOLE,) * len(spread(self._home.mesh))
    return call(self._home, _SPREAD, (self,), {"placements": how})  # type: ignore[no-any-return]


def _placements(self: Tensor) -> tuple[Placement, ...]:
    """Its placement on the processes, one for each dimension of the mesh. This asks the cluster."""
    return self._home._placements_of(self)  # type: ignore[no-any-return]


def _multiplied(function: Function, self: Tensor, other: Tensor) -> Tensor:
    """Queue a product; if it is large, the rows of the left factor are spread over the processes."""
    home = self._home
    if home._processes > 1 and isinstance(other, Tensor):
        one, two = self.meta, other.meta
        if len(one.shape) == len(two.shape) == 2 and one.numel * two.shape[1] >= LARGE:
            home._join()
            self = call(home, _ROWS, (self,))
    return call(home, function, (self, other))  # type: ignore[no-any-return]


methods["matmul"] = methods["__matmul__"] = lambda self, other: _multiplied(_MATMUL, self, other)
methods["__rmatmul__"] = lambda self, other: _multiplied(_MATMUL, other, self)
methods["mm"] = lambda self, mat2: _multiplied(_MM, self, mat2)

# Like others, and what is known of a tensor under torch's other names


def _new(name: str) -> Callable[..., Tensor]:
    def made(self: Tensor, *size: Any, dtype: Any = None, **options: Any) -> Tensor:
        return getattr(self._home, name)(*size, dtype=dtype or self.dtype, **options)  # type: ignore[no-any-return]

    return made


def _like(name: str) -> Callable[..., Tensor]:
    def made(input: Tensor, *value: Any, dtype: Any = None, memory_format: Any = None, **options: Any) -> Tensor:
        make = getattr(input._home, name)
        return make(input.shape, *value, dtype=dtype or input.dtype, **options)  # type: ignore[no-any-return]

    return made


for _name in ("empty", "full", "ones", "tensor", "zeros"):
    methods[f"new_{_name}"] = _new(_name)
for _name in ("empty", "full", "ones", "rand", "randn", "zeros"):
    functions[f"{_name}_like"] = _like(_name)

methods.update(
    cpu=lambda self, *args, **options: self,
    cuda=lambda self, *args, **options: self,
    element_size=lambda self: self.dtype.itemsize,
    is_complex=lambda self: self.dtype.is_complex,
    is_floating_point=lambda self: self.dtype.is_floating_point,
    ndimension=lambda self: self.dim(),
    nelement=lambda self: self.numel(),
)


def _matrices_transposed(self: Tensor) -> Any:
    if self.dim() == 1:
        raise RuntimeError("tensor.mT is only supported on matrices or batches of matrices. Got 1-D tensor.")
    return self.transpose(-2, -1) if self.dim() else self


PROPERTIES: dict[str, Callable[[Any], Any]] = {
    "H": lambda self: self.t().conj(),
    "T": lambda self: self.permute(tuple(range(self.dim()))[::-1]),
    "imag": lambda self: self._home.imag(self),
    "itemsize": lambda self: self.dtype.itemsize,
    "mH": lambda self: self.adjoint(),
    "mT": _matrices_transposed,
    "nbytes": lambda self: self.meta.nbytes,
    "placements": _placements,
    "real": lambda self: self._home.real(self) if self.dtype.is_complex else self,
}
"""What tensors have as attributes."""

# Python's operators

OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}  # fmt: skip
"""Python's operators of two operands, by the function that each one calls."""


def _operator(name: str, path: str, reflected: bool = False) -> None:
    """Make a function an operator that leaves operands of other types to these, but for an array after a tensor."""
    function = Function(path)

    def operator(self: Tensor, other: Any) -> Any:
        if type(other) is not Tensor and type(other) not in PLAIN and not isinstance(other, Tensor):
            other = plain(other)
            if type(other).__module__ == "numpy" and not reflected:
                other = self._home.tensor(other)
            if not isinstance(other, (Tensor, int, float, complex)):
                return NotImplemented
        return call(self._home, function, (other, self) if reflected else (self, other))

    operator.__name__ = operator.__qualname__ = f"__{name}__"
    methods[operator.__name__] = operator


for _name, _of in OPERATORS.items():
    _operator(_name, _of)
    _operator(f"i{_name}", f"Tensor.{_of}_")
    _operator(f"r{_name}", _of, reflected=True)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _operator(_name, _name)
for _name, _of in (("__abs__", "abs"), ("__neg__", "neg"), ("__pos__", "positive")):
    methods[_name] = method_named(_of)


def _invert(self: Tensor) -> Tensor:
    if self.dtype.kind >= DtypeKind.FLOAT:
        raise TypeError("~ (operator.invert) is only implemented on integer and Boolean-type tensors")
    return self.bitwise_not()  # type: ignore[no-any-return]


methods["__invert__"] = _invert
