"""The history of tensors on the laptop: the operations that made them, to walk through and to draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import ref

Tensor = Any
"""A `loom.tensors.tensor.Tensor`, whose module imports this one."""


class Node:
    """An operation that made a tensor. It keeps no tensor alive, and so no values in the workers.

    The graph behind a tensor that requires a gradient is kept, as torch keeps it; that behind others is weak.
    """

    __slots__ = ("name", "prev", "sure", "tensor")

    def __init__(self, name: str, prev: Sequence[Node | ref[Tensor]], tensor: ref[Tensor], sure: bool) -> None:
        self.name = name
        self.prev = prev
        """The nodes of operands through which gradients pass; weak references to the others, and to leaves."""
        self.tensor = tensor
        self.sure = sure
        """Whether it is known that gradients pass; not before the layout of its result is known."""


class Reached(NamedTuple):
    """The end of a walk through a graph."""

    leaves: list[Tensor]
    nodes: set[int]
    """The `id` of each node that was passed."""
    sure: bool
    """Whether all of it is known."""


def needs_grad(tensor: Tensor) -> bool:
    """Whether a tensor's gradient may be wanted, as far as is known without asking."""
    return bool(tensor._needs or tensor._root.needs)


def link(result: Tensor, name: str, inputs: Sequence[Tensor]) -> None:
    """Note the operation that made a tensor of others, within a grad mode that builds a graph."""
    for each in inputs:
        if each._needs or each._root.needs:
            meta = result._meta
            if meta is None or meta.dtype.kind >= 2:
                result._needs = True
                result._node = Node(name, [_history(each) for each in inputs], ref(result), meta is not None)
                return
            break
    result._node = (name, *map(ref, inputs))


def relink(target: Tensor, name: str, inputs: Sequence[Tensor]) -> None:
    """Note an operation in place, through which gradients pass: of a view, also for all of its memory."""
    root = target._root
    node = Node(name, [_history(each) for each in (target, *inputs)], ref(target), True)
    target._node, target._needs = node, True
    root.node = node if root.node is None else Node(name, (root.node, node), ref(target), True)
    root.needs = True


def walk(roots: Sequence[Tensor]) -> Reached:
    """Return the leaves and the nodes that gradients of tensors reach."""
    waiting: list[Any] = [_history(each) for each in roots]
    nodes: set[int] = set()
    leaves: dict[int, Tensor] = {}
    sure = True
    while waiting:
        each = waiting.pop()
        if type(each) is Node:
            if id(each) not in nodes:
                nodes.add(id(each))
                sure = sure and each.sure
                waiting += each.prev
        elif (leaf := each()) is not None and leaf._needs and leaf._node is None:
            leaves[id(leaf)] = leaf
    return Reached(list(leaves.values()), nodes, sure)


def operands(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors of which a tensor was made, and whose handles live."""
    node = tensor._node
    for each in () if node is None else node[1:] if type(node) is tuple else node.prev:
        if (found := (each.tensor if type(each) is Node else each)()) is not None:
            yield found


def _history(tensor: Tensor) -> Node | ref[Tensor]:
    own = tensor._node if tensor._needs and tensor._node is not None else ref(tensor)
    late = tensor._root.node
    if late is None or late is own:
        return own
    return Node("", (own, late), ref(tensor), True)
