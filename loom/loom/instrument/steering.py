"""Values of an optimizer's parameter groups that are set from outside, on top of those of its schedule.

Between two steps `optimizer.param_groups` has the effective values, which scripts print and log. A scheduler, and
what saves or loads the optimizer's state, find the schedule's own values there, so that a schedule goes on as if
nothing had been set, and a restart from a checkpoint does not apply a factor twice. A value that the script itself
writes between two steps is the schedule's new one.

Torch's classes are patched when the first value is set, and are as they were until then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from loom.instrument.training import guarded

NAME = "PyTorch's schedules"

Values = list[Any]
"""The values of one key, one for each parameter group: numbers, tensors; None where it has none."""


class OptimizerOverrides:
    """The values of one optimizer that are set from outside.

    Args:
        optimizer: the optimizer, which outlives the overrides.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = ref(optimizer)
        self._changes: dict[str, Callable[[Values], Values]] = {}
        self._scheduled: dict[str, Values] = {}
        self._written: dict[str, Values] = {}
        """Marks of the effective values, by which a value that the script has written is told from them."""
        self._depth = 0

    def set(self, key: str, change: Callable[[Values], Values] | None) -> None:
        """Let a key have, in all groups, what ``change`` makes of the schedule's values; None: the schedule's."""
        self.enter()
        try:
            if change is None:
                self._changes.pop(key, None)
            else:
                self._changes[key] = change
        finally:
            self.leave()

    def follow(self, other: OptimizerOverrides) -> None:
        """Take over what is set in an optimizer in whose place this one is."""
        for key, change in other._changes.items():
            self.set(key, change)

    def change(self, key: str) -> Callable[[Values], Values] | None:
        """Return what `set` has set for a key; None if it has set nothing, or has given the schedule back."""
        return self._changes.get(key)

    def scheduled(self, key: str) -> Any:
        """Return the schedule's value of a key in the first group; None if the key is not overridden."""
        values = self._scheduled.get(key)
        return values[0] if values else None

    def enter(self) -> None:
        """Put the schedule's values into the groups, until `leave`, which takes the values there for them."""
        self._depth += 1
        if self._depth == 1:
            for key, values in self._read_written().items():
                for group, value in zip(self._groups(), values, strict=True):
                    _put(group, key, value)

    def leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._scheduled = {key: [_taken(value) for value in self._present(key)] for key in self._changes}
            self._put_effective()

    def before_step(self) -> None:
        """Take values that the script has written for the schedule's, and put the effective ones in their place."""
        scheduled = self._read_written()
        if scheduled is not self._scheduled:
            self._scheduled = scheduled
            self._put_effective()

    def _read_written(self) -> dict[str, Values]:
        """Return the schedule's values, with those that the script has written since; itself if there are none."""
        found = self._scheduled
        for key, values in self._scheduled.items():
            present, marks = self._present(key), self._written[key]
            if [_mark(value) for value in present] != marks:
                known = zip_longest(present, zip(values, marks, strict=True), fillvalue=(None, None))
                fresh = [value if _mark(now) == mark else _taken(now) for now, (value, mark) in known]
                found = {**found, key: fresh[: len(present)]}  # groups may have been added, or removed
        return found

    def _groups(self) -> list[dict[str, Any]]:
        return getattr(self._optimizer(), "param_groups", [])

    def _present(self, key: str) -> Values:
        return [group.get(key) for group in self._groups()]

    def _put_effective(self) -> None:
        for key, change in self._changes.items():
            for group, value in zip(self._groups(), change(self._scheduled[key]), strict=True):
                _put(group, key, value)
            self._written[key] = [_mark(value) for value in self._present(key)]


def _taken(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    present = group.get(key)
    if not isinstance(present, torch.Tensor):
        if key in group:
            group[key] = value
        return
    with torch.no_grad():  # in place: a captured graph reads this very tensor
        present.copy_(value) if isinstance(value, torch.Tensor) else present.fill_(value)


def _mark(value: Any) -> Any:
    """Return what tells a value from another one, without waiting for the device of a tensor."""
    return (id(value), value._version) if isinstance(value, torch.Tensor) else value


_overrides: WeakKeyDictionary[Any, OptimizerOverrides] = WeakKeyDictionary()


def overrides_of(optimizer: Any) -> OptimizerOverrides:
    """Return the overrides of an optimizer. The first call patches torch's classes."""
    _patch()
    if optimizer not in _overrides:
        _overrides[optimizer] = OptimizerOverrides(optimizer)
    return _overrides[optimizer]


def _find(optimizer: Any) -> OptimizerOverrides | None:
    """Return the overrides of an optimizer, or of the one that it is a wrapper of, such as Accelerate's."""
    for _ in range(3):
        if isinstance(optimizer, Optimizer) and (found := _overrides.get(optimizer)) is not None:
            return found
        optimizer = getattr(optimizer, "optimizer", None)
    return None


@guarded(NAME)
def _enter(found: OptimizerOverrides) -> None:
    found.enter()


@guarded(NAME)
def _leave(found: OptimizerOverrides, state: Any = None) -> None:
    if isinstance(state, dict):  # which shares tensors with the groups
        for group in state.get("param_groups", ()):
            group.update((key, _taken(group[key])) for key in found._changes if key in group)
    found.leave()


@guarded(NAME)
def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (found := _overrides.get(optimizer)) is not None:
        found.before_step()


def _on_schedule(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a scheduler or an optimizer that finds the schedule's values in the groups."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        of = self if isinstance(self, Optimizer) else getattr(self, "optimizer", args[0] if args else None)
        if (found := _find(kwargs.get("optimizer", of))) is None:
            return function(self, *args, **kwargs)
        result = None
        _enter(found)
        try:
            result = function(self, *args, **kwargs)
            return result
        finally:
            _leave(found, result)

    return call


def _patch_scheduler(kind: type) -> None:
    for name in ("__init__", "step"):
        if name in vars(kind):
            setattr(kind, name, _on_schedule(vars(kind)[name]))


@functools.cache
def _patch() -> None:
    register_optimizer_step_pre_hook(_before_step)
    for name in ("state_dict", "load_state_dict"):
        setattr(Optimizer, name, _on_schedule(vars(Optimizer)[name]))
    kinds = {LRScheduler}
    while missing := {one for kind in kinds for one in kind.__subclasses__()} - kinds:
        kinds |= missing
    for kind in kinds:
        _patch_scheduler(kind)

    def patch_later(kind: type[Any], /, **options: Any) -> None:
        super(LRScheduler, kind).__init_subclass__(**options)
        _patch_scheduler(kind)

    LRScheduler.__init_subclass__ = classmethod(patch_later)
