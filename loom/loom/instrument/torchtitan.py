"""torchtitan's Trainer: its steps, the metrics that it logs, and checkpoints and validations on command.

Its loop asks the Trainer before each step whether to go on, after the last step's checkpoint and validation. That
is the one place that is hooked; the metrics are those that the Trainer gives to its logger, on every rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

from loom.instrument.branching import tell_folder
from loom.instrument.postponed import Postponed
from loom.instrument.training import StepSource, guarded, training
from loom.threadlet.handlers import Deferred

NAME = "torchtitan"


def hook(module: Any) -> None:
    """Hook ``torchtitan.trainer``."""
    goes_on = module.Trainer.should_continue_training
    loops: WeakKeyDictionary[Any, TitanLoop] = WeakKeyDictionary()

    @functools.wraps(goes_on)
    def ask(self: Any, *args: Any, **kwargs: Any) -> bool:
        if self not in loops:
            loops[self] = TitanLoop(self)
        stops = loops[self].between_steps()
        return bool(goes_on(self, *args, **kwargs)) and not stops

    module.Trainer.should_continue_training = ask


class TitanLoop:
    """The loop of one Trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer: Callable[[], Any] = ref(trainer)
        self._step: int | None = None
        self._postponed = Postponed()
        self._interval: int | None = None  # between checkpoints, while one is asked for

    @guarded(NAME)
    def between_steps(self) -> bool:
        """Report the step that was made; return whether to stop."""
        trainer, here = self._trainer(), training()
        if not here.owns(StepSource.TORCHTITAN):
            return False
        if self._step is None:
            self._begin(trainer)
            self._step = trainer.step
        elif trainer.step != self._step:
            self._report(trainer.step)
        if self._interval is not None:
            trainer.checkpointer.interval, self._interval = self._interval, None
        self._postponed.settle(trainer.step, "torchtitan went on without it")
        return here.threadlet.should_stop

    def _report(self, step: int, metrics: dict[str, Any] | None = None) -> None:
        self._step = step
        training().publish(step, max_step=self._trainer().config.training.steps, metrics=metrics)

    def _begin(self, trainer: Any) -> None:
        here = training()
        here.on_stop(lambda: None)  # `between_steps` sees it
        here.offer_action("save", self._save, self._why_no_save)
        here.offer_action("evaluate", lambda: self._postponed.ask("evaluate"), self._why_no_validation)
        if folder := getattr(trainer.checkpointer, "folder", None):
            tell_folder(folder)
        limits = trainer.config.training
        here.offer("max_norm", float, lambda: limits.max_norm, self._set_max_norm)
        # A step that is logged is reported at once: a validation and a checkpoint may come after it.
        logger = trainer.metrics_processor.logger
        _after(logger, "log", lambda _, metrics, *__: self._report(self._trainer().step, metrics))
        _after(trainer.checkpointer, "save", lambda saved, *_: self._postponed.done("save") if saved else None)
        if trainer.config.validator.enable:
            validator, due = trainer.validator, trainer.validator.should_validate
            validator.should_validate = lambda step: due(step) or self._postponed.wanted("evaluate")
            _after(validator, "validate", lambda *_: self._postponed.done("evaluate"))

    def _why_no_save(self) -> str | None:
        checkpointer = getattr(self._trainer(), "checkpointer", None)
        if checkpointer is None or (checkpointer.enable and not checkpointer.load_only):
            return None
        return "this Trainer saves no checkpoints: its checkpoint.enable is false, or load_only is true"

    def _save(self) -> Deferred:
        checkpointer = self._trainer().checkpointer
        if self._interval is None:
            self._interval, checkpointer.interval = checkpointer.interval, 1
        return self._postponed.ask("save")

    def _why_no_validation(self) -> str | None:
        trainer = self._trainer()
        if trainer is None or trainer.config.validator.enable:
            return None
        return "this Trainer does not validate: its validator.enable is false"

    def _set_max_norm(self, value: float) -> None:
        if not 0 < value < math.inf:
            raise ValueError(f"max_norm is a number above 0, not {value}")
        self._trainer().config.training.max_norm = value


def _after(holder: Any, name: str, note: Callable[..., object]) -> None:
    """Call a function after each call of an object's method, with its result and its arguments by position."""
    call, noted = getattr(holder, name), guarded(NAME)(note)

    @functools.wraps(call)
    def both(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        noted(result, *args)
        return result

    setattr(holder, name, both)
