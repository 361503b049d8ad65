"""`Tensor`, a handle of a tensor in the cluster."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from loom.errors import NotSupported
from loom.tensors.dtypes import DType, Kind
from loom.tensors.metas import Meta, Shape
from loom.tensors.views import current


class Home(Protocol):
    """What the tensors of one mesh share: see `loom.tensors.tensors.Tensors`."""

    queue: deque[Any]
    device: str

    def meta_of(self, tensor: Tensor) -> Meta: ...
    def values_of(self, tensors: tuple[Tensor, ...]) -> list[Any]: ...


class Value:
    """A tensor in the cluster by its id. When the last handle of it dies, it is freed there."""

    __slots__ = ("_queue", "id", "known", "rebased", "version")

    def __init__(self, queue: deque[Any], ident: int) -> None:
        self._queue = queue
        self.id = ident
        self.version = 0
        """How often the memory of this tensor was changed in place; of a view, see its base."""
        self.rebased = 0
        """How often it was changed in place by an operation that is part of a graph."""
        self.known: Any = None
        """Its elements and the version at which they were read, if they are few."""

    def __del__(self) -> None:
        self._queue.append(self.id)


class Tensor:
    """A handle of a tensor in the cluster, with torch's methods. Each returns at once.

    Only what gives values waits: `item`, `tolist`, `numpy`, ``bool()``, ``float()`` and ``int()``.
    """

    __slots__ = (
        "__weakref__", "_base", "_grad", "_home", "_hooks", "_meta", "_needs", "_node", "_origin", "_place",
        "_rebased", "_retains", "_value",
    )  # fmt: skip

    __array_priority__ = 1000
    """Numpy leaves operators to tensors, as to those of torch."""

    def __init__(self, home: Any, value: Value, meta: Meta | None, base: Value | None = None) -> None:
        self._home = home
        self._value = value
        self._meta = meta
        self._base = value if base is None else base
        """The value whose memory it is, and which counts changes in place."""
        self._needs = False
        self._node: Any = None
        """The `loom.tensors.autograd.Node` that made it, if that is differentiable; None for a leaf."""
        self._place = 0
        """Which of its node's results it is."""
        self._rebased = -1
        """If it is a view: how often its base had been changed within a graph when its history was made."""
        self._origin: Any = None
        """How it was made, if it is a view whose history can follow that of its base: see `loom.tensors.views`."""
        self._grad: Tensor | None = None
        self._hooks: dict[int, Callable[[Tensor], Tensor | None]] | None = None
        self._retains = False

    if TYPE_CHECKING:
        # The operations: see `loom.tensors.methods`.
        def __getattr__(self, name: str) -> Any: ...
        def __getitem__(self, index: Any) -> Tensor: ...
        def __setitem__(self, index: Any, value: Any) -> None: ...
        def __iter__(self) -> Iterator[Tensor]: ...
        def __neg__(self) -> Tensor: ...
        def __abs__(self) -> Tensor: ...
        def __invert__(self) -> Tensor: ...
        def __add__(self, other: Any) -> Tensor: ...
        def __radd__(self, other: Any) -> Tensor: ...
        def __sub__(self, other: Any) -> Tensor: ...
        def __rsub__(self, other: Any) -> Tensor: ...
        def __mul__(self, other: Any) -> Tensor: ...
        def __rmul__(self, other: Any) -> Tensor: ...
        def __truediv__(self, other: Any) -> Tensor: ...
        def __rtruediv__(self, other: Any) -> Tensor: ...
        def __floordiv__(self, other: Any) -> Tensor: ...
        def __rfloordiv__(self, other: Any) -> Tensor: ...
        def __mod__(self, other: Any) -> Tensor: ...
        def __rmod__(self, other: Any) -> Tensor: ...
        def __pow__(self, other: Any) -> Tensor: ...
        def __rpow__(self, other: Any) -> Tensor: ...
        def __matmul__(self, other: Any) -> Tensor: ...
        def __rmatmul__(self, other: Any) -> Tensor: ...
        def __iadd__(self, other: Any) -> Tensor: ...
        def __isub__(self, other: Any) -> Tensor: ...
        def __imul__(self, other: Any) -> Tensor: ...
        def __itruediv__(self, other: Any) -> Tensor: ...
        def __lt__(self, other: Any) -> Tensor: ...
        def __le__(self, other: Any) -> Tensor: ...
        def __gt__(self, other: Any) -> Tensor: ...
        def __ge__(self, other: Any) -> Tensor: ...
        def __and__(self, other: Any) -> Tensor: ...
        def __or__(self, other: Any) -> Tensor: ...
        def __xor__(self, other: Any) -> Tensor: ...

    @property
    def meta(self) -> Meta:
        """Shape, strides and dtype. Only after `Tensors.call` this asks the cluster."""
        return self._meta or self._home.meta_of(self)

    @property
    def shape(self) -> Shape:
        return self.meta.shape

    @property
    def dtype(self) -> DType:
        return self.meta.dtype

    @property
    def strides(self) -> Shape:
        return self.meta.strides

    def stride(self, dim: int | None = None) -> Shape | int:
        return self.meta.strides if dim is None else self.meta.strides[dim]

    def size(self, dim: int | None = None) -> Shape | int:
        return self.meta.shape if dim is None else self.meta.shape[dim]

    def dim(self) -> int:
        return len(self.meta.shape)

    ndim = property(dim)

    def numel(self) -> int:
        return self.meta.numel

    def is_contiguous(self) -> bool:
        return self.meta.contiguous

    @property
    def device(self) -> str:
        return self._home.device  # type: ignore[no-any-return]

    @property
    def is_leaf(self) -> bool:
        return current(self)._node is None

    @property
    def requires_grad(self) -> bool:
        return bool(current(self)._needs)

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Say whether gradients of this leaf are wanted.

        Raises:
            RuntimeError: it is no leaf, or its elements are no floating point numbers.
        """
        if current(self)._node is not None:
            if not requires_grad:
                raise RuntimeError(
                    "you can only change requires_grad flags of leaf variables. If you want to use a computed "
                    "variable in a subgraph that doesn't require differentiation use var_no_grad = var.detach()."
                )
            return self
        if requires_grad and self.dtype.kind < Kind.FLOAT:
            raise RuntimeError("only Tensors of floating point dtype can require gradients")
        self._needs = requires_grad
        return self

    @property
    def grad(self) -> Tensor | None:
        """The gradient that `backward` has gathered here; None if there is none."""
        return self._grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        if grad is not None:
            if not isinstance(grad, Tensor):
                raise TypeError(f"assigned grad expected to be a Tensor or None but got {type(grad).__name__}")
            if grad.shape != self.shape:
                raise RuntimeError(
                    f"assigned grad has data of a different size: {list(grad.shape)} beside {list(self.shape)}"
                )
        self._grad = grad

    def retain_grad(self) -> None:
        """Keep the gradient also if this is no leaf."""
        if not current(self)._needs:
            raise RuntimeError("can't retain_grad on Tensor that has requires_grad=False")
        self._retains = self._node is not None
        if self._node is not None:
            self._node.retained = [*self._node.retained, self]

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Handle:
        """Call a function with each gradient of this tensor; what it returns replaces the gradient."""
        if not current(self)._needs:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        hooks = self._hooks
        if hooks is None:
            hooks = self._hooks = {}
            if self._node is not None:
                if self._node.hooks is None:
                    self._node.hooks = {}
                hooks = self._hooks = self._node.hooks.setdefault(self._place, hooks)
        return Handle(hooks, hook)

    def detach(self) -> Tensor:
        """Return the same tensor without its history."""
        return Tensor(self._home, self._value, self._meta, self._base)

    def detach_(self) -> Tensor:
        """Forget the history of this handle.

        Raises:
            RuntimeError: it is a view, in torch's words.
        """
        if self._base is not self._value:
            raise RuntimeError(
                "Can't detach views in-place; use detach() instead. If you are using DistributedDataParallel (DDP) "
                "for training, and gradient_as_bucket_view is set as True, gradients are views of DDP buckets, and "
                "hence detach_() cannot be called on these gradients."
            )
        self._needs, self._node, self._place = False, None, 0
        return self

    @property
    def grad_fn(self) -> Any:
        """The operation that made it, if gradients pass it; None for a leaf."""
        return current(self)._node

    @property
    def data(self) -> Tensor:
        return self.detach()

    def item(self) -> Any:
        """Wait for the only element, as a number.

        Raises:
            RuntimeError: there are none, or several.
            OperationFailed: an operation on which it depends has failed.
        """
        if self._meta is not None and self._meta.numel != 1:
            raise RuntimeError(f"a Tensor with {self._meta.numel} elements cannot be converted to Scalar")
        found = self._home.values_of((self,))[0].tolist()
        while isinstance(found, list):
            if len(found) != 1:
                raise RuntimeError("a Tensor with several elements, or none, cannot be converted to Scalar")
            found = found[0]
        return found

    def tolist(self) -> Any:
        """Wait for the elements, as nested lists; as a number if there is no dimension."""
        return self._home.values_of((self,))[0].tolist()

    def numpy(self) -> Any:
        """Wait for the elements, as a numpy array."""
        if self._needs:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
            )
        return self._home.values_of((self,))[0].numpy()

    def backward(
        self, gradient: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        """Queue the operations that add this tensor's gradients to the leaves of its graph.

        Args:
            gradient: the gradient of this tensor; 1 if it has one element.
            retain_graph: whether to keep what was saved, so that it can be done again.
            create_graph: whether the gradients have a graph themselves.

        Raises:
            RuntimeError: there is no graph, or no gradient of several elements, or the graph was used already.
        """
        self._home.backward(self, gradient, retain_graph, create_graph)

    async def aitem(self) -> Any:
        """As `item`, on an event loop."""
        if self.numel() != 1:
            return self.item()
        (found,) = await self._home.afetch(self.reshape(()))
        return found

    async def atolist(self) -> Any:
        """As `tolist`, on an event loop."""
        return (await self._home.afetch(self))[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found = self.numpy()
        return found if dtype is None else found.astype(dtype)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Wait for the elements where a tensor of torch takes them over, as in ``load_state_dict``."""
        torch = sys.modules["torch"]
        if function is not torch.Tensor.copy_:
            return NotImplemented
        target, source, *rest = args
        if isinstance(target, cls):
            return NotImplemented
        (elements,) = source._home.values_of((source,))
        taken = torch.frombuffer(bytearray(elements.raw or b" "), dtype=getattr(torch, elements.dtype.name))
        return target.copy_(taken[: source.numel()].reshape(elements.shape), *rest, **(kwargs or {}))

    def __bool__(self) -> bool:
        if self.numel() != 1:
            raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self.dtype.kind > 1:
            raise TypeError("only integer tensors of a single element can be converted to an index")
        return int(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __copy__(self) -> Tensor:
        copy = self.detach()
        copy._needs, copy._node, copy._place = current(self)._needs, self._node, self._place
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if self._node is not None:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment."
            )
        copy: Tensor = self.detach().clone()
        memo[id(self)] = copy
        return copy.requires_grad_(self._needs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotSupported(
            "a lazy tensor is a handle, which is good in its program only: send x.numpy() or x.tolist(), or give "
            "it a name with lt.named"
        )

    def __hash__(self) -> int:
        return id(self)

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if form and self.dim() == 0 else str(self)

    def __repr__(self) -> str:
        meta = self._meta
        if meta is None:
            return "<Tensor, whose shape is not known here yet>"
        known = self._value.known
        if known is not None and known[0] == (self._base.version, self._home.era):
            what = str(known[1].tolist())
        else:
            what = f"shape={list(meta.shape)}"
        grad = ", requires_grad=True" if self._needs and self._node is None else ""
        made = f", grad_fn=<{self._node.name}>" if self._node is not None else ""
        return f"tensor({what}, dtype={meta.dtype.name}{grad}{made})"


class Handle:
    """A hook of a tensor, which `remove` takes away."""

    _count = itertools.count()

    def __init__(self, hooks: dict[int, Any], hook: Any) -> None:
        self._hooks = hooks
        self._number = next(self._count)
        hooks[self._number] = hook

    def remove(self) -> None:
        self._hooks.pop(self._number, None)
