"""`Tensor`, a handle of a tensor in the cluster."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any
from weakref import ref

from loom.errors import NotSupported
from loom.tensors.history import Node, needs_grad, operands
from loom.tensors.layouts import DType, DtypeKind, Meta, Shape

PRESENT = object()
"""Stands for a gradient that is there, and of which no handle was made."""
GRAPHED = object()
"""Stands for a gradient that is there, and may have a graph itself."""
UNKNOWN = object()
"""Stands for a gradient of which only the workers know whether it is there."""


class Value:
    """A tensor in the cluster by its id. When the last handle of it dies, it is freed there."""

    __slots__ = ("_queue", "id", "known", "needs", "node", "version")

    def __init__(self, queue: deque[Any], ident: int) -> None:
        self._queue = queue
        self.id = ident
        self.version = 0
        """The number of changes in place of this tensor's memory; of a view, see its base."""
        self.needs = False
        """True if an operation in place has made it part of a graph, and with it all of its views."""
        self.node: Node | None = None
        """The last such operation."""
        self.known: Any = None
        """Its elements and the version at which they were read, if they are few."""

    def __del__(self) -> None:
        self._queue.append(self.id)


class Tensor:
    """A handle of a tensor in the cluster, with torch's methods. Each returns at once.

    Only what gives values waits: `item`, `tolist`, `numpy`, ``bool()``, ``float()`` and ``int()``.
    """

    __slots__ = (
        "__weakref__",
        "_base",
        "_grad",
        "_home",
        "_meta",
        "_needs",
        "_node",
        "_retains",
        "_root",
        "_value",
    )

    __array_priority__ = 1000
    """Numpy leaves operators to tensors, as to those of torch."""

    def __init__(self, home: Any, value: Value, meta: Meta | None, base: Value | None = None) -> None:
        self._home = home
        self._value = value
        self._meta = meta
        self._base = value if base is None else base
        """The value whose memory it is, and which counts changes in place."""
        self._root = self._base
        """The value of which it is a view, and with which it shares a history of changes in place."""
        self._needs = False
        """True if its gradient is wanted, or may be, if its layout is not known."""
        self._node: Any = None
        """The `loom.tensors.history.Node` that made it; without a gradient a tuple of the operation's name and weak
        references to its operands; None for a leaf whose gradient is wanted."""
        self._grad: Any = None
        """Its gradient, as far as it is known here: a handle, `PRESENT`, `UNKNOWN`, or None."""
        self._retains = False

    if TYPE_CHECKING:
        # The operations: see `loom.tensors.call`.
        def __getattr__(self, name: str) -> Any: ...
        def __getitem__(self, index: Any) -> Tensor: ...
        def __setitem__(self, index: Any, value: Any) -> None: ...
        def __iter__(self) -> Iterator[Tensor]: ...
        def __neg__(self) -> Tensor: ...
        def __add__(self, other: Any) -> Tensor: ...

        __abs__ = __invert__ = __neg__
        __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = __add__
        __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = (
            __add__
        )
        __iadd__ = __isub__ = __imul__ = __itruediv__ = __and__ = __or__ = __xor__ = __add__
        __lt__ = __le__ = __gt__ = __ge__ = __add__

    @property
    def meta(self) -> Meta:
        """Shape, strides and dtype. Of an operation whose layout is not known yet this asks the cluster."""
        return self._meta or self._home._meta_of(self)

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

    # History

    @property
    def op(self) -> str:
        """The name of the operation that made it; empty for a leaf, and for what was made without a graph."""
        node = self._node
        return "" if node is None else node[0] if type(node) is tuple else node.name

    @property
    def prev(self) -> list[Tensor]:
        """The tensors of which it was made, as far as their handles live."""
        return list(operands(self))

    @property
    def is_leaf(self) -> bool:
        return not self.requires_grad or (self._node is None and not self._root.needs)

    @property
    def requires_grad(self) -> bool:
        if self._needs and self._meta is None:
            self._home._meta_of(self)
        return needs_grad(self)

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Say whether gradients of this leaf are wanted.

        Raises:
            RuntimeError: it is no leaf, or its elements are no floating point numbers.
        """
        if not self.is_leaf:
            if not requires_grad:
                raise RuntimeError(
                    "you can only change requires_grad flags of leaf variables. If you want to use a computed "
                    "variable in a subgraph that doesn't require differentiation use var_no_grad = var.detach()."
                )
            return self
        if requires_grad and self.dtype.kind < DtypeKind.FLOAT:
            raise RuntimeError("only Tensors of floating point dtype can require gradients")
        if requires_grad is not self._needs:
            self._home._command(".requires_grad", (self,), bool(requires_grad))
            self._needs, self._node = requires_grad, None
        return self

    @property
    def grad(self) -> Tensor | None:
        """The gradient that `backward` has gathered in it; None if there is none.

        It is asked for in the cluster only if nobody knows here whether the gradient has come.
        """
        if self._grad is UNKNOWN:
            self._grad = PRESENT if self._home._has_grad(self) else None
        if self._grad is PRESENT or self._grad is GRAPHED:
            self._grad = self._home._grad_of(self, graph=self._grad is GRAPHED)
        return self._grad  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        if grad is not None:
            if not isinstance(grad, Tensor):
                raise TypeError(f"assigned grad expected to be a Tensor or None but got {type(grad).__name__}")
            if grad.shape != self.shape:
                raise RuntimeError(
                    f"assigned grad has data of a different size: {list(grad.shape)} beside {list(self.shape)}"
                )
        elif self._grad is None:
            return
        self._home._command(".set_grad", (self,) if grad is None else (self, grad))
        self._grad = grad

    def retain_grad(self) -> None:
        """Keep the gradient also if this is no leaf."""
        if not self.requires_grad:
            raise RuntimeError("can't retain_grad on Tensor that has requires_grad=False")
        if not self.is_leaf and not self._retains:
            self._retains = True
            self._home._retained[id(self)] = ref(self)
            self._home._command(".retain_grad", (self,))

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Let the workers call a function with each gradient of this tensor; its result replaces the gradient.

        The function is called here once, now, and its operations are recorded. It may neither read a tensor nor
        change one from outside.

        Raises:
            NotSupported: it does so.
        """
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        return self._home._hook(self, hook)

    def detach(self) -> Tensor:
        """Return the same tensor without its history."""
        return self._home._alias("detach", self)  # type: ignore[no-any-return]

    def detach_(self) -> Tensor:
        """Forget the history of this handle.

        Raises:
            RuntimeError: it is a view, in torch's words.
        """
        if self._base is not self._value and self.requires_grad:
            raise RuntimeError(
                "Can't detach views in-place; use detach() instead. If you are using DistributedDataParallel (DDP) "
                "for training, and gradient_as_bucket_view is set as True, gradients are views of DDP buckets, and "
                "hence detach_() cannot be called on these gradients."
            )
        self._home._command("Tensor.detach_", (self,))
        self._needs, self._node, self._root.needs, self._root.node = False, None, False, None
        return self

    def become(self, other: Tensor) -> None:
        """Be the handle of another tensor's elements from here on, as a leaf with the same wish for a gradient."""
        wanted = self._needs
        self._value, self._meta, self._base, self._root = other._value, other.meta, other._base, other._root
        self._needs, self._node, self._grad = False, None, None
        self.requires_grad_(wanted)

    @property
    def grad_fn(self) -> Node | None:
        """The operation that made it, if gradients pass it; None for a leaf."""
        return None if self.is_leaf else self._node if isinstance(self._node, Node) else self._root.node

    @property
    def data(self) -> Tensor:
        """The same elements without history; changes of them in place are not noticed by the graph."""
        return self._home._alias(".data_of", self)  # type: ignore[no-any-return]

    def backward(
        self, gradient: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        """Let the workers add this tensor's gradients to the leaves of its graph. It is one command.

        Args:
            gradient: the gradient of this tensor; 1 if it has one element.
            retain_graph: whether to keep the graph, so that it can be done again.
            create_graph: whether the gradients have a graph themselves.

        Raises:
            RuntimeError: there is no graph, or no gradient of several elements.
        """
        self._home._backward(self, gradient, retain_graph, create_graph)

    # Reading

    def item(self) -> Any:
        """Wait for the only element, as a number.

        Raises:
            RuntimeError: there are none, or several.
            OperationFailed: an operation on which it depends has failed.
        """
        if self._meta is not None and self._meta.numel != 1:
            raise RuntimeError(f"a Tensor with {self._meta.numel} elements cannot be converted to Scalar")
        return _only(self._home._values_of((self,))[0].tolist())

    def tolist(self) -> Any:
        """Wait for the elements, as nested lists; as a number if there is no dimension."""
        return self._home._values_of((self,))[0].tolist()

    def numpy(self) -> Any:
        """Wait for the elements, as a numpy array."""
        if self.requires_grad:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
            )
        return self._home._values_of((self,))[0].numpy()

    async def aitem(self) -> Any:
        """As `item`, on an event loop."""
        if self._meta is not None and self._meta.numel != 1:
            return self.item()
        return _only((await self._home.afetch(self))[0])

    async def atolist(self) -> Any:
        """As `tolist`, on an event loop."""
        return (await self._home.afetch(self))[0]

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait on an event loop for the elements; for a number if there is one without dimensions."""
        return self.atolist().__await__()

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
        (elements,) = source._home._values_of((source,))
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
        copy = Tensor(self._home, self._value, self._meta, self._base)
        copy._root, copy._needs, copy._node, copy._grad = self._root, self._needs, self._node, self._grad
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
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
        grad = ", requires_grad=True" if self.requires_grad and self.is_leaf else ""
        made = f", grad_fn=<{self.grad_fn.name}>" if self.grad_fn is not None else ""
        return f"tensor({what}, dtype={meta.dtype.name}{grad}{made})"


def _only(found: Any) -> Any:
    while isinstance(found, list):
        if len(found) != 1:
            raise RuntimeError(f"a Tensor with {len(found)} elements cannot be converted to Scalar")
        found = found[0]
    return found
