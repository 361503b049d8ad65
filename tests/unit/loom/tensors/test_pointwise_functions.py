"""Functions of one tensor, and activations, agree with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import ALL, agree, given, operands, plain, settled
from tests.unit.loom.tensors.test_pointwise import close, several

ANY, ABOVE, WITHIN = (-3.0, 3.0), (0.2, 3.0), (-0.9, 0.9)

FUNCTIONS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("neg", "abs", "sign", "square", "relu", "frac", "floor", "ceil", "trunc", "round"), ANY),
    **dict.fromkeys(("exp", "exp2", "expm1", "sin", "cos", "atan", "sinh", "cosh", "tanh", "asinh"), ANY),
    **dict.fromkeys(("sigmoid", "erf", "erfc", "negative", "absolute", "logical_not", "bitwise_not"), ANY),
    **dict.fromkeys(("reciprocal", "sqrt", "rsqrt", "log", "log2", "log10", "log1p"), ABOVE),
    **dict.fromkeys(("tan", "asin", "acos", "atanh"), WITHIN),
    "acosh": (1.2, 4.0),
}
"""Functions that exist in place too, with their domains."""

ASKING = ("isnan", "isinf", "isfinite", "signbit", "positive")


@pytest.mark.parametrize("name", FUNCTIONS)
@given(data=st.data())
def test_functions(lt: Tensors, name: str, data: Any) -> None:
    (x,) = data.draw(several(1, FUNCTIONS[name]))
    agree(lt, lambda ns, x: getattr(ns, name)(x), [x], **close(x))


@pytest.mark.parametrize("name", FUNCTIONS)
@given(data=st.data())
def test_functions_in_place(lt: Tensors, name: str, data: Any) -> None:
    (x,) = data.draw(several(1, FUNCTIONS[name]))
    if x.requires_grad and name not in ("asinh", "acosh", "atanh"):  # of which torch has no gradient in place
        agree(lt, lambda ns, x: getattr(x * 1, f"{name}_")(), [x], **close(x))
    else:
        agree(lt, lambda ns, x: getattr(x.detach(), f"{name}_")(), [x])


@pytest.mark.parametrize("name", ASKING)
@given(x=operands(dtypes=ALL, grad=False))
def test_asking(lt: Tensors, name: str, x: Any) -> None:
    agree(lt, lambda ns, x: getattr(ns, name)(x), [x])


def test_asking_of_extremes(lt: Tensors) -> None:
    x = plain([float("nan"), float("inf"), -float("inf"), -0.0, 1.0])
    for name in ASKING[:4]:
        agree(lt, lambda ns, x, name=name: getattr(x, name)(), [x])


@given(x=operands(dtypes=ALL, grad=False))
def test_round_to_decimals(lt: Tensors, x: Any) -> None:
    agree(lt, lambda ns, x: x.round(decimals=1), [x])


WORDS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "float in place": (lambda ns, x: x.exp_(), [1, 2]),
    "bools": (lambda ns, x: x.relu(), [True]),
    "kernel": (lambda ns, x: x.frac(), [1]),
    "positive": (lambda ns, x: +x, [True]),
    "bits": (lambda ns, x: ~x, [1.0]),
}


@pytest.mark.parametrize("what", WORDS)
def test_errors_have_the_words_of_torch(lt: Tensors, what: str) -> None:
    work, given = WORDS[what]
    with pytest.raises((RuntimeError, TypeError)) as theirs:
        work(torch, torch.tensor(given))
    with pytest.raises(theirs.type) as ours:
        settled(work(lt, lt.tensor(given)))
    assert str(theirs.value).splitlines()[0] in str(ours.value)
