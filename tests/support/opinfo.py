"""torch's own database of operations (OpInfo), run against lazy tensors: values, layouts, gradients and refusals.

Each operation is called as a function, as a method, in place, and by its other names, as far as they exist.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from loom.tensors.call import method_named
from loom.tensors.layouts import ALL, DType
from loom.tensors.tensor import Tensor
from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import PROCESSES, Operand, settled, to_torch

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)

KNOWN = frozenset(each.name for each in ALL)

REFUSED = {
    "nn_functional_linear_cross_entropy_chunked": "a LinearCrossEntropyOptions of torch",
    "nn_functional_linear_cross_entropy_chunked_none": "a LinearCrossEntropyOptions of torch",
    "nn_functional_triplet_margin_with_distance_loss": "a PairwiseDistance of torch",
}
"""Entries with an argument that does not travel, which is refused at its line, and what the refusal names."""

OWN = {"rand_like": torch.rand_like}
"""Functions of the database that are others than their names say."""

NO_VALUES = ("empty", "resize")
"""Parts of the names of operations whose elements are those of memory that nobody wrote."""

DRAWN = ("dropout", "rrelu", "bernoulli", "multinomial", "normal", "rand", "uniform", "cauchy", "exponential",
         "geometric", "log_normal", "gumbel", "feature_alpha", "scaled_dot_product", "svd_lowrank",
         "pca_lowrank", "fractional_max_pool", "poisson")  # fmt: skip
"""Parts of the names of operations that draw numbers: each process draws others for its part."""

AMBIGUOUS = ("eig", "svd", "qr", "lobpcg", "householder", "ormqr", "geqrf", "lu", "ldl", "pinverse", "lstsq")
"""Operations whose results have a sign or an order that rounding may decide."""

TURNED: dict[str, Callable[..., Any]] = {
    "einsum": lambda function, tensors, equation: function(equation, *tensors),
    "nn.functional.embedding": lambda function, weight, index, **more: function(index, weight, **more),
    "polygamma": lambda function, x, n: function(n, x),
    "special.polygamma": lambda function, x, n: function(n, x),
    "where": lambda function, x, condition, other: function(condition, x, other),
    "normal_in_place": lambda function, x, *args, **more: x.normal_(*args, **more),
    "normal_number_mean": lambda function, deviation, mean, *args, **more: function(mean, deviation, *args, **more),
    "linalg_lstsq_grad_oriented": lambda function, one, other, driver: function(one, other, driver=driver)[:2],
    "linalg_pinv_singular": lambda function, one, other: function(one @ other.mT),
    "pca_lowrank": lambda function, one, other, **more: function(one @ other.mT, **more),
    "svd_lowrank": lambda function, one, other, **more: function(one @ other.mT, **more),
    "zero_": lambda function, x: function(x.clone()),
}
"""The entries whose functions take their arguments otherwise than the functions of their names."""

LEFT_OUT = ("_softmax", "_chunk", "_batch", "_native", "_segment", "_unsafe", "_upsample", "jiterator", "masked.",
            "ops.", "signal.", "sparse", "to_sparse", "torch.")  # fmt: skip
"""Beginnings of names that are no public functions of torch's, or of tensors that are not strided."""

Call = Callable[..., Any]


class Kind(NamedTuple):
    """One way to call an operation."""

    name: str
    theirs: Call
    ours: Call
    changes: bool = False
    """Whether it changes its first operand."""


class Outcome(NamedTuple):
    """What a call of an operation gives with lazy tensors."""

    name: str
    dtype: torch.dtype
    compared: int
    """How many samples were compared."""
    problem: str = ""
    """How it disagrees with torch; empty if it agrees."""


def entries() -> list[OpInfo]:
    """Return the operations that torch has in its database."""
    return [each for each in op_db if not each.name.startswith(LEFT_OUT) and each.formatted_name not in REFUSED]


def refused() -> list[OpInfo]:
    """Return the operations of the database that are refused."""
    return [each for each in op_db if each.formatted_name in REFUSED]


def kinds(lt: Tensors, op: OpInfo) -> list[Kind]:
    """Return the ways to call an operation that lazy tensors have."""
    found: list[Kind] = []
    for name, theirs in [(op.name, OWN.get(op.name, op.op)), *((each.name, each.op) for each in op.aliases)]:
        function = _function(lt, name)
        if function is not None:
            turn = TURNED.get(op.formatted_name, TURNED.get(op.name))
            found.append(Kind(name, theirs, function if turn is None else partial(turn, function)))
    if op.formatted_name in TURNED or op.name in TURNED:
        return found
    for name, variants in [(op.name, op), *((each.name, each) for each in op.aliases)]:
        short = name.rpartition(".")[2]
        found += _method(short, variants.method_variant, False)
        found += _method(f"{short.removesuffix('_')}_", variants.inplace_variant, True)
    return found


def check(lt: Tensors, op: OpInfo, kind: Kind, dtype: torch.dtype, most: int) -> Outcome:
    """Compare a call with torch on some samples, also that it refuses those that torch refuses."""
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    done = 0
    for number, sample in enumerate(_samples(op, dtype, grad)):
        if number >= most:
            break
        problem = _compared(lt, op, kind, sample)
        if problem:
            return Outcome(kind.name, dtype, done, f"sample {number}: {problem}")
        done += 1
    return Outcome(kind.name, dtype, done)


ERRORS = (IndexError, ValueError, TypeError, NotImplementedError, RuntimeError, Exception)
"""Classes of errors that programs tell apart."""

OTHER_ERRORS = {
    ("atan2", 0): "which of two wrong arguments is told first",
    ("nn_functional_group_norm", 0): "torch looks at the number of groups first",
}
"""Wrong calls whose errors have other classes, by entry and number."""


def check_errors(lt: Tensors, op: OpInfo) -> Iterator[str]:
    """Yield how wrong calls of the database disagree, and an empty text for each that agrees."""
    for number, given in enumerate(op.error_inputs("cpu")):
        sample = given.sample_input
        if sample.kwargs.get("out") is not None or (op.formatted_name, number) in OTHER_ERRORS:
            continue  # `out` is refused
        for kind in kinds(lt, op):
            operands = Operands(lt)
            try:
                theirs = operands.theirs((sample.input, *sample.args)), operands.theirs(sample.kwargs)
            except RuntimeError:  # tensors of other devices
                continue
            if kind.name.startswith(("Tensor.", "__")) and not isinstance(sample.input, torch.Tensor):
                continue
            error = _error(kind.theirs, *theirs[0], **theirs[1])
            if error is None:
                continue
            _error(lt.synchronize)  # which raises errors of calls before, too
            args, named = operands.ours((sample.input, *sample.args)), operands.ours(sample.kwargs)
            found = _error(kind.ours, *args, **named) or _error(lt.synchronize)
            agrees = isinstance(found, next(each for each in ERRORS if isinstance(error, each)))
            yield "" if agrees else f"{op.formatted_name} {number} as {kind.name}: {found!r}, not {error!r}"


def _error(work: Call, *args: Any, **kwargs: Any) -> Exception | None:
    try:
        settled(work(*args, **kwargs))
    except Exception as error:  # noqa: BLE001 - whatever is raised
        return error
    return None


def _samples(op: OpInfo, dtype: torch.dtype, grad: bool) -> Iterator[SampleInput]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from op.sample_inputs("cpu", dtype, requires_grad=grad)


class Operands:
    """The operands of a sample on both sides: of one memory each, with the same strides."""

    def __init__(self, lt: Tensors) -> None:
        self._lt = lt
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor, Tensor]] = {}

    @property
    def leaves(self) -> list[tuple[torch.Tensor, Tensor]]:
        """Those whose gradients are wanted."""
        return [(one, other) for _, one, other in self._known.values() if one.requires_grad]

    def theirs(self, value: Any) -> Any:
        """Return an argument for torch."""
        return self._each(value, 1, lambda dtype: dtype)

    def ours(self, value: Any) -> Any:
        """Return an argument for lazy tensors."""
        return self._each(value, 2, self._dtype)

    def _dtype(self, dtype: torch.dtype) -> Any:
        name = str(dtype).removeprefix("torch.")
        return getattr(self._lt, name) if name in KNOWN else dtype

    def _each(self, value: Any, side: int, of_dtype: Call) -> Any:
        if isinstance(value, torch.Tensor):
            return self._of(value)[side]
        if isinstance(value, torch.dtype):
            return of_dtype(value)
        if isinstance(value, slice):
            return slice(*(self._each(each, side, of_dtype) for each in (value.start, value.stop, value.step)))
        if isinstance(value, dict):
            return {key: self._each(each, side, of_dtype) for key, each in value.items()}
        if isinstance(value, (tuple, list)):
            return (list if type(value) is list else tuple)([self._each(each, side, of_dtype) for each in value])
        return value

    def _of(self, tensor: torch.Tensor) -> Any:
        if id(tensor) not in self._known:
            plain = tensor.detach().resolve_conj().resolve_neg()
            if PROCESSES > 1:
                plain = plain.contiguous()
            memory = torch.empty(0, dtype=plain.dtype).set_(plain.untyped_storage())
            made = Operand(memory, tuple(plain.shape), plain.stride(), plain.storage_offset(), tensor.requires_grad)
            self._known[id(tensor)] = tensor, made.of_torch(), made.of_loom(self._lt)
        return self._known[id(tensor)]


def _compared(lt: Tensors, op: OpInfo, kind: Kind, sample: SampleInput) -> str:
    operands = Operands(lt)
    given = sample.input, *sample.args
    theirs, ours = operands.theirs(given), operands.ours(given)
    if kind.changes:
        theirs, ours = (theirs[0].clone(), *theirs[1:]), (ours[0].clone(), *ours[1:])
    try:
        torch.manual_seed(SEED)
        wanted = kind.theirs(*theirs, **operands.theirs(sample.kwargs))
    except Exception as error:  # noqa: BLE001 - whatever torch raises
        try:
            settled(kind.ours(*ours, **operands.ours(sample.kwargs)))
            lt.synchronize()
        except Exception:  # noqa: BLE001 - whatever lazy tensors raise
            return ""
        return f"torch raises {error!r}, this raises nothing"
    try:
        torch.manual_seed(SEED)
        if PROCESSES > 1:
            lt.manual_seed(SEED)
        found = settled(kind.ours(*ours, **operands.ours(sample.kwargs)))
        if kind.changes:
            wanted, found = (wanted, theirs[0]), (found, ours[0])
        quiet = any(each in op.name for each in NO_VALUES) or (
            PROCESSES > 1 and any(each in op.name for each in (*DRAWN, *AMBIGUOUS))
        )
        problem = different(wanted, found, quiet)
        return problem or ("" if quiet else different_gradients(lt, flat(wanted), flat(found), operands.leaves))
    except Exception as error:  # noqa: BLE001 - whatever went wrong
        if "there is no dtype" in str(error):
            return ""  # refused at its line: the laptop knows the dtypes of `loom.tensors.layouts`
        return f"{type(error).__name__}: {error}"


SEED = 42
"""Of the numbers that are drawn: that of the database's own ``wrapper_set_seed``."""


def flat(value: Any) -> list[Any]:
    """Return the parts of tuples and lists."""
    if isinstance(value, (tuple, list)):
        return [part for each in value for part in flat(each)]
    return [value]


def different(one: Any, other: Any, quiet: bool) -> str:
    """Return how results disagree, only by their layouts if ``quiet``; an empty text if they agree."""
    if isinstance(one, (tuple, list)):
        if not isinstance(other, (tuple, list)) or len(one) != len(other):
            return f"{other!r}, not {one!r}"
        names = getattr(type(one), "__match_args__", ()) or getattr(type(one), "_fields", ())
        if not all(hasattr(other, name) for name in names):
            return f"its results have no names {names}"
        return next(filter(None, (different(*each, quiet) for each in zip(one, other, strict=True))), "")
    if not isinstance(one, torch.Tensor):
        return "" if one == other or quiet or one != one else f"{other!r}, not {one!r}"
    if not isinstance(other, Tensor):
        return f"{type(other).__name__}, not a tensor"
    if other.shape != tuple(one.shape) or other.dtype.name != str(one.dtype).removeprefix("torch."):
        return f"{other.meta}, not {list(one.shape)} {one.dtype}"
    if other.requires_grad != one.requires_grad:
        return f"requires_grad is {other.requires_grad}"
    if one.numel() and any(
        size > 1 and a != b for size, a, b in zip(one.shape, one.stride(), other.strides, strict=True)
    ):
        return f"strides {other.strides}, not {one.stride()}"
    return "" if quiet or _close(to_torch(other), one) else f"{to_torch(other)}, not {one}"


def _close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    wanted = wanted.detach().resolve_conj().resolve_neg()
    fine = PROCESSES == 1 and wanted.dtype in (torch.float64, torch.complex128)
    rtol, atol = (1e-7, 1e-9) if fine else (1e-3, 1e-4)
    return torch.allclose(found, wanted, rtol=rtol, atol=atol, equal_nan=True)


def different_gradients(
    lt: Tensors, theirs: list[Any], ours: list[Any], leaves: list[tuple[torch.Tensor, Tensor]]
) -> str:
    pairs = {
        id(one): (one, other)
        for one, other in zip(theirs, ours, strict=True)
        if isinstance(one, torch.Tensor) and one.requires_grad
    }
    if not pairs or not leaves:
        return ""
    ones, others = zip(*pairs.values(), strict=True)
    seeds = [torch.rand(one.shape, dtype=one.dtype) + 0.5 for one in ones]
    inputs, handles = zip(*leaves, strict=True)
    try:
        wanted = torch.autograd.grad(ones, inputs, seeds, allow_unused=True)
    except Exception as error:  # noqa: BLE001 - torch has no gradient
        try:
            settled(lt.grad(others, handles, [lt.tensor(each) for each in seeds], allow_unused=True))
        except Exception:  # noqa: BLE001 - whatever lazy tensors raise
            return ""
        return f"torch's gradient raises {error!r}, this one nothing"
    found = lt.grad(others, handles, [lt.tensor(each) for each in seeds], allow_unused=True)
    for one, other in zip(wanted, found, strict=True):
        if one is None or other is None:
            if (one is not None and one.any()) or (other is not None and to_torch(other).any()):
                return "a gradient is missing"
        elif not _close(to_torch(other), one):
            return f"the gradient {to_torch(other)}, not {one}"
    return ""


def _method(name: str, variant: Any, changes: bool) -> list[Kind]:
    if variant is None or not has(name):
        return []
    return [Kind(f"Tensor.{name}", variant, lambda x, *args, **more: getattr(x, name)(*args, **more), changes)]


def _function(lt: Tensors, name: str) -> Call | None:
    if name in ("H", "T", "mH", "mT", "unfold") or name.startswith(("new_", "__")):  # only of tensors
        return partial(_of_tensor, name) if has(name) else None
    try:
        found = getattr(lt, name.removeprefix("nn.functional."))
    except AttributeError:
        return None
    return None if isinstance(found, DType) else found  # `lt.float` is a dtype, and `x.float()` a method


def _of_tensor(name: str, x: Tensor, *args: Any, **more: Any) -> Any:
    found = getattr(x, name)
    return found(*args, **more) if callable(found) else found


def has(name: str) -> bool:
    """Whether lazy tensors have an attribute."""
    if hasattr(Tensor, name):
        return True
    try:
        method_named(name)
    except AttributeError:
        return False
    return True
