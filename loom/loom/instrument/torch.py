"""PyTorch: a step of the primary optimizer, the first to step, is a step boundary of any training loop.

The numbers in `param_groups` can be read and set. Further values are sampled about once a second, because they cost
more: none of them waits for a device.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

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

SILENT_AFTER = 1000
"""Steps of other optimizers without one of the primary one after which another becomes the primary one."""

_NOT_OFFERED = ("params", "lr", "initial_lr")


def hook(optimizers: ModuleType) -> None:
    """Hook ``torch.optim.optimizer``."""
    optimizers.register_optimizer_step_post_hook(OptimizerSteps().stepped)
    # A compiled step calls the hook, instead of having it compiled.
    when_imported("torch._dynamo.trace_rules", lambda rules: rules.add("loom"))


class OptimizerSteps:
    """The steps of this process's optimizers, the first of which is the primary one."""

    def __init__(self) -> None:
        self._optimizers: list[HookedOptimizer] = []
        self._seen: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        self._primary: Callable[[], Any] = lambda: None
        self._count = 0
        self._since = 0  # steps of other optimizers since the last one of the primary one
        self._samples = Samples()
        on_change(self._change)

    def _change(self) -> None:
        """Let the next optimizer to step be the primary one: that of a training before may still be there."""
        self._primary = lambda: None

    @guarded(NAME, boundaries=True)
    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note a step that an optimizer has made."""
        if optimizer is not self._primary() and not self._introduce(optimizer):
            return
        self._count += 1
        self._since = 0
        here = training()
        if (values := self._samples.take(optimizer)) is not None:
            here.log(values)
        if here.owns(StepSource.TORCH):
            here.publish(self._count)
        here.boundary()

    def _introduce(self, optimizer: Any) -> bool:
        """Offer the keys of an optimizer that has not stepped before; return whether it is the primary one now."""
        self._since += 1
        primary = self._primary() is None or self._since > SILENT_AFTER
        if optimizer in self._seen and not primary:
            return False
        if not self._count and _is_initialisation():
            return False
        self._seen[optimizer] = None
        if primary:
            self._primary = ref(optimizer)
            self._optimizers[:1] = [HookedOptimizer(optimizer)]
            self._optimizers[0].offer(training(), "")
        elif len(self._optimizers) < MAX_OPTIMIZERS:
            self._optimizers.append(HookedOptimizer(optimizer))
            self._optimizers[0].offer(training(), "@0")
            self._optimizers[-1].offer(training(), f"@{len(self._optimizers) - 1}")
        return primary


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
        self._optimizer = ref(optimizer)
        self._overrides: OptimizerOverrides | None = None
        self._factor: float | None = None
        self._in_backward = _steps_in_backward()

    def offer(self, here: HookedTraining, suffix: str) -> None:
        """Offer the keys, each with a suffix, such as ``@1``."""
        here.offer(f"learning_rate{suffix}", float | None, partial(self._number, "lr"), self.set_learning_rate)
        here.offer(f"learning_rate_factor{suffix}", float, lambda: self._factor, self.set_factor)
        here.offer(f"learning_rate_schedule{suffix}", float, self._schedule)
        for key in self._numbers():
            kind = list[float] if isinstance(self._number(key), list) else float
            here.offer(f"{key}{suffix}", kind, partial(self._number, key), self._setter(key))

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

    def _setter(self, key: str) -> Callable[[Any], None]:
        def change(value: Any) -> None:
            present = self._number(key)
            if isinstance(present, list) and len(value) != len(present):
                raise ValueError(f"{key} has {len(present)} numbers, not {len(value)}")
            new = tuple(value) if isinstance(present, list) else value
            if type(present) is int and value == int(value):
                new = int(value)
            # A group without weight decay, such as that of biases, keeps none.
            self._set(key, lambda scheduled: [new if one or not any(scheduled) else one for one in scheduled])

        return change

    def _set(self, key: str, change: Callable[[Values], Values] | None) -> None:
        if (optimizer := self._optimizer()) is None:
            raise ValueError("the optimizer is gone")
        if self._in_backward:
            raise ValueError("the optimizer steps within the backward pass, where parameters differ in it")
        from loom.instrument.steering import overrides_of

        self._overrides = overrides_of(optimizer)
        self._overrides.set(key, change)

    def _numbers(self) -> list[str]:
        groups = getattr(self._optimizer(), "param_groups", [])
        keys = dict.fromkeys(key for group in groups for key in group if key not in _NOT_OFFERED)
        return [key for key in keys if self._number(key) is not None]

    def _number(self, key: str) -> Any:
        """Return the value of the first group in which it is not 0, as a number or a list of numbers, or None."""
        values = [group.get(key) for group in getattr(self._optimizer(), "param_groups", [])] or [None]
        return _plain(values[0] if key == "lr" else next(filter(None, values), values[0]))

    def _schedule(self) -> Any:
        return None if self._overrides is None else _plain(self._overrides.scheduled("lr"))


def _plain(value: Any) -> Any:
    if type(value) in (float, int):
        return value
    if isinstance(value, tuple) and value and all(type(one) in (float, int) for one in value):
        return list(value)
    if hasattr(value, "item") and value.device.type == "cpu" and value.numel() == 1:
        return float(value.item())
    return None  # also of a tensor on a device, for which reading it would wait


def _steps_in_backward() -> bool:
    engine = sys.modules["torch"]._C
    return bool(getattr(engine, "_current_graph_task_id", lambda: -1)() != -1)


class Samples:
    """Values that cost more than a step may, taken now and then. One that cannot be had is not tried again."""

    def __init__(self) -> None:
        self._next = 0.0  # when the next samples are due
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
        self._next = now + max(SAMPLE_EVERY, (monotonic() - now) / MOST_OF_TIME)
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

    def new(kind: Any, loader: Any) -> Any:
        made = object.__new__(kind)
        if sys.modules["torch"].is_grad_enabled():  # loaders for evaluation are mostly read without
            _loading[made] = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 0, 0
        return made

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
