"""Views whose histories follow the tensor that they are views of, when that is changed in place."""

from __future__ import annotations

from typing import Any

Tensor = Any
"""A `loom.tensors.tensor.Tensor`, whose module imports this one."""

OLD_VIEW = (
    "a view of a tensor was made before that tensor was changed in place, and its gradient is not known: it was "
    "made within no_grad, by a function that returns several views, or by an index that has changed. Make the view "
    "again"
)
PART = (
    "an operation in place on this view, whose gradient is wanted, is not supported: the view was made within "
    "no_grad, by a function that returns several views, or several of its elements share memory. Compute a new "
    "tensor, such as with index_put or where"
)

Origin = tuple[Any, tuple[Tensor, ...], tuple[Any, ...], Any, tuple[int, ...]]
"""The operation that made a view, its inputs, numbers and other arguments, and the versions of further inputs."""


def current(tensor: Tensor) -> Tensor:
    """Return a tensor after giving it the history that it has now, if it is a view whose base was changed.

    Raises:
        RuntimeError: the view's history is not known.
    """
    if tensor._rebased < 0 or tensor._rebased == tensor._base.rebased:
        return tensor
    if not _is_known(tensor):
        raise RuntimeError(OLD_VIEW)
    op, inputs, numbers, static, _ = tensor._origin
    whole = current(inputs[0])
    node = op.node(inputs, numbers, static) if whole._needs else None
    tensor._rebased = tensor._base.rebased
    give_history(tensor, node)
    return tensor


def give_history(tensor: Tensor, node: Any) -> None:
    """Make a node's first result of a tensor that has changed; hooks stay with the tensor of before."""
    if tensor._retains and tensor._node is not None:
        tensor._node.retained = [each for each in tensor._node.retained if each is not tensor]
        if node is not None:
            node.retained = [*node.retained, tensor]
    tensor._node, tensor._place, tensor._needs, tensor._hooks = node, 0, node is not None, None


def origin_of(op: Any, inputs: tuple[Tensor, ...], numbers: tuple[Any, ...], static: Any) -> Origin:
    """Return what is kept of the operation that makes a view."""
    return op, inputs, numbers, static, _versions(inputs) if len(inputs) > 1 else ()


def whole_of(view: Tensor) -> tuple[Tensor, list[Origin]]:
    """Return the tensor of which a tensor is a view, itself if it is none, and how it is made of that, in order.

    Raises:
        RuntimeError: a gradient does not find the way.
    """
    if view._rebased >= 0 and any(
        stride == 0 and size > 1 for size, stride in zip(view.meta.shape, view.meta.strides, strict=True)
    ):
        raise RuntimeError(PART)
    origins = []
    while view._rebased >= 0:
        if not _is_known(view):
            raise RuntimeError(PART)
        origins.append(view._origin)
        view = view._origin[1][0]
    return view, origins[::-1]


def _is_known(view: Tensor) -> bool:
    origin = view._origin
    return origin is not None and (len(origin[1]) == 1 or origin[4] == _versions(origin[1]))


def _versions(inputs: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple([each._base.version for each in inputs[1:]])
