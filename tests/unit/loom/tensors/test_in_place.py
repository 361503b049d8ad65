"""Cumulative operations, triangles, products and scattered reductions agree with torch, in place too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from loom.tensors import names
from loom.tensors.layout_rules import methods
from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import (
    FLOATS,
    PROCESSES,
    Operand,
    agree,
    agree_with_either_backward,
    given,
    operands,
    plain,
    settled,
)

DTYPES = (*FLOATS, torch.int64, torch.int8)


def changed(work: Any) -> Any:
    """Return an operation in place as one on a tensor that is no leaf."""
    return lambda ns, x, *others: work(x.clone() if x.requires_grad else x, *others)


ALONG: dict[str, Any] = {
    "cumsum_": lambda x: x.cumsum_(-1),
    "cumsum_ of a dtype": lambda x: x.cumsum_(0, dtype=x.dtype),
    "cumprod_": lambda x: x.cumprod_(-1),
    "tril_": lambda x: x.tril_(),
    "tril_ below": lambda x: x.tril_(-1),
    "triu_": lambda x: x.triu_(1),
}


@pytest.mark.parametrize("name", ALONG)
@given(st.data())
def test_in_place(lt: Tensors, name: str, data: Any) -> None:
    x = data.draw(operands(dtypes=DTYPES))
    if name.startswith("tri") and 0 in x.stride:
        return  # which of the elements that share memory is written last, nothing says
    agree_with_either_backward(lt, changed(ALONG[name]), [x])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_no_other_dtype_in_place(lt: Tensors, dtype: torch.dtype) -> None:
    agree(lt, lambda ns, x: x.cumsum_(0, dtype=dtype), [plain(torch.ones(3))])
    agree(lt, lambda ns, x: x.cumsum_(0), [plain(torch.ones(3, dtype=dtype))])


@pytest.mark.parametrize("many", [2, 3])
@given(st.data())
def test_products_added_in_place(lt: Tensors, many: int, data: Any) -> None:
    batch = (2,) if many == 3 else ()
    rows, inner, columns = (data.draw(st.integers(1, 3)) for _ in range(3))
    shape = data.draw(st.sampled_from([(*batch, rows, columns), (*batch, rows, columns), (columns + 1,)]))
    given_ = [
        data.draw(operands(shape, FLOATS[1:])),
        data.draw(operands((*batch, rows, inner), FLOATS[1:])),
        data.draw(operands((*batch, inner, columns), FLOATS[1:])),
    ]
    name = "baddbmm_" if many == 3 else "addmm_"
    agree_with_either_backward(lt, changed(lambda x, y, z: getattr(x, name)(y, z, beta=2, alpha=0.5)), given_)


@st.composite
def scattered(draw: Any, dtype: torch.dtype) -> list[Operand]:
    """Draw a tensor, an index along its first dimension and what that sends."""
    rows, columns, many = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    index = plain(torch.randint(0, rows, (many, columns), generator=generator))
    own = draw(operands((rows, columns), (dtype,)))
    return [own, index, draw(operands((many, columns), (dtype,)))]


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin", "other"])
@given(st.data())
def test_scatter_reduce(lt: Tensors, reduce: str, include_self: bool, data: Any) -> None:
    given_ = data.draw(scattered(data.draw(st.sampled_from([torch.float64, torch.float32, torch.int64]))))

    def work(ns: Any, x: Any, index: Any, source: Any) -> Any:
        return ns.scatter_reduce(x, 0, index, source, reduce, include_self=include_self)

    agree_with_either_backward(lt, work, given_)
    agree(lt, changed(lambda x, i, s: x.scatter_reduce_(0, i, s, reduce, include_self=include_self)), given_)


@pytest.mark.parametrize("zeros", [1, 2])
def test_products_of_what_is_scattered_with_zeros(lt: Tensors, zeros: int) -> None:
    source = torch.tensor([[2.0], [3.0], [4.0], [5.0]], dtype=torch.float64)
    source[:zeros] = 0
    given_ = [
        plain(torch.tensor([[0.0], [2.0]], dtype=torch.float64), requires_grad=True),
        plain(torch.tensor([[1], [1], [1], [0]])),
        plain(source, requires_grad=True),
    ]
    agree(lt, lambda ns, x, i, s: x.scatter_reduce(0, i, s, "prod"), given_, second=False)


ARGUMENTS: list[Any] = [
    lambda ns, x: (),
    lambda ns, x: (x,),
    lambda ns, x: (x, x),
    lambda ns, x: (x[None], x[None]),
    lambda ns, x: (x, x[0]),
    lambda ns, x: (x[0], x[1]),
    lambda ns, x: (x.outer(x), x),
    lambda ns, x: (2,),
    lambda ns, x: (0.5,),
    lambda ns, x: (0, 1),
    lambda ns, x: (2, 0, 1.0),
    lambda ns, x: ((2, 2), (2, 1)),
    lambda ns, x: (0, ns.tensor([0, 1]), x),
    lambda ns, x: (0, ns.tensor([0, 1]), x, "amax"),
    lambda ns, x: (0, ns.tensor([0, 1]), 1.0),
    lambda ns, x: (0, ns.tensor([[0, 1], [1, 0]]), x),
    lambda ns, x: (0, ns.tensor([[0, 1], [1, 0]]), x, "sum"),
    lambda ns, x: ((ns.tensor([0, 1]), ns.tensor([1, 0])), x[0]),
    lambda ns, x: (ns.tensor([0, 3]), x[0]),
    lambda ns, x: (x.detach() > 1, x),
    lambda ns, x: (x.detach() > 1, 0.5),
]
"""Arguments of changes in place of a square matrix, or of a stack of them, or of a vector."""
TARGETS: list[Any] = [lambda x: x, lambda x: x[None], lambda x: x[0]]

NOT_OF_FLOATS = {
    "bitwise_and_", "bitwise_left_shift_", "bitwise_not_", "bitwise_or_", "bitwise_right_shift_", "bitwise_xor_",
    "gcd_", "lcm_", "resize_", "resize_as_", "resize_as_sparse_",
}  # fmt: skip
"""Changes in place of ints, and those that torch refuses if a gradient is wanted."""

IN_PLACE = sorted(name for name in {*names.METHODS, *methods} if name.endswith("_") and not name.endswith("__"))


def graphs(ns: Any, name: str, target: Any, arguments: Any, wanted: str) -> Any:
    """Return how a change in place becomes part of the graph; None if it is refused."""
    own, other = (ns.tensor([[1.5, 0.5], [0.25, 2.0]], dtype=ns.float64) for _ in range(2))
    try:
        leaf = target(own.requires_grad_(wanted != "the others"))
        x = leaf * 1 if wanted != "a leaf" else leaf
        given = arguments(ns, target(other).detach().requires_grad_(wanted == "the others"))
        getattr(x, name)(*given)
        settled(x.detach())
        return x.requires_grad, x.is_leaf
    except Exception:  # noqa: BLE001 - whatever is raised
        return None


@pytest.mark.skipif(PROCESSES > 1, reason="it compares what the laptop knows")
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_change_in_place_is_part_of_the_graph_as_in_torch(lt: Tensors, name: str) -> None:
    done = 0
    for target in TARGETS:
        for arguments in ARGUMENTS:
            for wanted in ("the target", "the others", "a leaf"):
                theirs = graphs(torch, name, target, arguments, wanted)
                if theirs is not None or wanted == "a leaf":
                    ours = graphs(lt, name, target, arguments, wanted)
                    assert ours in (theirs, None), (name, wanted)  # torch has calls that are deprecated, too
                    done += ours is not None
    assert done or name in NOT_OF_FLOATS
