"""Losses agree with torch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import (
    FLOATS,
    Operand,
    agree,
    agree_with_either_backward,
    broadcastable,
    given,
    operands,
    plain,
    settled,
    shapes,
)  # fmt: skip

REDUCTIONS = st.sampled_from(["mean", "sum", "none"])


def functional(ns: Any) -> Any:
    return torch.nn.functional if ns is torch else ns


@pytest.fixture(autouse=True)
def _no_advice() -> Iterator[None]:
    """Torch warns of shapes that differ, and of the mean of a divergence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@given(st.data())
def test_binary_cross_entropy_with_logits(lt: Tensors, data: Any) -> None:
    shape, reduction = data.draw(shapes(smallest=1)), data.draw(REDUCTIONS)
    dtype = data.draw(st.sampled_from(FLOATS))
    given = [data.draw(operands(shape, (dtype,), low=low)) for low in (-3, 0)]
    has_weight, has_positive = data.draw(st.booleans()), data.draw(st.booleans())
    given += [
        data.draw(operands(data.draw(broadcastable(shape)), (dtype,), low=0.5, grad=False))
        for _ in range(has_weight + has_positive)
    ]

    def work(ns: Any, x: Any, target: Any, *rest: Any) -> Any:
        weight = rest[0] if has_weight else None
        positive = rest[-1] if has_positive else None
        return functional(ns).binary_cross_entropy_with_logits(
            x, target, weight, reduction=reduction, pos_weight=positive
        )

    # Of weighted losses, torch's strides are those of the operations of which this one is made.
    agree(lt, work, given, strides=len(given) == 2)


def test_the_gradient_of_logits_of_0(lt: Tensors) -> None:
    def work(ns: Any, x: Any, target: Any, weight: Any) -> Any:
        return functional(ns).binary_cross_entropy_with_logits(x, target, pos_weight=weight)

    agree(lt, work, [plain([0.0, 1.0, -60.0, 60.0], True), plain([0.5, 0.0, 1.0, 1.0]), plain([3.0])])


def _classes(data: Any, shape: tuple[int, ...], classes: int, ignored: int | None = None) -> Operand:
    target = torch.randint(
        0, classes, shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    )
    if ignored is not None and target.dim() and target.numel():
        target.view(-1)[0] = ignored
    return plain(target)


@st.composite
def logits(draw: Any, dtype: torch.dtype) -> Operand:
    """Draw logits: of one row, of rows, or of images."""
    classes = draw(st.integers(1, 4))
    lead = draw(st.lists(st.integers(1, 3), max_size=1))
    shape = (*lead, classes, *(draw(st.lists(st.integers(1, 3), max_size=2)) if lead else ()))
    made: Operand = draw(operands(shape, (dtype,), views=len(shape) < 3))  # torch refuses transposed images
    return made


@pytest.mark.parametrize("name", ["nll_loss", "cross_entropy"])
@given(st.data())
def test_of_classes(lt: Tensors, name: str, data: Any) -> None:
    dtype = data.draw(st.sampled_from(FLOATS))
    x, reduction = data.draw(logits(dtype)), data.draw(REDUCTIONS)
    place = 0 if len(x.size) == 1 else 1
    classes = x.size[place]
    ignored = data.draw(st.sampled_from([None, -100, 0]))
    options: dict[str, Any] = {"reduction": reduction, "ignore_index": -100 if ignored is None else ignored}
    if name == "cross_entropy":
        options["label_smoothing"] = data.draw(st.sampled_from([0.0, 0.1]))
    given = [x, _classes(data, x.size[:place] + x.size[place + 1 :], classes, ignored)]
    if data.draw(st.booleans()):
        given.append(data.draw(operands((classes,), (dtype,), low=0.5, high=2, grad=False)))
    agree_with_either_backward(lt, lambda ns, *each: getattr(functional(ns), name)(*each, **options), given)


@given(st.data())
def test_cross_entropy_of_probabilities(lt: Tensors, data: Any) -> None:
    dtype = data.draw(st.sampled_from(FLOATS))
    x = data.draw(logits(dtype))
    options = {"reduction": data.draw(REDUCTIONS), "label_smoothing": data.draw(st.sampled_from([0.0, 0.2]))}
    given = [x, data.draw(operands(x.size, (dtype,), low=0, high=1))]
    if data.draw(st.booleans()):
        given.append(data.draw(operands((x.size[0 if len(x.size) == 1 else 1],), (dtype,), low=0.5, grad=False)))
    agree_with_either_backward(lt, lambda ns, *each: functional(ns).cross_entropy(*each, **options), given)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("nll_loss", [torch.zeros(4, 5), torch.zeros(3, dtype=torch.int64)]),
        ("nll_loss", [torch.zeros(4, 5), torch.zeros(4)]),
        ("nll_loss", [torch.zeros(4, 5), torch.zeros(4, 2, dtype=torch.int64)]),
        ("nll_loss", [torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64), torch.zeros(4)]),
        ("nll_loss", [torch.zeros(4, 5, 2), torch.zeros(4, 3, dtype=torch.int64)]),
        ("nll_loss", [torch.zeros(4, 5).double(), torch.zeros(4, dtype=torch.int64), torch.zeros(5)]),
        ("cross_entropy", [torch.zeros(4, 5), torch.zeros(4, 4)]),
        ("cross_entropy", [torch.zeros(4, 5), torch.zeros(4)]),
        ("binary_cross_entropy_with_logits", [torch.zeros(4, 5), torch.zeros(2, 5)]),
        ("mse_loss", [torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)]),
        ("mse_loss", [torch.zeros(4), torch.zeros(3)]),
    ],
)
def test_what_torch_would_raise(lt: Tensors, name: str, given: list[torch.Tensor]) -> None:
    inputs = [plain(each) for each in given]
    agree(lt, lambda ns, *each: getattr(functional(ns), name)(*each), inputs)
    with pytest.raises((RuntimeError, ValueError)):
        settled(getattr(lt, name)(*[each.of_loom(lt) for each in inputs]))


@pytest.mark.parametrize("name", ["mse_loss", "cross_entropy", "nll_loss"])
def test_an_unknown_reduction_is_refused(lt: Tensors, name: str) -> None:
    with pytest.raises(ValueError, match="no is not a valid value for reduction"):
        settled(getattr(lt, name)(lt.zeros(2, 2), lt.ones(2, 2), reduction="no"))


PAIRS = "binary_cross_entropy_with_logits cross_entropy mse_loss"
DTYPES = ("float16", "float32", "float64", "int64", "uint8", "bool", "complex64")


@pytest.mark.parametrize("name", PAIRS.split())
def test_each_pair_of_dtypes_has_torchs_dtype_or_its_error(lt: Tensors, name: str) -> None:
    def found(ns: Any, kinds: tuple[str, str]) -> Any:
        one, other = (ns.tensor([[0.25, 1], [0.5, 0]]).to(getattr(ns, kind)) for kind in kinds)
        try:
            made = settled(getattr(functional(ns), name)(one, other, reduction="none"))
            return str(made.dtype).rpartition(".")[2]
        except (RuntimeError, TypeError) as error:
            return error

    for kinds in itertools.product(DTYPES, repeat=2):
        wanted, ours = found(torch, kinds), found(lt, kinds)
        same = isinstance(ours, type(wanted)) if isinstance(wanted, Exception) else ours == wanted
        assert same, f"{kinds}: {ours!r}, not {wanted!r}"
