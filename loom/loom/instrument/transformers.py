"""Hugging Face's Trainer, and the trainers of TRL, which are built on it: steps, logged metrics, and changes.

A `TrainerCallback` is added to each Trainer by itself under ``loom run``, or by hand with one line:
``Trainer(…, callbacks=[loom.instrument.TrainerCallback()])``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import transformers

from loom.instrument import bootstrap
from loom.instrument.branching import tell_folder
from loom.instrument.postponed import Postponed
from loom.instrument.torch import begin_branch
from loom.instrument.training import HookedTraining, StepSource, guarded, log, training
from loom.threadlet.handlers import Deferred

NAME = "transformers' Trainer"

_INTERVALS = {"logging_steps": "logging_strategy", "eval_steps": "eval_strategy", "save_steps": "save_strategy"}
"""The keys that count steps, each with the argument that has to be ``"steps"``."""

_GENERATION: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "top_p": (float, lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "top_k": (int, lambda value: value >= 0, "0 or more"),
    "min_p": (float | None, lambda value: value is None or 0 <= value <= 1, "from 0 to 1"),
    "repetition_penalty": (float, lambda value: 0 < value < math.inf, "above 0"),
}
"""The settings of generation that change nothing but the completions: type, check, and the check in words."""


def hook(trainer: Any) -> None:
    """Hook ``transformers.trainer``: each Trainer that is made gets a callback, unless it has one."""
    made = trainer.Trainer.__init__

    @functools.wraps(made)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _introduce(self)

    trainer.Trainer.__init__ = make


@guarded(NAME)
def _introduce(trainer: Any) -> None:
    callbacks = trainer.callback_handler.callbacks
    own = next((one for one in callbacks if isinstance(one, TrainerCallback)), None)
    if own is None:
        own = TrainerCallback()
        callbacks.append(own)
    own.trainer = ref(trainer)


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Reports the steps of a Trainer and every metric that it logs, and lets it be changed while it trains.

    Configuration keys are ``learning_rate`` and the others of its optimizer, ``max_grad_norm``,
    ``gradient_accumulation_steps``, ``logging_steps``, ``eval_steps`` and ``save_steps``; of TRL's GRPOTrainer and
    RLOOTrainer also ``reward_weights``, ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty``. It saves and
    evaluates when asked to, and stops after the present step.
    """

    def __init__(self) -> None:
        bootstrap.begin()  # by hand, nothing has hooked the optimizers yet
        self.trainer: Callable[[], Any] = lambda: None
        self._postponed = Postponed()
        self._step: int | None = None  # None outside a training
        self._batches = 0  # of this epoch
        self._resumed = False

    @guarded(NAME)
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        here = training()
        if not here.begin(StepSource.TRANSFORMERS):
            return
        self._step, self._resumed = state.global_step, state.global_step > 0
        here.on_stop(lambda: None)  # `on_step_end` sees it
        here.offer_action("save", lambda: self._postponed.ask("save"), self._why_no_save)
        here.offer_action("evaluate", lambda: self._postponed.ask("evaluate"), self._why_no_evaluation)
        for key, strategy in _INTERVALS.items():
            self._offer_interval(here, args, state, key, strategy)
        if getattr(args, "deepspeed_plugin", None) is None:  # DeepSpeed's engine clips and accumulates itself
            here.offer("max_grad_norm", float, lambda: args.max_grad_norm, _setter(args, "max_grad_norm"))
            if not hasattr(self.trainer(), "reward_weights"):  # which cuts its rollouts by this count
                accumulated = "gradient_accumulation_steps"
                here.offer(accumulated, int, lambda: args.gradient_accumulation_steps, self._accumulate(args))
        if hasattr(self.trainer(), "reward_weights"):
            _offer_rewards(here, self.trainer())
        tell_folder(args.output_dir)
        begin_branch(kwargs.get("optimizer"))

    @guarded(NAME)
    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        self._batches = 0
        if self._resumed and not args.ignore_data_skip and hasattr(train_dataloader, "__len__"):
            self._batches = round(state.epoch % 1 * len(train_dataloader))
        self._resumed = False
        self._postponed.look(state.global_step)

    @guarded(NAME)
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._postponed.settle(state.global_step, "the Trainer went on without it")

    @guarded(NAME)
    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._batches += 1

    @guarded(NAME)
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._step is None:
            return
        self._step = state.global_step
        self._batches += 1
        self._postponed.look(state.global_step)
        self._publish(state)
        if self._postponed.wanted("save"):
            control.should_save = True
        if self._postponed.wanted("evaluate"):
            control.should_evaluate = True
        if training().threadlet.should_stop:
            control.should_training_stop = True

    @guarded(NAME)
    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        metrics = {name: value for name, value in (logs or {}).items() if not isinstance(value, str)}
        if "learning_rate" in metrics and (groups := getattr(optimizer, "param_groups", None)):
            metrics["learning_rate"] = groups[0].get(
                "lr", metrics["learning_rate"]
            )  # the Trainer logs its schedule's
        if self._step is None:
            log(metrics)
        else:
            self._publish(state, metrics)

    @guarded(NAME)
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._postponed.done("save")

    @guarded(NAME)
    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._postponed.done("evaluate")

    @guarded(NAME)
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._step is None:
            return
        self._step = None
        self._postponed.close(state.global_step)
        training().end(
            StepSource.TRANSFORMERS, state.global_step, None if state.epoch is None else int(state.epoch)
        )

    def _publish(self, state: Any, metrics: dict[str, Any] | None = None) -> None:
        here = training()
        if here.owns(StepSource.TRANSFORMERS):
            here.publish(state.global_step, _epoch(state), state.max_steps, metrics)

    def _why_no_save(self) -> str | None:
        return "the Trainer is not training" if self._step is None else None

    def _why_no_evaluation(self) -> str | None:
        trainer = self.trainer()
        if trainer is not None and trainer.eval_dataset is None:
            return "this Trainer has no eval_dataset"
        return self._why_no_save()

    def _offer_interval(self, here: HookedTraining, args: Any, state: Any, key: str, strategy: str) -> None:
        def by_steps() -> bool:
            return str(getattr(getattr(args, strategy), "value", None)) == "steps"

        def write(value: int) -> None:
            if not by_steps():
                raise ValueError(f"the Trainer counts no steps for it: its {strategy} is not 'steps'")
            if value < 1:
                raise ValueError(f"{key} is 1 or more, not {value}")
            setattr(state, key, value)

        here.offer(key, int, lambda: getattr(state, key) if by_steps() else None, write)

    def _accumulate(self, args: Any) -> Callable[[int], Deferred]:
        def write(value: int) -> Deferred:
            if value < 1:
                raise ValueError(f"gradient_accumulation_steps is 1 or more, not {value}")
            apply = partial(setattr, args, "gradient_accumulation_steps", value)
            # The Trainer steps when the number of batches in the epoch is a multiple of it.
            return self._postponed.change("accumulation", lambda: self._batches % value == 0, apply)

        return write


def _epoch(state: Any) -> int | None:
    return None if state.epoch is None else int(state.epoch)


def _setter(holder: Any, key: str) -> Callable[[float], None]:
    def write(value: float) -> None:
        if not 0 <= value < math.inf:
            raise ValueError(f"{key} is a number, 0 or more, not {value}")
        setattr(holder, key, value)

    return write


def _offer_rewards(here: HookedTraining, trainer: Any) -> None:
    """Offer the keys of TRL's trainers that generate: they hold from the next generation on."""
    made: Callable[[], Any] = ref(trainer)

    def weights() -> list[float]:
        return [float(one) for one in made().reward_weights]

    def set_weights(value: list[float]) -> None:
        if len(value) != len(weights()) or not all(map(math.isfinite, value)):
            raise ValueError(f"reward_weights are {len(weights())} numbers, one for each reward, not {value}")
        made().reward_weights = made().reward_weights.new_tensor(value)

    here.offer("reward_weights", list[float], weights, set_weights)
    here.offer("temperature", float, lambda: made().temperature, _refuse_temperature)
    for key, (kind, fits, words) in _GENERATION.items():
        here.offer(key, kind, partial(getattr, trainer, key), partial(_set_generation, made, key, fits, words))


def _set_generation(made: Callable[[], Any], key: str, fits: Callable[[Any], bool], words: str, value: Any) -> None:
    if not fits(value):
        raise ValueError(f"{key} is {words}, not {value}")
    trainer = made()
    for holder in (trainer, *(getattr(trainer, name, None) for name in ("generation_config", "vllm_generation"))):
        if hasattr(holder, key):
            setattr(holder, key, value)
    if isinstance(settings := getattr(trainer, "generation_kwargs", None), dict):
        settings[key] = value


def _refuse_temperature(value: float) -> None:
    raise ValueError(
        "the trainer computes log-probabilities at the temperature that it began with; completions of another one "
        "would not fit them"
    )
