"""`Tensors`: the lazy tensors of one mesh, and the functions that make them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, overload

from loom.errors import Invalid, NotSupported
from loom.tensors import optim
from loom.tensors.autograd import backward, first_grad
from loom.tensors.commands import Form, Numbered, T
from loom.tensors.compiled import Compiled, Recorder
from loom.tensors.dtypes import dtype_named
from loom.tensors.elements import Elements
from loom.tensors.grad_modes import enable_grad, grad_enabled, no_grad, set_grad_enabled
from loom.tensors.making import Making
from loom.tensors.metas import Meta
from loom.tensors.named import NamedTensors
from loom.tensors.nn.layers import Layers
from loom.tensors.nn.module import Module
from loom.tensors.placements import WHOLE, Placement, spread, unpacked
from loom.tensors.sending.dispatch import Dispatcher
from loom.tensors.sending.sites import Site, caller_site
from loom.tensors.tensor import Tensor, Value
from loom.tensors.watching.watch import Watch, Watches, Watching

FEW = 4096
"""Bytes of a tensor that is remembered when it was read, so that it is shown."""


class Tensors(Making):
    """The lazy tensors of a mesh: each process has all of them, or its part of those that are sharded.

    Its functions are torch's. They return at once; only reading waits.

    Args:
        workers: the mesh of `TensorWorker`.
        spawn: spawns others on the proc mesh that it is given, or where it likes if that is None.
    """

    def __init__(self, workers: Any, spawn: Callable[[Any], Any] | None = None) -> None:
        self._spawn = spawn
        self._dispatcher = Dispatcher(workers)
        self.queue = self._dispatcher.queue
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

    # Gradients

    no_grad = inference_mode = staticmethod(no_grad)
    enable_grad = staticmethod(enable_grad)
    set_grad_enabled = set_grad_enabled
    is_grad_enabled = staticmethod(grad_enabled.get)
    pi, e, inf, nan = math.pi, math.e, math.inf, math.nan

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
        return Tensor(self, Value(self.queue, self._queue(form, tensors)), None)

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
                tensor._value.known = (tensor._base.version, self.era), value
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

    def reset(self) -> None:
        """Free every tensor that has no name. Handles stay, and what reads one of before fails."""
        self._queue(self.form(Form(".reset", (), outs=0)), ())
        self._dispatcher.forget()

    # Checkpoints

    def checkpoint(self, path: str | None = None) -> int:
        """Wait until all tensors that live are written to files, of which `restore` makes them; return the bytes.

        Of earlier checkpoints the last one stays until this one is whole.

        Args:
            path: a folder that the hosts of all processes share. If None, one of the first process's host, which
                does if processes die and their host lives.

        Raises:
            OSError: a process could not write its files.
        """
        return self._dispatcher.save(path)

    def restore(self, procs: Any = None) -> None:
        """Go on with other processes after some have died: every tensor is what it was at the last checkpoint.

        Handles stay. What was made since then fails when it is read.

        Args:
            procs: a proc mesh of the same sizes; tensors of `loom.Job.tensors` spawn one themselves if None.

        Raises:
            Invalid: there is no checkpoint, or these processes do not find it.
        """
        if self._spawn is None:
            raise Invalid("these tensors were found by their name: only the program that made them restores them")
        self._dispatcher.restart(self._spawn(procs))

    @property
    def era(self) -> int:
        """How often the tensors were restored."""
        return self._dispatcher.era

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

    def _at_this_line(self) -> Any:
        """Name the line of the caller for all that is queued within."""
        return self._at(self._dispatcher.site or caller_site())

    @contextlib.contextmanager
    def _at(self, site: Site | None) -> Any:
        before, self._dispatcher.site = self._dispatcher.site, site
        try:
            yield
        finally:
            self._dispatcher.site = before
