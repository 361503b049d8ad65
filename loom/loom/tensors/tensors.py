"""`Tensors`: the lazy tensors of one mesh, and the functions that make them."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any, overload
from weakref import ref

from loom.errors import Invalid
from loom.tensors import indexing, layout_rules, optim  # noqa: F401 - whose methods are tensors'
from loom.tensors.call import (
    Function,
    Waiting,
    call,
    formed,
    function_at,
    function_named,
    method_named,
    settle,
    tell,
)
from loom.tensors.compiled import Compiled, Hook, Recorder, record_hook
from loom.tensors.factories import Elements, Making
from loom.tensors.grad_modes import enable_grad, grad_enabled, no_grad, set_grad_enabled
from loom.tensors.history import Graph, Node, Reached, link, needs_grad, walk
from loom.tensors.layouts import ALL, Meta, dtype_named, is_dense
from loom.tensors.names import FUNCTIONS
from loom.tensors.nn.layers import Layers
from loom.tensors.nn.module import Module
from loom.tensors.placements import WHOLE, Placement, spread, unpacked
from loom.tensors.sending.dispatcher import Dispatcher
from loom.tensors.sending.encoding import Constant, Form, Numbered, T, hashable
from loom.tensors.tensor import GRAPHED, PRESENT, UNKNOWN, Tensor, Value
from loom.tensors.watching import TensorWatch, Watches, Watching


class NamedTensors(MutableMapping[str, Tensor]):
    """The tensors of a mesh by name."""

    def __init__(self, home: Any) -> None:
        self._home = home

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        form = Form(".keep", (T(0), str(name), tensor.requires_grad), tensors=1, outs=0)
        self._home._queue(self._home._form(form), (tensor,))

    def __getitem__(self, name: str) -> Tensor:
        (kind, shape, strides, _), needs = self._home._dispatcher.kept()[name]
        ident = self._home._queue(self._home._form(Form(".kept", (name,))), ())
        meta = Meta(tuple(shape), dtype_named(kind), tuple(strides))
        tensor = Tensor(self._home, Value(self._home._pending, ident), meta)
        return tensor.requires_grad_() if needs else tensor

    def __delitem__(self, name: str) -> None:
        if name not in self._home._dispatcher.kept():
            raise KeyError(name)
        self._home._queue(self._home._form(Form(".forget", (name,), outs=0)), ())

    def __iter__(self) -> Iterator[str]:
        return iter(self._home._dispatcher.kept())

    def __len__(self) -> int:
        return len(self._home._dispatcher.kept())


FEW = 4096
"""Bytes of a tensor that is remembered when it was read, so that it is shown."""

CONSTANTS = ("channels_last", "channels_last_3d", "contiguous_format", "preserve_format", "strided")
"""Names of torch's memory formats and layouts, for the arguments of functions."""


class TensorNamespace:
    """The functions of a module of torch, such as ``torch.fft``."""

    def __init__(self, home: Any, name: str) -> None:
        self._home = home
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._home, f"{self._name}.{name}")

    def __dir__(self) -> list[str]:
        begin = f"{self._name}."
        return [each.removeprefix(begin) for each in FUNCTIONS if each.startswith(begin)]


class Tensors(Making):
    """The lazy tensors of a mesh: each process has all of them, or its part of those that are sharded.

    Its functions are torch's. They return at once; only reading waits.

    Args:
        workers: the mesh of `TensorWorker`.
        spawn: spawns others on the proc mesh that it is given, or where it likes if that is None.
    """

    def __init__(self, workers: Any, spawn: Callable[[Any], Any] | None = None) -> None:
        self._spawn = spawn
        self._dispatcher = Dispatcher(workers, self._told)
        self._pending = self._dispatcher.queue
        self._put: Callable[..., int] = self._dispatcher.put
        self._form = self._dispatcher.form
        self._join = self._dispatcher.join
        self._processes = self._dispatcher.size
        self.mesh: dict[str, int] = dict(workers.sizes)
        """The mesh of processes: how many there are in each dimension, by its name."""
        self._known: dict[Any, Any] = {}
        """Results of operations, by the operation and its arguments."""
        self._waiting: dict[int, Waiting] = {}
        """The commands whose layouts the workers will tell, by the id of their first result."""
        self._retained: dict[int, ref[Tensor]] = {}
        """The tensors that keep their gradients and are no leaves, by their `id`."""
        self._hooks: dict[int, Hook] = {}
        self._hook_numbers = count()
        self.device = "loom"
        self._watching = Watching(self)
        self._recorder: Recorder | None = None
        """The recorder of a compiled function's commands."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in CONSTANTS:
            return Constant(name)
        found: Any = layout_rules.functions.get(name) or _of_tensor(name)
        if name in ("linalg", "fft", "special"):
            found = TensorNamespace(self, name)
        elif found is None:
            found = function_named(self, name)
        self.__dict__[name] = found
        return found

    def __dir__(self) -> list[str]:
        names = {each.removeprefix("nn.functional.") for each in FUNCTIONS}
        return sorted(
            {*super().__dir__(), "fft", "linalg", "special", *(each for each in names if "." not in each)}
        )

    def init(self, threads: int | None = None) -> None:
        """Let each process compute with so many threads; nothing else has to be begun. It waits for nothing.

        Args:
            threads: of one operation in a process; as many as torch takes if None.
        """
        if threads is not None:
            self._command(".threads", (), int(threads))

    # Gradients

    no_grad = staticmethod(no_grad)
    inference_mode = staticmethod(no_grad)
    enable_grad = staticmethod(enable_grad)
    set_grad_enabled = set_grad_enabled
    is_grad_enabled = staticmethod(grad_enabled.get)
    pi, e, inf, nan = math.pi, math.e, math.inf, math.nan
    detach, numel = staticmethod(Tensor.detach), staticmethod(Tensor.numel)

    @staticmethod
    def is_tensor(value: object) -> bool:
        return isinstance(value, Tensor)

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
        if not all(map(needs_grad, wanted)):
            raise RuntimeError("One of the differentiated Tensors does not require grad")
        for root, grad in zip(roots, given, strict=True):
            _check_root(root, grad)
        reached = walk(roots)
        used = [each for each in wanted if _is_reached(each, reached)]
        if not allow_unused and len(used) < len(wanted):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set "
                "allow_unused=True if this is the desired behavior."
            )
        if not used:
            return (None,) * len(wanted)
        retain = create_graph if retain_graph is None else retain_graph
        found = iter(self._gradients(roots, given, used, (bool(retain), create_graph, allow_unused)))
        return tuple([next(found) if _is_reached(each, reached) else None for each in wanted])

    def _gradients(
        self, roots: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor], how: Any
    ) -> list[Tensor]:
        tensors = [*roots, *inputs, *(each for each in grads if each is not None)]
        places = map(T, range(len(tensors)))
        holes = [[next(places) for _ in part] for part in (roots, inputs)]
        seeds = [None if each is None else next(places) for each in grads]
        create_graph = how[1]
        form = Form(".grads", (*how, *holes, seeds), tensors=len(tensors), outs=len(inputs), learns=create_graph)
        ident = self._queue(self._form(form), tensors)
        values = [Value(self._pending, ident + place) for place in range(len(inputs))]
        if create_graph:
            return self._of_graph(ident, values, tensors)
        return [Tensor(self, value, _like(each.meta)) for value, each in zip(values, inputs, strict=True)]

    def _of_graph(self, ident: int, values: Sequence[Value], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return gradients that have a graph themselves; whether they need one, the workers tell."""
        found = [Tensor(self, value, None) for value in values]
        for each in found:
            link(each, "grad", tensors)
        self._waiting[ident] = Waiting(None, list(map(ref, found)))
        return found

    def _backward(
        self, root: Tensor, gradient: Tensor | None, retain_graph: bool | None, create_graph: bool
    ) -> None:
        """Add the gradients of a tensor to the leaves: see `Tensor.backward`."""
        _check_root(root, gradient)
        reached = walk([root])
        retained = [each for each in self._retaining() if _is_reached(each, reached)]
        leaves = [*reached.leaves, *retained]
        tensors = [root, *leaves, *(() if gradient is None else (gradient,))]
        holes = [*map(T, range(1, len(leaves) + 1))]
        seed = None if gradient is None else T(len(leaves) + 1)
        retain = create_graph if retain_graph is None else retain_graph
        form = Form(".backward", (bool(retain), create_graph, T(0), seed, holes), tensors=len(tensors), outs=0)
        self._queue(self._form(form), tensors)
        for leaf in leaves:
            sure = reached.sure and not leaf._retains
            there = sure or not (leaf._grad is None or leaf._grad is UNKNOWN)
            leaf._grad = (GRAPHED if create_graph else PRESENT) if there else UNKNOWN

    def _retaining(self) -> list[Tensor]:
        for key in [key for key, each in self._retained.items() if each() is None]:
            del self._retained[key]
        return [tensor for each in self._retained.values() if (tensor := each()) is not None]

    def _has_grad(self, tensor: Tensor) -> bool:
        """Wait for whether a tensor has a gradient."""
        self._refuse("it asks whether there is a gradient: call it when there are gradients")
        return bool(self._dispatcher.read([tensor._value.id], "grad")[0])

    def _grad_of(self, tensor: Tensor, graph: bool = False) -> Tensor:
        """Return a handle of a tensor's gradient, which is there."""
        form = Form(".grad_of", (T(0),), tensors=1, learns=graph)
        ident = self._queue(self._form(form), (tensor,))
        value = Value(self._pending, ident)
        return self._of_graph(ident, [value], (tensor,))[0] if graph else Tensor(self, value, _like(tensor.meta))

    def _hook(self, tensor: Tensor, function: Callable[[Tensor], Tensor | None]) -> Hook:
        """Let the workers call a function with each gradient of a tensor: see `Tensor.register_hook`."""
        hook = record_hook(self, tensor, function, next(self._hook_numbers))
        self._hooks[hook.number] = hook
        hook.register()
        return hook

    def graph(self, tensor: Tensor) -> Graph:
        """Return the operations that made a tensor, to be printed, or drawn in a notebook. It asks nobody."""
        return Graph(tensor)

    @overload
    def watch(self, target: Tensor, name: str, every: int = 1, bins: int = 64) -> TensorWatch: ...
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
        return self._watching.watch(target, name, every, bins)

    def watched(self) -> Watches:
        """Return what is watched by name, or was watched, also by an earlier program. It waits for one answer."""
        return self._watching.all()

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
        return tuple(each.tolist() for each in self._values_of(tensors))

    async def afetch(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Wait for the elements of tensors, as nested lists, in one round trip, on an event loop."""
        asked = self._dispatcher.ask([each._value.id for each in tensors])
        found = self._elements(tensors, self._dispatcher.answer(asked, await asked.future))
        return tuple(each.tolist() for each in found)

    def call(self, function: str, *args: Any, **kwargs: Any) -> Tensor:
        """Queue any function of torch that returns a tensor, such as ``lt.call("torch.fft.rfft", x)``.

        Gradients pass it as they do in torch. Its shape is asked for only if somebody looks.
        """
        return call(self, function_at(function.removeprefix("torch.")), args, kwargs)  # type: ignore[no-any-return]

    def _structure(self, form: Form, tensors: Sequence[Tensor]) -> tuple[Any, int]:
        """Wait for the shape of what a function returns, and how many tensors that has; once for a module."""
        key = (".structure", hashable(form)) if form.function == ".forward" else None
        found: tuple[Any, int] | None = self._known.get(key)
        if found is None:
            asked = form._replace(function=".structure", args=(form.function, *form.args))
            found = self._asked(asked, tensors)
            if key is not None:
                self._known[key] = found
        return found

    def _evaluate(self, function: Function, args: Sequence[Any], kwargs: Any) -> Any:
        """Wait for what a function returns that is no tensor."""
        form, tensors, _ = formed(function.path, args, kwargs)
        return self._asked(form, tensors)

    def _asked(self, form: Form, tensors: Sequence[Tensor]) -> Any:
        self._refuse("it asks the workers: call that function outside")
        value = Value(self._pending, self._put(self._form(form), [each._value.id for each in tensors]))
        return self._dispatcher.read([value.id], "value")[0]

    def synchronize(self) -> None:
        """Wait until everything that was queued is done.

        Raises:
            OperationFailed: an operation has failed since the last time; the first of them.
        """
        self._dispatcher.synchronize()

    def _values_of(self, tensors: Sequence[Tensor]) -> list[Elements]:
        """Wait for the elements of tensors."""
        self._refuse("it reads a tensor: return it, and read it outside")
        return self._elements(tensors, self._dispatcher.read([each._value.id for each in tensors]))

    def _refuse(self, why: str) -> None:
        """Note why a function cannot be recorded."""
        if self._recorder is not None:
            self._recorder.refuse(why)

    def _elements(self, tensors: Sequence[Tensor], found: list[Any]) -> list[Elements]:
        values = [Elements(*each) for each in found]
        for tensor, value in zip(tensors, values, strict=True):
            if len(value.raw) <= FEW:
                tensor._value.known = (tensor._base.version, self.era), value
        return values

    def _placements_of(self, tensor: Tensor) -> tuple[Placement, ...]:
        """Wait for the placements of a tensor: see `Tensor.placements`."""
        self._refuse("it asks for placements: ask for them outside")
        found = self._dispatcher.read([tensor._value.id], "placements")[0]
        return unpacked(found or (WHOLE,) * len(spread(self.mesh)))

    def _meta_of(self, tensor: Tensor) -> Meta:
        """Wait for the layout of a tensor, unless it has come meanwhile."""
        if tensor._meta is None:
            self._refuse("it looks at a shape that is not known here")
            kind, shape, strides, needs = self._dispatcher.read([tensor._value.id], "layout")[0]
            tell(tensor, Meta(tuple(shape), dtype_named(kind), tuple(strides)), needs)
        assert tensor._meta is not None
        return tensor._meta

    def _told(self, layouts: Sequence[Any]) -> None:
        """Take in the layouts that the workers have told."""
        for ident, found in layouts:
            settle(self, ident, found)

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
        self._command(".reset", ())
        self._dispatcher.forget()

    # Checkpoints

    def checkpoint(self, path: str | None = None) -> int:
        """Wait until all tensors that live are written to files, of which `restore` makes them; return the bytes.

        Of earlier checkpoints the last one stays until this one is whole. Graphs are not in it: a tensor that was
        computed has its elements afterwards, and `backward` through it fails.

        Args:
            path: a folder that the hosts of all processes share. If None, one of the first process's host, which
                does if processes die and their host lives.

        Raises:
            OSError: a process could not write its files.
        """
        return self._dispatcher.save(path)

    def restore(self, procs: Any = None) -> None:
        """Go on with other processes after some have died: every tensor is what it was at the last checkpoint.

        Handles stay. Tensors made since then fail when they are read.

        Args:
            procs: a proc mesh of the same sizes; tensors of `loom.Job.tensors` spawn one themselves if None.

        Raises:
            Invalid: there is no checkpoint, or these processes do not find it.
        """
        if self._spawn is None:
            raise Invalid("these tensors were found by their name: only the program that made them restores them")
        self._dispatcher.restart(self._spawn(procs))
        self._waiting.clear()
        for hook in list(self._hooks.values()):
            hook.register()
        self._watching.again()

    @property
    def era(self) -> int:
        """The number of times that the tensors were restored."""
        return self._dispatcher.era

    @property
    def named(self) -> NamedTensors:
        """Tensors with a name, which the session keeps when this program has ended."""
        return NamedTensors(self)

    def memory(self) -> dict[str, int]:
        """Return the bytes of results that each process holds, by the line that made them, the most first.

        Results count whole here, also those that are spread: see `memory_by_process`. Values that torch's graph
        keeps for gradients, and the gradients themselves, are not counted.
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

    def _make(self, function: str, args: Sequence[Any], kwargs: Any) -> Tensor:
        """Queue a function of torch that makes a tensor; the workers tell its layout."""
        needs, placements = kwargs.pop("requires_grad", False), kwargs.pop("placements", None)
        made: Tensor = call(self, function_at(".made"), (function, *args), kwargs)
        made = made if placements is None else made.redistribute(placements)
        return made.requires_grad_() if needs else made

    def _command(self, function: str, tensors: Sequence[Tensor], *settings: Any) -> None:
        """Queue a command without results: its tensors, and settings."""
        args = (*map(T, range(len(tensors))), *settings)
        self._queue(self._form(Form(function, args, tensors=len(tensors), outs=0)), tensors)

    def _alias(self, function: str, tensor: Tensor) -> Tensor:
        """Return another tensor with the same memory, without history."""
        ident = self._queue(self._form(Form(function, (T(0),), tensors=1)), (tensor,))
        value = Value(self._pending, ident)
        made = Tensor(self, value, tensor._meta, tensor._base)
        made._root = value
        return made

    def _queue(
        self,
        form: Numbered,
        inputs: Sequence[Tensor],
        numbers: tuple[Any, ...] = (),
        sizes: Sequence[int] = (),
        data: bytes | None = None,
    ) -> int:
        """Queue a command of no operation; return the id of its first result."""
        ident = self._put(form, [each._value.id for each in inputs], numbers, sizes, data)
        if self._recorder is not None:
            self._recorder.note(form, inputs, numbers, ident)
        return ident

    @contextlib.contextmanager
    def _recording(self, recorder: Recorder) -> Any:
        """Let a recorder note the commands that are queued within; a dry one has them not sent."""
        put, queue = self._put, self._pending
        self._recorder = recorder
        if recorder.dry:
            self._put, self._pending = recorder.put, recorder.queue
        try:
            yield
        finally:
            self._put, self._pending, self._recorder = put, queue, None


def _like(meta: Meta) -> Meta:
    """Return the layout of a gradient, as torch's accumulation has it."""
    return meta if is_dense(meta.shape, meta.strides) else Meta(meta.shape, meta.dtype)


def _is_reached(tensor: Tensor, reached: Reached) -> bool:
    if tensor._root.node is not None and id(tensor._root.node) in reached.nodes:
        return True
    if isinstance(tensor._node, Node):
        return id(tensor._node) in reached.nodes
    return any(each is tensor for each in reached.leaves)


def _check_root(root: Tensor, gradient: Tensor | None) -> None:
    """Check what is differentiated, as far as it is known without asking.

    Raises:
        RuntimeError: the tensor has no graph, or more than one element and no gradient is given.
    """
    if not needs_grad(root):
        raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
    if root._meta is None:
        return
    if gradient is not None:
        if gradient._meta is not None and gradient.shape != root.shape:
            raise RuntimeError(
                f"Mismatch in shape: grad_output[0] has a shape of torch.Size({list(gradient.shape)}) and "
                f"output[0] has a shape of torch.Size({list(root.shape)})."
            )
    elif root.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")


def _of_tensor(name: str) -> Callable[..., Any] | None:
    """Return a method that is written here as a function, which refuses a number as its tensor."""
    method = layout_rules.methods.get(name)

    def function(*args: Any, **kwargs: Any) -> Any:
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        if args and not isinstance(args[0], Tensor):
            raise TypeError(f"{name}(): argument 'input' (position 1) must be Tensor, not {type(args[0]).__name__}")
        return method(*args, **kwargs)  # type: ignore[misc]

    return None if method is None else functools.wraps(method)(function)


def _method(self: Tensor, name: str) -> Any:
    """Return a method that is not written here."""
    if isinstance(getattr(type(self), name, None), property):  # an error of this class came of it
        return object.__getattribute__(self, name)
    if name.startswith("_"):
        raise AttributeError(f"'Tensor' object has no attribute {name!r}")
    setattr(Tensor, name, method_named(name))
    return getattr(self, name)


for _name, _function in {**layout_rules.methods, "__getattr__": _method}.items():
    setattr(Tensor, _name, _function)
for _name, _getter in layout_rules.PROPERTIES.items():
    setattr(Tensor, _name, property(_getter))
for _dtype in ALL:  # `lt.bool` is a dtype, as in torch, and `x.bool()` a method
    setattr(Tensors, _dtype.name, _dtype)
setattr(Tensors, "Tensor", Tensor)  # noqa: B010
for _name in ("float", "double", "half", "int", "long", "short", "cfloat", "cdouble"):
    setattr(Tensors, _name, dtype_named(_name))
