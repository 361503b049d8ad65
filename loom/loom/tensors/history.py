"""The history of tensors on the laptop: the operations that made them, to walk through and to draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
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
        """True if it is known that gradients pass; not before the layout of its result is known."""


class Reached(NamedTuple):
    """The end of a walk through a graph."""

    leaves: list[Tensor]
    nodes: set[int]
    """The `id` of each node that was passed."""
    sure: bool
    """True if all of it is known."""


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


# Drawn

MOST = 500
"""Nodes that are shown; of a larger graph, the newest."""
WIDTH, HEIGHT = 150, 46


class Graph:
    """The operations that made a tensor, of which each stands above its operands.

    Attributes:
        nodes: the text of each tensor, the operands after what was made of them.
        edges: pairs of places in ``nodes``, of a result and of an operand.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.nodes: list[str] = []
        self.edges: list[tuple[int, int]] = []
        self._levels: list[int] = []
        """The greatest distance of each node from the end."""
        places: dict[int, int] = {}
        kept: list[Any] = []
        """Objects that have a place, so that no other object gets their `id`."""
        waiting: list[tuple[Any, int]] = [(tensor.grad_fn or tensor, -1)]
        while waiting:
            each, above = waiting.pop(0)
            while type(each) is Node and not each.name:  # a tensor, and what was done to its memory since
                each, *more = [part for part in map(_alive, each.prev) if part is not None] or [None]
                waiting += [(one, above) for one in more]
            if each is None:
                continue
            place = places.get(id(each))
            if place is None:
                if len(self.nodes) >= MOST:
                    break
                place = places[id(each)] = len(self.nodes)
                kept.append(each)
                self.nodes.append(_text(each))
                self._levels.append(0)
                operands = each.prev if type(each) is Node else each._node[1:] if each._node is not None else ()
                waiting += [(part, place) for part in map(_alive, operands) if part is not None]
            if above >= 0 and (above, place) not in self.edges:
                self.edges.append((above, place))
        self._place_levels()

    def _place_levels(self) -> None:
        for _ in self.nodes:
            moved = False
            for above, below in self.edges:
                if self._levels[below] <= self._levels[above]:
                    self._levels[below] = self._levels[above] + 1
                    moved = True
            if not moved:
                return

    def __repr__(self) -> str:
        operands: dict[int, list[int]] = {}
        for above, below in self.edges:
            operands.setdefault(above, []).append(below)
        return "\n".join(
            f"{place}: {text}" + (f" of {', '.join(map(str, operands[place]))}" if place in operands else "")
            for place, text in enumerate(self.nodes)
        )

    def _repr_html_(self) -> str:
        """Return the graph as a drawing, the tensor at the top."""
        rows: dict[int, list[int]] = {}
        for place, level in enumerate(self._levels):
            rows.setdefault(level, []).append(place)
        at = {
            place: (number * WIDTH + WIDTH / 2, level * HEIGHT + HEIGHT / 2)
            for level, row in rows.items()
            for number, place in enumerate(row)
        }
        lines = "".join(
            f'<line x1="{at[a][0]}" y1="{at[a][1] + 11}" x2="{at[b][0]}" y2="{at[b][1] - 11}" '
            'stroke="currentColor"/>'
            for a, b in self.edges
        )
        boxes = "".join(
            f'<rect x="{x - WIDTH / 2 + 5}" y="{y - 11}" width="{WIDTH - 10}" height="22" rx="4" fill="none" '
            f'stroke="currentColor"/><text x="{x}" y="{y + 4}" text-anchor="middle" fill="currentColor" '
            f'font-size="11">{escape(self.nodes[place])}</text>'
            for place, (x, y) in at.items()
        )
        wide, high = max(map(len, rows.values())) * WIDTH, (max(rows) + 1) * HEIGHT
        return f'<svg width="{wide}" height="{high}" role="img" aria-label="graph">{lines}{boxes}</svg>'


def _alive(part: Any) -> Any:
    """Return a node, or the tensor of a weak reference; the node of that if it has one."""
    if type(part) is Node:
        return part
    tensor = part()
    return tensor if tensor is None or type(tensor._node) is not Node else tensor._node


def _text(each: Any) -> str:
    tensor = each.tensor() if type(each) is Node else each
    meta = "" if tensor is None or tensor._meta is None else repr(tensor._meta)
    name = each.name if type(each) is Node else "leaf" if each._needs else each.op or "tensor"
    return f"{name} {meta}".strip()
