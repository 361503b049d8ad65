"""PyTorch: a step of the primary optimizer, the first to step, is a step boundary of any training loop.

The numbers in `param_groups` can be read and set. Further values are sampled about once a second, because they cost
more: none of them waits for a device.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import numbers
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from loom.branches.branch import own_branch
from loom.instrument.branching import check_loaded
from loom.instrument.imports import when_imported
from loom.instrument.training import HookedTraining, StepSource, guarded, on_change, training

if TYPE_CHECKING:
    from loom.instrument.steering import OptimizerOverrides, Values

_log = logging.getLogger("loom")

NAME = "PyTorch's optimizers"

SAMPLE_EVERY = 1.0
"""Seconds between two samples, at least."""

MOST_OF_TIME = 0.001
"""The share of the training's time that samples may take; what takes longer is sampled less often."""

MAX_OPTIMIZERS = 8
"""Optimizers of a process that can be steered; a program that has one for each parameter has many."""

SILENT_AFTER = 100
"""Steps of another optimizer without one of the primary one after which it becomes the primary one."""

_NOT_OFFERED = ("params", "lr", "initial_lr")


def hook(optimizers: ModuleType) -> None:
    """Hook ``torch.optim.optimizer``."""
    _steps.register(optimizers)
    # A compiled step calls the hooks, instead of having them compiled.
    when_imported("torch._dynamo.trace_rules", lambda rules: rules.add("loom"))


class OptimizerSteps:
    """The steps of this process's optimizers, the first of which is the primary one.

    All ranks of a job must pass the same boundaries, so nothing here depends on the time, or on the moment at which
    a rank collects its garbage.
    """

    def __init__(self) -> None:
        self._optimizers: list[HookedOptimizer] = []  # in the order of their indices; the first is the primary one
        self._seen: WeakKeyDictionary[Any, HookedOptimizer] = WeakKeyDictionary()
        self._primary: Callable[[], Any] = lambda: None
        self._outer: int | None = None  # the id of the optimizer within whose step the program is
        self._inner = 0  # the calls of its class's step within that of a class derived from it
        self._count = 0
        self._first = 0  # the step from which a branch of a plain loop counts on
        self._begins_branch = own_branch() is not None
        self._samples = Samples()
        on_change(self._change)

    def _change(self) -> None:
        """Let the next optimizer to step be the primary one: those of a training before may still be there."""
        self._primary = lambda: None
        self._optimizers, self._seen = [], WeakKeyDictionary()

    def register(self, optimizers: ModuleType) -> Callable[[], None]:
        """Register the hooks in ``torch.optim.optimizer``; return what removes them."""
        before = optimizers.register_optimizer_step_pre_hook(self.begins)
        after = optimizers.register_optimizer_step_post_hook(self.stepped)

        def remove() -> None:
            before.remove()
            after.remove()

        return remove

    @guarded(NAME, boundaries=True)
    def begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note that an optimizer begins a step: one made anew takes over what was set, before it makes a step."""
        if _is_container(optimizer):
            return
        if self._outer is not None and _is_nested():
            self._inner += self._outer == id(optimizer)
            return
        self._outer, self._inner = id(optimizer), 0
        if self._begins_branch and not _is_initialisation():
            self.begin_branch(optimizer)
        if self._count and optimizer is not self._primary() and optimizer not in self._seen:
            self._introduce(optimizer)

    @guarded(NAME, boundaries=True)
    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note a step that an optimizer has made."""
        if self._outer not in (None, id(optimizer)) or _is_container(optimizer):
            return  # a part of another one's step, such as ZeroRedundancyOptimizer's
        if self._inner:
            self._inner -= 1
            return
        self._outer = None
        if optimizer is not self._primary() and not self._stands_in(optimizer):
            return
        self._count += 1
        here = training()
        if (values := self._samples.take(optimizer)) is not None:
            here.log(values)
        if here.owns(StepSource.TORCH):
            here.publish(self._first + self._count)
        here.boundary()

    def begin_branch(self, optimizer: Any) -> None:
        """Apply the values of a branch before the first step of its first optimizer.

        Raises:
            SystemExit: the program has loaded no checkpoint.
        """
        if not self._begins_branch:
            return
        self._begins_branch = False
        self._first = check_loaded()
        here = training()
        self.expect(optimizer)
        here.take_branch_values()

    def expect(self, optimizer: Any) -> None:
        """Offer the keys of an optimizer that is about to step for the first time."""
        if optimizer not in self._seen and not _is_container(optimizer) and not _is_initialisation():
            self._introduce(optimizer)

    def _introduce(self, optimizer: Any) -> None:
        """Offer the keys of an optimizer that has not stepped before.

        If it has parameters of an earlier one, the script has made that one anew, and it gets its index.
        """
        made = self._seen[optimizer] = HookedOptimizer(optimizer)
        for place, one in enumerate(self._optimizers):
            if made.succeeds(one):
                return self._put(place, made)
        if self._primary() is not None and _in_group():
            gc.collect()  # else the former one may be gone in some ranks only
        self._put(0 if self._primary() is None else len(self._optimizers), made)

    def _stands_in(self, optimizer: Any) -> bool:
        """Return whether an optimizer becomes the primary one: it is the first, or that one is silent."""
        made = self._seen.get(optimizer)
        if made is None:
            if _is_initialisation():
                return False
            self._introduce(optimizer)
            return True
        if made not in self._optimizers:  # another one has its index, and it steps all the same
            self._put(len(self._optimizers), made)
        if made.count_step(self._count) <= SILENT_AFTER:
            return False
        if made in self._optimizers:
            self._put(self._optimizers.index(made), self._optimizers[0])
        self._put(0, made)
        return True

    def _put(self, place: int, made: HookedOptimizer) -> None:
        """Give an optimizer an index, and offer its keys."""
        if place >= MAX_OPTIMIZERS:
            return
        self._optimizers[place : place + 1] = [made]
        if place == 0:
            self._primary = made.optimizer
            made.offer(training(), "")
        if len(self._optimizers) > 1:
            made.offer(training(), f"@{place}")
        if place == 1:
            self._optimizers[0].offer(training(), "@0")


def _is_container(optimizer: Any) -> bool:
    """Return whether an optimizer has no numbers of its own: it lets others step, such as torchtitan's."""
    groups = optimizer.param_groups
    return not groups or groups[0].keys() == {"params"}


def _is_nested() -> bool:
    """Return whether the step that begins is within another one: torch's frame around it is there twice."""
    frame = sys._getframe(3)  # torch's, which has called the hook
    code, outer = frame.f_code, frame.f_back
    while outer is not None and outer.f_code is not code:
        outer = outer.f_back
    return outer is not None


def _in_group() -> bool:
    """Return whether this process is a rank of several."""
    distributed = sys.modules.get("torch.distributed")
    found = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return found and distributed.get_world_size() > 1  # type: ignore[union-attr]


def _is_initialisation() -> bool:
    """Return whether a checkpoint is about to be loaded: for that torch makes a step that changes nothing."""
    frame, depth = sys._getframe(1), 0
    while frame.f_back is not None and depth < 20:
        if frame.f_code.co_name == "_init_optim_state":
            return True
        frame, depth = frame.f_back, depth + 1
    return False


class HookedOptimizer:
    """The numbers of one of torch's optimizers, as keys of the configuration."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer: Callable[[], Any] = ref(optimizer)
        self._kind = type(optimizer)
        self._parameters = {id(one): ref(one) for group in optimizer.param_groups for one in group["params"]}
        self._overrides: OptimizerOverrides | None = None
        self._factor: float | None = None
        self._in_backward = _steps_in_backward()
        self._last: dict[str, Any] = {}  # the numbers as last read, which outlive the optimizer
        self._steps = -1, 0  # of the primary optimizer at the last step, and of this one since that

    def count_step(self, primary: int) -> int:
        """Count a step; return how many there were since the primary optimizer made its last one, ``primary``."""
        self._steps = primary, self._steps[1] + 1 if self._steps[0] == primary else 1
        return self._steps[1]

    def succeeds(self, other: HookedOptimizer) -> bool:
        """Return whether this optimizer has parameters of another; if it is of its kind, take over what was set."""
        theirs = other._parameters
        if not any(id in theirs and theirs[id]() is one() for id, one in self._parameters.items()):
            return False
        if self._kind is other._kind and other._overrides is not None:
            from loom.instrument.steering import overrides_of

            self._overrides, self._factor = overrides_of(self.optimizer()), other._factor
            self._overrides.follow(other._overrides)
        return True

    def offer(self, here: HookedTraining, suffix: str) -> None:
        """Offer the keys, each with a suffix, such as ``@1``."""
        rate, saved, former = partial(self._number, "lr"), partial(self._saved, "lr"), partial(self._former, suffix)
        here.offer(f"learning_rate{suffix}", float | None, rate, self.set_learning_rate, saved, former)
        here.offer(f"learning_rate_factor{suffix}", float, lambda: self._factor, self.set_factor, saved, former)
        here.offer(f"learning_rate_schedule{suffix}", float, self._schedule)
        for key in self._numbers():
            kind = list[float] if isinstance(self._number(key), list) else float
            number, saved = partial(self._number, key), partial(self._saved, key)
            here.offer(f"{key}{suffix}", kind, number, self._setter(key), saved)

    def set_learning_rate(self, value: float | None) -> None:
        """Use a fixed value in place of the schedule's; None: the schedule's again."""
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"a learning rate is a number, 0 or more, not {value}")
        self._set("lr", None if value is None else lambda scheduled: [value for _ in scheduled])
        self._factor = None

    def set_factor(self, value: float) -> None:
        """Use the schedule's value times a factor, in place of a fixed value."""
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"a factor is a number, 0 or more, not {value}")
        self._set("lr", lambda scheduled: [one * value for one in scheduled])
        self._factor = value

    def _saved(self, key: str) -> Callable[[], None]:
        """Return a function that brings back what holds now for a key of the groups: a value, or the schedule."""
        change = None if self._overrides is None else self._overrides.change(key)
        factor = self._factor

        def restore() -> None:
            self._set(key, change)
            if key == "lr":
                self._factor = factor

        return restore

    def _former(self, suffix: str) -> Mapping[str, Any]:
        """Return what has to be set to have the present learning rate again: a factor, a fixed value, or None."""
        if self._factor is not None:
            return {f"learning_rate_factor{suffix}": self._factor}
        is_fixed = self._overrides is not None and self._overrides.change("lr") is not None
        return {f"learning_rate{suffix}": self._number("lr") if is_fixed else None}

    def _setter(self, key: str) -> Callable[[Any], None]:
        def change(value: Any) -> None:
            present = self._number(key)
            if not all(map(math.isfinite, value if isinstance(value, list) else [value])):
                raise ValueError(f"{key} is finite, not {value}")
            if isinstance(present, list) and len(value) != len(present):
                raise ValueError(f"{key} has {len(present)} numbers, not {len(value)}")
            new = tuple(value) if isinstance(present, list) else value
            if type(present) is int and value == int(value):
                new = int(value)
            self._check(key, new)
            # A group without weight decay, such as that of biases, keeps none.
            self._set(key, lambda scheduled: [new if one or not any(scheduled) else one for one in scheduled])

        return change

    def _check(self, key: str, value: Any) -> None:
        """Raise what torch's own optimizer raises if it is made with a value."""
        if self._kind.__module__.startswith("torch.optim."):
            with contextlib.suppress(TypeError):  # an option of another name
                self._kind([sys.modules["torch"].zeros(1, 1)], **{key: value})

    def _set(self, key: str, change: Callable[[Values], Values] | None) -> None:
        if (optimizer := self.optimizer()) is None:
            raise ValueError("the optimizer is gone")
        if key == "lr" and all(group.get("lr") is None for group in optimizer.param_groups):
            raise ValueError(f"{self._kind.__name__} has no learning rate in its param_groups: it computes its own")
        if self._in_backward:
            raise ValueError("the optimizer steps within the backward pass, where parameters differ in it")
        from loom.instrument.steering import overrides_of

        self._overrides = overrides_of(optimizer)
        self._overrides.set(key, change)

    def _numbers(self) -> list[str]:
        groups = getattr(self.optimizer(), "param_groups", [])
        keys = dict.fromkeys(key for group in groups for key in group if key not in _NOT_OFFERED)
        return [key for key in keys if self._number(key) is not None]

    def _number(self, key: str) -> Any:
        """Return the value of the first group in which it is not 0, as a number or a list of numbers, or None.

        Of an optimizer that is gone, as with the function that has made it, it is the last one.
        """
        if (optimizer := self.optimizer()) is not None:
            values = [group.get(key) for group in optimizer.param_groups] or [None]
            self._last[key] = _plain(values[0] if key == "lr" else next(filter(None, values), values[0]))
        return self._last.get(key)

    def _schedule(self) -> Any:
        return None if self._overrides is None else _plain(self._overrides.scheduled("lr"))


def _plain(value: Any) -> Any:
    """Return a number, also one of numpy's, or a list of numbers; None for everything else."""
    if type(value) in (float, int):
        return value
    if isinstance(value, numbers.Real):
        return None if isinstance(value, bool) else float(value)
    if isinstance(value, (tuple, list)):
        found = [_plain(one) for one in value]
        return found if found and all(type(one) in (float, int) for one in found) else None
    if isinstance(value, sys.modules["torch"].Tensor) and value.device.type == "cpu" and value.numel() == 1:
        return float(value.item())
    return None  # also of a tensor on a device, for which reading it would wait


def _steps_in_backward() -> bool:
    engine = sys.modules["torch"]._C
    return bool(getattr(engine, "_current_graph_task_id", lambda: -1)() != -1)


class Samples:
    """Values that cost more than a step may, taken now and then. One that cannot be had is not tried again."""

    def __init__(self) -> None:
        self._next = 0.0  # when the next samples are due
        self._took = 0.0  # seconds that the last ones have taken
        self._kinds: list[Callable[[Any], Mapping[str, Any]]] = [
            _learning_rate,
            _gradient_norm,
            _memory,
            SampleRate().sample,
        ]

    def take(self, optimizer: Any) -> dict[str, Any] | None:
        """Return samples if they are due."""
        now = monotonic()
        if now < self._next:
            return None
        values: dict[str, Any] = {}
        if not _is_capturing():
            for kind in list(self._kinds):
                try:
                    values.update(kind(optimizer))
                except Exception as error:  # noqa: BLE001 - whatever another version of torch raises
                    self._kinds.remove(kind)
                    _log.debug("not sampled any more: %r", error)
        before, self._took = self._took, monotonic() - now
        # The first sample imports, and one that took longer than the one before may have lost the processor.
        self._next = now + max(SAMPLE_EVERY, min(before, self._took) / MOST_OF_TIME)
        return values


def _learning_rate(optimizer: Any) -> Mapping[str, Any]:
    """Return the learning rate of the first group; a tensor on a device is read later, by another thread."""
    value = optimizer.param_groups[0].get("lr")
    return {} if value is None else {"learning_rate": value.detach().clone() if hasattr(value, "detach") else value}


def _gradient_norm(optimizer: Any) -> Mapping[str, Any]:
    """Return the norm of the gradients, as a tensor on their device; nothing if this process has parts of them."""
    torch = sys.modules["torch"]
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    whole = all(type(one.grad) is torch.Tensor and not hasattr(one, "_fsdp_flattened") for one in parameters)
    if not parameters or not whole or getattr(optimizer, "grad_scale", None) is not None:
        return {}
    with torch.no_grad():
        return {"grad_norm": torch.nn.utils.get_total_norm([one.grad for one in parameters])}


def _memory(optimizer: Any) -> Mapping[str, Any]:
    """Return the bytes that torch has on the GPU, or those that this process has if it uses none."""
    cuda = sys.modules["torch"].cuda
    if cuda.is_initialized():
        return {"memory_bytes": float(cuda.memory_allocated())}
    with open("/proc/self/statm") as file:
        return {"memory_bytes": float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}


def _is_capturing() -> bool:
    """Return whether a graph of the GPU's is recorded, which would repeat what is sampled meanwhile."""
    cuda = sys.modules["torch"].cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


_loading: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
"""The iterators of loaders for training: samples in a batch, and the batches given when the rate was last taken."""


def hook_loaders(module: ModuleType) -> None:
    """Hook ``torch.utils.data.dataloader``: note each iterator that is made where gradients are computed."""

    def new(kind: Any, *args: Any, **kwargs: Any) -> Any:
        made = object.__new__(kind)
        # Another library's loader, such as torchdata's, may have further arguments.
        if (loader := args[0] if args else kwargs.get("loader")) is not None:
            note(made, loader)
        return made

    @guarded("the loaders of samples")
    def note(made: Any, loader: Any) -> None:
        if sys.modules["torch"].is_grad_enabled():  # loaders for evaluation are mostly read without
            _loading[made] = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 0, 0

    # Unlike a function around `__init__`, this is in no traceback, and changes no warning's line.
    module._BaseDataLoaderIter.__new__ = new


class SampleRate:
    """The samples a second that loaders give to this process."""

    def __init__(self) -> None:
        self._at = 0.0

    def sample(self, optimizer: Any) -> Mapping[str, Any]:
        now, samples = monotonic(), 0
        for loading, (size, before) in list(_loading.items()):
            _loading[loading] = size, loading._num_yielded
            if before and loading._num_yielded > before:
                samples += (loading._num_yielded - before) * size
        passed, self._at = now - self._at, now
        return {"samples_per_second": samples / passed} if samples else {}


_steps = OptimizerSteps()


def begin_branch(optimizer: Any) -> None:
    """Apply the values of a branch, if this process is of one and has not, for a library that begins to train.

    Args:
        optimizer: its optimizer, which may be in one of Accelerate's.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if inner is not None and not _is_container(inner):
        _steps.begin_branch(inner)


def before_steps(function: Callable[[], bool]) -> None:
    """Call a function before each step of an optimizer, which has offered its keys then, until it returns True."""

    @guarded(NAME)
    def call(optimizer: Any, args: Any, kwargs: Any) -> None:
        _steps.expect(optimizer)
        if function():
            registered.remove()

    registered = sys.modules["torch.optim.optimizer"].register_optimizer_step_pre_hook(call)
