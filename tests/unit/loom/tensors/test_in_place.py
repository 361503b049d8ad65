"""Cumulative operations, triangles, products and scattered reductions agree with torch, in place too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loom.tensors import names
from loom.tensors.layout_rules import methods
from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import (
    PROCESSES,
    settled,
)

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
EACH = [pytest.param(name, marks=() if place % 3 == 0 else pytest.mark.slow) for place, name in enumerate(IN_PLACE)]
"""One of three with each commit: all go the same way, and each takes hundreds of arguments."""


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
@pytest.mark.parametrize("name", EACH)
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
