"""Calls on tensors of which each process has a part, torch's `DTensor`.

A value is a plain tensor, which every process has whole, or a `DTensor` that is cut along some dimension. Partial
sums are added up as soon as an operation gives them, and what no dimension cuts is plain again, which is faster.
What `DTensor` cannot do is done with whole tensors by every process. All of that is decided from what all processes
know, as each of these steps may be one in which they wait for each other.
"""

from __future__ import annotations

import contextlib
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from loom.tensors import layout_rules  # noqa: F401 - which says what is computed element by element
from loom.tensors.call import COPYING, ELEMENTWISE, base
from loom.tensors.layouts import contiguous_strides
from loom.tensors.names import VIEWING
from loom.tensors.placements import WHOLE
from loom.tensors.sending.encoding import Form
from loom.tensors.worker.process_group import (
    SENT,
    Group,
    as_torch,
    cut,
    everywhere,
    has_empty_part,
    in_order,
    is_spread,
    own_part,
    settled,
    whole,
)

Call = Callable[[Sequence[Any], Sequence[Any]], Any]

OF_IMAGES = re.compile("conv|pool|upsample|interpolate")
"""Functions of batches of images, by their names. `DTensor` cuts images, not batches (torch 2.13)."""

_RANDOM = re.compile("drop|rand|bernoulli|multinomial|normal_|poisson|exponential|uniform|geometric|cauchy")
"""Functions that draw random numbers, by their names."""

BY_PARTS = ELEMENTWISE | {
    *("diagonal", "expand", "permute", "reshape", "split", "squeeze", "transpose", "unbind", "unfold", "unsqueeze"),
    *("broadcast_to", "chunk", "expand_as", "swapaxes", "swapdims", "t", "view", "view_as"),
    *(".getitem", ".reshaped", "log_softmax", "logsumexp", "softmax"),
    *("addmm", "baddbmm", "bmm", "dot", "matmul", "mm", "mv", "linear"),
    *("amax", "amin", "cat", "einsum", "mean", "stack", "sum"),
    *("index_select", "masked_fill", "embedding", "layer_norm"),
}
"""The functions that `DTensor` computes from parts as torch does from whole tensors: tests compare each on four
processes. Of others it gives wrong elements now and then, such as of ``argmax`` and ``var_mean`` (torch 2.13)."""

_AS_THEY_ARE = frozenset(
    (
        *(".backward", ".data_of", ".grad_of", ".grads", ".hook", ".requires_grad", ".retain_grad", ".set_grad"),
        *(".watch", "Tensor.detach_", "detach"),
    )
)
"""Operations on a tensor whether it is spread or not."""

_COUNTING = frozenset(("nn.functional.batch_norm", "nn.functional.instance_norm"))
"""Functions that change some of their operands besides giving a result."""

_NO_CHANGES = frozenset({".free", ".keep"})

_IN_PLACE = frozenset(f"Tensor.{name}_" for name in ELEMENTWISE - {"floor_divide", "masked_fill", "where"})
"""Operations that change each element by those in its place, so that each process can change its part. After a
division of ints `DTensor` holds its part for the whole (torch 2.13)."""

_OF_ONE_PROCESS = re.compile("allocate memory|out of memory|[Cc]onnection|[Tt]imed out|gloo|NCCL|socket|peer")
"""Errors that other processes may not have."""

warnings.filterwarnings("ignore", message="DTensor random operators")


class _Step(NamedTuple):
    """A call that gives a view of a tensor."""

    form: Form
    call: Call
    others: Sequence[Any]
    """Further tensors that it takes: numbers of an index."""
    numbers: Sequence[Any]
    place: int | None
    """The index of the result; None if there is one."""


class _View(NamedTuple):
    """The making of a view of a tensor of which each process has a part."""

    base: DTensor
    path: tuple[_Step, ...]
    in_graph: bool = True
    """True if torch lets a change in place of it be part of a graph."""

    def of(self, tensor: Any) -> Any:
        """Make the same view of another tensor."""
        for step in self.path:
            made = step.call([tensor, *map(whole, step.others)], step.numbers)
            tensor = made if step.place is None else made[step.place]
        return tensor


class Sharding:
    """The calls of one worker, where tensors may be spread over the processes of a group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._views = False
        """True if there were views of tensors that are spread: those know how they were made."""

    @property
    def mesh(self) -> DeviceMesh:
        """The group's processes.

        Raises:
            RuntimeError: this process is in no group.
        """
        if self._group.mesh is None:
            raise RuntimeError(self._group.problem)
        return self._group.mesh

    def failed(self, error: Exception) -> None:
        """Leave the group if other processes may not have this error: they would wait for this one."""
        if self._group.mesh is not None and (
            isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _OF_ONE_PROCESS.search(str(error))
        ):
            self._group.leave(str(error).strip().partition("\n")[0])

    def spread(self, tensor: torch.Tensor, placements: Sequence[int]) -> torch.Tensor:
        """Return a tensor of its own that is spread as the placements say."""
        if not isinstance(tensor, DTensor) and all(each == WHOLE for each in placements):
            return tensor.clone(memory_format=torch.contiguous_format)
        wanted, mesh, given = as_torch(placements), self.mesh, in_order(tensor)
        if isinstance(given, DTensor) and given.dtype in SENT:
            found = given.redistribute(placements=wanted)
        else:
            found = cut(whole(given), mesh, wanted)
        made: torch.Tensor = settled(found)
        return made.clone() if own_part(made).data_ptr() == own_part(tensor).data_ptr() else made

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a matrix of which each process has some rows; one that is spread already as it is."""
        if isinstance(tensor, DTensor):
            return tensor
        return cut(tensor, self.mesh, [Shard(0)] * self.mesh.ndim)

    def made(
        self,
        device: torch.device,
        placements: Sequence[int],
        function: str,
        size: Sequence[int],
        *args: Any,
        **kw: Any,
    ) -> torch.Tensor:
        """Call a function of torch that makes a tensor of a size, for this process's part."""
        wanted, mesh = as_torch(placements), self.mesh
        local, _ = compute_local_shape_and_global_offset(torch.Size(size), mesh, wanted)
        with self._drawing(wanted) if function.startswith("rand") else contextlib.nullcontext():
            part = getattr(torch, function)(local, *args, device=device, **kw)
        strides = contiguous_strides(tuple(size))
        return settled(
            DTensor.from_local(part, mesh, wanted, run_check=False, shape=torch.Size(size), stride=strides)
        )

    def whole(self, value: Any) -> Any:
        """Return all of a tensor, with the strides that it would have in one process."""
        return whole(value)

    def placements_of(self, value: Any) -> tuple[int, ...]:
        """Return placements as they travel; none of a tensor that every process has whole."""
        if not isinstance(value, DTensor):
            return ()
        return tuple(WHOLE if isinstance(each, Replicate) else each.dim for each in value.placements)

    def part_of(self, value: DTensor) -> torch.Tensor:
        """Return this process's part of a tensor that is spread."""
        part: torch.Tensor = own_part(value)
        return part

    def of_part(
        self, part: torch.Tensor, placements: Sequence[int], shape: Sequence[int], strides: Sequence[int]
    ) -> DTensor:
        """Return a tensor that is spread, of this process's part."""
        return DTensor.from_local(
            part,
            self.mesh,
            as_torch(placements),
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(strides),
        )

    def bytes_of(self, value: Any) -> int:
        """Return the bytes that this process has of a tensor."""
        return int(own_part(value).nbytes)

    def wrapped(self, form: Form, call: Call) -> Call:
        """Return a call that does the same also with tensors that are spread."""
        if form.function in _AS_THEY_ARE:
            return self._alias(call) if form.function in ("detach", ".data_of") else call
        if form.function in (".first_step", ".step"):
            return self._step(call, len(form.args[0]) if form.function == ".step" else 1)
        changes = not form.outs and form.tensors > 0 and form.function not in _NO_CHANGES
        run = self._change if changes else self._compute
        view = (form.function in VIEWING and base(form.function) not in COPYING) or form.function == ".getitem"

        def either(tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
            if self._group.mesh is None and not self._views:
                return call(tensors, numbers)
            for each in tensors:
                if isinstance(each, DTensor) or (self._views and hasattr(each, "loom_view")):
                    break
            else:
                return call(tensors, numbers)
            result = run(form, call, tensors, numbers)
            if view and all(each.dim() == 0 and each.dtype is not torch.bool for each in tensors[1:]):
                self._note_views(form, call, tensors, numbers, result)
            return result

        return either

    def keep_placements(self, leaf: torch.Tensor) -> None:
        """Let the gradients of a leaf be spread as it is."""
        if isinstance(leaf, DTensor):
            mesh, placements = leaf.device_mesh, leaf.placements
            leaf.register_hook(lambda grad: None if grad is None else _placed(grad, mesh, placements))

    def like(self, grad: Any, tensor: Any) -> Any:
        """Return a gradient spread as its tensor is."""
        if isinstance(tensor, DTensor):
            return _placed(grad, tensor.device_mesh, tensor.placements)
        return whole(grad)

    def _alias(self, call: Call) -> Call:
        """Return a call that gives another tensor with the same memory, of which the same views are known."""

        def aliased(tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
            (tensor,) = tensors
            result = call(tensors, numbers)
            if isinstance(tensor, DTensor):
                result.__dict__["loom_views"] = tensor.__dict__.setdefault("loom_views", [])
                view = getattr(tensor, "loom_view", None)
                if view is not None:
                    result.loom_view = view
                    view.base.__dict__.setdefault("loom_views", []).append(weakref.ref(result))
            return result

        return aliased

    def _step(self, call: Call, many: int) -> Call:
        """Return a step of an optimizer, after which the views of its parameters have their elements."""

        def step(tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
            result = call(tensors, numbers)
            for each in tensors[:many]:
                if isinstance(each, DTensor):
                    self._refresh(each)
            return result

        return step

    def _compute(self, form: Form, call: Call, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
        """Return what a call gives: with parts if `DTensor` can, else with whole tensors."""
        if not any(isinstance(each, DTensor) for each in tensors):
            return call(tensors, numbers)
        mesh = self.mesh
        function = form.function
        name = base(function)
        if OF_IMAGES.search(function) or (name == "layer_norm" and len(tensors) > 1):
            found = by_batch(function, call, tensors, numbers)
            return call(list(map(whole, tensors)), numbers) if found is None else found
        if name in BY_PARTS and not _fails(name, tensors) and not any(map(has_empty_part, tensors)):
            given = [everywhere(each, mesh) for each in tensors]
            try:
                if _RANDOM.search(function.rpartition(".")[2]):
                    with self._drawing(next(each.placements for each in given if is_spread(each))):
                        found = settled(call(given, numbers))
                else:
                    found = settled(call(given, numbers))
                # `mean(None, keepdim=True)` is said to be cut along a dimension of size 1, and is not (torch 2.13).
                if not any(map(has_empty_part, found if isinstance(found, tuple) else (found,))):
                    return found
            except Exception as error:
                if _OF_ONE_PROCESS.search(str(error)):
                    raise
        wholes = list(map(whole, tensors))
        result = call(wholes, numbers)
        if function in _COUNTING:  # running means and variances
            for each, changed in zip(tensors[1:], wholes[1:], strict=True):
                if isinstance(each, DTensor) and not each.requires_grad:
                    own_part(each).copy_(own_part(cut(changed, mesh, each.placements)))
        return result

    def _change(self, form: Form, call: Call, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
        """Change the first tensor in place, and with it every view of it."""
        target, *others = tensors
        view: _View | None = getattr(target, "loom_view", None)
        if view is None and not isinstance(target, DTensor):
            call([target, *map(whole, others)], numbers)
            return
        base = target if view is None else view.base
        mesh = self.mesh
        if torch.is_grad_enabled() and any(each.requires_grad for each in (base, *others)):
            views = _views_of(base)
            if not all(each.loom_view.in_graph or _follows(each, base) for each in views):
                raise RuntimeError(
                    "an operation in place on a tensor that is spread over processes is no part of a graph if one "
                    "of its views is one of several, or was made without gradients: compute a new tensor"
                )
            if view is not None and not view.in_graph:
                raise RuntimeError(
                    "a view that is one of several, or was made without gradients, is not changed in place as part "
                    "of a graph: compute a new tensor"
                )
            memory = whole(base).clone()
            call([memory if view is None else view.of(memory), *map(whole, others)], numbers)
            base.copy_(cut(memory, mesh, base.placements))
            for each in views:
                if each.loom_view.base is base and not _follows(each, base):
                    each.copy_(self._again(each))
            self._refresh(base)
            return
        by_parts = view is None and form.function in _IN_PLACE and not any(map(has_empty_part, tensors))
        if not by_parts or not _changed(call, base, others, numbers, mesh):
            memory = whole(base)
            call([memory if view is None else view.of(memory), *map(whole, others)], numbers)
            base._local_tensor.copy_(cut(memory, mesh, base.placements)._local_tensor)
            torch.autograd.graph.increment_version(base)
        self._refresh(base)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _refresh(self, base: DTensor) -> None:
        """Give the views of a tensor that has changed its elements."""
        for each in _views_of(base):
            own_part(each).copy_(own_part(self._again(each)))

    def _again(self, tensor: Any) -> Any:
        made: Any = tensor.loom_view.base
        for step in tensor.loom_view.path:
            made = self._compute(step.form, step.call, [made, *step.others], step.numbers)
            made = made if step.place is None else made[step.place]
        return made

    def _note_views(
        self, form: Form, call: Call, tensors: Sequence[Any], numbers: Sequence[Any], result: Any
    ) -> None:
        tensor, *others = tensors
        before: _View = getattr(tensor, "loom_view", None) or _View(tensor, ())
        several = isinstance(result, (tuple, list))
        self._views = True
        for place, each in enumerate(result if several else (result,)):
            step = _Step(form, call, others, tuple(numbers), place if several else None)
            in_graph = before.in_graph and not several and torch.is_grad_enabled()
            each.loom_view = _View(before.base, (*before.path, step), in_graph)
            known = before.base.__dict__.setdefault("loom_views", [])
            known[:] = [one for one in known if one() is not None]
            known.append(weakref.ref(each))

    @contextlib.contextmanager
    def _drawing(self, placements: Sequence[Placement]) -> Iterator[None]:
        """Draw other numbers for each part within, and go on together afterwards."""
        seed = int(torch.randint(2**62, ()).item())
        part = 0
        coordinate = self.mesh.get_coordinate() or []
        for at, size, placement in zip(coordinate, self.mesh.shape, placements, strict=True):
            if not isinstance(placement, Replicate):
                part = part * size + at + 1
        cuda = [torch.cuda.current_device()] if self.mesh.device_type == "cuda" else []
        with torch.random.fork_rng(cuda):
            torch.manual_seed(seed + part)
            yield


def _fails(function: str, tensors: Sequence[Any]) -> bool:
    """Whether the gradients of what `DTensor` computes from parts fail (torch 2.13)."""
    if function == "matmul" and tensors[0].dim() == 1 < tensors[1].dim():
        return True
    return (function == "pow" or function not in ELEMENTWISE) and any(
        each.is_complex() and each.requires_grad for each in tensors
    )


def _changed(call: Call, target: DTensor, others: Sequence[Any], numbers: Sequence[Any], mesh: DeviceMesh) -> bool:
    """Let each process change its part; return whether `DTensor` can. If not, nothing has changed."""
    try:
        call([target, *(everywhere(each, mesh) for each in others)], numbers)
    except Exception as error:
        if _OF_ONE_PROCESS.search(str(error)):
            raise
        return False
    return True


def _views_of(base: DTensor) -> list[Any]:
    return [each for known in base.__dict__.get("loom_views", ()) if (each := known()) is not None]


def _follows(view: Any, base: DTensor) -> bool:
    """Return whether torch knows that a tensor is a view of another: its history follows by itself."""
    return view._base is base


def _placed(grad: Any, mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
    """Return a gradient that is spread in a way."""
    if not isinstance(grad, DTensor):
        return cut(grad, mesh, placements)
    return grad if grad.placements == tuple(placements) else grad.redistribute(placements=placements)


def by_batch(function: str, call: Call, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
    """Return what a function gives if each process has some elements of a batch; None if they are cut otherwise.

    It is one of images, or ``layer_norm`` with weights. `DTensor` has no second gradients of that (torch 2.13).
    """
    like, *others = tensors
    if "layer_norm" in function:
        others = list(map(whole, others))
        batch = range(like.dim() - others[0].dim())
    elif (others and "conv" not in function) or like.dim() != (others[0].dim() if others else 4):
        return None
    else:
        batch = range(1)
    if not isinstance(like, DTensor) or any(isinstance(each, DTensor) for each in others) or has_empty_part(like):
        return None
    mesh, placements = like.device_mesh, like.placements
    if any(isinstance(each, Partial) or (isinstance(each, Shard) and each.dim not in batch) for each in placements):
        return None
    sums = [Partial() if isinstance(each, Shard) else each for each in placements]
    # Each process has the gradients of weights by its own elements: those are added up.
    weights = [everywhere(each, mesh).to_local(grad_placements=sums) for each in others]

    def of_all(part: Any) -> Any:
        shape = torch.Size((*like.shape[: len(batch)], *part.shape[len(batch) :]))
        strides = contiguous_strides(tuple(shape))
        return DTensor.from_local(part.contiguous(), mesh, placements, run_check=False, shape=shape, stride=strides)

    found = call([own_part(like), *weights], numbers)
    return settled([of_all(each) for each in found] if isinstance(found, (tuple, list)) else of_all(found))
