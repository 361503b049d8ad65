"""`Tensors`: the lazy tensors of one mesh, and the functions that make them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, overload

from loom.errors import NotSupported
from loom.tensors import optim
from loom.tensors.autograd import backward, first_grad
from loom.tensors.commands import Form, Numbered, S, T
from loom.tensors.compiled import Compiled, Recorder
from loom.tensors.dispatch import Dispatcher, caller_site
from loom.tensors.dtypes import DEFAULT, DType, dtype_named, int64
from loom.tensors.elements import Elements, pack
from loom.tensors.metas import Meta, Shape
from loom.tensors.named import NamedTensors
from loom.tensors.nn.layers import Layers
from loom.tensors.nn.module import Module
from loom.tensors.placements import WHOLE, Placement, largest_part, packed, spread, unpacked
from loom.tensors.tensor import Tensor, Value, enable_grad, grad_enabled, no_grad
from loom.tensors.watching.watch import Watch, Watches, Watching

Placements = Sequence[Any] | None

FEW = 4096
"""Bytes of a tensor that is remembered when it was read, so that it is shown."""


class Tensors:
    """The lazy tensors of a mesh: each process has all of them, or its part of those that are sharded.

    Its functions are torch's. They return at once; only reading waits.

    Args:
        workers: the mesh of `TensorWorker`.
    """

    def __init__(self, workers: Any) -> None:
        self._workers = workers
        self._dispatcher = Dispatcher(workers)
        self.freed = self._dispatcher.freed
        self.put = self._dispatcher.put
        self.form = self._dispatcher.form
        self.join = self._dispatcher.join
        self.processes = self._dispatcher.size
        self.mesh: dict[str, int] = dict(workers.sizes)
        """The mesh of processes: how many there are in each dimension, by its name."""
        self.known: dict[Any, Any] = {}
        """What operations give, by the operation and what it is given."""
        self.device = "loom"
        self.watching = Watching(self)
        self.recorder: Recorder | None = None
        """What records the commands of a function that is compiled."""

    # Making tensors

    def tensor(
        self, data: Any, dtype: Any = None, requires_grad: bool = False, placements: Placements = None
    ) -> Tensor:
        """Make a tensor of a number, of nested sequences, of a numpy array or of a tensor of torch.

        Args:
            placements: how it is spread over the processes; each has all of it if None.

        Raises:
            ValueError: the sequences have different lengths.
            TypeError: an element is no number.
        """
        shape, kind, raw = pack(data, None if dtype is None else dtype_named(dtype))
        made = self._made(Form(".data", (shape, kind)), Meta(shape, kind), False, data=raw)
        made = made if placements is None else made.redistribute(placements)
        return made.requires_grad_() if requires_grad else made

    def from_numpy(self, array: Any) -> Tensor:
        """Make a tensor of a numpy array, of which it is a copy."""
        return self.tensor(array)

    def zeros(
        self, *size: Any, dtype: Any = None, requires_grad: bool = False, placements: Placements = None
    ) -> Tensor:
        return self._filled("zeros", size, dtype, requires_grad, placements)

    def ones(
        self, *size: Any, dtype: Any = None, requires_grad: bool = False, placements: Placements = None
    ) -> Tensor:
        return self._filled("ones", size, dtype, requires_grad, placements)

    def empty(
        self, *size: Any, dtype: Any = None, requires_grad: bool = False, placements: Placements = None
    ) -> Tensor:
        return self._filled("empty", size, dtype, requires_grad, placements)

    def rand(
        self, *size: Any, dtype: Any = None, requires_grad: bool = False, placements: Placements = None
    ) -> Tensor:
        return self._filled("rand", size, dtype, requires_grad, placements)

    def randn(
        self, *size: Any, dtype: Any = None, requires_grad: bool = False, placements: Placements = None
    ) -> Tensor:
        return self._filled("randn", size, dtype, requires_grad, placements)

    def full(
        self,
        size: Sequence[int],
        fill_value: Any,
        dtype: Any = None,
        requires_grad: bool = False,
        placements: Placements = None,
    ) -> Tensor:
        if dtype is None:
            kind = {bool: "bool", int: "int64", complex: "complex64"}.get(type(fill_value), DEFAULT.name)
        else:
            kind = dtype_named(dtype).name
        meta = Meta(tuple(size), dtype_named(kind))
        form = Form(".made", ("full", meta.shape, S(0)), (("dtype", meta.dtype),), numbers=1)
        return self._made(form, meta, requires_grad, (fill_value,), placements=placements)

    def eye(self, n: int, m: int | None = None, dtype: Any = None, requires_grad: bool = False) -> Tensor:
        meta = Meta((n, n if m is None else m), _dtype(dtype))
        form = Form(".made", ("eye", *meta.shape), (("dtype", meta.dtype),))
        return self._made(form, meta, requires_grad)

    def arange(
        self, start: Any, end: Any = None, step: Any = 1, dtype: Any = None, requires_grad: bool = False
    ) -> Tensor:
        """Make the numbers from ``start``, below ``end``, in steps.

        Raises:
            RuntimeError: the step leads away from the end, or is 0.
        """
        if end is None:
            start, end = 0, start
        if step == 0:
            raise RuntimeError("step must be nonzero")
        if (end - start) * step < 0:
            raise RuntimeError("upper bound and lower bound inconsistent with step sign")
        whole = all(isinstance(each, int) for each in (start, end, step))
        kind = (int64 if whole else DEFAULT) if dtype is None else dtype_named(dtype)
        length = max(0, -((start - end) // step))
        form = Form(".made", ("arange", S(0), S(1), S(2)), (("dtype", kind),), numbers=3)
        return self._made(form, Meta((int(length),), kind), requires_grad, (start, end, step))

    def zeros_like(self, tensor: Tensor, dtype: Any = None, requires_grad: bool = False) -> Tensor:
        return self.zeros(tensor.shape, dtype=dtype or tensor.dtype, requires_grad=requires_grad)

    def ones_like(self, tensor: Tensor, dtype: Any = None, requires_grad: bool = False) -> Tensor:
        return self.ones(tensor.shape, dtype=dtype or tensor.dtype, requires_grad=requires_grad)

    def seed(self, number: int) -> None:
        """Let every process draw the random numbers of a seed from here on."""
        self._queue(self.form(Form(".seed", (S(0),), numbers=1, outs=0), (int,)), (), (number,))

    manual_seed = seed

    # Gradients

    no_grad = staticmethod(no_grad)
    enable_grad = staticmethod(enable_grad)

    def grad(
        self,
        outputs: Tensor | Sequence[Tensor],
        inputs: Tensor | Sequence[Tensor],
        grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        allow_unused: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of outputs by inputs, as `torch.autograd.grad`.

        Raises:
            RuntimeError: an input is not part of the graph, and ``allow_unused`` is false.
        """
        roots = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        given = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs or [None] * len(roots))
        if not all(each._needs for each in wanted):
            raise RuntimeError("One of the differentiated Tensors does not require grad")
        grads = [first_grad(root, grad, self.ones_like) for root, grad in zip(roots, given, strict=True)]
        retain = create_graph if retain_graph is None else retain_graph
        with self._at_this_line():
            found = backward(roots, grads, retain, create_graph, wanted)
        if not allow_unused and None in found:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set "
                "allow_unused=True if this is the desired behavior."
            )
        return tuple(found)

    def backward(
        self, root: Tensor, gradient: Tensor | None, retain_graph: bool | None, create_graph: bool
    ) -> None:
        """Add the gradients of a tensor to the leaves: see `Tensor.backward`."""
        first = first_grad(root, gradient, self.ones_like)
        retain = create_graph if retain_graph is None else retain_graph
        with self._at_this_line():
            backward([root], [first], retain, create_graph)

    @overload
    def watch(self, target: Tensor, name: str, every: int = 1, bins: int = 64) -> Watch: ...
    @overload
    def watch(self, target: Module, name: str, every: int = 1, bins: int = 64) -> Watches: ...
    def watch(self, target: Any, name: str, every: int = 1, bins: int = 64) -> Any:
        """Let the workers summarize a weight and its gradient whenever `backward` adds to that, under a name.

        A name that was there before goes on, with its summaries. A tensor has one name, the last.

        Args:
            target: a leaf that requires a gradient; or a module, each parameter under ``name.parameter``.
            every: of how many gradients one is summarized.
            bins: of the histograms, up to 1024.

        Raises:
            WrongArguments: the tensor keeps no gradient, or is of another mesh, or an argument makes no sense.
        """
        return self.watching.watch(target, name, every, bins)

    def watched(self) -> Watches:
        """Return what is watched by name, or was watched, also by an earlier program. It waits for one answer."""
        return self.watching.all()

    # Networks

    @cached_property
    def nn(self) -> Layers:
        """Modules, as `torch.nn` has them, with their parameters here."""
        return Layers(self)

    optim = optim
    """Optimizers, as `torch.optim` has them."""

    # Reading

    def fetch(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Wait for the elements of tensors, as nested lists, in one round trip."""
        return tuple(each.tolist() for each in self.values_of(tensors))

    async def afetch(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Wait for the elements of tensors, as nested lists, in one round trip, on an event loop."""
        asked = self._dispatcher.ask([each._value.id for each in tensors])
        found = self._elements(tensors, self._dispatcher.answer(asked, await asked.future))
        return tuple(each.tolist() for each in found)

    def call(self, function: str, *args: Any, **kwargs: Any) -> Tensor:
        """Queue any function of torch that returns a tensor, such as ``lt.call("torch.fft.rfft", x)``.

        It has no gradient here. Its shape is asked for only if somebody looks.
        """
        tensors: list[Tensor] = []

        def filled(value: Any) -> Any:
            if isinstance(value, Tensor):
                tensors.append(value)
                return T(len(tensors) - 1)
            return type(value)(map(filled, value)) if isinstance(value, (list, tuple)) else value

        holed = tuple(map(filled, args)), tuple((key, filled(each)) for key, each in kwargs.items())
        if grad_enabled.get() and any(each._needs for each in tensors):
            raise NotSupported(
                f"{function} has no gradient here: give it x.detach(), or call it within lt.no_grad()"
            )
        form = self.form(Form(function.removeprefix("torch."), *holed, tensors=len(tensors)))
        return Tensor(self, Value(self.freed, self._queue(form, tensors)), None)

    def synchronize(self) -> None:
        """Wait until everything that was queued is done.

        Raises:
            OperationFailed: an operation has failed since the last time; the first of them.
        """
        self._dispatcher.synchronize()

    def values_of(self, tensors: Sequence[Tensor]) -> list[Elements]:
        """Wait for the elements of tensors."""
        if self.recorder is not None:
            self.recorder.refusal = "it reads a tensor: return it, and read it outside"
        return self._elements(tensors, self._dispatcher.read([each._value.id for each in tensors]))

    def _elements(self, tensors: Sequence[Tensor], found: list[Any]) -> list[Elements]:
        values = [Elements(*each) for each in found]
        for tensor, value in zip(tensors, values, strict=True):
            if len(value.raw) <= FEW:
                tensor._value.known = tensor._base.version, value
        return values

    def placements_of(self, tensor: Tensor) -> tuple[Placement, ...]:
        """Wait for the placements of a tensor: see `Tensor.placements`."""
        found = self._dispatcher.read([tensor._value.id], "placements")[0]
        return unpacked(found or (WHOLE,) * len(spread(self.mesh)))

    def meta_of(self, tensor: Tensor) -> Meta:
        """Wait for the layout of a tensor."""
        if tensor._meta is None:
            kind, shape, strides = self._dispatcher.read([tensor._value.id], "layout")[0]
            tensor._meta = Meta(tuple(shape), dtype_named(kind), tuple(strides))
        return tensor._meta

    def compile(self, function: Callable[..., Any]) -> Compiled:
        """Send a function's operations as one command when it has done the same twice with the same layouts.

        See `loom.tensors.compiled.Compiled`.

        Example:
            >>> @lt.compile
            ... def step(x, y):
            ...     loss = (x @ w - y).pow(2).mean()
            ...     loss.backward()
            ...     with lt.no_grad():
            ...         w.sub_(w.grad * 0.1)
            ...     w.grad = None
            ...     return loss
        """
        return Compiled(self, function)

    # Memory

    @property
    def named(self) -> NamedTensors:
        """Tensors with a name, which the session keeps when this program has ended."""
        return NamedTensors(self)

    def memory(self) -> dict[str, int]:
        """Return the bytes that each process holds, by the line that made them, the most first.

        Results of operations count whole here, also those that are spread: see `memory_by_process`.
        """
        return self._dispatcher.by_line()

    def memory_by_process(self) -> list[int]:
        """Wait for the bytes that each process holds, in the order of the mesh."""
        return self._dispatcher.by_process()

    def limit_memory(self, most: int | None) -> None:
        """Refuse what would take more than a number of bytes in each process, with `LimitReached`.

        They are counted as `memory` counts them.
        """
        self._dispatcher.limit = most

    # How

    def _filled(
        self, function: str, size: tuple[Any, ...], dtype: Any, requires_grad: bool, placements: Placements
    ) -> Tensor:
        meta = Meta(_size(size), _dtype(dtype))
        form = Form(".made", (function, meta.shape), (("dtype", meta.dtype),))
        return self._made(form, meta, requires_grad, placements=placements)

    def _made(
        self,
        form: Form,
        meta: Meta,
        requires_grad: bool,
        numbers: tuple[Any, ...] = (),
        data: bytes | None = None,
        placements: Placements = None,
    ) -> Tensor:
        size = meta.nbytes
        how = () if placements is None else packed(placements, self.mesh, len(meta.shape))
        if any(each != WHOLE for each in how):
            self.join()
            form = form._replace(function=".made_spread", args=(how, *form.args))
            size = largest_part(meta.shape, how, self.mesh) * meta.dtype.itemsize
        number = self.form(form, tuple(map(type, numbers)))
        tensor = Tensor(self, Value(self.freed, self._queue(number, (), numbers, (size,), data)), meta)
        return tensor.requires_grad_() if requires_grad else tensor

    def _queue(
        self,
        form: Numbered,
        inputs: Sequence[Tensor],
        numbers: tuple[Any, ...] = (),
        sizes: Sequence[int] = (),
        data: bytes | None = None,
    ) -> int:
        """Queue a command of no operation; return the id of its first result."""
        ident = self.put(form, [each._value.id for each in inputs], numbers, sizes, data)
        if self.recorder is not None:
            self.recorder.note(form, inputs, numbers, ident)
        return ident

    @contextlib.contextmanager
    def _at_this_line(self) -> Any:
        """Name the line of the caller for all that is queued within."""
        before, self._dispatcher.site = self._dispatcher.site, self._dispatcher.site or caller_site()
        try:
            yield
        finally:
            self._dispatcher.site = before


def _size(size: tuple[Any, ...]) -> Shape:
    """Return the shape of ``zeros(2, 3)`` and of ``zeros((2, 3))``."""
    if len(size) == 1 and not isinstance(size[0], int):
        size = tuple(size[0])
    for each in size:
        if each < 0:
            raise RuntimeError(
                f"Trying to create tensor with negative dimension {each}: [{', '.join(map(str, size))}]"
            )
    return tuple(size)


def _dtype(dtype: Any) -> DType:
    return DEFAULT if dtype is None else dtype_named(dtype)
