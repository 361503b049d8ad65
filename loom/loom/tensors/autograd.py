"""Gradients: a graph of what was done, which `backward` walks from its end to its beginning, queuing operations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from loom.errors import NotSupported
from loom.tensors.dtypes import Kind
from loom.tensors.grad_modes import grad_mode
from loom.tensors.metas import Meta, is_dense
from loom.tensors.tensor import Tensor, Value
from loom.tensors.views import Origin, current

Grads = Sequence[Tensor | None]
Backward = Callable[["Node", Any], Grads]
"""Gradients of the inputs, from the node and the gradient of its result; of several results, the list of theirs.

A gradient that is broadcast, or of a higher dtype, is summed and cast afterwards."""

Edge = Tensor | tuple["Node", int] | None
"""Where a gradient goes: to a leaf, to a node and one of its results, or nowhere."""

_numbers = itertools.count()


class Node:
    """An operation that was done, with what its gradients need."""

    __slots__ = (
        "_backward", "_saved", "edges", "home", "hooks", "metas", "name", "number", "numbers", "out", "retained",
        "several", "static",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        backward: Backward,
        inputs: Sequence[Tensor],
        metas: Sequence[Meta],
        saves: Sequence[int],
        numbers: tuple[Any, ...],
        static: Any,
        several: bool,
    ) -> None:
        self.name = name
        self.home = inputs[0]._home
        self.several = several
        """Whether it has several results, so that their gradients come in a dictionary by place."""
        self.number = next(_numbers)
        self._backward: Backward | None = backward
        self.edges: list[Edge] = []
        for each in inputs:
            self.edges.append(
                None if not each._needs else each if each._node is None else (each._node, each._place)
            )
        self.metas = metas
        """What is known of the inputs."""
        self.numbers = numbers
        """The operation's numbers."""
        self.static = static
        """Its other arguments."""
        self._saved: dict[int, tuple[Tensor, Value, int]] = {}
        for place in saves:
            each = inputs[place]
            if each._origin is not None:
                each = _without_origin(each)
            self._saved[place] = (each, each._base, each._base.version)
        self.out: Sequence[tuple[Value, Meta, Value, int]] = ()
        """Results that are saved, without a handle that would keep this node alive, with their base and version."""
        self.hooks: dict[int, dict[int, Callable[[Tensor], Tensor | None]]] | None = None
        """The hooks of each result, if there are any."""
        self.retained: Sequence[Tensor] = ()
        """The results that keep their gradients."""

    def __getitem__(self, place: int) -> Tensor:
        """An input that was saved.

        Raises:
            RuntimeError: it was changed in place since.
        """
        tensor, base, version = self._saved[place]
        _check(tensor.meta, base, version)
        return tensor

    def result(self, place: int = 0) -> Tensor:
        """A result that was saved.

        Raises:
            RuntimeError: it was changed in place since.
        """
        value, meta, base, version = self.out[place]
        _check(meta, base, version)
        tensor = Tensor(self.home, value, meta, base)
        tensor._needs, tensor._node, tensor._place = True, self, place
        return tensor

    def needs(self, place: int) -> bool:
        """Whether the gradient of an input is wanted."""
        return self.edges[place] is not None

    def grads(self, grad: Any) -> Grads:
        if self._backward is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved tensors after they "
                "have already been freed). Saved intermediate values of the graph are freed when you call "
                ".backward() or autograd.grad(). Specify retain_graph=True if you need to backward through the "
                "graph a second time or if you need to access saved tensors after calling backward."
            )
        return self._backward(self, grad)

    def release(self) -> None:
        """Forget what was saved."""
        self._backward = None
        self._saved = {}
        self.out = ()


def _without_origin(view: Tensor) -> Tensor:
    """Return a handle of a view with the history that it has now, which does not keep its base's handle alive.

    Otherwise a history that changes what it has saved a view of would keep itself alive.
    """
    if view._needs and view._node is None:  # a leaf, whose gradient is gathered in this handle
        return view
    saved = Tensor(view._home, view._value, view._meta, view._base)
    saved._needs, saved._node, saved._place = view._needs, view._node, view._place
    return saved


def of_part(change: Node, views: Sequence[Origin]) -> Backward:
    """Return the gradients of an operation in place on a view, as an operation on the whole tensor.

    The whole's gradient passes, with that of the part before the operation in the part's place. It is torch's
    ``CopySlices``.

    Args:
        change: the operation on the view.
        views: how the view is made of the whole.
    """
    # Without the handles of the whole, of whose history this is a part.
    steps = [(op, inputs[1:], numbers, static, versions) for op, inputs, numbers, static, versions in views]

    def backward(node: Node, grad: Any) -> Grads:
        part = whole = grad.clone() if grad.meta.contiguous else grad.contiguous()
        for op, others, numbers, static, versions in steps:
            for each, version in zip(others, versions, strict=True):
                _check(each.meta, each._base, version)
            part = op((part, *others), numbers, static)
        before, *of_others = change.grads(part.clone())
        if not node.needs(0):
            return None, *of_others
        if before is None:
            part.zero_()
        else:
            part.copy_(fitted(before, change.metas[0]))
        return whole, *of_others

    return backward


def _check(meta: Meta, base: Value, version: int) -> None:
    if base.version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{meta}] is at version {base.version}; expected version {version} instead."
        )


def backward(
    roots: Sequence[Tensor],
    grads: Sequence[Tensor],
    retain_graph: bool,
    create_graph: bool,
    wanted: Sequence[Tensor] | None = None,
) -> list[Tensor | None]:
    """Queue the operations that compute gradients.

    Args:
        roots: the tensors that are differentiated.
        grads: the gradient of each.
        retain_graph: whether it can be done again.
        create_graph: whether the gradients have a graph themselves.
        wanted: the tensors whose gradients are returned; if None, they are added to the leaves.
    """
    for each in wanted or ():
        current(each)
    with grad_mode(create_graph):
        return _Walk(create_graph, wanted).walk(roots, grads, retain_graph or create_graph)


class _Walk:
    """One walk through a graph."""

    def __init__(self, create_graph: bool, wanted: Sequence[Tensor] | None) -> None:
        self._create_graph = create_graph
        self._wanted = wanted
        self._waiting: dict[Node, dict[int, Tensor]] = {}
        """The gradients of results, as far as they are known. All that use a node have a higher number."""
        self._order: list[tuple[int, Node]] = []
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}
        self._given: dict[int, int] = {}
        """How often each tensor was given as a gradient, by its id."""
        self._found: dict[tuple[int, int], Tensor] = {}
        self._nodes_wanted: set[int] = {id(each._node) for each in wanted or () if each._node is not None}

    def walk(self, roots: Sequence[Tensor], grads: Sequence[Tensor], retain: bool) -> list[Tensor | None]:
        for root, grad in zip(roots, grads, strict=True):
            self._give((root._node, root._place) if root._node is not None else root, grad)
        while self._order:
            _, node = heappop(self._order)
            self._run(node, self._waiting.pop(node), retain)
        wanted = self._wanted
        if wanted is None:
            for leaf, grad in self._leaves.values():
                apart = self._given.get(grad._value.id, 0) < 2 and not leaf._hooks
                _accumulate(leaf, _hooked(grad, leaf._hooks), self._create_graph, apart)
                if (watch := leaf._home.watching.leaves.get(id(leaf))) is not None:
                    watch.arrived(leaf)
            return []
        return [self._gradient_of(each) for each in wanted]

    def _gradient_of(self, tensor: Tensor) -> Tensor | None:
        if tensor._node is not None:
            return self._found.get((id(tensor._node), tensor._place))
        leaf = self._leaves.get(id(tensor))
        return _hooked(leaf[1], tensor._hooks) if leaf else None

    def _run(self, node: Node, grads: dict[int, Tensor], retain: bool) -> None:
        for place, hooks in (node.hooks or {}).items():
            if place in grads:
                grads[place] = _hooked(grads[place], hooks)
        for tensor in node.retained:
            if (grad := grads.get(tensor._place)) is not None and self._wanted is None:
                _accumulate(tensor, grad, self._create_graph, False)
        if id(node) in self._nodes_wanted:
            self._found.update({(id(node), place): grad for place, grad in grads.items()})
        found = node.grads(grads if node.several else grads[0]) if _is_real(node, grads) else _complex(node, grads)
        for edge, meta, grad in zip(node.edges, node.metas, found, strict=True):
            if edge is not None and grad is not None:
                self._give(edge, fitted(grad, meta))
        if not retain:
            node.release()

    def _give(self, edge: Edge, grad: Tensor) -> None:
        value = grad._value.id
        self._given[value] = self._given.get(value, 0) + 1
        if isinstance(edge, Tensor):
            before = self._leaves.get(id(edge))
            self._leaves[id(edge)] = edge, grad if before is None else before[1].add(grad)
            return
        assert edge is not None
        node, place = edge
        there = self._waiting.get(node)
        if there is None:
            self._waiting[node] = {place: grad}
            heappush(self._order, (-node.number, node))
        else:
            there[place] = there[place].add(grad) if place in there else grad


def _is_real(node: Node, grads: dict[int, Tensor]) -> bool:
    metas = (*node.metas, *[each._meta for each in grads.values()])
    return all(meta is None or meta.dtype.kind is not Kind.COMPLEX for meta in metas)


def _complex(node: Node, grads: dict[int, Tensor]) -> Grads:
    """Return the gradients of an operation on complex numbers, by torch's convention: conjugated.

    What an operation has as its gradients are its derivatives, which is as much where it is holomorphic.

    Raises:
        NotSupported: it is not.
    """
    if node.name not in ("abs", "conj_physical") and not any(
        each.dtype.kind is Kind.COMPLEX for each in grads.values()
    ):
        raise NotSupported(
            f"the gradient of {node.name}() by complex numbers is not computed here: write it with abs() and "
            "conj(), or give it x.detach()"
        )
    turned = {place: each.conj() for place, each in grads.items()}
    found = node.grads(turned if node.several else turned[0])
    return [each if each is None else each.conj() for each in found]


def fitted(grad: Tensor, meta: Meta) -> Tensor:
    """Return a gradient with an input's shape and dtype: summed where the input was broadcast."""
    own = grad.meta
    if own.shape != meta.shape:
        grad = summed_to(grad, meta.shape)
    if own.dtype is meta.dtype:
        return grad
    if own.dtype.kind is Kind.COMPLEX and meta.dtype.kind is not Kind.COMPLEX:
        grad = grad._real_part()
    cast: Tensor = grad.to(meta.dtype)
    return cast


def summed_to(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the sum of a gradient over the dimensions that a shape was broadcast to."""
    own = grad.shape
    lead = len(own) - len(shape)
    dims = [place for place in range(len(own)) if place < lead or (shape[place - lead] == 1 and own[place] != 1)]
    if dims:
        grad = grad.sum(dims, keepdim=True)
    return grad.reshape(shape) if grad.shape != shape else grad


def _hooked(grad: Tensor, hooks: dict[int, Callable[[Tensor], Tensor | None]] | None) -> Tensor:
    for hook in list(hooks.values()) if hooks else ():
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def _accumulate(leaf: Tensor, grad: Tensor, create_graph: bool, apart: bool) -> None:
    """Add a gradient to a leaf's.

    Args:
        apart: whether no other tensor has the same memory as its gradient.
    """
    before = leaf._grad
    if before is not None:
        leaf._grad = before.add(grad)
        return
    if not apart or not is_dense(grad.shape, grad.strides):
        grad = grad.clone()
    leaf._grad = grad if create_graph else grad.detach()


def first_grad(root: Tensor, gradient: Tensor | None, ones: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient with which a walk begins.

    Raises:
        RuntimeError: the tensor has no graph, or more than one element and no gradient is given.
    """
    if not current(root)._needs:
        raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
    if gradient is not None:
        if gradient.shape != root.shape:
            raise RuntimeError(
                f"Mismatch in shape: grad_output[0] has a shape of {_size(gradient)} and output[0] has a shape of "
                f"{_size(root)}."
            )
        return gradient
    if root.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    return ones(root)


def _size(tensor: Tensor) -> str:
    return f"torch.Size({list(tensor.shape)})"
