"""Arithmetic, comparisons and Python's operators agree with torch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import (
    ALL,
    FLOATS,
    INTS,
    Operand,
    agree,
    broadcastable,
    given,
    operands,
    plain,
    settled,
    shapes,
)

TOLERANT = {"rtol": 1e-4, "atol": 1e-4}
"""Of float32: gradients are computed by other formulas than torch's, and then once more."""

NUMBERS = (True, 2, 1.5)
WHOLE = (*INTS, torch.bool)


def close(*given: Operand) -> dict[str, Any]:
    """Return how `agree` compares: within torch's own tolerances if all operands are float64.

    The CPU casts operands before it decides on strides, which then are others than on a GPU, whose these are.
    """
    kinds = {each.memory.dtype for each in given}
    return {**({} if kinds == {torch.float64} else TOLERANT), "strides": len(kinds) == 1}


@st.composite
def several(draw: Any, many: int, *domains: tuple[float, float], dtypes: Any = ALL) -> list[Operand]:
    """Draw operands that are broadcast to a shape: of floats with gradients, or of any dtype without."""
    shape = draw(shapes())
    floats = [each for each in dtypes if each in FLOATS]
    grad = bool(floats) and draw(st.booleans())
    found = []
    for place in range(many):
        low, high = domains[place] if place < len(domains) else (-3, 3)
        size = draw(broadcastable(shape))
        if grad:
            found.append(draw(operands(size, floats, low=low, high=high)))
        else:
            found.append(draw(operands(size, dtypes, grad=False, low=low, high=high)))
    return found


POSITIVE = (1.0, 4.0)
NO_BOOL = tuple(each for each in ALL if each is not torch.bool)  # a bool is 0, by which integers cannot be divided

OF_TWO: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("add", "sub", "mul", "maximum", "minimum"), (((-3, 3),) * 2, ALL)),
    "atan2": (((-3, 3), (0.5, 3)), ALL),
    **dict.fromkeys(("div", "true_divide"), (((-3, 3), POSITIVE), ALL)),
    **dict.fromkeys(("floor_divide", "remainder", "fmod"), (((-5, 5), POSITIVE), NO_BOOL)),
    "pow": (((0.5, 2.5), POSITIVE), ALL),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), (((-2, 2),) * 2, ALL)),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), (((-1, 1),) * 2, ALL)),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), (((-9, 9),) * 2, ALL)),
    **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift"), (((-9, 9), (0, 3)), ALL)),
}
"""Functions of two operands, with the domains and the dtypes of these."""

TENSORS_ONLY = ("atan2", "maximum", "minimum", "logical_and", "logical_or", "logical_xor")
WITHOUT_GRADIENT = ("floor_divide",)  # torch raises as well: test_missing_gradient


@pytest.mark.parametrize("name", OF_TWO)
@given(data=st.data())
def test_two_tensors(lt: Tensors, name: str, data: Any) -> None:
    domains, dtypes = OF_TWO[name]
    x, y = data.draw(several(2, *domains, dtypes=dtypes))
    with_grad = name not in WITHOUT_GRADIENT
    if not with_grad:
        x, y = (Operand(each.memory, each.size, each.stride, each.offset) for each in (x, y))
    agree(lt, lambda ns, x, y: getattr(ns, name)(x, y), [x, y], **close(x, y))


@pytest.mark.parametrize("name", [each for each in OF_TWO if each not in TENSORS_ONLY])
@given(data=st.data())
def test_tensor_and_number(lt: Tensors, name: str, data: Any) -> None:
    domains, _ = OF_TWO[name]
    (x,) = data.draw(several(1, *domains))
    number = data.draw(st.sampled_from(NUMBERS))
    if name in WITHOUT_GRADIENT:
        x = Operand(x.memory, x.size, x.stride, x.offset)
    agree(lt, lambda ns, x: getattr(x, name)(number), [x], **close(x))


IN_PLACE = [each for each in OF_TWO if each not in ("maximum", "minimum")]


@pytest.mark.parametrize("name", IN_PLACE)
@given(data=st.data())
def test_in_place(lt: Tensors, name: str, data: Any) -> None:
    domains, dtypes = OF_TWO[name]
    x, y = data.draw(several(2, *domains, dtypes=dtypes))
    if name in WITHOUT_GRADIENT:
        x, y = (Operand(each.memory, each.size, each.stride, each.offset) for each in (x, y))
    of_number = name not in TENSORS_ONLY and data.draw(st.booleans())
    other = data.draw(st.sampled_from(NUMBERS))
    if x.requires_grad or y.requires_grad or data.draw(st.booleans()):

        def work(ns: Any, x: Any, y: Any) -> Any:
            return getattr(x.clone(), f"{name}_")(other if of_number else y)

    else:

        def work(ns: Any, x: Any, y: Any) -> Any:
            return getattr(x, f"{name}_")(other if of_number else y)

    agree(lt, work, [x, y], **close(x, y))


Case = tuple[str, int, Callable[..., Any], tuple[tuple[float, float], ...]]

CASES: list[Case] = [
    ("add alpha", 2, lambda ns, x, y: ns.add(x, y, alpha=2), ()),
    ("add float alpha", 2, lambda ns, x, y: ns.add(x, y, alpha=0.5), ()),
    ("add bool alpha", 2, lambda ns, x, y: ns.add(x, y, alpha=True), ()),
    ("add number alpha", 1, lambda ns, x: x.add(3, alpha=2), ()),
    ("add_ alpha", 2, lambda ns, x, y: x.clone().add_(y, alpha=3), ()),
    ("sub alpha", 2, lambda ns, x, y: ns.sub(x, y, alpha=2), ()),
    ("sub_ alpha", 2, lambda ns, x, y: x.clone().sub_(y, alpha=2), ()),
    ("div floor", 1, lambda ns, x: ns.div(x, 2, rounding_mode="floor"), ()),
    ("div floor float", 1, lambda ns, x: ns.div(x, 1.5, rounding_mode="floor"), ()),
    ("div trunc", 1, lambda ns, x: x.div(2, rounding_mode="trunc"), ()),
    ("div_ trunc", 1, lambda ns, x: x.clone().div_(2, rounding_mode="trunc"), ()),
    ("pow 0", 1, lambda ns, x: x.pow(0), ()),
    ("pow 1", 1, lambda ns, x: x.pow(1), ()),
    ("pow 2", 1, lambda ns, x: x.pow(2), ()),
    ("pow 3", 1, lambda ns, x: x.pow(3), ()),
    ("pow negative", 1, lambda ns, x: x.pow(-2), ((1.0, 3.0),)),
    ("pow of number", 1, lambda ns, x: ns.pow(2.5, x), ()),
    ("pow of int", 1, lambda ns, x: ns.pow(2, x), ((1.0, 3.0),)),
    ("clamp", 1, lambda ns, x: ns.clamp(x, -1, 2), ()),
    ("clamp floats", 1, lambda ns, x: x.clip(-1.5, 0.5), ()),
    ("clamp min", 1, lambda ns, x: x.clamp(min=0), ()),
    ("clamp max", 1, lambda ns, x: x.clamp(max=0.5), ()),
    ("clamp min tensor", 2, lambda ns, x, y: x.clamp(min=y), ()),
    ("clamp_min", 2, lambda ns, x, y: ns.clamp_min(x, y), ()),
    ("clamp_max", 2, lambda ns, x, y: ns.clamp_max(x, y), ()),
    ("clamp_", 1, lambda ns, x: x.clone().clamp_(-1, 2), ()),
    ("clamp_min_", 1, lambda ns, x: x.clone().clamp_min_(0.5), ()),
    ("clamp_max_", 2, lambda ns, x, y: x.clone().clamp_max_(y), ()),
    ("lerp", 2, lambda ns, x, y: ns.lerp(x, y, 0.3), ()),
    ("lerp tensor", 3, lambda ns, x, y, z: x.lerp(y, z), ()),
    ("lerp_", 3, lambda ns, x, y, z: x.clone().lerp_(y, z), ()),
    ("addcmul", 3, lambda ns, x, y, z: ns.addcmul(x, y, z), ()),
    ("addcmul value", 3, lambda ns, x, y, z: ns.addcmul(x, y, z, value=2), ()),
    ("addcmul_", 3, lambda ns, x, y, z: x.clone().addcmul_(y, z, value=-1), ()),
    ("addcdiv", 3, lambda ns, x, y, z: ns.addcdiv(x, y, z), ((-2.0, 2.0), (-2.0, 2.0), (1.0, 3.0))),
    ("addcdiv_", 3, lambda ns, x, y, z: x.clone().addcdiv_(y, z, value=2), ((-2.0, 2.0), (-2.0, 2.0), (1.0, 3.0))),
    ("where numbers", 1, lambda ns, x: ns.where(x > 0, 1, 2.5), ()),
    ("where ints", 1, lambda ns, x: ns.where(x > 0, True, 3), ()),
    ("where of no bool", 2, lambda ns, x, y: ns.where(x.float(), x, y), ()),
    ("isclose", 2, lambda ns, x, y: ns.isclose(x, y, rtol=0.5, atol=0.1), ()),
    ("isclose nan", 1, lambda ns, x: ns.isclose(x.float() / 0, x.float() / 0, equal_nan=True), ()),
    ("x / y", 2, lambda ns, x, y: x / y, ((-3.0, 3.0), POSITIVE)),
    ("x - y", 2, lambda ns, x, y: x - y, ()),
    ("1 - x", 1, lambda ns, x: 1 - x, ()),
    ("True - x", 1, lambda ns, x: True - x, ()),
    ("1.5 - x", 1, lambda ns, x: 1.5 - x, ()),
    ("2 + x * 3", 1, lambda ns, x: 2 + 3 * x, ()),
    ("2 / x", 1, lambda ns, x: 2 / x, (POSITIVE,)),
    ("2.5 ** x", 1, lambda ns, x: 2.5**x, ()),
    ("x ** y", 2, lambda ns, x, y: x**y, ((0.5, 2.0), POSITIVE)),
    ("x % 2", 1, lambda ns, x: x % 2, ()),
    ("-x", 1, lambda ns, x: -x, ()),
    ("+x", 1, lambda ns, x: +x, ()),
    ("abs(x)", 1, lambda ns, x: abs(x), ()),
    ("~x", 1, lambda ns, x: ~x, ()),
    ("x & y", 2, lambda ns, x, y: x & y, ()),
    ("3 & x", 1, lambda ns, x: 3 & x, ()),
    ("3 | x", 1, lambda ns, x: 3 | x, ()),
    ("3 ^ x", 1, lambda ns, x: 3 ^ x, ()),
    ("x << 2", 1, lambda ns, x: x << 2, ()),
    ("x == y", 2, lambda ns, x, y: x == y, ()),
    ("1 < x", 1, lambda ns, x: x > 1, ()),
    ("x != 0", 1, lambda ns, x: x != 0, ()),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[each[0] for each in CASES])
@given(data=st.data())
def test_cases(lt: Tensors, case: Case, data: Any) -> None:
    _, many, work, domains = case
    given = data.draw(several(many, *domains))
    agree(lt, work, given, **close(*given))


@given(data=st.data())
def test_where(lt: Tensors, data: Any) -> None:
    x, y = data.draw(several(2))
    fits = close(x, y)
    condition = data.draw(operands(data.draw(st.sampled_from([x.size, y.size])), (torch.bool,)))
    agree(lt, lambda ns, c, x, y: ns.where(c, x, y), [condition, x, y], **fits)
    agree(lt, lambda ns, c, x: ns.where(c, x, 2), [condition, x], **fits)
    agree(lt, lambda ns, c, y: ns.where(c, 2.5, y), [condition, y], **fits)
    agree(lt, lambda ns, c, x: x.where(c, 0), [condition, x], **fits)


@given(data=st.data())
def test_power_of_zero(lt: Tensors, data: Any) -> None:
    (x,) = data.draw(several(1, POSITIVE))
    agree(lt, lambda ns, x: ns.pow(0.0, x), [x], second=False)  # torch's second gradient is no number


@given(data=st.data())
def test_clamp_between_tensors(lt: Tensors, data: Any) -> None:
    shape = data.draw(shapes())
    dtypes = FLOATS if data.draw(st.booleans()) else ALL
    x, y = (data.draw(operands(shape, dtypes, grad=False if dtypes is ALL else None)) for _ in range(2))
    z = data.draw(operands(shape, dtypes, grad=False if dtypes is ALL else None))
    agree(lt, lambda ns, x, y, z: ns.clamp(x, y, z), [x, y, z], **close(x, y, z))
    agree(lt, lambda ns, x, y, z: x.clone().clamp_(y, z), [x, y, z], **close(x, y, z))


@pytest.mark.parametrize("work", [operator.floordiv, operator.mod])
@pytest.mark.parametrize("reflected", [False, True])
@given(data=st.data())
def test_whole_quotients(lt: Tensors, work: Any, reflected: bool, data: Any) -> None:
    x = data.draw(operands(dtypes=NO_BOOL, grad=False, low=1, high=4))
    number = data.draw(st.sampled_from((2, 2.5)))
    agree(lt, lambda ns, x: work(number, x) if reflected else work(x, number), [x])


@pytest.mark.parametrize(
    "name", ["iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"]
)
@given(data=st.data())
def test_operators_in_place(lt: Tensors, name: str, data: Any) -> None:
    x = data.draw(operands(dtypes=ALL, grad=False, low=1, high=4))
    number = data.draw(st.sampled_from((2, 1.5)))
    if name in ("ifloordiv", "imod"):
        x = data.draw(operands(dtypes=NO_BOOL, grad=False, low=1, high=4))
    agree(lt, lambda ns, x: getattr(operator, name)(x, number), [x])


@given(data=st.data())
def test_zero_dimensions_count_less(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(dtypes=ALL, grad=False))
    y = data.draw(operands((), dtypes=ALL, grad=False, low=1))
    agree(lt, lambda ns, x, y: x + y, [x, y])
    agree(lt, lambda ns, x, y: x / y, [x, y])
    agree(lt, lambda ns, x, y: ns.where(x > 0, x, y), [x, y])
    agree(lt, lambda ns, x, y: x.clone().mul_(y), [x, y])


@given(data=st.data())
def test_waiting_for_equality(lt: Tensors, data: Any) -> None:
    shape = data.draw(shapes())
    x, y = (data.draw(operands(shape, (torch.float32, torch.int64), grad=False, low=0, high=1)) for _ in range(2))
    agree(lt, lambda ns, x, y: ns.equal(x, y), [x, y])
    agree(lt, lambda ns, x, y: ns.equal(x, x), [x, y])
    agree(lt, lambda ns, x, y: x.allclose(y, atol=0.5), [x, y])
    agree(lt, lambda ns, x, y: ns.equal(x, ns.tensor([1.0, 2.0])), [x, y])


WORDS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "shapes": (lambda ns, x, y: x + y, [[1.0, 2.0], [1.0, 2.0, 3.0]]),
    "bools": (lambda ns, x, y: x - y, [[True], [False]]),
    "a bool": (lambda ns, x, y: x - y, [[1.0], [False]]),
    "alpha": (lambda ns, x, y: x.add(y, alpha=0.5), [[1], [2]]),
    "bool alpha": (lambda ns, x, y: x.add(y, alpha=True), [[1], [2]]),
    "negative power": (lambda ns, x: x**-1, [[1, 2]]),
    "bounds": (lambda ns, x: x.clamp(), [[1.0]]),
    "rounding": (lambda ns, x: x.div(2, rounding_mode="up"), [[1.0]]),
    "condition": (lambda ns, x: ns.where(x, x, x), [[1.0]]),
    "integers in place": (lambda ns, x: x.add_(0.5), [[1, 2]]),
    "bools in place": (lambda ns, x: x.add_(1), [[True]]),
    "shape in place": (lambda ns, x, y: x.mul_(y), [[1.0], [1.0, 2.0]]),
    "shared memory": (lambda ns, x: x.expand(3).add_(1), [[1.0]]),
    "nearness": (lambda ns, x, y: ns.isclose(x, y), [[1.0], [1]]),
    "negation": (lambda ns, x: -x, [[True]]),
    "bits": (lambda ns, x: x & 1, [[1.0]]),
    "operators": (lambda ns, x: x + "a", [[1.0]]),
    "order": (lambda ns, x: x < None, [[1.0]]),
}  # fmt: skip


@pytest.mark.parametrize("what", WORDS)
def test_errors_have_the_words_of_torch(lt: Tensors, what: str) -> None:
    work, given = WORDS[what]
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever torch raises
        work(torch, *map(torch.tensor, given))
    with pytest.raises(theirs.type) as ours:
        settled(work(lt, *map(lt.tensor, given)))
    assert str(theirs.value).splitlines()[0] in str(ours.value)


@pytest.mark.parametrize(
    "work",
    [
        lambda ns, x: x.add("a"),
        lambda ns, x: x.mul(None),
        lambda ns, x: ns.maximum(x, 2),
        lambda ns, x: ns.lerp(x, 2.0, 0.5),
        lambda ns, x: x.clamp(x, 2),
        lambda ns, x: x.logical_and(True),
    ],
)
def test_wrong_operands_raise(lt: Tensors, work: Any) -> None:
    agree(lt, work, [plain([1.0, 2.0])])


def test_missing_gradient(lt: Tensors) -> None:
    x = lt.tensor([1.0], requires_grad=True)
    with pytest.raises(RuntimeError, match="derivative for aten::floor_divide is not implemented"):
        settled(lt.grad(x // 2, x))


def test_leaf_in_place(lt: Tensors) -> None:
    agree(lt, lambda ns, x: x.add_(1), [plain([1.0], requires_grad=True)])


def test_what_is_no_operand_is_not_equal(lt: Tensors) -> None:
    x = lt.tensor([1.0])
    assert (x == None) is False  # noqa: E711
    assert x != "a"
    assert {x: 1}[x] == 1
    assert x in [lt.tensor([2.0]).sum(), x]


def test_extremes_of_equal_elements_share_the_gradient(lt: Tensors) -> None:
    pair = [plain([1.0, 2.0, 3.0], requires_grad=True), plain([1.0, 3.0, 2.0], requires_grad=True)]
    agree(lt, lambda ns, x, y: ns.maximum(x, y), pair)
    agree(lt, lambda ns, x, y: ns.minimum(x, y), pair)


@pytest.mark.parametrize("work", [lambda ns, x, y: (x * 2).mul_(y), lambda ns, x, y: (x * 2).sin_().div_(y)])
def test_what_changes_in_place_is_copied_for_gradients(lt: Tensors, work: Any) -> None:
    agree(lt, work, [plain([1.0, 2.0], requires_grad=True), plain([2.0, 4.0], requires_grad=True)])


def test_a_saved_tensor_that_changes_raises(lt: Tensors) -> None:
    x = lt.tensor([1.0], requires_grad=True)
    y = x * 2
    z = y * y
    y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        settled(lt.grad(z, x))


NUMBER_FIRST = (
    "add", "sub", "mul", "div", "pow", "floor_divide", "remainder", "bitwise_and", "bitwise_or", "bitwise_xor",
    "bitwise_left_shift", "bitwise_right_shift", "eq", "atan2", "maximum", "fmod", "logical_and", "dot", "outer",
    "matmul", "sin", "sum", "clamp_min",
)  # fmt: skip


@given(st.data())
def test_a_number_before_a_tensor(lt: Tensors, data: Any) -> None:
    number = data.draw(st.sampled_from([2, 1, 2.5]))
    x = data.draw(operands(dtypes=(torch.float64, torch.float32, torch.int64, torch.bool), low=1))
    for name in data.draw(st.lists(st.sampled_from(NUMBER_FIRST), min_size=8, max_size=8, unique=True)):
        if name in ("floor_divide", "remainder") and (x.requires_grad or x.memory.dtype is torch.bool):
            continue
        agree(lt, lambda ns, x, name=name: getattr(ns, name)(number, x), [x])
    agree(lt, lambda ns, x: ns.add(number, x, alpha=2), [x])
    agree(lt, lambda ns, x: ns.sub(number, x, alpha=2), [x])
    agree(lt, lambda ns, x: ns.rsub(x, number), [x])


def test_what_is_no_tensor_is_refused(lt: Tensors) -> None:
    with pytest.raises(TypeError, match="must be Tensor, not int"):
        lt.ones(2).matmul(2)
    with pytest.raises(TypeError, match="must be Tensor"):
        lt.sum(2)
