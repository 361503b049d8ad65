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
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from loom.tensors import methods  # noqa: F401 - the operations say which of them are views
from loom.tensors.backend.group import Group
from loom.tensors.commands import Form
from loom.tensors.metas import contiguous_strides
from loom.tensors.op import VIEWS
from loom.tensors.placements import WHOLE

Call = Callable[[Sequence[Any], Sequence[Any]], Any]

_RANDOM = re.compile("drop|rand|bernoulli|multinomial|normal_|poisson|exponential|uniform|geometric|cauchy")
"""Functions that draw random numbers, by their names."""

_OWN_WITH_PARTS = frozenset({".getitem", ".linear_backward", ".matmul_backward", ".watch"})
"""The backend's own functions that do nothing in place within."""

_NO_CHANGES = frozenset({".free", ".keep", ".watch"})

_ELEMENTWISE = frozenset(
    f"Tensor.{name}_"
    for name in (
        *("add", "sub", "mul", "div", "copy", "zero", "fill", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "pow"),
        *("relu", "sigmoid", "tanh", "clamp", "addcmul", "addcdiv", "lerp", "reciprocal", "square"),
    )
)
"""What changes each element by those in its place, so that each process can change its part."""

_OF_ONE_PROCESS = re.compile("memory|[Cc]onnection|[Tt]imed out|gloo|NCCL|socket|peer")
"""Errors that other processes may not have."""

_SENT = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
)
"""What gloo sends; NCCL more."""

warnings.filterwarnings("ignore", message="DTensor random operators")


class _Step(NamedTuple):
    """A call that gives a view of a tensor."""

    form: Form
    call: Call
    others: Sequence[Any]
    """Further tensors that it takes: numbers of an index."""
    numbers: Sequence[Any]
    place: int | None
    """Which of its results; None if there is one."""


class _View(NamedTuple):
    """How a view was made of a tensor of which each process has a part."""

    base: DTensor
    path: tuple[_Step, ...]

    def of(self, tensor: Any) -> Any:
        """Make the same view of another tensor."""
        for step in self.path:
            made = step.call([tensor, *map(_whole, step.others)], step.numbers)
            tensor = made if step.place is None else made[step.place]
        return tensor


class Sharding:
    """The calls of one worker, where tensors may be spread over the processes of a group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._views = False
        """Whether there were views of tensors that are spread: those know how they were made."""

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
        wanted, mesh, given = _placements(placements), self.mesh, tensor.contiguous()
        if isinstance(given, DTensor) and given.dtype in _SENT:
            found = given.redistribute(placements=wanted)
        else:
            found = _parts(_whole(given), mesh, wanted)
        made: torch.Tensor = _settled(found)
        return made.clone() if _local(made).data_ptr() == _local(tensor).data_ptr() else made

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a matrix of which each process has some rows; one that is spread already as it is."""
        if isinstance(tensor, DTensor):
            return tensor
        return _parts(tensor, self.mesh, [Shard(0)] * self.mesh.ndim)

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
        wanted, mesh = _placements(placements), self.mesh
        local, _ = compute_local_shape_and_global_offset(torch.Size(size), mesh, wanted)
        with self._drawing(wanted) if function.startswith("rand") else contextlib.nullcontext():
            part = getattr(torch, function)(local, *args, device=device, **kw)
        strides = contiguous_strides(tuple(size))
        return _settled(
            DTensor.from_local(part, mesh, wanted, run_check=False, shape=torch.Size(size), stride=strides)
        )

    def whole(self, value: Any) -> Any:
        """Return all of a tensor, with the strides that it would have in one process."""
        return _whole(value)

    def placements_of(self, value: Any) -> tuple[int, ...]:
        """Return placements as they travel; none of a tensor that every process has whole."""
        if not isinstance(value, DTensor):
            return ()
        return tuple(WHOLE if isinstance(each, Replicate) else each.dim for each in value.placements)

    def part_of(self, value: DTensor) -> torch.Tensor:
        """Return this process's part of a tensor that is spread."""
        part: torch.Tensor = _local(value)
        return part

    def of_part(
        self, part: torch.Tensor, placements: Sequence[int], shape: Sequence[int], strides: Sequence[int]
    ) -> DTensor:
        """Return a tensor that is spread, of this process's part."""
        return DTensor.from_local(
            part,
            self.mesh,
            _placements(placements),
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(strides),
        )

    def bytes_of(self, value: Any) -> int:
        """Return the bytes that this process has of a tensor."""
        return int(_local(value).nbytes)

    def wrapped(self, form: Form, call: Call) -> Call:
        """Return a call that does the same also with tensors that are spread."""
        changes = not form.outs and form.tensors > 0 and form.function not in _NO_CHANGES
        run = self._change if changes else self._compute
        view = form.function in VIEWS or form.function == ".getitem"

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

    def _compute(self, form: Form, call: Call, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
        """Return what a call gives: with parts if `DTensor` can, else with whole tensors."""
        if not any(isinstance(each, DTensor) for each in tensors):
            return call(tensors, numbers)
        mesh = self.mesh
        function = form.function
        if not function.startswith(".") or function in _OWN_WITH_PARTS:
            given = [_everywhere(each, mesh) for each in tensors]
            try:
                if _RANDOM.search(function.rpartition(".")[2]):
                    with self._drawing(next(each.placements for each in given if _is_spread(each))):
                        return _settled(call(given, numbers))
                return _settled(call(given, numbers))
            except Exception as error:
                if _OF_ONE_PROCESS.search(str(error)):
                    raise
        return call(list(map(_whole, tensors)), numbers)

    def _change(self, form: Form, call: Call, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
        """Change the first tensor in place, and with it every view of it."""
        target, *others = tensors
        view: _View | None = getattr(target, "loom_view", None)
        if view is None and not isinstance(target, DTensor):
            call([target, *map(_whole, others)], numbers)
            return
        base = target if view is None else view.base
        mesh = self.mesh
        if view is not None or form.function not in _ELEMENTWISE or not _changed(call, base, others, numbers, mesh):
            memory = _whole(base)
            call([memory if view is None else view.of(memory), *map(_whole, others)], numbers)
            base._local_tensor.copy_(_parts(memory, mesh, base.placements)._local_tensor)
        for each in _views_of(base):
            _local(each).copy_(_local(self._again(each)))

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
            each.loom_view = _View(before.base, (*before.path, step))
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


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    if value.dtype.is_complex:
        return torch.view_as_complex(_whole(_of_parts(value, torch.view_as_real(_local(value)), 2)))
    if value.dtype not in _SENT:
        return _whole(_of_parts(value, _local(value).to(torch.int64))).to(value.dtype)
    return _as_strided(value.redistribute(placements=[Replicate()] * value.device_mesh.ndim))


def _of_parts(like: DTensor, part: torch.Tensor, *more: int) -> DTensor:
    """Return a tensor that is spread as another, of this process's part; it may have one more dimension."""
    shape = (*like.shape, *more)
    strides = contiguous_strides(shape) if more else like.stride()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


def _placements(packed: Sequence[int]) -> list[Placement]:
    return [Replicate() if each == WHOLE else Shard(each) for each in packed]


def _parts(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return the parts of a tensor that every process has whole; nothing is sent."""
    return distribute_tensor(tensor.detach(), mesh, placements, src_data_rank=None)


def _everywhere(value: Any, mesh: DeviceMesh) -> Any:
    """Return a plain tensor as one that each process has whole."""
    if isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
        return value
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _is_spread(value: Any) -> bool:
    return isinstance(value, DTensor) and not all(isinstance(each, Replicate) for each in value.placements)


def _settled(value: Any) -> Any:
    """Add up partial sums, and make what no dimension cuts plain."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_settled, value))
    if not isinstance(value, DTensor):
        return value
    placements = [Replicate() if isinstance(each, Partial) else each for each in value.placements]
    if placements != list(value.placements):
        value = value.redistribute(placements=placements)
    return value if _is_spread(value) else _as_strided(value)


def _as_strided(value: DTensor) -> torch.Tensor:
    local = _local(value)
    if local.stride() == value.stride():
        return local
    return local.new_empty_strided(value.shape, value.stride()).copy_(local)


def _local(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    local = value._local_tensor
    return local.wait() if hasattr(local, "wait") else local


def _changed(call: Call, target: DTensor, others: Sequence[Any], numbers: Sequence[Any], mesh: DeviceMesh) -> bool:
    """Let each process change its part; return whether `DTensor` can. If not, nothing has changed."""
    try:
        call([target, *(_everywhere(each, mesh) for each in others)], numbers)
    except Exception as error:
        if _OF_ONE_PROCESS.search(str(error)):
            raise
        return False
    return True


def _views_of(base: DTensor) -> list[Any]:
    return [each for known in base.__dict__.get("loom_views", ()) if (each := known()) is not None]
