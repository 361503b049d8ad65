"""torch's own database of operations (OpInfo), run against lazy tensors: values, and gradients of leaves."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from loom.tensors.layouts import DType
from loom.tensors.tensor import Tensor
from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import to_torch

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)

RANDOM = ("dropout", "rrelu", "bernoulli", "multinomial", "normal", "rand", "uniform", "cauchy", "exponential",
          "geometric", "log_normal", "gumbel", "empty", "feature_alpha", "scaled_dot_product", "svd_lowrank",
          "pca_lowrank", "fractional_max_pool", "poisson", "resize")  # fmt: skip
"""Parts of the names of operations whose elements are others each time."""

AMBIGUOUS = ("eig", "svd", "qr", "lobpcg", "householder", "ormqr", "geqrf", "lu", "ldl", "pinverse", "lstsq")
"""Operations whose results have a sign or an order that rounding may decide: their values are not compared."""


UNLIKE = {
    "as_strided_partial_views": "the sample is a view of another tensor's memory, of which a lazy tensor is a copy",
    "linspace_tensor_overload": "the bounds of linspace are numbers of Python",
    "linalg_lstsq_grad_oriented": "only some of the results are compared there",
    "linalg_pinv_singular": "the database calls a function of its own",
    "logspace_tensor_overload": "the bounds of logspace are numbers of Python",
    "nn_functional_linear_cross_entropy_chunked": "its options are an object of torch's",
    "nn_functional_linear_cross_entropy_chunked_none": "its options are an object of torch's",
    "nn_functional_triplet_margin_with_distance_loss": "its distance is a function of Python",
    "pca_lowrank": "the database calls a function of its own",
    "svd_lowrank": "the database calls a function of its own",
    "zero_": "the database clones the leaf first",
    "chalf": "lazy tensors have no complex32",
}
"""Operations that are not compared, and why."""

TURNED = {
    "einsum": lambda function, tensors, equation: function(equation, *tensors),
    "nn.functional.embedding": lambda function, weight, index, **more: function(index, weight, **more),
    "polygamma": lambda function, x, n: function(n, x),
    "special.polygamma": lambda function, x, n: function(n, x),
    "unfold": lambda function, x, *window: x.unfold(*window),
    "where": lambda function, x, condition, other: function(condition, x, other),
}
"""The functions whose arguments the database has in another order."""

LEFT_OUT = ("_", "jiterator", "masked.", "ops.", "signal.", "sparse", "to_sparse", "torch.")
"""Beginnings of names that are no public functions of torch's, or of tensors that are not strided."""


@dataclass(frozen=True)
class Outcome:
    """What an operation of a dtype gives with lazy tensors."""

    name: str
    dtype: torch.dtype
    problem: str = ""
    """How it disagrees with torch; empty if it agrees."""


def entries() -> list[OpInfo]:
    """Return the operations that torch has in its database."""
    return [each for each in op_db if not each.name.startswith(LEFT_OUT) and each.formatted_name not in UNLIKE]


def lazy(lt: Tensors, name: str) -> Any:
    """Return the function of a name, or None."""
    try:
        return getattr(lt, name.removeprefix("nn.functional."))
    except AttributeError:
        return None


def check(lt: Tensors, op: OpInfo, dtype: torch.dtype, most: int) -> Outcome:
    """Compare an operation with torch on some samples; samples that torch refuses are left out."""
    name = op.formatted_name
    function = lazy(lt, op.name)
    if isinstance(function, DType):  # `lt.float` is a dtype, and `x.float()` a method

        def function(x: Tensor, *args: Any, **more: Any) -> Any:
            return getattr(x, op.name)(*args, **more)

    elif op.name in TURNED:
        function = partial(TURNED[op.name], function)
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    for number, sample in enumerate(samples(op, dtype, grad)):
        if number >= most:
            break
        try:
            wanted = op.op(sample.input, *sample.args, **sample.kwargs)
        except Exception:  # noqa: BLE001 - torch refuses it
            continue
        problem = _compared(lt, op, function, sample, wanted, grad)
        if problem:
            return Outcome(name, dtype, f"sample {number}: {problem}")
    return Outcome(name, dtype)


def samples(op: OpInfo, dtype: torch.dtype, grad: bool) -> Iterator[SampleInput]:
    """Yield the samples of an operation."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from op.sample_inputs("cpu", dtype, requires_grad=grad)


def _compared(lt: Tensors, op: OpInfo, function: Any, sample: SampleInput, wanted: Any, grad: bool) -> str:
    leaves: list[tuple[torch.Tensor, Tensor]] = []

    def converted(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            made = lt.tensor(value.detach().contiguous(), requires_grad=value.requires_grad)
            if value.requires_grad:
                leaves.append((value, made))
            return made
        if isinstance(value, torch.dtype):
            return getattr(lt, str(value).removeprefix("torch."))
        if isinstance(value, (tuple, list)):
            return (list if type(value) is list else tuple)([converted(each) for each in value])
        return value

    try:
        given = converted(sample.input), *map(converted, sample.args)
        found = function(*given, **{key: converted(each) for key, each in sample.kwargs.items()})
        theirs, ours = _flat(wanted), _flat(found)
        if len(theirs) != len(ours):
            return f"{len(ours)} results, not {len(theirs)}"
        quiet = any(each in op.name for each in (*RANDOM, *AMBIGUOUS))
        for one, other in zip(theirs, ours, strict=True):
            problem = _different(one, other, quiet)
            if problem:
                return problem
        return _gradients(lt, theirs, ours, leaves) if grad and not quiet else ""
    except Exception as error:  # noqa: BLE001 - whatever went wrong
        if "there is no dtype" in str(error):
            return ""  # refused at its line: the laptop knows the dtypes of `loom.tensors.layouts`
        return f"{type(error).__name__}: {error}"


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [part for each in value for part in _flat(each)]
    return [value]


def _different(one: Any, other: Any, quiet: bool) -> str:
    if not isinstance(one, torch.Tensor):
        return "" if one == other or quiet or one != one else f"{other!r}, not {one!r}"
    if not isinstance(other, Tensor):
        return f"{type(other).__name__}, not a tensor"
    if other.shape != tuple(one.shape) or other.dtype.name != str(one.dtype).removeprefix("torch."):
        return f"{other.meta}, not {list(one.shape)} {one.dtype}"
    if other.requires_grad != one.requires_grad:
        return f"requires_grad is {other.requires_grad}"
    found = to_torch(other)
    if quiet or torch.allclose(found, one.detach().resolve_conj(), rtol=1e-3, atol=1e-4, equal_nan=True):
        return ""
    return "other elements"


def _gradients(lt: Tensors, theirs: list[Any], ours: list[Any], leaves: list[tuple[torch.Tensor, Tensor]]) -> str:
    pairs = [
        (one, other)
        for one, other in zip(theirs, ours, strict=True)
        if isinstance(one, torch.Tensor) and one.requires_grad
    ]
    if not pairs or not leaves:
        return ""
    ones = [torch.ones_like(one) for one, _ in pairs]
    try:
        wanted = torch.autograd.grad(
            [one for one, _ in pairs], [leaf for leaf, _ in leaves], ones, allow_unused=True
        )
    except Exception:  # noqa: BLE001 - torch has no gradient
        return ""
    found = lt.grad(
        [other for _, other in pairs],
        [leaf for _, leaf in leaves],
        [lt.tensor(each.contiguous()) for each in ones],
        allow_unused=True,
    )
    for one, other in zip(wanted, found, strict=True):
        if one is None or other is None:
            if (one is not None and one.any()) or (other is not None and to_torch(other).any()):
                return "a gradient is missing"
        elif not torch.allclose(to_torch(other), one.resolve_conj(), rtol=1e-3, atol=1e-3, equal_nan=True):
            return "another gradient"
    return ""
