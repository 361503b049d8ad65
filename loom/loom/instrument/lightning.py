"""Lightning: steps and logged metrics of its Trainer, and its changes, validations and checkpoints on command.

Lightning itself adds a `LightningCallback` to each Trainer of a process of ``loom run``, by the entry points
``lightning.pytorch.callbacks_factory`` and ``pytorch_lightning.callbacks_factory``. By hand it is one line:
``Trainer(…, callbacks=[loom.instrument.LightningCallback()])``.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from importlib import import_module
from time import monotonic
from typing import Any
from weakref import ref

from loom.errors import describe_error
from loom.instrument import bootstrap
from loom.instrument.branching import tell_folder
from loom.instrument.postponed import Postponed
from loom.instrument.torch import begin_branch
from loom.instrument.training import HookedTraining, StepSource, guarded, training
from loom.threadlet.handlers import Deferred

NAME = "Lightning"

METRICS_EVERY = 1.0
"""Seconds between two looks at the metrics, which cost as much as a step may, unless loggers get them sooner."""

_VALIDATES = ("val_check_batch", "check_val_every_n_epoch")
"""The Trainer's settings that say after which batches it validates."""

_CLIPS = ("SingleDeviceStrategy", "DDPStrategy")
"""Strategies in which gradients can be clipped even if that was not planned."""


def _package() -> Any:
    """Return the package that the program uses; there are two with the same classes."""
    names = ("lightning.pytorch", "pytorch_lightning")
    return import_module(next((name for name in names if name in sys.modules), names[0]))


class LightningCallback(_package().Callback):  # type: ignore[misc]
    """Reports the steps of a Trainer and every metric that its module logs, and lets it be changed while it trains.

    Configuration keys are ``learning_rate`` and the others of its optimizers, ``gradient_clip_val``,
    ``accumulate_grad_batches`` and ``log_every_n_steps``. It validates and saves when asked to, and stops after the
    present step.
    """

    def __init__(self) -> None:
        bootstrap.begin()  # by hand, nothing has hooked the optimizers yet
        self._trainer: Callable[[], Any] = lambda: None
        self._trains = False
        self._postponed = Postponed()
        self._steps = 0
        self._max_step: int | None = None
        self._looked = -math.inf
        self._seen: dict[str, Any] = {}  # the metrics at the last look
        self._regular: dict[str, Any] | None = None  # the Trainer's settings while a validation is asked for

    @guarded(NAME)
    def on_train_start(self, trainer: Any, module: Any) -> None:
        own = next((one for one in trainer.callbacks if isinstance(one, LightningCallback)), self)
        here = training()
        if own is not self or not here.begin(StepSource.LIGHTNING):
            return
        self._trainer, self._trains, self._steps = ref(trainer), True, trainer.global_step
        most = trainer.max_steps if trainer.max_steps > 0 else _planned(trainer)
        self._max_step = int(most) if math.isfinite(most) else None
        here.on_stop(lambda: None)  # `on_train_batch_end` sees it
        here.offer_action("save", lambda: self._postponed.ask("save"), self._why_no_save)
        here.offer_action("evaluate", lambda: self._postponed.ask("evaluate"), self._why_no_validation)
        self._offer_keys(here, trainer, module)
        tell_folder(_checkpoint_folder(trainer))
        begin_branch(next(iter(trainer.optimizers), None))

    @guarded(NAME)
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self._trains:
            self._restore(trainer)
            self._postponed.settle(trainer.global_step, "the Trainer went on without it")

    @guarded(NAME)
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._trains or trainer.global_step == self._steps:
            return  # gradients are accumulated
        self._steps = trainer.global_step
        self._postponed.look(self._steps)
        due = self._steps % max(1, trainer.log_every_n_steps) == 0 or monotonic() - self._looked > METRICS_EVERY
        self._publish(trainer, self._metrics(trainer) if due else None)
        if self._postponed.wanted("save"):
            self._save(trainer)
        if self._postponed.wanted("evaluate"):
            self._regular = {name: getattr(trainer, name) for name in _VALIDATES}
            trainer.val_check_batch = 1
            if trainer.check_val_every_n_epoch is not None:
                trainer.check_val_every_n_epoch = 1
        if training().threadlet.should_stop:
            trainer.should_stop = True
            # Who commands a stop means it, whatever was the least.
            trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = 0, None

    @guarded(NAME)
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self._trains and not trainer.sanity_checking:
            self._restore(trainer)
            self._postponed.done("evaluate")
            self._publish(trainer, self._metrics(trainer))

    @guarded(NAME)
    def on_train_end(self, trainer: Any, module: Any) -> None:
        if self._trains:
            self._restore(trainer)
            self._publish(trainer, self._metrics(trainer))
            self._trains = False
            self._postponed.close(trainer.global_step)
            training().end(StepSource.LIGHTNING, trainer.global_step, trainer.current_epoch)

    @guarded(NAME)
    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._trains = False
        self._postponed.close(trainer.global_step)

    def _publish(self, trainer: Any, metrics: dict[str, Any] | None) -> None:
        here = training()
        if here.owns(StepSource.LIGHTNING):
            here.publish(trainer.global_step, trainer.current_epoch, self._max_step, metrics)

    def _metrics(self, trainer: Any) -> dict[str, Any]:
        """Return the metrics that were logged since the last look."""
        self._looked = monotonic()
        found = trainer.callback_metrics
        fresh = {name: value for name, value in found.items() if value is not self._seen.get(name)}
        self._seen = dict(found)
        return fresh

    def _why_no_save(self) -> str | None:
        return None if self._trains else "the Trainer is not training"

    def _why_no_validation(self) -> str | None:
        trainer = self._trainer()
        if trainer is not None and not trainer.enable_validation:
            return "this Trainer has no validation: its module has no validation_step, or it has no data"
        if getattr(trainer, "_val_check_time_interval", None) is not None:
            return "this Trainer validates by the clock"
        return self._why_no_save()

    def _restore(self, trainer: Any) -> None:
        for name, value in (self._regular or {}).items():
            setattr(trainer, name, value)
        self._regular = None

    def _save(self, trainer: Any) -> None:
        try:
            trainer.save_checkpoint(
                os.path.join(_checkpoint_folder(trainer), f"loom-step={trainer.global_step}.ckpt")
            )
        except Exception as error:  # noqa: BLE001 - the disk is full, …: the training goes on
            self._postponed.refuse("save", describe_error(error))
            trainer.strategy.barrier("Trainer.save_checkpoint")  # the other ranks wait there
        else:
            self._postponed.done("save")

    def _offer_keys(self, here: HookedTraining, trainer: Any, module: Any) -> None:
        def offer(key: str, kind: Any, least: float) -> None:
            def write(value: Any) -> Deferred | None:
                if value is not None and not least <= value < math.inf:
                    raise ValueError(f"{key} is {least} or more, not {value}")
                if key != "accumulate_grad_batches":
                    setattr(trainer, key, value)
                    return None
                # Lightning steps when the number of batches in the epoch is a multiple of it.
                progress = trainer.fit_loop.epoch_loop.batch_progress.current
                return self._postponed.change(
                    key, lambda: progress.ready % value == 0, lambda: setattr(trainer, key, value)
                )

            here.offer(key, kind, lambda: getattr(trainer, key), write)

        offer("log_every_n_steps", int, 1)
        strategy = type(trainer.strategy).__name__
        if not module.automatic_optimization or strategy == "DeepSpeedStrategy":  # which do both by themselves
            return
        if trainer.gradient_clip_val is not None or strategy in _CLIPS:
            offer("gradient_clip_val", float | None, 0)
        if not any(type(one).__name__ == "GradientAccumulationScheduler" for one in trainer.callbacks):
            offer("accumulate_grad_batches", int, 1)


def _checkpoint_folder(trainer: Any) -> str:
    found = getattr(trainer.checkpoint_callback, "dirpath", None)
    return str(found or os.path.join(trainer.default_root_dir, "checkpoints"))


def _planned(trainer: Any) -> float:
    try:
        return float(trainer.estimated_stepping_batches)
    except Exception:  # noqa: BLE001 - Lightning cannot tell
        return math.inf
